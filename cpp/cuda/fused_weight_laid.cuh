// The gradient of the weight by taps that are laid out in shared memory, of 16-bit values (compute capability 9.0): as
// fused_laid.cuh lays out what pixels meet of y', here as the other operand of a product over pixels.
//
// Rows of the product are channels of x, its columns output channels and their taps, as they follow one another in w, and its
// reduction pixels, counted through all planes of all samples. A chunk is 64 pixels of a *run*: a plane of x, which is packed
// first where it is no whole vectors, or where planes fill no chunks all pixels, packed channel by channel. A block has kRows
// rows, kColumns columns and a part of the chunks; two warpgroups multiply, half of the rows each, and have the copy engine bring
// rows of y'; the warps beside them have it bring boxes of x, and lay out the columns: of a pixel the values that its taps meet.
//   x        [stages][kRows][128 bytes], a swizzled box
//   columns  [stages][64 of the columns each][64 pixels][128 bytes], swizzled
//   raw      [buffers][pieces][channel of the tile][piece_bytes], boxes of y' whose planes are one row to the copy engine: from
//            the first value on that the chunk's pixels meet in a plane to behind the last; what lies beside the plane is zeros
// Parts of a tile are added up by the blocks of a cluster, and by a launch behind them where there are several clusters.
//
// Where the windows of pixels are every element of y once, their sums are those of y's channels, the gradient of the bias: the
// warps that lay out multiply what they have read with ones, in the blocks of the first channels of x.
#pragma once

#include "divide.cuh"
#include "fused_weight_pack.cuh"
#include "lanes.cuh"
#include "part_sums.cuh"
#include "ring.cuh"

