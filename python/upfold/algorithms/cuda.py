"""The CUDA module's side of `gemm`, `gemm_atomic` and `direct`: why it refuses, its tile choices, its scratch, its launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import native
from ..problem import Operator, Problem
from .base import Enqueue

# Of a microsecond, on the device that predictions in cycles were fitted on (H200).
CYCLES = 1755.0
# Blocks of columns that stay in the second-level cache of a large device between the product and col2im.
_CACHED_BLOCK_BYTES = 24 << 20
# What a tile of the direct kernel reaches of the device's multiply-add rate; the steps of its reduction that its stores cost; and
# what a block on a multiprocessor of its own takes, in blocks that share one.
_TILE_EFFICIENCY = (1.0, 0.85, 0.69, 0.8, 0.59, 0.5)
_STORE_STEPS = 24
_LONE_BLOCK = 1.4
# The weight gradient's tiles: input channels of a group, output channels times taps, and the same share.
_WEIGHT_TILES = ((128, 128, 1.0), (64, 64, 0.65), (4, 64, 0.1))
# And the choice of one launch for few positions (`cpp/cuda/direct_weight_dots.cu`): a block has 4 input channels, 4 taps of a row
# of the kernel and an output channel, and a thread every 128th position. What takes longer than so many seconds other tiles do
# sooner, which share what they read.
DOTS, _DOTS_MOST = 2 * len(_WEIGHT_TILES), 10e-6
# Seconds of a call; of a position of a thread; and of a block, beside its positions and for each: at most 15 % off on eleven
# layers (H200).
_DOTS_CALL, _DOTS_POSITION, _DOTS_BLOCK, _DOTS_BLOCK_POSITION = 2.5e-6, 0.55e-6, 0.8e-9, 1e-9


# Of copies of pixels whose channels are innermost as planes, ahead of a gradient: launches, and bytes a second read and written.
_PLANES_SECONDS, _PLANES_BYTES = 3e-6, 2.5e12


def planes_seconds(copied: int) -> float:
    """Predict the copies of so many bytes as planes, of one operand or of both."""
    return _PLANES_SECONDS + 2.0 * copied / _PLANES_BYTES if copied else 0.0


def missing(device: torch.device) -> str | None:
    """Why the CUDA kernels do not run on this device, or None."""
    if device.type != "cuda":
        return f"no kernel exists for {device.type} yet"
    return native.load_cuda()[1]


def module() -> Any:
    """The CUDA module, or the error that says why there is none."""
    loaded, reason = native.load_cuda()
    if loaded is None:
        raise ImportError(reason)
    return loaded


def index(device: torch.device) -> int:
    """The number of a CUDA device; that of the current one where it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


@lru_cache(maxsize=4096)
def _gemm_call(problem: Problem, device: int, config: int, atomic: bool) -> Any:
    loaded = module()
    options = loaded.GemmOptions(
        workspace_cap=problem.workspace_cap,
        chunk_bytes=_CACHED_BLOCK_BYTES if config == 1 else 0,
        allow_tf32=problem.allow_tf32,
        atomic=atomic,
        has_bias=problem.has_bias,
        form=max(config - 1, 0),
        alignment=problem.alignment,
    )
    return loaded.GemmCall(device, problem.cuda, options)


def reject_gemm(problem: Problem, device: torch.device, atomic: bool = False) -> str | None:
    """Say why the matrix product and its columns cannot run, or None."""
    reason = missing(device)
    if reason is not None:
        return reason
    if not module().info()["cublas_version"]:
        return f"no cuBLAS was found: {module().info()['cublas_reason']}"
    if atomic and problem.operator is not Operator.CONV_TRANSPOSE:
        return "its adjoints have no columns to add up; gemm computes them"
    if gemm_workspace_bytes(problem, device, 0, atomic) < 0:
        return (
            f"workspace_mb = {problem.workspace_cap / 2**20:g} cannot hold the smallest block of columns; raise "
            "UPFOLD_WORKSPACE_MB or use(workspace_mb=...)"
        )
    return None


def gemm_configs(problem: Problem, atomic: bool = False) -> Sequence[int]:
    """What a product makes, and how large the blocks are.

    0: blocks as large as the cap allows; 1: blocks that stay in the second-level cache; 2 to 4: as 0, but the product always
    makes a column for every tap, or runs over windows of x, apart or as residues (`cpp/cuda/gemm_window.h`); 0 chooses.
    """
    spans = problem.kernel_size[2] > problem.stride[2] and problem.dilation[2] == 1 and problem.groups == 1
    if atomic or not spans:
        return (0, 1)
    return (0, 1, 2, 3, 4) if problem.operator is Operator.CONV_TRANSPOSE else (0, 1, 2, 3)


