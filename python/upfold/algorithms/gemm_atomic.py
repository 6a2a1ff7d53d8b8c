"""GEMM + col2im in its atomic form: every column entry is added where it belongs, in whatever order the device takes them.

It exists to be compared with the gather form of `gemm`. Its sums come in another order on every run, so `auto` never chooses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..problem import Problem
from . import cuda
from .base import Enqueue, Tensors, enqueue_tensors


class GemmAtomic:
    """The same matrix product as `gemm`, and a scatter-add of its columns (staged in float32 for 16-bit types)."""

    name = "gemm_atomic"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices other than GPUs, the adjoints, and workspace caps below the smallest block."""
        if device.type == "cpu":
            return "the scatter-add exists on a GPU only; on a CPU gemm gathers"
        return cuda.reject_gemm(problem, device, atomic=True)

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """How large the blocks of columns are."""
        return cuda.gemm_configs(problem, atomic=True)

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """The columns of a block, cuBLAS's scratch, and the staged sums of a 16-bit result."""
        return cuda.gemm_workspace_bytes(problem, device, config, atomic=True)

    def prepare(self, problem: Problem, config: int, device: torch.device) -> Enqueue:
        """Bind the products and the scatter-adds."""
        return cuda.prepare_gemm(problem, config, device, atomic=True)

    def packing(self, problem: Problem, config: int, device: torch.device) -> str:
        """Nothing is packed apart from the calls."""
        return "its product takes the weight as it lies, or turned in the call itself"

    def sums_channels(self, problem: Problem, config: int, device: torch.device) -> int:
        """It sums products alone."""
        return 0

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Enqueue the products and the scatter-adds."""
        enqueue_tensors(self.prepare(problem, config, tensors.x.device), tensors, workspace, stream)
