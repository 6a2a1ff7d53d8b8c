"""The sum of every channel, which is the gradient of a bias, on a GPU: exact, rounded once, the same in every run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import upfold
from gpu import assert_repeats_under_load, missing
from upfold import channel_sums as module
from upfold.channel_sums import channel_sums

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
parametrize_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SHAPES = {
    "one element": (1, 1, 1),
    "one pixel of many channels": (64, 700, 1, 1),
    "short signals": (3, 5, 7),
    "odd planes": (5, 21, 13, 37),
    "planes of whole vectors": (4, 16, 32, 64),
    "one channel in many parts": (2, 1, 512, 512),
    "three channels": (9, 3, 64, 64),
    "many channels of small maps": (2, 1500, 4, 4),
    "volumes": (2, 33, 6, 10, 12),
    "more channels than a block has threads": (3, 2100, 3, 5),
    "long signals": (2, 6, 120001),
}
parametrize_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
LAYOUTS = ["contiguous", "channels last", "slice of channels", "slice of samples", "odd address"]
parametrize_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in memory of that layout."""
    n, c, *size = values.shape
    if layout == "channels last":
        return values.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "slice of channels":
        whole = values.new_full((n, c + 3, *size), float("nan"))
        return whole[:, 2 : 2 + c].copy_(values)
    if layout == "slice of samples":
        whole = values.new_full((2 * n, c, *size), float("nan"))
        return whole[::2].copy_(values)
    if layout == "odd address":
        whole = values.new_full((values.numel() + 9,), float("nan"))
        return whole[1 : 1 + values.numel()].view(values.shape).copy_(values)
    return values


def sparse(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of -1, 0 and 1, so few in every channel that each type holds all sums."""
    generator = torch.Generator().manual_seed(0)
    count = torch.Size(shape).numel() // shape[1]
    chosen = torch.rand(shape, generator=generator) < 64 / max(count, 64)
    return (torch.randint(-1, 2, shape, generator=generator) * chosen).to(dtype).cuda()


def truth(g: torch.Tensor) -> torch.Tensor:
    return g.double().cpu().sum([axis for axis in range(g.dim()) if axis != 1])


@parametrize_layouts
@parametrize_shapes
@parametrize_dtypes
def test_sums_are_exact(dtype, shape, layout):
    g = laid_out(sparse(shape, dtype), layout)
    result = channel_sums(g)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert torch.equal(result.double().cpu(), truth(g))


@parametrize_layouts
@parametrize_shapes
@parametrize_dtypes
def test_sums_are_rounded_once(dtype, shape, layout):
    g = laid_out(torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).cuda(), layout)
    expected, scale = truth(g), truth(g.abs())
    oracle = (expected.float().to(dtype).double() - expected).abs() / scale
    error = (channel_sums(g).double().cpu() - expected).abs() / scale
    # Beside one rounding of the result: float32 sums, whose error grows with the square root of their lengths at the most.
    allowed = 2 * oracle.max() + 2 * torch.finfo(torch.float32).eps
    assert error.max() <= allowed


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "odd address"])
@parametrize_dtypes
def test_a_kernel_of_ours_ran(dtype, layout):
    g = laid_out(sparse((4, 24, 9, 15), dtype), layout)
    address = g.data_ptr() | 16
    assert module._plan(g.shape, g.stride(), dtype, g.get_device(), address & -address) is not None


@pytest.mark.parametrize("name", ["expanded", "every second pixel", "float64", "complex64"])
def test_what_no_kernel_sums_is_torchs(name):
    values = sparse((3, 5, 6, 8), torch.float32)
    g = {
        "expanded": lambda: values[:, :, :1, :1].expand(3, 5, 6, 8),
        "every second pixel": lambda: values[..., ::2],
        "float64": values.double,
        "complex64": lambda: values.to(torch.complex64),
    }[name]()
    assert torch.equal(channel_sums(g), g.sum((0, 2, 3)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_stays_in_its_channel(layout, value):
    values = sparse((3, 10, 7, 11), torch.bfloat16)
    values[1, 4, 6, 10] = value
    result = channel_sums(laid_out(values, layout))
    expected = truth(values)
    assert torch.equal(result.double().cpu().nan_to_num(123.0, 456.0), expected.nan_to_num(123.0, 456.0))
    assert not result[4].isfinite()


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "odd address"])
@parametrize_dtypes
def test_the_same_bits_under_load(device, dtype, layout):
    g = laid_out(torch.randn(16, 48, 60, 64).to(dtype).cuda(), layout)
    assert_repeats_under_load(lambda: channel_sums(g), device, "sums of channels changed from run to run")


def test_more_elements_than_32_bits_count():
    g = torch.ones(3, 8, 1 << 14, 6000, dtype=torch.bfloat16, device="cuda")
    assert g.numel() > 2**31
    g[:, 5] = -1
    expected = torch.full((8,), 3.0 * (1 << 14) * 6000).bfloat16()
    expected[5] *= -1
    assert torch.equal(channel_sums(g).cpu(), expected)


def test_a_backward_sums_by_the_kernel(monkeypatch):
    calls = []
    plan = module._plan
    monkeypatch.setattr(module, "_plan", lambda *key: calls.append(key) or plan(*key))
    x, w, b = (torch.randn(shape, device="cuda") for shape in ((2, 6, 5, 7), (6, 4, 2, 2), (4,)))
    b.requires_grad_()
    g = torch.randn(2, 4, 10, 14, device="cuda")
    upfold.conv_transpose2d(x, w, b, stride=2).backward(g)
    assert len(calls) == 1
    expected = b.detach().clone().requires_grad_()
    F.conv_transpose2d(x, w, expected, stride=2).backward(g)
    assert torch.allclose(b.grad, expected.grad, rtol=1e-5, atol=1e-5)


def test_a_captured_backward_reads_new_gradients():
    g = torch.randn(4, 16, 32, 64, device="cuda")
    channel_sums(g)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = channel_sums(g)
    g.copy_(torch.randn_like(g))
    graph.replay()
    assert torch.equal(result, channel_sums(g))


def test_a_side_stream():
    g = torch.randn(4, 16, 256, 256, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        g.fill_(1.0)
        result = channel_sums(g)
    stream.synchronize()
    assert torch.equal(result, torch.full_like(result, 4.0 * 256 * 256))
