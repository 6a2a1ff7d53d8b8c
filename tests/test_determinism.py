"""The same gradients, bit for bit, on every run and with no flag; and torch's deterministic mode finds nothing to complain of."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

import upfold
from oracle import FORWARD_ALGORITHMS, dtype_name, ours, skip_if_refused
from small_layer import SMOKE, skip_half_where_torch_lacks_it
from upfold import cases

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=dtype_name)


def leaves_of(case, dtype, device):
    skip_half_where_torch_lacks_it(dtype, device)
    return tuple(t if t is None else t.requires_grad_() for t in case.tensors(dtype, device))


def step(leaves, geometry, algorithm, activation=None):
    """Results and gradients of a step, a gradient penalty included."""
    known = [t for t in leaves if t is not None]
    y = ours(leaves, geometry, algorithm, activation=activation)
    first = torch.autograd.grad(y.square().sum(), known, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), known)
    return [t.detach() for t in (y, *first, *second)]


@SMOKE
@DTYPES
@pytest.mark.parametrize("algorithm", [None, *FORWARD_ALGORITHMS])
def test_a_step_repeats_bit_for_bit(algorithm, dtype, case, device):
    leaves = leaves_of(case, dtype, device)
    if algorithm is not None:
        skip_if_refused(algorithm, leaves, case.geometry)
    want = step(leaves, case.geometry, algorithm, "tanh")
    assert all(bool(t.isfinite().all()) for t in want) or dtype == torch.float16
    held = []
    for size in (1, 1000, 100_000):
        held.append(torch.empty(size, device=device))  # other addresses
        for one, other in zip(step(leaves, case.geometry, algorithm, "tanh"), want, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@SMOKE
@DTYPES
@pytest.mark.parametrize("algorithm", [None, *FORWARD_ALGORITHMS])
def test_deterministic_mode_never_complains(algorithm, dtype, case, device, deterministic):
    """Nor does it change a bit: no kernel reads what it did not write."""
    leaves = leaves_of(case, dtype, device)
    if algorithm is not None:
        skip_if_refused(algorithm, leaves, case.geometry)
    found = step(leaves, case.geometry, algorithm)
    torch.use_deterministic_algorithms(False)
    for one, other in zip(found, step(leaves, case.geometry, algorithm), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_fold_and_unfold_in_deterministic_mode(device, deterministic):
    image = torch.randn(2, 3, 8, 9, device=device, requires_grad=True)
    columns = upfold.unfold(image, 3, 1, 1, 2)
    upfold.fold(columns, (8, 9), 3, 1, 1, 2).square().sum().backward()
    first, image.grad = image.grad, None
    upfold.fold(upfold.unfold(image, 3, 1, 1, 2), (8, 9), 3, 1, 1, 2).square().sum().backward()
    assert torch.equal(image.grad, first)


def test_deterministic_mode_would_be_noticed(device, deterministic):
    """What the tests above rely on: torch raises for its own operators without a repeatable way, and fills fresh memory."""
    assert torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.randn(3, 3, device=device).put_(torch.tensor([0, 0], device=device), torch.ones(2, device=device))


PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from test_determinism import digest
torch.set_num_threads(int(sys.argv[2]))
print(digest(sys.argv[3]))
"""


def digest(device):
    """Of every bit of a step over some layers, in this process."""
    bits = hashlib.sha256()
    for name in ("k2s2", "k4s2p1", "k3s2p1op1", "depthwise-k4s2p1", "3d-k2s2"):
        case = cases.find(name)
        for t in step(leaves_of(case, torch.float32, torch.device(device)), case.geometry, None, "relu"):
            bits.update(t.cpu().numpy().tobytes())
    return bits.hexdigest()


def test_processes_agree(device):
    """Fresh processes, at once and with two threads each, get the bits that this one gets."""
    torch.set_num_threads(2)
    want = digest(str(device))
    command = [sys.executable, "-c", PROCESS, str(__file__).rpartition("/")[0], "2", str(device)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert out.strip() == want, err
