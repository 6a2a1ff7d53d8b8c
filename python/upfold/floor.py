"""The floor of a layer: the least time that this machine's memory and arithmetic allow, whatever the method."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from .precision import matmul_tf32, tf32_allowed
from .problem import DTYPE_BYTES, Problem
from .timing import Work, measure

# Ceilings of an H200, fixed so that figures of different runs compare: bytes/s of an elementwise kernel, FLOP/s of a matmul.
_H200_BYTES = 4.2e12
_H200_TF32 = 443e12
_H200_16_BIT = 809e12


@dataclass(frozen=True)
class Ceilings:
    """What one device reaches at best for one dtype.

    Attributes:
        bytes_per_second: rate used for the floor, bytes read plus bytes written.
        flops_per_second: rate used for the floor, a real multiply-add counting 2.
        measured_bytes_per_second: rate of an elementwise kernel in this process.
        measured_flops_per_second: rate of the best matmul in this process.
        source: "measured", or the name of the device whose fixed figures are used.
    """

    bytes_per_second: float
    flops_per_second: float
    measured_bytes_per_second: float
    measured_flops_per_second: float
    source: str

    def floor_seconds(self, moved_bytes: float, flops: float) -> float:
        """Least time for moving `moved_bytes` bytes and computing `flops` operations at the same time."""
        return max(moved_bytes / self.bytes_per_second, flops / self.flops_per_second)

    def of(self, problem: Problem) -> float:
        """Least time for one problem: x, w and y moved once, and the tap products that land inside the output."""
        return self.floor_seconds(problem.bytes, problem.flops)

    def of_step(self, problem: Problem) -> float:
        """Least time for the forward of a problem, and then its backward."""
        return self.of(problem) + self.floor_seconds(moved_in_step(problem) - problem.bytes, 2 * problem.flops)

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        return asdict(self)


def moved_in_step(problem: Problem) -> int:
    """Bytes that a step moves at least: forward x, w and y; backward x, w and y's gradient, and the gradients of x and w."""
    y = DTYPE_BYTES[problem.dtype] * problem.batch * problem.out_channels * problem.out_pixels
    return 3 * problem.bytes - y


def ceilings(device: torch.device | str, dtype: torch.dtype) -> Ceilings:
    """Measure the ceilings of a device once per process, dtype, thread count and TF32 setting.

    Args:
        device: the device.
        dtype: a dtype that upfold takes.

    Returns:
        Its ceilings; on an H200 the fixed figures stand beside the measured ones.
    """
    device = torch.device(device)
    return _ceilings(str(device), dtype, tf32_allowed(device), torch.get_num_threads())


@lru_cache(maxsize=64)
def _ceilings(device_name: str, dtype: torch.dtype, tf32: bool, threads: int) -> Ceilings:
    device = torch.device(device_name)
    moved, computed = _elementwise_rate(device), _matmul_rate(device, dtype, tf32)
    if device.type == "cuda" and "H200" in torch.cuda.get_device_name(device):
        fixed: float | None = None
        if dtype in (torch.float16, torch.bfloat16):
            fixed = _H200_16_BIT
        elif dtype == torch.float32 and tf32:
            fixed = _H200_TF32
        return Ceilings(_H200_BYTES, fixed or computed, moved, computed, "H200")
    return Ceilings(moved, computed, moved, computed, "measured")


def _elementwise_rate(device: torch.device) -> float:
    elements = 2**25 if device.type == "cpu" else 2**28
    source = torch.rand(elements, device=device)
    target = torch.empty_like(source)
    (timing,) = measure([lambda: torch.mul(source, 1.5, out=target)], device)
    return 2 * elements * DTYPE_BYTES[source.dtype] / timing.fastest


def _matmul_rate(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    on_cpu = device.type == "cpu"
    size = 768 if on_cpu else 8192 if dtype != torch.float64 else 4096
    product_flops = 8 if dtype.is_complex else 2
    try:
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        torch.matmul(a[:8, :8], b[:8, :8])
    except RuntimeError:  # torch 2.0 has no 16-bit matmul on a CPU; what runs there in its place computes in float32
        return _matmul_rate(device, torch.float32, tf32)
    works: list[Work] = [lambda: torch.matmul(a, b)]
    flops = [product_flops * size**3]
    if on_cpu and not dtype.is_complex:
        x = torch.randn(1, 512, 32, 64).to(dtype).contiguous(memory_format=torch.channels_last)
        w = torch.randn(512, 512, 1, 1).to(dtype).contiguous(memory_format=torch.channels_last)
        works.append(lambda: F.conv2d(x, w))
        flops.append(2 * 512 * 512 * 32 * 64)
    with matmul_tf32(tf32):
        timings = measure(works, device)
    # A ceiling is what the machine can do, so the fastest sample counts: what else ran meanwhile must not lower it.
    return max(count / timing.fastest for count, timing in zip(flops, timings))
