"""What every algorithm must answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ..problem import Problem


class Tensors(NamedTuple):
    """The operands of one call: `Problem.operator` says which of x, w, y is written."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    y: torch.Tensor


class Algorithm(Protocol):
    """What the rest of the package knows of an algorithm."""

    name: str

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Say in a clause why this problem cannot be run on this device, or None."""

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """The tile choices that fit, best guess first."""

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """Scratch that `run` needs, in bytes."""

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Compute into the operand that the operator writes. `stream` is the CUDA stream's handle, 0 on a CPU."""
