"""Memory that a call on a GPU takes, and what a checked result leaves in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def held_beside_result(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Call and return the result, and the most bytes that the call held at a time beside what was there and the result.

    The bytes are those that were asked of torch's allocator; before torch 2.1 those of the blocks that it gave, which are larger.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    y = call()
    torch.cuda.synchronize(device)
    facts = torch.cuda.memory_stats(device)
    kind = "requested_bytes.all" if "requested_bytes.all.peak" in facts else "allocated_bytes.all"
    return y, facts[f"{kind}.peak"] - facts[f"{kind}.current"]


def peak_beside(call: Callable[[], object], device: torch.device) -> int:
    """Call, and return the most bytes that were allocated at a time beside those of before, the result's included."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def spoil(results: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Fill results that were checked with NaN.

    An allocator gives the memory of a right result to the next method for its own, and one that writes nothing would then seem
    right.
    """
    for tensor in (results,) if isinstance(results, torch.Tensor) else results:
        tensor.detach().fill_(math.nan)
