// The fused method of whole maps (compute capability 9.0, 16-bit types): small maps of many channels, with nothing packed. The
// columns of GEMM + col2im are multiplied from x and w as they lie, and never leave a warp.
//
// A column is a tap of an output channel, as they follow one another in w. The rows of a product are columns, its columns pixels
// of x, its reduction the channels of x; both operands lie turned: w as [channel][column], x as [channel][pixel]. A tile is 128
// columns times all pixels of some samples, so that every output of some channels has all its taps in the tile. The 16 rows that
// a warp holds of a product are whole channels: 16 is a multiple of the taps. Warps put them into shared memory of their own, as
// rows of pixels, and sum outputs from there.
//   x        [stages][segment of pixels][channels of a stage][16, 32 or 64 pixels], swizzled
//   w        [stages][64 columns][channels of a stage][128 bytes], swizzled boxes
//   columns  [warp][16 columns, in order of entries][kPitch], float32; behind the pixels of each a zero
// Of a block one thread begins the copies; or a warpgroup copies x by lanes, 16 bytes each, in segments of 64 pixels whatever a
// sample has: the copy engine takes as long for a row of 16 pixels as for one of 64. Two warpgroups take turns: each has every
// second tile, so that one multiplies while the other sums. Or they work side by side: a tile is twice as many columns, and each
// of them has half, so that pixels are copied half as often. Each value of x takes part in one row of a product, and no product
// multiplies anything but a tap and its input: NaN and infinity stay where taps carry them.
//
// A *position* is s outputs along each axis, from a multiple of the stride s on. Where the kernel is a multiple of the stride and
// taps are neighbours (dilation 1), each of its outputs has as many taps, whose inputs are as far from those of any other
// position as the positions are apart.
#pragma once

#include "divide.cuh"
#include "fused_activate.cuh"
#include "mma.cuh"
#include "ring.cuh"

namespace upfold::cuda {

constexpr int kMapsRows = 16;  // columns that a warp holds of a product
constexpr int kMostMapsStages = 8;
constexpr int kMapsAlignment = 1024;  // bytes: rows of 128 bytes change their vectors' places in groups of eight

// kBeside: whether warpgroups work side by side; kEach: taps of an output; kN8: eighths of the pixels; kByLanes: whether lanes
// copy x.
template <typename Value_, bool kBeside_, int kEach_, int kN8_, bool kByLanes_>
struct MapsTile {
  using Value = Value_;
  static constexpr bool kBeside = kBeside_, kByLanes = kByLanes_;
  static constexpr int kN8 = kN8_, kEach = kEach_, kResults = kMapsRows / kEach, kPixels = 8 * kN8;
  // Products of a warpgroup; its columns, and those of a tile; channels of a stage.
  static constexpr int kM = 2, kOwnColumns = 64 * kM, kColumns = kBeside ? 2 * kOwnColumns : kOwnColumns;
  static constexpr int kChunk = kByLanes ? 32 : 64;
  static constexpr int kProducts = kChunk / 16, kThreads = 384, kWorkers = 256;
  static constexpr int kPixelBytes = kPixels * 2 * kChunk, kStageBytes = kPixelBytes + kColumns * 2 * kChunk;
  static constexpr int kPitch = kPixels + 8;  // 8 modulo 32: the eight rows of a store meet in no bank
  static constexpr int kWarpBytes = kMapsRows * kPitch * 4, kSumBytes = kWorkers / 32 * kWarpBytes;
  static constexpr int kLanes = 128, kPieces = kPixels / 8 * kChunk / kLanes;  // vectors that a lane copies of a stage
  // Of the 504 that a launch gives three warpgroups' threads.
  static constexpr int kLoadRegisters = kByLanes ? 40 : 24, kWorkRegisters = kByLanes ? 232 : 240;
};

// Where a position's outputs are, and which there are.
struct alignas(8) MapsPosition {
  std::int32_t result;    // elements of y from the first sample's first channel on
  std::uint16_t sample;   // of the tile
  std::uint16_t outputs;  // bit e: result e is an output
};
// Where the columns of eight entries of a position lie in their rows, in bytes; behind the pixels where a tap has no input.
struct alignas(16) MapsTaps {
  std::uint16_t at[kMapsRows / 2];
};

struct MapsJob {
  Divisor column_tiles, sample_tiles;  // of a group
  bool columns_first;                  // neighbouring tiles have neighbouring columns, not samples
  std::uint32_t tiles;
  std::int32_t batch, ic, oc, columns;            // channels and columns of a group
  std::int32_t chunks, stages, samples;           // samples of a tile
  std::int32_t segment, vector_pitch, positions;  // pixels of a segment; 16 bytes from one to the next; positions of a tile
  std::uint32_t swizzle;                          // of segments, as descriptors want it
  Divisor vectors, sample_vectors;                // of x that lanes copy: of a channel, and of a sample's channels of a stage
  std::int64_t x_n, x_c;                          // elements
  Divisor taps;
  Divisor grid[3];  // positions of a sample: d, h, w
  std::int32_t in[3], out[3], stride[3];
  std::int32_t joined;  // results that are one aligned vector
  bool whole;           // every result of a position is an output
  Activation activation;
  float slope;
  std::int64_t y_n, y_c, y_axis[3];
  std::uint32_t shift[kMapsRows];  // of entry l = result * kEach + tap number: a signed byte for each axis
  std::int8_t entry[kMapsRows];    // of a row
  // Of result e: the channel behind the first of the rows, its output of a position, and both in elements of y.
  std::int8_t channel[kMapsRows], phase[kMapsRows][3];
  std::int32_t result[kMapsRows];
};

struct MapsBarriers {
  std::uint64_t full[kMostMapsStages], empty[kMostMapsStages];
};

// Of a tile: its group, its first column there, and its first sample.
struct MapsPlace {
  std::int32_t group, column, sample;
};

UPFOLD_DEVICE MapsPlace maps_place(const MapsJob& job, std::uint32_t tile, std::int32_t columns) {
  std::uint32_t rest = tile, column = 0, sample = 0;
  if (job.columns_first) {
    column = take(job.column_tiles, rest), sample = take(job.sample_tiles, rest);
  } else {
    sample = take(job.sample_tiles, rest), column = take(job.column_tiles, rest);
  }
  return {std::int32_t(rest), std::int32_t(column) * columns, std::int32_t(sample) * job.samples};
}

}  // namespace upfold::cuda
