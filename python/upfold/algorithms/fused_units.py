"""The fused method whose rows are units and whose columns are channels and phases: long strides of few channels on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused`.
FIRST = 250


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to three layers of score maps on an H200 (10 % off)."""

    call: float
    block: float  # cycles of a block, beside what it fills in and its tiles
    fill: float  # cycles of a vector that a thread fills in
    product: float  # of 64 places and 64 columns
    stored: float  # bytes of y that a multiprocessor puts in a cycle
    memory: float  # microseconds of a megabyte of the operands, at the least


# Of float32 rounded to TF32, and of 16-bit values.
_RATES = (
    _Rates(3.5, 610, 208, 32, 13.0, 0.25),
    _Rates(3.5, 610, 395, 32, 9.6, 0.25),
)
_PIXELS = 1.42  # times as long where channels are innermost in y


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedUnitsCall(device, problem.cuda, config - FIRST)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of blocks, which fill in and then multiply or store."""
    if problem.operator is not Operator.CONV_TRANSPOSE or problem.in_full_float32:
        return {}
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    size = DTYPE_BYTES[problem.dtype]
    rates = _RATES[size == 2]
    predicted = {}
    for config, columns in enumerate(module.fused_units_tiles()):
        if not module.fused_units_fits(device, problem.cuda, config):
            continue
        if problem.batch == 0:
            predicted[FIRST + config] = rates.call
            continue
        blocks, resident, tiles, filled, products = call(problem, FIRST + config, device).work
        tile = max(64 * columns * size / rates.stored, products * columns / 64 * rates.product)
        waves = -(-blocks // (multiprocessors * resident))
        time = waves * (rates.block + filled * rates.fill + resident * tiles * tile) / cuda.CYCLES
        time *= _PIXELS if problem.y_strides[1] == 1 else 1.0
        predicted[FIRST + config] = rates.call + max(time, 1e-6 * problem.bytes * rates.memory)
    return predicted
