"""The direct method: loops over the taps of each phase, with no column matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import native
from ..problem import Problem
from .base import Tensors


class Direct:
    """Sums the taps of each output's residue class where they lie."""

    name = "direct"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices for which no direct kernel exists."""
        if device.type != "cpu":
            return f"no direct kernel exists for {device.type} yet"
        return None

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """One way only."""
        return (0,)

    def workspace_bytes(self, problem: Problem, config: int) -> int:
        """What the kernel asks for."""
        needed: int = native.cpu().direct_workspace_bytes(problem.cpu, problem.threads)
        return needed

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Run the kernel of `problem.operator`."""
        x, w, bias, y = tensors
        native.cpu().direct(
            problem.cpu,
            x.data_ptr(),
            w.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0 if workspace is None else workspace.data_ptr(),
            problem.threads,
        )
