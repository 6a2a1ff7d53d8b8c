"""Memory formats: which one torch gives the result of a convolution, and how to allocate it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .geometry import Geometry

_DOUBLE = (torch.float64, torch.complex128)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def suggests_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch takes a (batch, channels, 2 or 3 spatial axes) tensor for channels_last.

    The strides must not decrease along channels, width, height, (depth,) batch, each at least as long as what lies inside it.
    Where the strides fit both formats, as for 1x1 maps, torch says contiguous.
    """
    if strides[1] == 0:
        return False
    order = (1, *range(len(shape) - 1, 1, -1), 0)
    least = 0
    for axis in order:
        if shape[axis] == 0 or strides[axis] < least:
            return False
        if axis == 0 and least == strides[1]:
            return False  # every inner axis has one element: both formats fit
        least = strides[axis] * (shape[axis] if shape[axis] > 1 else 1)
    return True


def result_is_channels_last(x: torch.Tensor, w: torch.Tensor, geometry: Geometry | None = None) -> bool:
    """Whether the convolution of batched `x` with `w` (or the transposed one) gives a channels_last result, as in torch.

    It does when either operand suggests it. The exceptions are torch's: it makes 1-D inputs contiguous first, one of its CPU
    kernels for 3-D, and cuDNN for float64, know only the contiguous format, and it computes complex results from parts whose
    ambiguous layouts come out contiguous.
    """
    if x.is_cuda and x.dtype in _DOUBLE:
        return False
    x_shape, x_strides, w_shape, w_strides = tuple(x.shape), x.stride(), tuple(w.shape), w.stride()
    if x.dim() == 3:
        if x.dtype.is_complex or not x.is_contiguous():
            x_strides = (x_shape[1] * x_shape[2], x_shape[2], 1)
        x_shape, x_strides = _as_image(x_shape, x_strides)
        w_shape, w_strides = _as_image(w_shape, w_strides)
    elif x.dim() == 5 and x.device.type == "cpu" and _only_contiguous(x, w, geometry):
        return False
    return suggests_channels_last(x_shape, x_strides) or suggests_channels_last(w_shape, w_strides)


def _only_contiguous(x: torch.Tensor, w: torch.Tensor, geometry: Geometry | None) -> bool:
    """Whether torch would take its 3-D CPU kernel for contiguous tensors only; it decides by type, sizes and threads."""
    if geometry is None:
        return x.dtype == torch.float64
    if x.dtype.is_complex:
        x, w = x.real, w.real
    g = geometry
    arguments = list(g.stride), list(g.padding), list(g.dilation), True, list(g.output_padding), g.groups
    backend = torch._C._select_conv_backend(x, w, None, *arguments)
    return bool(torch._C._conv_determine_backend_memory_format(x, w, backend) == torch.contiguous_format)


def empty_result(
    shape: Sequence[int], like: torch.Tensor, channels_last: bool, device: torch.device | str | None = None
) -> torch.Tensor:
    """Allocate a batched tensor of `shape`, with the dtype and device of `like`, in one of the two formats (1-D has both too)."""
    where = like.device if device is None else device
    if not channels_last or (like.dtype.is_complex and shape[1] == 1):
        return torch.empty(shape, dtype=like.dtype, device=where)
    if len(shape) == 3:
        image = (shape[0], shape[1], 1, shape[2])
        return torch.empty(image, dtype=like.dtype, device=where, memory_format=torch.channels_last).squeeze(2)
    return torch.empty(shape, dtype=like.dtype, device=where, memory_format=_CHANNELS_LAST[len(shape)])


def has_dense_rows(t: torch.Tensor) -> bool:
    """Whether the kernels can read batched `t` where it lies: neighbours in memory along its last axis or along its channels.

    Expanded tensors (a stride of 0 on an axis that is stepped) count as not readable.
    """
    strides, shape = t.stride(), t.shape
    if any(step == 0 and size > 1 for step, size in zip(strides, shape)):
        return False
    if strides[-1] == 1 or shape[-1] == 1:
        return True
    return strides[1] == 1


def _as_image(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """View (n, c, l) as (n, c, 1, l)."""
    return (shape[0], shape[1], 1, shape[2]), (strides[0], strides[1], shape[2] * strides[2], strides[2])
