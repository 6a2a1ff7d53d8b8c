"""The methods that a comparison runs: upfold's algorithms by name, and torch's ways of computing the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from . import functional
from .geometry import Geometry, output_size
from .precision import matmul_tf32, tf32_allowed
from .reference import arguments, torch_conv_transpose

CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
MATMUL_FOLD = "matmul + F.fold"
# Takes x, w and the bias or None.
Method = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """One way of torch's: its name, the layout of x and w, a note, and how to run it (None where the note says why not)."""

    name: str
    layout: str
    run: Method | None
    note: str = ""


def in_layout(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in that layout; 1-D tensors have one only."""
    if layout == "contiguous" or t.dim() - 2 not in CHANNELS_LAST:
        return t
    return t.contiguous(memory_format=CHANNELS_LAST[t.dim() - 2])


def our_method(algorithm: str, geometry: Geometry) -> Method:
    """Upfold's public function with an algorithm asked for by name."""
    functions = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
    function, options = functions[geometry.ndim - 1], arguments(geometry)
    return lambda x, w, b: function(x, w, b, algorithm=algorithm, **options)


def peers(geometry: Geometry, device: torch.device) -> list[Peer]:
    """What upfold is measured against: torch in both layouts, on a GPU also without cuDNN, and matmul + ``F.fold``."""
    ndim = geometry.ndim
    plain = _torch_method(geometry, device)
    found = [Peer("torch", "contiguous", plain)]
    if ndim in CHANNELS_LAST:
        found.append(Peer("torch channels_last", "channels_last", plain))
    if device.type == "cuda":
        found.append(Peer("torch native", "contiguous", _native_method(geometry, device), "cuDNN off"))
    refusal = ""
    if ndim == 3:
        refusal = "F.fold has no 3-D form"
    elif any(extra >= step for extra, step in zip(geometry.output_padding, geometry.stride)):
        refusal = "F.fold cannot express output_padding >= stride"
    found.append(Peer(MATMUL_FOLD, "contiguous", None if refusal else _matmul_fold(geometry, device), refusal))
    return found


def _torch_method(geometry: Geometry, device: torch.device) -> Method:
    convolve, options = torch_conv_transpose(geometry.ndim), arguments(geometry)

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        if device.type != "cuda":
            return convolve(x, w, b, **options)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32_allowed(device)):
            return convolve(x, w, b, **options)

    return run


def _native_method(geometry: Geometry, device: torch.device) -> Method:
    convolve, options = torch_conv_transpose(geometry.ndim), arguments(geometry)

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        with matmul_tf32(tf32_allowed(device)), torch.backends.cudnn.flags(enabled=False):
            return convolve(x, w, b, **options)

    return run


def _matmul_fold(geometry: Geometry, device: torch.device) -> Method:
    """The textbook method on torch's own parts: a matmul on the weights, then ``F.fold``; 1-D as an image of height 1."""
    lift = 2 - geometry.ndim
    stride, dilation = (1,) * lift + geometry.stride, (1,) * lift + geometry.dilation
    padding, extra = (0,) * lift + geometry.padding, (0,) * lift + geometry.output_padding

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        kernel, in_size = (1,) * lift + tuple(w.shape[2:]), (1,) * lift + tuple(x.shape[2:])
        sizes: Any = tuple(output_size(*axis) for axis in zip(in_size, kernel, stride, padding, dilation, extra))
        batch, groups = x.shape[0], geometry.groups
        left = w.reshape(groups, w.shape[0] // groups, -1).transpose(1, 2)
        columns = torch.matmul(left, x.reshape(batch, groups, x.shape[1] // groups, -1))
        y = F.fold(columns.flatten(1, 2), sizes, kernel, dilation, padding, stride)
        y = y if b is None else y + b.view(-1, 1, 1)
        return y.squeeze(2) if lift else y

    def run_on_gpu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        with matmul_tf32(tf32_allowed(device)):
            return run(x, w, b)

    return run_on_gpu if device.type == "cuda" else run
