// The gradient of the input by taps that are laid out in shared memory (compute capability 9.0): one product of the weight, as it
// lies, with what its taps meet of y's gradient. Nothing is packed.
//
// Rows of the product are channels of x, its columns pixels, counted through all planes of all samples, and its reduction output
// channels and their taps, as they follow one another in w. A chunk is 128 bytes of the reduction. A block has kRows rows,
// kPixels pixels and a part of the chunks at a time; two warpgroups multiply, half of the rows each. The warps beside them have
// the copy engine bring boxes of w, and of y' runs of whole rows of planes, half a chunk's channels at a time; from these they
// lay out the columns, for a pixel the values that its taps meet.
//   w        [stages][kRows][128 bytes], a swizzled box
//   columns  [stages][kPixels][128 bytes], swizzled
//   raw      [buffers][channel of half a chunk][64 bytes of zeros, then slots of rows]; a slot is a plane of which the tile has
//            pixels. Of several small planes (*boxed*) [buffers][zeros, then slots of [channel][plane]], which is one box
// A *segment* is what a pixel meets of a row of the kernel: neighbours in a row of y'. Where kernel and stride are equal and
// nothing is padded, it is one aligned word; else some of it may lie beside the plane, and is zeros.
#pragma once

#include "divide.cuh"
#include "mma.cuh"
#include "ring.cuh"

namespace upfold::cuda {

constexpr int kMostLaidStages = 4, kMostLaidBuffers = 8;
constexpr int kLaidAlignment = 1024;  // bytes: rows of 128 bytes change their vectors' places in groups of eight
// Bytes of zeros, which rows of the kernel beside the plane meet, in each channel; where pairs of pixels find them, and what lies
// beside their vector. (Runs of rows behind 48 of them, which begin at odd multiples of 16 bytes, take longer: PointPillars k2 on
// an H200 10.3 us for 9.5.)
constexpr int kLaidMargin = 64, kLaidZeros = 16;
// What a warp that adds up in a cluster stages of results whose rows begin at any 16-bit value: 16 rows of 32 pixels, so many
// bytes apart that what lanes write at a time lies in different banks.
constexpr int kLaidOddPitch = 80, kLaidOddBytes = 16 * kLaidOddPitch;

// Whether all of a kernel's rows lie in the plane; else how they are laid out: of any pixel, or of two neighbouring pixels
// together (laid_pairs.cuh).
enum LaidEdges { kLaidInside, kLaidBeside, kLaidPairs };

// kM: products of 64 rows of a warpgroup; kN8: eighths of the pixels; kKernel: rows of the kernel, and values of each, which are
// a segment.
template <typename Value_, int kM_, int kN8_, int kKernel_, LaidEdges kEdges_>
struct LaidTile {
  using Value = Value_;
  static constexpr int kM = kM_, kN8 = kN8_, kKernel = kKernel_;
  static constexpr bool kBeside = kEdges_ == kLaidBeside, kPaired = kEdges_ == kLaidPairs;
  static constexpr int kRows = 128 * kM, kPixels = 8 * kN8, kWorkers = 256, kLanes = 128, kThreads = kWorkers + kLanes;
  static constexpr int kChunk = 128 / int(sizeof(Value)), kEach = 16 / int(sizeof(Value));  // values of a chunk, of a vector
  static constexpr int kSegments = kEach / kKernel, kSegmentBytes = kKernel * int(sizeof(Value));
  static constexpr int kMasks = kSegmentBytes / 4;  // words of a segment
  static constexpr int kWeightBytes = kRows * 128, kStageBytes = kWeightBytes + kPixels * 128;
  static constexpr int kProducts = 4;  // of 32 bytes of the reduction
  // Of the 504 that a launch gives three warpgroups' threads. What is left beside fewer sums holds a whole chunk's words.
  static constexpr bool kWhole = kM * kN8 < 48;
  static constexpr int kLoadRegisters = kWhole ? 104 : 56, kWorkRegisters = kWhole ? 200 : 224;
  static_assert(kEach % kKernel == 0, "whole segments of a vector");
  static_assert(kPixels == kLanes || kPixels == kLanes * 3 / 2, "pixels of a lane");
};

struct LaidJob {
  // A tile is a part of the reduction, which the blocks of a cluster have, a row tile and a pixel tile.
  Divisor splits, row_tiles;
  std::uint32_t tiles;
  std::int32_t rows, pixels, chunks, part_chunks;               // chunks: of the reduction; of a part
  std::int32_t step;                                            // pixels of a tile
  std::int32_t stages, buffers, buffer_bytes, channels, pitch;  // channels of half a chunk, bytes from one to the next
  std::int32_t margin, margins;                                 // bytes of zeros ahead of slots; how many of these in a buffer
  std::int32_t box_bytes, slot_bytes;                           // 0 where runs are copied
  Divisor plane, row, depth;                                    // pixels of a plane and of a row; planes of a sample
  std::int32_t stride_h, stride_w, pad_h, pad_w, kernel_h, out_h, out_w, row_bytes;
  std::int64_t y_n, y_d, y_c;  // bytes
  std::int64_t x_n, x_d, x_c;  // elements
  std::int32_t vector;         // neighbouring pixels that are one aligned vector of x: 8, 4 or 2 of 16 bits, 4 or 2 floats, or 1
};

struct LaidBarriers {
  std::uint64_t full[kMostLaidStages], empty[kMostLaidStages], raw_full[kMostLaidBuffers];
};

struct LaidPlace {
  std::int32_t row, pixel, end;  // the first ones; behind the last pixel
  std::int32_t first, chunks;    // of the tile's part of the reduction
};

UPFOLD_DEVICE LaidPlace laid_place(const LaidJob& job, std::uint32_t tile, std::int32_t rows) {
  std::uint32_t rest = tile;
  const std::int32_t first = std::int32_t(take(job.splits, rest)) * job.part_chunks,
                     row = std::int32_t(take(job.row_tiles, rest));
  const std::int32_t pixel = std::int32_t(rest) * job.step;
  return {row * rows, pixel, min(pixel + job.step, job.pixels), first, min(job.part_chunks, job.chunks - first)};
}

// Where pixel number `pixel` lies in a channel of x, in elements.
UPFOLD_DEVICE std::int64_t laid_result(const LaidJob& job, std::int32_t pixel) {
  std::uint32_t rest = std::uint32_t(pixel);
  const std::uint32_t at = take(job.plane, rest), d = take(job.depth, rest);
  return rest * job.x_n + d * job.x_d + at;
}

}  // namespace upfold::cuda
