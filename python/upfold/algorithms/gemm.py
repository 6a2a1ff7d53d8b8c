"""GEMM + col2im: one matrix product makes the columns, col2im sums them; the adjoints run the same way backwards.

With ``columns`` of shape (out_channels * taps, input pixels) per sample:

    conv_transpose          columns = w^T x;            y = col2im(columns) + bias
    conv                    columns = im2col(y);        x = w columns
    conv_transpose_weight   columns = im2col(y);        w = sum over samples of x columns^T

Blocks of columns (`blocks.py`) live in the workspace. A block of several samples puts them side by side, so that small maps
still make one large product. 16-bit problems use float32 throughout and round once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from .. import native
from ..problem import DTYPE_BYTES, DTYPE_CODES, Operator, Problem, contiguous_strides
from . import cuda
from .base import Enqueue, Tensors, enqueue_tensors
from .blocks import (
    CPU_BLOCK_BYTES,
    Blocking,
    Range,
    Region,
    channel_ranges,
    choose_blocking,
    regions,
    sample_ranges,
)

_NARROW = (torch.float16, torch.bfloat16)
_ALIGNMENT = 64


def _compute_dtype(problem: Problem) -> torch.dtype:
    return torch.float32 if problem.dtype in _NARROW else problem.dtype


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _weight_is_copied(problem: Problem) -> bool:
    """Whether the weight must be laid out anew, as (in_channels, out_channels / groups * taps) in the compute type."""
    shape = (problem.in_channels, problem.out_channels_per_group, *problem.kernel_size)
    return problem.dtype in _NARROW or problem.w_strides != contiguous_strides(shape)


def _weight_bytes(problem: Problem) -> int:
    """Bytes of that copy, 0 where the weight is used where it lies."""
    if not _weight_is_copied(problem):
        return 0
    elements = problem.in_channels * problem.out_channels_per_group * problem.taps
    return _aligned(elements * DTYPE_BYTES[_compute_dtype(problem)])


def _blocking(problem: Problem) -> Blocking | None:
    """Blocks that stay in the cache if the cap allows, smaller ones if it does not."""
    element = DTYPE_BYTES[_compute_dtype(problem)]
    budget = problem.workspace_cap - _weight_bytes(problem) - 2 * _ALIGNMENT
    over_outputs = problem.operator is Operator.CONV_TRANSPOSE
    pixel_bytes = problem.in_channels * element
    fits = choose_blocking(problem, element, min(budget, CPU_BLOCK_BYTES), over_outputs, pixel_bytes)
    return fits or choose_blocking(problem, element, budget, over_outputs, pixel_bytes)


@dataclass(frozen=True)
class _Part:
    """The output channels of one block: their groups, their rows inside a group, the columns' shape and native record."""

    groups: slice
    rows: slice
    shape: tuple[int, int, int]  # groups, rows, samples * pixels
    block: Any


@dataclass(frozen=True)
class _Step:
    """One region of some samples, and the parts of its channels."""

    samples: Range
    region: Region
    pixels: int  # of all samples together
    parts: tuple[_Part, ...]


@dataclass(frozen=True)
class _Schedule:
    """Everything about a call on the CPU that its tensors do not change: the steps, and the workspace's parts in bytes."""

    steps: tuple[_Step, ...]
    weight_end: int
    x_end: int
    columns_end: int


@lru_cache(maxsize=512)
def _schedule(problem: Problem) -> _Schedule:
    blocking = _blocking(problem)
    assert blocking is not None, "reject() lets no such problem through"
    element = DTYPE_BYTES[_compute_dtype(problem)]
    over_outputs = problem.operator is Operator.CONV_TRANSPOSE
    channels = tuple(channel_ranges(problem, blocking.channels))
    steps = []
    for samples in sample_ranges(problem, blocking.samples):
        for region in regions(problem, blocking, over_outputs):
            pixels = (samples[1] - samples[0]) * region.in_pixels
            parts = tuple(_part(problem, part, samples, region) for part in channels)
            steps.append(_Step(samples, region, pixels, parts))
    weight_end = _weight_bytes(problem)
    x_end = weight_end + _aligned(problem.in_channels * max(step.pixels for step in steps) * element)
    most = max(prod(part.shape) for step in steps for part in step.parts)
    return _Schedule(tuple(steps), weight_end, x_end, x_end + _aligned(most * element))


