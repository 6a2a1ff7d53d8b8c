// The packing of the weights, and of the source where it does not lie in boxes, ahead of the fused method by boxes of channels.
#pragma once

#include "fused_last_pack_job.cuh"
#include "fused_last_pack_turned.cuh"

namespace upfold::cuda {

// Of threads that take a vector each.
template <typename Value>
UPFOLD_DEVICE void pack_vectors(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed) {
  constexpr int kVector = 16 / int(sizeof(Value));
  const std::uint32_t number = block * kLastPackThreads + threadIdx.x;
  if (number >= job.count) return;
  std::uint32_t rest = number;
  const bool whole = job.way == LastPacking::kByVector;
  std::int32_t vector = whole ? std::int32_t(take(job.vectors, rest)) : 0;
  // Neighbouring threads read what lies together in w: the taps of one channel, or of one tap the channels of the result.
  std::int32_t row = job.by_channel ? std::int32_t(take(job.columns, rest)) : 0;
  const std::int32_t pair = std::int32_t(take(job.pairs, rest));
  if (!whole) vector = std::int32_t(take(job.vectors, rest));
  if (!job.by_channel) row = std::int32_t(take(job.columns, rest));
  const std::int32_t chunk = std::int32_t(take(job.chunks, rest));
  const std::uint32_t tile = rest;
  const std::int32_t column_tile = std::int32_t(take(job.column_tiles, rest)), vectors = std::int32_t(job.vectors.value);
  const std::int32_t in_tile = job.in_order ? row : channel_of_column<int(sizeof(Value))>(row);
  const std::int32_t column = column_tile * std::int32_t(job.columns.value) + in_tile;
  std::uint32_t tap = job.taps[pair], channel = std::uint32_t(column);
  bool has_column = column < job.all_columns;
  if (job.flat) {
    tap = channel;
    channel = take(job.channels, tap);
  }
  if (job.runs.step.value > 0) {
    const LastRunColumn own = last_run_column(job.runs, row);
    const std::int32_t left = job.result_channels - column_tile * job.runs.channels;
    channel = std::uint32_t(column_tile * job.runs.channels + own.channel);
    has_column = own.channel < min(left, job.runs.channels);
    tap += std::uint32_t(own.phase);
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
  if (whole) {
    const bool exists = has_column && source < job.source_channels;
    *reinterpret_cast<uint4*>(&values) = exists ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const bool exists = has_column && source + e * step < job.source_channels;
      values.v[e] = exists ? from[e * step * job.w_source] : Narrow<Value>::from(0.0f);
    }
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e) values.v[e] = job.exact ? part_of_weight(values.v[e], small) : narrow_weight(values.v[e]);
  const std::int32_t swizzled = vector ^ (vectors == 8 ? row % 8 : row / 2 % 4);
  const std::int64_t to = (std::int64_t(tile) * job.chunks.value + chunk) * job.pairs.value + pair;
  packed[(to * job.columns.value + row) * vectors + swizzled] = *reinterpret_cast<const uint4*>(&values);
}

// kTurned: through shared memory, of which the others have none.
template <typename Value, bool kTurned>
UPFOLD_DEVICE void pack_weight(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed, uint4* memory) {
  if constexpr (!kTurned) {
    pack_vectors(job, block, w, packed);
  } else if (job.way == LastPacking::kByResult) {
    pack_by_result(job, block, w, packed, memory);
  } else {
    pack_by_reduction(job, block, w, packed, memory);
  }
}

template <typename Value, bool kTurned>
__global__ void __launch_bounds__(kLastPackThreads)
    fused_last_pack_kernel(const __grid_constant__ LastPackJob job, const Value* __restrict__ w, uint4* __restrict__ packed) {
  take_turn();
  if constexpr (kTurned) {
    __shared__ uint4 memory[kLastPackVectors];
    pack_weight<Value, true>(job, blockIdx.x, w, packed, memory);
  } else {
    pack_weight<Value, false>(job, blockIdx.x, w, packed, nullptr);
  }
}

// Both packings in one launch: blocks from weight_blocks on pack the source, whose elements are as large as Bits.
template <typename Value, typename Bits, bool kTurned>
__global__ void __launch_bounds__(kLastPackThreads)
    fused_last_pack_both_kernel(const __grid_constant__ LastPackJob job, const Value* __restrict__ w, uint4* __restrict__ packed,
                                std::uint32_t weight_blocks, const __grid_constant__ LastSourceJob source,
                                const Bits* __restrict__ from, uint4* __restrict__ to) {
  static_assert(kLastPackThreads == kSourceThreads && kLastPackVectors >= kSourceVectors, "of either block");
  __shared__ uint4 memory[kTurned ? kLastPackVectors : kSourceVectors];
  take_turn();
  if (blockIdx.x < weight_blocks) {
    pack_weight<Value, kTurned>(job, blockIdx.x, w, packed, memory);
  } else {
    pack_source(source, blockIdx.x - weight_blocks, from, to, memory);
  }
}

}  // namespace upfold::cuda
