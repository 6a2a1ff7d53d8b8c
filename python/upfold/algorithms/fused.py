"""The fused method: one pass on a GPU's tensor cores or a CPU's vectors, with no column matrix."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from .. import native
from ..problem import DTYPE_BYTES, Operator, Problem
from . import (
    cuda,
    fused_beside,
    fused_columns,
    fused_exact,
    fused_groups,
    fused_heads,
    fused_input,
    fused_laid,
    fused_last,
    fused_last_planes,
    fused_last_runs,
    fused_last_weight_rows,
    fused_maps,
    fused_phases,
    fused_point,
    fused_point_input,
    fused_small,
    fused_units,
    fused_weight,
    fused_window,
)
from .base import Enqueue, Packing, Tensors, enqueue_tensors, on_cpu

# Capability, times ten, of the first devices with asynchronous copies and products of bfloat16 and TF32, and of those with
# products of float16 that sum in float32.
_LEAST_CAPABILITY, _LEAST_OF_HALF = 80, 75
_STEP_BYTES = 64  # of input channels that one step of a reduction takes
_VECTORS = 4  # of 16 bytes, which these are; some tiles take more
_LEAST_CPU_CHANNELS = 4  # fewer leave most of a vector empty


class _Rates(NamedTuple):
    """What predicts the microseconds of a call: fitted to every tile of 57 layers on an H200 (20 % off in root mean square).

    They order tiles and are compared with other methods; they are no rates of the device.
    """

    call: float
    tile: float  # of a wave of tiles, beside its steps and outputs
    step: float
    product: float  # of a channel, a unit and a tap of one step of 64 bytes
    input: float  # of an input of the patch in one such step
    output: float
    scattered: float  # of an output, where the width phases of a unit are not stored together
    partial: float  # of a megabyte of partial sums
    memory: float  # of a megabyte of the operands, at the least
    packing: float = 0.0  # of a megabyte of x


class _Kind(IntEnum):
    """How a tile's blocks multiply: the last number of `fused_tiles()`."""

    TILE = 0
    WARPGROUPS = 1
    PIXELS = 2  # rows of a product are pixels
    PACKED = 3  # warpgroups, and x is packed first
    PHASES = 4  # rows of a product are pairs of an output channel and a phase


# Of float32 and of 16-bit values, by kind of tile.
_RATES = {
    _Kind.TILE: (
        _Rates(6.75, 1.06, 0.431, 3.94e-5, 3.94e-3, 5.79e-5, 1.95e-4, 0.6, 0.1),
        _Rates(7.83, 0.633, 0.497, 3.84e-5, 3.50e-3, 1.08e-4, 2.76e-4, 0.42, 0.1),
    ),
    _Kind.WARPGROUPS: (
        _Rates(13.9, 0.781, 1.08, 1.34e-5, 4.18e-3, 4.12e-5, 2.83e-4, 0.435, 0.544),
        _Rates(12.9, 0.92, 1.37, 1.47e-5, 2.80e-3, 5.07e-5, 3.29e-4, 0.325, 0.76),
    ),
    _Kind.PIXELS: (
        _Rates(5.73, 0.446, 0.0203, 2.20e-5, 9.75e-3, 2.14e-5, 1.60e-4, 0.306, 0.723),
        _Rates(5.04, 0.647, 1.01, 2.11e-5, 5.12e-3, 3.33e-5, 2.01e-4, 0.231, 0.25),
    ),
    _Kind.PACKED: (
        _Rates(5.51, 0.841, 0.215, 1.30e-5, 2.31e-3, 4.50e-5, 3.24e-4, 0.54, 0.845, 0.42),
        _Rates(6.4, 0.942, 0.0495, 1.36e-5, 2.16e-3, 5.26e-5, 3.14e-4, 0.325, 0.969, 0.42),
    ),
}
# Of pixels where kernel and stride are equal, so that a tile is a run of units; and of tiles made for that case alone.
_RUNS = (
    _Rates(10.8, 0.865, 0.42, 1.01e-5, 3.24e-4, 4.82e-5, 2.45e-4, 0.277, 0.315),
    _Rates(8.63, 0.791, 0.48, 7.77e-6, 3.05e-4, 4.21e-5, 2.76e-4, 0.24, 0.345),
)
_EQUAL = (
    _Rates(0.0, 0.0, 0.028, 3.3e-5, 1e-4, 2.1e-4, 2.1e-4, 0.0, 0.0),
    _Rates(2.1, 0.0, 0.04, 2.5e-5, 1e-4, 1.1e-4, 1.1e-4, 0.0, 0.0),
)
# 16-bit maps of an odd number of pixels are copied one by one: the input's rate of blocks that copy them as they lie, and a
# factor of the tiles for equal kernel and stride.
_ODD_INPUT, _ODD = 0.05, 1.8
# Times as long as predicted where inputs are packed, by phases and channels of a tile: most of it is the weights that stream past
# 128 or 64 units.
_PACKED_STEPS = {(2, 128): 0.83, (4, 64): 1.2, (4, 128): 1.75}
# Microseconds more of a megabyte of a weight in channels_last, which packing reads one by one: of one layer (pix2pix 1024 -> 512
# on 4 x 4), 51 us for 28.
_TURNED_WEIGHT = 1.4
_LONG = 0.72  # and where warpgroups that turn x have one phase, so that products follow each other longer
# Blocks of pixels store channels that are innermost one by one: so many times as long where kernel and stride are equal.
_INNERMOST_RUNS = 2.0
_APART = 1.7  # and for scattered outputs of blocks without warpgroups where a stride is beyond the phases of a set


