// Rows of y, or of columns, shared out to warps: the job that the column kernels for common sizes take, and where a thread
// stands.
//
// A *unit* is `stride` neighbouring positions on an axis of y: it holds one position of every phase, and what reaches position
// number r of unit u lies at input u + first_in[r] - j * in_step for tap first_tap[r] + j * tap_step. So lanes that own
// neighbouring units read neighbouring pixels of every row of columns, whatever the padding.
#pragma once

#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kMostPhases = 32;  // strides above it go to the kernels for any sizes
constexpr int kWarps = 8;
constexpr int kRowThreads = 32 * kWarps;
constexpr int kTileChannels = 32;  // of one block, where y is channels-last

struct RowAxis {
  Divisor stride, out_count, in_count;
  std::int32_t in_begin, out_begin, out_size;
  std::int32_t kernel, dilation, tap_step, in_step;
  std::int32_t most_taps;               // of any phase
  std::int32_t origin;                  // position in y of tap 0 of input in_begin
  std::int32_t first_tap[kMostPhases];  // of position r of a unit; `kernel` where no tap reaches it
  std::int32_t first_in[kMostPhases];   // of position r of unit 0, counted from in_begin
};

// Warps take tiles of a row: `1 << lane_bits` lanes share a row, the others take the rows behind it. Where y is channels-last, a
// row leaves the channels out: blocks take tiles of kTileChannels of them.
struct RowsJob {
  RowAxis d, h, w;
  Divisor tiles, chunks, row_channels, channel_tiles;
  std::uint32_t rows, warps;
  std::int32_t lane_bits, units;  // units (or input positions) of one row
  std::int32_t channels;
  std::int64_t n_begin, oc_begin;
  std::int64_t sample_stride, channel_stride;  // of columns
  std::int32_t row_stride;
  std::int64_t y_n, y_c, y_d, y_h;
  std::int32_t y_w;
  std::int32_t
      vector;  // neighbours that one aligned access may move: 1 when nothing is known of the alignment, 0 when they lie apart
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

// The row of a lane and the first unit that it owns there.
struct RowPlace {
  std::uint32_t row;
  std::int32_t unit;
};

// `warp` counts tiles of a row first, then groups of rows.
template <int kItems, int kPairs>
UPFOLD_DEVICE RowPlace place_of(const RowsJob& job, std::uint32_t warp, std::uint32_t lane) {
  const std::uint32_t tile = take(job.tiles, warp);
  const std::uint32_t own = lane & ((1u << job.lane_bits) - 1);
  return {(warp << (5 - job.lane_bits)) + (lane >> job.lane_bits),
          std::int32_t(((tile * kItems) << job.lane_bits) + own) * kPairs};
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

// Fills everything of a job but `tiles`, `rows`, `warps`, `lane_bits`, `units` and `vector`; false where a size does not fit.
bool make_rows_job(const Problem& p, const ColumnBlock& block, RowsJob& job);
// Spreads `rows` rows of `units` units over warps whose lanes own `items` times `pairs` of them; false where they are too many.
bool spread_rows(RowsJob& job, std::int64_t rows, std::int64_t units, int items, int pairs);
// Whether a lane with `items` units has work for at least half of them.
bool fills_lanes(std::int64_t units, int items, int pairs);
#endif

}  // namespace upfold::cuda
