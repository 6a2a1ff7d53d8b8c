"""Networks written from their published definitions, at any width, with statistics and weights as after some training."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def dcgan(width: int = 4, latent: int = 8, colours: int = 3) -> nn.Sequential:
    """The generator of Radford et al. 2016 (figure 1) for 64x64 pixels: a dense 4x4 start, then four doublings."""
    layers: list[nn.Module] = []
    channels = latent
    for factor, (stride, padding) in zip((8, 4, 2, 1), ((1, 0), (2, 1), (2, 1), (2, 1))):
        layers += [
            nn.ConvTranspose2d(channels, width * factor, 4, stride, padding, bias=False),
            nn.BatchNorm2d(width * factor),
            nn.ReLU(inplace=True),
        ]
        channels = width * factor
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, colours, 4, 2, 1, bias=False), nn.Tanh())


class SkipBlock(nn.Module):
    """One level of the U-Net of Isola et al. 2017: down, the levels inside, up; the input is concatenated to the result."""

    def __init__(self, outer: int, inner: int, inside: nn.Module | None, dropout: bool = False) -> None:
        super().__init__()
        down = [nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(outer, inner, 4, 2, 1, bias=False)]
        if inside is not None:
            down.append(nn.BatchNorm2d(inner))
        up: list[nn.Module] = [nn.ReLU(inplace=True)]
        up.append(nn.ConvTranspose2d(inner if inside is None else 2 * inner, outer, 4, 2, 1, bias=False))
        up.append(nn.BatchNorm2d(outer))
        if dropout:
            up.append(nn.Dropout(0.5))
        self.model = nn.Sequential(*down, *([] if inside is None else [inside]), *up)

    def forward(self, x: Tensor) -> Tensor:
        """The input, and behind it what the levels below make of it."""
        return torch.cat([x, self.model(x)], 1)


class Pix2Pix(nn.Module):
    """The U-Net generator of Isola et al. 2017, here its outermost level: no norms, and tanh at the end."""

    def __init__(self, width: int = 4, colours: int = 3, levels: int = 4) -> None:
        super().__init__()
        block: nn.Module | None = None
        sizes = [width * min(2**level, 8) for level in range(levels)]
        for inner, outer in pairwise(sizes[::-1]):
            block = SkipBlock(outer, inner, block, dropout=block is not None)
        self.enter = nn.Conv2d(colours, width, 4, 2, 1)
        self.inside: Any = block
        self.leave = nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(2 * width, colours, 4, 2, 1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """A picture of the same size."""
        picture: Tensor = self.leave(self.inside(self.enter(x)))
        return picture


def _two_convolutions(enter: int, leave: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (enter, leave):
        layers += [nn.Conv2d(channels, leave, 3, padding=1, bias=False), nn.BatchNorm2d(leave), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The U-Net of Ronneberger et al. 2015 as it is used today: convolutions padded, so that nothing is cropped, and normed."""

    def __init__(self, width: int = 4, levels: int = 4, colours: int = 3, classes: int = 2) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        self.enter = _two_convolutions(colours, width)
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _two_convolutions(a, b)) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for b, a in pairwise(sizes[::-1]))
        self.join = nn.ModuleList(_two_convolutions(b, a) for b, a in pairwise(sizes[::-1]))
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A score for each class and pixel; height and width must be multiples of 2 ** levels."""
        kept = [self.enter(x)]
        for down in self.down:
            kept.append(down(kept[-1]))
        y = kept.pop()
        for up, join in zip(self.up, self.join):
            y = join(torch.cat([kept.pop(), up(y)], 1))
        scores: Tensor = self.leave(y)
        return scores


def trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw the weights and statistics of every batch norm, which a new one has at 0 and 1; in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, low, high in (("running_mean", -0.5, 0.5), ("running_var", 0.5, 2.0)):
                if getattr(module, name, None) is not None:
                    value: Any = getattr(module, name)
                    value.copy_(torch.rand(value.shape, generator=generator) * (high - low) + low)
                    for parameter in (module.weight, module.bias):
                        if isinstance(parameter, Tensor):
                            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model.eval()
