"""The fused gradient of the input on a GPU: its own tiles, and those of the forward where the stride is 1."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from ..problem import DTYPE_BYTES, NO_ACTIVATION, Operator, Problem
from . import cuda
from .base import Enqueue

REFUSAL = (
    "its gradient of the input wants compute capability 9.0, groups of 16 channels on both sides, rows of the gradient in order "
    "and aligned to 4 bytes, and taps and sizes that fit a tile"
)
# The number of the forward's first tile among the configs: those before it are the tiles made for the gradient.
MIRRORED = 100


@lru_cache(maxsize=4096)
def _mirrored(problem: Problem) -> Problem | None:
    padding = tuple(d * (k - 1) - p for d, k, p in zip(problem.dilation, problem.kernel_size, problem.padding))
    if problem.operator is not Operator.CONV or problem.groups > 1 or max(problem.stride) > 1 or min(padding) < 0:
        return None
    in_stride, out_stride, *taps = problem.w_strides
    return replace(
        problem,
        operator=Operator.CONV_TRANSPOSE,
        in_channels=problem.out_channels,
        out_channels=problem.in_channels,
        in_size=problem.out_size,
        out_size=problem.in_size,
        padding=(padding[0], padding[1], padding[2]),
        x_strides=problem.y_strides,
        y_strides=problem.x_strides,
        w_strides=(out_stride, in_stride, -taps[0], -taps[1], -taps[2]),
        has_bias=False,
        activation=NO_ACTIVATION,
    )


def mirrored(problem: Problem, config: int = MIRRORED) -> Problem | None:
    """The forward that computes a gradient of stride 1 with its kernel turned round, where this config is one of its tiles."""
    return _mirrored(problem) if config >= MIRRORED else None


def swapped(forward: Enqueue, problem: Problem) -> Enqueue:
    """Call a mirrored problem's forward with the operands of the gradient: its weight begins at the last tap."""
    steps = sum(stride * (size - 1) for stride, size in zip(problem.w_strides[2:], problem.kernel_size))
    last_tap = steps * DTYPE_BYTES[problem.dtype]

    def call(x: int, w: int, bias: int, y: int, workspace: int, stream: int) -> None:
        forward(y, w + last_tap, 0, x, workspace, stream)

    return call


def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits."""
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for config, (pixels, channels) in enumerate(module.fused_input_tiles()):
        if not module.fused_input_fits(device, problem.cuda, config, problem.alignment):
            continue
        call = module.FusedInputCall(device, problem.cuda, config, problem.alignment)
        tiles, steps, copied, _grain, parts, resident = call.work
        waves = -(-tiles // multiprocessors)
        multiply = steps * pixels * channels * 1.0e-6 * 4
        load = copied * 3.5e-5 + (0 if resident else steps * channels * 32 * 3e-5)
        store = pixels * channels * (2.0e-5 if parts == 1 else 5e-5)
        predicted[config] = 6.0 + waves * (max(multiply, load) + store)
    return predicted
