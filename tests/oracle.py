"""What the tests compare with: torch on the CPU in float64, and plain loops over the taps that share nothing with either."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import upfold
from upfold.cases import Case, sparse_integers
from upfold.execute import describe
from upfold.explanation import explain
from upfold.geometry import Geometry

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

REAL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*REAL_DTYPES, torch.complex64, torch.complex128)
# Integers up to this size have no rounding error in the type.
LARGEST_EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.complex64: 2**24}
# gemm_atomic runs on a GPU only (tests/gpu/test_gemm.py); `torch` is the peer to fall back on, not a method of ours.
ALGORITHMS = tuple(name for name in upfold.algorithms() if name not in ("gemm_atomic", "torch", "fused"))
# depthwise takes one input channel in each group, on a GPU only; the others take every layer.
GENERAL_ALGORITHMS = tuple(name for name in ALGORITHMS if name != "depthwise")
# fused takes no wide types, and on a GPU not every gradient: asked for by name, it leaves the others to `auto`.
FORWARD_ALGORITHMS = (*ALGORITHMS, "fused")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def grid(
    cases: Sequence[Case], dtypes: Sequence[torch.dtype], algorithms: Iterable[str] = FORWARD_ALGORITHMS
) -> pytest.MarkDecorator:
    """Parametrise over algorithm, case, dtype; the case changes slowest, so that its reference is computed once."""
    rows = [
        pytest.param(algorithm, case, dtype, id=f"{algorithm}-{case.name}-{dtype_name(dtype)}")
        for case, dtype, algorithm in itertools.product(cases, dtypes, algorithms)
    ]
    return pytest.mark.parametrize(("algorithm", "case", "dtype"), rows)


def refusal(algorithm: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, geometry: Geometry) -> str | None:
    """Why the algorithm does not take these operands, in its own words, or None."""
    problem = describe(x, w, b, tuple(geometry_arguments(geometry).values()))
    for candidate in explain(problem, device=x.device).candidates:
        if candidate.algorithm == algorithm:
            return candidate.refusal
    raise AssertionError(f"explain says nothing of {algorithm}")


def skip_if_refused(algorithm: str, operands: Operands, geometry: Geometry) -> None:
    reason = refusal(algorithm, *operands, geometry)
    if reason is not None:
        pytest.skip(f"{algorithm}: {reason}")


def geometry_arguments(geometry: Geometry) -> dict[str, Any]:
    return {
        "stride": geometry.stride,
        "padding": geometry.padding,
        "output_padding": geometry.output_padding,
        "groups": geometry.groups,
        "dilation": geometry.dilation,
    }


def ours(operands: Operands, geometry: Geometry, algorithm: str | None = None, **options: Any) -> torch.Tensor:
    """The public function for the number of axes."""
    function = getattr(upfold, f"conv_transpose{geometry.ndim}d")
    return function(*operands, **geometry_arguments(geometry), algorithm=algorithm, **options)


def torchs(operands: Operands, geometry: Geometry) -> torch.Tensor:
    """Torch's function for the number of axes, on the operands as they are."""
    return getattr(F, f"conv_transpose{geometry.ndim}d")(*operands, **geometry_arguments(geometry))


