// How a problem of conv_transpose or conv is cut into tasks.
#pragma once

#include "pack.h"
#include "tile.h"

namespace upfold::cpu::UPFOLD_ISA {

// Products summed before the sum is added to the total: longer runs lose accuracy in float32.
constexpr std::int64_t kBlockTerms = 128;

// Real channels of the output that one task works on.
constexpr std::int64_t kSlabChannels = 64;

// A task that needs more scratch, in bytes, is left to the plain loops.
constexpr std::int64_t kLargestScratch = std::int64_t{512} << 20;

// One axis: outputs are o = q * out_stride + phase - out_pad; tap k of a phase reads the source's q minus (conv_transpose) or
// plus (conv) its shift.
struct CorrelateAxis {
  Axis axis;
  bool is_conv;
  SourceAxis out, source;
  std::int64_t reach;  // the largest shift
  Range q;             // of all outputs

  CorrelateAxis(const Axis& a, bool conv)
      : axis(a),
        is_conv(conv),
        out(conv ? SourceAxis{a.in, 1, 0} : SourceAxis{a.out, a.stride, a.pad}),
        source(conv ? SourceAxis{a.out, a.stride, a.pad} : SourceAxis{a.in, 1, 0}),
        reach((a.kernel - 1) * a.dilation / a.stride),
        q(conv ? Range{0, a.in} : Range{a.pad / a.stride, (a.out - 1 + a.pad) / a.stride + 1}) {}

  Window window(Range block) const {
    const Range read = is_conv ? Range{block.begin, block.end + reach} : Range{block.begin - reach, block.end};
    return make_window(source, read, length(block));
  }

  // The outputs of a block of q.
  Range outputs(Range block) const {
    return {larger(block.begin * out.stride - out.pad, 0), smaller(block.end * out.stride - out.pad, out.size)};
  }
};

// The depths of the source that qd reads, each once, and for each kd its index among them, or -1.
UPFOLD_INLINE std::int64_t list_depths(const CorrelateAxis& d, std::int64_t qd, std::int64_t* depths,
                                       std::int64_t* depth_of_tap) {
  std::int64_t count = 0;
  for (std::int64_t kd = 0; kd < d.axis.kernel; ++kd) {
    const std::int64_t depth = d.is_conv ? output_of(d.axis, qd, kd) : qd - kd * d.axis.dilation / d.axis.stride;
    depth_of_tap[kd] = -1;
    if (depth < 0 || depth >= d.source.size) continue;
    if (count == 0 || depths[count - 1] != depth) depths[count++] = depth;
    depth_of_tap[kd] = count - 1;
  }
  return count;
}

// The length of a row's block for a budget of pixels. Neighbouring blocks read their shared reach twice, so a block is at least
// about as long as that.
UPFOLD_INLINE std::int64_t row_block(const CorrelateAxis& w, std::int64_t pixels) {
  return larger(pixels, smaller(w.reach, 8192));
}

// A range cut into blocks of equal size, a multiple of `unit`; the last one may be shorter.
struct Blocks {
  Range range;
  std::int64_t size, count;

  Blocks(Range r, std::int64_t largest, std::int64_t unit = 1) : range(r), size(0), count(0) {
    if (length(r) == 0) return;
    count = ceil_div(length(r), larger(largest, 1));
    size = round_up(ceil_div(length(r), count), unit);
    count = ceil_div(length(r), size);
  }
  Range operator[](std::int64_t i) const { return {range.begin + i * size, smaller(range.begin + (i + 1) * size, range.end)}; }
};

// What decides the size of a task's planes, in real channels.
struct TaskShape {
  std::int64_t out_channels, in_channels;
  std::int64_t out_rows;       // phase rows per output row
  std::int64_t source_planes;  // planes per input channel
};

struct TaskBlocks {
  Blocks samples, h, w;
};

// Sums and packed planes of a task should stay in the second-level cache: about 64 Ki sums and 128 Ki packed elements.
UPFOLD_INLINE TaskBlocks choose_blocks(const TaskShape& shape, const CorrelateAxis& h, const CorrelateAxis& w, std::int64_t batch,
                                       std::int64_t other_tasks, int threads) {
  std::int64_t pixels = smaller(65536 / (shape.out_channels * shape.out_rows), 4096);
  pixels = larger(smaller(pixels, 131072 / (shape.in_channels * shape.source_planes)), 128);
  const Blocks w_blocks(w.q, length(w.q) <= 2 * pixels ? length(w.q) : row_block(w, pixels));
  const std::int64_t w_pitch = w.window(w_blocks[0]).pitch;
  const Blocks h_blocks(h.q, smaller(larger(pixels / w_pitch, 1), length(h.q)));
  std::int64_t samples = 1;
  if (w_blocks.count == 1 && h_blocks.count == 1) {
    samples = smaller(larger(pixels / (w_pitch * h.window(h.q).pitch), 1), batch);
    // Enough tasks for the threads; how samples are grouped does not touch the sums.
    samples = smaller(samples, larger(batch * other_tasks / (4 * larger(threads, 1)), 1));
  }
  return {Blocks({0, batch}, samples), h_blocks, w_blocks};
}

}  // namespace upfold::cpu::UPFOLD_ISA
