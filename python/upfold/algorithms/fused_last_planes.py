"""The fused method on a GPU whose three warpgroups take turns on planes of x as they lie, for kernels as long as their stride."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import fused_alternating, fused_last_weight_rows

# The number of its first tile among the configs of `fused`, how many there are, and its number among those of boxes.
FIRST, TILES = 370, 1
FIRST_TILE = fused_last_weight_rows.FIRST_TILE + fused_last_weight_rows.TILES


class _Rates(NamedTuple):
    """What orders this tile among the others: fitted to its time over the fastest one's (12 layers, H200, 6 and 2 % off).

    The predictions of those err themselves, so that these are no rates of the device.
    """

    call: float
    tile: float  # cycles of a tile, beside its products and results
    product: float  # times the cycles that one takes by itself
    issue: float  # cycles of one beside that
    loaded: float  # bytes that a multiprocessor gets in a cycle
    stored: float  # bytes that a warpgroup puts
    loose: float  # times as long rows of results are stored that are no whole vectors
    shared: float  # of what a warpgroup multiplies and stores: one, where nothing of both runs at a time
    memory: float  # of a megabyte of the operands, at the least
    beside: float  # of the lesser of what a call computes and moves
    packed: float  # of a megabyte of the weight


# Of float32 rounded to TF32, and of 16-bit values.
_RATES = (
    _Rates(4.3, 548, 0.897, 60.6, 78.3, 17.3, 3.82, 0.416, 0.268, 0.115, 0.567),
    _Rates(4.79, 674, 1.38, 64.0, 50.8, 17.3, 1.58, 0.447, 0.276, 0.0797, 0.455),
)
# Times as long where weights do not stay: half as many positions as of other tiles share what streams past (nnU-Net 512 of 8 x 8
# in TF32, 17.5 us for 15.4).
_STREAMING = 1.25


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return fused_alternating.call(problem, config - FIRST + FIRST_TILE, device)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: one warpgroup multiplies while the others store."""
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
        busy = max(tile.products * rates.product + work.products * rates.issue, (work.copied + tile.streamed) / rates.loaded)
        results = tile.rows * tile.columns * tile.phases * size
        store = results / rates.stored * (rates.loose if work.loose else 1.0) + rates.tile
        time = fused_alternating.of_turns(-(-work.tiles // multiprocessors), busy, store, rates.shared)
        least = 1e-6 * problem.bytes * rates.memory
        time = rates.call + max(time, least) + rates.beside * min(time, least) + 1e-6 * work.packed * rates.packed
        predicted[FIRST + tile.number] = time * (1.0 if work.resident else _STREAMING)
    return predicted
