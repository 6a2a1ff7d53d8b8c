"""torch's own operators, for devices that no kernel of ours covers and as the peer to be measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from .. import activation
from ..problem import Operator, Problem
from .base import Tensors


class _Frame(NamedTuple):
    """What torch computes of an axis, and how much more that is at either end than was asked for."""

    padding: int
    output_padding: int
    before: int
    after: int


def _frame(problem: Problem, axis: int) -> _Frame:
    """The least that torch's symmetric padding and its rule for output padding can express, and that holds the output."""
    stride, pad_begin, dilation = problem.stride[axis], problem.padding[axis], problem.dilation[axis]
    whole = (problem.in_size[axis] - 1) * stride + dilation * (problem.kernel_size[axis] - 1) + 1
    extra = problem.out_size[axis] - whole + 2 * pad_begin  # the output padding beside that padding at both ends
    # Less padding makes room at both ends.
    before = max(0, extra - (max(stride, dilation) - 1))
    return _Frame(pad_begin - before, max(0, extra - before), before, max(0, before - extra))


class Torch:
    """Runs ``conv_transpose1d/2d/3d`` and what its backward is made of. No figure of upfold's counts it."""

    name = "torch"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse nothing; torch raises by itself for a type that it does not know on a device."""
        return None

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """One way only."""
        return (0,)

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """None of ours; torch allocates its own."""
        return 0

    def prepare(self, problem: Problem, config: int, device: torch.device) -> None:
        """Nothing; torch takes tensors."""
        return

    def packing(self, problem: Problem, config: int, device: torch.device) -> str:
        """Nothing is packed apart from the calls."""
        return "torch's own operator takes the weight as it lies"

    def sums_channels(self, problem: Problem, config: int, device: torch.device) -> int:
        """It sums products alone."""
        return 0

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Call torch and copy its result into the operand that the operator writes."""
        x, w, bias, y = tensors
        ndim = problem.spatial_ndim
        stride, dilation = list(problem.stride[3 - ndim :]), list(problem.dilation[3 - ndim :])
        frames = [_frame(problem, axis) for axis in range(3 - ndim, 3)]
        padding, output_padding = [frame.padding for frame in frames], [frame.output_padding for frame in frames]
        if problem.operator is not Operator.CONV_TRANSPOSE and any(frame.before or frame.after for frame in frames):
            y = pad(y, [amount for frame in reversed(frames) for amount in (frame.before, frame.after)])
        if problem.operator is Operator.CONV:
            full = getattr(torch, f"conv{ndim}d")(y, w, None, stride, padding, dilation, problem.groups)
            # Output padding beyond the stride lets the plain formula find further positions, which x does not have.
            for axis in range(2, 2 + ndim):
                full = full.narrow(axis, 0, x.shape[axis])
            x.copy_(full)
            return
        if problem.operator is Operator.CONV_TRANSPOSE:
            function = getattr(torch, f"conv_transpose{ndim}d")
            result = function(x, w, bias, stride, padding, output_padding, problem.groups, dilation)
            for axis, frame in enumerate(frames, 2):
                result = result.narrow(axis, frame.before, y.shape[axis])
            y.copy_(activation.apply(result, problem.activation))
            return

        def weight_gradient(values: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            like = w if w.dtype == values.dtype else torch.empty_like(w, dtype=values.dtype)
            mask = [False, True, False]
            arguments = (stride, padding, dilation, True, output_padding, problem.groups, mask)
            gradient: torch.Tensor = torch.ops.aten.convolution_backward(grad, values, like, None, *arguments)[1]
            return gradient

        if not w.is_complex():
            w.copy_(weight_gradient(x, y))
            return
        # aten's backward knows real numbers only.
        real = weight_gradient(x.real, y.real) - weight_gradient(x.imag, y.imag)
        imaginary = weight_gradient(x.real, y.imag) + weight_gradient(x.imag, y.real)
        w.copy_(torch.complex(real, imaginary))
