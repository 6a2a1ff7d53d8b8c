"""Copies of tensors into parts of a larger one, as they are or through ReLU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import execute, native
from .problem import DTYPE_CODES

# Rows of two tensors: how many, their elements, and elements from one to the next in the source and in the part.
Rows = tuple[int, int, int, int]
_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_ELEMENTS = 2**31 - 1


def rows_between(source: Tensor, part: Tensor) -> Rows | None:
    """How both are rows of elements that lie together, samples or pixels, or None where they lie in different orders.

    Args:
        source: (batch, channels, spatial axes).
        part: as many elements of a larger tensor.
    """
    batch, channels, *spatial = source.shape
    if source.numel() == 0 or source.numel() > _MOST_ELEMENTS:
        return None
    if source.is_contiguous() and part[0].is_contiguous():
        return batch, source[0].numel(), source.stride(0), part.stride(0)
    pixels, last = source.movedim(1, -1), part.movedim(1, -1)
    if not pixels.is_contiguous() or last.stride(-1) != 1:
        return None
    step = last.stride(-2)
    dense = tuple(step * math.prod(source.shape[axis + 1 :]) for axis in range(2, source.dim()))
    if last.stride()[1:-1] != dense or last.stride(0) != step * math.prod(spatial):
        return None
    return batch * math.prod(spatial), channels, channels, step


def copy(source: Tensor, part: Tensor, rows: Rows | None, relu: bool) -> None:
    """Copy into a part of a larger tensor.

    Args:
        source: what is copied.
        part: where, in the same shape, type and device.
        rows: `rows_between` of both.
        relu: whether the copy is ``relu(source)``.
    """
    if rows is not None and source.is_cuda and source.dtype in _REAL:
        module = native.load_cuda()[0]
        if module is not None:
            index = source.get_device()
            addresses = source.data_ptr(), part.data_ptr()
            module.copy_rows(DTYPE_CODES[source.dtype], rows, relu, *addresses, index, execute.raw_stream(index))
            return
    if relu:
        torch.clamp_min(source, 0, out=part)
    else:
        part.copy_(source)
