// w from the sums of the parts (fused_weight_last.cuh), which are added in a fixed order. What a warp of a product holds of 8
// columns, 16 input channels and 8 output ones of one tap, is a *piece* of 512 bytes; some warps of a block add every so manieth
// part of one. Where output channels are neighbours in w, pieces are stored as they are. Where taps are, a block has 16 input
// channels, some pieces of output channels and some taps, and stores them turned.
#pragma once

#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kWeightPieces = 64;  // of a block, at most
constexpr int kWeightSumThreads = 256, kWeightSumWarps = kWeightSumThreads / 32;
constexpr int kMostWeightPlaces = 704;

struct WeightLastSumJob {
  Divisor row_blocks, channel_blocks, tap_blocks;  // of a group; of pieces as they are, where output channels are neighbours
  Divisor pieces, taps;                            // of a block: along the output channels; taps
  Divisor kernel_w, kernel_h, folded;              // folded: taps along w that lie in the channels
  Divisor width, set_chunks;                       // pieces of a chunk of output channels; chunks of a channel set
  std::int32_t parts, shares, in_channels, out_channels, all_taps;  // of a group
  Divisor set_columns8;                                             // groups of 8 columns of a set
  std::int32_t sets, channel_sets, channel_tiles, row_groups;
  bool tap_order;  // neighbours in w are taps, not output channels
  bool dense;      // and a block has all taps of its channels, which are one run
  bool paired;     // two neighbours are an aligned word
  std::uint32_t all_pieces;
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

// Parts `share`, share + shares, ... of a piece.
UPFOLD_DEVICE float4 add_weight_parts(const WeightLastSumJob& job, const float4* __restrict__ from, std::int32_t share) {
  const std::int64_t from_part = job.part_tiles * (job.row_groups * job.set_columns8.value * 128);
  float4 total = {0, 0, 0, 0};
#pragma unroll 8
  for (std::int32_t part = share; part < job.parts; part += job.shares) {
    const float4 v = from[part * from_part];
    total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
  }
  return total;
}
// Of all shares, by the warp of the first; all threads of a block take part.
UPFOLD_DEVICE void add_weight_shares(const WeightLastSumJob& job, float4 (&shared)[kWeightSumWarps][32], float4& total) {
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  shared[warp][lane] = total;
  __syncthreads();  // all shares are there
  if (warp % job.shares == 0) {
    for (std::int32_t i = 1; i < job.shares; ++i) {
      const float4 v = shared[warp + i][lane];
      total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }
  }
  __syncthreads();  // and may be overwritten
}

UPFOLD_DEVICE std::int64_t weight_offset_of(const WeightLastSumJob& job, std::int32_t group, std::int32_t ic, std::int32_t oc,
                                            std::uint32_t tap) {
  const std::uint32_t kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
  return (std::int64_t(group) * job.in_channels + ic) * job.w_n + oc * job.w_c + tap * job.w_d + kh * job.w_h + kw * job.w_w;
}

template <typename Value>
struct alignas(2 * sizeof(Value)) WeightPair {
  Value v[2];
};

// A run of w, by the lanes of a warp.
template <typename Value>
UPFOLD_DEVICE void store_weight_run(Value* own, const float* sums, std::int32_t count, bool paired, std::int32_t lane) {
  if (paired) {
    for (std::int32_t i = 2 * lane; i < count; i += 64)
      *reinterpret_cast<WeightPair<Value>*>(own + i) = {{Narrow<Value>::from(sums[i]), Narrow<Value>::from(sums[i + 1])}};
  } else {
    for (std::int32_t i = lane; i < count; i += 32) own[i] = Narrow<Value>::from(sums[i]);
  }
}

// Output channels are neighbours: pieces of a row of them follow one another.
template <typename Value>
__global__ void __launch_bounds__(kWeightSumThreads)
    fused_weight_last_rows_kernel(const __grid_constant__ WeightLastSumJob job, const float4* __restrict__ partial,
                                  Value* __restrict__ w) {
  __shared__ float4 shared[kWeightSumWarps][32];
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32, share = warp % job.shares;
  const std::uint32_t piece = blockIdx.x * (kWeightSumWarps / job.shares) + warp / job.shares;
  std::uint32_t group = piece;
  const std::int32_t eight = std::int32_t(take(job.channel_blocks, group)), tap = std::int32_t(take(job.tap_blocks, group));
  const std::int32_t row = std::int32_t(take(job.row_blocks, group));
  const bool exists = piece < job.all_pieces;
  const float4* const from = exists ? partial + weight_piece(job, std::int32_t(group), row, eight, tap) + lane : partial;
  await_previous();  // the sums of all parts
  float4 total = {0, 0, 0, 0};
  if (exists) total = add_weight_parts(job, from, share);
  if (job.shares > 1) add_weight_shares(job, shared, total);
  if (!exists || share != 0) return;
  const std::int32_t ic = row * 16 + lane / 4, oc = eight * 8 + lane % 4 * 2;
  Value* const to = w + weight_offset_of(job, std::int32_t(group), ic, oc, std::uint32_t(tap));
  const WeightPair<Value> pairs[2] = {{{Narrow<Value>::from(total.x), Narrow<Value>::from(total.y)}},
                                      {{Narrow<Value>::from(total.z), Narrow<Value>::from(total.w)}}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (ic + 8 * i >= job.in_channels || oc >= job.out_channels) continue;
    Value* const own = to + 8 * i * job.w_n;
    if (job.paired) {
      *reinterpret_cast<WeightPair<Value>*>(own) = pairs[i];
    } else {
      own[0] = pairs[i].v[0];
      if (oc + 1 < job.out_channels) own[1] = pairs[i].v[1];
    }
  }
}

// Taps are neighbours. kShares: whether warps add the same piece.
template <typename Value, bool kShares>
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
  const std::int32_t taps = std::int32_t(job.taps.value), pieces = std::int32_t(job.pieces.value) * taps;
  const std::int32_t outputs = 8 * pieces, pitch = outputs + 1;
  const std::int32_t shares = kShares ? job.shares : 1, share = warp % shares, together = kWeightSumWarps / shares;
  await_previous();  // the sums of all parts
#pragma unroll(kShares ? 1 : 2)
  for (std::int32_t first = 0; first < pieces; first += together) {
    std::uint32_t eight = std::uint32_t(first + warp / shares);
    const std::int32_t in_taps = std::int32_t(take(job.taps, eight)), tap = first_tap + in_taps;
    const std::int32_t own_eight = first_eight + std::int32_t(eight);
    const bool exists = first + warp / shares < pieces && tap < job.all_taps && own_eight * 8 < job.out_channels;
    float4 total = {0, 0, 0, 0};
    if (exists) {
      const float4* const from = partial + weight_piece(job, std::int32_t(group), row, own_eight, tap) + lane;
      total = add_weight_parts(job, from, share);
    }
    if constexpr (kShares) add_weight_shares(job, shared, total);
    if (share != 0 || !exists) continue;
    float* const own = sums + lane / 4 * pitch + (std::int32_t(eight) * 8 + lane % 4 * 2) * taps + in_taps;
    own[0] = total.x, own[taps] = total.y, own[8 * pitch] = total.z, own[8 * pitch + taps] = total.w;
  }
  __syncthreads();  // all sums are there
  if (job.dense) {
    const std::int32_t left = (job.out_channels - first_eight * 8) * taps, count = left < outputs ? left : outputs;
    for (std::int32_t in_row = warp; in_row < 16; in_row += kWeightSumWarps) {
      const std::int32_t ic = row * 16 + in_row;
      if (ic >= job.in_channels) break;
      Value* const own = w + (std::int64_t(group) * job.in_channels + ic) * job.w_n + first_eight * 8 * job.w_c;
      store_weight_run(own, sums + in_row * pitch, count, job.paired, lane);
    }
    return;
  }
  for (std::int32_t i = std::int32_t(threadIdx.x); i < 16 * outputs; i += kWeightSumThreads) {
    const std::int32_t in_row = i / outputs, output = i - in_row * outputs;
    std::uint32_t channel = std::uint32_t(output);
    const std::uint32_t tap = std::uint32_t(first_tap) + take(job.taps, channel);
    const std::int32_t ic = row * 16 + in_row, oc = first_eight * 8 + std::int32_t(channel);
    if (ic >= job.in_channels || oc >= job.out_channels || std::int32_t(tap) >= job.all_taps) continue;
    w[weight_offset_of(job, std::int32_t(group), ic, oc, tap)] = Narrow<Value>::from(sums[in_row * pitch + output]);
  }
}

}  // namespace upfold::cuda
