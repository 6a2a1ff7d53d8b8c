"""The sum of every channel over batch and space, which is the gradient of a bias: a kernel outside the registry of algorithms."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from . import native
from .execute import alignment_of, raw_stream
from .problem import DTYPE_BYTES, DTYPE_CODES, pad_shape, pad_strides

# Of batched tensors: batch and space, by the number of axes.
_ALL_BUT_CHANNELS = {axes: (0, *range(2, axes)) for axes in (3, 4, 5)}
_SUMMED = frozenset({torch.float32, torch.float16, torch.bfloat16})


def summed_by_torch(g: torch.Tensor) -> torch.Tensor:
    """The same by torch's operator, through whatever watches: differentiable, and of every tensor."""
    return g.sum(_ALL_BUT_CHANNELS[g.dim()])


def channel_sums(g: torch.Tensor) -> torch.Tensor:
    """Sum (batch, channels, spatial...) to (channels,), where nothing watches and no gradient is asked for.

    16-bit types are summed in float32 and rounded once; the order is fixed, so that the same tensor gives the same bits. On a GPU
    a kernel reads float32, float16 and bfloat16 once, at the memory's rate, where pixels or channels follow one another; all
    else is summed by torch.
    """
    if g.is_cuda and g.dtype in _SUMMED and g.numel() > 0:
        planned = _plan(g.shape, g.stride(), g.dtype, g.get_device(), alignment_of(g))
        if planned is not None:
            call, elements = planned
            sums = g.new_empty(g.shape[1])
            scratch = g.new_empty(elements) if elements else None
            call.run(g.data_ptr(), sums.data_ptr(), 0 if scratch is None else scratch.data_ptr(), raw_stream(g.get_device()))
            return sums
    return summed_by_torch(g)


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: int, alignment: int) -> tuple[Any, int] | None:
    """The call of tensors that lie so and its scratch, in elements of their type; None where no kernel sums them."""
    module, _ = native.load_cuda()
    if module is None or any(stride < 0 for stride in strides):
        return None
    call = module.ChannelSumsCall(device, DTYPE_CODES[dtype], pad_shape(shape), pad_strides(strides, shape), alignment)
    needed = call.workspace_bytes
    return None if needed < 0 else (call, -(-needed // DTYPE_BYTES[dtype]))
