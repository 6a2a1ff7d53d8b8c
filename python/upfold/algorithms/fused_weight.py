"""The CUDA module's side of `fused` for the gradient of the weight: its tiles, its scratch, and the time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Problem
from . import cuda, fused_groups, fused_small, fused_weight_laid, fused_weight_last


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to every tile of 42 contiguous layers on an H200, of boxes on an H100.

    First near the fastest tile of a layer (11 % off in root mean square), then to the choice among all tiles and `gemm`; those of
    boxes of float32 to an H200's anew (12 % off). They order tiles and are compared with other methods; they are no rates of the
    device. `.ci/check_choice.py` holds the choice to the timings in `benchmarks/timings`.
    """

    call: float
    wave: float  # of blocks, beside their steps
    step: float
    product: float  # of a step, of 2048 sums of the warps of a multiprocessor
    copy: float  # of a step; of boxes, a cycle of theirs as planned
    byte: float  # of the operands, at the least
    partial: float  # of a byte of partial sums
    packed: float = 0.0  # of a byte of an operand that is packed first


_RATES = {
    4: _Rates(4.9, 1.6, 0.095, 0.393, 6.83e-4, 3.7e-7, 1.2e-6),
    2: _Rates(6.1, 0.06, 0.31, 0.295, 4.19e-4, 2.68e-7, 1.11e-6),
}
_BOX_RATES = {
    4: _Rates(5.6, 0.16, 0.089, 0.224, 4.92e-4, 2.56e-7, 4.38e-7, 4.74e-7),
    2: _Rates(7.12, 0.0, 0.486, 0.316, 5.71e-4, 2.77e-7, 4.89e-7, 5.96e-7),
}
_PRODUCT_SUMS = 2048  # taps times warps times input channels of a tile
# Of boxes of float32, times as long as waves of blocks are predicted, by tile from the first on.
_FLOAT_BOXES, _FIRST_OF_BOXES = (0.935, 0.86, 0.955, 1.03, 0.9), 5
# Of boxes of 16-bit values, tiles of so many input channels: times as long as waves of blocks are predicted. 0.511 by 45 layers
# on an H100; 3 % more, since U-Net 256 takes 49 us by these and 45 by taps laid out, predicted a percent or two apart (H200).
_WIDE, WIDE_CHANNELS = 0.525, 128
# Times as long as is predicted by the bytes of a value, from such a stride of the width on.
_FAR, _FAR_STRIDE = {4: 1.32, 2: 1.15}, 8
# The same where maps are one row to the copy engine.
_MERGED = 1.22
# The same, by the bytes of a value, of tiles by boxes that have twice the input channels or more taps than there are (by an H200,
# whose memory feeds those that fit 17 % faster), and of float32 where a row of x has 32 bytes at most.
_IDLE, _SHORT, _SHORT_BYTES = {4: 1.06, 2: 1.042}, 1.07, 32
# Microseconds more where clusters add parts up, whose partial sums are fewer.
_TOGETHER = 3.3


def reject(problem: Problem, device: int) -> str | None:
    """Say why no tile runs the gradient of the weight, or None."""
    if microseconds(problem, device):
        return None
    if problem.batch == 0:
        return "an empty batch has no products"
    if any(step != 1 for step, size in _widths(problem) if size > 1):
        return (
            "the gradient of its weight reads pixels that lie next to one another, as in contiguous tensors, or copies of "
            f"channels_last ones, below the cap of {problem.workspace_cap} bytes; raise UPFOLD_WORKSPACE_MB"
        )
    return (
        f"taps of the gradient of its weight lie too far apart, or its sums are beyond the cap of {problem.workspace_cap} bytes; "
        "raise UPFOLD_WORKSPACE_MB"
    )


def _widths(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    return (problem.x_strides[4], problem.in_size[2]), (problem.y_strides[4], problem.out_size[2])


def call(problem: Problem, config: int, device: int) -> Any:
    """The planned call of a tile."""
    if config >= fused_small.FIRST:
        return fused_small.call(problem, config, device)
    if config == fused_groups.CONFIG:
        return fused_groups.call(problem, device)
    if config >= fused_weight_laid.FIRST:
        return fused_weight_laid.call(problem, config, device)
    if config >= fused_weight_last.FIRST:
        return fused_weight_last.call(problem, config, device)
    return cuda.module().FusedWeightCall(device, problem.cuda, config, problem.alignment, problem.workspace_cap)


def configs(problem: Problem, device: int) -> Sequence[int]:
    """The tiles that fit under the workspace cap, least predicted time first."""
    predicted = microseconds(problem, device)
    return tuple(sorted(predicted, key=lambda config: predicted[config]))


@lru_cache(maxsize=4096)
def workspace_bytes(problem: Problem, config: int, device: int) -> int:
    """Bytes of the partial sums and of packed operands, or -1 where the tile does not fit."""
    needed: int = 0 if config >= fused_small.FIRST else call(problem, config, device).workspace_bytes
    return needed


def sums_channels(problem: Problem, config: int, device: int) -> int:
    """In how many parts a tile sums y's channels on the way, the gradient of the bias; 0: it does not."""
    sums = config < fused_weight_last.FIRST or fused_weight_laid.FIRST <= config < fused_groups.CONFIG
    return int(call(problem, config, device).sums) if sums else 0


def predicted_seconds(problem: Problem, device: int) -> float:
    """Predict the time of the best tile, of a problem that is not rejected."""
    return 1e-6 * min(microseconds(problem, device).values())


def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits."""
    return (
        _microseconds(problem, device)
        | fused_weight_last.microseconds(problem, device)
        | fused_weight_laid.microseconds(problem, device)
        | fused_groups.microseconds(problem, device)
        | fused_small.microseconds(problem, device)
    )


@lru_cache(maxsize=4096)
def _microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of blocks, whose steps multiply or wait for their copies."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for config, (taps, warps, channels, together, boxes) in enumerate(cuda.module().fused_weight_tiles()):
        needed = workspace_bytes(problem, config, device)
        if needed < 0:
            continue
        rates = (_BOX_RATES if boxes else _RATES)[DTYPE_BYTES[problem.dtype]]
        blocks, steps, products, copies, packed, planes, _, merged, added = call(problem, config, device).work
        waves = -(-blocks // (multiprocessors * together))
        work = max(products * together * taps * warps * channels / _PRODUCT_SUMS * rates.product, copies * together * rates.copy)
        time = waves * (rates.wave + steps * (rates.step + work))
        if boxes and DTYPE_BYTES[problem.dtype] == 4:
            time *= _FLOAT_BOXES[config - _FIRST_OF_BOXES]
        elif boxes and channels >= WIDE_CHANNELS:
            time *= _WIDE
        scratch = (needed - packed - planes) * rates.partial + packed * rates.packed + (_TOGETHER if added > 1 else 0.0)
        far = problem.stride[2] >= _FAR_STRIDE and problem.taps > 1
        size = DTYPE_BYTES[problem.dtype]
        longer = (_FAR[size] if far else 1.0) * (_MERGED if merged else 1.0)
        if boxes and (channels >= 2 * problem.in_channels_per_group or taps > problem.kernel_size[2]):
            longer *= _IDLE[size]
        longer *= _SHORT if boxes and size == 4 and 4 * problem.in_size[2] <= _SHORT_BYTES else 1.0
        predicted[config] = longer * (rates.call + max(time, problem.bytes * rates.byte) + scratch) + 1e6 * cuda.planes_seconds(
            planes
        )
    return predicted
