"""The fused method on a GPU where channels are innermost in x and y: the forward and the gradient of the input."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda
from .base import Enqueue

# The number of its first tile among the configs of `fused`.
FIRST = 200
# What predicts the microseconds of a call.
_CALL = 5.0
_MEMORY = 0.27  # of a megabyte of the operands, at the least
_PACKED = 0.2  # of a megabyte of the weight
_CYCLES = 1755.0  # of a microsecond
_PRODUCT = 1.25  # times the cycles that the tensor cores take at the least
_LOADED = 40.0  # bytes that a multiprocessor gets in a cycle
_STORED = 24.0  # and puts
_TILE = 600.0  # cycles of a tile beside all that


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedLastCall(device, problem.cuda, config - FIRST, problem.alignment)


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
    packed = size * problem.in_channels * problem.out_channels_per_group * problem.taps
    predicted = {}
    for config, (rows, columns, phases, blocks, vectors) in enumerate(module.fused_last_tiles()):
        if not module.fused_last_fits(device, problem.cuda, config, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + config] = _CALL
            continue
        tiles, products, copied, resident = call(problem, FIRST + config, device).work
        pair = columns * vectors * 16
        multiply = products * rows * pair / 4096 * _PRODUCT
        load = (copied + (0.0 if resident else products * pair)) / _LOADED
        store = rows * columns * phases * size / _STORED
        waves = -(-tiles // (multiprocessors * blocks)) * blocks
        time = waves * (max(multiply, load) + store + _TILE) / _CYCLES + 1e-6 * packed * _PACKED
        predicted[FIRST + config] = _CALL + max(time, 1e-6 * problem.bytes * _MEMORY)
    return predicted
