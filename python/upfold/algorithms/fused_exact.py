"""The fused method for float32 in full by tensor cores of compute capability 9.0: the forward and the gradient of the input.

A value is the sum of two of TF32, a large and a small one, and a product is three: all but that of the two small parts, which is
smaller than what float32 rounds.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch

from ..problem import Operator, Problem
from . import cuda, fused_last

FIRST, TILES = 300, 9  # the number of its first tile among the configs of `fused`, and how many there are
_TURNED = 5  # of its own tiles the first whose rows of a product are channels
_EVEN = 1.25  # the power of turns by which sets of unlike taps become even
# By tile, where kernel and stride are equal: in planes, and where channels are innermost; of turned tiles whose stride is not a
# power of two; and where phases have no taps.
_EQUAL: dict[int, float] = {5: 1.15, 8: 1.08}
_EQUAL_IN_ORDER: dict[int, float] = {0: 1.09}
_ODD_STRIDE, _FILLED = 1.4, 1.8
# Of results each by itself in a row, that the second-level cache holds, up to so many bytes, and others.
_CACHED, _CACHED_BYTES, _SCATTERED = 1.7, 32 << 20, 3.0
_LEAST_SCATTERED = 2.0  # times as long, from which results of TF32's tiles are stored each by itself or in parts
REFUSAL = (
    "torch's convolution switch asks for full float32, whose tiles want two input channels in a group and hold whole weights, or "
    "with compute capability 9.0, 16 input and 8 output channels in a group"
)
REFUSAL_OF_INPUT = (
    "torch's convolution switch asks for full float32, whose gradient of the input wants compute capability 9.0, 8 input and 16 "
    "output channels in a group, and taps and sizes that fit a tile"
)


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to every tile of 50 layers and their gradients on an H200.

    Near the fastest they are 9 % off. Like those of other tiles they order tiles and methods, and are no rates of the device.
    """

    call: float
    tile: float  # cycles of a tile, beside its products and results
    product: float  # times the cycles that the three products of a pair take by themselves
    issue: float  # cycles of one beside that
    loaded: float  # bytes that a multiprocessor gets in a cycle
    beside: float  # of the lesser of what a tile multiplies and loads
    stored: float  # bytes that it puts
    in_planes: float  # the same where channels are not innermost
    turned: float  # and of turned tiles
    packed: float  # of a megabyte of the weight, in two parts
    source: float  # of a megabyte of the source, in two parts
    split: float  # cycles of blocks that wait for those that they add their sums up with
    shared: float  # bytes of sums that a multiprocessor gets of them in a cycle
    alone: float  # waves, where a multiprocessor could take two blocks and gets one
    apart: float  # times what turned tiles of TF32 lose where phases of a row are stored apart, and other tiles
    scattered: float
    tiles: tuple[float, ...]  # times the products' cycles


_RATES = _Rates(5.83, 794, 0.914, 53.7, 64.2, 0.68, 11.0, 14.0, 15.4, 1.27, 0.496, 1140, 83.6, 1.3, 0.475, 0.617,
                (0.946, 0.96, 1.04, 1.18, 0.699, 0.869, 0.87, 1.205, 1.297))  # fmt: skip


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    tile = config - FIRST + fused_last.TILES
    return cuda.module().FusedLastCall(device, problem.cuda, tile, problem.alignment, problem.workspace_cap)


def _beside(problem: Problem, number: int) -> float:
    """How many times as long a tile took beside the others of the same layers, and other methods, as is predicted."""
    if problem.operator is not Operator.CONV_TRANSPOSE:
        return 1.0
    if problem.kernel_size == problem.stride:
        return (_EQUAL_IN_ORDER if fused_last.in_order(problem) else _EQUAL).get(number, 1.0)
    step, kernel = problem.stride[2], problem.kernel_size[2]
    return (_ODD_STRIDE if number >= _TURNED and step & (step - 1) else 1.0) * (_FILLED if step > kernel else 1.0)


def _unevenness(problem: Problem, phases: int) -> float:
    """How many more taps than the mean a set of so many phases has at the most."""
    ratio = 1.0
    axes = zip(problem.kernel_size, problem.stride, problem.dilation, problem.out_size)
    for kernel, stride, dilation, size in reversed(list(axes)):
        of_axis = min(stride, size)
        if phases >= of_axis:  # all are in one set
            phases //= of_axis
            continue
        phases = 1
        ratio *= max(1.0, -(-kernel * gcd(stride, dilation) // stride) * stride / kernel)
    return ratio


def _stored(problem: Problem, config: int, phases: int) -> float:
    """Cycles of a result of four bytes: by how it is stored, as tiles of TF32 take them, times what those here do."""
    rates = _RATES
    if fused_last.in_order(problem):
        return 4 / rates.stored
    if config >= _TURNED:
        apart = fused_last.turned(problem, phases)
        return 4 / rates.turned * apart * (rates.apart if apart > 1 else 1.0)
    slow = fused_last.stored_in_planes(problem, phases)
    if fused_last.scattered(problem, phases) > 1.0:
        results = 4 * problem.batch * problem.out_channels * problem.out_pixels
        slow = _CACHED if results <= _CACHED_BYTES else _SCATTERED
    return 4 / rates.in_planes * slow * (rates.scattered if slow > _LEAST_SCATTERED else 1.0)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits a problem of full float32: waves of tiles, which multiply, load and store."""
    if not problem.in_full_float32:
        return {}
    module, rates = cuda.module(), _RATES
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    forward = problem.operator is Operator.CONV_TRANSPOSE
    predicted = {}
    for number, (rows, columns, phases, blocks, vectors) in enumerate(module.fused_last_tiles()[fused_last.TILES :][:TILES]):
        if not module.fused_last_fits(device, problem.cuda, fused_last.TILES + number, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + number] = rates.call
            continue
        tiles, products, copied, resident, splits, packed, source, _, _ = call(problem, FIRST + number, device).work
        waves = -(-tiles // (multiprocessors * blocks)) * blocks
        pair, sums = columns * vectors * 16, rows * columns * phases
        flat = fused_last.in_order(problem) and phases == 1 and problem.kernel_size == problem.stride
        if forward and not flat:  # of many tiles those with more taps are even with those with fewer
            products *= 1 + (_unevenness(problem, phases) - 1) / (waves / blocks) ** _EVEN
        multiply = products * (rows * pair / 4096 * 1.5 * rates.product * rates.tiles[number] + rates.issue)
        load = (copied + (0.0 if resident else products * pair)) / rates.loaded
        store, tile = sums * _stored(problem, number, phases), rates.tile
        if splits > 1:
            share = 1 / min(splits, fused_last.TURNED_SHARES if number >= _TURNED else columns // 16)
            store, tile = store * share, tile + rates.split + 4 * sums * splits * share / rates.shared
        if blocks > 1 and tiles <= multiprocessors:
            waves = rates.alone
        busy = max(multiply, load) + rates.beside * min(multiply, load) + store + tile
        time = rates.call + waves * busy / cuda.CYCLES + 1e-6 * (packed * rates.packed + source * rates.source)
        predicted[FIRST + number] = time * _beside(problem, number)
    return predicted
