"""Rounding second: at most twice the error of an oracle that rounds its operands to the compute type, accumulates in float32, one
term after the other, and rounds once. The figure is max |y - exact| / (the same operator on absolute values): no tolerance is
picked by hand.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

import upfold
from oracle import (
    ALGORITHMS,
    dtype_name,
    error_figure,
    geometry_arguments,
    grid,
    loop_conv_transpose_weight,
    ours,
    reference,
    reference_gradients,
    refusal,
    running_conv,
    running_conv_transpose,
    skip_if_refused,
    torchs,
    wide,
)
from upfold import cases
from upfold.problem import Activation

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
SAMPLE = tuple(
    cases.find(name)
    for name in (
        "k3s2p1op1",
        "asymmetric-all",
        "depthwise-k4s2p1",
        "3d-mixed",
        "seed0-grouped-dilated",
        "seed1-asymmetric",
        "dcgan-512-256@4",
        "dcgan-64-3@32",
        "unet-256-128@128",
        "cyclegan-128-64@128",
        "pose-2048-256@8x6",
        "dla-depthwise-64@32-k16",
        "fcn32s-21-21-k64@16",
        "hifigan-512-256@64",
        "nnunet3d-64-32@64",
        "1d-k3d3-32-64@131072",
    )
)
ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    ("leaky_relu", 0.2): lambda y: F.leaky_relu(y, 0.2),
}


def unit_roundoff(dtype):
    """Relative error of one correctly rounded operation; a product of complex numbers can be off by sqrt(5) of its parts'."""
    return torch.finfo(dtype).eps / 2 * (math.sqrt(5) if dtype.is_complex else 1)


def single(tensor):
    """In the type that sums are taken in."""
    return None if tensor is None else tensor.detach().cpu().to(torch.complex64 if tensor.is_complex() else torch.float32)


def compute_type(tensor):
    """Round to TF32 (nearest, ties away) where a GPU computes float32 that way; other types are computed as they are."""
    if tensor is None or tensor.device.type != "cuda" or tensor.dtype != torch.float32 or not tf32_is_allowed():
        return single(tensor)
    bits = tensor.detach().cpu().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def tf32_is_allowed():
    conv = getattr(torch.backends.cudnn, "conv", None)
    if hasattr(conv, "fp32_precision"):
        return conv.fp32_precision == "tf32"
    return torch.backends.cudnn.allow_tf32


def check(got, want, oracle, magnitude, what="y"):
    """The rule itself. A correct result may be off by the roundoff of its own type, whatever luck the oracle had."""
    dtype = got.dtype
    mine = error_figure(wide(got) - want, magnitude)
    allowed = 2 * max(error_figure(wide(oracle.to(dtype)) - want, magnitude), unit_roundoff(dtype))
    assert mine <= allowed, f"{what}: figure {mine:.3e}, allowed {allowed:.3e}"
    return mine


def absolute(operands):
    return tuple(None if tensor is None else wide(tensor).abs() for tensor in operands)


@lru_cache(maxsize=2)
def forward_case(case, dtype, device):
    operands = case.tensors(dtype, device, seed=5)
    want, magnitude = reference(operands, case.geometry), reference(absolute(operands), case.geometry)
    return operands, want, magnitude, running_conv_transpose(tuple(map(compute_type, operands)), case.geometry)


@grid(cases.CASES, DTYPES)
def test_forward(algorithm, case, dtype, device, record_property):
    case = case.scaled(0.02 if dtype == torch.float32 else 0.005)
    operands, want, magnitude, oracle = forward_case(case, dtype, device)
    skip_if_refused(algorithm, operands, case.geometry)
    mine = check(ours(operands, case.geometry, algorithm), want, oracle, magnitude)
    record_property("figure", mine)
    if dtype == torch.float32:
        record_property("torch_figure", error_figure(wide(torchs(operands, case.geometry)) - want, magnitude))