class Fused:
    """Multiplies tiles of the input and writes every output once, bias and activation included."""

    name = "fused"

    def reject(self, problem: Problem, device: torch.device) -> str | None:
        """Refuse devices without tensor cores, other dtypes, full float32 of some adjoints, and caps below its scratch."""
        if device.type == "cpu":
            return _reject_on_cpu(problem)
        reason = cuda.missing(device)
        if reason is not None:
            return reason
        half = problem.dtype is torch.float16 and problem.operator is Operator.CONV_TRANSPOSE
        if cuda.module().code_capability(cuda.index(device)) < (_LEAST_OF_HALF if half else _LEAST_CAPABILITY):
            least = "7.5" if half else "8.0 (7.5 for the forward in float16)"
            return f"it needs compute capability {least} or newer, and kernels that were compiled for it"
        if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"tensor cores do not multiply {str(problem.dtype).removeprefix('torch.')} here"
        exact = problem.in_full_float32
        if exact and problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
            return "torch's convolution switch asks for full float32; its gradient of the weight would round to TF32"
        if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
            return fused_weight.reject(problem, cuda.index(device))
        if not _microseconds(problem, cuda.index(device)):
            if problem.operator is Operator.CONV:
                return fused_exact.REFUSAL_OF_INPUT if exact else fused_input.REFUSAL
            if exact:
                return fused_exact.REFUSAL
            return "its taps reach too far, or a count of positions is beyond 2^30"
        if not self.configs(problem, device):
            return f"its copy of the weight is beyond the cap of {problem.workspace_cap} bytes; raise UPFOLD_WORKSPACE_MB"
        return None

    def configs(self, problem: Problem, device: torch.device) -> Sequence[int]:
        """The tiles that fit under the workspace cap, least predicted time first; one way only on a CPU."""
        if device.type == "cpu":
            return (0,)
        if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
            return fused_weight.configs(problem, cuda.index(device))
        return _affordable(problem, cuda.index(device))

    def workspace_bytes(self, problem: Problem, config: int, device: torch.device) -> int:
        """Bytes of the packed weight, and on a GPU of packed inputs and partial sums where a tile has them."""
        if device.type == "cpu":
            return max(0, _cpu_workspace_bytes(problem))
        if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
            return fused_weight.workspace_bytes(problem, config, cuda.index(device))
        return _workspace_bytes(problem, config, cuda.index(device))

    def prepare(self, problem: Problem, config: int, device: torch.device) -> Enqueue:
        """Bind the packing and the kernel to a problem, a tile and a device."""
        if device.type == "cpu":
            return on_cpu(native.cpu().fused, problem)
        if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
            weight: Enqueue = fused_weight.call(problem, config, cuda.index(device)).enqueue
            return weight
        if _by_boxes(config):
            return fused_last.enqueue(_call(problem, config, cuda.index(device)), problem)
        call: Enqueue = _call(problem, config, cuda.index(device)).enqueue
        mirrored = fused_input.mirrored(problem, config)
        return call if mirrored is None else fused_input.swapped(call, problem)

    def packing(self, problem: Problem, config: int, device: torch.device) -> Packing | str:
        """The packed weight, on a GPU that of the tile, in float32 on a CPU; nothing of tiles that read the weight as it lies."""
        if device.type == "cpu":
            return _cpu_packing(problem)
        call = _call(problem, config, cuda.index(device))
        if _packs_nothing(config) or not call.packed_bytes:
            return "its tile reads the weight as it lies"
        layout, left = tuple(call.packing), call.workspace_bytes - call.packed_bytes
        return Packing(layout, call.packed_bytes, left, call.pack, call.enqueue)

    def sums_channels(self, problem: Problem, config: int, device: torch.device) -> int:
        """Tiles of the gradient of the weight that read every element of y once, of 16-bit values on a GPU."""
        weight = problem.operator is Operator.CONV_TRANSPOSE_WEIGHT and device.type == "cuda"
        return fused_weight.sums_channels(problem, config, cuda.index(device)) if weight else 0

    def run(self, problem: Problem, tensors: Tensors, config: int, workspace: torch.Tensor | None, stream: int) -> None:
        """Enqueue the packing and the kernel."""
        enqueue_tensors(self.prepare(problem, config, tensors.x.device), tensors, workspace, stream)


