"""The fused method: one pass on a GPU's tensor cores, with no column matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..problem import Operator, Problem
from . import cuda
from .base import Enqueue, Tensors, enqueue_tensors

# Capability of the first devices with asynchronous copies and bfloat16 products.
_LEAST_CAPABILITY = (8, 0)


class Fused:
    """Multiplies on tensor cores and writes every output once, bias and activation included."""

    name = "fused"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices without tensor cores, the adjoints, other dtypes, full float32, and caps below the packed weight."""
        reason = cuda.missing(device)
        if reason is not None:
            return reason
        if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
            return "it needs compute capability 8.0 or newer"
        if problem.operator is not Operator.CONV_TRANSPOSE:
            return "it has no adjoints yet"
        if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"tensor cores do not multiply {str(problem.dtype).removeprefix('torch.')} here"
        if problem.dtype is torch.float32 and not problem.allow_tf32:
            return "torch's convolution switch asks for full float32; it would round to TF32"
        configs = self.configs(problem, device)
        if not configs:
            return "its taps reach too far, or a count of positions is beyond 2^30"
        if self.workspace_bytes(problem, configs[0], device) > problem.workspace_cap:
            return f"its copy of the weight is beyond the cap of {problem.workspace_cap} bytes; raise UPFOLD_WORKSPACE_MB"
        return None

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """The tiles that fit, least predicted time first."""
        return _configs(problem, cuda.index(device))

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """Bytes of the packed weight."""
        needed: int = cuda.module().fused_workspace_bytes(cuda.index(device), problem.cuda, config)
        return needed

    def prepare(self, problem: Problem, config: int, device: torch.device) -> Enqueue:
        """Bind the packing and the kernel to a problem, a tile and a device."""
        call: Enqueue = cuda.module().FusedCall(problem.cuda, config, cuda.index(device)).enqueue
        return call

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Enqueue the packing and the kernel."""
        enqueue_tensors(self.prepare(problem, config, tensors.x.device), tensors, workspace, stream)


@lru_cache(maxsize=4096)
def _configs(problem: Problem, device: int) -> tuple[int, ...]:
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    costs = {}
    for config, (channels, phases_h, phases_w, units, blocks, warpgroups) in enumerate(module.fused_tiles()):
        if not module.fused_fits(device, problem.cuda, config):
            continue
        if phases_h == 0:  # rows are output channels times taps, units are inputs
            rows, outputs = problem.out_channels_per_group * problem.taps, problem.in_pixels
            phases, factor = 1, 0.25
        else:
            rows, outputs = problem.out_channels_per_group, 1
            for size, stride, of_set in zip(problem.out_size, problem.stride, (1, phases_h, phases_w)):
                outputs *= -(-size // stride) * -(-min(stride, size) // of_set)
            phases, factor = phases_h * phases_w, 0.3 if warpgroups else 1.0
        tiles = -(-problem.batch * outputs // units) * problem.groups * -(-rows // channels)
        waves = -(-tiles // (blocks * multiprocessors))
        costs[config] = factor * waves * blocks * channels * phases * units
    return tuple(sorted(costs, key=lambda config: costs[config]))
