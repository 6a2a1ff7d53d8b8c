"""The fused method for maps of one pixel on a GPU: the weight is read once, as it lies, in one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its only tile among the configs of `fused`.
FIRST = 290


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to two layers of one to 64 samples on an H200 (11 % off)."""

    call: float
    streamed: float  # of a megabyte of the weight
    several: float  # of one that is multiplied by several samples, counted in whole steps of a block
    again: float  # and of one that further blocks read for further samples


# Of float32 and of 16-bit values.
_RATES = (_Rates(2.0, 0.32, 0.07, 0.17), _Rates(2.2, 0.41, 0.12, 0.45))


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of this tile."""
    return cuda.module().FusedPointCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict its time, where it fits: every block reads its columns of the weight for a few samples."""
    if problem.operator is not Operator.CONV_TRANSPOSE:
        return {}
    if not cuda.module().fused_point_fits(device, problem.cuda, 0, problem.alignment):
        return {}
    half = DTYPE_BYTES[problem.dtype] == 2
    rates = _RATES[half]
    if problem.batch == 0:
        return {FIRST: rates.call}
    _, rows, samples = call(problem, FIRST, device).work  # rows: counted in whole steps
    weight = 1e-6 * problem.in_channels * problem.out_channels_per_group * problem.taps * DTYPE_BYTES[problem.dtype]
    stepped = weight * rows / problem.in_channels_per_group
    sets = -(-problem.batch // samples)
    more = (rates.several if samples > 1 else 0.0) + (sets - 1) * rates.again
    return {FIRST: rates.call + weight * rates.streamed + stepped * more}
