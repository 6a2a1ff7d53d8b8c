// w from the sums of the parts, which are added in a fixed order. The sums have input channels in front, w has taps. A block has
// some channels of some outputs (output channels and taps, in w's contiguous order), and a thread four channels of one output:
// their parts, or a share of them, every so manieth, where there are many. Lanes add the shares of their warp, and those of
// warps are added in ascending order as the block stores them turned, neighbouring outputs by neighbouring lanes.
//
// The gradient of the bias from the sums of rows, where there are any, by blocks behind those: each has a plane's output
// channels.
#pragma once

#include "divide.cuh"
#include "part_sums.cuh"

namespace upfold::cuda {

constexpr int kSumThreads = 256, kSumThreadsLog = 8;
constexpr int kMostSumShares = 6;  // the logarithm: a block then has 16 channels of one output, or 8 of two

struct FusedWeightSumJob {
  Divisor channel_tiles, output_tiles;
  Divisor taps, kernel_w, kernel_h, row_taps, unit_taps;
  std::int32_t tap_units, in_channels, outputs, parts, sum_pitch;  // outputs: channels times taps; of a group
  std::int32_t share_log, channel_log, output_log;  // logarithms: shares of the parts; of a block, 4 * kSumThreads with shares
  std::int64_t group_elements, part_elements;       // of the sums
  std::int64_t w_n, w_c, w_d, w_h, w_w;
  // Of the gradient of the bias: blocks ahead of its own; of a group, planes of 16 channels, and rows of a plane, all its taps;
  // those along w, of which units may have more than there are.
  std::uint32_t weight_blocks;
  std::int32_t row_parts;  // not added up by clusters
  Divisor channel_planes, plane_rows, line_rows;
  std::int32_t out_channels;
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

// A thread adds every so manieth row of its channel, of all parts in turn, with loads of several rows in flight: there may be
// hundreds of parts and few planes. The first threads add what those have.
template <typename Value>
UPFOLD_DEVICE void sum_rows(const FusedWeightSumJob& job, std::uint32_t block, float* sums, const float* __restrict__ rows,
                            Value* __restrict__ bias) {
  constexpr std::int32_t kChannels = 16, kShares = kSumThreads / kChannels, kInFlight = 12;
  const std::int32_t channel = std::int32_t(threadIdx.x) % kChannels, share = std::int32_t(threadIdx.x) / kChannels;
  const std::int32_t plane_rows = std::int32_t(job.plane_rows.value), all = job.row_parts * plane_rows;
  std::uint32_t group = block;
  const std::int32_t plane = std::int32_t(take(job.channel_planes, group)), planes = std::int32_t(job.channel_planes.value);
  const std::int64_t groups = (gridDim.x - job.weight_blocks) / job.channel_planes.value;
  const std::int64_t part_step = groups * planes * plane_rows * kChannels;
  const float* const own = rows + (std::int64_t(group) * planes + plane) * plane_rows * kChannels + channel;
  take_turn();  // the rows of all parts
  float sum = 0.0f;
  for (std::int32_t first = share; first < all; first += kShares * kInFlight) {
    float values[kInFlight];
#pragma unroll
    for (std::int32_t i = 0; i < kInFlight; ++i) {
      std::uint32_t part = std::uint32_t(first + i * kShares);
      const std::uint32_t row = take(job.plane_rows, part);
      std::uint32_t line = row;
      const bool counts = std::int32_t(part) < job.row_parts && take(job.line_rows, line) < job.kernel_w.value;
      values[i] = counts ? own[part * part_step + row * kChannels] : 0.0f;
    }
#pragma unroll
    for (std::int32_t i = 0; i < kInFlight; ++i) sum += values[i];
  }
  sums[share * kChannels + channel] = sum;
  __syncthreads();  // the sums of all shares are there
  const std::int32_t first = plane * kChannels + channel;
  if (share > 0 || first >= job.out_channels) return;
  for (std::int32_t i = 1; i < kShares; ++i) sum += sums[i * kChannels + channel];
  bias[std::int64_t(group) * job.out_channels + first] = Narrow<Value>::from(sum);
}

template <typename Value>
__global__ void __launch_bounds__(kSumThreads, 4)
    fused_weight_sum_kernel(const __grid_constant__ FusedWeightSumJob job, const float* __restrict__ partial,
                            Value* __restrict__ w, const float* __restrict__ rows, Value* __restrict__ bias) {
  __shared__ float sums[4 * kSumThreads / 8 * 9];  // [warp or share][output][channel], rows of at least 8 and an odd pitch
  if (blockIdx.x >= job.weight_blocks) return sum_rows(job, blockIdx.x - job.weight_blocks, sums, rows, bias);
  const std::int32_t thread = std::int32_t(threadIdx.x), channels = 1 << job.channel_log, outputs = 1 << job.output_log;
  const std::int32_t vector_log = kSumThreadsLog - job.share_log, pitch = channels + 1;
  const std::int32_t quad = thread & (channels / 4 - 1), share = thread >> vector_log;
  const std::int32_t own_output = thread >> (job.channel_log - 2) & (outputs - 1);
  std::uint32_t group = blockIdx.x;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, group)) << job.channel_log;
  const std::int32_t first_output = std::int32_t(take(job.output_tiles, group)) << job.output_log;
  const bool exists = first_output + own_output < job.outputs && first_channel + quad * 4 < job.sum_pitch;
  const std::int64_t row = exists ? sum_row(job, std::uint32_t(first_output + own_output)) : 0;
  const float* const own = partial + group * job.group_elements + row * job.sum_pitch + (exists ? first_channel + quad * 4 : 0);
  const float4* from[1] = {reinterpret_cast<const float4*>(own + share * job.part_elements)};
  const std::int32_t most = (job.parts + (1 << job.share_log) - 1) >> job.share_log;  // of a share
  const std::int64_t step = (job.part_elements / 4) << job.share_log;
  float4 total[1] = {};
  take_turn();  // the sums of all parts
  add_parts(total, from, step, most, (most - 1 << job.share_log) + share < job.parts);
  const std::int32_t in_warp = job.share_log > 3 ? job.share_log - 3 : 0, slots = 1 << (job.share_log - in_warp);
  add_lanes(total[0], 1 << vector_log, 32);
  if ((share & ((1 << in_warp) - 1)) == 0) {
    float* const to = sums + ((share >> in_warp << job.output_log) + own_output) * pitch + quad * 4;
    to[0] = total[0].x, to[1] = total[0].y, to[2] = total[0].z, to[3] = total[0].w;
  }
  __syncthreads();  // all sums of the block are there
  const std::int64_t first = std::int64_t(group) * job.in_channels + first_channel;
  for (std::int32_t i = thread; i < channels * outputs; i += kSumThreads) {
    const std::int32_t output = i & (outputs - 1), channel = i >> job.output_log;
    if (first_output + output >= job.outputs || first_channel + channel >= job.in_channels) continue;
    const float sum = add_eight(sums + output * pitch + channel, outputs * pitch, slots);
    w[weight_offset(job, first + channel, std::uint32_t(first_output + output))] = Narrow<Value>::from(sum);
  }
}

}  // namespace upfold::cuda
