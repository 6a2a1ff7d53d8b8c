"""The gradient of the weight by itself: `fused` takes layers whose forward it refuses, and its sums depend on no thread count."""

from __future__ import annotations

import math

import pytest
import torch

import upfold
from oracle import assert_exact, dtype_name, geometry_arguments, reference_gradients
from upfold import cases, dispatch, execute
from upfold.algorithms import REGISTRY
from upfold.cases import sparse_integers

LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_cpu(device):
    if device.type != "cpu":
        pytest.skip("of the CPU kernels")


def arguments(case):
    return tuple(geometry_arguments(case.geometry).values())


def gradient(case, x, g, algorithm="fused"):
    return execute.conv_transpose_weight(x, g, case.kernel_size, arguments(case), algorithm)


def refusal(case, x, g):
    problem, _ = execute.describe_conv_transpose_weight(x, g, case.kernel_size, arguments(case))
    return REGISTRY["fused"].reject(problem, CPU)


def exact_operands(case, dtype):
    """x and the output's gradient of so few integers that every partial sum is exact."""
    generator = torch.Generator().manual_seed(7)
    products = case.batch * max(math.prod(case.in_size), math.prod(case.out_size))
    density = min(2 / 3, math.sqrt(24 / products))
    x = sparse_integers((case.batch, case.in_channels, *case.in_size), density, generator)
    g = sparse_integers((case.batch, case.out_channels, *case.out_size), density, generator)
    return x.to(dtype), g.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_exact(case, dtype):
    case = case.scaled(0.01)
    x, g = exact_operands(case, dtype)
    reason = refusal(case, x, g)
    if reason is not None:
        pytest.skip(reason)
    w = torch.zeros(case.in_channels, case.out_channels // case.groups, *case.kernel_size)
    want = reference_gradients((x, w, None), g, case.geometry)[1]
    assert_exact(gradient(case, x, g), want)
    if case.ndim in LAST:
        assert_exact(gradient(case, *(t.contiguous(memory_format=LAST[case.ndim]) for t in (x, g))), want)


@pytest.mark.parametrize("name", ["dcgan-64-3@32", "pix2pix-128-3@128", "one-output-channel", "width-37-k3"])
def test_vectors_of_either_side(name):
    """Three output channels fill no vector forward; here those of x do, and `auto` takes them."""
    case = cases.find(name).scaled(0.01)
    x, g = exact_operands(case, torch.float32)
    assert refusal(case, x, g) is None
    if case.tier == "decoders":
        problem, _ = execute.describe_conv_transpose_weight(x, g, case.kernel_size, arguments(case))
        assert dispatch.plan(problem, CPU, "auto").algorithm == "fused"


@pytest.mark.parametrize("name", ["nnunet2d-64-32@256", "dcgan-512-256@4", "seed0-grouped-dilated", "hifigan-128-64@4096"])
def test_same_bits_for_any_number_of_threads(name):
    case = cases.find(name).scaled(0.3)
    x, _, _ = case.tensors()
    g = torch.randn(case.batch, case.out_channels, *case.out_size, generator=torch.Generator().manual_seed(1))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(gradient(case, x, g))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, results[0]) for one in results)


def test_long_sums_of_one_sign():
    """600,000 products in each weight, none of which cancels another."""
    x, g = torch.rand(1, 8, 600_000) + 0.5, torch.rand(1, 8, 600_000) + 0.5
    got = execute.conv_transpose_weight(x, g, (1,), ((1,), (0,), (0,), 1, (1,)), "fused")
    want = torch.einsum("nip,nop->io", x.double(), g.double()).unsqueeze(-1)
    assert ((got.double() - want) / want).abs().max() < 4 * torch.finfo(torch.float32).eps


def test_padding_is_never_multiplied():
    """An Inf beside the border meets no zero of the padding."""
    layer = upfold.ConvTranspose2d(8, 8, 4, 2, 1, bias=False, algorithm="fused")
    x = torch.ones(1, 8, 3, 3)
    x[0, 0, 0, 0] = math.inf
    layer(x).sum().backward()
    got = layer.weight.grad
    assert not got.isnan().any()
    assert got[0, :, 1:, 1:].isinf().all()  # the taps of the first row and column reach no output there
    assert got[0, :, 0].isfinite().all()
    assert got[0, :, :, 0].isfinite().all()
    assert got[1:].isfinite().all()
