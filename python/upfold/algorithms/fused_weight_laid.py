"""The gradient of the weight by taps that are laid out in shared memory: 16-bit values and kernels two or four wide on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused` for this operator.
FIRST = 110


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: of the tiles of 19 layers on an H200, 7 % off near the fastest.

    Where another way takes about as long (U-Net 256, DCGAN 128 and 512, pix2pix 1024), the fit aims up to 10 % beside the time
    that was measured, so that the faster one is chosen.
    """

    call: float
    product: float  # times the cycles of the tensor cores
    loaded: float  # bytes that a multiprocessor gets in a cycle
    column: float  # cycles in which a column of a chunk is laid out
    paired: tuple[float, float, float, float]  # times as long, by tile, where two pixels are laid out together
    two_stages: float  # times as long, where there are no three
    tile: float  # cycles of a tile beside its chunks
    adding: float  # bytes of the others' sums that a block of a cluster gets in a cycle
    byte: float  # microseconds of a megabyte of the operands
    packing: float  # of the launch that packs x, and of a megabyte
    packed: float
    summing: float  # of the launch that adds sums of clusters up, of a megabyte, and of a cluster
    summed: float
    summed_cluster: float


_RATES = _Rates(4.03, 1.3, 43.2, 6.21, (1.04, 1.07, 1.0, 1.39), 1.27, 2080.0, 22.4, 0.099, 5.67, 0.302, 0.411, 0.199, 0.0452)
_PRODUCT_CYCLES = 2  # of 64 rows and a column, a chunk


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    module = cuda.module()
    return module.FusedWeightLaidCall(device, problem.cuda, config - FIRST, problem.alignment, problem.workspace_cap)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: rounds of blocks, whose chunks are multiplied or loaded or laid out."""
    if problem.operator is not Operator.CONV_TRANSPOSE_WEIGHT or DTYPE_BYTES[problem.dtype] != 2:
        return {}
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for config, (rows, columns) in enumerate(cuda.module().fused_weight_laid_tiles()):
        planned = call(problem, FIRST + config, device)
        if planned.workspace_bytes < 0:
            continue
        tiles, splits, clusters, chunks, stages, raw_bytes, paired, packed, partial = planned.work
        products, loads = _PRODUCT_CYCLES * rows / 64 * columns * _RATES.product, (128 * rows + raw_bytes) / _RATES.loaded
        chunk = max(products, loads, _RATES.column * columns)
        chunk *= _RATES.paired[config] if paired else 1.0
        chunk *= _RATES.two_stages if stages == 2 else 1.0
        cycles = chunks * chunk + _RATES.tile + 4 * rows * columns * (1 - 1 / splits) / _RATES.adding
        time = -(-tiles * splits * clusters // multiprocessors) * cycles / cuda.CYCLES
        time += _RATES.packing + 1e-6 * packed * _RATES.packed if packed else 0.0
        time += _RATES.summing + 1e-6 * partial * _RATES.summed + clusters * _RATES.summed_cluster if partial else 0.0
        predicted[FIRST + config] = _RATES.call + time + 1e-6 * problem.bytes * _RATES.byte
    return predicted
