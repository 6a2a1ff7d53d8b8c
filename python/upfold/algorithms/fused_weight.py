"""The CUDA module's side of `fused` for the gradient of the weight: its tiles, its scratch, and the time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ..problem import Problem
from . import cuda

_CALL = 8.0  # microseconds beside the blocks: two launches
_BLOCK = 3.0  # of a wave of blocks, beside its steps
_STEP = 0.1  # of a step, beside its products
_PRODUCT = 0.26  # of a tile of 2048 taps times channels times warps
_BYTE = 0.3e-6  # of the operands
_PARTIAL = 0.7e-6  # of a byte of partial sums


def reject(problem: Problem, device: int) -> str | None:
    """Say why no tile runs the gradient of the weight, or None."""
    if not _microseconds(problem, device):
        return (
            "pixels along the width must lie next to one another in the input and in the gradient, the taps near each other, "
            f"and its sums below the cap of {problem.workspace_cap} bytes"
        )
    return None


def call(problem: Problem, config: int, device: int) -> Any:
    """The planned call of a tile."""
    return cuda.module().FusedWeightCall(device, problem.cuda, config, problem.alignment, problem.workspace_cap)


def configs(problem: Problem, device: int) -> Sequence[int]:
    """The tiles that fit under the workspace cap, least predicted time first."""
    predicted = _microseconds(problem, device)
    return tuple(sorted(predicted, key=lambda config: predicted[config]))


@lru_cache(maxsize=4096)
def workspace_bytes(problem: Problem, config: int, device: int) -> int:
    """Bytes of the partial sums, or -1 where the tile does not fit."""
    needed: int = call(problem, config, device).workspace_bytes
    return needed


def predicted_seconds(problem: Problem, device: int) -> float:
    """Predict the time of the best tile, of a problem that is not rejected."""
    return 1e-6 * min(_microseconds(problem, device).values())


@lru_cache(maxsize=4096)
def _microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of blocks, whose steps multiply or wait for memory."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for config, (taps, warps, channels, in_one) in enumerate(cuda.module().fused_weight_tiles()):
        if workspace_bytes(problem, config, device) < 0:
            continue
        blocks, steps, products, _, _ = call(problem, config, device).work
        waves = -(-blocks // (multiprocessors * in_one))
        product = _PRODUCT * taps * warps * channels / 2048 * in_one
        time = waves * (_BLOCK + steps * (_STEP + products * product))
        moved = problem.bytes * _BYTE
        predicted[config] = _CALL + max(time, moved) + workspace_bytes(problem, config, device) * _PARTIAL
    return predicted