def _by_boxes(config: int) -> bool:
    return fused_last.FIRST <= config < fused_columns.FIRST or config >= fused_exact.FIRST


def _packs_nothing(config: int) -> bool:
    return fused_columns.FIRST <= config < fused_exact.FIRST


def _call(problem: Problem, config: int, device: int) -> Any:
    if config >= fused_last_planes.FIRST:
        return fused_last_planes.call(problem, config, device)
    if config >= fused_last_weight_rows.FIRST:
        return fused_last_weight_rows.call(problem, config, device)
    if config >= fused_last_runs.FIRST:
        return fused_last_runs.call(problem, config, device)
    if config >= fused_exact.FIRST:
        return fused_exact.call(problem, config, device)
    if config >= fused_window.FIRST:
        return fused_window.call(problem, config, device)
    if config >= fused_small.FIRST:
        return fused_small.call(problem, config, device)
    if config >= fused_point_input.FIRST:
        return fused_point_input.call(problem, config, device)
    if config >= fused_point.FIRST:
        return fused_point.call(problem, config, device)
    if config == fused_groups.CONFIG:
        return fused_groups.call(problem, device)
    if config >= fused_heads.FIRST:
        return fused_heads.call(problem, config, device)
    if config >= fused_laid.FIRST:
        return fused_laid.call(problem, config, device)
    if config >= fused_maps.FIRST:
        return fused_maps.call(problem, config, device)
    if config >= fused_units.FIRST:
        return fused_units.call(problem, config, device)
    if config >= fused_columns.FIRST:
        return fused_columns.call(problem, config, device)
    if config >= fused_last.FIRST:
        return fused_last.call(problem, config, device)
    if problem.operator is Operator.CONV:
        mirrored = fused_input.mirrored(problem, config)
        if mirrored is None:
            return cuda.module().FusedInputCall(device, problem.cuda, config, problem.alignment)
        problem, config = mirrored, config - fused_input.MIRRORED
    return cuda.module().FusedCall(device, problem.cuda, config, problem.alignment, problem.workspace_cap, not problem.allow_tf32)


