"""What predicts the time of tiles of boxes of channels whose warpgroups alternate: one multiplies while the other stores."""

from __future__ import annotations

from typing import NamedTuple

from ..problem import DTYPE_BYTES, Problem
from . import cuda

# The first of these among the tiles of boxes; those of a kind follow one another.
FIRST = 18
_FIRSTS = (FIRST, 22, 26, 33)  # of planes as they lie, to planes, and those that transpose planes first


class _Rates(NamedTuple):
    """Fitted to every such tile of 50 layers and their gradients on an H200 (3 to 10 % off near the fastest tile of a layer)."""

    call: float  # microseconds
    issue: float  # cycles of a product beside those that it takes
    loaded: float  # bytes that a multiprocessor gets in a cycle
    stored: float  # bytes that a warpgroup puts in a cycle
    tile: float  # cycles of storing a tile beside its bytes
    memory: float  # microseconds of a megabyte of the operands, at the least
    beside: float  # of the lesser of what a call computes and moves
    product: float  # times the cycles that products take by themselves
    shared: float  # of what a warpgroup multiplies and stores: one, where nothing of both runs at a time, less where it does
    tiles: tuple[float, ...]  # times the products' cycles, by tile


class Work(NamedTuple):
    """What a call of a tile launches (FusedLastWork)."""

    tiles: int
    products: float
    copied: float
    resident: bool
    splits: int
    packed: int
    source: int


def microseconds(problem: Problem, config: int, tile: tuple[int, int, int, int, int], work: Work, multiprocessors: int) -> float:
    """Predict the time of a call, beside the packing of its source."""
    rows, columns, phases, _, vectors = tile
    size = DTYPE_BYTES[problem.dtype]
    kind = sum(config >= first for first in _FIRSTS) - 1
    rates, first = _RATES[kind][size == 2], _FIRSTS[kind]
    pair = columns * vectors * 16
    multiply = work.products * (rows * pair / 4096 * rates.product * rates.tiles[config - first] + rates.issue)
    busy = max(multiply, (work.copied + (0.0 if work.resident else work.products * pair)) / rates.loaded)
    store = rows * columns * phases * size / rates.stored + rates.tile
    turns = -(-work.tiles // multiprocessors)
    time = (turns * max(busy, rates.shared * (busy + store)) + store / 2) / cuda.CYCLES
    least = 1e-6 * problem.bytes * rates.memory
    return _AGAINST_OTHERS[kind][size == 2] * (rates.call + max(time, least) + rates.beside * min(time, least))


# By kind (channels innermost in x and y, planes, planes of y alone), of TF32 and of 16-bit values.
_RATES = (
    (
        _Rates(5.25, 49.6, 69.7, 10.5, 528, 0.198, 0.688, 0.973, 0.284, (0.898, 0.916, 1.07, 1.01)),
        _Rates(7.1, 49.7, 70.7, 17.8, 518, 0.156, 0.832, 1.04, 0.423, (0.888, 0.997, 1.02, 1.05)),
    ),
    (
        _Rates(6.51, 51.7, 59.9, 17.7, 508, 0.254, 0.148, 1.43, 0.702, (0.791, 0.858, 1.31, 2.2)),
        _Rates(5.12, 50.3, 54.9, 16.8, 525, 0.239, 0.188, 1.32, 0.63, (0.952, 0.877, 1.44, 1)),
    ),
    (
        _Rates(4.94, 50.1, 38.1, 23.8, 503, 0.239, 0.0936, 1.35, 0.916, (1.54, 1.06, 0.672, 0.832, 1.34, 1.0, 1.0)),
        _Rates(3.87, 50.6, 68.1, 20.4, 527, 0.0991, 0.0692, 1.15, 0.615, (1.16, 0.82, 0.711, 1.03, 1.5, 1.0, 1.0)),
    ),
    (
        _Rates(4.94, 50.1, 25.0, 23.8, 503, 0.239, 0.0936, 1.35, 0.916, (1.0,) * 4),
        _Rates(3.87, 50.6, 25.0, 20.4, 527, 0.2, 0.0692, 1.15, 0.615, (1.0,) * 4),
    ),
)
# Times as long as that, where they are compared with other tiles, whose predictions err to other sides: by the timings that the
# rates were fitted to, the choice among all tiles and `gemm` takes 2.3 % (forward) and 2 to 6 % (gradient of the input) longer
# than the fastest.
_AGAINST_OTHERS = ((0.9, 0.95), (0.95, 1.0), (1.2, 0.95), (1.0, 1.0))
