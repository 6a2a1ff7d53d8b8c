"""What predicts the time of tiles of boxes of channels whose warpgroups alternate: one multiplies while the other stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The first of these among the tiles of boxes; those of a kind follow one another.
FIRST = 18
_FIRSTS = (FIRST, 22, 26, 35)  # of planes as they lie, to planes, and those that transpose planes first
# Those of three warpgroups, for equal kernel and stride alone, and of which of the kinds above they are.
_WHOLE, _KINDS_OF_WHOLE = 38, (2, 0)

_SECTOR = 32  # bytes that memory stores together
_NARROW = 1.6  # times as long where rows of results in planes are less: of one layer (DCGAN 512 -> 256 on 4 x 4)


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
    loose: float  # times as long rows of results in planes are stored that are no whole vectors
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
    loose: bool  # results in planes that are stored by lanes
    sharers: int  # blocks that share the weights they copy


class Fitting(NamedTuple):
    """A tile that fits: its number, its positions, columns of each phase, phases, bytes of weights of a pair, and its work."""

    number: int
    rows: int
    columns: int
    phases: int
    pair: int
    work: Work

    @property
    def products(self) -> float:
        """Cycles that the products of a tile take by themselves."""
        return self.work.products * self.rows * self.pair / 4096

    @property
    def streamed(self) -> float:
        """Bytes of weights that are copied for a tile."""
        return 0.0 if self.work.resident else self.work.products * self.pair


def call(problem: Problem, tile: int, device: int) -> Any:
    """Plan a call of a tile, by its number among those of boxes."""
    return cuda.module().FusedLastCall(device, problem.cuda, tile, problem.alignment, problem.workspace_cap)


def fitting(problem: Problem, device: int, first: int, count: int) -> Iterator[Fitting]:
    """Those of `count` tiles of boxes from number `first` on that fit; a problem of no samples has no work."""
    module = cuda.module()
    for number, (rows, columns, phases, _, vectors) in enumerate(module.fused_last_tiles()[first : first + count]):
        if module.fused_last_fits(device, problem.cuda, first + number, problem.alignment):
            work = Work(*call(problem, first + number, device).work)
            yield Fitting(number, rows, columns, phases, columns * vectors * 16, work)


def of_turns(turns: int, busy: float, store: float, shared: float) -> float:
    """The microseconds of a block's tiles, each busy and storing for so many cycles, `shared` of both where they overlap."""
    return (turns * max(busy, shared * (busy + store)) + store / 2) / cuda.CYCLES


