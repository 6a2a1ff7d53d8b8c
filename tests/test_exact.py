"""Indexing first: sparse integers, whose sums have no rounding error, must come out equal, bit for bit, in every dtype.

One wrong tap, phase or border changes an integer, and no tolerance can hide it.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch

import upfold
from oracle import (
    DTYPES,
    FORWARD_ALGORITHMS,
    assert_exact,
    dtype_name,
    exact_like,
    geometry_arguments,
    grid,
    ours,
    reference,
    reference_gradients,
    skip_if_refused,
)
from upfold import cases

# Billions of operations of a case on the CPU: enough for several tiles and a remainder on every axis.
LIMITS = {dtype: 0.003 if dtype.is_complex else 0.01 for dtype in DTYPES} | {torch.float32: 0.03}
BACKWARD_LIMITS = {dtype: limit / 3 for dtype, limit in LIMITS.items()}


@lru_cache(maxsize=2)
def _forward_case(case, is_complex):
    operands = case.tensors(torch.complex128 if is_complex else torch.float64, exact=True)
    return operands, reference(operands, case.geometry)


def _cast(tensor, dtype, device):
    return None if tensor is None else tensor.to(device=device, dtype=dtype)


@grid(cases.CASES, DTYPES, FORWARD_ALGORITHMS)
def test_forward(algorithm, case, dtype, device):
    case = case.scaled(LIMITS[dtype])
    operands, want = _forward_case(case, dtype.is_complex)
    operands = tuple(_cast(tensor, dtype, device) for tensor in operands)
    skip_if_refused(algorithm, operands, case.geometry)
    assert_exact(ours(operands, case.geometry, algorithm), want)


@lru_cache(maxsize=2)
def _backward_case(case, is_complex):
    """Operands whose three gradients are exact: each reduction is as sparse as its length asks."""
    dtype = torch.complex128 if is_complex else torch.float64
    x_shape = (case.batch, case.in_channels, *case.in_size)
    w_shape = (case.in_channels, case.out_channels // case.groups, *case.kernel_size)
    y_shape = (case.batch, case.out_channels, *case.out_size)
    pixels = case.batch * math.prod(case.out_size)
    terms = math.prod(case.kernel_size) * max(case.in_channels, case.out_channels) // case.groups
    x = exact_like(x_shape, max(terms, case.batch * math.prod(case.in_size)), dtype, seed=1)
    w = exact_like(w_shape, terms, dtype, seed=2)
    grad = exact_like(y_shape, max(terms, pixels), dtype, seed=3)
    b = torch.zeros(case.out_channels, dtype=dtype)
    return (x, w, b), grad, reference_gradients((x, w, b), grad, case.geometry)


@grid(cases.by_tier("smoke", "edge", "seeds", "irregular"), DTYPES)
def test_gradients(algorithm, case, dtype, device):
    _check_gradients(algorithm, case, dtype, device)


@grid(cases.by_tier("decoders"), (torch.float32, torch.bfloat16))
def test_gradients_of_decoders(algorithm, case, dtype, device):
    _check_gradients(algorithm, case, dtype, device)


def _check_gradients(algorithm, case, dtype, device):
    case = case.scaled(BACKWARD_LIMITS[dtype])
    operands, grad, want = _backward_case(case, dtype.is_complex)
    leaves = tuple(_cast(tensor, dtype, device).requires_grad_() for tensor in operands)
    skip_if_refused(algorithm, leaves, case.geometry)
    y = ours(leaves, case.geometry, algorithm)
    got = torch.autograd.grad(y, leaves, _cast(grad, dtype, device))
    for what, one, other in zip(("x.grad", "w.grad", "bias.grad"), got, want, strict=True):
        assert_exact(one, other, what)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("case", cases.by_tier("smoke"), ids=lambda case: case.name)
def test_automatic_choice(case, dtype, device):
    """What `auto` takes is as exact as what is asked for by name, with a bias and without."""
    for bias in (True, False):
        operands = case.tensors(dtype, device, exact=True, bias=bias)
        assert_exact(ours(operands, case.geometry), reference(operands, case.geometry))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("case", cases.by_tier("smoke"), ids=lambda case: case.name)
def test_torch_peer(case, dtype, device):
    operands = case.tensors(dtype, device, exact=True)
    skip_if_refused("torch", operands, case.geometry)
    if dtype == torch.float16 and device.type == "cpu":
        try:
            torch.nn.functional.conv_transpose1d(torch.ones(1, 1, 1).half(), torch.ones(1, 1, 1).half())
        except RuntimeError as error:
            pytest.skip(f"this torch has no such operator: {error}")
    assert_exact(ours(operands, case.geometry, "torch"), reference(operands, case.geometry))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=dtype_name)
@pytest.mark.parametrize("case", cases.by_tier("smoke", "edge"), ids=lambda case: case.name)
def test_gradients_of_torch_peer(case, dtype, device):
    operands, grad, want = _backward_case(case.scaled(0.001), dtype.is_complex)
    leaves = tuple(_cast(tensor, dtype, device).requires_grad_() for tensor in operands)
    y = ours(leaves, case.geometry, "torch")
    for what, one, other in zip(
        ("x.grad", "w.grad", "bias.grad"), torch.autograd.grad(y, leaves, _cast(grad, dtype, device)), want, strict=True
    ):
        assert_exact(one, other, what)


@grid(cases.by_tier("smoke", "edge"), (torch.float32, torch.bfloat16))
def test_channels_last(algorithm, case, dtype, device):
    x, w, b = case.scaled(0.02).tensors(dtype, device, exact=True)
    if case.ndim == 1:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        x = x.contiguous(memory_format=torch.channels_last if case.ndim == 2 else torch.channels_last_3d)
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    want = reference((x, w, b), case.geometry)
    assert_exact(ours((x, w, b), case.geometry, algorithm), want)
    if case.ndim > 1:
        w = w.contiguous(memory_format=torch.channels_last if case.ndim == 2 else torch.channels_last_3d)
        assert_exact(ours((x, w, b), case.geometry, algorithm), want)


@grid(cases.by_tier("smoke", "edge"), (torch.float32, torch.bfloat16))
def test_gradients_in_channels_last(algorithm, case, dtype, device):
    if case.ndim == 1:
        pytest.skip("a memory format of two and three axes")
    operands, grad, want = _backward_case(case.scaled(0.003), is_complex=False)
    last = torch.channels_last if case.ndim == 2 else torch.channels_last_3d
    x, w, b = (_cast(tensor, dtype, device) for tensor in operands)
    leaves = x.contiguous(memory_format=last).requires_grad_(), w.requires_grad_()
    skip_if_refused(algorithm, (*leaves, b), case.geometry)
    y = ours((*leaves, b), case.geometry, algorithm)
    got = torch.autograd.grad(y, leaves, _cast(grad, dtype, device).contiguous(memory_format=last))
    for what, one, other in zip(("x.grad", "w.grad"), got, want):
        assert_exact(one, other, what)


@grid(cases.by_tier("smoke"), (torch.float32,))
def test_unbatched(algorithm, case, dtype, device):
    x, w, b = case.tensors(dtype, device, exact=True)
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    want = reference((x[:1], w, b), case.geometry)[0]
    assert_exact(ours((x[0], w, b), case.geometry, algorithm), want)


@grid(cases.by_tier("smoke"), DTYPES)
def test_empty_batch(algorithm, case, dtype, device):
    x, w, b = case.tensors(dtype, device, exact=True)
    x = x[:0].requires_grad_()
    w.requires_grad_()
    skip_if_refused(algorithm, (x, w, b), case.geometry)
    y = ours((x, w, b), case.geometry, algorithm)
    assert tuple(y.shape) == (0, case.out_channels, *case.out_size)
    grad_x, grad_w = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert grad_x.shape == x.shape
    assert not grad_w.any()
    assert grad_w.shape == w.shape


@grid(cases.by_tier("smoke", "edge"), (torch.float32, torch.bfloat16))
def test_small_workspace(algorithm, case, dtype, device):
    """Under a small cap the work is cut into pieces that recompute their borders; the result stays the same."""
    case = case.scaled(0.02)
    operands, want = _forward_case(case, is_complex=False)
    operands = tuple(_cast(tensor, dtype, device) for tensor in operands)
    with upfold.use(workspace_mb=1):
        skip_if_refused(algorithm, operands, case.geometry)
        assert_exact(ours(operands, case.geometry, algorithm), want)


@grid(tuple(cases.find(name) for name in ("cyclegan-256-128@64", "nnunet3d-64-32@64", "encodec-256-128@600")), (torch.float32,))
def test_many_pieces(algorithm, case, dtype, device):
    """Layers whose columns are several times the cap, forward and backward."""
    case = case.scaled(0.2)
    operands, grad, want = _backward_case(case, is_complex=False)
    leaves = tuple(_cast(tensor, dtype, device).requires_grad_() for tensor in operands)
    with upfold.use(workspace_mb=1):
        skip_if_refused(algorithm, leaves, case.geometry)
        y = ours(leaves, case.geometry, algorithm)
        got = torch.autograd.grad(y, leaves, _cast(grad, dtype, device))
    assert_exact(y, reference(operands, case.geometry))
    for what, one, other in zip(("x.grad", "w.grad", "bias.grad"), got, want, strict=True):
        assert_exact(one, other, what)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_rows_without_taps_are_bias_alone(bias, device):
    """k = s with output padding: the last row and column have no tap; with s > k whole phases have none."""
    for name, empty in (("bias-alone-k2s2op1", (slice(-1, None), slice(None))), ("stride-over-kernel", (2, slice(None)))):
        case = cases.find(name)
        x, w, b = case.tensors(torch.float32, device, bias=True)
        y = upfold.conv_transpose2d(x, w, b if bias else None, **geometry_arguments(case.geometry))
        want = b if bias else torch.zeros_like(b)
        rows = y[(..., *empty)].flatten(2) if y[(..., *empty)].dim() == 4 else y[(..., *empty)]
        assert torch.equal(rows, want.reshape(1, -1, 1).expand_as(rows)), name
