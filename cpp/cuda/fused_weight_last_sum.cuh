// w from the sums of the parts (fused_weight_last.cuh), which are added in a fixed order. What a warp of a product holds of 8
// columns, 16 input channels and 8 output ones of one tap, is a *piece* of 512 bytes: two pairs of output channels for each of 32
// lanes, of input channels lane / 4 and 8 more. Threads own such vectors of neighbouring *lanes* of pieces, 4 to 32, and,
// where there are many parts, *shares* of these, every so manieth: lanes are numbered first, shares next, pieces last. Where
// output channels are neighbours in w, pieces are stored as they are. Where taps are, a block has the lanes of some pieces of
// output channels and some taps, and stores them turned.
#pragma once

#include "divide.cuh"
#include "fused_weight_last_store.cuh"
#include "part_sums.cuh"

namespace upfold::cuda {

constexpr int kWeightPieces = 64;                               // of a block, at most
constexpr int kWeightSumFloats = 16 * (8 * kWeightPieces + 1);  // that it keeps
constexpr int kWeightSumThreads = 256, kWeightSumThreadsLog = 8, kWeightSumWarps = kWeightSumThreads / 32;
constexpr int kMostWeightShares = 6;  // the logarithm: of 4 lanes
constexpr int kMostWeightPlaces = 704;

struct WeightLastSumJob {
  Divisor row_blocks, channel_blocks, tap_blocks;  // of a group; of pieces as they are, where output channels are neighbours
  Divisor pieces, taps;                            // of a block: along the output channels; taps
  Divisor kernel_w, kernel_h, folded;              // folded: taps along w that lie in the channels
  Divisor width, set_chunks;                       // pieces of a chunk of output channels; chunks of a channel set
  Divisor outputs;                                 // of a block: output channels times taps
  std::int32_t share_log, lane_log;                // logarithms: shares of the parts, lanes of a piece in a block
  std::int32_t parts, in_channels, out_channels, all_taps;  // of a group
  Divisor set_columns8;                                     // groups of 8 columns of a set
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

// A thread among those of a block, and those of one piece.
struct WeightSumThread {
  std::int32_t lane, share, piece, count;  // of the block's pieces at a time, of which there are `count`
  std::int32_t warp_shares;                // the logarithm: that lanes of a warp have of a piece
  std::int32_t slots;                      // warps that have shares of the same lanes
};
UPFOLD_DEVICE WeightSumThread weight_sum_thread(const WeightLastSumJob& job) {
  const std::int32_t thread = std::int32_t(threadIdx.x), shares = 1 << job.share_log, both = job.lane_log + job.share_log;
  WeightSumThread own;
  own.lane = thread & ((1 << job.lane_log) - 1), own.share = thread >> job.lane_log & (shares - 1);
  own.piece = thread >> both, own.count = kWeightSumThreads >> both;
  own.warp_shares = both > 5 ? 5 - job.lane_log : job.share_log, own.slots = both > 5 ? 1 << (both - 5) : 1;
  return own;
}

// Parts of the own share of some vectors, and then those of all shares in the warp.
template <int kVectors>
UPFOLD_DEVICE void add_weight_parts(const WeightLastSumJob& job, const WeightSumThread& own, const float4* (&from)[kVectors],
                                    float4 (&totals)[kVectors]) {
  const std::int64_t from_part = job.part_tiles * (job.row_groups * job.set_columns8.value * 128);
  const std::int32_t most = (job.parts + (1 << job.share_log) - 1) >> job.share_log;  // of a share
#pragma unroll
  for (int i = 0; i < kVectors; ++i) from[i] += own.share * from_part;
  add_parts(totals, from, from_part << job.share_log, most, (most - 1 << job.share_log) + own.share < job.parts);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) add_lanes(totals[i], 1 << job.lane_log, 1 << (job.lane_log + own.warp_shares));
}

UPFOLD_DEVICE std::int64_t weight_offset_of(const WeightLastSumJob& job, std::int32_t group, std::int32_t ic, std::int32_t oc,
                                            std::uint32_t tap) {
  const std::uint32_t kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
  return (std::int64_t(group) * job.in_channels + ic) * job.w_n + oc * job.w_c + tap * job.w_d + kh * job.w_h + kw * job.w_w;
}

// Output channels are neighbours: pieces of a row of them follow one another.
template <typename Value>
__global__ void __launch_bounds__(kWeightSumThreads, 3)
    fused_weight_last_rows_kernel(const __grid_constant__ WeightLastSumJob job, const float4* __restrict__ partial,
                                  Value* __restrict__ w) {
  __shared__ float4 shared[kWeightSumWarps][32];
  const WeightSumThread own = weight_sum_thread(job);
  const std::uint32_t part = blockIdx.x * std::uint32_t(own.count) + std::uint32_t(own.piece);  // of a piece: some lanes
  const std::int32_t lane = std::int32_t(part << job.lane_log & 31) + own.lane;
  const std::uint32_t piece = part >> (5 - job.lane_log);
  std::uint32_t group = piece;
  const std::int32_t eight = std::int32_t(take(job.channel_blocks, group)), tap = std::int32_t(take(job.tap_blocks, group));
  const std::int32_t row = std::int32_t(take(job.row_blocks, group));
  const std::int32_t ic = row * 16 + lane / 4, oc = eight * 8 + lane % 4 * 2;
  const bool exists = piece < job.all_pieces && ic < job.in_channels;
  const float4* from[1] = {exists ? partial + weight_piece(job, std::int32_t(group), row, eight, tap) + lane : partial};
  float4 total[1] = {};
  take_turn();  // the sums of all parts
  add_weight_parts(job, own, from, total);
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, slot = warp & (own.slots - 1);
  if (own.slots > 1) {
    shared[warp][threadIdx.x % 32] = total[0];
    __syncthreads();  // all shares are there
  }
  if (!exists || slot != 0 || (own.share & ((1 << own.warp_shares) - 1)) != 0) return;
#pragma unroll
  for (int i = 1; i < kWeightSumWarps; ++i)
    if (i < own.slots) add(total[0], shared[warp + i][threadIdx.x % 32]);
  Value* const to = w + weight_offset_of(job, std::int32_t(group), ic, oc, std::uint32_t(tap));
  const WeightPair<Value> pairs[2] = {{{Narrow<Value>::from(total[0].x), Narrow<Value>::from(total[0].y)}},
                                      {{Narrow<Value>::from(total[0].z), Narrow<Value>::from(total[0].w)}}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (ic + 8 * i >= job.in_channels || oc >= job.out_channels) continue;
    Value* const own_pair = to + 8 * i * job.w_n;
    if (job.paired) {
      *reinterpret_cast<WeightPair<Value>*>(own_pair) = pairs[i];
    } else {
      own_pair[0] = pairs[i].v[0];
      if (oc + 1 < job.out_channels) own_pair[1] = pairs[i].v[1];
    }
  }
}

// What a block has of a weight whose taps are neighbours: of `lanes` lanes the first, and the sums of that many outputs.
struct WeightSumBlock {
  std::int32_t group, row, first_eight, first_tap, first_lane;
  std::int32_t lanes, outputs, pitch;  // floats from one input channel's sums to the next one's
  // Input channel `in_row` of those of the lanes, which are half of them.
  __device__ __forceinline__ std::int32_t channel(std::int32_t in_row) const {
    const std::int32_t quarter = lanes / 4, second = in_row >= quarter;
    return row * 16 + second * 8 + first_lane / 4 + in_row - second * quarter;
  }
};
UPFOLD_DEVICE WeightSumBlock weight_sum_block(const WeightLastSumJob& job) {
  WeightSumBlock block;
  std::uint32_t group = blockIdx.x >> (5 - job.lane_log);
  block.first_lane = std::int32_t(blockIdx.x << job.lane_log & 31), block.lanes = 1 << job.lane_log;
  block.first_tap = std::int32_t(take(job.tap_blocks, group) * job.taps.value);
  block.first_eight = std::int32_t(take(job.channel_blocks, group) * job.pieces.value);
  block.row = std::int32_t(take(job.row_blocks, group)), block.group = std::int32_t(group);
  block.outputs = std::int32_t(job.outputs.value), block.pitch = block.outputs + 1;
  return block;
}

// The block's sums, [slot][input channel][output], each slot of the shares of one warp of several. A thread has kVectors pieces
// at a time.
template <int kVectors>
UPFOLD_DEVICE void add_weight_pieces(const WeightLastSumJob& job, const WeightSumBlock& block, const WeightSumThread& own,
                                     const float4* __restrict__ partial, float* sums) {
  const std::int32_t taps = std::int32_t(job.taps.value), pieces = std::int32_t(job.pieces.value) * taps;
  const std::int32_t lane = block.first_lane + own.lane, quarter = block.lanes / 4;
  const bool stores = (own.share & ((1 << own.warp_shares) - 1)) == 0;
  float* const own_row = sums + ((own.share >> own.warp_shares) * 2 * quarter + own.lane / 4) * block.pitch;
  for (std::int32_t first = 0; first < pieces; first += kVectors * own.count) {
    const float4* from[kVectors];
    float4 totals[kVectors] = {};
    std::int32_t at[kVectors];  // of the first sum in a row
    bool exists[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const std::int32_t number = first + i * own.count + own.piece;
      std::uint32_t eight = std::uint32_t(number);
      const std::int32_t in_taps = std::int32_t(take(job.taps, eight)), tap = block.first_tap + in_taps;
      const std::int32_t own_eight = block.first_eight + std::int32_t(eight);
      exists[i] = number < pieces && tap < job.all_taps && own_eight * 8 < job.out_channels;
      exists[i] = exists[i] && block.row * 16 + lane / 4 < job.in_channels;
      from[i] = exists[i] ? partial + weight_piece(job, block.group, block.row, own_eight, tap) + lane : partial;
      at[i] = (std::int32_t(eight) * 8 + lane % 4 * 2) * taps + in_taps;
    }
    if (first == 0) take_turn();  // the sums of all parts
    add_weight_parts(job, own, from, totals);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!exists[i] || !stores) continue;
      float *const a = own_row + at[i], *const b = a + quarter * block.pitch;
      a[0] = totals[i].x, a[taps] = totals[i].y, b[0] = totals[i].z, b[taps] = totals[i].w;
    }
  }
}

