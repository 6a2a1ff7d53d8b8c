"""The fused gradient of the weight whose channels are innermost, on a GPU: its tiles and the time that they take."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Problem
from . import cuda

# The number of its first tile among the configs of `fused` for this operator.
FIRST = 100


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to tiles of 42 contiguous layers and 24 in channels_last (H200).

    In root mean square predictions are 11 % off near the fastest tile; in channels_last the best guess is 0.1 % behind. Those of
    16-bit values were fitted anew to contiguous layers, some of whose operands lie or are packed otherwise since (8 % off).
    """

    call: float
    sums: float  # of the launch that adds partial sums up
    block: float  # of a wave of blocks, beside its tiles of positions
    tile: float  # cycles of a tile of positions, beside its products
    product: float  # cycles of 16 positions in 64 input channels and 16 columns
    loaded: float  # bytes that a multiprocessor gets in a cycle
    apart: float  # times a tile's, where two blocks are a cluster
    overlap: float  # of the lesser of products and loads, what the greater does not hide
    memory: float  # of a megabyte of the operands, at the least
    beside: float  # of the lesser of what a call computes and moves
    packed: float  # of a megabyte of an operand that is packed first
    launch: float  # of that
    partial: float  # of a megabyte of partial sums
    weight: float  # of a million elements of the weight
    tiles: tuple[float, ...]  # times the products' cycles, by config


# Of float32 rounded to TF32, and of 16-bit values; `tiles` count from the first config of these.
_RATES = (
    _Rates(5.24, 1.65, 4.48, 228, 24.8, 27.2, 1.0, 0.0, 0.252, 0.055, 0.776, 2.21, 0.146, 2.2, (0.975, 0.89)),
    _Rates(3.63, 0.342, 0.06, 275, 6.34, 195, 1.3, 0.486, 0.26, 0.872, 0.327, 1.65, 0.26, 1.98,
           (0.862, 0.859, 1.27, 1.14, 1.1, 0.982, 0.823, 0.823)),
)  # fmt: skip
_FIRST_OF_FLOATS = 8
# Pixels of at most so many bytes of y are brought as rows of boxes one by one, which takes tiles so many times as long (by two
# layers of 3 channels in 16 bits).
_NARROW_BYTES, _NARROW = 16, 3.5
# Times as long as is planned, where blocks store all taps of their output channels: not timed by itself, but by it one layer that
# `gemm` computes in 0.9 of the time (pix2pix's 1024 channels on 4 x 4) is left to that.
_SQUARES = 3
_GROUPS = 1.3  # times as long in groups (the first seed, 8 and 16 channels of each: 1.2 and 1.3)


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    module = cuda.module()
    return module.FusedWeightLastCall(device, problem.cuda, config - FIRST, problem.alignment, problem.workspace_cap)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of blocks, whose tiles of positions multiply or wait for their copies."""
    if problem.in_full_float32:
        return {}
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    rates = _RATES[DTYPE_BYTES[problem.dtype] == 2]
    weights = problem.in_channels * problem.out_channels_per_group * problem.taps
    predicted = {}
    for config, (channels, columns) in enumerate(cuda.module().fused_weight_last_tiles()):
        planned = call(problem, FIRST + config, device)
        if planned.workspace_bytes < 0:
            continue
        blocks, length, launches, steps, copied, packed, partial, stored, cluster, squares, _ = planned.work
        factor = rates.tiles[config % _FIRST_OF_FLOATS]
        products, loads = steps * rates.product * factor * channels * columns / 1024, copied / rates.loaded
        tile = max(products, loads) + rates.overlap * min(products, loads) + rates.tile
        tile *= rates.apart if cluster > 1 else 1.0
        tile *= _NARROW if problem.out_channels_per_group * DTYPE_BYTES[problem.dtype] <= _NARROW_BYTES else 1.0
        tile *= _GROUPS if problem.groups > 1 else 1.0
        stored *= _SQUARES if squares else 1
        waves = -(-blocks // multiprocessors) * launches
        time = waves * (rates.block + (length * tile + stored / cluster) / cuda.CYCLES)
        least = 1e-6 * problem.bytes * rates.memory
        scratch = 1e-6 * packed * rates.packed + (rates.launch * launches if packed else 0.0)
        if partial > 0:
            scratch += rates.sums + 1e-6 * (partial * rates.partial + weights * rates.weight)
        predicted[FIRST + config] = rates.call + max(time, least) + rates.beside * min(time, least) + scratch
    return predicted
