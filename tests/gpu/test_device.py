"""What only a GPU has: streams, captured graphs, other devices, and outputs that 32 bits cannot index."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import upfold
from gpu import missing
from oracle import FORWARD_ALGORITHMS, assert_exact, grid, ours, reference, skip_if_refused
from upfold import cases, native

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
SMOKE = cases.by_tier("smoke")


def test_code_is_of_this_device_or_an_older_one(device):
    """What the kernels were compiled for decides on methods and shared memory, also where the driver translates older code."""
    module, _ = native.load_cuda()
    major, minor = torch.cuda.get_device_capability(device)
    code = module.code_capability(device.index)
    assert 70 <= code <= 10 * major + minor
    architectures = {int(re.match(r"\d+", name).group()) for name in module.info()["architectures"].split()}
    assert code in architectures
    for dtype, least in ((torch.float16, 75), (torch.bfloat16, 80)):
        layer = upfold.ConvTranspose2d(32, 32, 2, 2, device=device, dtype=dtype)
        plan = str(upfold.explain(layer, torch.randn(2, 32, 8, 8, device=device, dtype=dtype)))
        assert ("compiled for it" in plan) == (code < least)


@grid(SMOKE, (torch.float32, torch.bfloat16), FORWARD_ALGORITHMS)
def test_graph_capture(algorithm, case, dtype, device):
    """A captured call replays on new inputs: no allocation, synchronisation or host value is baked in."""
    x, w, b = case.tensors(dtype, device, exact=True)
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ours((x, w, b), case.geometry, algorithm)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours((x, w, b), case.geometry, algorithm)
    for seed in (1, 2):
        fresh = case.tensors(dtype, device, exact=True, seed=seed)
        x.copy_(fresh[0])
        w.copy_(fresh[1])
        graph.replay()
        torch.cuda.synchronize()
        assert_exact(y, reference((x, w, b), case.geometry))


@grid(SMOKE, (torch.float32,), FORWARD_ALGORITHMS)
def test_side_stream(algorithm, case, dtype, device):
    """A call runs on the current stream: it waits for what that stream computed before, and only for that."""
    x, w, b = case.tensors(dtype, device, exact=True)
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    want = reference((x, w, b), case.geometry)
    side = torch.cuda.Stream()
    late = torch.full_like(x, torch.nan)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        y = ours((late, w, b), case.geometry, algorithm)
    torch.cuda.current_stream().wait_stream(side)
    assert_exact(y, want)


@grid(SMOKE, (torch.float32,), FORWARD_ALGORITHMS)
def test_second_gpu(algorithm, case, dtype, device):
    """Operands on another GPU than the current one; the current one stays what it was."""
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    operands = case.tensors(dtype, other, exact=True)
    skip_if_refused(algorithm, operands, case.geometry)
    before = torch.cuda.current_device()
    y = ours(operands, case.geometry, algorithm)
    assert y.device == other
    assert torch.cuda.current_device() == before
    assert_exact(y, reference(operands, case.geometry))


@pytest.mark.parametrize("algorithm", FORWARD_ALGORITHMS)
def test_more_elements_than_32_bits_count(algorithm, device):
    case = cases.find("output-over-2^31")
    needed = 2 * case.bytes(torch.bfloat16)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    x, w, b = case.tensors(torch.bfloat16, device, exact=True)
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    y = ours((x, w, b), case.geometry, algorithm)
    assert y.numel() > 2**31
    # Rows do not overlap at k = s: each band of x gives its own band of y.
    for first in (0, case.in_size[0] // 2, case.in_size[0] - 8):
        want = F.conv_transpose2d(x[:, :, first : first + 8].float(), w.float(), b.float(), stride=2)
        assert torch.equal(y[:, :, 2 * first : 2 * (first + 8)].float(), want)
    assert bool(torch.isfinite(y.sum(dtype=torch.float32)))
