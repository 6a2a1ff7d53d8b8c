"""The time that each method is predicted to take: what `dispatch` prefers by."""

from __future__ import annotations

from math import inf, prod

import torch

from .problem import DTYPE_BYTES, Operator, Problem

# For one CPU thread in float32: fitted so that the choice between the methods agrees with what a 2-core AVX-512 machine
# measured on 50 layers and three operators. They are no rates of that machine; only their proportions matter.
_CPU_CALL_SECONDS = {"gemm": 50e-6, "direct": 10e-6}  # beside the work
_CPU_BYTES = 8e9  # a second, of memory
_CPU_COLUMN_BYTES = 2e9  # a second, of columns written by the product and summed by col2im
_CPU_GEMM_FLOPS = 80e9  # a second, of a deep matrix product
_CPU_GEMM_HALF_DEPTH = 16.0  # input channels of a group at which it reaches half of that
_CPU_DIRECT_FLOPS = 95e9  # a second, of the direct kernel on long rows
_CPU_DIRECT_HALF_ROW = 1.0  # input positions of a row at which it reaches half of that
_CPU_PACK_BYTES = 2e9  # a second, of the weight that the direct kernel lays out anew

# Fitted in the same way to `benchmarks/results/nvidia-h200.json` (forward, float32 with TF32 and bfloat16).
_GPU_LAUNCH_SECONDS = 3e-6
# What enqueuing a product and its column kernels takes on the host, allocations included: an eager call is never shorter.
_GPU_GEMM_HOST_SECONDS = 17e-6
_GPU_BYTES = 4e12  # a second
# Multiply-adds counted as two operations a second: of a matrix product, by type.
_GPU_GEMM_FLOPS = {torch.float16: 500e12, torch.bfloat16: 500e12, torch.float32: 40e12, torch.float64: 40e12}
_GPU_GEMM_TF32_FLOPS = 250e12
_GPU_GEMM_HALF_DEPTH = 64.0  # input channels of a group at which the product reaches half of that
# Of the direct kernel, fitted so that the choice agrees with that file over 235 layers and gradients (1 % from the better method
# in geometric mean; 3 to 6 % on layers left out of the fit): its proportions matter, these are no rates.
_GPU_DIRECT_CALL_SECONDS = 46e-6
# On tiny layers that constant is far too long: there the forward takes its launch on the host, and a small multiple of its work.
# Its gradients were measured no shorter than gemm's time on the host on any layer, and keep the constant.
_GPU_DIRECT_HOST_SECONDS = 6e-6
_GPU_DIRECT_TINY_FACTOR = 2.0
_GPU_DIRECT_FLOPS = 22e12
_GPU_DIRECT_BYTES = 0.6e12  # a second
_GPU_FEW_CHANNELS = 20.0  # result channels of a group at which it reaches half of its rate
_GPU_DIRECT_TERM_SECONDS = 30e-9  # per product of one output, which follow one another
_GPU_DIRECT_FACTOR = {Operator.CONV_TRANSPOSE: 1.0, Operator.CONV: 0.63, Operator.CONV_TRANSPOSE_WEIGHT: 1.3}
# Of the fused method where kernel and stride are equal; elsewhere it was not measured to lead, and is not preferred.
_GPU_FUSED_BYTES = 2.1e12  # a second
_GPU_FUSED_FLOPS = {torch.float16: 220e12, torch.bfloat16: 220e12, torch.float32: 100e12}
_GPU_FUSED_ODD = 2.0  # times as long on 16-bit maps of an odd number of pixels, which are copied one by one


def predicted_seconds(name: str, problem: Problem, device: torch.device) -> float:
    """Predict the time of a method in seconds, from the bytes it moves and the products it takes; infinite: never preferred."""
    return _on_cpu(name, problem) if device.type == "cpu" else _on_gpu(name, problem)