def _reject_on_cpu(problem: Problem) -> str | None:
    """Refuse wide types, groups of few channels, far taps, and caps below its scratch."""
    if problem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its vectors are float32; {str(problem.dtype).removeprefix('torch.')} is left to direct"
    channels = vector_channels(problem)
    if channels < _LEAST_CPU_CHANNELS:
        return f"its vectors are channels, and a group has {channels}; direct makes vectors of pixels"
    needed = _cpu_workspace_bytes(problem)
    if needed < 0:
        return "its taps reach too far for a tile of the input to fit"
    if needed > problem.workspace_cap:
        what = "its sums take" if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT else "its copy of the weight takes"
        return f"{what} {needed} bytes; the cap is {problem.workspace_cap}; raise UPFOLD_WORKSPACE_MB"
    return None


def _cpu_packing(problem: Problem) -> Packing:
    module, struct, threads = native.cpu(), problem.cpu, problem.threads

    def pack(w: int, packed: int, stream: int) -> None:
        module.fused_pack(struct, w, packed, threads)

    def run(x: int, w: int, bias: int, y: int, workspace: int, stream: int, packed: int) -> None:
        module.fused_packed(struct, x, w, bias, y, packed, threads)

    layout = tuple(module.fused_packing(struct, threads))
    return Packing(layout, layout[0], 0, pack, run)


def vector_channels(problem: Problem) -> int:
    """Channels of a group that fill the vectors on a CPU: the result's, and for the weight's gradient those of either side."""
    if problem.operator is Operator.CONV:
        return problem.in_channels_per_group
    if problem.operator is Operator.CONV_TRANSPOSE:
        return problem.out_channels_per_group
    return max(problem.in_channels_per_group, problem.out_channels_per_group)


@lru_cache(maxsize=4096)
def _cpu_workspace_bytes(problem: Problem) -> int:
    needed: int = native.cpu().fused_workspace_bytes(problem.cpu, problem.threads)
    return needed


@lru_cache(maxsize=4096)
def _workspace_bytes(problem: Problem, config: int, device: int) -> int:
    needed: int = 0 if _packs_nothing(config) else _call(problem, config, device).workspace_bytes
    return needed


def _width(kind: _Kind, phases: int, channels: int, vectors: int) -> float:
    """How many times the rates' work a step of such a tile is."""
    if kind == _Kind.PIXELS:
        return vectors / _VECTORS
    if kind == _Kind.PACKED:
        return _PACKED_STEPS.get((phases, channels), 1.0)
    return _LONG if kind == _Kind.WARPGROUPS and phases == 1 else 1.0


