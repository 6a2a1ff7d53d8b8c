// The direct method for the adjoint in w: w[ic, (oc, tap)] = sum over samples and input positions i of x[ic, i] * y[oc, o(i,
// tap)].
//
// A block owns kTileR input channels times kTileC columns (oc, tap) of one group and one part of the positions, counted through
// all samples; parts are as many as fill a large device and do not depend on the one at hand, so that the same call gives the
// same bits everywhere. Slices of neighbouring positions pass through shared memory. Each part writes its sums to the workspace,
// (part, group, ic, column), and a second kernel adds the parts in order; one part alone writes w.
#include "direct_weight.cuh"

namespace upfold::cuda {

// kR rows and kC columns a thread, in groups of four neighbours.
template <typename Value, int kTileR, int kTileC, int kR, int kC>
__global__ void __launch_bounds__(kDirectThreads, kR* kC * sizeof(Sum<Value>) <= 256 ? 2 : 1)
    weight_tile_kernel(const WeightJob job, const Value* __restrict__ x, const Value* __restrict__ y,
                       const WeightResult<Value> result) {
  using Total = Sum<Value>;
  using Slice = WeightSlice<Value, kTileR, kTileC>;
  constexpr int kWarpsR = kTileR / (4 * kR);
  static_assert(kWarpsR * (kTileC / (8 * kC)) * 32 == kDirectThreads, "a tile is shared out to the threads of a block");
  alignas(16) __shared__ Slice slice;
  __shared__ WeightColumn columns[kTileC];
  const WeightBlock block = weight_block<kTileR, kTileC>(job);
  const std::int32_t tid = std::int32_t(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const std::int32_t own_row = warp % kWarpsR * 4 * kR + lane / 8 * 4, own_column = warp / kWarpsR * 8 * kC + lane % 8 * 4;
  const Value* const planes = x + (std::int64_t(block.group) * job.rows + block.row0) * job.x_c;
  if (tid < kTileC) columns[tid] = tid < block.columns ? weight_column(job, block.group, block.column0 + tid) : WeightColumn{};
  __syncthreads();  // columns is complete
  WeightReader<Value, kTileR, kTileC> reader;
  Total sums[kR][kC] = {};
  reader.fetch(job, block, columns, planes, y, block.begin);
  reader.put(slice, 0);
  __syncthreads();  // the first slice is complete
  int buffer = 0;
  for (std::uint32_t at = block.begin; at < block.end; at += Slice::kK, buffer ^= 1) {
    const bool more = block.end - at > Slice::kK;
    if (more) reader.fetch(job, block, columns, planes, y, at + Slice::kK);
#pragma unroll
    for (int k = 0; k < Slice::kK; ++k) {
      Quad<Total> a[kR / 4], b[kC / 4];
#pragma unroll
      for (int i = 0; i < kR / 4; ++i) a[i] = *reinterpret_cast<const Quad<Total>*>(&slice.x[buffer][k][own_row + i * 16]);
#pragma unroll
      for (int j = 0; j < kC / 4; ++j) b[j] = *reinterpret_cast<const Quad<Total>*>(&slice.y[buffer][k][own_column + j * 32]);
#pragma unroll
      for (int i = 0; i < kR; ++i)
#pragma unroll
        for (int j = 0; j < kC; ++j) add_product(sums[i][j], a[i / 4].v[i % 4], b[j / 4].v[j % 4]);
    }
    if (more) reader.put(slice, buffer ^ 1);
    __syncthreads();  // the next slice is complete, and everyone has left this one
  }
#pragma unroll
  for (int i = 0; i < kR; ++i) {
#pragma unroll
    for (int j = 0; j < kC; ++j) {
      leave_sum(job, block, result, own_row + i / 4 * 16 + i % 4, own_column + j / 4 * 32 + j % 4, sums[i][j]);
    }
  }
}

template <typename Value, int kTileR, int kTileC, int kR, int kC>
__global__ void __launch_bounds__(kDirectThreads) weight_kernel(const WeightJob job, const Value* __restrict__ x,
                                                                const Value* __restrict__ y, const WeightResult<Value> result) {
  using Total = Sum<Value>;
  constexpr int kSlice = sizeof(Total) == 16 ? kPositions / 2 : kPositions;  // positions of one pass through shared memory
  constexpr int kColumnThreads = kTileC / kC, kWarps = kDirectThreads / 32;
  static_assert(kTileR / kR * kColumnThreads == kDirectThreads, "a tile is shared out to the threads of a block");
  // One more element a row, so that lanes that write neighbouring positions of one channel do not meet in one bank.
  __shared__ Total xs[kSlice][kTileR + 1], ys[kSlice][kTileC + 1];
  __shared__ WeightColumn columns[kTileC];
  const std::int32_t tid = std::int32_t(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const WeightBlock block = weight_block<kTileR, kTileC>(job);
  if (tid < kTileC && tid < block.columns) columns[tid] = weight_column(job, block.group, block.column0 + std::uint32_t(tid));
  const Value* const planes = x + (std::int64_t(block.group) * job.rows + block.row0) * job.x_c;
  const std::int32_t own_row = tid / kColumnThreads * kR, own_column = tid % kColumnThreads;
  Total sums[kR][kC] = {};
  for (std::uint32_t at = block.begin; at < block.end; at += kSlice) {
    __syncthreads();  // columns is complete, and everyone has left the slice before
    const Position p = position_of(job, at + std::uint32_t(lane), block.end);
    if (lane < kSlice) {
      for (std::int32_t row = warp; row < kTileR; row += kWarps) {
        xs[lane][row] = p.live && row < block.rows ? widen(planes[p.x + row * job.x_c]) : Total{};
      }
      for (std::int32_t column = warp; column < kTileC; column += kWarps) {
        Total value{};
        std::int64_t offset;
        if (column < block.columns && column_offset(job, columns[column], p, offset)) value = widen(y[offset]);
        ys[lane][column] = value;
      }
    }
    __syncthreads();  // the slice is complete
#pragma unroll 8
    for (int k = 0; k < kSlice; ++k) {
      Total a[kR], b[kC];
#pragma unroll
      for (int i = 0; i < kR; ++i) a[i] = xs[k][own_row + i];
#pragma unroll
      for (int j = 0; j < kC; ++j) b[j] = ys[k][own_column + j * kColumnThreads];
#pragma unroll
      for (int i = 0; i < kR; ++i)
#pragma unroll
        for (int j = 0; j < kC; ++j) add_product(sums[i][j], a[i], b[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kR; ++i) {
#pragma unroll
    for (int j = 0; j < kC; ++j) leave_sum(job, block, result, own_row + i, own_column + j * kColumnThreads, sums[i][j]);
  }
}

// w from the sums of the parts, in order; one element a thread.
struct ReduceJob {
  std::uint32_t elements, parts;
  Divisor channels, taps, kernel_h, kernel_w;  // output channels of a group
  std::int64_t w_n, w_c, w_d, w_h, w_w;
};

template <typename Value>
__global__ void __launch_bounds__(kDirectThreads)
    reduce_kernel(const ReduceJob job, const Sum<Value>* __restrict__ partial, Value* w) {
  const std::uint32_t i = blockIdx.x * kDirectThreads + threadIdx.x;
  if (i >= job.elements) return;
  Sum<Value> sum{};
  for (std::uint32_t part = 0; part < job.parts; ++part) add(sum, partial[std::int64_t(part) * job.elements + i]);
  std::uint32_t rest = i;
  std::uint32_t tap = take(job.taps, rest);
  const std::uint32_t oc = take(job.channels, rest), kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
  w[rest * job.w_n + oc * job.w_c + tap * job.w_d + kh * job.w_h + kw * job.w_w] = Narrow<Value>::from(sum);
}

// The tiles: kTileR, kTileC, kR, kC. The last is for groups of few input channels; sums of 16 bytes have it alone.
#define UPFOLD_WEIGHT_TILES(DO, type) \
  DO(0, type, 128, 128, 8, 8)         \
  DO(1, type, 64, 64, 4, 4)
#define UPFOLD_WEIGHT_SMALL(DO, type) DO(2, type, 4, 64, 1, 1)

#define UPFOLD_INSTANTIATE_TILE(index, Value, kTileR, kTileC, kR, kC)                                                     \
  template __global__ void weight_tile_kernel<Value, kTileR, kTileC, kR, kC>(const WeightJob, const Value*, const Value*, \
                                                                             const WeightResult<Value>);
#define UPFOLD_INSTANTIATE_SMALL(index, Value, kTileR, kTileC, kR, kC)                                               \
  template __global__ void weight_kernel<Value, kTileR, kTileC, kR, kC>(const WeightJob, const Value*, const Value*, \
                                                                        const WeightResult<Value>);
#define UPFOLD_INSTANTIATE(dtype, Value)                                                     \
  template __global__ void reduce_kernel<Value>(const ReduceJob, const Sum<Value>*, Value*); \
  UPFOLD_WEIGHT_SMALL(UPFOLD_INSTANTIATE_SMALL, Value)
UPFOLD_DIRECT_TYPES(UPFOLD_INSTANTIATE)
UPFOLD_WEIGHT_TILES(UPFOLD_INSTANTIATE_TILE, float)
UPFOLD_WEIGHT_TILES(UPFOLD_INSTANTIATE_TILE, double)
UPFOLD_WEIGHT_TILES(UPFOLD_INSTANTIATE_TILE, __half)
UPFOLD_WEIGHT_TILES(UPFOLD_INSTANTIATE_TILE, __nv_bfloat16)
UPFOLD_WEIGHT_TILES(UPFOLD_INSTANTIATE_TILE, Complex<float>)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kBlocksWanted = 528;            // four for each of an H200's multiprocessors
constexpr std::int64_t kLeastLength = 8 * kPositions;  // positions of a part

struct Tile {
  std::int64_t rows, columns;
};
constexpr Tile kTiles[] = {
#define UPFOLD_TILE(index, type, kTileR, kTileC, kR, kC) {kTileR, kTileC},
    UPFOLD_WEIGHT_TILES(UPFOLD_TILE, ) UPFOLD_WEIGHT_SMALL(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

std::int64_t weight_elements(const Problem& p) { return p.in_channels * out_channels_per_group(p) * kernel_taps(p); }

// The choices: the tiles, then the tiles with one part alone, which takes no workspace, and that of few positions.
constexpr int kDotsChoice = 2 * kTileCount;
int tile_of(const Problem& p, int config) { return p.dtype == Dtype::kComplex128 ? kTileCount - 1 : config % kTileCount; }

struct Split {
  std::int64_t tiles, length, parts;
};

Split split_of(const Problem& p, int config) {
  const Tile& tile = kTiles[tile_of(p, config)];
  const std::int64_t columns = out_channels_per_group(p) * kernel_taps(p), positions = p.batch * in_pixels(p);
  const std::int64_t tiles = ceil_div(in_channels_per_group(p), tile.rows) * ceil_div(columns, tile.columns) * p.groups;
  const std::int64_t fit = std::max<std::int64_t>(1, kMostPartial / (weight_elements(p) * sum_bytes(p.dtype)));
  const std::int64_t wanted = config >= kTileCount ? 1 : std::min(std::max<std::int64_t>(1, kBlocksWanted / tiles), fit);
  const std::int64_t length = std::max(ceil_div(ceil_div(positions, wanted), kPositions) * kPositions, kLeastLength);
  return {tiles, length, ceil_div(positions, length)};
}

WeightJob tile_job(const Problem& p, int config) {
  const Split split = split_of(p, config);
  const Tile& tile = kTiles[tile_of(p, config)];
  WeightJob job = weight_job(p);
  job.row_tiles = make_divisor(ceil_div(job.rows, tile.rows)),
  job.column_tiles = make_divisor(ceil_div(job.columns, tile.columns));
  job.parts = make_divisor(split.parts), job.length = std::uint32_t(split.length);
  return job;
}

template <typename Value>
void run(const Launch& launch, const Problem& p, const DirectOperands& operands, int config) {
  const auto x = static_cast<const Value*>(operands.x), y = static_cast<const Value*>(operands.y);
  const Split split = split_of(p, config);
  const auto partial = split.parts > 1 ? static_cast<Sum<Value>*>(operands.workspace) : nullptr;
  const WeightResult<Value> result{partial, static_cast<Value*>(operands.w)};
  const WeightJob job = tile_job(p, config);
  const unsigned blocks = unsigned(split.tiles * split.parts);
  const int tile = tile_of(p, config);
#define UPFOLD_RUN_TILE(index, type, kTileR, kTileC, kR, kC) \
  if (tile == index)                                         \
    launch_kernel("direct", weight_tile_kernel<type, kTileR, kTileC, kR, kC>, launch, blocks, kDirectThreads, job, x, y, result);
#define UPFOLD_RUN_SMALL(index, type, kTileR, kTileC, kR, kC) \
  if (tile == index)                                          \
    launch_kernel("direct", weight_kernel<type, kTileR, kTileC, kR, kC>, launch, blocks, kDirectThreads, job, x, y, result);
  UPFOLD_WEIGHT_SMALL(UPFOLD_RUN_SMALL, Value)
  if constexpr (sizeof(Value) < 16) {
    UPFOLD_WEIGHT_TILES(UPFOLD_RUN_TILE, Value)
  }
#undef UPFOLD_RUN_SMALL
#undef UPFOLD_RUN_TILE
  if (partial == nullptr) return;
  const std::int64_t elements = weight_elements(p);
  const ReduceJob reduce{std::uint32_t(elements),
                         std::uint32_t(split.parts),
                         make_divisor(out_channels_per_group(p)),
                         make_divisor(kernel_taps(p)),
                         make_divisor(p.kernel_h),
                         make_divisor(p.kernel_w),
                         p.w.n,
                         p.w.c,
                         p.w.d,
                         p.w.h,
                         p.w.w};
  launch_kernel("direct", reduce_kernel<Value>, launch, unsigned(ceil_div(elements, kDirectThreads)), kDirectThreads, reduce,
                static_cast<const Sum<Value>*>(partial), static_cast<Value*>(operands.w));
}

}  // namespace

bool direct_weight_fits(const Problem& p, int config) {
  if (config < 0 || config > kDotsChoice) return false;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    if (std::max({a.in, a.out, a.kernel, a.stride, a.pad, a.dilation}) > kDirectMost) return false;
    if (a.in > kDirectMost / a.stride || a.kernel > kDirectMost / a.dilation) return false;
  }
  if (p.batch == 0) return true;
  const std::int64_t positions = p.batch * in_pixels(p);
  if (positions > kDirectMost || weight_elements(p) > kDirectMost) return false;
  if (config == kDotsChoice) return dots_blocks(p) > 0 && dots_blocks(p) <= kDirectMost;
  const Split split = split_of(p, config);
  return split.tiles * split.parts <= kDirectMost;
}

std::int64_t direct_weight_bytes(const Problem& p, int config) {
  if (config == kDotsChoice) return 0;
  const std::int64_t parts = split_of(p, config).parts;
  return parts == 1 ? 0 : parts * weight_elements(p) * sum_bytes(p.dtype);
}

void direct_weight(const Launch& launch, const Problem& p, const DirectOperands& operands, int config) {
  if (config == kDotsChoice) return dots_run(launch, p, operands);
  switch (p.dtype) {
#define UPFOLD_CASE(dtype, Value) \
  case Dtype::dtype:              \
    return run<Value>(launch, p, operands, config);
    UPFOLD_DIRECT_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  }
}

}  // namespace upfold::cuda
#endif
