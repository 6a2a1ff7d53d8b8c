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


def _multiply(device: torch.device) -> None:
    a = torch.rand(2048, 2048, device=device)
    for _ in range(8):
        a = a @ a / 1e3


def _copy(device: torch.device) -> None:
    a = torch.zeros(2, 1 << 27, dtype=torch.uint8, device=device)
    for _ in range(20):
        a[0].copy_(a[1])


def assert_repeats_under_load(compute: Callable[[], torch.Tensor], device: torch.device, message: str) -> None:
    """That a result is the same bit by bit while another stream keeps the device's multiprocessors busy, and then its memory."""
    first, other = compute(), torch.cuda.Stream(device)
    for load in (_multiply, _copy) * 4:
        with torch.cuda.stream(other):
            load(device)
        results = [compute() for _ in range(4)]  # begun while the other stream is at work
        assert all(torch.equal(result, first) for result in results), f"{message}, {load.__name__}"
