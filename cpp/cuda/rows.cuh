// Positions of y, or of columns, shared out to lanes: the job that the column kernels for common sizes take, and where a lane
// stands.
//
// A *unit* is `stride` neighbouring positions on an axis of y: it holds one position of every phase, and what reaches position
// number r of unit u lies at input u + first_in[r] - j * in_step for tap first_tap[r] + j * tap_step. Lanes own neighbouring
// units (col2im) or input positions (im2col), counted through (n, d, h, w) without a break, so that they read neighbouring pixels
// of every row of columns whatever the padding, and narrow maps leave no lane idle.
#pragma once

#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kMostPhases = 32;  // strides above it go to the kernels for any sizes
constexpr int kWarps = 8;
constexpr int kRowThreads = 32 * kWarps;
constexpr int kTileChannels = 32;  // of one block, where y is channels-last

struct RowAxis {
  Divisor stride, in_count;
  Divisor phases;  // of a unit that exist: fewer than `stride` where y is shorter
  Divisor units;   // units (col2im) or input positions (im2col)
  std::int32_t out_count, in_begin, out_begin, out_size;
  std::int32_t kernel, dilation, tap_step, in_step;
  std::int32_t most_taps;               // of any phase
  std::int32_t origin;                  // position in y of tap 0 of input in_begin
  std::int32_t first_tap[kMostPhases];  // of position r of a unit; `kernel` where no tap reaches it
  std::int32_t first_in[kMostPhases];   // of position r of unit 0, counted from in_begin
};

// A block takes a tile of positions, for one phase on d and h and a chunk of those on w; where all positions are few, they are
// counted through the channel tiles too (`joined` of them), else a block has one channel tile.
struct RowsJob {
  RowAxis d, h, w;
  Divisor samples, tiles, chunks, channel_tiles;
  std::uint32_t positions;  // of all samples, times `joined`
  std::int32_t channels;
  std::int64_t n_begin, oc_begin;
  std::int64_t sample_stride, channel_stride;  // of columns
  std::int32_t row_stride;
  std::int64_t y_n, y_c, y_d, y_h;
  std::int32_t y_w;
  // Neighbours that one aligned access may move: 1 when nothing is known of the alignment, 0 when they lie apart.
  std::int32_t vector;
  Activation activation;
  float slope;
};

// The pairs of types (of y and of the columns) that the kernels for rows take.
#define UPFOLD_ROW_TYPES(DO)                             \
  DO(kFloat32, kFloat32, float, float)                   \
  DO(kFloat16, kFloat16, __half, __half)                 \
  DO(kFloat16, kFloat32, __half, float)                  \
  DO(kBFloat16, kBFloat16, __nv_bfloat16, __nv_bfloat16) \
  DO(kBFloat16, kFloat32, __nv_bfloat16, float)

// Two neighbouring 16-bit columns a lane: warps then touch whole 128-byte lines, as with 32-bit ones.
template <typename Column>
constexpr int kPair = sizeof(Column) == 2 ? 2 : 1;

template <typename Value, int kCount>
struct alignas(kCount * sizeof(Value)) Pack {
  Value v[kCount];
};

// Channel tile inside the block's, sample, and unit or input position on every axis.
struct Place {
  std::uint32_t channel_tile, n, d, h, w;
};

// A kernel that is launched early calls this before it touches memory; a no-op in others.
UPFOLD_DEVICE void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(__CUDACC_RTC__)
  cudaGridDependencySynchronize();
#endif
}

UPFOLD_DEVICE Place place_of(const RowsJob& job, std::uint32_t position) {
  Place place;
  place.w = take(job.w.units, position);
  place.h = take(job.h.units, position);
  place.d = take(job.d.units, position);
  place.n = take(job.samples, position);
  place.channel_tile = position;
  return place;
}

#ifndef __CUDACC_RTC__
struct Launch;
}  // namespace upfold::cuda
#include "../columns.h"
namespace upfold::cuda {
// The column kernels for 16-bit and 32-bit floats and strides up to kMostPhases: they run and return true, or do nothing and
// return false where a size does not fit. The block has been checked and is not empty.
bool col2im_rows(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns,
                 const void* bias, void* y);
bool im2col_rows(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y,
                 void* columns);

// Fills everything of a job but `vector` and what cut() fills; positions are units of y (`of_outputs`) or input positions. False
// where a size does not fit.
bool make_rows_job(const Problem& p, const ColumnBlock& block, bool of_outputs, RowsJob& job);
// Positions of a lane: `items`, or 1 where that would leave the device idle.
int lane_items(const RowsJob& job, int items);
// Cuts the positions into tiles of `tile`, for lanes with `channels` channels and chunks of `phases` phases. Returns the number
// of blocks, 0 where they are too many.
unsigned cut(RowsJob& job, int tile, int channels, int phases);
#endif

}  // namespace upfold::cuda
