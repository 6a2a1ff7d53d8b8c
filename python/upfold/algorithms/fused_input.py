"""The fused gradient of the input on a GPU: its own tiles, and those of the forward where the stride is 1."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from ..problem import DTYPE_BYTES, NO_ACTIVATION, Operator, Problem
from . import cuda, fused_last
from .base import Enqueue

REFUSAL = (
    "its gradient of the input wants at most 32 channels in a group, or compute capability 9.0, 8 input and 16 output ones (or "
    "16 and 3, where rows of the gradient are in order and aligned to 4 bytes), and taps and sizes that fit a tile"
)
# The number of the forward's first tile among the configs: those before it are the tiles made for the gradient.
MIRRORED = 100
# What predicts the microseconds of a call, fitted to 253 tiles of 27 layers on an H200 (9 % off in root mean square; of 16-bit
# values mostly before their results went straight to x). Like those of the forward they order tiles and methods; they are no
# rates of the device.
_CALL = 6.45
_MEMORY = 0.294  # of a megabyte of the operands, at the least
_PACKED = 4.16  # of a million elements of the weight
_PARTIAL = 0.311  # of a megabyte of partial sums
_COPIED, _COPY = 7.87e-6, 4.99e-4  # of a byte of the gradient, and of a copy of some
_STREAMED = 7.84e-6  # of a byte of weights, where they do not stay
_STORED = {4: 1.4e-4, 2: 1.12e-4}  # of a sum, by the bytes of a value
# Of a step, and of a pixel and a channel in one, by how taps are read: as fours, as rows of four, as threes, in pairs, singly,
# and four of a pixel.
_MULTIPLY = (
    (0.0846, 2.93e-6),
    (0.0914, 2.1e-6),
    (0.0912, 3.03e-6),
    (0.117, 2.19e-6),
    (0.163, 3.19e-6),
    (0.0842, 2.5e-6),
)
# As words, where the weight is not packed, fitted on an H100 to 33 layers in TF32 and 20 in bfloat16: the same two by bytes of a
# value, and of float32 where four taps lie in a row; how many times as long two products take, and, by the bytes of a value,
# storing a sum; microseconds more for a megabyte of weights, for a call, and for 16 bits where rows of x are below a vector.
_WORDS = 6
_MULTIPLY_WORDS = {4: (0.114, 2.65e-6), 2: (0.14, 1.9e-6)}
_MULTIPLY_ROWS = (0.101, 2.7e-6)
_TWO_WORDS = 1.18
_STORED_WORDS = {4: 1.34, 2: 0.72}
_COLD, _AS_IT_LIES, _SHORT = 0.15, -1.6, 4.0
# Of 16-bit values, whose results go straight to x: tiles of n channels and taps take n / (n + _FEW) times as long (40 layers, on
# an H100).
_FEW = 22
# Of what partial sums cost, where the blocks of a cluster add them: 0.39 to 0.45 of it on an H100, but so the choice loses least.
_CLUSTERED = 0.6
_PARTS, _SECTOR = 2.0, 32  # times as long to store, where rows of x are no whole sectors (14 wide, on an H200), of so many bytes
_LATER = 0.95  # times as long, where results are stored between the products of the next tile (H100)
# So few tiles are so many microseconds sooner (FCN 8s k4 on 16 x 16, 8 tiles, on an H200).
_ALONE_TILES, _ALONE = 16, 1.5
_ONE_PRODUCT, _TWO = 128, 1.51  # pixels of one product for each warpgroup; how much longer two of them take


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
    return _mirrored(problem) if MIRRORED <= config < fused_last.FIRST else None


def swapped(forward: Enqueue, problem: Problem) -> Enqueue:
    """Call a mirrored problem's forward with the operands of the gradient: its weight begins at the last tap."""
    steps = sum(stride * (size - 1) for stride, size in zip(problem.w_strides[2:], problem.kernel_size))
    last_tap = steps * DTYPE_BYTES[problem.dtype]

    def call(x: int, w: int, bias: int, y: int, workspace: int, stream: int) -> None:
        forward(y, w + last_tap, 0, x, workspace, stream)

    return call


def _multiply_words(problem: Problem) -> tuple[float, float]:
    size = DTYPE_BYTES[problem.dtype]
    return _MULTIPLY_ROWS if size == 4 and problem.kernel_size[-1] % 4 == 0 else _MULTIPLY_WORDS[size]


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of tiles, which multiply or wait for what they copy, and store."""
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    packed = problem.in_channels * problem.out_channels_per_group * problem.taps
    least, size = 1e-6 * problem.bytes * _MEMORY, DTYPE_BYTES[problem.dtype]
    predicted = {}
    for config, (pixels, channels, reads) in enumerate(module.fused_input_tiles()):
        if not module.fused_input_fits(device, problem.cuda, config, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[config] = _CALL
            continue
        work = module.FusedInputCall(device, problem.cuda, config, problem.alignment).work
        whole, split, parts, steps, copied, grain, resident, later, clustered = work
        step, product = _multiply_words(problem) if reads == _WORDS else _MULTIPLY[reads]
        multiply = steps * (step + pixels * channels * product)
        if pixels > _ONE_PRODUCT:
            multiply *= _TWO_WORDS if reads == _WORDS else _TWO
        load = copied * (_COPIED + _COPY / grain) + (0.0 if resident else 32 * steps * channels * _STREAMED)
        store = pixels * channels * _STORED[size] * (_STORED_WORDS[size] if reads == _WORDS else 1.0)
        store *= _PARTS if problem.in_size[-1] * size % _SECTOR else 1.0
        waves, shares = -(-whole // multiprocessors), -(-split * parts // multiprocessors)
        time = waves * (max(multiply, load) + store) + shares * (max(multiply, load) / parts + store)
        partial = 4e-6 * split * parts * pixels * channels * _PARTIAL
        time += partial * (_CLUSTERED if clustered else 1.0)
        time += _AS_IT_LIES + 1e-6 * size * packed * _COLD if reads == _WORDS else 1e-6 * packed * _PACKED
        if reads == _WORDS and size == 2 and problem.in_size[-1] < 8:
            time += _SHORT
        if whole + split * parts <= _ALONE_TILES:
            time -= _ALONE
        if size == 2:
            reduced = problem.out_channels_per_group * problem.taps
            time *= reduced / (reduced + _FEW)
        time *= _LATER if later else 1.0
        predicted[config] = max(_CALL + time, least)
    return predicted
