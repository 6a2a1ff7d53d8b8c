// w from the sums of the parts (fused_weight_last.cuh), which are added in a fixed order. What a warp of a product holds of 8
// columns, 16 input channels and 8 outputs of one tap, is a *piece* of 512 bytes. A block has 16 input channels, some pieces of
// output channels and some taps; it adds their parts, some of its warps every so manieth of one piece, and stores them turned in
// the order in which w lies.
#pragma once

#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kWeightPieces = 64;  // of a block, at most
constexpr int kWeightSumThreads = 256, kWeightSumWarps = kWeightSumThreads / 32;
constexpr int kMostWeightPlaces = 704;

struct WeightLastSumJob {
  Divisor row_blocks, channel_blocks, tap_blocks;  // blocks: of a group
  Divisor pieces, taps, lanes;                     // of a block: along the output channels; taps; warps that add the same piece
  Divisor kernel_w, kernel_h, folded;              // folded: taps along w that lie in the channels
  Divisor width, set_chunks;                       // pieces of a chunk of output channels; chunks of a channel set
  std::int32_t parts, shares, in_channels, out_channels, all_taps;  // of a group
  Divisor set_columns8;                                             // groups of 8 columns of a set
  std::int32_t sets, channel_sets, channel_tiles, row_groups;
  bool tap_order;           // neighbours in w are taps, not output channels
  std::int64_t part_tiles;  // tiles of sums of a part
  std::int64_t w_n, w_c, w_d, w_h, w_w;
  std::uint16_t place[kMostWeightPlaces];  // [tap][chunk of a set]: the first 8 of its columns, of those of all sets
};

// The piece of 16 input channels, 8 output ones and a tap, in vectors from the first part's first.
UPFOLD_DEVICE std::int64_t weight_piece(const WeightLastSumJob& job, std::int32_t group, std::int32_t row, std::int32_t eight,
                                        std::int32_t tap) {
  std::uint32_t outer = std::uint32_t(tap);
  const std::uint32_t in_channels = take(job.folded, outer);  // the tap along w that lies there
  std::uint32_t chunk = in_channels * std::uint32_t(job.out_channels / 8) + std::uint32_t(eight);
  const std::uint32_t in_chunk = take(job.width, chunk), of_set = take(job.set_chunks, chunk);
  std::uint32_t set = job.place[outer * job.set_chunks.value + of_set];
  const std::uint32_t column8 = take(job.set_columns8, set) + in_chunk;
  const std::int32_t row_group = row / 4;
  const std::int64_t channel_tile = std::int64_t(group) * job.channel_tiles + row_group / job.row_groups;
  const std::int64_t tile = (channel_tile * job.channel_sets + chunk) * job.sets + set;
  return ((tile * job.row_groups + row_group % job.row_groups) * job.set_columns8.value + column8) * 128 + row % 4 * 32;
}

template <typename Value>
__global__ void __launch_bounds__(kWeightSumThreads)
    fused_weight_last_sum_kernel(const __grid_constant__ WeightLastSumJob job, const float4* __restrict__ partial,
                                 Value* __restrict__ w) {
  constexpr int kMostOutputs = 8 * kWeightPieces;
  __shared__ float sums[16 * (kMostOutputs + 1)];
  __shared__ float4 shared[kWeightSumWarps][32];
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  std::uint32_t group = blockIdx.x;
  const std::int32_t first_tap = std::int32_t(take(job.tap_blocks, group) * job.taps.value);
  const std::int32_t first_eight = std::int32_t(take(job.channel_blocks, group) * job.pieces.value);
  const std::int32_t row = std::int32_t(take(job.row_blocks, group));
  const std::int32_t pieces = std::int32_t(job.pieces.value * job.taps.value), outputs = 8 * pieces, pitch = outputs + 1;
  const std::int32_t share = warp % job.shares, together = kWeightSumWarps / job.shares;
  const std::int64_t from_part = job.part_tiles * (job.row_groups * job.set_columns8.value * 128);
  await_previous();  // the sums of all parts
  for (std::int32_t first = 0; first < pieces; first += together) {
    std::uint32_t eight = std::uint32_t(first + warp / job.shares);
    const std::int32_t in_taps = std::int32_t(take(job.taps, eight)), tap = first_tap + in_taps;
    const std::int32_t own_eight = first_eight + std::int32_t(eight);
    const bool exists = first + warp / job.shares < pieces && tap < job.all_taps && own_eight * 8 < job.out_channels;
    float4 total = {0, 0, 0, 0};
    if (exists) {
      const float4* const from = partial + weight_piece(job, std::int32_t(group), row, own_eight, tap) + lane;
#pragma unroll 8
      for (std::int32_t part = share; part < job.parts; part += job.shares) {
        const float4 v = from[part * from_part];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
    }
    if (job.shares > 1) {
      shared[warp][lane] = total;
      __syncthreads();  // all shares are there
      if (share == 0) {
        for (std::int32_t i = 1; i < job.shares; ++i) {
          const float4 v = shared[warp + i][lane];
          total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
      }
      __syncthreads();  // and may be overwritten
    }
    if (share != 0 || !exists) continue;
    const std::int32_t channel = std::int32_t(eight) * 8 + lane % 4 * 2, taps = std::int32_t(job.taps.value);
    const std::int32_t at = job.tap_order ? channel * taps + in_taps : in_taps * 8 * std::int32_t(job.pieces.value) + channel;
    const std::int32_t next = job.tap_order ? taps : 1;
    float* const own = sums + lane / 4 * pitch + at;
    own[0] = total.x, own[next] = total.y, own[8 * pitch] = total.z, own[8 * pitch + next] = total.w;
  }
  __syncthreads();  // all sums are there
  for (std::int32_t i = std::int32_t(threadIdx.x); i < 16 * outputs; i += kWeightSumThreads) {
    const std::int32_t in_row = i / outputs, output = i - in_row * outputs;
    std::uint32_t channel = std::uint32_t(output), in_taps;
    if (job.tap_order) {
      in_taps = take(job.taps, channel);
    } else {
      const std::uint32_t channels = 8 * job.pieces.value;
      in_taps = channel / channels, channel %= channels;
    }
    const std::int32_t ic = row * 16 + in_row, oc = first_eight * 8 + std::int32_t(channel);
    std::uint32_t tap = std::uint32_t(first_tap) + in_taps;
    if (ic >= job.in_channels || oc >= job.out_channels || std::int32_t(tap) >= job.all_taps) continue;
    const std::uint32_t kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
    const std::int64_t to = (std::int64_t(group) * job.in_channels + ic) * job.w_n + oc * job.w_c + tap * job.w_d +
                            kh * job.w_h + kw * job.w_w;
    w[to] = Narrow<Value>::from(sums[in_row * pitch + output]);
  }
}

}  // namespace upfold::cuda
