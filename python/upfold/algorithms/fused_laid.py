"""The gradient of the input by taps that are laid out in shared memory: kernels two or four wide on a GPU, nothing packed."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused`.
FIRST = 264


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: of tiles near the fastest of 21 layers, in two types on an H200, 4 % off."""

    call: float
    product: float  # times the cycles of the tensor cores
    chunk: float  # cycles in which one is laid out, and of a pixel in it
    pixel: float
    beside: float  # times as long, where taps may lie beside the plane and no pairs of pixels are laid out together
    two_stages: float  # times as long, where there are no three
    tile: float  # cycles of a tile beside its chunks
    stored: dict[int, float]  # of 64 results, by the bytes of a value
    adding: float  # cycles of a cluster of two that adds up, and each time that it is twice as large; of a thousand sums
    added: float
    byte: float  # microseconds of a megabyte of the operands


_RATES = _Rates(2.38, 1.18, 384.0, 4.33, 1.067, 1.333, 420.0, {2: 3.58, 4: 6.26}, 983.0, 147.0, 0.1086)
_PRODUCT_CYCLES = 2  # of 64 rows and a pixel, a chunk
# Times as long as that, of kernels of two, tiles of so many rows for a pixel or more. By timings 1.12; more, since where they are
# about as fast as tiles of packed weights (U-Net 1024) these are expected to take longer than they do.
_HIGH, _ROWS_OF_PIXEL = 1.22, 2
_ODD = 2.0  # times as long, stores of planes that are no pairs of pixels: as DPT, alone of them, is 5 to 8 % off in bfloat16


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedLaidCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: rounds of tiles, whose chunks are multiplied, or laid out for longer."""
    size = DTYPE_BYTES[problem.dtype]
    if problem.operator is not Operator.CONV or size > 4:
        return {}
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for config, (rows, pixels) in enumerate(module.fused_laid_tiles()):
        if not module.fused_laid_fits(device, problem.cuda, config, problem.alignment):
            continue
        tiles, chunks, splits, stages, beside = call(problem, FIRST + config, device).work
        products = rows / 64 * pixels
        chunk = max(_PRODUCT_CYCLES * products * _RATES.product, _RATES.chunk + _RATES.pixel * pixels)
        chunk *= (_RATES.beside if beside else 1.0) * (_RATES.two_stages if stages == 2 else 1.0)
        chunk *= _HIGH if problem.kernel_size[2] == 2 and rows >= _ROWS_OF_PIXEL * pixels else 1.0
        stored = products * _RATES.stored[size] * (_ODD if math.prod(problem.in_size[1:]) % 2 else 1.0)
        cycles = chunks * chunk + _RATES.tile + stored
        cycles += math.log2(splits) * _RATES.adding + 1e-3 * rows * pixels * _RATES.added if splits > 1 else 0.0
        time = -(-tiles // multiprocessors) * cycles / cuda.CYCLES
        predicted[FIRST + config] = _RATES.call + time + 1e-6 * problem.bytes * _RATES.byte
    return predicted
