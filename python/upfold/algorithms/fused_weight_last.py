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
    """What predicts the microseconds of a call: fitted to tiles of 45 layers on an H200, and where blocks store w to fewer.

    Of these, the best guess is 0.2 (float32, 22 layers) and 0.7 % (16-bit values, 29, most of them in both layouts) behind the
    fastest tile in geometric mean; predictions near it are 8 and 25 % off in root mean square, mostly where channels are few.
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
    _Rates(5.84, 1.71, 3.76, 232, 29.1, 23.9, 1.06, 0.0, 0.247, 0.055, 0.873, 2.46, 0.153, 2.35, (1.041, 0.944)),
    _Rates(5.5, 2.75, 0.0, 120, 7.14, 84.9, 1.2, 0.5, 0.234, 0.126, 0.555, 2.9, 0.437, 2.1,
           (0.79, 0.85, 1.1, 1.2, 1.15, 0.9, 0.95, 1.06)),
)  # fmt: skip
_FIRST_OF_FLOATS = 8


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    module = cuda.module()
    return module.FusedWeightLastCall(device, problem.cuda, config - FIRST, problem.alignment, problem.workspace_cap)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of blocks, whose tiles of positions multiply or wait for their copies."""
    if problem.dtype is torch.float32 and not problem.allow_tf32:
        return {}
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    rates = _RATES[DTYPE_BYTES[problem.dtype] == 2]
    weights = problem.in_channels * problem.out_channels_per_group * problem.taps
    predicted = {}
    for config, (channels, columns) in enumerate(cuda.module().fused_weight_last_tiles()):
        planned = call(problem, FIRST + config, device)
        if planned.workspace_bytes < 0:
            continue
        blocks, length, launches, steps, copied, packed, partial, stored, cluster = planned.work
        factor = rates.tiles[config % _FIRST_OF_FLOATS]
        products, loads = steps * rates.product * factor * channels * columns / 1024, copied / rates.loaded
        tile = max(products, loads) + rates.overlap * min(products, loads) + rates.tile
        tile *= rates.apart if cluster > 1 else 1.0
        waves = -(-blocks // multiprocessors) * launches
        time = waves * (rates.block + (length * tile + stored / cluster) / cuda.CYCLES)
        least = 1e-6 * problem.bytes * rates.memory
        scratch = 1e-6 * packed * rates.packed + (rates.launch * launches if packed else 0.0)
        if partial > 0:
            scratch += rates.sums + 1e-6 * (partial * rates.partial + weights * rates.weight)
        predicted[FIRST + config] = rates.call + max(time, least) + rates.beside * min(time, least) + scratch
    return predicted
