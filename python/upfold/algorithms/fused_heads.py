"""The fused method for heads: layers of one to four output channels, kernel 4 and stride 2, on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ..problem import Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused`.
FIRST = 270


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to DCGAN 64 -> 3 in TF32 and bfloat16 on an H200."""

    call: float
    product: float  # cycles of a warp's product
    unit: float  # of a unit beside its products
    loaded: float  # bytes that a multiprocessor gets in a cycle


_RATES = _Rates(5.4, 12.0, 400.0, 20.0)


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedHeadsCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: warps multiply the rows that they get."""
    if problem.operator is not Operator.CONV_TRANSPOSE or problem.in_full_float32:
        return {}
    module = cuda.module()
    predicted = {}
    for config in range(len(module.fused_heads_tiles())):
        if not module.fused_heads_fits(device, problem.cuda, config, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + config] = _RATES.call
            continue
        _, warps, turns, units, products, row_bytes = call(problem, FIRST + config, device).work
        busy = turns * units * (products * _RATES.product + _RATES.unit)
        load = turns * warps * (units + 1) * row_bytes / _RATES.loaded
        predicted[FIRST + config] = _RATES.call + max(busy, load) / cuda.CYCLES
    return predicted
