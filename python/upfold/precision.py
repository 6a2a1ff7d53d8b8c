"""torch's switches for float32 on a GPU: whether convolutions and matrix products round their operands to TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

# Asked in every call, so not through torch.backends, whose modules build a property on each access.
_read_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
_read_allow_tf32: Callable[[], bool] = torch._C._get_cudnn_allow_tf32


def convolutions_take_tf32() -> bool:
    """Whether torch lets float32 convolutions on a GPU round their operands to TF32, now."""
    # With the newer switch the older one cannot be read while convolutions and recurrent layers differ.
    return _read_allow_tf32() if _read_precision is None else _read_precision("cuda", "conv") == "tf32"


def tf32_allowed(device: torch.device | str) -> bool:
    """Whether torch computes float32 convolutions of this device in TF32."""
    return torch.device(device).type == "cuda" and convolutions_take_tf32()


@contextlib.contextmanager
def matmul_tf32(allowed: bool) -> Iterator[None]:
    """Let float32 matmuls on a GPU use TF32, or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextlib.contextmanager
def float32_precision(tf32: bool) -> Iterator[None]:
    """Let float32 convolutions and matmuls on a GPU use TF32, or not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        with matmul_tf32(tf32):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
