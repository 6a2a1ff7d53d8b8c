"""The gradient of the input of maps of one pixel on a GPU: the weight is read once, as it lies, in one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its only tile among the configs of `fused`.
FIRST = 291


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to one layer of one sample on an H200; more samples are not."""

    call: float
    streamed: float  # of a megabyte of the weight
    again: float  # of one that further blocks read for further samples
    block: float


# Of float32 and of 16-bit values.
_RATES = (_Rates(1.4, 0.363, 0.5, 0.004), _Rates(1.4, 0.363, 0.8, 0.004))


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of this tile."""
    return cuda.module().FusedPointInputCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict its time, where it fits: blocks read their rows of the weight for a few samples."""
    if problem.operator is not Operator.CONV:
        return {}
    if not cuda.module().fused_point_input_fits(device, problem.cuda, 0, problem.alignment):
        return {}
    rates = _RATES[DTYPE_BYTES[problem.dtype] == 2]
    blocks, _, samples = call(problem, FIRST, device).work
    weight = 1e-6 * problem.in_channels * problem.out_channels_per_group * problem.taps * DTYPE_BYTES[problem.dtype]
    sets = -(-problem.batch // samples)
    again = sets - 1 if samples == 1 else sets - 0.5
    return {FIRST: rates.call + blocks * rates.block + weight * (rates.streamed + again * rates.again)}
