"""The fused method on a GPU where channels are innermost in x and y: the forward and the gradient of the input."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda
from .base import Enqueue

# The number of its first tile among the configs of `fused`.
FIRST = 200


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to every tile of 40 layers and their gradients on an H200 (17 % off)."""

    call: float
    tile: float  # cycles of a tile, beside its products and results
    product: float  # times the cycles that one takes by itself
    issue: float  # cycles of one beside that
    loaded: float  # bytes that a multiprocessor gets in a cycle
    hidden: float  # of the lesser of multiplying and loading, the share that the other does not hide
    stored: float  # bytes that it puts
    memory: float  # of a megabyte of the operands, at the least
    packed: float  # of a megabyte of the weight


# Of float32 rounded to TF32, and of 16-bit values.
_RATES = _Rates(6.4, 490, 0.68, 130, 53.5, 0.355, 34, 0.29, 1.12), _Rates(5.8, 625, 0.71, 120, 55.5, 0.264, 17.8, 0.203, 1.48)
_CYCLES = 1755.0  # of a microsecond
_SOURCE, _PARTIAL = 0.55, 0.6  # of a megabyte of the source that is packed first, and of partial sums
_LAUNCH = 2.0  # of one more kernel
_HALF_EMPTY = 1.2  # waves, where a multiprocessor could take two blocks and gets one


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedLastCall(device, problem.cuda, config - FIRST, problem.alignment, problem.workspace_cap)


def enqueue(planned: Any, problem: Problem) -> Enqueue:
    """Bind a planned call to the order of operands: a gradient reads y and writes x."""
    forward: Enqueue = planned.enqueue
    if problem.operator is Operator.CONV_TRANSPOSE:
        return forward

    def gradient(x: int, w: int, bias: int, y: int, workspace: int, stream: int) -> None:
        forward(y, w, 0, x, workspace, stream)

    return gradient


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of tiles, which multiply or wait for what they copy, and store."""
    if problem.dtype is torch.float32 and not problem.allow_tf32:
        return {}
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    size = DTYPE_BYTES[problem.dtype]
    rates = _RATES[size == 2]
    packed = size * problem.in_channels * problem.out_channels_per_group * problem.taps
    predicted = {}
    for config, (rows, columns, phases, blocks, vectors) in enumerate(module.fused_last_tiles()):
        if not module.fused_last_fits(device, problem.cuda, config, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + config] = rates.call
            continue
        tiles, products, copied, resident, source, partial = call(problem, FIRST + config, device).work
        pair = columns * vectors * 16
        multiply = products * (rows * pair / 4096 * rates.product + rates.issue)
        load = (copied + (0.0 if resident else products * pair)) / rates.loaded
        store = rows * columns * phases * size / rates.stored
        waves = float(-(-tiles // (multiprocessors * blocks)) * blocks)
        if blocks > 1 and tiles <= multiprocessors:
            waves = _HALF_EMPTY
        time = waves * (max(multiply, load) + rates.hidden * min(multiply, load) + store + rates.tile) / _CYCLES
        time += 1e-6 * (packed * rates.packed + source * _SOURCE + partial * _PARTIAL) + (_LAUNCH if source else 0.0)
        predicted[FIRST + config] = rates.call + max(time, 1e-6 * problem.bytes * rates.memory)
    return predicted
