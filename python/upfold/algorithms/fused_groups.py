"""The fused gradients of layers with few channels in a group, on a GPU, and the time that they take."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..problem import DTYPE_BYTES, Operator, Problem
from . import cuda

# Its number among the configs of `fused` for the gradients.
CONFIG = 280


class _Rates(NamedTuple):
    """What predicts the microseconds of a call, by cycles of a multiprocessor: fitted to the first and third seed on an H200.

    Those of weights of 32 channels are fitted to SAM's and nnU-Net's layers of 64 too (up to 26 % above them). For vectors those
    of weights are of an earlier version of the kernel with 16 channels; with 32 no layer was measured.
    """

    call: float
    load: float  # of a warp's load
    vector: float  # of one of vectors, where channels are innermost; stores of single results beside it
    product: float  # of a product of eight input channels
    tile: float
    memory: float  # of a megabyte of the operands, at the least


# By operator, whether values are of 16 bits, and output channels of a tile.
_RATES = {
    (Operator.CONV, False, 16): _Rates(4.0, 6.0, 18.0, 6.0, 2270.0, 0.25),
    (Operator.CONV, True, 16): _Rates(4.0, 6.0, 43.0, 6.0, 580.0, 0.25),
    (Operator.CONV, False, 32): _Rates(4.0, 7.0, 33.0, 2.5, 0.0, 0.25),
    (Operator.CONV, True, 32): _Rates(4.0, 7.0, 77.0, 2.5, 0.0, 0.25),
    (Operator.CONV_TRANSPOSE_WEIGHT, False, 16): _Rates(7.0, 6.0, 53.0, 8.0, 2870.0, 0.25),
    (Operator.CONV_TRANSPOSE_WEIGHT, True, 16): _Rates(7.0, 6.0, 57.0, 6.0, 830.0, 0.25),
    (Operator.CONV_TRANSPOSE_WEIGHT, False, 32): _Rates(7.0, 7.6, 53.0, 3.6, 0.0, 0.25),
    (Operator.CONV_TRANSPOSE_WEIGHT, True, 32): _Rates(7.0, 7.3, 57.0, 3.9, 0.0, 0.25),
}
# Microseconds of one turn in which a block's threads lay out fragments of the weight, ahead of the gradient of the input: what
# decides small layers (FCN's kernel 4 on 16 x 16 in TF32).
_PACK = 0.3


def call(problem: Problem, device: int) -> Any:
    """Plan a call."""
    return cuda.module().FusedGroupsCall(device, problem.cuda, problem.alignment, problem.workspace_cap)


@lru_cache(maxsize=4096)
def microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict its time, by config, where it fits: multiprocessors load a patch of the gradient and multiply it, tile by tile."""
    if problem.operator is Operator.CONV_TRANSPOSE or problem.in_full_float32:
        return {}
    planned = call(problem, device)
    if planned.workspace_bytes < 0:
        return {}
    tiles, blocks, loads, products, packs, channels = planned.work
    rates = _RATES[problem.operator, DTYPE_BYTES[problem.dtype] == 2, channels]
    load = rates.vector if problem.y_strides[1] == 1 else rates.load
    tile = loads * load + products * rates.product + rates.tile
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    busy = -(-tiles // blocks) * -(-blocks // multiprocessors) * tile / cuda.CYCLES
    busy += packs * _PACK
    return {CONFIG: rates.call + max(busy, 1e-6 * problem.bytes * rates.memory)}
