"""The truth that results are checked against before they are timed, and the rule that says how far off they may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from .geometry import Geometry
from .modes import FORWARD, GRAD_INPUT, GRAD_WEIGHT, Operands, keywords
from .precision import matmul_tf32

_WIDE = {torch.complex64: torch.complex128, torch.complex128: torch.complex128}
# A result may be this many times as far off as the oracle.
_ALLOWANCE = 2.0


@dataclass(frozen=True)
class Reference:
    """What a transposed convolution should give.

    Attributes:
        values: the result in float64 (complex128).
        magnitude: the transposed convolution of absolute values, which errors are divided by.
        bound: the largest error that a correct kernel may show: twice that of an oracle which rounds the operands to the compute
            type, sums in float32 and rounds once, and at least one unit of the dtype.
    """

    values: torch.Tensor
    magnitude: torch.Tensor
    bound: float

    def error(self, y: torch.Tensor) -> float:
        """Largest ``|y - values| / magnitude``; infinite where a value is wrong though nothing reaches it, or no number."""
        worst = 0.0
        for sample, truth, magnitude in zip(y, self.values, self.magnitude):  # one at a time: float64 copies are large
            distance = (sample.detach().to(truth.device, truth.dtype) - truth).abs()
            relative = torch.where(distance == 0, torch.zeros_like(distance), distance / magnitude)
            largest = float(relative.max())
            if largest != largest:
                return float("inf")
            worst = max(worst, largest)
        return worst


@dataclass(frozen=True)
class StepReference:
    """What a step should give: the result, the gradients of x and w and, with a bias, that of the bias, in this order."""

    parts: tuple[Reference, ...]
    bound: float = 1.0

    def error(self, results: Sequence[torch.Tensor]) -> float:
        """The largest error of a part, in that part's bound."""
        return max(part.error(one) / part.bound for part, one in zip(self.parts, results, strict=True))


def torch_conv_transpose(ndim: int) -> Callable[..., torch.Tensor]:
    """Torch's ``conv_transpose{ndim}d``."""
    functions: tuple[Callable[..., Any], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    return functions[ndim - 1]


def torch_gradient(mode: str, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """One gradient of a transposed convolution by torch's own backward operator, as autograd would ask for it."""
    p, wants_x = geometry, mode == GRAD_INPUT
    arguments = p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, [wants_x, not wants_x, False]
    found: torch.Tensor = torch.ops.aten.convolution_backward(g, x, w, None, *arguments)[0 if wants_x else 1]
    return found


def round_to_tf32(t: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 10 fraction bits of TF32, to nearest, ties to even."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def step_reference(operands: Operands, geometry: Geometry, *, tf32: bool = False) -> StepReference:
    """Compute what a step should give (arguments as of `reference`)."""
    bare = replace(operands, bias=None)
    parts = [reference(operands, geometry, tf32=tf32)]
    parts += [reference(bare, geometry, mode=mode, tf32=tf32) for mode in (GRAD_INPUT, GRAD_WEIGHT)]
    if operands.bias is not None:
        parts.append(_bias_reference(operands.grad.detach()))
    return StepReference(tuple(parts))


def _bias_reference(g: torch.Tensor) -> Reference:
    """The sum over batch and space."""
    wide = g.movedim(1, 0).flatten(1)
    truth = Reference(wide.double().sum(1), wide.abs().double().sum(1), torch.finfo(g.dtype).eps)
    wide = wide if g.dtype == torch.float64 else wide.float()
    oracle = (wide[:, ::2].sum(1) + wide[:, 1::2].sum(1)).to(g.dtype)
    return replace(truth, bound=max(truth.bound, _ALLOWANCE * truth.error(oracle)))


def reference(operands: Operands, geometry: Geometry, *, mode: str = FORWARD, tf32: bool = False) -> Reference:
    """Compute what one of the operators should give, by torch in float64.

    Args:
        operands: of one call.
        geometry: checked arguments.
        mode: which operator (`modes.OPERATORS`).
        tf32: whether the kernels may round float32 operands to TF32.

    Returns:
        The truth with its error bound, on the device of x (on the CPU where that device has no float64).
    """
    device = operands.x.device if operands.x.device.type in ("cpu", "cuda") else torch.device("cpu")
    operands = _each(operands, lambda t: t.detach().to(device).contiguous())
    dtype = operands.x.dtype
    wide = _WIDE.get(dtype, torch.float64)
    with torch.no_grad():
        values = _compute(mode, _each(operands, lambda t: t.to(wide)), geometry)
        magnitude = _compute(mode, _each(operands, lambda t: t.abs().double()), geometry)
        unit = torch.finfo(dtype).eps
        truth = Reference(values, magnitude, unit)
        oracle = _oracle(mode, operands, geometry, tf32)
        return Reference(values, magnitude, max(unit, _ALLOWANCE * truth.error(oracle)))


def _each(operands: Operands, change: Callable[[torch.Tensor], torch.Tensor]) -> Operands:
    o = operands
    bias, g = None if o.bias is None else change(o.bias), None if o.g is None else change(o.g)
    return Operands(change(o.x), change(o.w), bias, g)


def _compute(mode: str, o: Operands, geometry: Geometry) -> torch.Tensor:
    if mode == FORWARD:
        return torch_conv_transpose(geometry.ndim)(o.x, o.w, o.bias, **keywords(geometry))
    return torch_gradient(mode, o.x, o.w, o.grad, geometry)


def _oracle(mode: str, operands: Operands, geometry: Geometry, tf32: bool) -> torch.Tensor:
    dtype = operands.x.dtype
    if dtype in (torch.float64, torch.complex128):
        return _in_another_order(mode, operands, geometry)
    if dtype == torch.complex64:
        return _compute(mode, operands, geometry)
    o = _each(operands, torch.Tensor.float)
    if tf32 and dtype == torch.float32:
        g = None if o.g is None else round_to_tf32(o.g)
        o = Operands(round_to_tf32(o.x), round_to_tf32(o.w), o.bias, g)
    if o.x.device.type != "cuda":
        return _compute(mode, o, geometry).to(dtype)
    with matmul_tf32(False), torch.backends.cudnn.flags(enabled=False):
        return _compute(mode, o, geometry).to(dtype)


def _in_another_order(mode: str, o: Operands, geometry: Geometry) -> torch.Tensor:
    """The same sums in another order: where no wider type exists, they show how much the order matters."""
    if mode == FORWARD:
        groups = geometry.groups
        x = o.x.reshape(len(o.x), groups, -1, *o.in_size).flip(2).reshape(o.x.shape)
        w = o.w.reshape(groups, -1, *o.w.shape[1:]).flip(1).reshape(o.w.shape)
        return _compute(mode, Operands(x, w, o.bias), geometry)
    # Every second channel, or column, of the gradient, and then the others.
    axis = 1 if mode == GRAD_INPUT else -1
    even = torch.zeros_like(o.grad)
    places = torch.arange(0, o.grad.shape[axis], 2, device=even.device)
    even.index_copy_(axis, places, o.grad.index_select(axis, places))
    return sum(
        (torch_gradient(mode, o.x, o.w, part, geometry) for part in (even, o.grad - even)), torch.zeros((), device=even.device)
    )
