"""A backward that copies the gradient once with its channels innermost, on a GPU: the copy, and both gradients from it."""

from __future__ import annotations

import math

import pytest
import torch

import test_exact
import upfold
from gpu import assert_repeats_under_load, missing
from oracle import assert_exact, dtype_name, geometry_arguments, ours
from upfold import backward, cases, execute, native
from upfold.problem import DTYPE_CODES, pad_shape, pad_strides

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)
CASES = cases.by_tier("smoke", "edge", "seeds", "decoders", "irregular")


@pytest.fixture
def always(monkeypatch):
    """Turn every gradient that can be turned; the launches that this gave are listed."""
    turned, planned = [], backward._planned
    monkeypatch.setattr(backward, "way_of_backward", lambda apart, copied, *rest: "turned" if copied else "apart")
    monkeypatch.setattr(backward, "_planned", lambda *key: turned.append(planned(*key)) or turned[-1])
    execute.forget()
    yield turned
    execute.forget()


SHAPES = {
    "maps": (3, 16, 5, 7),
    "whole vectors": (2, 64, 8, 16),
    "many pixels": (33, 72, 64, 64),
    "many channels": (2, 520, 3, 9),
    "signals": (5, 24, 1001),
    "volumes": (2, 40, 3, 4, 6),
}