@lru_cache(maxsize=4096)
def _microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the time of every tile that fits."""
    if problem.operator is Operator.CONV:
        of_point = fused_point_input.microseconds(problem, device)
        if problem.in_full_float32:
            return fused_exact.microseconds(problem, device) | of_point
        mirrored = fused_input.mirrored(problem)
        as_forward = {} if mirrored is None else _tile_microseconds(mirrored, device)
        own = fused_input.microseconds(problem, device) | fused_last.microseconds(problem, device)
        own |= fused_small.microseconds(problem, device) | fused_window.microseconds(problem, device) | of_point
        own |= fused_laid.microseconds(problem, device)
        own |= {fused_input.MIRRORED + c: t for c, t in as_forward.items()} | fused_groups.microseconds(problem, device)
        return fused_beside.compared(problem, own, device)
    own = _tile_microseconds(problem, device) | fused_last.microseconds(problem, device)
    own |= fused_columns.microseconds(problem, device) | fused_units.microseconds(problem, device)
    own |= fused_maps.microseconds(problem, device) | fused_heads.microseconds(problem, device)
    own |= fused_exact.microseconds(problem, device) | fused_point.microseconds(problem, device)
    own |= fused_last_runs.microseconds(problem, device) | fused_last_weight_rows.microseconds(problem, device)
    own |= fused_last_planes.microseconds(problem, device) | fused_window.microseconds(problem, device)
    return fused_beside.compared(problem, own, device)


@lru_cache(maxsize=4096)
def _tile_microseconds(problem: Problem, device: int) -> dict[int, float]:
    """Predict the forward's own tiles: waves of tiles, each of some steps, which multiply or wait for their inputs."""
    if problem.in_full_float32 and problem.in_channels_per_group == 1:
        return {}  # their sums of few products were 1.3 times the bound in full float32
    module = cuda.module()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    half = DTYPE_BYTES[problem.dtype] == 2
    equal = all(kernel == stride for kernel, stride in zip(problem.kernel_size, problem.stride))
    odd = half and problem.in_pixels % 2 == 1
    predicted = {}
    for config, (channels, phases_h, phases_w, units, blocks, kind, vectors) in enumerate(module.fused_tiles()):
        if not module.fused_fits(device, problem.cuda, config, problem.alignment, not problem.allow_tf32):
            continue
        if kind == _Kind.PHASES:
            work = _call(problem, config, device).work
            predicted[config] = fused_phases.microseconds(problem, work, channels, units, multiprocessors)
            continue
        if phases_h == 0:  # rows are output channels times taps, units are inputs; all phases have one tap
            rates, phases, slots, parts = _EQUAL[half], 1, 1.0, 1
            rows = problem.out_channels_per_group * problem.taps
            tiles = -(-problem.batch * problem.in_pixels // units) * problem.groups * -(-rows // channels)
            steps, patch = -(-problem.in_channels_per_group * DTYPE_BYTES[problem.dtype] // _STEP_BYTES), units
        else:
            rates, phases = (_RUNS if equal and kind == _Kind.PIXELS else _RATES[_Kind(kind)])[half], phases_h * phases_w
            tiles, steps, patch, parts = _call(problem, config, device).work
            axes = zip(problem.stride, problem.out_size, (1, phases_h, phases_w))
            slots = problem.taps / prod(-(-min(stride, size) // of_set) for stride, size, of_set in axes)
        waves = -(-tiles // (blocks * multiprocessors)) * blocks
        outputs = channels * phases * units
        copied = max(rates.input, _ODD_INPUT) if odd and kind in (_Kind.WARPGROUPS, _Kind.PIXELS) else rates.input
        work = max(slots * channels * units * rates.product, patch * copied)
        step = rates.step + work * _width(_Kind(kind), phases, channels, vectors)
        partial = 8e-6 * tiles * outputs * rates.partial if parts > 1 else 0.0
        output = rates.output if problem.stride[2] == phases_w else rates.scattered
        output *= _APART if kind == _Kind.TILE and problem.stride[2] > phases_w > 0 else 1.0
        packing = 1e-6 * problem.batch * problem.in_channels * problem.in_pixels * DTYPE_BYTES[problem.dtype] * rates.packing
        time = rates.call + packing + partial + waves * (rates.tile + steps * step + outputs * output)
        time *= _ODD if odd and phases_h == 0 else 1.0
        if problem.w_strides[1] == 1 and problem.taps > 1 and problem.out_channels_per_group > 1:
            elements = problem.in_channels * problem.out_channels_per_group * problem.taps
            time += 1e-6 * elements * DTYPE_BYTES[problem.dtype] * _TURNED_WEIGHT
        if equal and kind == _Kind.PIXELS and problem.y_strides[1] == 1 and problem.out_channels > 1:
            time *= _INNERMOST_RUNS
        predicted[config] = max(time, 1e-6 * problem.bytes * rates.memory)
    return predicted


@lru_cache(maxsize=4096)
def _affordable(problem: Problem, device: int) -> tuple[int, ...]:
    predicted = _microseconds(problem, device)
    affordable = [config for config in predicted if _workspace_bytes(problem, config, device) <= problem.workspace_cap]
    return tuple(sorted(affordable, key=lambda config: predicted[config]))


def predicted_seconds(problem: Problem, device: torch.device) -> float:
    """Predict the time of the best tile, of a problem that is not rejected."""
    number = cuda.index(device)
    if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
        return fused_weight.predicted_seconds(problem, number)
    return 1e-6 * _microseconds(problem, number)[_affordable(problem, number)[0]]
