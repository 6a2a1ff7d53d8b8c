"""The registry of algorithms."""

from __future__ import annotations

from .base import Algorithm, Packing, Tensors
from .depthwise import Depthwise
from .direct import Direct
from .fused import Fused
from .gemm import Gemm
from .gemm_atomic import GemmAtomic
from .torch import Torch

# In the order of their codes in operator schemas, which exported programs carry (dispatch.encode_algorithm).
_ALL: tuple[Algorithm, ...] = (Gemm(), GemmAtomic(), Direct(), Torch(), Depthwise(), Fused())
REGISTRY: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALL}

__all__ = ["REGISTRY", "Algorithm", "Packing", "Tensors"]
