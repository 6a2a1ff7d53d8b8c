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
  bool flat, turned, by_channel;                        // by_channel: threads follow channels of the result, not taps
  std::int64_t w_source, w_result, w_group, w_axis[3];  // from group to group
  // Whether blocks of 8 columns and a chunk go through shared memory, and then whether w is read in whole vectors; taps of a
  // column, of two and of eight, vectors of those of eight, and eights of a tile.
  bool tiled, lines;
  Divisor kernel, two, eight, eight_vectors, eights;
  std::uint16_t taps[kMostLastPairs];
};
constexpr int kLastPackThreads = 256;

UPFOLD_DEVICE __half narrow_weight(__half v) { return v; }
UPFOLD_DEVICE __nv_bfloat16 narrow_weight(__nv_bfloat16 v) { return v; }
UPFOLD_DEVICE float narrow_weight(float v) { return __uint_as_float(to_tf32(v)); }

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
  const std::int32_t in_tile = job.turned ? row : channel_of_column<int(sizeof(Value))>(row);
  const std::int32_t column = column_tile * std::int32_t(job.columns.value) + in_tile;
  std::uint32_t tap = job.taps[pair], channel = std::uint32_t(column);
  if (job.flat) {
    tap = channel;
    channel = take(job.channels, tap);
  }
  const std::int32_t kw = std::int32_t(take(job.kernel_w, tap)), kh = std::int32_t(take(job.kernel_h, tap));
  const std::int32_t source = (chunk * vectors + vector) * kVector;
  const Value* const from = w + std::int64_t(rest) * job.w_group + std::int64_t(channel) * job.w_result +
                            std::int64_t(source) * job.w_source + std::int32_t(tap) * job.w_axis[0] + kh * job.w_axis[1] +
                            kw * job.w_axis[2];
  struct alignas(16) {
    Value v[kVector];
  } values;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const bool exists = column < job.all_columns && source + e < job.source_channels;
    values.v[e] = exists ? narrow_weight(from[e * job.w_source]) : Narrow<Value>::from(0.0f);
  }
  const std::int32_t swizzled = vector ^ (vectors == 8 ? row % 8 : row / 2 % 4);
  const std::int64_t to = (std::int64_t(tile) * job.chunks.value + chunk) * job.pairs.value + pair;
  packed[(to * job.columns.value + row) * vectors + swizzled] = *reinterpret_cast<const uint4*>(&values);
}

// Where the taps of a channel and the channels of the result lie together, up to kMostTiledTaps taps: a block reads all taps of
// eight columns in a chunk's channels, pieces of lines of w, and writes for each tap the vectors of those columns, which lie
// together too. values[column * taps + tap][channel]; every eighth row is one word further, so that the lanes that store a
// vector each meet different banks.
constexpr int kMostTiledTaps = 16, kTiledPitch = 33;  // words of a row
constexpr int kTiledBatch = 4;                        // vectors that a thread waits for at once
struct LastTiledWeights {
  std::uint32_t words[8 * kMostTiledTaps * kTiledPitch + kMostTiledTaps];
};
UPFOLD_DEVICE std::uint32_t tiled_row(std::uint32_t place) { return place * kTiledPitch + place / 8; }

template <typename Value>
struct LastTiledReader {
  static constexpr std::int32_t kVector = 16 / int(sizeof(Value));
  struct alignas(16) Values {
    Value v[kVector];
  };
  const LastPackJob& job;
  const Value* w;                  // of the first column and channel of the block
  std::int32_t columns, channels;  // that exist from there on

  // The column of w, counted from the first of the tile, of row `row` of the tile.
  __device__ __forceinline__ std::int32_t column_of(std::int32_t row) const {
    return job.turned ? row : channel_of_column<int(sizeof(Value))>(row);
  }
  // Of one channel what begins at `place` of eight columns. Rows 2i and 2i + 1 are neighbours in w.
  __device__ __forceinline__ Values read(std::int32_t first_row, std::uint32_t place, std::int32_t channel) const {
    Values values;
    if (job.lines) {
      std::uint32_t two = place;
      const std::uint32_t in_two = take(job.two, two);
      const std::int32_t column = column_of(first_row + 2 * std::int32_t(two));
      const bool exists = column < columns && channel < channels;
      uint4 bits = {0, 0, 0, 0};
      if (exists)
        bits = __ldg(reinterpret_cast<const uint4*>(w + std::int64_t(channel) * job.w_source +
                                                    std::int64_t(column) * job.w_result + in_two));
      values = *reinterpret_cast<const Values*>(&bits);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        std::uint32_t row = place + e;
        const std::uint32_t tap = take(job.kernel, row);
        const std::int32_t column = column_of(first_row + std::int32_t(row));
        const bool exists = column < columns && channel < channels;
        values.v[e] = exists ? w[std::int64_t(channel) * job.w_source + std::int64_t(column) * job.w_result + tap]
                             : Narrow<Value>::from(0.0f);
      }
    }
    return values;
  }
};

