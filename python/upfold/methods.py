"""The methods that a comparison runs: upfold's algorithms by name, and torch's ways of computing the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from . import execute, frozen, functional
from .dispatch import use_config
from .geometry import Geometry, output_size
from .modes import CHANNELS_LAST, FORWARD, GRAD_INPUT, STEP, Operands, keywords, positional
from .precision import matmul_tf32, tf32_allowed
from .reference import torch_conv_transpose, torch_gradient

TORCH, TORCH_CHANNELS_LAST, TORCH_NATIVE = "torch", "torch channels_last", "torch native"
MATMUL_FOLD = "matmul + F.fold"
# The way that upfold takes by itself; of a step it may be another for each operator.
AUTO = "auto"
# A step gives its result and its gradients.
Result = torch.Tensor | tuple[torch.Tensor, ...]
Method = Callable[[Operands], Result]


@dataclass(frozen=True)
class Peer:
    """One way of torch's: its name, the layout of its operands, a note, and how to run it (None where the note says why not)."""

    name: str
    layout: str
    run: Method | None
    note: str = ""


def our_method(mode: str, algorithm: str, geometry: Geometry, config: int | None = None) -> Method:
    """One of upfold's operators with an algorithm asked for by name, and a config where that is not to be the best guess."""
    run = _our_operator(mode, algorithm, geometry)
    if config is None:
        return run

    def with_config(o: Operands) -> Result:
        with use_config(config):
            return run(o)

    return with_config


def frozen_method(algorithm: str, geometry: Geometry, config: int) -> Method:
    """The forward of one of upfold's algorithms, with the weight packed in the first call, as of a frozen layer."""
    arguments = positional(geometry)
    kept: list[frozen.Copies] = []

    def run(o: Operands) -> Result:
        if not kept or not kept[0].fit(o.w):
            kept[:] = [frozen.Copies(o.w)]
        with use_config(config):
            return frozen.conv_transpose(o.x, o.w, o.bias, arguments, algorithm, None, kept[0])

    return run


def forward_into(algorithm: str, geometry: Geometry, y: torch.Tensor) -> Method:
    """The forward of one of upfold's algorithms, written into `y`."""
    function, options = _forward(geometry), keywords(geometry)
    return lambda o: function(o.x, o.w, o.bias, algorithm=algorithm, out=y, **options)


def _forward(geometry: Geometry) -> Callable[..., torch.Tensor]:
    return (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[geometry.ndim - 1]


def _our_operator(mode: str, algorithm: str, geometry: Geometry) -> Method:
    if mode in (FORWARD, STEP):
        options: dict[str, Any] = {"algorithm": algorithm, **keywords(geometry)}
        run: Callable[..., torch.Tensor] = partial(_forward(geometry), **options)
        return _step(run) if mode == STEP else lambda o: run(o.x, o.w, o.bias)
    arguments = positional(geometry)
    if mode == GRAD_INPUT:
        return lambda o: execute.conv(o.grad, o.w, o.in_size, arguments, algorithm)
    return lambda o: execute.conv_transpose_weight(o.x, o.grad, o.kernel_size, arguments, algorithm)


def _step(convolve: Callable[..., torch.Tensor]) -> Method:
    """Forward and backward, as a model's training runs them."""

    def run(o: Operands) -> tuple[torch.Tensor, ...]:
        leaves = [None if t is None else t.detach().requires_grad_() for t in (o.x, o.w, o.bias)]
        with torch.enable_grad():
            y = convolve(*leaves)
        y.backward(o.grad)
        return y.detach(), *(t.grad for t in leaves if t is not None and t.grad is not None)

    return run


def peers(mode: str, geometry: Geometry, device: torch.device) -> list[Peer]:
    """What upfold is measured against: torch in both layouts, on a GPU also without cuDNN, and forward matmul + ``F.fold``."""
    ndim = geometry.ndim
    plain = _torch_method(mode, geometry, device)
    found = [Peer(TORCH, "contiguous", plain)]
    if ndim in CHANNELS_LAST:
        found.append(Peer(TORCH_CHANNELS_LAST, "channels_last", plain))
    if device.type == "cuda":
        found.append(Peer(TORCH_NATIVE, "contiguous", _native_method(mode, geometry, device), "cuDNN off"))
    if mode != FORWARD:
        return found
    refusal = ""
    if ndim == 3:
        refusal = "F.fold has no 3-D form"
    elif any(extra >= step for extra, step in zip(geometry.output_padding, geometry.stride)):
        refusal = "F.fold cannot express output_padding >= stride"
    found.append(Peer(MATMUL_FOLD, "contiguous", None if refusal else _matmul_fold(geometry, device), refusal))
    return found


def _torch_operator(mode: str, geometry: Geometry) -> Method:
    if mode in (FORWARD, STEP):
        convolve = partial(torch_conv_transpose(geometry.ndim), **keywords(geometry))
        return _step(convolve) if mode == STEP else lambda o: convolve(o.x, o.w, o.bias)
    return lambda o: torch_gradient(mode, o.x, o.w, o.grad, geometry)


def _torch_method(mode: str, geometry: Geometry, device: torch.device) -> Method:
    compute = _torch_operator(mode, geometry)

    def run_on_gpu(o: Operands) -> Result:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32_allowed(device)):
            return compute(o)

    return run_on_gpu if device.type == "cuda" else compute


def _native_method(mode: str, geometry: Geometry, device: torch.device) -> Method:
    compute = _torch_operator(mode, geometry)

    def run(o: Operands) -> Result:
        with matmul_tf32(tf32_allowed(device)), torch.backends.cudnn.flags(enabled=False):
            return compute(o)

    return run


def _matmul_fold(geometry: Geometry, device: torch.device) -> Method:
    """The textbook method on torch's own parts: a matmul on the weights, then ``F.fold``; 1-D as an image of height 1."""
    lift = 2 - geometry.ndim
    stride, dilation = (1,) * lift + geometry.stride, (1,) * lift + geometry.dilation
    padding, extra = (0,) * lift + geometry.padding, (0,) * lift + geometry.output_padding

    def run(o: Operands) -> torch.Tensor:
        x, w = o.x, o.w
        kernel, in_size = (1,) * lift + o.kernel_size, (1,) * lift + o.in_size
        sizes: Any = tuple(output_size(*axis) for axis in zip(in_size, kernel, stride, padding, dilation, extra))
        batch, groups = x.shape[0], geometry.groups
        left = w.reshape(groups, w.shape[0] // groups, -1).transpose(1, 2)
        columns = torch.matmul(left, x.reshape(batch, groups, x.shape[1] // groups, -1))
        y = F.fold(columns.flatten(1, 2), sizes, kernel, dilation, padding, stride)
        y = y if o.bias is None else y + o.bias.view(-1, 1, 1)
        return y.squeeze(2) if lift else y

    def run_on_gpu(o: Operands) -> torch.Tensor:
        with matmul_tf32(tf32_allowed(device)):
            return run(o)

    return run_on_gpu if device.type == "cuda" else run