def gemm_workspace_bytes(problem: Problem, device: torch.device, config: int, atomic: bool = False) -> int:
    """Scratch of a call, in bytes, or -1 where the cap is too small. Also readies cuBLAS, so that no later call has to."""
    loaded = module()
    if problem.batch:
        loaded.gemm_prepare(index(device))
    needed: int = _gemm_call(problem, index(device), config, atomic).workspace_bytes
    return needed


def prepare_gemm(problem: Problem, config: int, device: torch.device, atomic: bool = False) -> Enqueue:
    """Bind the products and the column kernels to a problem, a block size and a device."""
    run: Enqueue = _gemm_call(problem, index(device), config, atomic).run
    return run


def reject_direct(problem: Problem, device: torch.device) -> str | None:
    """Say why the direct kernel cannot run, or None."""
    reason = missing(device)
    if reason is not None:
        return reason
    configs = direct_configs(problem, device)
    if not configs:
        return "a size or a count of positions is beyond 2^30"
    needed = direct_workspace_bytes(problem, configs[0])
    if needed > problem.workspace_cap:
        return f"its scratch takes {needed} bytes; the cap is {problem.workspace_cap}; raise UPFOLD_WORKSPACE_MB"
    return None


def direct_configs(problem: Problem, device: torch.device) -> Sequence[int]:
    """The tiles that fit, least predicted time first: waves of blocks times the work of one."""
    return _direct_configs(problem, torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=4096)
def _direct_configs(problem: Problem, multiprocessors: int) -> tuple[int, ...]:
    loaded = module()
    costs = {}
    if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
        rows, columns = problem.in_channels_per_group, problem.out_channels_per_group * problem.taps
        for config, (tile_rows, tile_columns, efficiency) in enumerate(_WEIGHT_TILES):
            area = -(-rows // tile_rows) * tile_rows * (-(-columns // tile_columns) * tile_columns)
            costs[config] = area / efficiency
        # The same without a split of the reduction, which takes no scratch: last.
        costs.update({len(_WEIGHT_TILES) + config: max(costs.values()) + cost for config, cost in list(costs.items())})
        costs[DOTS] = -1.0 if dots_seconds(problem) is not None else 2.0 * max(costs.values())
    else:
        for config, (channels, positions) in enumerate(loaded.direct_tiles()):
            if not loaded.direct_fits(problem.cuda, config):
                continue
            blocks, steps = loaded.direct_work(problem.cuda, config)
            # A block alone on its multiprocessor waits for memory; two hide each other's waits.
            in_turn = max(-(-blocks // multiprocessors), _LONE_BLOCK)
            costs[config] = in_turn * channels * positions * (steps + _STORE_STEPS) / _TILE_EFFICIENCY[config]
    fitting = [config for config in costs if loaded.direct_fits(problem.cuda, config)]
    affordable = [c for c in fitting if loaded.direct_workspace_bytes(problem.cuda, c) <= problem.workspace_cap]
    return tuple(sorted(affordable or fitting, key=lambda config: costs[config]))


def dots_seconds(problem: Problem) -> float | None:
    """Predict the gradient of the weight by the choice `DOTS`; None where it is not for so many positions and channels."""
    depth, height, width = problem.kernel_size
    blocks = -(-width // 4) * depth * height * problem.out_channels * -(-problem.in_channels_per_group // 4)
    positions = -(-problem.batch * problem.in_pixels // 128)  # of a thread
    seconds = _DOTS_CALL + max(positions * _DOTS_POSITION, blocks * (_DOTS_BLOCK + positions * _DOTS_BLOCK_POSITION))
    return seconds if seconds < _DOTS_MOST and not problem.dtype.is_complex else None


def direct_workspace_bytes(problem: Problem, config: int) -> int:
    """Scratch of a call, in bytes."""
    needed: int = module().direct_workspace_bytes(problem.cuda, config)
    return needed


def prepare_direct(problem: Problem, config: int, device: torch.device) -> Enqueue:
    """Bind the kernels of `problem.operator` to a problem, a tile and a device."""
    call: Enqueue = module().DirectCall(problem.cuda, config, index(device)).enqueue
    return call
