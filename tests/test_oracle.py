"""The oracles against each other: torch in float64 and the plain loops, so that no test rests on one opinion."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oracle import (
    ALGORITHMS,
    assert_exact,
    blocks_of,
    exact_like,
    fold_geometry,
    loop_conv,
    loop_conv_transpose,
    loop_conv_transpose_weight,
    loop_fold,
    loop_unfold,
    reference,
    reference_gradients,
    refusal,
)
from upfold import cases
from upfold.geometry import InvalidArgument, conv_transpose_shape
from upfold.problem import Operator

EVERY_CASE = pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)


@EVERY_CASE
def test_loops_agree_with_torch(case):
    case = case.scaled(0.01)
    operands = case.tensors(torch.float64, exact=True)
    want = reference(operands, case.geometry)
    assert_exact(loop_conv_transpose(operands, case.geometry), want)
    assert tuple(want.shape) == (case.batch, case.out_channels, *case.out_size)
    x, w, _ = operands
    grad = exact_like(want.shape, 1, torch.float64)
    grad_x, grad_w, *_ = reference_gradients(operands, grad, case.geometry)
    assert_exact(loop_conv(grad, w, case.in_size, case.geometry), grad_x)
    assert_exact(loop_conv_transpose_weight(x, grad, case.kernel_size, case.geometry), grad_w)


@EVERY_CASE
def test_a_method_of_ours_takes_every_case(case):
    case = case.scaled(0.01)
    for dtype in (torch.float32, torch.bfloat16, torch.complex128):
        x, w, b = case.tensors(dtype)
        reasons = {name: refusal(name, x, w, b, case.geometry) for name in ALGORITHMS}
        assert None in reasons.values(), reasons


@EVERY_CASE
def test_scaling_keeps_the_layer(case):
    small = case.scaled(0.02)
    assert small.gflop <= 0.02 or {small.batch, *small.in_size} == {1}
    assert small.geometry == case.geometry
    assert (small.kernel_size, small.in_channels, small.out_channels) == (
        case.kernel_size,
        case.in_channels,
        case.out_channels,
    )
    if small is not case:
        assert "cut from n" in small.size_text
        assert small.scaled(0.01).cut_from in ("", small.cut_from)
    else:
        assert "cut" not in case.size_text


@EVERY_CASE
def test_counted_operations_are_those_that_land(case):
    """The formula for useful operations against counting: ones convolved with ones count the products of each output."""
    case = case.scaled(0.002)
    x, w, _ = case.tensors(torch.float64)
    landed = reference((torch.ones_like(x), torch.ones_like(w), None), case.geometry).sum().item()
    assert case.gflop == pytest.approx(2 * landed / 1e9, rel=1e-12)


def test_names_are_unique_and_found():
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    assert all(cases.find(name).name == name for name in names)
    assert sum(len(cases.by_tier(tier)) for tier in cases.TIERS) == len(names)
    with pytest.raises(ValueError, match="no such case"):
        cases.find("no-such-layer")
    with pytest.raises(ValueError, match="must be one of smoke"):
        cases.by_tier("nonsense")


def test_the_list_covers_what_it_promises():
    """One case at least of each class whose arithmetic differs."""
    every = cases.CASES
    assert {case.ndim for case in every} == {1, 2, 3}
    assert any(case.groups == case.in_channels == case.out_channels > 1 for case in every)
    assert any(1 < case.groups < case.in_channels for case in every)
    assert any(s > k for case in every for s, k in zip(case.stride, case.kernel_size, strict=True))
    assert any(
        s == 1 and p > d * (k - 1)
        for case in every
        for s, p, d, k in zip(case.stride, case.padding, case.dilation, case.kernel_size, strict=True)
    )
    assert any(s <= o < d for case in every for s, o, d in zip(case.stride, case.output_padding, case.dilation, strict=True))
    assert any(case.batch * case.out_channels * torch.Size(case.out_size).numel() > 2**31 for case in every)
    assert {1, 7, 37} <= {case.in_size[-1] for case in every}
    assert {1, 3, 20, 21} <= {case.out_channels for case in every} & {case.in_channels for case in every}
    assert all(case.source for case in cases.by_tier("decoders", "seeds"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_operands_follow_the_seed(dtype):
    case = cases.find("k2s2")
    first, again, other = (case.tensors(dtype, seed=seed) for seed in (3, 3, 4))
    for one, two, three in zip(first, again, other, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert case.tensors(memory_format=torch.channels_last)[0].is_contiguous(memory_format=torch.channels_last)
    assert case.tensors(bias=False)[2] is None
    assert cases.find("k4s2p1").tensors(bias=True)[2] is not None


@pytest.mark.parametrize("kernel, dilation, padding, stride", [(3, 1, 1, 1), (2, 2, 0, 3), ((4, 1), (1, 3), (2, 0), (2, 5))])
def test_fold_loops_agree_with_torch(kernel, dilation, padding, stride):
    pair = [value if isinstance(value, tuple) else (value, value) for value in (kernel, dilation, padding, stride)]
    geometry = fold_geometry(*pair)
    image = exact_like((2, 3, 9, 11), 1, torch.float64)
    columns = F.unfold(image, kernel, dilation, padding, stride)
    assert_exact(loop_unfold(image, pair[0], geometry), columns)
    assert columns.shape[2] == torch.Size(blocks_of((9, 11), pair[0], geometry)).numel()
    assert_exact(loop_fold(columns, (9, 11), pair[0], geometry), F.fold(columns, (9, 11), kernel, dilation, padding, stride))


@EVERY_CASE
def test_output_size_formula(case):
    x_shape = (case.batch, case.in_channels, *case.in_size)
    w_shape = (case.in_channels, case.out_channels // case.groups, *case.kernel_size)
    shape = conv_transpose_shape(x_shape, w_shape, (case.out_channels,), case.geometry)
    # The adjoint recovers the input size, but for the rows that output_padding adds.
    for size, out, k, s, p, d, extra in zip(
        case.in_size,
        shape[2:],
        case.kernel_size,
        case.stride,
        case.padding,
        case.dilation,
        case.output_padding,
        strict=True,
    ):
        assert (out - extra + 2 * p - d * (k - 1) - 1) // s + 1 == size


def test_operator_numbers_are_those_of_the_kernels():
    assert [int(operator) for operator in Operator] == [0, 1, 2]
    assert issubclass(InvalidArgument, ValueError)
    assert issubclass(InvalidArgument, RuntimeError)
