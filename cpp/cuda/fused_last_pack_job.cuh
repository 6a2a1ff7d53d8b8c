// How weights are packed ahead of the fused method by boxes of channels, and where a vector of theirs goes.
#pragma once

#include "fused_last.cuh"
#include "fused_last_source.cuh"

namespace upfold::cuda {

// In which order threads take vectors: each by itself; those of a row of packed channels one after another, where they lie so in
// w too; or through shared memory, where channels of the result and taps lie together in w, or channels of the source and taps
// (fused_last_pack_turned.cuh).
enum class LastPacking : std::uint8_t { kByThread, kByVector, kByResult, kByReduction };

// packed[group][column tile][chunk][pair][column][16 bytes].
struct LastPackJob {
  Divisor pairs, columns, vectors, chunks, column_tiles;
  Divisor channels, kernel_h, kernel_w;  // of the result in a group
  std::uint32_t count;                   // of vectors
  std::int32_t result_channels, source_channels, all_columns;
  // spread: of two vectors one has the even channels, one the odd; by_channel: threads follow channels of the result, not taps
  // exact: of each chunk's channels the large parts, and behind them the small ones
  bool flat, in_order, spread, by_channel, exact;
  LastRuns runs;
  LastPacking way;
  std::int64_t w_source, w_result, w_group, w_axis[3];  // from group to group
  std::uint16_t taps[kMostLastPairs];
  // Through shared memory: blocks for 128 bytes of channels of the source, and for what follows them in w; all taps; by
  // kByResult what lies together (`lines`: its channels are those of the source, its pixels channels of the result times taps)
  // and how many of it are packed, zeros included, else rows of a block; and the pair of each tap.
  Divisor channel_blocks, parts, all_taps, row_vectors;
  std::uint32_t blocks;
  LastSourceJob lines;
  std::int32_t lined, rows;
  std::uint16_t pair_of[kMostLastPairs];
};
constexpr int kLastPackThreads = 256;
constexpr std::uint16_t kNoPair = 0xffff;  // of a tap that reaches no result

UPFOLD_DEVICE __half narrow_weight(__half v) { return v; }
UPFOLD_DEVICE __nv_bfloat16 narrow_weight(__nv_bfloat16 v) { return v; }
UPFOLD_DEVICE float narrow_weight(float v) { return __uint_as_float(to_tf32(v)); }
// A part of a weight, of values that have two.
template <typename Value>
UPFOLD_DEVICE Value part_of_weight(Value v, bool) {
  return v;
}
UPFOLD_DEVICE float part_of_weight(float v, bool small) { return small ? small_part(v) : large_part(v); }

// The opposite of channel_of_column.
template <int kSize>
UPFOLD_DEVICE std::int32_t column_of_channel(std::int32_t channel) {
  constexpr std::int32_t kRun = 64 / kSize, kOwn = 16 / kSize;
  const std::int32_t in_run = channel % kRun, in_lane = in_run % kOwn;
  return channel - in_run + in_lane / 2 * 8 + in_run / kOwn * 2 + in_lane % 2;
}

// Of one column of a pair, which the packed weights hold in so many chunks: its first vector among all of chunk 0, which is a
// multiple of a row's (4 or 8), and in the bits below that what swizzles the row.
template <typename Value>
UPFOLD_DEVICE std::uint32_t packed_row(const LastPackJob& job, std::uint32_t group, std::uint32_t column, std::uint32_t pair) {
  std::uint32_t tile = column;
  const std::int32_t in_tile = std::int32_t(take(job.columns, tile));
  const std::uint32_t row = std::uint32_t(job.in_order ? in_tile : column_of_channel<int(sizeof(Value))>(in_tile));
  tile += group * job.column_tiles.value;
  const std::uint32_t vectors = job.vectors.value;
  const std::uint32_t first = ((tile * job.chunks.value * job.pairs.value + pair) * job.columns.value + row) * vectors;
  return first + (vectors == 8 ? row % 8 : row / 2 % 4);
}
constexpr std::uint32_t kNoRow = ~0u;  // of a column that is not packed

// Where vector number `vector` of a row's channels lies, counted through all chunks: of whole values, or where weights are packed
// in two parts (`exact`) of the large ones, whose small ones lie half a row further.
struct LastPackedVector {
  std::uint32_t chunk, in_row;  // chunk: the vectors ahead of it
  bool exists;
};
UPFOLD_DEVICE LastPackedVector packed_vector(const LastPackJob& job, std::uint32_t vector) {
  const std::uint32_t vectors = job.vectors.value, own = job.exact ? vectors / 2 : vectors;
  const std::uint32_t chunk = vector >> (31 - __clz(int(own)));  // of a power of two
  return {chunk * job.pairs.value * job.columns.value * vectors, vector & (own - 1), chunk < job.chunks.value};
}

// Stores the values of w, rounded or in two parts as products want them.
template <typename Value>
UPFOLD_DEVICE void store_weights(const LastPackJob& job, std::uint32_t row, const LastPackedVector& place, uint4 values,
                                 uint4* packed) {
  const std::uint32_t swizzle = row & (job.vectors.value - 1);
  uint4* const to = packed + (row - swizzle + place.chunk);
  if constexpr (sizeof(Value) == 4) {
    std::uint32_t* const words = &values.x;
    if (job.exact) {
      uint4 small;
      std::uint32_t* const of_small = &small.x;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float v = __uint_as_float(words[i]);
        words[i] = __float_as_uint(large_part(v)), of_small[i] = __float_as_uint(small_part(v));
      }
      to[(place.in_row + job.vectors.value / 2) ^ swizzle] = small;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(narrow_weight(__uint_as_float(words[i])));
    }
  }
  to[place.in_row ^ swizzle] = values;
}

}  // namespace upfold::cuda
