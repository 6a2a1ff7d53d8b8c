"""The time that each method is predicted to take: what `dispatch` prefers by."""

from __future__ import annotations

from math import prod

import torch

from . import native
from .algorithms.cuda import planes_seconds
from .algorithms.fused import predicted_seconds as fused_seconds
from .algorithms.fused import vector_channels
from .direct_cost import direct_seconds
from .problem import DTYPE_BYTES, NO_ACTIVATION, Operator, Problem

# For one CPU thread in float32: fitted so that the choice between the methods agrees with what a 2-core AVX-512 machine, and
# of fused the same with AVX2 alone, measured on 50 layers and three operators. They are no rates of that machine; only their
# proportions matter.
_CPU_CALL_SECONDS = {"gemm": 50e-6, "direct": 10e-6, "fused": 10e-6}  # beside the work
_CPU_BYTES = 8e9  # a second, of memory
_CPU_COLUMN_BYTES = 2e9  # a second, of columns written by the product and summed by col2im
_CPU_GEMM_FLOPS = 80e9  # a second, of a deep matrix product
_CPU_GEMM_RESULT_BYTES = 4e9  # a second, of the weight's gradient that the product writes
_CPU_GEMM_HALF_DEPTH = 16.0  # input channels of a group at which it reaches half of that
# Times what is said of the gradient of the weight. By 106 layers products mostly take 0.35 to 0.6 of it, but with less the choice
# among the first 50 is worse; and `fused` takes 1.5 to 2.8 times as long where y has one channel in a group.
_CPU_GEMM_WEIGHT_FACTOR, _CPU_FUSED_SINGLE_FACTOR = 0.85, 2.5
# Of fewer pixels than that, but more than one, a product takes as much longer as so many bytes of the weight a second, however
# few they are (EPYC with AVX-512, 1536 -> 768 channels with k16: forward 96 ms for 2 to 11 pixels, 25 for 12 and 3 for one, the
# gradient of the input 23 to 31, 18 and 3).
_CPU_THIN_PIXELS, _CPU_THIN_BYTES = 12, {Operator.CONV_TRANSPOSE: 1e9, Operator.CONV: 5e9}
_CPU_DIRECT_FLOPS = 95e9  # a second, of the direct kernel on long rows
_CPU_DIRECT_HALF_ROW = 1.0  # input positions of a row at which it reaches half of that
_CPU_PACK_BYTES = 2e9  # a second, of the weight that the direct kernel lays out anew
_CPU_FUSED_FLOPS = 115e9  # a second, of the fused kernel where its vectors are full
# Of a vector. With AVX-512 they are twice as many; but gradients of 21 channels, a vector and a part of one, were faster than by
# `direct` all the same, the forward was not.
_CPU_FUSED_LANES, _CPU_WIDE_LANES = 8, 16
_CPU_FUSED_PACK_BYTES = 16e9
_CPU_FUSED_SUM_BYTES = 12e9  # a second, of the sums that become the weight's gradient
_CPU_WIDEN_BYTES = 1.7e9  # a second, of the copy in float32 that gemm makes of a 16-bit weight

