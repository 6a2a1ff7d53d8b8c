"""The suite that sets a layer with its activation beside torch's layer and ReLU, eager and by ``torch.compile``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import cases, functional
from .methods import TORCH
from .modes import Operands, keywords
from .pairs import PairRow
from .precision import tf32_allowed
from .reference import torch_conv_transpose
from .timing import data_sets, medians

COMPILED = "torch.compile"
# One or two of each kind of decoder: compiling takes seconds a layer.
_LAYERS = (
    "dcgan-256-128@8",
    "dcgan-128-64@16",
    "dcgan-64-3@32",
    "pix2pix-512-128@64",
    "cyclegan-128-64@128",
    "unet-1024-512@32",
    "unet-128-64@256",
    "sam-64-32@128",
    "maskrcnn-256-256@14",
    "vitdet-768-384@64",
    "pose-256-256@32x24",
    "dla-depthwise-256@64",
    "hifigan-128-64@4096",
)
_CPU_MAX_GFLOP = 0.5

Layer = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def run_activation(device: torch.device, dtype: torch.dtype, seconds: float, repro: str) -> list[PairRow]:
    """Check and time layers followed by ReLU: in upfold's own pass, against torch's layer and ``relu``, eager and compiled.

    Contiguous operands, the published bias flags; cuDNN tries its kernels and keeps the fastest. A layer that does not compile
    has no row of `COMPILED`, and a warning says why.
    """
    rows = []
    for name in _LAYERS:
        case = cases.find(name)
        case = case.scaled(_CPU_MAX_GFLOP) if device.type == "cpu" else case
        rows += _layer_rows(case, device, dtype, seconds, repro)
    return rows


def _layer_rows(case: cases.Case, device: torch.device, dtype: torch.dtype, seconds: float, repro: str) -> list[PairRow]:
    operands = Operands(*case.tensors(dtype=dtype, device=device))
    ndim, options = case.geometry.ndim, keywords(case.geometry)
    convolve = torch_conv_transpose(ndim)
    name = f"conv_transpose{ndim}d"
    ours: Layer = partial(getattr(functional, name), activation="relu", **options)

    def theirs(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return F.relu(convolve(x, w, bias, **options))

    with torch.no_grad(), _tried_kernels(device):
        error = _error(ours(operands.x, operands.w, operands.bias), operands, convolve, options)
        ways: dict[str, Layer] = {TORCH: theirs}
        compiled = _compiled(theirs, operands, case.name)
        if compiled is not None:
            ways[COMPILED] = compiled
        moved = sum(t.numel() for t in (operands.x, operands.w)) + theirs(operands.x, operands.w, operands.bias).numel()
        sets = [operands.x] + [operands.x.clone() for _ in range(data_sets(moved * operands.x.element_size(), device) - 1)]
        works = [[_bound(way, x, operands) for x in sets] for way in (ours, *ways.values())]
        times = medians(works, device, seconds=3 * seconds)
    size = f"{case.name}, {case.size_text}"
    return [PairRow(way, size, times[0], time, repro, error) for way, time in zip(ways, times[1:])]


def _tried_kernels(device: torch.device) -> Any:
    """CuDNN with ``benchmark``, which has no meaning on a CPU."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=device.type == "cuda", allow_tf32=tf32_allowed(device))


def _error(y: Tensor, operands: Operands, convolve: Callable[..., Tensor], options: dict[str, Any]) -> float:
    """The largest error of the result by the rounding rule."""
    wide = [None if t is None else t.double() for t in (operands.x, operands.w, operands.bias)]
    magnitude = convolve(*(None if t is None else t.abs() for t in wide), **options)
    return float(((y.double() - F.relu(convolve(*wide, **options))).abs() / magnitude.clamp_min(1e-300)).max())


def _compiled(layer: Layer, operands: Operands, name: str) -> Layer | None:
    """The layer by ``torch.compile`` with its defaults, compiled for these shapes; None where that fails."""
    torch._dynamo.reset()
    compiled: Layer = torch.compile(layer)
    try:
        compiled(operands.x, operands.w, operands.bias)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        warnings.warn(f"{name}: torch.compile failed: {type(error).__name__}: {reason}", stacklevel=2)
        return None
    return compiled


def _bound(layer: Layer, x: Tensor, operands: Operands) -> Callable[[], object]:
    return lambda: layer(x, operands.w, operands.bias)
