"""The fused method whose columns stay in shared memory: layers of few output channels on a GPU."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused`.
FIRST = 240


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to both tiles of three layers in both layouts on an H200 (8 % off)."""

    call: float
    product: float  # cycles of 32 bytes of channels in a step
    step: float  # cycles of a step, beside its products and turns
    turn: float  # cycles of a turn of its stores
    share: float  # of its time, what a block beside another takes longer
    copied: float  # bytes of x that a multiprocessor gets in a cycle
    memory: float  # microseconds of a megabyte of the operands, at the least
    beside: float  # of the lesser of what a call computes and moves


# Of float32 rounded to TF32, and of 16-bit values.
_RATES = (
    _Rates(5.0, 110, 500, 120, 0.2, 20.0, 0.25, 0.6),
    _Rates(5.0, 110, 700, 120, 0.2, 20.0, 0.25, 0.6),
)
# Times a turn of k4 s2, of each tap of an output, and once more, of kernels whose outputs are summed one by one (H100: 220 to 240
# cycles a tap of 9 x 9 with strides of 2 and 3, and of 3 x 32 with strides of 1 and 16).
_ONE_BY_ONE = 1.9
# Times as long as predicted the first tile takes in TF32 where that is so many microseconds or more: of pix2pix's 128 -> 3 with 8
# and 16 pictures (H100: 37 and 62 us, the second tile 47 and 63; H200, 16 pictures: 46 and 50).
_LONG, _FIRST_OF_LONG = 25.0, 0.85


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedColumnsCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: the steps of a block, or the copies of x."""
    if problem.operator is not Operator.CONV_TRANSPOSE or problem.in_full_float32:
        return {}
    module = cuda.module()
    rates = _RATES[DTYPE_BYTES[problem.dtype] == 2]
    by_fours = problem.kernel_size[1:] == (4, 4) and problem.stride[1:] == (2, 2)
    taps = prod(-(-kernel // stride) for kernel, stride in zip(problem.kernel_size, problem.stride))  # of an output, at the most
    turn = rates.turn * (1.0 if by_fours else _ONE_BY_ONE * (1 + taps))
    predicted = {}
    for config, _ in enumerate(module.fused_columns_tiles()):
        if not module.fused_columns_fits(device, problem.cuda, config, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + config] = rates.call
            continue
        blocks, resident, walks, steps, products, turns, copied = call(problem, FIRST + config, device).work
        alone = walks * steps * (max(products * rates.product, turns * turn) + rates.step)
        alone *= (1.0 + rates.share * max(0, resident - 1)) / cuda.CYCLES
        moved = max(copied / blocks * resident / (rates.copied * cuda.CYCLES), 1e-6 * problem.bytes * rates.memory)
        predicted[FIRST + config] = rates.call + max(alone, moved) + rates.beside * min(alone, moved)
    if DTYPE_BYTES[problem.dtype] == 4 and predicted.get(FIRST, 0.0) >= _LONG:
        predicted[FIRST] *= _FIRST_OF_LONG
    return predicted
