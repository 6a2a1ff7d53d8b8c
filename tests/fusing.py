"""What the tests of fusing share: small models, and the comparison of a fused model with the model itself."""

from __future__ import annotations

import copy

import torch
from torch import nn

import upfold
from models import assert_within_rule
from upfold.fused_model import is_fused
from upfold.models.networks import trained
from upfold.models.rule import in_double


def check(model, *inputs, autocast=None):
    """Fuse a copy and compare it with the model itself; returns the report and the fused copy."""
    fused = copy.deepcopy(model)
    report = upfold.fuse(fused)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        want, got = model(*inputs), fused(*inputs)
    if want.is_contiguous() or want.is_contiguous(memory_format=torch.channels_last):  # no view, as a slice is
        assert got.stride() == want.stride()
    if want.dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    else:
        assert_within_rule(got, want, in_double(model, *inputs))
    return report, fused


def taken(report):
    return {row.name: list(row.fused) for row in report}


def reasons(report):
    return {row.name: row.reason for row in report}


class Chain(nn.Module):
    """A transposed convolution and what the test puts behind it."""

    def __init__(self, then, up=None, **modules):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 4, 2, 1) if up is None else up
        self.then = then
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.then(self, self.up(x))


def chain(then, up=None, **modules):
    torch.manual_seed(2)
    return trained(Chain(then, up, **modules))


def image(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (2, 4, 5, 6)), generator=torch.Generator().manual_seed(4), dtype=torch.float32).to(dtype)


class Up(nn.Module):
    """A traceable block: layer, norm, activation, crop."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.ConvTranspose2d(4, 6, 4, 2, 1), nn.BatchNorm2d(6)

    def forward(self, x, scale=None, *, shift=0.0):
        y = self.norm(self.layer(x)).relu()
        return (y if scale is None else y * scale) + shift


def block(cls=Up):
    torch.manual_seed(1)
    return trained(cls())


def fused(model):
    upfold.fuse(model)
    assert any(is_fused(module) for module in model.modules())
    return model


def assert_like(got, model, *inputs):
    """What a model gives within the rule."""
    with torch.no_grad():
        assert_within_rule(got, model(*inputs), in_double(model, *inputs))


def runs_fused(model, *inputs):
    """Whether a call of the model runs the graph: then nothing calls the norm."""
    called = []
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    own = type(norm).forward
    try:
        type(norm).forward = lambda self, x: called.append(1) or own(self, x)
        model(*inputs)
    finally:
        type(norm).forward = own
    return not called
