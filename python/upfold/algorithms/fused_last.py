"""The fused method by boxes of channels on a GPU: the forward and the gradient of the input."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda, fused_alternating
from .base import Enqueue

# The number of its first tile among the configs of `fused`; and how many there are, behind which are those of full float32.
FIRST, TILES = 200, 40


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to every tile of 45 layers and their gradients on an H200 (15 % off)."""

    call: float
    tile: float  # cycles of a tile, beside its products and results
    product: float  # times the cycles that one takes by itself
    issue: float  # cycles of one beside that
    loaded: float  # bytes that a multiprocessor gets in a cycle
    stored: float  # bytes that it puts
    in_planes: float  # the same where channels are not innermost
    turned: float  # and of turned tiles
    memory: float  # of a megabyte of the operands, at the least
    packed: float  # of a megabyte of the weight
    source: float  # of a megabyte of the source that is packed first
    launch: float  # of that kernel, beside its bytes
    split: float  # cycles of blocks that wait for those that they add their sums up with
    shared: float  # bytes of sums that a multiprocessor gets of them in a cycle
    alone: float  # waves, where a multiprocessor could take two blocks and gets one
    beside: float  # of the lesser of what a call computes and moves: what tiles differ by where memory is the limit
    tiles: tuple[float, ...]  # times the products' cycles, by config
    equal: tuple[float, ...]  # times as long, where kernel and stride are equal and channels innermost


# Times as long by config where kernel and stride are equal and channels innermost.
_EQUAL = (1.06, 1.14, 1.03, 1.06, 1.2, 1.16, 1.0, 0.92, 1.07)
# Of float32 rounded to TF32, and of 16-bit values.
_RATES = (
    _Rates(5.9, 756, 0.753, 45, 110, 28.0, 21.8, 21.2, 0.275, 0.634, 0.586, 1.35, 2000, 30, 1.58, 0.05,
           (0.95, 0.87, 1.17, 0.72, 1.11, 1.27, 1.14, 0.665, 1.34, 0.76, 0.65, 1.18, 0.98, 1.29, 0.68, 1.72, 1.54, 0.6), _EQUAL),
    _Rates(5.6, 514, 0.784, 48, 117, 13.9, 10.2, 17.2, 0.183, 0.794, 0.75, 1.76, 2000, 30, 1.69, 0.05,
           (0.94, 0.85, 1.20, 0.655, 1.10, 1.33, 1.18, 0.665, 1.38, 0.74, 0.61, 1.08, 1.02, 1.35, 0.65, 1.8, 1.56, 0.6), _EQUAL),
)  # fmt: skip
# Of 16-bit values whose weights are copied as they lie: fitted to every tile of 50 layers (11 % off near the fastest tile, which
# the choice is 0.8 % behind).
_LYING = _Rates(4.1, 514, 0.678, 35, 85, 43.7, 0, 0, 0.277, 0, 0.75, 1.76, 2030, 29, 1.19, 0.72,
                (1.003, 0.766, 1.191, 0.627, 0.979, 1.249, 1.111, 0.668, 1.575),
                (1.132, 1.413, 1.078, 1.091, 1.117, 1.135, 0.898, 0.884, 0.975))  # fmt: skip
