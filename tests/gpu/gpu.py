"""Whether the CUDA module can be tested here, and what tests of its kernels share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from upfold import native


def missing() -> str | None:
    """Why it cannot, in a sentence, or None."""
    if not torch.cuda.is_available():
        return "torch finds no usable GPU"
    module, reason = native.load_cuda()
    return reason if module is None else None


def assert_repeats_under_load(compute: Callable[[], torch.Tensor], device: torch.device, message: str) -> None:
    """That a result is the same bit by bit while another stream keeps the device busy."""
    first, load = compute(), torch.cuda.Stream(device)
    with torch.cuda.stream(load):
        a = torch.rand(2048, 2048, device=device)
        for _ in range(8):
            a = a @ a / 1e3
    for _ in range(16):
        assert torch.equal(compute(), first), message