# Fitted to `benchmarks/results/nvidia-h200.json`, so that the choice agrees with it: over the forwards of its 50 layers in
# TF32 and bfloat16 it is 1 % from the best method in geometric mean, and more than 20 % on two. Like those above they are no
# rates: products of 16-bit types, above all, are bound by memory on nearly all of these layers.
_GPU_LAUNCH_SECONDS = 3.35e-6
# What enqueuing a product and its column kernels takes on the host, allocations included: an eager call is never shorter, a
# replayed graph is. The choice stands between the two, nearer to the graph.
_GPU_GEMM_HOST_SECONDS, _GPU_HOST_SHARE = 17e-6, 0.1
_GPU_BYTES = 3.76e12  # a second
# Multiply-adds counted as two operations a second: of a matrix product, by type.
_GPU_GEMM_FLOPS = {torch.float16: 1.31e15, torch.bfloat16: 1.31e15, torch.float32: 55e12, torch.float64: 46e12}
_GPU_GEMM_TF32_FLOPS = 350e12
# Rows and columns of a tile of cuBLAS's products in full float32, and how many an H200 has at once: fewer, or a few more, leave
# much of it idle (nnU-Net 512 -> 512, 96 tiles, took 1.14 times what was said without).
_GPU_PRODUCT_TILE, _GPU_PRODUCTS_AT_ONCE = 128, 132
# Input channels of a group at which the product reaches half of that, in TF32 and else. With the first as the second, and 243e12,
# deep products took 0.6 of what was said, and the choice was 21 % off on one layer (2048 -> 256 on 8 x 6).
_GPU_GEMM_TF32_HALF_DEPTH, _GPU_GEMM_HALF_DEPTH = 120.0, 13.0
# Times as long a forward of 16-bit planes takes beside `fused`, by the choice between the two: of 105 layers (H100).
_GPU_HALF_PLANES_FACTOR = 1.1
# Times as long columns of strides that are no power of two take, and of strides beyond 16 (H100: 1.7 to 2.5 for strides of 3, 5
# and 6, 0.6 to 1.3 for 8 and 16, 1.8 to 2.9 for kernels of 1024 with strides of 256).
_GPU_ODD_STRIDE_FACTOR, _GPU_FAR_STRIDE, _GPU_FAR_FACTOR = 1.9, 16, 2.5
# And of 16-bit maps of an odd number of pixels, whose rows are no whole words (H100: Demucs 48 -> 8 131 us for 77).
_GPU_HALF_ODD_FACTOR = 2.0
_GPU_WINDOW_SECONDS = 5.7e-6  # of laying x out in windows, and the factor of the product that reads them
_GPU_WINDOW_FACTOR = 1.32
# The same of both gradients in TF32, fitted to 85 of them (15 % off in root mean square). Fitted to 266 of both layouts and types
# they are nearer to what products take, and the choice is worse.
_GPU_GRADIENT_LAUNCH_SECONDS = 6.3e-6
_GPU_GRADIENT_BYTES = 3.4e12
_GPU_GRADIENT_TF32_FLOPS = 330e12
_GPU_GRADIENT_HALF_DEPTH = 46.0  # that of the weight sums over pixels
_GPU_GRADIENT_APART_FACTOR = 1.6  # of the columns' time, of a stride above 2 that the kernel equals (DPT, PointPillars)
_GPU_GRADIENT_WINDOW_SECONDS, _GPU_GRADIENT_WINDOW_FACTOR = 5.0e-6, 1.06
# And of both in 16 bits, fitted to 84 contiguous ones, and to 26 pairs that share their columns, above all to those that no
# method leads by far (19 % off in root mean square); by the rates of the forward 2048 -> 256 on 8 x 6 took 1.4 times as long.
_GPU_HALF_GRADIENT_LAUNCH_SECONDS = 4.2e-6
_GPU_HALF_GRADIENT_BYTES, _GPU_HALF_GRADIENT_COLUMN_BYTES = 3.0e12, 3.18e12
_GPU_HALF_GRADIENT_FLOPS = 800e12  # 877 fitted; with less the ways of a backward were chosen better
_GPU_HALF_GRADIENT_HALF_DEPTH = 34.0
_GPU_HALF_GRADIENT_WINDOW_SECONDS, _GPU_HALF_GRADIENT_WINDOW_FACTOR = 12.2e-6, 2.84
_GPU_HALF_GRADIENT_PIXEL_SECONDS = 3.2e-6  # more for maps of one pixel
# Of rows of channels: of the cap, which cuBLAS shares; multiples of bytes that it wants; and times what columns would take, of
# TF32 and of 16 bits (21 and 24 layers).
_GPU_MOST_ROWS, _GPU_ROW_BYTES = 0.75, 8
_GPU_ROWS_FACTOR, _GPU_HALF_ROWS_FACTOR = 0.7, 0.75
# Factors of the columns' time: of maps whose columns' rows are not aligned, which is the product's too, and of a stride above 2
# that the kernel equals. Of small maps samples are joined: parts of a launch, and bytes of an element of x.
_GPU_HALF_GRADIENT_ODD_FACTOR, _GPU_HALF_GRADIENT_APART_FACTOR = 1.67, 3.34
_GPU_SMALL_MAP, _GPU_JOINED_LAUNCHES, _GPU_JOINED_INPUT_BYTES, _GPU_JOINED_WEIGHT_BYTES = 256, 0.39, 4, 4
_GPU_SUMS_BYTES = 4.3e12  # a second, of y, beside a launch
# Of a part of such sums: what two steps took more than their operators apart (H200: 17 and 21 us of 373 and 384 parts).
_GPU_SUMS_PART_SECONDS = 0.045e-6
# More seconds of an element of columns of a forward where channels are innermost: each, and as many times as channels are fewer
# than one.
_GPU_INNERMOST_SECONDS, _GPU_INNERMOST_FEW_SECONDS = 1.6e-12, 24e-12
_GPU_FUSED_FACTOR = {torch.float32: 1.05}  # of its own prediction, which only orders its tiles


