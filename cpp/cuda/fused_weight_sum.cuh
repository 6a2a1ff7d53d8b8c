// w from the sums of the parts, which are added in a fixed order. The sums have input channels in front, w has taps: a warp reads
// 32 neighbouring channels of 8 outputs (output channels and taps, in w's contiguous order), and the block stores them turned,
// neighbouring outputs by neighbouring lanes. Where there are many parts, the warps of a block take every eighth one of the same
// outputs, and their sums are added in ascending order.
#pragma once

#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kSumThreads = 256, kSumWarps = kSumThreads / 32, kSumOutputs = 8;

struct FusedWeightSumJob {
  Divisor channel_tiles, output_tiles;
  Divisor taps, kernel_w, kernel_h, row_taps, unit_taps;
  std::int32_t tap_units, in_channels, outputs, parts, sum_pitch;  // outputs: channels times taps; of a group
  std::int64_t group_elements, part_elements;                      // of the sums
  std::int64_t w_n, w_c, w_d, w_h, w_w;
};

// The row of an output's sums: its plane, unit, tap in the unit, channel in the plane.
UPFOLD_DEVICE std::int64_t sum_row(const FusedWeightSumJob& job, std::uint32_t output) {
  constexpr std::uint32_t kPlane = 16;
  std::uint32_t row_tap = take(job.taps, output), channel = output, unit = take(job.kernel_w, row_tap);
  const std::uint32_t tap = take(job.unit_taps, unit);
  const std::uint32_t plane = channel / kPlane * job.row_taps.value + row_tap;
  return std::int64_t((plane * std::uint32_t(job.tap_units) + unit) * job.unit_taps.value + tap) * kPlane + channel % kPlane;
}

UPFOLD_DEVICE std::int64_t weight_offset(const FusedWeightSumJob& job, std::int64_t in_channel, std::uint32_t output) {
  std::uint32_t tap = take(job.taps, output);
  const std::uint32_t kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
  return in_channel * job.w_n + output * job.w_c + tap * job.w_d + kh * job.w_h + kw * job.w_w;
}

template <typename Value, bool kShares>
__global__ void __launch_bounds__(kSumThreads) fused_weight_sum_kernel(const __grid_constant__ FusedWeightSumJob job,
                                                                       const float* __restrict__ partial, Value* __restrict__ w) {
  __shared__ float sums[kSumWarps][kSumOutputs][33];
  constexpr std::int32_t kBlockOutputs = kShares ? kSumOutputs : kSumOutputs * kSumWarps;
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  std::uint32_t group = blockIdx.x;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, group)) * 32;
  const std::int32_t first_output = std::int32_t(take(job.output_tiles, group)) * kBlockOutputs;
  const std::int32_t own_first = kShares ? first_output : first_output + warp * kSumOutputs;
  const float* from[kSumOutputs];
  float total[kSumOutputs] = {};
#pragma unroll
  for (int i = 0; i < kSumOutputs; ++i) {
    const std::int32_t output = own_first + i < job.outputs ? own_first + i : job.outputs - 1;
    const std::int32_t channel = first_channel + lane < job.sum_pitch ? first_channel + lane : 0;
    from[i] = partial + group * job.group_elements + sum_row(job, std::uint32_t(output)) * job.sum_pitch + channel;
  }
  await_previous();  // the sums of all parts
#pragma unroll 2
  for (std::int32_t part = kShares ? warp : 0; part < job.parts; part += kShares ? kSumWarps : 1) {
#pragma unroll
    for (int i = 0; i < kSumOutputs; ++i) total[i] += from[i][part * job.part_elements];
  }
#pragma unroll
  for (int i = 0; i < kSumOutputs; ++i) sums[warp][i][lane] = total[i];
  __syncthreads();  // all sums of the block are there
  const std::int32_t output = std::int32_t(threadIdx.x) % kBlockOutputs;
  if (first_output + output >= job.outputs) return;
  const std::int64_t first = std::int64_t(group) * job.in_channels + first_channel;
  for (std::int32_t channel = std::int32_t(threadIdx.x) / kBlockOutputs; channel < 32; channel += kSumThreads / kBlockOutputs) {
    if (first_channel + channel >= job.in_channels) return;
    float sum = sums[kShares ? 0 : output / kSumOutputs][output % kSumOutputs][channel];
    if constexpr (kShares) {
#pragma unroll
      for (int share = 1; share < kSumWarps; ++share) sum += sums[share][output][channel];
    }
    w[weight_offset(job, first + channel, std::uint32_t(first_output + output))] = Narrow<Value>::from(sum);
  }
}

}  // namespace upfold::cuda