# The number of the first turned tile: its rows of a product are channels, so that results of neighbouring pixels lie in a lane.
_TURNED = 9
# Times as long, where channels are not innermost in the result: of stride 1; of results that are whole vectors, also where kernel
# and stride are equal; of vectors that lie apart; of gradients that do, each by itself (in 16 bits, whose rows are no whole
# vectors: of one layer, Mask R-CNN from a gradient in channels_last, 175 us for 45), or of results through shared memory
# (float32, 16 bits); and where the packed source is beyond the cap, so that samples run in parts.
_DENSE, _JOINED, _JOINED_EQUAL, _APART, _SINGLE, _STAGED, _IN_PARTS = 1.4, 1.12, 1.2, 1.6, 3.0, (2.6, 1.9), 1.25
# Of results of the forward each by itself, the fewer of a sector the longer the stride, times as long as those that are stored
# together, by the stride: of float32 and of 16-bit values (45 layers on an H100: 2.5 to 4 for a stride of 2, 6 and 3.5 for 4, 12
# and 6 for 8).
_SCATTERED_STRIDE = 1.4, 0.8
# Packed weights of more bytes than the second-level cache keeps come from memory again for every tile: microseconds of a megabyte
# (H100: StyleGAN2's 75 MB in TF32, 413 us of the tile that was predicted at 219).
_CACHE_BYTES, _UNCACHED = 48 << 20, 0.31
# Of gradients in 16 bits that reduce over at most so many channels, half of a row or less (H100, three layers: up to 1.16).
_HALF_ROW, _HALF_ROW_CHANNELS = 1.15, 32
_IN_ORDER = 1.07  # of float32 whose channels are innermost, beside tiles whose warpgroups alternate
# Of turned tiles, fitted to those of 32 layers and their gradients (15 % off; their products to another run than their results):
# cycles of one; how many times as long they store results that lie apart, in some neighbours or one by one, rows that are no
# whole vectors, and such of 16 bits by themselves. They are preferred only where they lead by more than chance.
_TURNED_TILE, _TURNED_APART, _TURNED_SCATTERED, _TURNED_PARTS, _TURNED_SINGLE, _TURNED_CAUTION = 300, 2.8, 4.0, 1.9, 6.0, 1.1
TURNED_SHARES = 4  # parts of a turned tile, at the least, that blocks of a split reduction store


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return fused_alternating.call(problem, config - FIRST, device)


def enqueue(planned: Any, problem: Problem) -> Enqueue:
    """Bind a planned call to the order of operands: a gradient reads y and writes x."""
    forward: Enqueue = planned.enqueue
    if problem.operator is Operator.CONV_TRANSPOSE:
        return forward

    def gradient(x: int, w: int, bias: int, y: int, workspace: int, stream: int) -> None:
        forward(y, w, 0, x, workspace, stream)

    return gradient


def in_order(problem: Problem) -> bool:
    """Whether channels are innermost in the result."""
    return (problem.y_strides if problem.operator is Operator.CONV_TRANSPOSE else problem.x_strides)[1] == 1


def turned(problem: Problem, phases: int) -> float:
    """How many times as long a turned tile stores: where phases of a set are not all of a row, or rows no whole vectors."""
    forward = problem.operator is Operator.CONV_TRANSPOSE
    stride, width = (problem.stride[2], problem.out_size[2]) if forward else (1, problem.in_size[2])
    size, joined = DTYPE_BYTES[problem.dtype], 1
    if width >= stride:
        joined = 3 if (phases, stride) == (4, 3) else max(j for j in (1, 2, phases) if phases % j == 0 and stride % j == 0)
    together = 1.0 if joined == stride else _TURNED_APART if joined > 1 else _TURNED_SCATTERED
    return together * (1.0 if width * size % 16 == 0 else _TURNED_SINGLE if width * size % 4 else _TURNED_PARTS)


def _joined(phases: int, stride: int, width: int) -> int:
    """How many neighbouring phases of a row are stored as one vector."""
    return max(j for j in (1, 2, 4) if phases % j == 0 and stride % j == 0 and width % j == 0)


def stored_in_planes(problem: Problem, phases: int) -> float:
    """How many times as long as its products and bytes say an upright tile takes where channels are not innermost."""
    if problem.operator is not Operator.CONV_TRANSPOSE:
        size = DTYPE_BYTES[problem.dtype]
        return _SINGLE if size == 2 and problem.in_size[2] * size % 16 != 0 else 1.0
    stride, width = problem.stride[2], problem.out_size[2]
    if stride == 1:
        return _DENSE
    joined = _joined(phases, stride, width)
    if joined == stride:
        return _JOINED_EQUAL if problem.kernel_size == problem.stride else _JOINED
    if joined > 1:
        return _APART
    return 1.0 if phases < stride else _STAGED[DTYPE_BYTES[problem.dtype] == 2]


def scattered(problem: Problem, phases: int) -> float:
    """How many times as long an upright tile of the forward stores, where each of its results lies by itself in a row."""
    stride, width = problem.stride[2], problem.out_size[2]
    if in_order(problem) or problem.operator is not Operator.CONV_TRANSPOSE or phases >= stride:
        return 1.0
    if _joined(phases, stride, width) > 1:
        return 1.0
    return _SCATTERED_STRIDE[DTYPE_BYTES[problem.dtype] == 2] * stride