def predicted_seconds(name: str, problem: Problem, device: torch.device) -> float:
    """Predict the time of a method in seconds, from the bytes it moves and the products it takes."""
    return _on_cpu(name, problem) if device.type == "cpu" else _on_gpu(name, problem, device)


def _on_cpu(name: str, problem: Problem) -> float:
    """Predict the time of a method on one CPU thread from the bytes it moves and the products it takes.

    gemm multiplies at the rate of a BLAS but writes and reads its columns; direct has no columns, and multiplies slower, on the
    short rows of small maps much slower; fused is as fast on these, and slower where a group's channels fill no vector. Threads
    divide all alike, so that the choice, and with it every bit of the result, does not depend on their number.
    """
    element = max(4, DTYPE_BYTES[problem.dtype])
    seconds = _CPU_CALL_SECONDS[name] + problem.bytes / _CPU_BYTES
    speed = 4.0 / element
    if name == "gemm":
        columns = problem.batch * problem.out_channels * problem.taps * problem.in_pixels
        depth = problem.in_channels_per_group
        rate = _CPU_GEMM_FLOPS * speed * depth / (depth + _CPU_GEMM_HALF_DEPTH)
        if DTYPE_BYTES[problem.dtype] < element:
            seconds += _weight_bytes(problem) / _CPU_WIDEN_BYTES
        if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT:
            seconds += _weight_bytes(problem) / _CPU_GEMM_RESULT_BYTES
        if problem.operator in _CPU_THIN_BYTES and 1 < problem.batch * problem.in_pixels < _CPU_THIN_PIXELS:
            seconds += _weight_bytes(problem) / _CPU_THIN_BYTES[problem.operator]
        seconds += 2.0 * columns * depth / rate + 2.0 * columns * element / _CPU_COLUMN_BYTES
        return seconds * (_CPU_GEMM_WEIGHT_FACTOR if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT else 1.0)
    if name == "fused":
        channels = vector_channels(problem)
        vector = _vector_lanes(problem, channels)
        lanes = -(-channels // vector) * vector
        moved = _CPU_FUSED_SUM_BYTES if problem.operator is Operator.CONV_TRANSPOSE_WEIGHT else _CPU_FUSED_PACK_BYTES
        seconds += _weight_bytes(problem) / moved + problem.flops * lanes / channels / _CPU_FUSED_FLOPS
        single = problem.operator is Operator.CONV_TRANSPOSE_WEIGHT and problem.out_channels_per_group == 1
        return seconds * (_CPU_FUSED_SINGLE_FACTOR if single else 1.0)
    row = problem.in_size[2]
    rate = _CPU_DIRECT_FLOPS * speed * row / (row + _CPU_DIRECT_HALF_ROW)
    return seconds + _weight_bytes(problem) / _CPU_PACK_BYTES + problem.flops / rate


def _vector_lanes(problem: Problem, channels: int) -> int:
    """What `fused` fills a multiple of on a CPU."""
    if native.cpu().instruction_set() != "avx512":
        return _CPU_FUSED_LANES
    wide = problem.operator is Operator.CONV_TRANSPOSE or channels < _CPU_WIDE_LANES
    return _CPU_WIDE_LANES if wide else _CPU_FUSED_LANES


def _weight_bytes(problem: Problem) -> float:
    """Bytes of the weight in the type that it is multiplied in."""
    return problem.in_channels * problem.out_channels_per_group * problem.taps * max(4, DTYPE_BYTES[problem.dtype])


def _on_gpu(name: str, problem: Problem, device: torch.device) -> float:
    if name == "gemm":
        seconds = _gemm_on_gpu(problem)
        if problem.operator is Operator.CONV_TRANSPOSE and DTYPE_BYTES[problem.dtype] == 2 and problem.y_strides[1] != 1:
            seconds *= _GPU_HALF_PLANES_FACTOR
        return seconds + _GPU_HOST_SHARE * max(0.0, _GPU_GEMM_HOST_SECONDS - seconds)
    if name == "fused":
        return fused_seconds(problem, device) * _GPU_FUSED_FACTOR.get(problem.dtype, 1.0)
    if name == "depthwise":
        return _GPU_LAUNCH_SECONDS + problem.bytes / _GPU_BYTES  # less than any other: it is preferred wherever it accepts
    return direct_seconds(problem)


def _gemm_on_gpu(problem: Problem) -> float:
    """The larger of memory and arithmetic for each launch: columns are written and read once, those that are summed in float32.

    Where a kernel spans several strides, the product may sum the taps of its windows, and leave as many times fewer columns.
    """
    if problem.operator is not Operator.CONV_TRANSPOSE:
        return _gemm_gradient_on_gpu(problem)
    size = DTYPE_BYTES[problem.dtype]
    element = max(4, size)
    columns = problem.batch * problem.out_channels * problem.taps * problem.in_pixels
    depth = problem.in_channels_per_group
    rate = _GPU_GEMM_TF32_FLOPS if problem.allow_tf32 else _GPU_GEMM_FLOPS.get(problem.dtype, 20e12)
    half_depth = _GPU_GEMM_TF32_HALF_DEPTH if problem.allow_tf32 else _GPU_GEMM_HALF_DEPTH
    product = 2.0 * columns * depth / (rate * depth / (depth + half_depth))
    if problem.in_full_float32:
        product *= _idle_share(problem)
    memory = problem.bytes / _GPU_BYTES
    more = _innermost_seconds(problem, columns)
    if by_rows(problem, columns):
        return _GPU_LAUNCH_SECONDS + max(product, memory)
    if _has_one_tap(problem) and more > 0:  # x is turned, and its columns turned back
        return 3 * _GPU_LAUNCH_SECONDS + product + 3.0 * memory
    if _has_one_tap(problem) or (problem.in_pixels == 1 and not any(problem.padding)):  # its columns are y
        return _GPU_LAUNCH_SECONDS + max(product, memory) + _turning_seconds(problem)
    moved = _scattering(problem.stride[2]) * 2.0 * columns * element / _GPU_BYTES
    moved *= _GPU_HALF_ODD_FACTOR if size == 2 and problem.in_pixels > 1 and problem.in_pixels % 2 == 1 else 1.0
    seconds = 2 * _GPU_LAUNCH_SECONDS + product + memory + moved + more
    seconds += _turning_seconds(problem)
    if problem.x_strides[1] == 1 and problem.in_pixels > 1 and problem.in_channels * size % 16 != 0:
        seconds += _GPU_LAUNCH_SECONDS  # of a copy of x, whose channels are no rows that tensor cores read
    spans = problem.kernel_size[2] // problem.stride[2]
    if problem.groups > 1 or problem.dilation[2] > 1 or spans < 2:
        return seconds
    windows = 2.0 * problem.batch * problem.in_channels * problem.in_pixels * size * spans
    windowed = memory + moved / spans + windows / _GPU_BYTES + more
    return min(seconds, 2 * _GPU_LAUNCH_SECONDS + _GPU_WINDOW_SECONDS + _GPU_WINDOW_FACTOR * product + windowed)


def _scattering(stride: int) -> float:
    """How many times as long columns of a forward take to be summed, by the stride of the width."""
    if stride > _GPU_FAR_STRIDE:
        return _GPU_FAR_FACTOR
    return 1.0 if stride & (stride - 1) == 0 else _GPU_ODD_STRIDE_FACTOR


def _idle_share(problem: Problem) -> float:
    """Turns of tiles of a product in full float32 over those that it would take if its last one were full too."""
    rows, pixels = problem.out_channels_per_group * problem.taps, problem.batch * problem.in_pixels
    tiles = problem.groups * -(-rows // _GPU_PRODUCT_TILE) * -(-pixels // _GPU_PRODUCT_TILE)
    if 2 * tiles < _GPU_PRODUCTS_AT_ONCE:  # smaller ones then
        return 1.0
    return -(-tiles // _GPU_PRODUCTS_AT_ONCE) * _GPU_PRODUCTS_AT_ONCE / tiles


def _turning_seconds(problem: Problem) -> float:
    """What a weight in channels_last costs that is made a matrix first: a launch, and its bytes read and written.

    Computed from those alone, not fitted; of a forward it is a weight of groups alone, since another is a matrix as it lies.
    """
    forward = problem.operator is Operator.CONV_TRANSPOSE
    if problem.w_strides[1] != 1 or problem.taps == 1 or problem.out_channels_per_group == 1 or (forward and problem.groups == 1):
        return 0.0
    elements = problem.in_channels * problem.out_channels_per_group * problem.taps
    rate = _GPU_BYTES if forward else _GPU_GRADIENT_BYTES
    return _GPU_LAUNCH_SECONDS + 2.0 * elements * DTYPE_BYTES[problem.dtype] / rate


def _innermost_seconds(problem: Problem, columns: int) -> float:
    """What columns of a forward, or of a gradient its copy of y, cost more where the channels of y are innermost."""
    outputs = prod(problem.out_size)
    if problem.y_strides[1] != 1 or problem.out_channels == 1 or outputs == 1:
        return 0.0
    if problem.operator is not Operator.CONV_TRANSPOSE:
        bytes_of_y = problem.batch * problem.out_channels * outputs * DTYPE_BYTES[problem.dtype]
        return planes_seconds(bytes_of_y)
    if problem.in_pixels == 1:
        return 0.0
    return columns * (_GPU_INNERMOST_SECONDS + _GPU_INNERMOST_FEW_SECONDS / problem.out_channels)


def _has_one_tap(problem: Problem) -> bool:
    return problem.taps == 1 and all(stride == 1 for stride in problem.stride)


def _gemm_gradient_on_gpu(problem: Problem, over_windows: bool = True) -> float:
    """The columns are written, and then read by the product or multiplied, whichever takes longer.

    Where a kernel spans several strides, the product may run over windows, as in the forward, if it has a matrix of its own.
    """
    weight, size = problem.operator is Operator.CONV_TRANSPOSE_WEIGHT, DTYPE_BYTES[problem.dtype]
    columns = problem.batch * problem.out_channels * problem.taps * problem.in_pixels
    depth = problem.in_channels_per_group
    launch, joined = _GPU_GRADIENT_LAUNCH_SECONDS, 0.0
    if size == 2:
        launch, rate, half_depth = _GPU_HALF_GRADIENT_LAUNCH_SECONDS, _GPU_HALF_GRADIENT_FLOPS, _GPU_HALF_GRADIENT_HALF_DEPTH
        of_bytes = _GPU_HALF_GRADIENT_BYTES
        window, window_factor = _GPU_HALF_GRADIENT_WINDOW_SECONDS, _GPU_HALF_GRADIENT_WINDOW_FACTOR
        if problem.batch > 1 and problem.in_pixels < _GPU_SMALL_MAP:
            copied = problem.batch * problem.in_channels * problem.in_pixels
            copied *= _GPU_JOINED_WEIGHT_BYTES if weight else _GPU_JOINED_INPUT_BYTES
            joined = _GPU_JOINED_LAUNCHES * launch + copied / of_bytes
        if problem.in_pixels == 1:
            joined += _GPU_HALF_GRADIENT_PIXEL_SECONDS
    else:
        rate = _GPU_GRADIENT_TF32_FLOPS if problem.allow_tf32 else _GPU_GEMM_FLOPS.get(problem.dtype, 20e12)
        half_depth, of_bytes = _GPU_GRADIENT_HALF_DEPTH, _GPU_GRADIENT_BYTES
        window, window_factor = _GPU_GRADIENT_WINDOW_SECONDS, _GPU_GRADIENT_WINDOW_FACTOR
        if problem.batch > 1 and 1 < problem.in_pixels < _GPU_SMALL_MAP:
            joined = 2.0 * size * problem.batch * problem.in_channels * problem.in_pixels / of_bytes
            joined += 0.0 if weight else _GPU_JOINED_LAUNCHES * launch
    if weight and problem.batch > 1 and problem.in_pixels >= _GPU_SMALL_MAP:
        joined = launch + _partial_bytes(problem) / of_bytes
    product = 2.0 * columns * (depth if weight else depth + half_depth) / rate
    memory, moved = problem.bytes / of_bytes, _columns_seconds(problem)
    more = _innermost_seconds(problem, columns)
    in_order = by_rows(problem, columns)
    if _has_one_tap(problem):
        in_rows = _GPU_HALF_ROWS_FACTOR if in_order and size == 2 else 1.0
        return in_rows * (launch + max(product, memory)) + (0.0 if in_order else more)
    if in_order:
        moved = columns * size / (_GPU_HALF_GRADIENT_COLUMN_BYTES if size == 2 else of_bytes)
        in_rows = _GPU_HALF_ROWS_FACTOR if size == 2 else _GPU_ROWS_FACTOR if problem.allow_tf32 else 1.0
        return in_rows * (2 * launch + memory + moved + max(product, moved))
    launches = 2 * launch + memory + joined + more + (0.0 if weight else _turning_seconds(problem))
    if _has_odd_rows(problem):
        product *= _GPU_HALF_GRADIENT_ODD_FACTOR
    seconds = launches + moved + max(product, moved)
    kernel, stride = problem.kernel_size[2], problem.stride[2]
    spans = kernel // stride
    if not over_windows or weight or problem.groups > 1 or problem.dilation[2] > 1 or spans < 2 or kernel % stride:
        return seconds
    if size == 2 and problem.in_pixels <= _GPU_SMALL_MAP:  # cpp/cuda/gemm_window.cpp
        return seconds
    windows = 2.0 * problem.batch * problem.in_channels * problem.in_pixels * size * spans / of_bytes
    in_windows = windows + moved / spans + max(window_factor * product, moved / spans)
    return min(seconds, launches + window + in_windows)


def by_rows(problem: Problem, columns: int) -> bool:
    """Whether `gemm` multiplies rows of channels, where nothing is turned (cpp/cuda/gemm_ways.cpp).

    So it does for gradients of the input, and where there is one tap and nothing is added.
    """
    adds = problem.has_bias or problem.activation != NO_ACTIVATION
    plain = _has_one_tap(problem) and not any(problem.padding) and not adds
    if not (plain or problem.operator is Operator.CONV) or problem.groups > 1 or problem.x_strides[1] != 1:
        return False
    innermost = problem.out_channels == 1 or (problem.y_strides[1] == 1 and (problem.taps == 1 or problem.w_strides[1] == 1))
    rows = (problem.in_channels, problem.out_channels * problem.taps)
    aligned = all(row * DTYPE_BYTES[problem.dtype] % _GPU_ROW_BYTES == 0 for row in rows)
    return innermost and aligned and columns * DTYPE_BYTES[problem.dtype] < _GPU_MOST_ROWS * problem.workspace_cap


def _partial_bytes(problem: Problem) -> float:
    """What is written and read of sums of samples, which columns are copied for where the weight is the larger."""
    rows = problem.out_channels_per_group * problem.taps
    if problem.in_pixels < 2 * rows:
        return 0.0
    return 2.0 * 4.0 * problem.batch * problem.in_channels * rows


def _has_odd_rows(problem: Problem) -> bool:
    """Whether rows of 16-bit columns are not 16 bytes aligned."""
    return DTYPE_BYTES[problem.dtype] == 2 and problem.in_pixels % 8 != 0


def _columns_seconds(problem: Problem) -> float:
    """What the columns of a gradient take to be written, or to be read."""
    columns = problem.batch * problem.out_channels * problem.taps * problem.in_pixels * DTYPE_BYTES[problem.dtype]
    if DTYPE_BYTES[problem.dtype] != 2:
        apart = problem.kernel_size[2] == problem.stride[2] > 2
        return columns / _GPU_GRADIENT_BYTES * (_GPU_GRADIENT_APART_FACTOR if apart else 1.0)
    seconds = columns / _GPU_HALF_GRADIENT_COLUMN_BYTES
    if _has_odd_rows(problem):
        seconds *= _GPU_HALF_GRADIENT_ODD_FACTOR
    if problem.kernel_size[2] == problem.stride[2] > 2:
        seconds *= _GPU_HALF_GRADIENT_APART_FACTOR
    return seconds


def shared_columns_seconds(problem: Problem) -> float:
    """What both gradients by products from one matrix of columns save on a GPU: a launch, and the bytes of columns written.

    Args:
        problem: the adjoint in x. Its columns are of all taps then, which may take longer than those over windows.
    """
    launch = _GPU_HALF_GRADIENT_LAUNCH_SECONDS if DTYPE_BYTES[problem.dtype] == 2 else _GPU_GRADIENT_LAUNCH_SECONDS
    windows = _gemm_gradient_on_gpu(problem, over_windows=False) - _gemm_gradient_on_gpu(problem)
    return launch + _columns_seconds(problem) - windows


def channel_sums_seconds(problem: Problem) -> float:
    """What the sums over y's channels take on a GPU in a pass of their own: 34 us of 134 MB (H200)."""
    bytes_of_y = problem.batch * problem.out_channels * problem.out_pixels * DTYPE_BYTES[problem.dtype]
    return _GPU_LAUNCH_SECONDS + bytes_of_y / _GPU_SUMS_BYTES


def added_sums_seconds(parts: int) -> float:
    """What sums over y's channels that are made in parts, in the pass of another operator, take to be added up on a GPU."""
    return _GPU_SUMS_PART_SECONDS * parts