@lru_cache(maxsize=2)
def backward_case(case, dtype, device):
    operands = case.tensors(dtype, device, seed=6, bias=True)
    generator = torch.Generator().manual_seed(7)
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    grad = torch.randn((case.batch, case.out_channels, *case.out_size), generator=generator, dtype=drawn).to(device, dtype)
    want = reference_gradients(operands, grad, case.geometry)
    magnitude = reference_gradients(absolute(operands), wide(grad).abs(), case.geometry)
    x, w, g = (compute_type(tensor) for tensor in (*operands[:2], grad))
    oracles = (
        running_conv(g, w.conj(), case.in_size, case.geometry),
        loop_conv_transpose_weight(x.conj(), g, case.kernel_size, case.geometry),
    )
    return operands, grad, want, magnitude, oracles


@grid(SAMPLE, (torch.float32, torch.bfloat16))
def test_gradients(algorithm, case, dtype, device):
    case = case.scaled(0.005)
    operands, grad, want, magnitude, oracles = backward_case(case, dtype, device)
    leaves = tuple(tensor.detach().requires_grad_() for tensor in operands)
    skip_if_refused(algorithm, leaves, case.geometry)
    got = torch.autograd.grad(ours(leaves, case.geometry, algorithm), leaves, grad)
    for what, mine, exact, size, oracle in zip(("x.grad", "w.grad"), got, want, magnitude, oracles, strict=False):
        check(mine, exact, oracle, size, what)


@grid(SAMPLE[:4], (torch.float16, torch.complex64))
def test_gradients_of_other_types(algorithm, case, dtype, device):
    test_gradients(algorithm, case, dtype, device)


