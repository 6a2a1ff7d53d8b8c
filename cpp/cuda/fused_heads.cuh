// The fused method for heads: one to four output channels of kernel 4 and stride 2, with no tables and no columns (16-bit types,
// and float32 as TF32; compute capability 9.0).
//
// On each axis *unit* q owns the outputs 2 q - pad and 2 q + 1 - pad: taps 0 and 1 of input q reach them, and taps 2 and 3 of
// input q - 1. A product's rows are taps of the width, phases of the height and channels; its columns are the pixels of a row of
// x as they lie, and its reduction the channels of x. So the two taps of the height are summed by products, of one row of x and
// of the next one, and the two taps of the width are rows g and g + 8 of a product, which one lane holds, a pixel apart: the
// neighbour's sum comes from the neighbouring lane. Each product multiplies a tap and its input, or what is not stored.
//   rows     [tile][8 of channel and phase of the height][2]: the taps of an output of a lane's pixel, and of a neighbour's
//   x        [warp][slots][channel][pixel], a row of x each, swizzled boxes
//   weight   [pair of taps of the height][step][tile][lane][16 bytes]: fragments of the tensor cores
// Where the padding of the width is odd, a pair of outputs begins with the unit's second one (kOdd), so that pairs begin at even
// outputs.
// A warp takes *runs* of units of a sample, begins its own copies, a few at a time (the copy engine takes one after another, and
// a warp waits until it does), and waits for no other warp once the weight is there.
#pragma once

#include "divide.cuh"
#include "fused_activate.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "warpgroup.cuh"

namespace upfold::cuda {

constexpr int kHeadsTaps = 4, kHeadsStride = 2, kMostHeadsChannels = 4, kMostHeadsSlots = 8, kMostHeadsWarps = 16;
constexpr int kHeadsAlignment = 1024;  // bytes: swizzled rows of 128 bytes change places in groups of eight

// kBlocks: of eight pixels of a row.
template <typename Value_, int kBlocks_, bool kOdd_>
struct HeadsTile {
  using Value = Value_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr bool kOdd = kOdd_;
  static constexpr int kSize = int(sizeof(Value)), kPixels = 8 * kBlocks, kRow = kSize * kPixels;  // bytes of a row of pixels
  static constexpr int kStep = 32 / kSize;                                                         // channels of a product
};

struct HeadsJob {
  Divisor parts;                          // runs of a sample
  std::int32_t runs;                      // of all samples
  std::int32_t each;                      // units of a run
  std::int32_t units;                     // of a sample
  std::int32_t oc, steps;                 // steps: products of a row and a block of pixels
  std::int32_t slots, slot_bytes, ahead;  // ahead: rows that are copied at a time
  std::int32_t in_h, in_w, out_h, out_w, pad_h;
  std::int32_t first_ow;  // of the first pair, 0 or negative
  bool wide;              // four outputs of a pair of pixels are one aligned vector
  bool taps_together;     // and so are the taps of the width
  Activation activation;
  float slope;
  std::int32_t w_ic, w_oc, w_h, w_w;
  std::int64_t y_n, y_c, y_h, y_w;
};

// Of a run: its sample, its units, and the rows of x that they read.
struct HeadsRun {
  std::int32_t n, first, end, first_row, end_row;
};
UPFOLD_INLINE HeadsRun heads_run(const HeadsJob& job, std::int32_t n, std::int32_t part) {
  HeadsRun run;
  run.n = n, run.first = part * job.each;
  run.end = run.first + job.each < job.units ? run.first + job.each : job.units;
  run.first_row = run.first > 0 ? run.first - 1 : 0;
  run.end_row = run.end < job.in_h ? run.end : job.in_h;
  return run;
}

// Of each warp's slots: its row of x is there.
struct HeadsBarriers {
  std::uint64_t full[kMostHeadsWarps][kMostHeadsSlots];
};

}  // namespace upfold::cuda
