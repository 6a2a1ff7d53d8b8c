// The fused method for few output channels (compute capability 9.0): the columns of GEMM + col2im, which never leave shared
// memory.
//
// A column is a tap of an output channel: rows of a product are 64 pixels of x, its columns are columns, its reduction the
// channels of x. So each value of x is copied once, takes part in one row of a product, and no product multiplies anything but
// a tap and its input: NaN and infinity stay where taps carry them. A block *walks* down some rows of an image, by *steps* of
// some *lines* of pixels; after each step the outputs whose last input row is there are summed from the columns, which lie in a
// ring of input rows, and stored, by warps of their own, while the next step is multiplied.
//   x        [stages][line][channel][pixel], 128 bytes a row, or [line][pixel][channel], 128 bytes a row; swizzled boxes
//   weight   [chunk][vector of 16 bytes of channels][column][16 bytes], laid out by each block from w as it lies
//   columns  [32 pixels of the ring][column][pixel], float32, in rows of kColumnPitch
// A line is 128 bytes of a row of pixels, or, where they lie as one run (`flat`), of some rows; where channels are innermost 32
// pixels. One warp begins the copies.
#pragma once

#include "divide.cuh"
#include "fused_activate.cuh"
#include "mma.cuh"
#include "ring.cuh"

namespace upfold::cuda {

constexpr int kMostColumnStages = 8;
constexpr int kColumnAlignment = 1024;                // bytes: rows of 128 bytes change their vectors' places in groups of eight
constexpr int kColumnPixels = 32, kColumnPitch = 36;  // floats: 4 modulo 8, so that eight columns meet in no bank

// Blocks of a multiprocessor that registers allow: each of its four parts has 512 for a lane.
UPFOLD_INLINE constexpr int columns_blocks(int n8, int warpgroups) { return n8 <= 6 && warpgroups == 1 ? 2 : 1; }

// kLast: channels are innermost in x.
template <typename Value_, bool kLast_, int kN8_, int kWarpgroups_>
struct ColumnsTile {
  using Value = Value_;
  static constexpr bool kLast = kLast_;
  static constexpr int kSize = int(sizeof(Value)), kN8 = kN8_, kN = 8 * kN8, kWarpgroups = kWarpgroups_;
  static constexpr int kWorkers = 128 * kWarpgroups, kThreads = 2 * kWorkers + 32;  // to multiply, as many to sum
  static constexpr int kBlocks = columns_blocks(kN8, kWarpgroups);
  static constexpr int kLine = !kLast && kSize == 2 ? 64 : 32, kLines = kWorkers / kLine;  // pixels; lines of a step
  static constexpr int kRow = 128, kChunk = kRow / kSize;                                  // bytes of a row, its channels
  static constexpr int kLineBytes = kRow * (kLast ? kLine : kChunk), kStageBytes = kLines * kLineBytes;
  static constexpr int kProducts = 4;             // of 32 bytes of channels, in a chunk
  static constexpr int kWeightBytes = kRow * kN;  // of a chunk
};

struct ColumnsAxis {
  std::int32_t in, out, kernel, stride, pad, span;  // outputs of a walk
  Divisor parts, strides, kernels;                  // walks along the axis; the stride and the kernel again
};

struct ColumnsJob {
  ColumnsAxis h, w;
  Divisor combinations, channel_tiles;  // channel tiles of all groups, and of one
  std::uint32_t walks;                  // of a combination
  std::int32_t ic, oc, channels;        // of a group; output channels of a tile
  std::int32_t columns, chunks, stages;
  std::int32_t pixels_floats;            // of the columns of 32 pixels, in whole eights
  std::int32_t align;                    // pixels: a line begins at such a multiple
  std::int32_t row_lines;                // lines of a row, or 0 where a line holds line_rows of them
  Divisor lines_of_row, ring;            // the same, at least 1; rows of the ring
  std::int32_t line_rows, pitch;         // pixels of a row of the ring
  std::int32_t weight_bytes, raw_bytes;  // raw: of w as it lies, where it is copied so first; else 0
  // Kernel 4 and stride 2; two neighbouring outputs are one aligned word or two, or three of them two pixels of three channels.
  bool four, paired, pixels;
  Activation activation;
  float slope;
  std::int64_t y_n, y_c, y_h, y_w, w_ic, w_oc, w_h, w_w;
};

// Of a walk: its sample, its outputs, and its inputs.
struct ColumnsWalk {
  std::int32_t n, first_oh, end_oh, first_ow, end_ow, first_ih, rows, first_iw, lines;
};

UPFOLD_INLINE std::int32_t first_column_input(const ColumnsAxis& axis, std::int32_t output) {
  const std::int32_t reach = output + axis.pad - (axis.kernel - 1);
  return reach <= 0 ? 0 : (reach + axis.stride - 1) / axis.stride;
}
UPFOLD_INLINE std::int32_t last_column_input(const ColumnsAxis& axis, std::int32_t output) {
  const std::int32_t input = (output + axis.pad) / axis.stride;
  return input < axis.in ? input : axis.in - 1;
}

UPFOLD_INLINE ColumnsWalk columns_walk(const ColumnsJob& job, std::int32_t n, std::int32_t part_h, std::int32_t part_w) {
  ColumnsWalk walk;
  walk.n = n;
  const std::int32_t first_oh = part_h * job.h.span - job.h.pad, end_oh = first_oh + job.h.span;
  walk.first_oh = first_oh < 0 ? 0 : first_oh, walk.end_oh = end_oh < job.h.out ? end_oh : job.h.out;
  walk.first_ow = part_w * job.w.span, walk.end_ow = walk.first_ow + job.w.span;
  if (walk.end_ow > job.w.out) walk.end_ow = job.w.out;
  walk.first_ih = first_column_input(job.h, walk.first_oh);
  const std::int32_t rows = last_column_input(job.h, walk.end_oh - 1) - walk.first_ih + 1;
  walk.rows = rows < 0 ? 0 : rows;
  walk.first_iw = job.w.parts.value == 1 ? 0 : first_column_input(job.w, walk.first_ow) / job.align * job.align;
  walk.lines = job.row_lines > 0 ? walk.rows * job.row_lines : (walk.rows + job.line_rows - 1) / job.line_rows;
  return walk;
}

// Rows of a walk that are there after so many lines.
UPFOLD_INLINE std::int32_t rows_of_lines(const ColumnsJob& job, const ColumnsWalk& walk, std::int32_t lines) {
  if (lines >= walk.lines) return walk.rows;
  return job.row_lines > 0 ? lines / job.row_lines : lines * job.line_rows;
}

// Where outputs end that need no more than so many rows of a walk.
UPFOLD_INLINE std::int32_t outputs_of_rows(const ColumnsJob& job, const ColumnsWalk& walk, std::int32_t rows) {
  if (rows == walk.rows) return walk.end_oh;
  const std::int32_t end = (walk.first_ih + rows) * job.h.stride - job.h.pad;
  return end < walk.end_oh ? end : walk.end_oh;
}

struct ColumnsBarriers {
  std::uint64_t full[kMostColumnStages], empty[kMostColumnStages], weight;
  std::uint64_t written[2], summed[2];  // of every second step
};

}  // namespace upfold::cuda
