"""Models that others wrote, from the packages that hold them; a package that is missing is an ImportError of its own name."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn


def monai(name: str, **options: Any) -> nn.Module:
    """A network of MONAI's, by name."""
    networks = importlib.import_module("monai.networks.nets")
    network: nn.Module = getattr(networks, name)(**options)
    return network


def monai_dynunet(dims: int, filters: tuple[int, ...] = (4, 8, 16), **options: Any) -> nn.Module:
    """MONAI's network of nnU-Net's shape: 3x3 convolutions, every level but the first at half the size of the one before."""
    halves = [2] * (len(filters) - 1)
    sizes: dict[str, Any] = {"kernel_size": [3] * len(filters), "strides": [1, *halves], "upsample_kernel_size": halves}
    return monai("DynUNet", spatial_dims=dims, filters=list(filters), **{"in_channels": 1, "out_channels": 2, **sizes, **options})


class SamDecoder(nn.Module):
    """transformers' mask decoder of Segment Anything, called with its arguments in order; the masks are its result."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        module = importlib.import_module("transformers.models.sam.modeling_sam")
        config = module.SamMaskDecoderConfig(**options)
        config._attn_implementation = "eager"
        self.decoder = module.SamMaskDecoder(config)

    def forward(self, image: Tensor, positions: Tensor, prompts: Tensor, dense: Tensor) -> Tensor:
        """Masks, (batch, prompts, 3, 4 * height, 4 * width), of an image's features and the embedded prompts."""
        masks: Tensor = self.decoder(
            image_embeddings=image,
            image_positional_embeddings=positions,
            sparse_prompt_embeddings=prompts,
            dense_prompt_embeddings=dense,
            multimask_output=True,
        )[0]
        return masks


def encodec(**options: Any) -> nn.Module:
    """The EnCodec decoder of transformers, whose layers carry a weight norm and are trimmed behind."""
    module = importlib.import_module("transformers.models.encodec.modeling_encodec")
    decoder: nn.Module = module.EncodecDecoder(module.EncodecConfig(**options))
    return decoder