// Taps are neighbours. kShares: whether threads add the same piece.
template <typename Value, bool kShares>
__global__ void __launch_bounds__(kWeightSumThreads, 3)
    fused_weight_last_sum_kernel(const __grid_constant__ WeightLastSumJob job, const float4* __restrict__ partial,
                                 Value* __restrict__ w) {
  __shared__ float sums[kWeightSumFloats];
  const WeightSumBlock block = weight_sum_block(job);
  const WeightSumThread own = weight_sum_thread(job);
  if (kShares || std::int32_t(job.pieces.value * job.taps.value) <= own.count) {
    add_weight_pieces<1>(job, block, own, partial, sums);
  } else {
    add_weight_pieces<2>(job, block, own, partial, sums);
  }
  __syncthreads();  // all sums are there
  const std::int32_t thread = std::int32_t(threadIdx.x), rows = block.lanes / 2, slot_pitch = rows * block.pitch;
  const auto sum_of = [&](std::int32_t at) {
    return Narrow<Value>::from(kShares ? add_eight(sums + at, slot_pitch, own.slots) : sums[at]);
  };
  if (job.dense) {
    const std::int32_t left = (job.out_channels - block.first_eight * 8) * std::int32_t(job.taps.value);
    const std::int32_t count = left < block.outputs ? left : block.outputs, threads = rows < 8 ? kWeightSumThreads / rows : 32;
    for (std::int32_t in_row = thread / threads; in_row < rows; in_row += kWeightSumThreads / threads) {
      const std::int32_t ic = block.channel(in_row), number = thread % threads, at = in_row * block.pitch;
      if (ic >= job.in_channels) continue;
      Value* const run = w + (std::int64_t(block.group) * job.in_channels + ic) * job.w_n + block.first_eight * 8 * job.w_c;
      if (job.paired) {
        for (std::int32_t i = 2 * number; i < count; i += 2 * threads)
          *reinterpret_cast<WeightPair<Value>*>(run + i) = {{sum_of(at + i), sum_of(at + i + 1)}};
      } else {
        for (std::int32_t i = number; i < count; i += threads) run[i] = sum_of(at + i);
      }
    }
    return;
  }
  for (std::int32_t i = thread; i < rows * block.outputs; i += kWeightSumThreads) {
    std::uint32_t in_row = std::uint32_t(i);
    const std::int32_t output = std::int32_t(take(job.outputs, in_row)), ic = block.channel(std::int32_t(in_row));
    std::uint32_t channel = std::uint32_t(output);
    const std::uint32_t tap = std::uint32_t(block.first_tap) + take(job.taps, channel);
    const std::int32_t oc = block.first_eight * 8 + std::int32_t(channel);
    if (ic >= job.in_channels || oc >= job.out_channels || std::int32_t(tap) >= job.all_taps) continue;
    w[weight_offset_of(job, block.group, ic, oc, tap)] = sum_of(std::int32_t(in_row) * block.pitch + output);
  }
}

}  // namespace upfold::cuda