def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same numbers on the CPU, in float64 or complex128."""
    if tensor is None:
        return None
    return tensor.detach().to(device="cpu", dtype=torch.complex128 if tensor.dtype.is_complex else torch.float64)


def reference(operands: Operands, geometry: Geometry) -> torch.Tensor:
    """Torch on the CPU in float64."""
    x, w, b = (wide(tensor) for tensor in operands)
    return torchs((x, w, b), geometry)


def reference_gradients(operands: Operands, grad: torch.Tensor, geometry: Geometry) -> tuple[torch.Tensor, ...]:
    """Gradients of x, w (and bias) by torch on the CPU in float64."""
    leaves = [wide(tensor).requires_grad_() for tensor in operands if tensor is not None]
    y = torchs((*leaves, *[None] * (3 - len(leaves))), geometry)
    return torch.autograd.grad(y, leaves, wide(grad))


def taps(kernel_size: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in kernel_size))


def _canvas_slice(tap: Sequence[int], in_size: Sequence[int], geometry: Geometry) -> tuple[slice, ...]:
    """Where a tap puts the input, on a canvas that still has its padding: i * stride + tap * dilation."""
    return tuple(
        slice(k * d, k * d + (size - 1) * s + 1, s)
        for k, size, s, d in zip(tap, in_size, geometry.stride, geometry.dilation, strict=True)
    )


def _canvas_size(in_size: Sequence[int], kernel_size: Sequence[int], geometry: Geometry) -> list[int]:
    axes = zip(in_size, kernel_size, geometry.stride, geometry.dilation, geometry.output_padding, strict=True)
    return [(size - 1) * s + d * (k - 1) + 1 + extra for size, k, s, d, extra in axes]


def _crop(canvas: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    inner = tuple(slice(p, size - p) for p, size in zip(geometry.padding, canvas.shape[-geometry.ndim :], strict=True))
    return canvas[(..., *inner)]


def loop_conv_transpose(operands: Operands, geometry: Geometry) -> torch.Tensor:
    """Transposed convolution, tap by tap on a canvas, in the dtype of the operands; the padding is cut off at the end."""
    x, w, b = operands
    groups, ndim = geometry.groups, geometry.ndim
    in_size, kernel_size = x.shape[2:], w.shape[2:]
    rows = x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(in_size))
    weights = w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel_size)
    canvas = x.new_zeros(x.shape[0], groups, w.shape[1], *_canvas_size(in_size, kernel_size, geometry))
    for tap in taps(kernel_size):
        product = weights[(..., *tap)].transpose(1, 2) @ rows
        canvas[(..., *_canvas_slice(tap, in_size, geometry))] += product.reshape(*product.shape[:3], *in_size)
    y = _crop(canvas.flatten(1, 2), geometry)
    return y if b is None else y + b.reshape(-1, *[1] * ndim)


def loop_conv(g: torch.Tensor, w: torch.Tensor, in_size: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """The adjoint in x: every tap reads from the padded canvas what it would have written."""
    groups, kernel_size = geometry.groups, w.shape[2:]
    canvas = g.new_zeros(g.shape[0], groups, w.shape[1], *_canvas_size(in_size, kernel_size, geometry))
    _crop(canvas, geometry).copy_(g.reshape(g.shape[0], groups, w.shape[1], *g.shape[2:]))
    weights = w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel_size)
    x = g.new_zeros(g.shape[0], groups, w.shape[0] // groups, math.prod(in_size))
    for tap in taps(kernel_size):
        read = canvas[(..., *_canvas_slice(tap, in_size, geometry))].flatten(3)
        x += weights[(..., *tap)] @ read
    return x.reshape(g.shape[0], w.shape[0], *in_size)


def loop_conv_transpose_weight(x: torch.Tensor, g: torch.Tensor, kernel_size: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """The adjoint in w: every tap's weights are what x and the canvas have in common there."""
    groups, in_size = geometry.groups, x.shape[2:]
    canvas = g.new_zeros(g.shape[0], groups, g.shape[1] // groups, *_canvas_size(in_size, kernel_size, geometry))
    _crop(canvas, geometry).copy_(g.reshape(g.shape[0], groups, g.shape[1] // groups, *g.shape[2:]))
    rows = x.reshape(x.shape[0], groups, x.shape[1] // groups, math.prod(in_size))
    w = x.new_zeros(groups, x.shape[1] // groups, g.shape[1] // groups, *kernel_size)
    for tap in taps(kernel_size):
        read = canvas[(..., *_canvas_slice(tap, in_size, geometry))].flatten(3)
        w[(..., *tap)] = torch.einsum("ngip,ngop->gio", rows, read)
    return w.reshape(x.shape[1], g.shape[1] // groups, *kernel_size)


def running_conv_transpose(operands: Operands, geometry: Geometry) -> torch.Tensor:
    """`loop_conv_transpose` with one sum per output that takes its products one after the other, rounding after each."""
    x, w, b = operands
    groups, in_size, kernel_size = geometry.groups, x.shape[2:], w.shape[2:]
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, 1, *in_size)
    w = w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel_size)
    canvas = x.new_zeros(x.shape[0], groups, w.shape[2], *_canvas_size(in_size, kernel_size, geometry))
    for tap in taps(kernel_size):
        sums = canvas[(..., *_canvas_slice(tap, in_size, geometry))]
        columns = w[(..., *tap)].reshape(*w.shape[:3], *[1] * geometry.ndim)
        for channel in range(w.shape[1]):
            sums += columns[:, channel] * x[:, :, channel]
    y = _crop(canvas.flatten(1, 2), geometry)
    return y if b is None else y + b.reshape(-1, *[1] * geometry.ndim)


def running_conv(g: torch.Tensor, w: torch.Tensor, in_size: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """`loop_conv` with one running sum per output."""
    groups, kernel_size = geometry.groups, w.shape[2:]
    canvas = g.new_zeros(g.shape[0], groups, w.shape[1], *_canvas_size(in_size, kernel_size, geometry))
    _crop(canvas, geometry).copy_(g.reshape(g.shape[0], groups, w.shape[1], *g.shape[2:]))
    w = w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel_size)
    x = g.new_zeros(g.shape[0], groups, w.shape[1], *in_size)
    for tap in taps(kernel_size):
        read = canvas[(..., *_canvas_slice(tap, in_size, geometry))].unsqueeze(2)
        columns = w[(..., *tap)].reshape(*w.shape[:3], *[1] * geometry.ndim)
        for channel in range(w.shape[2]):
            x += columns[:, :, channel] * read[:, :, :, channel]
    return x.flatten(1, 2)


def fold_geometry(kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]) -> Geometry:
    return Geometry(tuple(stride), tuple(padding), (0,) * len(kernel_size), tuple(dilation))


def blocks_of(size: Sequence[int], kernel_size: Sequence[int], geometry: Geometry) -> list[int]:
    """How many patches fit along each axis of an image of `size`."""
    axes = zip(size, kernel_size, geometry.stride, geometry.padding, geometry.dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]


def loop_fold(columns: torch.Tensor, size: Sequence[int], kernel_size: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """Sum (batch, channels * taps, blocks) columns into (batch, channels, size...), tap by tap."""
    blocks = blocks_of(size, kernel_size, geometry)
    channels = columns.shape[1] // math.prod(kernel_size)
    columns = columns.reshape(columns.shape[0], channels, *kernel_size, *blocks)
    canvas = columns.new_zeros(*columns.shape[:2], *(n + 2 * p for n, p in zip(size, geometry.padding, strict=True)))
    for tap in taps(kernel_size):
        canvas[(..., *_canvas_slice(tap, blocks, geometry))] += columns[(slice(None), slice(None), *tap)]
    return _crop(canvas, geometry)


def loop_unfold(image: torch.Tensor, kernel_size: Sequence[int], geometry: Geometry) -> torch.Tensor:
    """The adjoint of `loop_fold`: (batch, channels, size...) to (batch, channels * taps, blocks)."""
    size = image.shape[2:]
    blocks = blocks_of(size, kernel_size, geometry)
    canvas = image.new_zeros(*image.shape[:2], *(n + 2 * p for n, p in zip(size, geometry.padding, strict=True)))
    _crop(canvas, geometry).copy_(image)
    columns = image.new_zeros(*image.shape[:2], *kernel_size, *blocks)
    for tap in taps(kernel_size):
        columns[(slice(None), slice(None), *tap)] = canvas[(..., *_canvas_slice(tap, blocks, geometry))]
    return columns.flatten(2 + len(blocks)).flatten(1, 1 + len(blocks))


def exact_like(shape: Sequence[int], terms: float, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Sparse -1, 0, 1 for a reduction over `terms` products with another such tensor of the same density."""
    density = min(2 / 3, math.sqrt(24 / max(terms, 1)))
    generator = torch.Generator().manual_seed(seed)
    return sparse_integers(tuple(shape), density, generator, complex_values=dtype.is_complex).to(dtype)


def assert_exact(got: torch.Tensor, want: torch.Tensor, what: str = "result") -> None:
    """Equal bit for bit after widening; `want` must be integers that the dtype of `got` holds without rounding."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if want.numel() == 0:
        return
    largest = (torch.view_as_real(want) if want.is_complex() else want).abs().max()
    assert largest <= LARGEST_EXACT.get(got.dtype, 2**53), f"{what}: the test's own numbers are too large: {largest}"
    wrong = wide(got) != want
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        count = int(wrong.sum())
        raise AssertionError(f"{what}: {count} of {want.numel()} differ, first at {index}: {got[index]} != {want[index]}")


def error_figure(error: torch.Tensor, magnitude: torch.Tensor) -> float:
    """max |error| / magnitude; where nothing was summed the error must be zero."""
    if error.numel() == 0:
        return 0.0
    ratio = torch.where(magnitude > 0, error.abs() / magnitude, torch.where(error.abs() > 0, math.inf, 0.0))
    return float(ratio.max())
