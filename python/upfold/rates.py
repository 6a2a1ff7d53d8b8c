"""The suite that sets the rate of upfold's products beside torch's 1x1 convolution of the same size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from . import functional
from .pairs import PairRow
from .timing import data_sets, medians


@dataclass(frozen=True)
class _Layer:
    """A layer whose kernel equals its stride: a 1x1 convolution with as many times the channels has the same products."""

    in_channels: int
    out_channels: int
    kernel: int
    size: tuple[int, int]

    @property
    def name(self) -> str:
        return f"{self.in_channels}-{self.out_channels} k{self.kernel}s{self.kernel}"

    @property
    def flops(self) -> int:
        return 2 * self.in_channels * self.out_channels * self.kernel**2 * self.size[0] * self.size[1]


_LAYERS = (
    _Layer(256, 256, 1, (64, 64)),
    _Layer(512, 512, 1, (32, 64)),
    _Layer(256, 64, 2, (64, 64)),
    _Layer(256, 128, 2, (64, 64)),
    _Layer(512, 512, 2, (16, 32)),
    _Layer(768, 384, 2, (32, 32)),
    _Layer(1024, 512, 2, (16, 32)),
)


def run_rate(device: torch.device, dtype: torch.dtype, seconds: float, repro: str) -> list[PairRow]:
    """Check and time layers of equal kernel and stride, in both layouts, against torch's 1x1 convolution in channels_last.

    That is the layout in which torch multiplies without reordering; its result lacks the shuffle into place.
    """
    rows = []
    for layer in _LAYERS:
        generator = torch.Generator().manual_seed(0)
        s, last = layer.kernel, torch.channels_last
        x = torch.randn(1, layer.in_channels, *layer.size, generator=generator).to(device, dtype)
        w = torch.randn(layer.in_channels, layer.out_channels, s, s, generator=generator).to(device, dtype)
        x, w = x / layer.in_channels**0.5, w.contiguous()
        same = w.permute(1, 2, 3, 0).reshape(-1, layer.in_channels, 1, 1).contiguous(memory_format=last)
        want = F.pixel_shuffle(F.conv2d(x.double(), same.double()), s)
        magnitude = F.pixel_shuffle(F.conv2d(x.double().abs(), same.double().abs()), s)
        moved = (x.numel() + w.numel() + want.numel()) * x.element_size()
        for layout in ("contiguous", "channels_last"):
            ours = x.contiguous(memory_format=last) if layout == "channels_last" else x
            error = float(((functional.conv_transpose2d(ours, w, stride=s).double() - want).abs() / magnitude).max())
            sets = [ours.clone() for _ in range(data_sets(moved, device))]
            theirs = [t.contiguous(memory_format=last) for t in sets]
            works = [[_ours(t, w, s) for t in sets], [_theirs(t, same) for t in theirs]]
            times = medians(works, device, seconds=3 * seconds)
            size = f"{'x'.join(map(str, layer.size))} {layout}"
            rows.append(PairRow(layer.name, size, times[0], times[1], repro, error, flops=layer.flops))
    return rows


def _ours(x: Tensor, w: Tensor, stride: int) -> Callable[[], object]:
    return lambda: functional.conv_transpose2d(x, w, stride=stride)


def _theirs(x: Tensor, w: Tensor) -> Callable[[], object]:
    return lambda: F.conv2d(x, w)
