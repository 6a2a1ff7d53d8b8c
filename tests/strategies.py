"""Random geometries, operands and storages for the property tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from upfold.geometry import Geometry, output_size


@st.composite
def layers(draw: Callable[..., Any], ndims: tuple[int, ...] = (1, 2, 3)) -> tuple[Geometry, tuple[int, ...], tuple[int, ...]]:
    """A checked geometry with the shapes of x and w; every output has at least one element and at most a few thousand."""
    ndim = draw(st.sampled_from(ndims))
    widest = {1: 40, 2: 9, 3: 5}[ndim]
    axes = []
    for _ in range(ndim):
        size, kernel = draw(st.integers(1, widest)), draw(st.integers(1, 5 if ndim < 3 else 3))
        stride, dilation = draw(st.integers(1, 5)), draw(st.integers(1, 4))
        extra = draw(st.integers(0, max(stride, dilation) - 1))
        largest = (output_size(size, kernel, stride, 0, dilation, extra) - 1) // 2
        axes.append((size, kernel, stride, draw(st.integers(0, min(largest, 7))), extra, dilation))
    sizes, kernels, strides, paddings, extras, dilations = zip(*axes, strict=True)
    groups, in_each, out_each = draw(st.sampled_from([1, 1, 2, 3, 5])), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    geometry = Geometry(strides, paddings, extras, dilations, groups)
    batch = draw(st.sampled_from([1, 1, 2, 3, 0]))
    return geometry, (batch, groups * in_each, *sizes), (groups * in_each, out_each, *kernels)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _channels_innermost(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def _reversed_axes(tensor: torch.Tensor) -> torch.Tensor:
    axes = tuple(reversed(range(tensor.dim())))
    return tensor.permute(axes).contiguous().permute(axes)


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    spread = tensor.new_full([2 * size for size in tensor.shape], torch.nan)
    view = spread[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    buffer = tensor.new_full((tensor.numel() + 2,), torch.nan)
    return buffer[1:-1].view(tensor.shape).copy_(tensor)


def _channel_slice(tensor: torch.Tensor) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[1] += 3
    wider = tensor.new_full(shape, torch.nan)
    return wider[:, 2:-1].copy_(tensor)


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    wider = tensor.new_full([size + 2 for size in tensor.shape], torch.nan)
    return wider[tuple(slice(1, -1) for _ in tensor.shape)].copy_(tensor)


def _overlapping_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Every sample the same storage (an expanded batch)."""
    return tensor[:1].clone().expand(tensor.shape) if tensor.shape[0] else tensor


# Ways to lay the same numbers out; all but the last keep the values, that one repeats the first sample.
STORAGES = {
    "contiguous": _contiguous,
    "channels innermost": _channels_innermost,
    "reversed axes": _reversed_axes,
    "every second element": _every_second,
    "misaligned": _misaligned,
    "channel slice": _channel_slice,
    "NaN on all sides": _guarded,
    "expanded batch": _overlapping_rows,
}
