"""What predicts the time of `direct` on a GPU."""

from __future__ import annotations

from math import prod

from .algorithms.cuda import dots_seconds
from .problem import DTYPE_BYTES, Operator, Problem

_CALL_SECONDS, _GRADIENT_CALL_SECONDS = 11e-6, 10e-6
_FLOPS = 28e12  # a second
# Bytes a second, of a forward (fitted to one layer that they bind, PQMF on an H100: 16 and 14 us for 20 and 17) and of gradients.
_BYTES, _GRADIENT_BYTES = 2.9e12, 0.83e12
# Of a forward the two overlap in part: the norm of both, to this power (H200: the grouped seed, SAM 64 -> 32 and nnU-Net 64 -> 32
# take 826, 250 and 729 us; this says 630, 240 and 697).
_NORM = 1.4
_FEW_CHANNELS = 9.1  # result channels of a group at which it reaches half of its rate
_DEPTH = 1.13  # how much longer a forward takes in three dimensions: 1.10 and 1.14 times what was said of two layers
# Per product of one result, which follow one another.
_TERM_SECONDS, _ADJOINT_TERM_SECONDS = 30e-9, 75e-9
_WEIGHT_FACTOR, _INPUT_FACTOR = 1.54, 1.55
_WEIGHT_CHANNELS = 48  # of x: fewer take as many times longer (21 took 2.0 to 2.7 times what was said, 32 1.9)
_INNERMOST_GROUPS = 6.0  # how many times as long gradients of groups take where channels are innermost


def direct_seconds(problem: Problem) -> float:
    """Predict the seconds of a call: memory and arithmetic, or the products of one result, which follow one another."""
    adjoint = problem.operator is Operator.CONV
    channels = problem.in_channels_per_group if adjoint else problem.out_channels_per_group
    rate = _FLOPS * channels / (channels + _FEW_CHANNELS) * 4.0 / max(4, DTYPE_BYTES[problem.dtype])
    if problem.operator is Operator.CONV_TRANSPOSE:
        both = problem.flops / rate, problem.bytes / _BYTES
        work = float(sum(seconds**_NORM for seconds in both) ** (1 / _NORM))
    else:
        work = max(problem.flops / rate, problem.bytes / _GRADIENT_BYTES)
    if problem.operator is not Operator.CONV_TRANSPOSE and problem.groups > 1 and problem.y_strides[1] == 1:
        work *= _INNERMOST_GROUPS
    if adjoint:
        in_a_row = problem.out_channels_per_group * problem.taps * _ADJOINT_TERM_SECONDS
        return _GRADIENT_CALL_SECONDS + max(_INPUT_FACTOR * work, in_a_row)
    phases = prod(min(stride, kernel) for stride, kernel in zip(problem.stride, problem.kernel_size))
    if problem.operator is Operator.CONV_TRANSPOSE and problem.in_size[0] > 1:
        work *= _DEPTH
    work = max(work, problem.in_channels_per_group * problem.taps / phases * _TERM_SECONDS)
    if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
        if problem.groups == 1:
            work *= max(1.0, _WEIGHT_CHANNELS / problem.in_channels)
        return dots_seconds(problem) or _GRADIENT_CALL_SECONDS + _WEIGHT_FACTOR * work
    return _CALL_SECONDS + work
