"""GEMM + col2im: one matrix product makes the columns, col2im sums them; the adjoints run the same way backwards.

With ``columns`` of shape (out_channels * taps, input pixels) per sample:

    conv_transpose          columns = w^T x;            y = col2im(columns) + bias
    conv                    columns = im2col(y);        x = w columns
    conv_transpose_weight   columns = im2col(y);        w = sum over samples of x columns^T

Blocks of columns (`blocks.py`) live in the workspace. A block of several samples puts them side by side, so that small maps still make
one large product. 16-bit problems use float32 throughout and round once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import native
from ..problem import DTYPE_BYTES, DTYPE_CODES, Operator, Problem
from .base import Tensors
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


def _weight_bytes(problem: Problem) -> int:
    """Bytes of the weight in the compute type, laid out as (in_channels, out_channels / groups * taps)."""
    elements = problem.in_channels * problem.out_channels_per_group * problem.taps
    return _aligned(elements * DTYPE_BYTES[_compute_dtype(problem)])


def _blocking(problem: Problem) -> Blocking | None:
    """Blocks that stay in the cache if the cap allows, smaller ones if it does not."""
    element = DTYPE_BYTES[_compute_dtype(problem)]
    budget = problem.workspace_cap - _weight_bytes(problem) - 2 * _ALIGNMENT
    over_outputs = problem.operator is Operator.CONV_TRANSPOSE
    sample_bytes = problem.in_channels * element
    fits = choose_blocking(problem, element, min(budget, CPU_BLOCK_BYTES), over_outputs, sample_bytes)
    return fits or choose_blocking(problem, element, budget, over_outputs, sample_bytes)


class Gemm:
    """A matrix product on the weights, and col2im or im2col around it."""

    name = "gemm"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices without a kernel, and workspace caps below the smallest block."""
        if device.type != "cpu":
            return f"no gemm kernel exists for {device.type} yet"
        if problem.batch > 0 and _blocking(problem) is None:
            return (
                f"workspace_mb = {problem.workspace_cap / 2**20:g} cannot hold the weight ({_weight_bytes(problem)} bytes) and the "
                f"smallest block of columns; raise UPFOLD_WORKSPACE_MB or use(workspace_mb=...)"
            )
        return None

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """One way only."""
        return (0,)

    def workspace_bytes(self, problem: Problem, config: int) -> int:
        """The weight in the compute type, one block of x and its columns."""
        blocking = _blocking(problem)
        if problem.batch == 0 or blocking is None:
            return 0
        pixels = _most_pixels(problem, blocking) * blocking.samples
        element = DTYPE_BYTES[_compute_dtype(problem)]
        columns = _aligned(blocking.channels * problem.taps * pixels * element)
        return _weight_bytes(problem) + _aligned(problem.in_channels * pixels * element) + columns

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Run the operator block by block."""
        blocking = _blocking(problem)
        assert blocking is not None and workspace is not None
        call = _CpuCall(problem, tensors, blocking, workspace)
        if problem.operator is Operator.CONV_TRANSPOSE:
            call.conv_transpose()
        elif problem.operator is Operator.CONV:
            call.conv()
        else:
            call.conv_transpose_weight()


def _most_pixels(problem: Problem, blocking: Blocking) -> int:
    over_outputs = problem.operator is Operator.CONV_TRANSPOSE
    return max(region.in_pixels for region in regions(problem, blocking, over_outputs))


class _CpuCall:
    """One call on the CPU: the operands as matrices per group, and the parts of the workspace."""

    def __init__(self, problem: Problem, tensors: Tensors, blocking: Blocking, workspace: torch.Tensor) -> None:
        self.problem, self.blocking, self.tensors = problem, blocking, tensors
        self.dtype = _compute_dtype(problem)
        self.threads = problem.threads
        self.groups = problem.groups
        pixels = _most_pixels(problem, blocking) * blocking.samples
        element = DTYPE_BYTES[self.dtype]
        weight_end = _weight_bytes(problem)
        x_end = weight_end + _aligned(problem.in_channels * pixels * element)
        self._weight_space = workspace[:weight_end].view(self.dtype)
        self._x_space = workspace[weight_end:x_end].view(self.dtype)
        self._column_space = workspace[x_end : len(workspace) // element * element].view(self.dtype)

    def conv_transpose(self) -> None:
        p, (_, w, bias, y) = self.problem, self.tensors
        weight = self._weight_copy(w) if self._needs_copy(w) else w
        matrices = weight.view(self.groups, p.in_channels_per_group, -1).transpose(1, 2)
        bias_pointer = 0 if bias is None else bias.data_ptr()
        for samples in sample_ranges(p, self.blocking.samples):
            for region in regions(p, self.blocking, over_outputs=True):
                x = self._x_matrix(samples, region)
                for channels in channel_ranges(p, self.blocking.channels):
                    columns = self._columns(channels, samples, region)
                    if columns.numel():
                        groups, rows = self._rows(channels)
                        _multiply(matrices[groups, rows], x[groups], columns)
                    native.cpu().col2im(
                        p.cpu,
                        self._block(channels, samples, region),
                        DTYPE_CODES[self.dtype],
                        columns.data_ptr(),
                        bias_pointer,
                        y.data_ptr(),
                        self.threads,
                    )

    def conv(self) -> None:
        p, (x, w, _, _) = self.problem, self.tensors
        weight = self._weight_copy(w) if self._needs_copy(w) else w
        matrices = weight.view(self.groups, p.in_channels_per_group, -1)
        for samples in sample_ranges(p, self.blocking.samples):
            for region in regions(p, self.blocking, over_outputs=False):
                result = self._x_space[: p.in_channels * _length(samples) * region.in_pixels]
                result = result.view(self.groups, p.in_channels_per_group, -1)
                for channels in channel_ranges(p, self.blocking.channels):
                    columns = self._im2col(channels, samples, region)
                    groups, rows = self._rows(channels)
                    _multiply(matrices[groups, :, rows], columns, result[groups], accumulate=rows.start > 0)
                target = _narrow(x, samples, region)
                shape = (p.in_channels, _length(samples), *target.shape[2:])
                target.copy_(result.reshape(shape).transpose(0, 1))

    def conv_transpose_weight(self) -> None:
        p, (_, w, _, _) = self.problem, self.tensors
        in_place = not self._needs_copy(w)
        total = (w if in_place else self._weight_space[: w.numel()]).view(self.groups, p.in_channels_per_group, -1)
        first = True
        for samples in sample_ranges(p, self.blocking.samples):
            for region in regions(p, self.blocking, over_outputs=False):
                x = self._x_matrix(samples, region)
                for channels in channel_ranges(p, self.blocking.channels):
                    columns = self._im2col(channels, samples, region)
                    groups, rows = self._rows(channels)
                    _multiply(x[groups], columns.transpose(1, 2), total[groups, :, rows], accumulate=not first)
                first = False
        if not in_place:
            w.copy_(total.view(w.shape))

    def _needs_copy(self, w: torch.Tensor) -> bool:
        return w.dtype != self.dtype or not w.is_contiguous()

    def _weight_copy(self, w: torch.Tensor) -> torch.Tensor:
        return self._weight_space[: w.numel()].view(w.shape).copy_(w)

    def _x_matrix(self, samples: Range, region: Region) -> torch.Tensor:
        """The block of x as (groups, in_channels / groups, samples * pixels): a view where one sample allows it, else a copy."""
        p = self.problem
        part = _narrow(self.tensors.x, samples, region)
        if part.dtype == self.dtype and len(part) == 1:
            try:
                return part[0].view(self.groups, p.in_channels_per_group, region.in_pixels)
            except RuntimeError:  # torch's way to say that the pixels do not lie evenly
                pass
        copy = self._x_space[: part.numel()].view(p.in_channels, len(part), *part.shape[2:])
        copy.copy_(part.transpose(0, 1))
        return copy.view(self.groups, p.in_channels_per_group, len(part) * region.in_pixels)

    def _columns(self, channels: Range, samples: Range, region: Region) -> torch.Tensor:
        """Space for the columns of a block: (groups, rows of one group, samples * pixels)."""
        p = self.problem
        groups, rows = self._rows(channels)
        shape = (groups.stop - groups.start, rows.stop - rows.start, _length(samples) * region.in_pixels)
        return self._column_space[: shape[0] * shape[1] * shape[2]].view(shape)

    def _im2col(self, channels: Range, samples: Range, region: Region) -> torch.Tensor:
        columns = self._columns(channels, samples, region)
        # y is read in its own type when it is as wide as the columns; narrower values widen on the way.
        native.cpu().im2col(
            self.problem.cpu,
            self._block(channels, samples, region),
            DTYPE_CODES[self.dtype],
            self.tensors.y.data_ptr(),
            columns.data_ptr(),
            self.threads,
        )
        return columns

    def _rows(self, channels: Range) -> tuple[slice, slice]:
        """The groups of a channel range, and its rows (channel, tap) inside a group."""
        per_group, taps = self.problem.out_channels_per_group, self.problem.taps
        group = channels[0] // per_group
        if _length(channels) >= per_group:
            return slice(group, channels[1] // per_group), slice(0, per_group * taps)
        begin = channels[0] - group * per_group
        return slice(group, group + 1), slice(begin * taps, (begin + _length(channels)) * taps)

    def _block(self, channels: Range, samples: Range, region: Region) -> object:
        pixels = region.in_pixels
        (in_d, in_h, in_w), (out_d, out_h, out_w) = region.inputs, region.outputs
        return native.cpu().ColumnBlock(
            n=samples,
            oc=channels,
            in_d=in_d,
            in_h=in_h,
            in_w=in_w,
            out_d=out_d,
            out_h=out_h,
            out_w=out_w,
            sample_stride=pixels,
            row_stride=_length(samples) * pixels,
        )


def _length(part: Range) -> int:
    return part[1] - part[0]


def _narrow(t: torch.Tensor, samples: Range, region: Region) -> torch.Tensor:
    """The part of batched x that a block covers."""
    part = t[samples[0] : samples[1]]
    for axis, (begin, end) in enumerate(region.inputs[5 - t.dim() :], start=2):
        if end - begin != t.shape[axis]:
            part = part.narrow(axis, begin, end - begin)
    return part


def _multiply(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor, accumulate: bool = False) -> None:
    """result (+)= a @ b for batches of matrices, the batch being groups."""
    if len(a) == 1:
        target = result[0]
        torch.addmm(target, a[0], b[0], beta=int(accumulate), out=target)
    else:
        torch.baddbmm(result, a, b, beta=int(accumulate), out=result)
