"""torch's own operators, for devices that no kernel of ours covers and as the peer to be measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import activation
from ..problem import Operator, Problem
from .base import Tensors


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

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Call torch and copy its result into the operand that the operator writes."""
        x, w, bias, y = tensors
        ndim = problem.spatial_ndim
        stride, padding, dilation = (list(axes[3 - ndim :]) for axes in (problem.stride, problem.padding, problem.dilation))
        if problem.operator is Operator.CONV:
            full = getattr(torch, f"conv{ndim}d")(y, w, None, stride, padding, dilation, problem.groups)
            # Output padding beyond the stride lets the plain formula find further positions, which x does not have.
            for axis in range(2, 2 + ndim):
                full = full.narrow(axis, 0, x.shape[axis])
            x.copy_(full)
            return
        output_padding = [
            problem.out_size[axis]
            - (problem.in_size[axis] - 1) * problem.stride[axis]
            + 2 * problem.padding[axis]
            - problem.dilation[axis] * (problem.kernel_size[axis] - 1)
            - 1
            for axis in range(3 - ndim, 3)
        ]
        if problem.operator is Operator.CONV_TRANSPOSE:
            function = getattr(torch, f"conv_transpose{ndim}d")
            result = function(x, w, bias, stride, padding, output_padding, problem.groups, dilation)
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
