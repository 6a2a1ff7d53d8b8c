"""The fused gradients of layers with few channels in a group, on a GPU, and the time that they take."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# Its number among the configs of `fused` for the gradients.
CONFIG = 280


class _Rates(NamedTuple):
    """What predicts the microseconds of a call, by cycles of a multiprocessor: fitted to the first seed on an H200."""

    call: float
    load: float  # of a warp's load
    product: float  # of a product of eight input channels
    tile: float
    memory: float  # of a megabyte of the operands, at the least


# By operator, of float32 rounded to TF32 and of 16-bit values.
_RATES = {
    Operator.CONV: (_Rates(4.0, 6.0, 7.0, 2240.0, 0.25), _Rates(4.0, 6.0, 7.0, 760.0, 0.25)),
    Operator.CONV_TRANSPOSE_WEIGHT: (_Rates(7.0, 6.0, 10.0, 1600.0, 0.25), _Rates(7.0, 6.0, 10.0, 800.0, 0.25)),
}


def call(problem: Problem, device: int) -> Any:
    """Plan a call."""
    return cuda.module().FusedGroupsCall(device, problem.cuda, problem.alignment, problem.workspace_cap)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict its time, by config, where it fits: multiprocessors load a patch of the gradient and multiply it, tile by tile."""
    if problem.operator not in _RATES or (problem.dtype is torch.float32 and not problem.allow_tf32):
        return {}
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    rates = _RATES[problem.operator][DTYPE_BYTES[problem.dtype] == 2]
    planned = call(problem, device)
    if planned.workspace_bytes < 0:
        return {}
    tiles, blocks, loads, products, channel_blocks = planned.work
    tile = loads * rates.load + products * channel_blocks * rates.product + rates.tile
    busy = max(tiles / min(blocks, multiprocessors), 1.0) * tile / cuda.CYCLES
    return {CONFIG: rates.call + max(busy, 1e-6 * problem.bytes * rates.memory)}
