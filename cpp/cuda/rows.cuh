// What the column kernels for common sizes share. There are families, for reasons that were measured: where a row of y is
// long, a warp owns a run of one row (*_rows.cu) and works out where it stands once for all its units; where rows are
// short, lanes own units counted through (n, d, h, w) without a break (*_joined.cu), so that narrow maps leave no lane idle.
// Beside them stand kernels of col2im whose lanes own whole aligned accesses to y (*_lanes.cu, *_runs.cu), whatever the width,
// and one of im2col that reads y through shared memory (*_tiles.cu). Long strides, of which these have no tables, have one of
// col2im that stores through it (*_turned.cu).
//
// A *unit* is `stride` neighbouring positions on an axis of y: it holds one position of every phase, and what reaches position
// number r of unit u lies at input u + first_in[r] - j * in_step for tap first_tap[r] + j * tap_step. So lanes that own
// neighbouring units read neighbouring pixels of every row of columns, whatever the padding. For im2col a unit is one pixel.
#pragma once

#include "../columns.h"
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kMostPhases = 32;  // strides above it go to the kernels for any sizes
constexpr int kWarps = 8;
constexpr int kRowThreads = 32 * kWarps;
constexpr int kTileChannels = 32;  // of one block, where y is channels-last

struct RowAxis {
  Divisor stride, out_count, in_count;
  Divisor phases;  // of a unit that exist: fewer than `stride` where y is shorter
  Divisor units;
  std::int32_t in_begin, out_begin, out_size;
  std::int32_t kernel, dilation, tap_step, in_step;
  std::int32_t most_taps;               // of any phase
  std::int32_t origin;                  // position in y of tap 0 of input in_begin
  std::int32_t first_tap[kMostPhases];  // of position r of a unit; `kernel` where no tap reaches it
  std::int32_t first_in[kMostPhases];   // of position r of unit 0, counted from in_begin
};

struct RowsJob {
  RowAxis d, h, w;
  Divisor tiles, chunks;  // tiles of a row, or of the positions; chunks of the phases on w
  // Long rows: warps for all of them, counted through (tile, chunk, h, d, channel, sample).
  Divisor channel_rows;
  std::uint32_t warps;
  // Joined rows: positions of all samples, times the channel tiles where positions are few.
  Divisor samples, channel_tiles;
  std::uint32_t positions;
  std::int32_t channels;
  std::int64_t n_begin, oc_begin;
  std::int64_t sample_stride, channel_stride;  // of columns
  std::int32_t row_stride;                     // im2col, whose taps follow each other
  std::int32_t tap_d, tap_h, tap_w;            // col2im: between the rows of neighbouring taps
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

// A value of y as one of columns: the same bits, or a 16-bit float widened.
template <typename Column, typename Value>
UPFOLD_DEVICE Column convert(Value v) {
  if constexpr (sizeof(Column) == sizeof(Value)) {
    return v;
  } else {
    return Narrow<Column>::from(widen(v));
  }
}

#ifndef __CUDACC_RTC__
struct Launch;
struct ColumnStrides;

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // of any position or count, so that sums of two stay below 2^31

// The kernels for 16-bit and 32-bit floats and strides up to kMostPhases: they run and return true, or do nothing and return
// false where a type or a size does not fit. The job is that of the block, which is not empty.
bool col2im_rows(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                 void* y);
bool col2im_joined(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                   void* y);
// Where every output has one tap along w: kernel_w == stride_w, dilation_w == 1, planar y; col2im_lanes where the outputs of a
// few pixels are one aligned access too.
bool col2im_runs(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                 void* y);
bool col2im_lanes(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                  void* y);
// Strides on w beyond kMostPhases and the same types; planar y, dilation_w == 1.
bool col2im_turned(const Launch& launch, const Problem& p, const ColumnBlock& block, const ColumnStrides& strides,
                   Dtype column_dtype, const void* columns, const void* bias, void* y);
bool im2col_rows(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* y, void* columns);
bool im2col_joined(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* y, void* columns);
// Any widths, planar y, through shared memory; false also where a line of y is too long for a tile.
bool im2col_tiles(const Launch& launch, Dtype dtype, Dtype column_dtype, const RowsJob& job, const void* y, void* columns);

// Joined rows: channels of a lane (`items`, or 1 where that would leave the device idle).
int lane_channels(const RowsJob& job, int items);
// Cuts the joined positions into tiles of `tile`, for lanes with `channels` channels and chunks of `phases` phases. Returns the
// number of blocks, 0 where they are too many.
unsigned cut_joined(RowsJob& job, int tile, int channels, int phases);
// Long rows: spreads all rows, `lines` of them in every channel of a sample, over warps that take `units` of one, in chunks of
// `phases` phases; false where they are too many.
bool spread_rows(RowsJob& job, std::int64_t lines, int units, int phases);
#endif

}  // namespace upfold::cuda
