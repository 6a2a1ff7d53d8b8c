"""How long tiles of the fused method on a GPU took beside each other, where their predictions err to different sides."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem import DTYPE_BYTES, Operator, Problem
from . import fused_last

# How many times as long tiles took beside the others of the same layers as is predicted: of TF32 and of 16-bit values, where
# channels are innermost in the result, there with equal kernel and stride, and where they are not, with equal kernel and stride
# and with others. Fitted to the choice among the tiles of 29 layers, those from 200 on to all of 50: by their timings its
# forwards take up to 2 % longer than with the fastest ones. 238 and 239 were fitted later, beside the tiles they compete with
# alone: to two and fourteen layers of equal kernel and stride. The last two anew, to 105 layers (H100), and those from 350 on to
# the layers of one axis among them: what is chosen takes 0.8 (TF32) and 0.4 % (16 bits) longer than the fastest on the 50, and
# 1.4 and 1.6 % on the others.
_FORWARD: tuple[tuple[Mapping[int, float], ...], ...] = (
    (
        {202: 0.85, 207: 0.91, 220: 1.05},
        {208: 0.85, 219: 1.05, 239: 0.86},
        {9: 1.13, 13: 1.05, 16: 1.1, 19: 1.05, 20: 1.3, 22: 0.95, 23: 1.03, 28: 0.9, 30: 0.85, 205: 0.9, 207: 0.95, 209: 1.05}
        | {216: 0.95, 222: 0.75, 226: 1.05, 228: 0.85, 231: 0.75, 232: 0.75, 238: 0.62},
        {9: 1.13, 12: 1.03, 13: 0.99, 16: 1.1, 19: 1.05, 20: 1.3, 22: 1.09, 23: 0.85, 25: 0.85, 28: 0.9, 31: 0.85, 200: 1.03}
        | {201: 1.06, 205: 0.95, 207: 0.95, 209: 0.96, 212: 0.94, 216: 0.95, 222: 0.75, 226: 0.97, 228: 0.98, 229: 0.97}
        | {231: 0.75, 232: 0.8, 236: 0.97, 350: 0.78},
    ),
    (
        {205: 0.85, 207: 0.91, 220: 0.9},
        {239: 1.15},
        {9: 0.94, 10: 1.1, 18: 0.89, 22: 1.06, 23: 1.06, 25: 2.0, 26: 0.94, 27: 1.12, 28: 0.9, 236: 1.05, 238: 1.1},
        {9: 0.94, 10: 1.1, 18: 0.89, 20: 0.77, 22: 1.06, 23: 1.06, 25: 2.0, 27: 1.12, 30: 0.97, 201: 0.95, 207: 0.8, 214: 0.85}
        | {228: 0.97, 229: 0.97, 233: 1.12, 236: 0.76, 237: 0.82, 350: 0.97, 351: 1.12},
    ),
)
# And of some where rows of x are no whole vectors, beside tiles of boxes (Mask R-CNN, 14 x 14: in TF32 on an H100 178 us by 222,
# whose weights two blocks share, and 229 by 234; without sharing 208).
_ODD_ROWS, _ODD_TILES, _VECTOR_BYTES = 1.7, (16, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27), 16
_ODD_BOXES: tuple[Mapping[int, float], ...] = ({222: 0.96, 223: 1.1, 234: 0.93}, {})  # for those above, of boxes
# And of planes of TF32, where 222 is predicted to take so many microseconds before, and there are so many channels: 223 is the
# faster there (U-Net 1024 67 us for 73 to 76, YOLO 113 for 121), and slower below (nnU-Net's deepest 28 for 18) and of fewer
# channels (SAM 64 -> 32 69 for 63).
_LARGE, _MANY_CHANNELS, _LARGE_TILES = 45.0, 128, {223: 0.74}
# The same of gradients of the input, of tensors whose width is innermost and of others; and of 16-bit values where y has its
# channels innermost and x has not, as in a backward that turns y's gradient first.
_GRADIENT: tuple[tuple[Mapping[int, float], ...], ...] = (
    (
        {13: 1.03, 16: 1.08, 18: 0.955, 20: 0.98, 104: 1.15, 110: 1.13, 200: 1.03, 201: 1.03, 212: 0.97, 213: 0.86, 228: 0.95},
        {204: 0.9, 218: 0.9},
    ),
    (
        {0: 0.93, 8: 0.87, 9: 0.93, 11: 0.93, 104: 1.15, 110: 1.25, 212: 0.78, 214: 0.85, 226: 1.08, 227: 0.96, 228: 0.97},
        {202: 1.05, 203: 0.9, 220: 1.05},
    ),
)
_TURNED: Mapping[int, float] = {201: 0.89, 204: 0.77, 205: 0.9, 209: 0.85, 214: 0.8, 217: 0.92, 227: 0.9, 228: 0.9}


def compared(problem: Problem, predicted: dict[int, float], device: int) -> dict[int, float]:
    """Return predicted times of tiles, by config, as they are set against each other."""
    if problem.in_full_float32:
        return predicted
    half = DTYPE_BYTES[problem.dtype] == 2
    if problem.operator is Operator.CONV:
        times = _GRADIENT[half][problem.x_strides[1] == 1]
        if half and problem.y_strides[1] == 1 and problem.x_strides[1] != 1:
            times = _TURNED
    else:
        large = predicted.get(222, 0.0) >= _LARGE and problem.out_channels_per_group >= _MANY_CHANNELS
        in_planes, equal = problem.y_strides[1] != 1, problem.kernel_size == problem.stride
        times = _FORWARD[half][(2 if equal else 3) if in_planes else int(equal)]
        if in_planes and problem.in_size[2] * DTYPE_BYTES[problem.dtype] % _VECTOR_BYTES:
            times = {**times, **dict.fromkeys(_ODD_TILES, _ODD_ROWS), **_ODD_BOXES[half]}
        elif in_planes and not half and large:
            times = {**times, **_LARGE_TILES}
        if fused_last.lies(problem, device):  # rates of those were fitted to the choice
            times = {config: factor for config, factor in times.items() if config < fused_last.FIRST}
    return {config: time * times.get(config, 1.0) for config, time in predicted.items()}
