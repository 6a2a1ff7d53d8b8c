"""The depthwise method: one input channel in each group, on a GPU's CUDA cores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..problem import Problem
from . import cuda
from .base import Enqueue, Tensors, enqueue_tensors


class Depthwise:
    """Reads every row once for all outputs that a thread keeps in registers."""

    name = "depthwise"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices other than a GPU, groups of several input channels, wide types, sizes beyond 2^30 and small caps."""
        reason = cuda.missing(device)
        if reason is not None:
            return reason
        if problem.groups != problem.in_channels:
            return f"it takes one input channel in each group; this has {problem.in_channels_per_group}"
        if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"it has no kernel for {str(problem.dtype).removeprefix('torch.')}"
        configs = self.configs(problem, device)
        if not configs:
            return "a size or an offset is beyond 2^30"
        if self.workspace_bytes(problem, configs[0], device) > problem.workspace_cap:
            return f"its partial sums are beyond the cap of {problem.workspace_cap} bytes; raise UPFOLD_WORKSPACE_MB"
        return None

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """0: the kernels for usual strides and for vectors of channels in channels_last; 1: the one that takes every problem."""
        loaded = cuda.module()
        fitting = [config for config in (0, 1) if loaded.depthwise_fits(problem.cuda, config)]
        affordable = [c for c in fitting if self.workspace_bytes(problem, c, device) <= problem.workspace_cap]
        return tuple(affordable or fitting)

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """Bytes of the weight gradient's partial sums, or of a copy of the weight."""
        needed: int = cuda.module().depthwise_workspace_bytes(problem.cuda, config)
        return needed

    def prepare(self, problem: Problem, config: int, device: torch.device) -> Enqueue:
        """Bind the kernels of `problem.operator` to a problem, a choice and a device."""
        call: Enqueue = cuda.module().DepthwiseCall(problem.cuda, config, cuda.index(device)).enqueue
        return call

    def packing(self, problem: Problem, config: int, device: torch.device) -> str:
        """Nothing is packed apart from the calls."""
        return "it reads the weight as it lies, or lays it out in the call itself"

    def sums_channels(self, problem: Problem, config: int, device: torch.device) -> int:
        """It sums products alone."""
        return 0

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Enqueue the kernels of `problem.operator`."""
        enqueue_tensors(self.prepare(problem, config, tensors.x.device), tensors, workspace, stream)