def _part(problem: Problem, channels: Range, samples: Range, region: Region) -> _Part:
    per_group, taps = problem.out_channels_per_group, problem.taps
    group, count = channels[0] // per_group, channels[1] - channels[0]
    if count >= per_group:
        groups, rows = slice(group, channels[1] // per_group), slice(0, per_group * taps)
    else:
        begin = channels[0] - group * per_group
        groups, rows = slice(group, group + 1), slice(begin * taps, (begin + count) * taps)
    sample_count = samples[1] - samples[0]
    (in_d, in_h, in_w), (out_d, out_h, out_w) = region.inputs, region.outputs
    block = native.cpu().ColumnBlock(
        n=samples,
        oc=channels,
        in_d=in_d,
        in_h=in_h,
        in_w=in_w,
        out_d=out_d,
        out_h=out_h,
        out_w=out_w,
        sample_stride=region.in_pixels,
        row_stride=sample_count * region.in_pixels,
    )
    shape = (groups.stop - groups.start, rows.stop - rows.start, sample_count * region.in_pixels)
    return _Part(groups, rows, shape, block)


class Gemm:
    """A matrix product on the weights, and col2im or im2col around it."""

    name = "gemm"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices without a kernel, and workspace caps below the smallest block."""
        if device.type != "cpu":
            return cuda.reject_gemm(problem, device)
        if problem.batch > 0 and _blocking(problem) is None:
            return (
                f"workspace_mb = {problem.workspace_cap / 2**20:g} cannot hold the smallest block of columns and a copy of the "
                f"weight ({_weight_bytes(problem)} bytes); raise UPFOLD_WORKSPACE_MB or use(workspace_mb=...)"
            )
        return None

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """How large the blocks of columns are on a GPU, and what is multiplied; one way only on a CPU."""
        return (0,) if device.type == "cpu" else cuda.gemm_configs(problem)

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """The weight in the compute type, one block of x and its columns; on a GPU cuBLAS's own scratch too."""
        if device.type != "cpu":
            return cuda.gemm_workspace_bytes(problem, device, config)
        return _schedule(problem).columns_end if problem.batch else 0

    def prepare(self, problem: Problem, config: int, device: torch.device) -> Enqueue | None:
        """Bind the products and the column kernels; on a CPU torch multiplies, and needs the tensors."""
        return None if device.type == "cpu" else cuda.prepare_gemm(problem, config, device)

    def packing(self, problem: Problem, config: int, device: torch.device) -> str:
        """Nothing is packed apart from the calls."""
        return "its product takes the weight as it lies, or turned in the call itself"

    def sums_channels(self, problem: Problem, config: int, device: torch.device) -> int:
        """It sums products alone."""
        return 0

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Run the operator block by block."""
        if tensors.x.is_cuda:
            enqueue_tensors(cuda.prepare_gemm(problem, config, tensors.x.device), tensors, workspace, stream)
            return
        if workspace is None:  # every tap of every input falls into the padding: no columns to hold
            workspace = torch.empty(0, dtype=torch.uint8)
        call = _CpuCall(problem, tensors, workspace)
        if problem.operator is Operator.CONV_TRANSPOSE:
            call.conv_transpose()
        elif problem.operator is Operator.CONV:
            call.conv()
        else:
            call.conv_transpose_weight()


class _CpuCall:
    """One call on the CPU: the operands as matrices per group, and the parts of the workspace."""

    def __init__(self, problem: Problem, tensors: Tensors, workspace: torch.Tensor) -> None:
        self.problem, self.tensors, self.workspace = problem, tensors, workspace
        self.schedule = _schedule(problem)
        self.dtype = _compute_dtype(problem)
        self.code = DTYPE_CODES[self.dtype]

    def conv_transpose(self) -> None:
        p, (_, w, bias, y) = self.problem, self.tensors
        matrices = self._weight(w).view(p.groups, p.in_channels_per_group, -1).transpose(1, 2)
        bias_pointer, y_pointer = 0 if bias is None else bias.data_ptr(), y.data_ptr()
        space = self._column_space()
        for step in self.schedule.steps:
            x = self._x_matrix(step)
            for part in step.parts:
                if step.pixels:
                    columns = space[: prod(part.shape)].view(part.shape)
                    _multiply(matrices[part.groups, part.rows], x[part.groups], columns)
                native.cpu().col2im(p.cpu, part.block, self.code, space.data_ptr(), bias_pointer, y_pointer, p.threads)

    def conv(self) -> None:
        p, (x, w, _, _) = self.problem, self.tensors
        matrices = self._weight(w).view(p.groups, p.in_channels_per_group, -1)
        for step in self.schedule.steps:
            result = self._x_space(step).view(p.groups, p.in_channels_per_group, step.pixels)
            for part in step.parts:
                columns = self._im2col(part)
                _multiply(matrices[part.groups, :, part.rows], columns, result[part.groups], accumulate=part.rows.start > 0)
            target = _narrow(x, step)
            target.copy_(result.view(p.in_channels, len(target), *target.shape[2:]).transpose(0, 1))

    def conv_transpose_weight(self) -> None:
        p, (_, w, _, _) = self.problem, self.tensors
        in_place = not _weight_is_copied(p)
        total = (w if in_place else self._weight_space(w)).view(p.groups, p.in_channels_per_group, -1)
        for number, step in enumerate(self.schedule.steps):
            x = self._x_matrix(step)
            for part in step.parts:
                columns = self._im2col(part).transpose(1, 2)
                _multiply(x[part.groups], columns, total[part.groups, :, part.rows], accumulate=number > 0)
        if not in_place:
            w.copy_(total.view(w.shape))

    def _weight(self, w: torch.Tensor) -> torch.Tensor:
        """The weight, contiguous and in the compute type."""
        return self._weight_space(w).copy_(w) if _weight_is_copied(self.problem) else w

    def _weight_space(self, w: torch.Tensor) -> torch.Tensor:
        return self.workspace[: self.schedule.weight_end].view(self.dtype)[: w.numel()].view(w.shape)

    def _x_space(self, step: _Step) -> torch.Tensor:
        space = self.workspace[self.schedule.weight_end : self.schedule.x_end].view(self.dtype)
        return space[: self.problem.in_channels * step.pixels]

    def _column_space(self) -> torch.Tensor:
        return self.workspace[self.schedule.x_end : self.schedule.columns_end].view(self.dtype)

    def _x_matrix(self, step: _Step) -> torch.Tensor:
        """The block of x as (groups, in_channels / groups, samples * pixels): a view where one sample allows it, else a copy."""
        p = self.problem
        block = _narrow(self.tensors.x, step)
        if block.dtype == self.dtype and len(block) == 1:
            try:
                return block[0].view(p.groups, p.in_channels_per_group, step.pixels)
            except RuntimeError:  # torch's way to say that the pixels do not lie evenly
                pass
        copy = self._x_space(step)
        copy.view(p.in_channels, len(block), *block.shape[2:]).copy_(block.transpose(0, 1))
        return copy.view(p.groups, p.in_channels_per_group, step.pixels)

    def _im2col(self, part: _Part) -> torch.Tensor:
        """The columns of a block of y, widened to the compute type on the way."""
        p = self.problem
        columns = self._column_space()[: prod(part.shape)].view(part.shape)
        native.cpu().im2col(p.cpu, part.block, self.code, self.tensors.y.data_ptr(), columns.data_ptr(), p.threads)
        return columns


def _narrow(t: torch.Tensor, step: _Step) -> torch.Tensor:
    """The part of batched x that a step covers."""
    block = t[step.samples[0] : step.samples[1]]
    for axis, (begin, end) in enumerate(step.region.inputs[5 - t.dim() :], start=2):
        if end - begin != t.shape[axis]:
            block = block.narrow(axis, begin, end - begin)
    return block


def _multiply(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor, accumulate: bool = False) -> None:
    """Set result to a @ b, or add it, for batches of matrices; the batch is the groups."""
    if len(a) == 1:
        target = result[0]
        torch.addmm(target, a[0], b[0], beta=int(accumulate), out=target)
    elif accumulate:
        torch.baddbmm(result, a, b, out=result)
    else:  # torch 2.0's baddbmm multiplies what it should ignore with beta=0, and an unwritten NaN stays one
        torch.bmm(a, b, out=result)
