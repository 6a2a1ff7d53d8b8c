"""The fused method for windows: small layers with a stride of 1 on a GPU, forward and gradient of the input, in one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused`, in both operators.
FIRST = 297


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to the tiles of one layer in both operators on an H200 (18 % off)."""

    call: float
    loaded: float  # of a pixel's chunk of channels
    laid: float  # of a tap's chunk, times channels of the tile
    step: float  # of a warp


# Of float32 rounded to TF32 and of 16-bit values; a multiprocessor takes one block at a time.
_RATES = (_Rates(2.0, 0.004, 0.0059, 0.08), _Rates(2.0, 0.006, 0.0057, 0.18))


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedWindowCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: blocks load and lay out their operands, and then multiply."""
    if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT or problem.in_full_float32:
        return {}
    module = cuda.module()
    rates = _RATES[DTYPE_BYTES[problem.dtype] == 2]
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for tile, channels in enumerate(module.fused_window_tiles()):
        if not module.fused_window_fits(device, problem.cuda, tile, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + tile] = rates.call
            continue
        blocks, loaded, laid, steps = call(problem, FIRST + tile, device).work
        block = loaded * rates.loaded + laid * channels * rates.laid + steps * rates.step
        predicted[FIRST + tile] = rates.call + -(-blocks // multiprocessors) * block
    return predicted