def _on_cpu(name: str, problem: Problem) -> float:
    """Predict the time of a method on one CPU thread from the bytes it moves and the products it takes.

    gemm multiplies at the rate of a BLAS but writes and reads its columns; direct has no columns, and multiplies slower, on the
    short rows of small maps much slower. Threads divide both alike, so that the choice, and with it every bit of the result,
    does not depend on their number.
    """
    element = max(4, DTYPE_BYTES[problem.dtype])
    seconds = _CPU_CALL_SECONDS[name] + problem.bytes / _CPU_BYTES
    speed = 4.0 / element
    if name == "gemm":
        columns = problem.batch * problem.out_channels * problem.taps * problem.in_pixels
        depth = problem.in_channels_per_group
        rate = _CPU_GEMM_FLOPS * speed * depth / (depth + _CPU_GEMM_HALF_DEPTH)
        return seconds + 2.0 * columns * depth / rate + 2.0 * columns * element / _CPU_COLUMN_BYTES
    row = problem.in_size[2]
    weight = problem.in_channels * problem.out_channels_per_group * problem.taps * element
    return seconds + weight / _CPU_PACK_BYTES + problem.flops / (_CPU_DIRECT_FLOPS * speed * row / (row + _CPU_DIRECT_HALF_ROW))


def _on_gpu(name: str, problem: Problem) -> float:
    """The larger of memory and arithmetic for each launch, and the time on the host where that is longer.

    gemm's columns are written and read once, in float32 at least.
    """
    if name == "gemm":
        element = max(4, DTYPE_BYTES[problem.dtype])
        columns = problem.batch * problem.out_channels * problem.taps * problem.in_pixels
        depth = problem.in_channels_per_group
        rate = _GPU_GEMM_TF32_FLOPS if problem.allow_tf32 else _GPU_GEMM_FLOPS.get(problem.dtype, 20e12)
        product = 2.0 * columns * depth / (rate * depth / (depth + _GPU_GEMM_HALF_DEPTH))
        seconds = 2 * _GPU_LAUNCH_SECONDS + product + (problem.bytes + 2.0 * columns * element) / _GPU_BYTES
        return max(_GPU_GEMM_HOST_SECONDS, seconds)
    if name == "fused":
        return _fused_on_gpu(problem)
    if name == "depthwise":
        return _GPU_LAUNCH_SECONDS + problem.bytes / _GPU_BYTES  # less than any other: it is preferred wherever it accepts
    adjoint = problem.operator is Operator.CONV
    channels = problem.in_channels_per_group if adjoint else problem.out_channels_per_group
    rate = _GPU_DIRECT_FLOPS * channels / (channels + _GPU_FEW_CHANNELS) * 4.0 / max(4, DTYPE_BYTES[problem.dtype])
    phases = prod(min(stride, kernel) for stride, kernel in zip(problem.stride, problem.kernel_size))
    in_a_row = problem.in_channels_per_group * problem.taps / phases * _GPU_DIRECT_TERM_SECONDS
    work = max(problem.flops / rate, problem.bytes / _GPU_DIRECT_BYTES, in_a_row)
    call = _GPU_DIRECT_CALL_SECONDS
    if problem.operator is Operator.CONV_TRANSPOSE:
        call = min(call, _GPU_DIRECT_HOST_SECONDS + _GPU_DIRECT_TINY_FACTOR * work)
    return _GPU_DIRECT_FACTOR[problem.operator] * (call + work)


def _fused_on_gpu(problem: Problem) -> float:
    """One launch, bound by memory or by the tensor cores."""
    plain = all(dilation == 1 for dilation in problem.dilation) and not any(problem.padding)
    sizes = zip(problem.kernel_size, problem.stride, problem.in_size, problem.out_size)
    equal = plain and all(kernel == stride and size * stride == out for kernel, stride, size, out in sizes)
    channels_last = problem.in_pixels > 1 and problem.x_strides[1] == 1 and problem.in_channels > 1
    if not equal or channels_last or problem.w_strides[1] not in (0, problem.taps):
        return inf
    seconds = max(problem.flops / _GPU_FUSED_FLOPS[problem.dtype], problem.bytes / _GPU_FUSED_BYTES)
    odd = problem.in_pixels % 2 == 1 and DTYPE_BYTES[problem.dtype] == 2
    return 2 * _GPU_LAUNCH_SECONDS + seconds * (_GPU_FUSED_ODD if odd else 1.0)
