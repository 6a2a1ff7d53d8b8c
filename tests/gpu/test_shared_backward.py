"""A backward whose matrix products take both gradients from one matrix of columns, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

import test_exact
import upfold
from gpu import missing
from oracle import assert_exact, dtype_name, geometry_arguments, ours
from upfold import backward, cases, execute
from upfold.dispatch import use_config

reason = missing()
if reason is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
CASES = cases.by_tier("smoke", "edge", "seeds", "decoders", "irregular")
ARGUMENTS = (2, 2), (1, 1), (0, 0), 1, (1, 1)


@pytest.fixture
def always(monkeypatch):
    """Share the columns of every gradient that can be; the launches that this gave are listed."""
    shared, planned = [], backward._planned
    monkeypatch.setattr(backward, "way_of_backward", lambda apart, turned, can_share, *rest: "shared" if can_share else "apart")
    monkeypatch.setattr(backward, "_planned", lambda *key: shared.append(planned(*key)) or shared[-1])
    execute.forget()
    yield shared
    execute.forget()


def operands(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """g, x and w of a layer whose columns fit a workspace whole."""
    shapes = (6, 48, 10, 12), (6, 40, 5, 6), (40, 48, 4, 4)
    generator = torch.Generator(device).manual_seed(5)
    return [torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes]


def both_of(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, arguments=ARGUMENTS) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = tuple(x.shape[2:]), tuple(w.shape[2:])
    return backward.gradients(g, (x, w), sizes, (True, True, False), arguments)[:2]


@DTYPES
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_from_shared_columns_are_exact(case, dtype, device, always):
    case = case.scaled(0.02)
    operands, grad, want = test_exact._backward_case(case, False)
    leaves = [test_exact._cast(tensor, dtype, device).requires_grad_() for tensor in operands]
    got = torch.autograd.grad(ours(tuple(leaves), case.geometry), leaves, test_exact._cast(grad, dtype, device))
    for name, one, other in zip(("input", "weight", "bias"), got, want, strict=True):
        assert_exact(one, other, name)
    assert len(always) == 1


@DTYPES
def test_the_same_bits_as_apart(dtype, device, always):
    g, x, w = operands(dtype, device)
    both = both_of(g, x, w)
    assert isinstance(always[0], backward.Shared)
    with use_config(2):  # columns of every tap
        x_grad = execute.conv(g, w, tuple(x.shape[2:]), ARGUMENTS, "gemm")
        w_grad = execute.conv_transpose_weight(x, g, tuple(w.shape[2:]), ARGUMENTS, "gemm")
    for one, other in zip(both, (x_grad, w_grad), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@DTYPES
def test_nothing_is_written_round_the_results_and_the_workspace(dtype, device, always):
    g, x, w = operands(dtype, device)
    both = both_of(g, x, w)
    call, guard = always[0].call, 256
    stores = [torch.full((t.numel() + 2 * guard,), math.nan, dtype=dtype, device=device) for t in both]
    scratch = torch.full((-(-call.workspace_bytes // 4) + 2 * guard,), math.nan, device=device)
    addresses = [t.data_ptr() for t in (x, w, g, *(store[guard:] for store in stores), scratch[guard:])]
    call.run(*addresses, torch.cuda.current_stream(device).cuda_stream)
    torch.cuda.synchronize(device)
    for store, expected in zip(stores, both, strict=True):
        assert torch.equal(store[guard:-guard].view(expected.shape), expected)
        assert store[:guard].isnan().all()
        assert store[-guard:].isnan().all()
    assert scratch[:guard].isnan().all()
    assert scratch[guard + -(-call.workspace_bytes // 4) :].isnan().all()


def test_a_captured_backward_reads_new_gradients(device, always):
    g, x, w = operands(torch.bfloat16, device)
    both_of(g, x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_of(g, x, w)
    assert isinstance(always[0], backward.Shared)
    g.copy_(torch.randn_like(g))
    graph.replay()
    for one, other in zip(captured, both_of(g, x, w), strict=True):
        assert torch.equal(one, other)


def test_long_strides_share_by_themselves(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("predictions were fitted on compute capability 9.0")
    case = cases.find("fcn32s-21-21-k64@16")
    x, w, _ = case.tensors(torch.bfloat16, device)
    g = torch.randn(case.batch, case.out_channels, *case.out_size, device=device).bfloat16()
    arguments = tuple(geometry_arguments(case.geometry).values())
    found = backward.together(g, x, w, arguments)
    assert found.way == "shared"
    text = str(
        upfold.explain(upfold.ConvTranspose2d(21, 21, 64, 32, bias=False, device=device, dtype=x.dtype), x, gradients=True)
    )
    assert "grad_weight of both, from one matrix of columns" in text


@pytest.mark.parametrize("name", ["by name", "under use", "one gradient", "several blocks"])
def test_what_stays_apart(name, device, always):
    g, x, w = operands(torch.float32, device)
    x.requires_grad_(name != "one gradient")
    w.requires_grad_()
    with upfold.use(algorithm="gemm" if name == "under use" else "auto", workspace_mb=0.5 if name == "several blocks" else None):
        y = upfold.conv_transpose2d(x, w, stride=2, padding=1, algorithm="gemm" if name == "by name" else None)
        y.backward(g)
    assert not any(isinstance(found, backward.Shared) for found in always)
