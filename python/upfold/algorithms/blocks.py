"""Cutting the column matrix of one call into blocks that fit the workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..problem import Problem

Range = tuple[int, int]

# Blocks of this size stay in the last-level cache between the GEMM that writes them and the col2im that reads them; smaller ones
# pay for more parallel regions than the nearer cache saves.
CPU_BLOCK_BYTES = 8 << 20
# A block of fewer output rows recomputes too much halo.
_MIN_ROWS = 8
# Fewer output channels than this make the GEMM too flat.
_MIN_CHANNELS = 16


@dataclass(frozen=True)
class Blocking:
    """How many samples, output channels and positions of the split axis one block takes.

    `axis` is the outermost spatial axis that has more than one position: 0 depth, 1 height, 2 width. `rows` counts output
    positions on it for a transposed convolution, input positions for its two adjoints. `channels` counts output channels: a
    multiple of a group's, or a part of one group.
    """

    samples: int
    channels: int
    axis: int
    rows: int


@dataclass(frozen=True)
class Region:
    """The spatial part of a block: ranges of input and output positions per axis."""

    inputs: tuple[Range, Range, Range]
    outputs: tuple[Range, Range, Range]

    @property
    def in_pixels(self) -> int:
        """Input positions of the region."""
        return prod(end - begin for begin, end in self.inputs)


def reaching_inputs(problem: Problem, axis: int, outputs: Range) -> Range:
    """The input positions from which some tap reaches one of `outputs` on `axis`; may be empty."""
    stride, pad = problem.stride[axis], problem.padding[axis]
    reach = problem.dilation[axis] * (problem.kernel_size[axis] - 1)
    first = -((reach - outputs[0] - pad) // stride)  # ceil((begin + pad - reach) / stride)
    last = (outputs[1] - 1 + pad) // stride
    begin = min(max(first, 0), problem.in_size[axis])
    return begin, max(begin, min(last + 1, problem.in_size[axis]))


def split_axis(problem: Problem) -> int:
    """The outermost spatial axis with more than one position; the axis along which blocks are cut."""
    for axis in range(3):
        if problem.in_size[axis] > 1 or problem.out_size[axis] > 1:
            return axis
    return 2


def regions(problem: Problem, blocking: Blocking, over_outputs: bool) -> Iterator[Region]:
    """Yield the regions that tile the outputs (with the inputs that reach them) or the inputs, in order."""
    whole_in = [(0, size) for size in problem.in_size]
    whole_out = [(0, size) for size in problem.out_size]
    axis = blocking.axis
    total = (problem.out_size if over_outputs else problem.in_size)[axis]
    for begin in range(0, total, blocking.rows):
        part = (begin, min(begin + blocking.rows, total))
        inputs, outputs = list(whole_in), list(whole_out)
        if over_outputs:
            outputs[axis] = part
            inputs[axis] = reaching_inputs(problem, axis, part)
        else:
            inputs[axis] = part
        yield Region((inputs[0], inputs[1], inputs[2]), (outputs[0], outputs[1], outputs[2]))


def _input_rows(problem: Problem, axis: int, rows: int, over_outputs: bool) -> int:
    """Most input positions on the split axis that a block of `rows` needs."""
    if not over_outputs:
        return min(rows, problem.in_size[axis])
    reach = problem.dilation[axis] * (problem.kernel_size[axis] - 1)
    return min((rows - 1 + reach) // problem.stride[axis] + 1, problem.in_size[axis])


@lru_cache(maxsize=1024)
def choose_blocking(problem: Problem, element_bytes: int, budget: int, over_outputs: bool, sample_bytes: int) -> Blocking | None:
    """Pick a blocking whose columns, and the copy of x beside them, take at most `budget` bytes.

    Args:
        problem: what is computed.
        element_bytes: size of one column entry.
        budget: bytes.
        over_outputs: blocks tile the outputs (else the inputs).
        sample_bytes: bytes that each input position of a sample needs beside the columns.

    Returns:
        The blocking, or None where even the smallest block is too large.
    """
    axis = split_axis(problem)
    total = (problem.out_size if over_outputs else problem.in_size)[axis]
    plane = problem.in_pixels // problem.in_size[axis]

    def cost(samples: int, channels: int, rows: int) -> int:
        pixels = plane * _input_rows(problem, axis, rows, over_outputs)
        return samples * pixels * (channels * problem.taps * element_bytes + sample_bytes)

    samples, channels, rows = problem.batch, problem.out_channels, total
    per_group = problem.out_channels_per_group
    if cost(samples, channels, rows) > budget:
        samples = max(1, min(samples, budget // max(1, cost(1, channels, rows))))
    least = min(_MIN_CHANNELS, problem.out_channels)
    while channels > least and cost(samples, channels, rows) > budget:
        channels = _fewer_channels(channels, per_group)
    while rows > _MIN_ROWS and cost(samples, channels, rows) > budget:
        rows = (rows + 1) // 2
    while channels > 1 and cost(samples, channels, rows) > budget:
        channels = _fewer_channels(channels, per_group)
    while rows > 1 and cost(samples, channels, rows) > budget:
        rows = (rows + 1) // 2
    if cost(samples, channels, rows) > budget:
        return None
    return Blocking(samples, channels, axis, rows)


def _fewer_channels(channels: int, per_group: int) -> int:
    """Half as many channels: whole groups while there are several, then a part of one group."""
    if channels > per_group:
        return max(1, channels // per_group // 2) * per_group
    return (channels + 1) // 2


def channel_ranges(problem: Problem, channels: int) -> Iterator[Range]:
    """Yield ranges of output channels: runs of whole groups, or parts that stay inside one group."""
    per_group = problem.out_channels_per_group
    if channels >= per_group:
        step = channels // per_group * per_group
        for begin in range(0, problem.out_channels, step):
            yield begin, min(begin + step, problem.out_channels)
        return
    for group in range(problem.groups):
        end = (group + 1) * per_group
        for begin in range(group * per_group, end, channels):
            yield begin, min(begin + channels, end)


def sample_ranges(problem: Problem, samples: int) -> Iterator[Range]:
    """Yield ranges of samples."""
    for begin in range(0, problem.batch, samples):
        yield begin, min(begin + samples, problem.batch)
