"""The result's memory format is torch's own, for every combination of input and weight format, the ambiguous ones included."""

from __future__ import annotations

import itertools

import pytest
import torch

import upfold
from oracle import FORWARD_ALGORITHMS, GENERAL_ALGORITHMS, dtype_name, geometry_arguments, ours, refusal, torchs
from small_layer import TORCH
from strategies import STORAGES
from upfold.geometry import make_geometry

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
# batch, in_channels, out_channels, in_size, kernel, stride: channels of 1, maps of 1x1, batches of 1, in all combinations.
SHAPES = [
    (batch, channels, out_channels, size, kernel, stride)
    for batch, channels, out_channels, size, (kernel, stride) in itertools.product(
        (1, 2), (1, 3), (1, 4), (1, 3), ((1, 1), (2, 2), (3, 1))
    )
]


def formats(tensor, ndim):
    """The tensor in each format, by name."""
    yield "contiguous", tensor
    if ndim in FORMATS:
        yield "channels_last", tensor.contiguous(memory_format=FORMATS[ndim])
    for name in ("channels innermost", "reversed axes", "every second element", "channel slice", "NaN on all sides"):
        yield name, STORAGES[name](tensor)


def steps(tensor):
    """The strides. torch 2.0 gave axes of one element, whose stride means nothing, other ones than every later torch."""
    if TORCH >= (2, 1):
        return tensor.stride()
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def of_torch(operands, geometry):
    try:
        return torchs(operands, geometry)
    except RuntimeError as error:
        if "not implemented" in str(error):
            pytest.skip(f"this torch has no such operator: {error}")
        raise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=dtype_name)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_strides_are_torchs(ndim, dtype, device):
    wrong = []
    for batch, channels, out_channels, size, kernel, stride in SHAPES:
        geometry = make_geometry(ndim, stride, 0, 0, 1, 1)
        x = torch.ones((batch, channels, *[size] * ndim), dtype=dtype, device=device)
        w = torch.ones((channels, out_channels, *[kernel] * ndim), dtype=dtype, device=device)
        for (x_name, x_in), (w_name, w_in) in itertools.product(formats(x, ndim), formats(w, ndim)):
            want, got = of_torch((x_in, w_in, None), geometry), ours((x_in, w_in, None), geometry)
            if steps(got) != steps(want):
                wrong.append(
                    f"x {tuple(x.shape)} {x_name} {x_in.stride()}, w {tuple(w.shape)} {w_name} {w_in.stride()}: "
                    f"{got.stride()}, torch {want.stride()}"
                )
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong[:12])


@pytest.mark.parametrize("algorithm", FORWARD_ALGORITHMS)
@pytest.mark.parametrize("ndim", [2, 3])
def test_every_algorithm_gives_the_same_format(algorithm, ndim, device):
    geometry = make_geometry(ndim, 2, 1, 1, 2, 1)
    # Small integers: exact where float32 is rounded to TF32 too.
    x = torch.randint(-4, 5, (2, 4, *[3] * ndim), device=device).float()
    w = torch.randint(-4, 5, (4, 3, *[3] * ndim), device=device).float()
    for (_, x_in), (_, w_in) in itertools.product(formats(x, ndim), formats(w, ndim)):
        if refusal(algorithm, x_in, w_in, None, geometry) is None:
            got = ours((x_in, w_in, None), geometry, algorithm)
            want = torchs((x_in, w_in, None), geometry)
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_unbatched_and_empty(ndim, device):
    geometry = make_geometry(ndim, 2, 1, 0, 1, 1)
    # Small integers: exact where float32 is rounded to TF32 too.
    x = torch.randint(-4, 5, (2, 4, *[3] * ndim), device=device).float()
    w = torch.randint(-4, 5, (4, 3, *[3] * ndim), device=device).float()
    for one in (x[0], x[:0]):
        for _, w_in in formats(w, ndim):
            got, want = ours((one, w_in, None), geometry), torchs((one, w_in, None), geometry)
            assert got.shape == want.shape
            if one.dim() == ndim + 1:
                assert got.stride() == want.stride()


def test_gradients_flow_through_every_format(device):
    geometry = make_geometry(2, 2, 1, 1, 1, 1)
    x = torch.randn(2, 4, 3, 5, device=device, dtype=torch.float64)
    w = torch.randn(4, 3, 3, 3, device=device, dtype=torch.float64)
    for (_, x_in), (_, w_in) in itertools.product(formats(x, 2), formats(w, 2)):
        leaves = x_in.detach().requires_grad_(), w_in.detach().requires_grad_()
        y = ours((*leaves, None), geometry)
        for g in (
            torch.randn_like(y),
            torch.randn(y.shape, dtype=y.dtype, device=device),
            torch.ones((), dtype=y.dtype, device=device).expand(y.shape),
        ):
            got = torch.autograd.grad(y, leaves, g, retain_graph=True)
            want = torch.autograd.grad(torchs((*leaves, None), geometry), leaves, g)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other)


def test_out_may_have_any_strides(device):
    geometry = make_geometry(2, 2, 1, 1, 1, 1)
    # float64: in float32 the algorithms differ by TF32, which only the matrix product uses.
    x = torch.randn(2, 4, 3, 5, device=device, dtype=torch.float64)
    w = torch.randn(4, 3, 3, 3, device=device, dtype=torch.float64)
    want = ours((x, w, None), geometry)
    for algorithm in GENERAL_ALGORITHMS:
        for name, make in STORAGES.items():
            if name == "expanded batch":
                continue
            out = make(torch.zeros_like(want))
            strides = out.stride()
            result = upfold.conv_transpose2d(x, w, **geometry_arguments(geometry), algorithm=algorithm, out=out)
            assert result is out
            assert out.stride() == strides
            torch.testing.assert_close(out, want)