def test_long_weight_gradient_sum(device):
    """A sum of half a million terms: one running float32 would lose digits that blocks keep."""
    geometry = cases.find("depthwise-k4s2p1").geometry
    geometry = type(geometry)((1, 1), (0, 0), (0, 0), (1, 1), 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(8, 1, 256, 256, generator=generator)
    w = torch.rand(1, 1, 1, 1, generator=generator)
    grad = torch.rand(8, 1, 256, 256, generator=generator)
    exact = (x.double() * grad.double()).sum()
    for algorithm in ALGORITHMS:
        leaf = w.to(device).requires_grad_()
        operands = (x.to(device), leaf, None)
        if refusal(algorithm, *operands, geometry) is not None:
            continue
        y = ours(operands, geometry, algorithm)
        (got,) = torch.autograd.grad(y, leaf, grad.to(device))
        assert abs(got.double().item() - exact.item()) / exact.item() < 32 * unit_roundoff(torch.float32), algorithm


@grid(SAMPLE, (torch.float64,))
def test_double_precision(algorithm, case, dtype, device):
    """float64 has no wider type to compare with: operands of 26 bits split in halves, so that their partial sums are exact."""
    case = case.scaled(0.01)
    x, w, _ = case.tensors(dtype, seed=7, bias=False)
    x, w = (torch.round(tensor.clamp(-3, 3) * 2**24) / 2**24 for tensor in (x, w))
    skip_if_refused(algorithm, (x.to(device), w.to(device), None), case.geometry)
    high = [torch.round(tensor * 2**12) / 2**12 for tensor in (x, w)]
    low = [tensor - part for tensor, part in zip((x, w), high, strict=True)]

    def exact(a, b):
        return reference((a, b, None), case.geometry)

    parts = exact(high[0], high[1]), exact(high[0], low[1]) + exact(low[0], high[1]), exact(low[0], low[1])
    magnitude = exact(x.abs(), w.abs())

    def residual(y):
        return ((y - parts[0]) - parts[1]) - parts[2]

    mine = error_figure(residual(ours((x.to(device), w.to(device), None), case.geometry, algorithm).cpu()), magnitude)
    oracle = error_figure(residual(running_conv_transpose((x, w, None), case.geometry)), magnitude)
    allowed = 2 * max(oracle, unit_roundoff(dtype))
    assert mine <= allowed, f"figure {mine:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@grid(
    tuple(cases.find(name) for name in ("k4s2p1", "k3s2p1op1", "depthwise-two-each", "empty-phases", "1d-k16s8p4")),
    (torch.float32, torch.float64, torch.float16, torch.bfloat16),
)
def test_activation(algorithm, case, dtype, device, activation):
    """In the pass that adds the bias, and before the one rounding."""
    x, w, b = case.tensors(dtype, device, seed=8, bias=True)
    x = x * 3  # reaches the flat ends of tanh and sigmoid
    operands = (x, w, b)
    skip_if_refused(algorithm, operands, case.geometry)
    function = ACTIVATIONS[activation]
    got = ours(operands, case.geometry, algorithm, activation=activation)
    # A slope that an activation multiplies is passed in float32.
    want = function(reference(operands, case.geometry))
    magnitude = reference(absolute(operands), case.geometry) + want.abs()
    if dtype == torch.float64:
        assert error_figure(wide(got) - want, magnitude) <= 64 * unit_roundoff(
            dtype if "leaky" not in str(activation) else torch.float32
        )
        return
    oracle = function(running_conv_transpose((compute_type(x), compute_type(w), single(b)), case.geometry))
    check(got, want, oracle, magnitude)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_with_gradients(activation, device):
    """The epilogue is outside the closure: with gradients on, values and derivatives are those of the two steps."""
    case = cases.find("k3s2p1op1")
    operands = tuple(tensor.requires_grad_() for tensor in case.tensors(torch.float64, device, seed=9))
    got = ours(operands, case.geometry, activation=activation)
    assert got.requires_grad
    want = ACTIVATIONS[activation](torchs(operands, case.geometry))
    slope_in_float32 = "leaky" in str(activation)
    torch.testing.assert_close(got, want, rtol=1e-6 if slope_in_float32 else 1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    for one, other in zip(torch.autograd.grad(got, operands, grad), torch.autograd.grad(want, operands, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if slope_in_float32 else 1e-11, atol=1e-7 if slope_in_float32 else 1e-11)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
def test_activation_of_extreme_values(activation, dtype, device):
    """Infinities, NaN and huge sums come out as from torch's own function."""
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 100.0, -100.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    values = values.to(dtype)
    want = ACTIVATIONS[activation](values.double())
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # which would round 1e-30 and 1e30
        got = upfold.conv_transpose1d(
            values.reshape(1, 1, -1).to(device), torch.ones(1, 1, 1, dtype=dtype, device=device), activation=activation
        )
    got = got.flatten().cpu().double()
    assert torch.equal(got.isnan(), want.isnan()), (got, want)
    infinite = want.isinf() | (want.abs() > torch.finfo(dtype).max)
    assert torch.equal(got[infinite], want[infinite].to(dtype).double()), (got, want)
    finite = ~want.isnan() & ~infinite
    scale = values.double().abs()[finite] + 1e-300
    assert (
        (got[finite] - want[finite]).abs() / scale
        <= 8 * unit_roundoff(dtype if dtype != torch.float64 or "leaky" not in str(activation) else torch.float32)
    ).all(), (got, want)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_encoding(activation):
    parsed = Activation.parse(activation)
    assert Activation.decode(parsed.encode()) == Activation(parsed.code, torch.tensor(parsed.slope).item())
    assert parsed.name == (activation if isinstance(activation, str) else activation[0])


def test_slope_is_not_rounded_by_the_public_functions(device):
    case = cases.find("k2s2")
    operands = case.tensors(torch.float32, device)
    y = ours(operands, case.geometry)
    assert torch.equal(ours(operands, case.geometry, activation=("leaky_relu", 0.25)), F.leaky_relu(y, 0.25))


def test_published_arguments(device):
    """`arguments()` are torch's own words."""
    case = cases.find("asymmetric-all")
    assert case.arguments() == geometry_arguments(case.geometry)
