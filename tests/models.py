"""Models and comparisons shared by the tests of replacement, scanning and export."""

from __future__ import annotations

import torch
from torch import nn


class Decoder(nn.Module):
    """A small decoder with layers of several kinds, two of them nested."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 4, 2, 1)
        self.rest = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, 2, 1, 1, bias=False), nn.Dropout(0.5))

    def forward(self, x):
        return self.rest(self.up(self.enter(x)))


def decoder() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return Decoder().eval(), torch.randn(2, 3, 5, 6)


def snapshot(model: nn.Module) -> list[tuple[type, dict]]:
    """Class and own entries of every module; containers are copied one level deep, tensors stay the same objects."""
    flat = []
    for module in model.modules():
        entries = {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        flat.append((type(module), entries))
    return flat


def assert_same(before, after):
    for (old_class, old), (new_class, new) in zip(before, after, strict=True):
        assert old_class is new_class
        assert list(old) == list(new)
        for key, value in old.items():
            if isinstance(value, dict):
                assert list(value) == list(new[key])
                assert all(value[name] is new[key][name] for name in value)
            else:
                assert value is new[key] or value == new[key]


def states(report) -> dict[str, str]:
    return {row.name: row.state for row in report}
