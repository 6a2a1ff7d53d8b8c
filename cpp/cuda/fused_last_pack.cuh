// The packing of the weights, and of the source where it does not lie in boxes, ahead of the fused method by boxes of channels.
#pragma once

#include "fused_last.cuh"
#include "fused_last_source.cuh"

namespace upfold::cuda {

// packed[group][column tile][chunk][pair][column][16 bytes], a thread for each vector; neighbouring threads read the taps of one
// channel, which mostly lie together.
struct LastPackJob {
  Divisor pairs, columns, vectors, chunks, column_tiles;
  Divisor channels, kernel_h, kernel_w;  // of the result in a group
  std::uint32_t count;                   // of vectors
  std::int32_t result_channels, source_channels, all_columns;
  // spread: of two vectors one has the even channels, one the odd; by_channel: threads follow channels of the result, not taps
  // exact: of each chunk's channels the large parts, and behind them the small ones
  bool flat, in_order, spread, by_channel, exact;
  std::int64_t w_source, w_result, w_group, w_axis[3];  // from group to group
  std::uint16_t taps[kMostLastPairs];
};
constexpr int kLastPackThreads = 256;

UPFOLD_DEVICE __half narrow_weight(__half v) { return v; }
UPFOLD_DEVICE __nv_bfloat16 narrow_weight(__nv_bfloat16 v) { return v; }
UPFOLD_DEVICE float narrow_weight(float v) { return __uint_as_float(to_tf32(v)); }
// A part of a weight, of values that have two.
template <typename Value>
UPFOLD_DEVICE Value part_of_weight(Value v, bool) {
  return v;
}
UPFOLD_DEVICE float part_of_weight(float v, bool small) { return small ? small_part(v) : large_part(v); }

template <typename Value>
UPFOLD_DEVICE void pack_weight(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed) {
  constexpr int kVector = 16 / int(sizeof(Value));
  const std::uint32_t number = block * kLastPackThreads + threadIdx.x;
  if (number >= job.count) return;
  std::uint32_t rest = number;
  // Neighbouring threads read what lies together in w: the taps of one channel, or of one tap the channels of the result.
  std::int32_t row = job.by_channel ? std::int32_t(take(job.columns, rest)) : 0;
  const std::int32_t pair = std::int32_t(take(job.pairs, rest)), vector = std::int32_t(take(job.vectors, rest));
  if (!job.by_channel) row = std::int32_t(take(job.columns, rest));
  const std::int32_t chunk = std::int32_t(take(job.chunks, rest));
  const std::uint32_t tile = rest;
  const std::int32_t column_tile = std::int32_t(take(job.column_tiles, rest)), vectors = std::int32_t(job.vectors.value);
  const std::int32_t in_tile = job.in_order ? row : channel_of_column<int(sizeof(Value))>(row);
  const std::int32_t column = column_tile * std::int32_t(job.columns.value) + in_tile;
  std::uint32_t tap = job.taps[pair], channel = std::uint32_t(column);
  if (job.flat) {
    tap = channel;
    channel = take(job.channels, tap);
  }
  const std::int32_t kw = std::int32_t(take(job.kernel_w, tap)), kh = std::int32_t(take(job.kernel_h, tap));
  const std::int32_t own = job.exact ? chunk * (vectors / 2) + vector % (vectors / 2) : chunk * vectors + vector;
  const std::int32_t first = own * kVector, step = job.spread ? 2 : 1;
  const bool small = job.exact && vector >= vectors / 2;
  const std::int32_t source = job.spread ? first / (2 * kVector) * (2 * kVector) + vector % 2 : first;
  const Value* const from = w + std::int64_t(rest) * job.w_group + std::int64_t(channel) * job.w_result +
                            std::int64_t(source) * job.w_source + std::int32_t(tap) * job.w_axis[0] + kh * job.w_axis[1] +
                            kw * job.w_axis[2];
  struct alignas(16) {
    Value v[kVector];
  } values;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const bool exists = column < job.all_columns && source + e * step < job.source_channels;
    const Value v = exists ? from[e * step * job.w_source] : Narrow<Value>::from(0.0f);
    values.v[e] = job.exact ? part_of_weight(v, small) : narrow_weight(v);
  }
  const std::int32_t swizzled = vector ^ (vectors == 8 ? row % 8 : row / 2 % 4);
  const std::int64_t to = (std::int64_t(tile) * job.chunks.value + chunk) * job.pairs.value + pair;
  packed[(to * job.columns.value + row) * vectors + swizzled] = *reinterpret_cast<const uint4*>(&values);
}

template <typename Value>
__global__ void __launch_bounds__(kLastPackThreads)
    fused_last_pack_kernel(const __grid_constant__ LastPackJob job, const Value* __restrict__ w, uint4* __restrict__ packed) {
  let_next_begin();
  pack_weight(job, blockIdx.x, w, packed);
}

// Both packings in one launch: blocks from weight_blocks on pack the source, whose elements are as large as Bits.
template <typename Value, typename Bits>
__global__ void __launch_bounds__(kLastPackThreads)
    fused_last_pack_both_kernel(const __grid_constant__ LastPackJob job, const Value* __restrict__ w, uint4* __restrict__ packed,
                                std::uint32_t weight_blocks, const __grid_constant__ LastSourceJob source,
                                const Bits* __restrict__ from, uint4* __restrict__ to) {
  static_assert(kLastPackThreads == kSourceThreads, "of either block");
  let_next_begin();
  if (blockIdx.x < weight_blocks) {
    pack_weight(job, blockIdx.x, w, packed);
  } else {
    pack_source(source, blockIdx.x - weight_blocks, from, to);
  }
}

}  // namespace upfold::cuda
