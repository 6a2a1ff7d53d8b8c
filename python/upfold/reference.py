"""The truth that results are checked against before they are timed, and the rule that says how far off they may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .geometry import Geometry
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


def torch_conv_transpose(ndim: int) -> Callable[..., torch.Tensor]:
    """Torch's ``conv_transpose{ndim}d``."""
    functions: tuple[Callable[..., Any], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    return functions[ndim - 1]


def arguments(geometry: Geometry) -> dict[str, Any]:
    """A geometry as the keyword arguments of ``conv_transpose1d/2d/3d``, torch's or ours."""
    return {
        "stride": geometry.stride,
        "padding": geometry.padding,
        "output_padding": geometry.output_padding,
        "groups": geometry.groups,
        "dilation": geometry.dilation,
    }


def round_to_tf32(t: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 10 fraction bits of TF32, to nearest, ties to even."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def reference(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry, *, tf32: bool = False
) -> Reference:
    """Compute what a transposed convolution should give, by torch in float64.

    Args:
        x: (batch, in_channels, spatial...).
        w: (in_channels, out_channels / groups, kernel...).
        bias: (out_channels,) or None.
        geometry: checked arguments.
        tf32: whether the kernels may round float32 operands to TF32.

    Returns:
        The truth with its error bound, on the device of x (on the CPU where that device has no float64).
    """
    device = x.device if x.device.type in ("cpu", "cuda") else torch.device("cpu")
    x, w, bias = (None if t is None else t.detach().to(device).contiguous() for t in (x, w, bias))  # type: ignore[assignment]
    convolve = torch_conv_transpose(geometry.ndim)
    options = arguments(geometry)
    wide = _WIDE.get(x.dtype, torch.float64)
    with torch.no_grad():
        values = convolve(x.to(wide), w.to(wide), None if bias is None else bias.to(wide), **options)
        magnitude = convolve(x.abs().double(), w.abs().double(), None if bias is None else bias.abs().double(), **options)
        unit = torch.finfo(x.dtype).eps
        truth = Reference(values, magnitude, unit)
        oracle = _oracle(x, w, bias, geometry, tf32)
        return Reference(values, magnitude, max(unit, _ALLOWANCE * truth.error(oracle)))


def _oracle(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry, tf32: bool) -> torch.Tensor:
    convolve = torch_conv_transpose(geometry.ndim)
    options = arguments(geometry)
    dtype = x.dtype
    if dtype in (torch.float64, torch.complex128):
        # No wider type exists: the same sums in another order show how much the order matters.
        groups, batch = geometry.groups, x.shape[0]
        x = x.reshape(batch, groups, -1, *x.shape[2:]).flip(2).reshape(x.shape)
        w = w.reshape(groups, -1, *w.shape[1:]).flip(1).reshape(w.shape)
        return convolve(x, w, bias, **options)
    if dtype == torch.complex64:
        return convolve(x, w, bias, **options)
    x, w = x.float(), w.float()
    if tf32 and dtype == torch.float32:
        x, w = round_to_tf32(x), round_to_tf32(w)
    bias = None if bias is None else bias.float()
    if x.device.type != "cuda":
        return convolve(x, w, bias, **options).to(dtype)
    with matmul_tf32(False), torch.backends.cudnn.flags(enabled=False):
        return convolve(x, w, bias, **options).to(dtype)
