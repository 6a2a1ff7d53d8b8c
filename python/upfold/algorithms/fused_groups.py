"""The fused gradients of layers with few channels in a group, on a GPU: their tiles and the time that they take."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused` for the gradients.
FIRST = 280
_LANES = 32


class _Rates(NamedTuple):
    """What predicts the microseconds of a call, by cycles of a multiprocessor: fitted to the first seed on an H200."""

    call: float
    load: float  # of a warp's load
    product: float  # of a product of eight input channels
    tile: float
    memory: float  # of a megabyte of the operands, at the least


# By operator, of float32 rounded to TF32 and of 16-bit values.
_RATES = {
    Operator.CONV: (_Rates(4.0, 5.0, 6.0, 600.0, 0.25), _Rates(4.0, 5.0, 6.0, 600.0, 0.25)),
    Operator.CONV_TRANSPOSE_WEIGHT: (_Rates(7.0, 5.0, 6.0, 600.0, 0.25), _Rates(7.0, 5.0, 6.0, 600.0, 0.25)),
}


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    module = cuda.module()
    return module.FusedGroupsCall(device, problem.cuda, config - FIRST, problem.alignment, problem.workspace_cap)


@lru_cache(maxsize=4096)
def workspace_bytes(problem: Problem, config: int, device: int) -> int:
    """Bytes of the partial sums, or -1 where the tile does not fit."""
    needed: int = call(problem, config, device).workspace_bytes
    return needed


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: multiprocessors load the gradient's channels and multiply, tile by tile."""
    if problem.operator not in _RATES or (problem.dtype is torch.float32 and not problem.allow_tf32):
        return {}
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    rates = _RATES[problem.operator][DTYPE_BYTES[problem.dtype] == 2]
    predicted = {}
    for config in range(FIRST, FIRST + len(cuda.module().fused_groups_tiles())):
        planned = call(problem, config, device)
        if planned.workspace_bytes < 0:
            continue
        tiles, blocks, loads, products, channel_blocks = planned.work
        tile = loads / _LANES * rates.load + products * channel_blocks * rates.product + rates.tile
        busy = max(tiles / min(blocks, multiprocessors), 1.0) * tile / cuda.CYCLES
        predicted[config] = rates.call + max(busy, 1e-6 * problem.bytes * rates.memory)
    return predicted
