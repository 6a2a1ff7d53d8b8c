"""The gradients of small layers on a GPU whose kernel and stride are equal, two along the width: one launch, nothing packed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused`, in both gradients.
FIRST = 294


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to eight layers on an H200 (root mean square 11 to 18 % off)."""

    call: float
    filled: float  # of blocks that fill the device, beside their steps
    step: float  # of one warp
    busy: float  # of one of every warp that the device has room for


# By operator, of float32 rounded to TF32 and of 16-bit values.
_RATES = {
    Operator.CONV: (_Rates(1.72, 0.98, 0.33, 0.65), _Rates(2.83, 0.75, 0.37, 0.72)),
    Operator.CONV_TRANSPOSE_WEIGHT: (_Rates(1.82, 1.56, 0.38, 0.56), _Rates(3.0, 1.8, 0.39, 0.49)),
}


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of its tiles."""
    return cuda.module().FusedSmallCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: of warps that read and multiply a step after another, or of all of them."""
    if problem.operator not in _RATES:
        return {}
    module = cuda.module()
    rates = _RATES[problem.operator][DTYPE_BYTES[problem.dtype] == 2]
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for tile, at_once in enumerate(module.fused_small_tiles()):
        if not module.fused_small_fits(device, problem.cuda, tile, problem.alignment):
            continue
        blocks, steps = call(problem, FIRST + tile, device).work
        filled = blocks / (multiprocessors * at_once)
        predicted[FIRST + tile] = rates.call + filled * rates.filled + steps * max(rates.step, filled * rates.busy)
    return predicted
