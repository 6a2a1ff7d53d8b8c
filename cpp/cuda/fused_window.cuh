// The fused method for small layers with a stride of 1, forward and gradient of the input, in one launch: nothing is packed
// first, since each block turns what it needs of both operands in shared memory (16-bit types, and float32 as TF32; compute
// capability 8.0 and newer).
//
// Both operators are windows that slide over a *source*, x or the gradient of y: result[o] sums source[o + offset] over taps.
// Positions of all samples are numbered in rows of `period` each, of planes and samples likewise, with as many zeros ahead of a
// row of the source as taps reach back, which also serve as those behind the row before. So a tap is one distance in the whole
// numbering, whatever rows a tile takes: positions behind the end of a row are multiplied and not stored.
// A block has kChannels channels of the result at kPositions positions in a row, and the whole reduction.
//   patch    [pixel][channel of the source], 16 bytes more a pixel, so that eight pixels' vectors meet in no bank
//   raw      the weight as it lies: a row for each channel of the source (forward) or of the result
//   weight   [tap][4 words of channels of the source][8 channels of the result][word], planes of 33 words, so that lanes that lay
//            out neighbours of either kind meet in no bank
//   results  [channel][position], in the place of the patch
//   sums     [share of the reduction][warp][pair of a lane][lane], in the place of both weights
// A word is 4 bytes of neighbouring channels of the source. Warps have 32 channels and 40 positions each; kSplit of them share
// out the reduction, added up in order.
#pragma once

#include "activation.cuh"
#include "divide.cuh"
#include "lanes.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kMostWindowTaps = 64;
constexpr int kWindowPlane = 33, kWindowChunk = 64;  // words of a plane of the weight; bytes of channels of a step

// kAcross warps have other channels, kAlong other positions, kSplit other taps.
template <typename Value_, int kAcross_, int kAlong_, int kSplit_>
struct WindowTile {
  using Value = Value_;
  static constexpr int kAcross = kAcross_, kAlong = kAlong_, kSplit = kSplit_;
  static constexpr int kRows = 2, kBlocks = 5;  // products of a warp: of 16 channels, of 8 positions
  static constexpr int kChannels = 16 * kRows * kAcross, kPositions = 8 * kBlocks * kAlong;
  static constexpr int kWarps = kAcross * kAlong * kSplit, kThreads = 32 * kWarps;
  static constexpr int kSize = int(sizeof(Value)), kOfWord = 4 / kSize;
  static constexpr int kResultPitch = kPositions * kSize + (kSize == 2 ? 16 : 32);  // bytes; lanes of a warp meet in no bank
  static constexpr int kPairs = kRows * kBlocks * 2;                                // of a lane's sums, of neighbouring positions
  static constexpr int kSumBytes = kWarps * kPairs * 32 * 8;
};

struct WindowAxis {
  Divisor period;
  std::int32_t lead, source, result;  // zeros ahead of the source; sizes
  std::int32_t source_step, result_step;
};
struct WindowJob {
  WindowAxis axis[3];
  std::int32_t batch, source_n, source_c, result_n, result_c;
  std::int32_t k, m;  // channels of a group: of the source, and of the result
  std::int32_t taps, chunks;
  Divisor chunks_of_tap;                // the same
  std::int32_t shift[kMostWindowTaps];  // of a tap, in positions
  Divisor groups, channel_tiles;
  // Loads of the patch, of `load` bytes: those of a row of the source, and sets of its channels that a warp takes at a time.
  Divisor vectors, channel_sets;
  std::int32_t load;
  std::int32_t pixels, pixel_pitch;
  std::int32_t raw_pitch, unit;  // bytes from row to row of the raw weight, and of a copy
  std::int64_t w_row;
  std::int32_t raw_k, raw_m;                  // elements in the raw weight from channel to channel
  bool by_source;                             // rows are channels of the source
  std::int32_t joined;                        // bytes that are stored together
  std::int32_t raw_at, weight_at, places_at;  // bytes in shared memory; the patch, and then results, are at 0
  Activation activation;
  float slope;
};

// The offset in the result of a position, from its first channel on, or -1.
UPFOLD_DEVICE std::int32_t window_place(const WindowJob& job, std::uint32_t position) {
  std::int32_t offset = 0;
  bool exists = true;
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    const std::int32_t at = std::int32_t(take(job.axis[i].period, position));
    exists = exists && at < job.axis[i].result;
    offset += at * job.axis[i].result_step;
  }
  exists = exists && std::int32_t(position) < job.batch;
  return exists ? offset + std::int32_t(position) * job.result_n : -1;
}

}  // namespace upfold::cuda
