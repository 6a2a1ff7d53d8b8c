"""Models and comparisons shared by the tests of replacement, patching, scanning and export."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import conv_transpose2d  # a name of its own, which no assignment to F reaches

from upfold.models.rule import allowed_error, error_norm


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


class Upsampler(nn.Module):
    """Calls torch's functions under every name that they have, and layers that call them: five convolutions, unfold, fold."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3) / 6)
        self.line = nn.Parameter(torch.randn(4, 4, 3) / 3)
        self.volume = nn.Parameter(torch.randn(4, 4, 1, 3, 3) / 6)
        self.layer = nn.ConvTranspose2d(4, 4, 3, 2, 1)
        self.windows = nn.Unfold(3, padding=1)

    def forward(self, x):
        x = conv_transpose2d(x, self.weight, stride=2)
        x = torch.conv_transpose2d(x, self.weight, None, 1, 1).relu()
        x = self.layer(x, output_size=[2 * size for size in x.shape[2:]])
        x = F.conv_transpose1d(x.flatten(2), self.line, padding=1).view_as(x)
        x = F.conv_transpose3d(x.unsqueeze(2), self.volume, padding=(0, 1, 1)).squeeze(2)
        return F.fold(self.windows(x), x.shape[2:], 3, padding=1)


def upsampler(dtype=torch.float32, requires_grad=False):
    torch.manual_seed(5)
    model = Upsampler().to(dtype)
    return model, torch.randn(2, 4, 3, 5, dtype=dtype, requires_grad=requires_grad)


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


def assert_within_rule(got: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """The 2x rule for a whole model."""
    assert got.shape == torchs.shape
    assert got.dtype == torchs.dtype
    allowed = allowed_error(torchs, exact)
    assert error_norm(got, exact) <= allowed, f"error {error_norm(got, exact):.3e}, allowed {allowed:.3e}"