template <typename Value>
UPFOLD_DEVICE void pack_weight_tile(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed,
                                    LastTiledWeights& tile) {
  using Reader = LastTiledReader<Value>;
  constexpr std::int32_t kVector = Reader::kVector;
  Value* const values = reinterpret_cast<Value*>(tile.words);
  const std::int32_t vectors = std::int32_t(job.vectors.value), channels = vectors * kVector;
  std::uint32_t rest = block;
  const std::int32_t first_row = std::int32_t(take(job.eights, rest)) * 8, chunk = std::int32_t(take(job.chunks, rest));
  const std::uint32_t tile_number = rest;
  const std::int32_t first_column = std::int32_t(take(job.column_tiles, rest)) * std::int32_t(job.columns.value);
  const Reader reader{job,
                      w + std::int64_t(rest) * job.w_group + std::int64_t(first_column) * job.w_result +
                          std::int64_t(chunk) * channels * job.w_source,
                      job.all_columns - first_column, job.source_channels - chunk * channels};
  const std::uint32_t all = job.eight.value / kVector * std::uint32_t(channels);
  for (std::uint32_t first = threadIdx.x; first < all; first += kTiledBatch * kLastPackThreads) {
    typename Reader::Values held[kTiledBatch];
    std::uint32_t place[kTiledBatch], channel[kTiledBatch];
#pragma unroll
    for (int b = 0; b < kTiledBatch; ++b) {
      channel[b] = first + b * kLastPackThreads;
      place[b] = take(job.eight_vectors, channel[b]) * kVector;
      if (channel[b] < std::uint32_t(channels)) held[b] = reader.read(first_row, place[b], std::int32_t(channel[b]));
    }
#pragma unroll
    for (int b = 0; b < kTiledBatch; ++b) {
      if (channel[b] >= std::uint32_t(channels)) continue;
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        values[tiled_row(place[b] + e) * (4 / int(sizeof(Value))) + channel[b]] = narrow_weight(held[b].v[e]);
    }
  }
  __syncthreads();  // all channels are there
  const std::int64_t first = (std::int64_t(tile_number) * job.chunks.value + chunk) * job.pairs.value;
  for (std::uint32_t i = threadIdx.x; i < job.pairs.value * 8 * std::uint32_t(vectors); i += kLastPackThreads) {
    std::uint32_t pair = i;
    const std::int32_t vector = std::int32_t(take(job.vectors, pair)), of_row = std::int32_t(pair % 8);
    pair /= 8;
    const std::uint32_t* const own =
        tile.words + tiled_row(std::uint32_t(of_row) * job.kernel.value + job.taps[pair]) + vector * 4;
    const std::int32_t row = first_row + of_row, swizzled = vector ^ (vectors == 8 ? row % 8 : row / 2 % 4);
    packed[((first + pair) * job.columns.value + row) * vectors + swizzled] = {own[0], own[1], own[2], own[3]};
  }
}

template <typename Value>
UPFOLD_DEVICE void pack_weights(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed) {
  __shared__ LastTiledWeights tile;
  job.tiled ? pack_weight_tile(job, block, w, packed, tile) : pack_weight(job, block, w, packed);
}

template <typename Value>
__global__ void __launch_bounds__(kLastPackThreads)
    fused_last_pack_kernel(const __grid_constant__ LastPackJob job, const Value* __restrict__ w, uint4* __restrict__ packed) {
  let_next_begin();
  pack_weights(job, blockIdx.x, w, packed);
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
    pack_weights(job, blockIdx.x, w, packed);
  } else {
    pack_source(source, blockIdx.x - weight_blocks, from, to);
  }
}

}  // namespace upfold::cuda