def _storing(problem: Problem, config: int, phases: int, rates: _Rates) -> float:
    """The same of any tile, for the way in which it stores results."""
    if in_order(problem):
        is_equal = problem.operator is Operator.CONV_TRANSPOSE and problem.kernel_size == problem.stride
        return rates.equal[config] if is_equal else 1.0
    return 1.0 if config >= _TURNED else stored_in_planes(problem, phases)


@lru_cache(maxsize=4096)
def lies(problem: Problem, device: int) -> bool:
    """Whether some tiles copy the weight as it lies."""
    fits = cuda.module().fused_last_fits
    upright = [config for config in range(_TURNED) if fits(device, problem.cuda, config, problem.alignment)]
    return any(not call(problem, FIRST + config, device).packed_bytes for config in upright)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: waves of tiles, which multiply or wait for what they copy, and store."""
    if problem.in_full_float32:
        return {}
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    size = DTYPE_BYTES[problem.dtype]
    predicted = {}
    gradient = problem.operator is not Operator.CONV_TRANSPOSE
    narrow = _HALF_ROW if gradient and size == 2 and problem.out_channels_per_group <= _HALF_ROW_CHANNELS else 1.0
    for config, (rows, columns, phases, blocks, vectors) in enumerate(module.fused_last_tiles()[:TILES]):
        if not module.fused_last_fits(device, problem.cuda, config, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + config] = _RATES[size == 2].call
            continue
        work = fused_alternating.Work(*call(problem, FIRST + config, device).work)
        tiles, products, copied, resident, splits, packed, source, _, _ = work
        pair = columns * vectors * 16
        again = 0.0 if resident or packed <= _CACHE_BYTES else 1e-6 * (tiles * products * pair - packed) * _UNCACHED
        if config >= fused_alternating.FIRST:
            rates, tile_sizes = _RATES[size == 2], (rows, columns, phases, blocks, vectors)
            time = fused_alternating.microseconds(problem, config, tile_sizes, work, multiprocessors)
            time += 1e-6 * (packed * rates.packed + source * rates.source) + (rates.launch if source else 0.0) + again
            predicted[FIRST + config] = time * narrow * (_IN_PARTS if source + packed > problem.workspace_cap else 1.0)
            continue
        rates = _RATES[size == 2] if packed else _LYING
        multiply = products * (rows * pair / 4096 * rates.product * rates.tiles[config] + rates.issue)
        load = (copied + (0.0 if resident else products * pair)) / rates.loaded
        store, tile = rows * columns * phases * size / (rates.stored if in_order(problem) else rates.in_planes), rates.tile
        if config >= _TURNED:
            store, tile = rows * columns * phases * size / rates.turned * turned(problem, phases), _TURNED_TILE
        else:
            store *= scattered(problem, phases)
        if splits > 1:
            share = 1 / min(splits, TURNED_SHARES if config >= _TURNED else columns * size // 64)
            store, tile = store * share, tile + rates.split + rows * columns * phases * 4 * splits * share / rates.shared
        waves = float(-(-tiles // (multiprocessors * blocks)) * blocks)
        if blocks > 1 and tiles <= multiprocessors:
            waves = rates.alone
        time = waves * (multiply + load + store + tile) / cuda.CYCLES
        time *= _storing(problem, config, phases, rates) * (_IN_PARTS if source + packed > problem.workspace_cap else 1.0)
        time += 1e-6 * (packed * rates.packed + source * rates.source) + again
        least = 1e-6 * problem.bytes * rates.memory + (rates.launch if source else 0.0)
        predicted[FIRST + config] = rates.call + max(time, least) + rates.beside * min(time, least)
        predicted[FIRST + config] *= narrow
        predicted[FIRST + config] *= _TURNED_CAUTION if config >= _TURNED else 1.0
        if size == 4 and config < _TURNED and in_order(problem):
            predicted[FIRST + config] *= _IN_ORDER
    return predicted
