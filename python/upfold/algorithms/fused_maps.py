"""The fused method of whole maps: 16-bit layers of many channels and few pixels on a GPU, with nothing packed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# The number of its first tile among the configs of `fused`.
FIRST = 260


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: of 21 tiles of seven layers in bfloat16 on an H200 9 % off."""

    call: float
    product: float  # times the cycles of the tensor cores
    loaded: float  # bytes that a multiprocessor gets in a cycle
    short: float  # times as long, where rows of pixels are less than a whole one of the copy engine
    position: float  # cycles of a position of outputs
    tile: float  # of a tile's sums beside its positions


_RATES = _Rates(4.0, 1.15, 43.0, 1.2, 42.0, 600.0)
_ROW = 64  # pixels
_IN_TURN = 0  # the tile whose warpgroups take turns; those of others work side by side, and sum together
_FIRST_BY_LANES = 2  # tiles whose lanes copy pixels


def call(problem: Problem, config: int, device: int) -> Any:
    """Plan a call of one of these tiles."""
    return cuda.module().FusedMapsCall(device, problem.cuda, config - FIRST, problem.alignment)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits: two warpgroups take turns, one multiplies while the other sums."""
    if problem.operator is not Operator.CONV_TRANSPOSE or DTYPE_BYTES[problem.dtype] != 2:
        return {}
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    predicted = {}
    for config in range(len(module.fused_maps_tiles())):
        if not module.fused_maps_fits(device, problem.cuda, config, problem.alignment):
            continue
        if problem.batch == 0:
            predicted[FIRST + config] = _RATES.call
            continue
        tiles, chunks, copied, positions, cycles = call(problem, FIRST + config, device).work
        short = config < _FIRST_BY_LANES and problem.in_pixels % _ROW
        load = copied / _RATES.loaded * (_RATES.short if short else 1.0)
        busy, sums = chunks * max(cycles * _RATES.product, load), positions * _RATES.position + _RATES.tile
        turns = -(-tiles // multiprocessors)
        if config != _IN_TURN:
            cycles = turns * (busy + sums)
        else:
            cycles = max(turns * busy + sums, -(-turns // 2) * (busy + sums) + (0.0 if turns % 2 else busy))
        predicted[FIRST + config] = _RATES.call + cycles / cuda.CYCLES
    return predicted
