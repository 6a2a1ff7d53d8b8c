"""Whole models with transposed convolutions, at their published sizes and at small ones, and what replacing and fusing gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import foreign, networks

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Size:
    """How large a model is built, and the shapes of what it is called with."""

    options: Mapping[str, Any]
    inputs: tuple[tuple[int, ...], ...]

    @property
    def text(self) -> str:
        """The shape of the first input, as ``128x100x1x1``."""
        return "x".join(map(str, self.inputs[0]))


@dataclass(frozen=True)
class ModelCase:
    """A model of the suite.

    Attributes:
        name: in tables and on the command line.
        source: where it is defined.
        make: builds it with the options of a `Size`.
        published: what a GPU runs.
        small: what a CPU runs in a second.
        package: what must be installed for it beside torch, or None.
        axes: spatial axes; with one there is only one memory format.
    """

    name: str
    source: str
    make: Callable[..., nn.Module]
    published: Size
    small: Size
    package: str | None = None
    axes: int = 2

    def build(self, size: Size, dtype: torch.dtype, device: torch.device, layout: str) -> tuple[nn.Module, list[Tensor]]:
        """The model in evaluation mode with random weights, the same in each call, and random inputs."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = networks.trained(self.make(**size.options)).to(device, dtype)
            inputs = [torch.randn(shape).to(device, dtype) for shape in size.inputs]
        if layout == "contiguous":
            return model, inputs
        layout_of = _FORMATS[self.axes + 2]
        model = model.to(memory_format=layout_of)  # type: ignore[call-overload]
        return model, [x.contiguous(memory_format=layout_of) if x.dim() == self.axes + 2 else x for x in inputs]


def _sam(hidden: int, size: int, prompts: int, **options: Any) -> Size:
    image = (1, hidden, size, size)
    return Size({"hidden_size": hidden, **options}, (image, image, (1, prompts, 2, hidden), image))


_SMALL_SAM = {"mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
_SMALL_ENCODEC = {"hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 2], "num_lstm_layers": 1, "codebook_size": 16}
_BRATS = {"dims": 3, "in_channels": 4, "out_channels": 4}

MODELS: tuple[ModelCase, ...] = (
    ModelCase(
        "dcgan",
        "DCGAN's generator, ngf 64 (Radford et al. 2016; pytorch/examples)",
        networks.dcgan,
        Size({"width": 64, "latent": 100}, ((128, 100, 1, 1),)),
        Size({}, ((2, 8, 1, 1),)),
    ),
    ModelCase(
        "pix2pix",
        "pix2pix's U-Net generator, batch norm (Isola et al. 2017)",
        networks.Pix2Pix,
        Size({"width": 64, "levels": 8}, ((16, 3, 256, 256),)),
        Size({}, ((2, 3, 32, 32),)),
    ),
    ModelCase(
        "unet",
        "U-Net (Ronneberger et al. 2015), padded, with batch norms",
        networks.UNet,
        Size({"width": 64}, ((4, 3, 512, 512),)),
        Size({"levels": 2}, ((1, 3, 32, 32),)),
    ),
    ModelCase(
        "sam",
        "Segment Anything's mask decoder (transformers), 16 prompts on one image",
        foreign.SamDecoder,
        _sam(256, 64, 16),
        _sam(32, 8, 2, **_SMALL_SAM),
        "transformers",
    ),
    ModelCase(
        "dynunet",
        "MONAI's DynUNet in 3-D with nnU-Net's filters",
        foreign.monai_dynunet,
        Size({**_BRATS, "filters": (32, 64, 128, 256, 320, 320)}, ((2, 4, 128, 128, 128),)),
        Size({**_BRATS, "filters": (4, 8, 16)}, ((1, 4, 16, 16, 16),)),
        "monai",
        axes=3,
    ),
    ModelCase(
        "pix2pix-one",
        "pix2pix's generator on one picture, as it is used",
        networks.Pix2Pix,
        Size({"width": 64, "levels": 8}, ((1, 3, 256, 256),)),
        Size({}, ((1, 3, 32, 32),)),
    ),
    # Last: it waits for the GPU within a run, which no graph can capture, and torch does not quite get over a failed capture.
    ModelCase(
        "encodec",
        "EnCodec 24 kHz, the decoder (transformers), one second",
        foreign.encodec,
        Size({}, ((8, 128, 75),)),
        Size(_SMALL_ENCODEC, ((1, 16, 12),)),
        "transformers",
        axes=1,
    ),
)


def by_name(name: str) -> ModelCase:
    """The model of that name.

    Raises:
        ValueError: there is none.
    """
    for case in MODELS:
        if case.name == name:
            return case
    raise ValueError(f"model = {name!r}; no such model; known: {', '.join(case.name for case in MODELS)}")
