"""What can be measured, the three operators and a training step of all of them, and the operands of one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from . import execute
from .execute import Arguments
from .geometry import Geometry, InvalidArgument
from .problem import Problem

FORWARD, GRAD_INPUT, GRAD_WEIGHT = OPERATORS = ("forward", "grad_input", "grad_weight")
STEP = "step"
MODES = (*OPERATORS, STEP)
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True)
class Operands:
    """What one call gets: x, w and, by mode, the bias or the gradient of the result, `g`; a step gets both.

    A gradient needs the shape alone of the operand that it is the gradient of.
    """

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None = None
    g: torch.Tensor | None = None

    @property
    def grad(self) -> torch.Tensor:
        """`g`, where there is one."""
        assert self.g is not None, "gradients and steps carry it"
        return self.g

    @property
    def in_size(self) -> tuple[int, ...]:
        """Spatial size of x."""
        return tuple(self.x.shape[2:])

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Spatial size of w."""
        return tuple(self.w.shape[2:])

    def laid_out(self, layout: str) -> Operands:
        """The same with x, w and g in that layout, as a model's own ``.to(memory_format=...)`` leaves all of them."""
        g = None if self.g is None else in_layout(self.g, layout)
        return replace(self, x=in_layout(self.x, layout), w=in_layout(self.w, layout), g=g)

    def another(self, mode: str) -> Operands:
        """Equal operands with fresh memory for the data that the mode reads; the weight stays."""
        x = self.x if mode == GRAD_INPUT else self.x.clone()
        return replace(self, x=x, g=None if self.g is None else self.g.clone())


def in_layout(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in that layout; 1-D tensors have one only."""
    if layout == "contiguous" or t.dim() - 2 not in CHANNELS_LAST:
        return t
    return t.contiguous(memory_format=CHANNELS_LAST[t.dim() - 2])


def keywords(geometry: Geometry) -> dict[str, Any]:
    """A geometry as the keyword arguments of ``conv_transpose1d/2d/3d``, torch's or ours."""
    return {
        "stride": geometry.stride,
        "padding": geometry.padding,
        "output_padding": geometry.output_padding,
        "groups": geometry.groups,
        "dilation": geometry.dilation,
    }


def positional(geometry: Geometry) -> Arguments:
    """The same in the order of `execute`."""
    g = geometry
    return g.stride, g.padding, g.output_padding, g.groups, g.dilation


def describe(mode: str, operands: Operands, geometry: Geometry) -> Problem:
    """The problem of a mode for these operands, without running it; of a step, that of its forward."""
    arguments = positional(geometry)
    if mode in (FORWARD, STEP):
        return execute.describe(operands.x, operands.w, operands.bias, arguments)
    if mode == GRAD_INPUT:
        return execute.describe_conv(operands.grad, operands.w, operands.in_size, arguments)[0]
    return execute.describe_conv_transpose_weight(operands.x, operands.grad, operands.kernel_size, arguments)[0]


def with_gradient(mode: str, operands: Operands, geometry: Geometry) -> Operands:
    """The operands of a mode, made from those of the forward: all others get random numbers as g; a gradient drops the bias."""
    if mode == FORWARD:
        return operands
    if operands.x.dtype.is_complex:
        raise InvalidArgument(f"mode = {mode!r}; the operands are {operands.x.dtype}; torch's gradients are of real numbers only")
    device, dtype = operands.x.device, operands.x.dtype
    problem = describe(FORWARD, operands, geometry)
    shape = problem.batch, problem.out_channels, *problem.out_size[3 - geometry.ndim :]
    generator = torch.Generator(device).manual_seed(1)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.randn(shape, generator=generator, device=device, dtype=drawn).to(dtype)
    return replace(operands, bias=operands.bias if mode == STEP else None, g=g)
