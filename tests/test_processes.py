"""Threads and processes: workers, forks, many callers at once, and the interpreter released meanwhile."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import upfold
from oracle import GENERAL_ALGORITHMS, ours, torchs
from small_layer import ARGUMENTS, layer, operands
from upfold import cases, native
from upfold.execute import describe
from upfold.geometry import make_geometry


class Decode(torch.utils.data.Dataset):
    """A data set whose items are made by the operators, in the worker."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, w, b = operands("cpu")
        columns = upfold.unfold(x, 3, 1, 1, 2)
        return index, layer(x + index, w, b), upfold.fold(columns, (5, 6), 3, 1, 1, 2)


def items(threads, **options):
    torch.set_num_threads(threads)
    return list(torch.utils.data.DataLoader(Decode(), batch_size=2, **options))


def test_forked_workers():
    """Child processes run the operators after the parent has used its thread pool."""
    want = items(2)
    got = items(2, num_workers=2, multiprocessing_context="fork", timeout=60)
    for one, other in zip(got, want, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b)


FORKED = """
import os, sys, torch, upfold
torch.set_num_threads(2)
x, w = torch.randn(4, 8, 32, 32), torch.randn(8, 8, 4, 4)
want = upfold.conv_transpose2d(x, w, stride=2, algorithm="direct")
columns = upfold.unfold(x, 3)
child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    y, again = upfold.conv_transpose2d(x, w, stride=2, algorithm="direct"), upfold.unfold(x, 3)
    torch.set_num_threads(1)  # for torch.equal, whose own thread pool does not outlive a fork
    os._exit(0 if torch.equal(y, want) and torch.equal(again, columns) else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 99)
"""


def test_bare_fork_with_threads():
    """A forked child that keeps two threads: an OpenMP pool would hang there."""
    import os
    import subprocess

    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    done = subprocess.run([sys.executable, "-c", FORKED], timeout=90, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_many_threads_at_once(device):
    """Eight Python threads share plans and kernels; each gets its own numbers."""
    sample = [cases.find(name) for name in ("k2s2", "k3s2p1op1", "depthwise-k4s2p1", "3d-mixed", "1d-k16s8p4")]
    prepared = [(case, case.tensors(torch.float64, device, exact=True)) for case in sample]
    want = [torchs(tensors, case.geometry) for case, tensors in prepared]
    failures = []

    def work(offset):
        for turn in range(30):
            index = (turn + offset) % len(prepared)
            case, tensors = prepared[index]
            for algorithm in GENERAL_ALGORITHMS:
                if not torch.equal(ours(tensors, case.geometry, algorithm), want[index]):
                    failures.append((case.name, algorithm))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def released(call):
    """Whether another Python thread gets to run while `call` does. The interpreter hands over of its own accord only after ten
    seconds here, so a call that keeps it to its end is followed, not interrupted, by the other thread.
    """
    gate, done, seen = threading.Lock(), [], []
    gate.acquire()

    def other():
        with gate:
            seen.append(not done)

    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)
    try:
        gate.release()
        call()
        done.append(True)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    return seen == [True]


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_release_the_interpreter(threads):
    x, w, y = torch.randn(4, 64, 64, 64), torch.randn(64, 64, 4, 4), torch.empty(4, 64, 130, 130)
    torch.set_num_threads(threads)
    problem = describe(x, w, None, (2, 0, 0, 1, 1))
    module = native.cpu()
    workspace = torch.empty(max(1, module.direct_workspace_bytes(problem.cpu, threads)), dtype=torch.uint8)
    pointers = x.data_ptr(), w.data_ptr(), 0, y.data_ptr(), workspace.data_ptr()
    native_problem = problem.cpu
    assert not released(lambda: sum(range(10**6)))
    assert released(lambda: module.direct(native_problem, *pointers, threads))


@pytest.mark.parametrize("name", GENERAL_ALGORITHMS)
def test_a_call_leaves_the_thread_count_alone(name):
    x, w, b = operands("cpu")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        upfold.conv_transpose2d(x, w, b, **ARGUMENTS, algorithm=name)
        assert torch.get_num_threads() == threads


def test_random_state_is_left_alone(device):
    before = torch.get_rng_state()
    layer(*operands(device))
    assert torch.equal(before, torch.get_rng_state())


def test_geometry_is_cached_and_checked_once():
    assert make_geometry(2, 2, 1, 1, 1, 1) == make_geometry(2, (2, 2), (1,), [1, 1], 1, (1, 1))