@pytest.mark.parametrize("layout", ["contiguous", "slice", "odd address"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_copy(shape, dtype, layout, device):
    values = torch.randn(shape, device=device).to(dtype)
    if layout == "slice":
        values = torch.cat([values, values], 1)[:, : shape[1]]
    elif layout == "odd address":
        values = torch.cat([values.new_zeros(1), values.flatten()])[1:].view(shape)
    module, _ = native.load_cuda()
    call = module.ToPixelsCall(device.index, DTYPE_CODES[dtype], pad_shape(shape), pad_strides(values.stride(), shape))
    assert call.fits
    guard = 64
    store = torch.full((values.numel() + 2 * guard,), float("nan"), dtype=dtype, device=device)
    call.run(values.data_ptr(), store[guard:].data_ptr(), torch.cuda.current_stream().cuda_stream)
    assert torch.equal(store[guard:-guard].view(shape[0], *shape[2:], shape[1]), values.movedim(1, -1))
    assert store[:guard].isnan().all()
    assert store[-guard:].isnan().all()


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_from_the_copy_are_exact(case, dtype, device, always):
    case = case.scaled(0.02)
    operands, grad, want = test_exact._backward_case(case, False)
    leaves = [test_exact._cast(tensor, dtype, device).requires_grad_() for tensor in operands]
    grad = test_exact._cast(grad, dtype, device)
    got = torch.autograd.grad(ours(tuple(leaves), case.geometry), leaves, grad)
    for name, one, other in zip(("input", "weight", "bias"), got, want, strict=True):
        assert_exact(one, other, name)
    assert len(always) == 1
    can = case.out_channels % 8 == 0 and math.prod(case.out_size) > 1
    assert isinstance(always[0], backward.Turned) == can, "whole vectors of channels can be turned"


def big(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Operands of a layer whose gradients run from a copy by themselves (a seed of the published cases)."""
    case = cases.find("seed3-wide-kernel")
    x, w, _ = case.tensors(dtype, device)
    g = torch.randn(case.batch, case.out_channels, *case.out_size, device=device).to(dtype)
    return x, w, g, tuple(geometry_arguments(case.geometry).values())


def both_of(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, arguments) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = tuple(x.shape[2:]), tuple(w.shape[2:])
    x_grad, w_grad, bias_grad = backward.gradients(g, (x, w), sizes, (True, True, False), arguments)
    assert bias_grad is None
    return x_grad, w_grad


def apart(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, arguments) -> tuple[torch.Tensor, torch.Tensor]:
    x_grad = execute.conv(g, w, tuple(x.shape[2:]), arguments)
    return x_grad, execute.conv_transpose_weight(x, g, tuple(w.shape[2:]), arguments)


def test_a_large_layer_turns_by_itself(device):
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("tiles that read channels innermost need compute capability 9.0")
    x, w, g, arguments = big(torch.bfloat16, device)
    assert backward.together(g, x, w, arguments).way == "turned"
    both, each = both_of(g, x, w, arguments), apart(g, x, w, arguments)
    for one, other in zip(both, each, strict=True):
        assert one.stride() == other.stride()
        scale = other.double().abs().max()
        assert (one.double() - other.double()).abs().max() <= scale * 2**-7
    layer = upfold.ConvTranspose2d(64, 64, (3, 7), bias=False, device=device, dtype=torch.bfloat16)
    text = str(upfold.explain(layer, x, gradients=True))
    assert "grad_input of both" in text
    assert "grad_weight of both" in text


@pytest.mark.parametrize("name", ["by name", "under use", "float32", "channels_last", "one gradient"])
def test_what_stays_apart(name, device, always):
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    x = torch.randn(2, 16, 6, 8, device=device, dtype=dtype, requires_grad=name != "one gradient")
    w = torch.randn(16, 32, 4, 4, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(2, 32, 12, 16, device=device, dtype=dtype)
    if name == "channels_last":
        g = g.to(memory_format=torch.channels_last)
    algorithm = "gemm" if name == "by name" else None
    with upfold.use(algorithm="gemm" if name == "under use" else "auto"):
        upfold.conv_transpose2d(x, w, stride=2, padding=1, algorithm=algorithm).backward(g)
    assert not any(isinstance(found, backward.Turned) for found in always)


def test_the_same_bits_under_load(device, always):
    x, w, g, arguments = big(torch.bfloat16, device)
    for number in range(2):
        assert_repeats_under_load(
            lambda number=number: both_of(g, x, w, arguments)[number], device, "a gradient changed from run to run"
        )


def test_a_captured_backward_reads_new_gradients(device, always):
    x = torch.randn(4, 16, 12, 16, device=device, dtype=torch.bfloat16)
    w = torch.randn(16, 32, 4, 4, device=device, dtype=torch.bfloat16)
    g = torch.randn(4, 32, 24, 32, device=device, dtype=torch.bfloat16)
    arguments = ((2, 2), (1, 1), (0, 0), 1, (1, 1))
    both_of(g, x, w, arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_of(g, x, w, arguments)
    g.copy_(torch.randn_like(g))
    graph.replay()
    for one, other in zip(captured, both_of(g, x, w, arguments), strict=True):
        assert torch.equal(one, other)


def test_a_nan_goes_where_it_belongs(device, always):
    """As apart: to inputs that the element reaches, and to its output channel's weights."""
    x = torch.ones(2, 16, 6, 8, device=device, dtype=torch.bfloat16)
    w = torch.ones(16, 32, 2, 2, device=device, dtype=torch.bfloat16)
    g = torch.ones(2, 32, 12, 16, device=device, dtype=torch.bfloat16)
    g[1, 5, 7, 9] = float("nan")
    x_grad, w_grad = both_of(g, x, w, ((2, 2), (0, 0), (0, 0), 1, (1, 1)))
    expected = torch.zeros_like(x_grad, dtype=torch.bool)
    expected[1, :, 3, 4] = True
    assert torch.equal(x_grad.isnan(), expected)
    expected = torch.zeros_like(w_grad, dtype=torch.bool)
    expected[:, 5, 1, 1] = True
    assert torch.equal(w_grad.isnan(), expected)


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values that begin so many elements behind an aligned address."""
    room = t.new_empty(t.numel() + elements)
    return room[elements:].view(t.shape).copy_(t)


@pytest.mark.parametrize("turns", [True, False])
def test_a_plan_is_for_the_alignment_of_each_operand(turns, device, request):
    """Two calls whose addresses have the same low bits together, of other operands."""
    if turns:
        request.getfixturevalue("always")
    generator = torch.Generator(device).manual_seed(6)
    shapes = (4, 32, 24, 32), (4, 16, 12, 16), (16, 32, 4, 4)
    g, x, w = (torch.randint(-1, 2, s, generator=generator, device=device).bfloat16() for s in shapes)
    arguments = ((2, 2), (1, 1), (0, 0), 1, (1, 1))
    want = both_of(g, x, w, arguments)
    for moved in ((0, 1, 0), (0, 0, 1), (1, 0, 0)):
        got = both_of(*(shifted(t, elements) for t, elements in zip((g, x, w), moved)), arguments)
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other), moved