def microseconds(problem: Problem, config: int, tile: tuple[int, int, int, int, int], work: Work, multiprocessors: int) -> float:
    """Predict the time of a call, beside the packing of its source."""
    rows, columns, phases, _, vectors = tile
    size = DTYPE_BYTES[problem.dtype]
    of_three = config >= _WHOLE
    kind = _KINDS_OF_WHOLE[config - _WHOLE] if of_three else sum(config >= first for first in _FIRSTS) - 1
    rates = _RATES[kind][size == 2]
    times, shared = (1.0, rates.shared * _OF_THREE) if of_three else (rates.tiles[config - _FIRSTS[kind]], rates.shared)
    pair = columns * vectors * 16
    multiply = work.products * (rows * pair / 4096 * rates.product * times + rates.issue)
    copied, taken = _SHARING if work.sharers > 1 else (1.0, 1.0)
    streamed = 0.0 if work.resident else work.products * pair * copied
    busy = taken * max(multiply, (work.copied + streamed) / rates.loaded)
    busy *= _STREAMING if of_three and not work.resident else 1.0
    width = (problem.out_size if problem.operator is Operator.CONV_TRANSPOSE else problem.in_size)[2]
    loose = rates.loose if work.loose else 1.0
    store = rows * columns * phases * size / rates.stored * loose + rates.tile
    turns = -(-work.tiles // multiprocessors)
    time = of_turns(turns, busy, store, shared)
    least = 1e-6 * problem.bytes * rates.memory
    narrow = _NARROW if kind > 0 and width * size < _SECTOR else 1.0
    spans = problem.operator is Operator.CONV_TRANSPOSE and problem.kernel_size != problem.stride
    many = (kind, size) == (2, 4) and spans and turns >= _MANY_TURNS
    against = _AGAINST_MANY if many else _AGAINST_OTHERS[kind][size == 2]
    if (kind, size) == (1, 4) and work.loose:
        against *= _LOOSE_AND_LONG if rows > 64 else _LOOSE
    return narrow * against * (rates.call + max(time, least) + rates.beside * min(time, least))


# By kind (channels innermost in x and y, planes, planes of y alone, planes that are transposed), of TF32 and of 16-bit values.
_RATES = (
    (
        _Rates(5.84, 49.2, 71, 9.8, 529, 0.195, 0.699, 0.929, 0.277, 1, (0.927, 0.815, 1.08, 1.03)),
        _Rates(5.69, 49.6, 73.4, 18.7, 510, 0.149, 0.91, 1.01, 0.417, 1, (0.888, 0.979, 1.01, 1.04)),
    ),
    (
        _Rates(7.71, 52.1, 54.3, 40.1, 441, 0.253, 0.178, 1.34, 0.865, 1.83, (0.944, 0.927, 1.3, 1.07)),
        _Rates(5.05, 50.6, 52.2, 20.1, 504, 0.268, 0.129, 1.21, 0.688, 1.31, (1.02, 0.957, 1.12, 1)),
    ),
    (
        _Rates(
            5.71, 52.4, 57.5, 29.3, 587, 0.175, 0.258, 1.21, 0.771, 2.09, (1.3, 0.821, 0.694, 0.925, 1.37, 1.19, 1, 1.05, 0.929)
        ),
        _Rates(
            3.25,
            41.3,
            58,
            10.2,
            735,
            0.0953,
            0.0594,
            1.24,
            0.462,
            1.71,
            (1.19, 0.827, 0.757, 0.957, 1.27, 1.84, 1.34, 0.518, 0.977),
        ),
    ),
    (
        _Rates(11.4, 52.7, 23.3, 19.1, 544, 0.318, 0.134, 1.89, 0.609, 1.2, (1.2, 0.905, 1.58)),
        _Rates(7.8, 52.6, 20.5, 22.8, 836, 0.277, 0.12, 2.08, 0.743, 1.47, (1.09, 1.02, 1.69)),
    ),
)
# Of three warpgroups: times what is shared, and times what is multiplied or copied where weights stream past half as many
# positions (TF32, channels innermost, beside two warpgroups: U-Net 1024 87 us for 65, YOLO, whose weights stay, 107 for 116).
_OF_THREE, _STREAMING = 0.67, 1.35
# The same of tiles whose weights two blocks share: the copies of these, and all that one multiplies or copies (H100, us: U-Net
# 1024 to planes 76 -> 70, in channels_last 80 -> 67 and by tiles of 64 positions 93 -> 79, in bfloat16 39 -> 36 and 40 -> 37).
_SHARING = (0.85, 0.92)
# Times as long as that, where they are compared with other tiles, whose predictions err to other sides: by the timings that the
# rates were fitted to, the choice among all tiles and `gemm` takes up to 2 % (forward) and 1 to 3 % (gradient of the input)
# longer than the fastest.
_AGAINST_OTHERS = ((0.94, 1.04), (1.0, 1.0), (1.22, 0.9), (1.0, 1.05))
# The same of TF32 and results in planes, where each multiprocessor has so many tiles of a kernel that spans several strides: they
# took 0.81 (dense 3x7) to 0.94 (k3 s2) of the time predicted, pose 256 304 us, and the tile that was preferred there 335.
_MANY_TURNS, _AGAINST_MANY = 8, 0.93
# And of planes of floats as they lie whose results lanes store, beside tiles that read packed ones (H200, us: Mask R-CNN 162 by
# them, 72 of 100 regions, and 147 and 64 by tiles of three warpgroups), and by tiles of more than 64 positions (H100: 211 us
# where those of 64 take 177).
_LOOSE, _LOOSE_AND_LONG = 1.13, 1.3
