"""A small decoder of whole numbers: what a training step makes of it is exact, so that steps can be compared bit for bit."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import upfold

# The gradient of the loss, the input and the weights are sparse -1, 0, 1: no sum leaves what bfloat16 holds.
_SPARSE = 0.25


class Decoder(nn.Module):
    """Three layers of different kinds: k = 2 s with a bias, output padding without one, and one in groups."""

    def __init__(self, layers=nn, activation="relu"):
        super().__init__()
        self.inside = activation if layers is upfold else None
        options = {"activation": activation} if self.inside else {}
        self.first = layers.ConvTranspose2d(6, 4, 4, 2, 1, **options)
        self.second = layers.ConvTranspose2d(4, 6, 3, 2, 1, 1, bias=False, **options)
        self.third = layers.ConvTranspose2d(6, 4, 2, 2, groups=2)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = layer(x)
            x = x if self.inside else x.relu()
        return self.third(x)


def integers(shape, seed, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * (torch.rand(shape, generator=generator) < _SPARSE)).to(dtype).to(device)


def decoders(device, dtype=torch.float32):
    """The same weights in torch's layers, in torch's layers replaced by upfold's, and in upfold's with their own activation."""
    models = [Decoder(), Decoder(), Decoder(upfold)]
    for model in models:
        for seed, parameter in enumerate(model.parameters()):
            parameter.data = integers(parameter.shape, seed, dtype)
    upfold.replace(models[1])
    return [model.to(device) for model in models]


def batch(index, device, size=4, dtype=torch.float32):
    """An input and the gradient that its result gets."""
    x, grad = (size, 6, 3, 4), (size, 4, 24, 32)
    return integers(x, 100 + 2 * index, dtype, device), integers(grad, 101 + 2 * index, dtype, device)


def autocast(device, dtype):
    """Autocast to that type, off for float32; a skip where this torch has none of it there."""
    low = dtype is not torch.float32
    if low:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                with torch.autocast(device.type, dtype=dtype):
                    nn.functional.conv_transpose2d(torch.ones(1, 1, 2, 2, device=device), torch.ones(1, 1, 2, 2, device=device))
            except (RuntimeError, UserWarning) as error:
                pytest.skip(f"this torch has no such autocast: {error}")
    return torch.autocast(
        device.type, dtype=torch.bfloat16 if dtype is torch.float32 else dtype, enabled=dtype is not torch.float32
    )


def loss(y, grad):
    """Linear, with whole numbers: each sample's gradient is `grad`, the mean over samples divides by a power of two."""
    return (y.float() * grad).flatten(1).sum(1).mean()


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def parameters(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(got, want):
    """Bit for bit, whatever the device and the type."""
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.detach().cpu().double(), other.detach().cpu().double())
