"""What predicts the time of tiles of the fused method whose rows are pairs of an output channel and a phase, on a GPU."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ..problem import DTYPE_BYTES, Problem


class _Rates(NamedTuple):
    """Microseconds of one multiprocessor, fitted to every such tile of 15 layers (15, 15 and 24 % off in root mean square)."""

    call: float
    tile: float  # beside its products, copies and outputs
    product: float  # of 16 x 8 and two slots
    input: float  # of a copy of up to 16 bytes
    output: float
    packing: float  # of a row of the weight for a step


# Of TF32, 16-bit values, and full float32.
_RATES = (
    _Rates(4.69, 0.829, 2.54e-3, 8.55e-5, 1.26e-4, 1.43e-3),
    _Rates(5.85, 0.869, 2.07e-3, 8.66e-5, 6.68e-5, 3.01e-3),
    _Rates(4.25, 0.607, 7.14e-3, 0.0, 1.24e-4, 3.36e-3),
)
# What those rates miss: outputs of rows with phases without taps, which are filled first; products of 16 rows, which wait for
# their loads; and results of which a tile holds some channels alone, where these are neighbours in memory: they are stored one by
# one, and each lies in a sector with others'. They are preferred only where they lead by more than chance, which in full float32
# is more, but for few channels in a group and kernels beyond their stride: those take 0.4 to 0.6 of what is said.
_FILLED, _CAUTION, _EXACT_CAUTION = 3.0, 1.15, 1.4
_EXACT_FEW, _MOST_EXACT_FEW = 0.7, 32
_SLOW_ROWS = {16: 1.25}
# Times a copy, of 16-bit rows of an odd number: they are read one by one, without asynchronous copies (H100: 48 -> 8 channels, k8
# s4 on rows of 85,995, 150 us by four tiles that were predicted at 55 to 76).
_ONE_BY_ONE = 9.0
_PARTS_OF_PIXELS = 1.7


def microseconds(problem: Problem, work: tuple[int, int, int, int], rows: int, units: int, multiprocessors: int) -> float:
    """Predict the time of tiles of `rows` pairs: the copies, products and stores of a multiprocessor add up."""
    tiles, steps, copies, blocks = work
    exact = problem.in_full_float32
    kind = 2 if exact else int(DTYPE_BYTES[problem.dtype] == 2)
    rates = _RATES[kind]
    outputs = problem.batch * problem.out_channels * prod(problem.out_size) / max(1, tiles)
    phases = {tap * problem.dilation[2] % problem.stride[2] for tap in range(problem.kernel_size[2])}
    outputs *= _FILLED if len(phases) < problem.stride[2] else 1.0
    copy = rates.input * (_ONE_BY_ONE if kind == 1 and problem.x_strides[1] != 1 and problem.in_size[2] % 2 else 1.0)
    each = rates.tile + steps * rows * units / 128 * rates.product + copies * copy + outputs * rates.output
    weights = max(1.0, blocks / multiprocessors) * steps * rows * rates.packing
    time = rates.call + weights + max(1.0, tiles / multiprocessors) * each
    vector = 16 // DTYPE_BYTES[problem.dtype]
    channels = problem.out_channels_per_group
    if problem.y_strides[1] == 1 and channels * len(phases) > rows and channels % vector != 0:
        time *= _PARTS_OF_PIXELS
    if exact and problem.in_channels_per_group <= _MOST_EXACT_FEW and problem.taps > prod(problem.stride):
        time *= _EXACT_FEW
    return time * (_EXACT_CAUTION if exact else _CAUTION) * _SLOW_ROWS.get(rows, 1.0)