namespace upfold::cuda {

constexpr int kMostWeightLaidStages = 3, kMostWeightLaidBuffers = 4;
constexpr int kWeightLaidAlignment = 1024;  // bytes: rows of 128 bytes change their vectors' places in groups of eight
constexpr int kWeightLaidPixels = 64;       // of a chunk

// kM: products of 64 rows of a warpgroup; kN8: eighths of the columns; kKernel: rows of the kernel, and values of each; kPaired:
// whether the stride is half of that with a padding of 1, so that two pixels are laid out together.
template <typename Value_, int kM_, int kN8_, int kKernel_, bool kPaired_>
struct WeightLaidTile {
  using Value = Value_;
  static constexpr int kM = kM_, kN8 = kN8_, kKernel = kKernel_;
  static constexpr bool kPaired = kPaired_;
  static constexpr int kRows = 128 * kM, kColumns = 8 * kN8, kWorkers = 256;
  // Where sums leave registers for them, twice as many warps lay out.
  static constexpr bool kWide = kM * kN8 > 32;
  static constexpr int kLanes = kWide ? 128 : 256, kThreads = kWorkers + kLanes;
  static constexpr int kShares = kLanes / kWeightLaidPixels;        // of the vectors of a pixel
  static constexpr int kChannels = kColumns / (kKernel * kKernel);  // output channels
  static constexpr int kXBytes = kRows * 128, kStageBytes = kXBytes + kWeightLaidPixels * kColumns * 2;
  static constexpr int kProducts = 4;  // of 16 pixels
  // Of the 504 or 512 that a launch gives threads of all warpgroups.
  static constexpr int kLoadRegisters = kWide ? 56 : 88, kWorkRegisters = kWide ? 224 : 168;
  static_assert(kColumns % 64 == 0 && (kKernel == 2 || kKernel == 4), "whole groups of columns, whole segments of a vector");
};

struct WeightLaidJob {
  // A block's number: its part in a cluster, its row tile, its column tile, its cluster.
  Divisor splits, row_tiles, column_tiles;
  std::int32_t rows, columns, channels;  // of x, of the product, of y
  std::int32_t chunks, part_chunks;      // of the reduction; of a block
  Divisor run_chunks;                    // chunks of a run
  std::int32_t run_pixels;
  std::int32_t parts, stages, buffers, buffer_bytes;  // parts: blocks that have one of a tile
  Divisor plane, row, depth;                          // pixels of a plane and of a row; planes of a sample
  std::int32_t stride_h, stride_w, pad, kernel, row_bytes, out_w;
  // What pixels meet of a plane of y', in bytes from its first value on, pieces of it, and their bytes of a channel and of all.
  std::int32_t plane_begin, plane_pieces;
  Divisor piece;
  std::int32_t piece_bytes;
  std::int64_t w_n;        // elements
  std::int32_t sum_pitch;  // channels of a row of sums of y's channels: those of all column tiles
};

// x with its pixels in order, channel by channel, in rows of whole vectors, the last filled up with zeros.
struct WeightLaidPackJob {
  Divisor row_vectors, plane, depth;
  std::uint32_t vectors;  // 0: nothing is packed
  std::int32_t pixels;
  std::int64_t n, c, d;  // elements
  std::int64_t end;      // from x's first to behind its last
};
constexpr int kLaidPackVectors = 4;  // of a thread

// The last launch, where clusters have parts of all sums; a thread has four neighbouring ones. Behind its blocks those that add
// up the rows of sums of y's channels, where there are any: two of each block of the launch ahead that has the first rows.
struct WeightLaidSumJob {
  Divisor row_fours;
  std::uint32_t fours;  // 0 where there is one cluster
  std::int32_t parts;
  std::int64_t w_n;
  std::int32_t sum_rows, sum_pitch, channels;
};
constexpr std::int32_t kLaidSumChannels = 16;  // of a block

struct WeightLaidBarriers {
  std::uint64_t full[kMostWeightLaidStages], empty[kMostWeightLaidStages], raw_full[kMostWeightLaidBuffers];
};

// Where what a pixel of a chunk meets of a row of the kernel lies in a buffer, in the first channel: [pixel][row]. Of two pixels
// that are laid out together, what both meet; behind them what the first pixel of a chunk's half meets ahead of that, and the
// last one behind it, of both halves. kBegins and kEnds: their row begins there, or ends.
constexpr int kMostWeightLaidPlaces = 256;
constexpr std::uint32_t kBegins = 1u << 30, kEnds = 1u << 31, kLaidPlace = kBegins - 1;
using WeightLaidPlaces = std::uint32_t[kMostWeightLaidPlaces];

struct WeightLaidPlace {
  std::int32_t row, column, channel;  // the first ones
  std::int32_t first, chunks;         // of the block's part of the reduction
  std::int32_t cluster, part;         // part: of all clusters
};

UPFOLD_DEVICE WeightLaidPlace weight_laid_place(const WeightLaidJob& job, std::int32_t rows, std::int32_t columns,
                                                std::int32_t channels) {
  std::uint32_t rest = blockIdx.x;
  const std::int32_t in_cluster = std::int32_t(take(job.splits, rest)), row = std::int32_t(take(job.row_tiles, rest));
  const std::int32_t tile = std::int32_t(take(job.column_tiles, rest)), cluster = std::int32_t(rest);
  const std::int32_t part = cluster * std::int32_t(job.splits.value) + in_cluster, first = part * job.part_chunks;
  return {row * rows, tile * columns, tile * channels, first, min(job.part_chunks, job.chunks - first), cluster, part};
}

// Where pixel `pixel` of a channel lies, in elements, and in its plane.
UPFOLD_DEVICE std::int64_t laid_source(const WeightLaidPackJob& job, std::uint32_t channel, std::int32_t pixel,
                                       std::int32_t& in_plane) {
  std::uint32_t sample = std::uint32_t(pixel);
  in_plane = std::int32_t(take(job.plane, sample));
  const std::uint32_t d = take(job.depth, sample);
  return sample * job.n + channel * job.c + d * job.d + in_plane;
}

// The vector of pixels from `first` on, of one plane or of some.
UPFOLD_DEVICE uint4 laid_vector(const WeightLaidPackJob& job, const std::uint16_t* __restrict__ from, std::uint32_t channel,
                                std::int32_t first) {
  const std::int32_t count = min(8, job.pixels - first);
  std::int32_t in_plane;
  const std::int64_t at = laid_source(job, channel, first, in_plane);
  const std::int32_t own = std::int32_t(job.plane.value) - in_plane;  // of this plane
  if (count <= own) return packed_vector(from, at, count, job.end);
  if (job.plane.value >= 8) {  // of two planes
    const uint4 low = packed_vector(from, at, own, job.end);
    const std::int64_t next = laid_source(job, channel, first + own, in_plane);
    const uint4 high = packed_vector(from, next, count - own, job.end);
    const auto join = [](std::uint32_t x, std::uint32_t y) { return std::uint64_t(y) << 32 | x; };
    const std::uint64_t words[] = {join(high.x, high.y), join(high.z, high.w)};
    const std::uint32_t shift = std::uint32_t(own) * 16;
    const std::uint64_t beside = shift < 64 ? words[1] << shift | words[0] >> (64 - shift) : words[0] << (shift - 64);
    const std::uint64_t both[] = {join(low.x, low.y) | (shift < 64 ? words[0] << shift : 0), join(low.z, low.w) | beside};
    return {std::uint32_t(both[0]), std::uint32_t(both[0] >> 32), std::uint32_t(both[1]), std::uint32_t(both[1] >> 32)};
  }
  std::uint32_t words[4] = {};
#pragma unroll
  for (std::int32_t i = 0; i < 8; ++i)
    if (i < count) words[i / 2] |= std::uint32_t(from[laid_source(job, channel, first + i, in_plane)]) << (i % 2 * 16);
  return {words[0], words[1], words[2], words[3]};
}

// A thread writes a vector, or where four pixels lie in a plane together, and at a multiple of 8 bytes, some: all that they are
// made of is on its way before the first is written.
template <typename Value, bool kFours>
__global__ void __launch_bounds__(kWeightPackThreads)
    weight_laid_pack_kernel(const __grid_constant__ WeightLaidPackJob job, const Value* __restrict__ x, uint4* __restrict__ to) {
  constexpr std::uint32_t kEach = kFours ? kLaidPackVectors : 1;
  const auto* const from = reinterpret_cast<const std::uint16_t*>(x);
  const std::uint32_t number = blockIdx.x * (kWeightPackThreads * kEach) + threadIdx.x;
  uint4 vectors[kEach] = {};
  take_turn();
#pragma unroll
  for (std::uint32_t i = 0; i < kEach; ++i) {
    std::uint32_t channel = number + i * kWeightPackThreads;
    if (channel >= job.vectors) continue;
    const std::int32_t first = std::int32_t(take(job.row_vectors, channel)) * 8;
    if constexpr (kFours) {
      std::int32_t in_plane;
      const auto four = [&](std::int32_t pixel) {
        const std::int64_t at = laid_source(job, channel, pixel, in_plane);
        return pixel < job.pixels ? __ldg(reinterpret_cast<const uint2*>(from + at)) : uint2{};
      };
      const uint2 low = four(first), high = four(first + 4);
      vectors[i] = {low.x, low.y, high.x, high.y};
    } else {
      vectors[i] = laid_vector(job, from, channel, first);
    }
  }
#pragma unroll
  for (std::uint32_t i = 0; i < kEach; ++i) {
    const std::uint32_t at = number + i * kWeightPackThreads;
    if (at < job.vectors) to[at] = vectors[i];
  }
}

template <typename Value>
UPFOLD_DEVICE void sum_laid_channels(const WeightLaidSumJob& job, std::uint32_t block, const float* __restrict__ rows,
                                     Value* __restrict__ bias) {
  constexpr std::int32_t kShares = kWeightPackThreads / kLaidSumChannels;
  __shared__ float sums[kShares][kLaidSumChannels];
  const std::int32_t lane = std::int32_t(threadIdx.x) % kLaidSumChannels, share = std::int32_t(threadIdx.x) / kLaidSumChannels;
  const std::int32_t channel = std::int32_t(block) * kLaidSumChannels + lane;
  float sum = 0.0f;
  if (channel < job.channels) {
#pragma unroll 8
    for (std::int32_t row = share; row < job.sum_rows; row += kShares) sum += rows[row * std::int64_t(job.sum_pitch) + channel];
  }
  sums[share][lane] = sum;
  __syncthreads();  // the sums of all shares are there
  if (share > 0 || channel >= job.channels) return;
  for (std::int32_t i = 1; i < kShares; ++i) sum += sums[i][lane];
  bias[channel] = Narrow<Value>::from(sum);
}

template <typename Value>
__global__ void __launch_bounds__(kWeightPackThreads)
    weight_laid_sum_kernel(const __grid_constant__ WeightLaidSumJob job, const float4* __restrict__ partial,
                           Value* __restrict__ w, const float* __restrict__ rows, Value* __restrict__ bias) {
  const std::uint32_t number = blockIdx.x * kWeightPackThreads + threadIdx.x;
  const std::uint32_t blocks = (job.fours + kWeightPackThreads - 1) / kWeightPackThreads;
  take_turn();  // the sums of all blocks
  if (blockIdx.x >= blocks) return sum_laid_channels(job, blockIdx.x - blocks, rows, bias);
  if (number >= job.fours) return;
  float4 sums[1] = {};
  const float4* from[1] = {partial + number};
  add_parts(sums, from, job.fours, job.parts, true);
  std::uint32_t row = number;
  const std::uint32_t four = take(job.row_fours, row);
  Value* const to = w + (row * job.w_n + four * 4);
  *reinterpret_cast<uint2*>(to) = {pair_of<Value>(sums[0].x, sums[0].y), pair_of<Value>(sums[0].z, sums[0].w)};
}

}  // namespace upfold::cuda
