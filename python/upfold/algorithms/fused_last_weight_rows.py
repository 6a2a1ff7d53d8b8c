"""The fused method on a GPU whose columns are a row of the weight as it lies: channels of the result and their taps.

For 16-bit values in planes and kernels as long as their stride: nothing is packed, and a call is one launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import fused_alternating, fused_last_runs

# The number of its first tile among the configs of `fused`, how many there are, and its number among those of boxes.
FIRST, TILES = 360, 4
FIRST_TILE = fused_last_runs.FIRST_TILE + fused_last_runs.TILES


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to these tiles of 16 layers on an H200 (6 % off)."""

    call: float
    product: float  # times the cycles that one takes by itself
    issue: float  # cycles of one beside that
    loaded: float  # bytes that a multiprocessor gets in a cycle
    shared: float  # of what a warpgroup multiplies and stores: one, where nothing of both runs at a time
    memory: float  # of a megabyte of the operands, at the least
    beside: float  # of the lesser of what a call computes and moves


_RATES = _Rates(3.162, 0.93, 327, 39.3, 0.494, 0.274, 0.117)
# Of a tile whose results the copy engine stores, and of one that lanes do: its cycles, beside its products and results, and bytes
# that a warpgroup puts in one.
_BOXES, _LANES = (1085, 10.85), (2804, 12.68)
_OF_BOXES = 2  # tiles of the former, which are the first


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return fused_alternating.call(problem, config - FIRST + FIRST_TILE, device)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: one warpgroup multiplies while the other stores."""
    if problem.operator is not Operator.CONV_TRANSPOSE or DTYPE_BYTES[problem.dtype] != 2:
        return {}
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for tile in fused_alternating.fitting(problem, device, FIRST_TILE, TILES):
        work = tile.work
        if problem.batch == 0:
            predicted[FIRST + tile.number] = _RATES.call
            continue
        multiply = tile.products * _RATES.product + work.products * _RATES.issue
        busy = max(multiply, (work.copied + tile.streamed) / _RATES.loaded)
        cycles, stored = _BOXES if tile.number < _OF_BOXES else _LANES
        time = fused_alternating.of_turns(
            -(-work.tiles // multiprocessors), busy, tile.rows * tile.columns * 2 / stored + cycles, _RATES.shared
        )
        least = 1e-6 * problem.bytes * _RATES.memory
        predicted[FIRST + tile.number] = _RATES.call + max(time, least) + _RATES.beside * min(time, least)
    return predicted
