"""The fused method on a GPU whose columns are channels and phases: what a position has in a channel is a run of the result.

For strides of the width alone, as of vocoders: every phase of a position is in one tile, and what a warp stores lies together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import fused_alternating, fused_exact, fused_last

# The number of its first tile among the configs of `fused`, how many there are, and its number among those of boxes.
FIRST, TILES = 350, 3
FIRST_TILE = fused_last.TILES + fused_exact.TILES


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to every such tile of 21 layers on an H100 (13 and 10 % off)."""

    call: float
    tile: float  # cycles of a tile, beside its products and results
    product: float  # times the cycles that one takes by itself
    issue: float  # cycles of one beside that
    loaded: float  # bytes that a multiprocessor gets in a cycle
    stored: float  # bytes that a warpgroup puts
    shared: float  # of what a warpgroup multiplies and stores: one, where nothing of both runs at a time
    memory: float  # of a megabyte of the operands, at the least
    packed: float  # of a megabyte of the weight
    source: float  # of a megabyte of the source that is packed first
    launch: float  # of that kernel, beside its bytes


# Of float32 rounded to TF32, and of 16-bit values.
_RATES = (
    _Rates(5.03, 536, 0.9, 108, 51.6, 15.7, 0.92, 0.275, 0.946, 0.626, 0.81),
    _Rates(3.08, 1149, 0.9, 95, 51.6, 7.37, 0.835, 0.183, 1.09, 0.526, 0.5),
)
# Times as long where two phases make short runs (H100: 0.95 to 1.7 times what is said).
_SHORT = 1.25


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return fused_alternating.call(problem, config - FIRST + FIRST_TILE, device)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: one warpgroup multiplies while the other stores."""
    if problem.operator is not Operator.CONV_TRANSPOSE or problem.in_full_float32:
        return {}
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    size = DTYPE_BYTES[problem.dtype]
    rates, predicted = _RATES[size == 2], {}
    for tile in fused_alternating.fitting(problem, device, FIRST_TILE, TILES):
        work = tile.work
        if problem.batch == 0:
            predicted[FIRST + tile.number] = rates.call
            continue
        multiply = tile.products * rates.product + work.products * rates.issue
        busy = max(multiply, (work.copied + tile.streamed * (0.5 if work.sharers > 1 else 1.0)) / rates.loaded)
        store = tile.rows * tile.columns * size / rates.stored + rates.tile
        time = fused_alternating.of_turns(-(-work.tiles // multiprocessors), busy, store, rates.shared)
        time += 1e-6 * (work.packed * rates.packed + work.source * rates.source) + (rates.launch if work.source else 0.0)
        time = rates.call + max(time, 1e-6 * problem.bytes * rates.memory)
        predicted[FIRST + tile.number] = time * (_SHORT if problem.stride[2] == 2 else 1.0)
    return predicted
