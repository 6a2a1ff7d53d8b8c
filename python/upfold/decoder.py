"""A decoder whose weights are constructed so that its output is known: it puts a photograph back together and enlarges it.

The photograph is taken apart into a small version and the detail lost at each halving (a Laplacian pyramid). The decoder's
two paths are those of an FCN-8s: a chain of 2x steps with skip connections, and one 8x jump; a last 2x layer enlarges the sum.
Colours travel in 32 to 256 channels, mixed by orthogonal matrices: the weights of a layer undo the mixing of the layer before,
interpolate, and mix anew. So every weight of every layer matters, and one wrong tap would be seen in the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COLOURS = 3
# What the photograph is cut to, in pixels: five halvings must be whole.
PHOTO_SIZE = 512
_HALVINGS = 4


def _triangle(kernel_size: int, centre: float, half_width: float) -> Tensor:
    """Weights of linear interpolation: a triangle of that half width round `centre`, in taps."""
    taps = torch.arange(kernel_size, dtype=torch.float64)
    return (1 - (taps - centre).abs() / half_width).clamp(min=0)


def _nearest(t: Tensor) -> Tensor:
    return F.interpolate(t, scale_factor=2, mode="nearest")


def _bilinear(scale: int) -> Callable[[Tensor], Tensor]:
    return lambda t: F.interpolate(t, scale_factor=scale, mode="bilinear", align_corners=False)


def _corner_aligned(t: Tensor) -> Tensor:
    """Old pixels stay where they are, means of neighbours come between them; the edge is repeated."""
    t = F.pad(t, (0, 1, 0, 1), mode="replicate")
    size = [2 * edge - 1 for edge in t.shape[2:]]
    return F.interpolate(t, size=size, mode="bilinear", align_corners=True)[..., :-1, :-1]


@dataclass(frozen=True)
class Step:
    """One layer of the decoder: whose it is, its shape, the interpolation that it computes, and how it treats the edge.

    `pad` pixels of the input are repeated on the left and right (before, after), and `crop` pixels of the output cut off, so that
    the layer continues the edge as ``F.interpolate`` does.
    """

    name: str
    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int
    padding: int
    output_padding: int
    groups: int
    taps: Tensor
    interpolate: Callable[[Tensor], Tensor]
    pad: tuple[int, int] = (0, 0)
    crop: tuple[int, int] = (0, 0)

    def layer(self) -> nn.ConvTranspose2d:
        """An unfilled layer of this shape."""
        return nn.ConvTranspose2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            bias=False,
        )


def steps() -> dict[str, Step]:
    """The layers, in the order in which they run."""
    halves = _triangle(4, 1.5, 2.0)
    return {
        "unet": Step("U-Net 256>128 k2s2", 256, 128, 2, 2, 0, 0, 1, torch.ones(2, dtype=torch.float64), _nearest),
        "pix2pix": Step("pix2pix 128>64 k4s2p1", 128, 64, 4, 2, 1, 0, 1, halves, _bilinear(2), (1, 1), (2, 2)),
        "depthwise": Step("CenterNet 64 depthwise k4s2p1", 64, 64, 4, 2, 1, 0, 64, halves, _bilinear(2), (1, 1), (2, 2)),
        "cyclegan": Step(
            "CycleGAN 64>32 k3s2p1op1", 64, 32, 3, 2, 1, 1, 1, _triangle(3, 1.0, 2.0), _corner_aligned, (0, 1), (0, 2)
        ),
        "fcn8": Step("FCN-8s 32>32 k16s8p4", 32, 32, 16, 8, 4, 0, 1, _triangle(16, 7.5, 8.0), _bilinear(8), (1, 1), (8, 8)),
        "fcn2": Step("FCN 32>3 k4s2p1", 32, COLOURS, 4, 2, 1, 0, 1, halves, _bilinear(2), (1, 1), (2, 2)),
    }


def _mixing(channels: int, generator: torch.Generator) -> Tensor:
    """A (channels, colours) matrix with orthonormal columns: its transpose undoes it."""
    square = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
    orthogonal: Tensor = torch.linalg.qr(square)[0]
    return orthogonal[:, :COLOURS]


class Decoder(nn.Module):
    """Puts the pyramid of `take_apart` back together and enlarges the picture twofold.

    The layers are ``torch.nn.ConvTranspose2d``; ``upfold.replace`` swaps them.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.steps = steps()
        for name, step in self.steps.items():
            self.add_module(name, step.layer())
        # Mixing of the channels at each point between layers. A depthwise layer keeps its channels; both paths end alike.
        mixing = {channels: _mixing(channels, generator) for channels in (256, 128, 64, 32)}
        before = {name: mixing[step.in_channels] for name, step in self.steps.items()}
        after = {name: mixing.get(step.out_channels) for name, step in self.steps.items()}
        with torch.no_grad():
            for name, step in self.steps.items():
                window = step.taps[:, None] * step.taps[None, :]
                mixed = after[name]
                if step.groups > 1:
                    weight = window.expand(step.in_channels, 1, *window.shape)
                else:
                    undo_and_mix = before[name] if mixed is None else before[name] @ mixed.t()
                    weight = undo_and_mix[:, :, None, None] * window
                self.get_submodule(name).weight.copy_(weight)  # type: ignore[operator]
        for channels, matrix in mixing.items():
            self.register_buffer(f"mix{channels}", matrix.float(), persistent=False)

    def mix(self, colours: Tensor, channels: int) -> Tensor:
        """Spread (batch, 3, h, w) over that many channels."""
        return torch.einsum("ck,nkhw->nchw", self.get_buffer(f"mix{channels}"), colours)

    def features(self, pyramid: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Mix the levels of a pyramid into the channels that the layers expect."""
        return tuple(self.mix(level, channels) for level, channels in zip(pyramid, (32, 256, 128, 64, 64, 32)))

    def forward(self, base: Tensor, *details: Tensor) -> Tensor:
        """Decode mixed features.

        Args:
            base: (batch, 32, 64, 64), half of the small picture.
            details: what to add at 32, 64, 128, 256 and 512 pixels, in 256, 128, 64, 64 and 32 channels.

        Returns:
            (batch, 3, 1024, 1024), the enlarged photograph.
        """
        x, *skips = details
        for name, skip in zip(("unet", "pix2pix", "depthwise", "cyclegan"), skips):
            x = self._run(name, x) + skip
        x = x + self._run("fcn8", base)
        return self._run("fcn2", x)

    def _run(self, name: str, x: Tensor) -> Tensor:
        step = self.steps[name]
        if any(step.pad):
            x = F.pad(x, step.pad * 2, mode="replicate")
        y: Tensor = self.get_submodule(name)(x)
        first, last = step.crop
        return y[..., first : y.shape[-2] - last, first : y.shape[-1] - last] if any(step.crop) else y


def take_apart(photo: Tensor) -> tuple[Tensor, ...]:
    """Split (batch, 3, s, s) into half the small picture at s / 8 and the rest at s / 16, s / 8, s / 4, s / 2 and s.

    Half goes each way, so that both paths carry the picture and no layer works on faint detail alone.
    """
    step = steps()
    base = F.avg_pool2d(photo, 8) / 2
    detail = photo - step["fcn8"].interpolate(base)
    levels = [detail]
    for _ in range(_HALVINGS):
        levels.insert(0, F.avg_pool2d(levels[0], 2))
    chain = (step[name] for name in ("unet", "pix2pix", "depthwise", "cyclegan"))
    lost = [finer - one.interpolate(coarser) for one, coarser, finer in zip(chain, levels, levels[1:])]
    return base, levels[0], *lost


def interpolated(photo: Tensor) -> Tensor:
    """What the decoder must give for a photograph, by ``F.interpolate`` alone."""
    step = steps()
    base, x, *skips = take_apart(photo)
    for name, skip in zip(("unet", "pix2pix", "depthwise", "cyclegan"), skips):
        x = step[name].interpolate(x) + skip
    return step["fcn2"].interpolate(x + step["fcn8"].interpolate(base))


class Enlarger(nn.Module):
    """Encoder and decoder in one: (batch, 3, 512, 512) to (batch, 3, 1024, 1024); any multiple of 16 serves."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.decoder = Decoder(seed)

    def forward(self, photo: Tensor) -> Tensor:
        """Enlarge a picture twofold, (batch, 3, height, width), values from 0 to 1."""
        enlarged: Tensor = self.decoder(*self.decoder.features(take_apart(photo)))
        return enlarged


def build() -> Enlarger:
    """The demo's model, for ``upfold scan upfold.decoder:build``."""
    return Enlarger().eval()
