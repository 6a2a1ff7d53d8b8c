"""The direct method: loops over the taps of each phase, with no column matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import native
from ..problem import Problem
from . import cuda
from .base import Enqueue, Tensors, enqueue_tensors, on_cpu


class Direct:
    """Sums the taps of each output's residue class where they lie."""

    name = "direct"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices without a kernel, and on a GPU sizes beyond 2^30 and caps below its scratch."""
        return None if device.type == "cpu" else cuda.reject_direct(problem, device)

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """The tiles that fit; one way only on a CPU."""
        return (0,) if device.type == "cpu" else cuda.direct_configs(problem, device)

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """What the kernel asks for."""
        if device.type != "cpu":
            return cuda.direct_workspace_bytes(problem, config)
        needed: int = native.cpu().direct_workspace_bytes(problem.cpu, problem.threads)
        return needed

    def prepare(self, problem: Problem, config: int, device: torch.device) -> Enqueue:
        """Bind the kernel of `problem.operator`."""
        if device.type != "cpu":
            return cuda.prepare_direct(problem, config, device)
        return on_cpu(native.cpu().direct, problem)

    def packing(self, problem: Problem, config: int, device: torch.device) -> str:
        """Nothing is packed apart from the calls."""
        return "it reads the weight as it lies, or lays it out in the call itself"

    def sums_channels(self, problem: Problem, config: int, device: torch.device) -> int:
        """It sums products alone."""
        return 0

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Run the kernel of `problem.operator`."""
        enqueue_tensors(self.prepare(problem, config, tensors.x.device), tensors, workspace, stream)
