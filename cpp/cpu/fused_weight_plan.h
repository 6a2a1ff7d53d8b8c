// How the fused gradient of the weight is cut: which side's channels are the vectors, slabs of channels, tiles of pixels, and the
// chunks of tiles whose sums are taken apart. None of it depends on the number of threads, so neither does any bit of the result.
#pragma once

#include "api.h"
#include "correlate_plan.h"
#include "fused_weight_tile.h"

namespace upfold::cpu::UPFOLD_ISA {

// The widths of a register tile, and which side its vectors hold.
struct OuterShape {
  bool x_is_wide;
  std::int64_t vectors, rows;

  std::int64_t wide_width() const { return vectors * kLanes<float>; }
};

// Half cycles of one pixel, of which each has one multiplication and one load, and eight pass until a sum may be added to again.
UPFOLD_INLINE std::int64_t half_cycles(std::int64_t rows, std::int64_t vectors) {
  return larger(larger(rows * vectors, rows + vectors), 8);
}
UPFOLD_INLINE std::int64_t half_cycles(std::int64_t narrow, std::int64_t wide, std::int64_t vectors) {
  const std::int64_t rows = tile_pixels(static_cast<int>(vectors)), all = ceil_div(wide, kLanes<float>);
  const auto column = [&](std::int64_t v) {
    return narrow / rows * half_cycles(rows, v) + (narrow % rows > 0 ? half_cycles(narrow % rows, v) : 0);
  };
  return all / vectors * column(vectors) + (all % vectors > 0 ? column(all % vectors) : 0);
}
UPFOLD_INLINE OuterShape choose_shape(std::int64_t x_channels, std::int64_t y_channels) {
  OuterShape best{};
  std::int64_t least = 0;
  for (const bool x_is_wide : {false, true}) {
    const std::int64_t narrow = x_is_wide ? y_channels : x_channels, wide = x_is_wide ? x_channels : y_channels;
    for (std::int64_t vectors = kMostTileVectors; vectors >= 1; --vectors) {
      const std::int64_t cost = half_cycles(narrow, wide, vectors);
      if (best.vectors != 0 && cost >= least) continue;
      best = {x_is_wide, vectors, tile_pixels(static_cast<int>(vectors))};
      least = cost;
    }
  }
  return best;
}

class FusedWeightPlan {
  // Floats of packed x and y of a tile that leave room in the second-level cache for the sums, and pixels: enough to use what is
  // read of the sums, and few enough for one panel of each side to stay in the first level and for short sums.
  static constexpr std::int64_t kInputs = 98304, kOutputs = 65536, kPixels = 256, kLeastPixels = 64, kLeastSlab = 64;
  // Pixels of a chunk: enough to pay for its sums, and few enough for sums in float32; and how many tasks are wanted.
  static constexpr std::int64_t kLeastChunk = 1024, kMostChunk = 16384, kTasksWanted = 32;
  static constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;  // of all chunks, unless one alone takes more

 public:
  explicit FusedWeightPlan(const Problem& p)
      : d(axis_d(p), true),
        h(axis_h(p), true),
        w(axis_w(p), true),
        h_groups(phase_group_limit(h.axis)),
        w_groups(phase_group_limit(w.axis)),
        h_group_count(list_phase_groups(h.axis, h_groups)),
        w_group_count(list_phase_groups(w.axis, w_groups)),
        w_group_of_phase(w.axis.stride),
        x_channels(in_channels_per_group(p)),
        y_channels(out_channels_per_group(p)),
        taps(kernel_taps(p)),
        shape(choose_shape(x_channels, y_channels)),
        x_slabs(slabs(x_channels, kInputs / kPixels, x_width())),
        w_blocks(w.q, whole_or(w.axis.in, larger(row_pixels(), kLeastPixels / 2))),
        h_blocks(h.q, smaller(larger(pixels() / w_blocks.size, 1), h.axis.in)),
        planes({0, p.batch * p.in_d}, planes_together()),
        y_slabs(slabs(y_channels, y_slab_limit(p), y_width())),
        chunks(choose_chunks(p)) {
    for (std::int64_t phase = 0; phase < w.axis.stride; ++phase) w_group_of_phase[phase] = w_group_count;
    for (std::int64_t g = 0; g < w_group_count; ++g) w_group_of_phase[w_groups[g].phase] = g;
  }

  std::int64_t x_width() const { return shape.x_is_wide ? shape.wide_width() : shape.rows; }
  std::int64_t y_width() const { return shape.x_is_wide ? shape.rows : shape.wide_width(); }
  std::int64_t tiles() const { return planes.count * h_blocks.count * w_blocks.count; }
  std::int64_t slab_pairs() const { return x_slabs.count * y_slabs.count; }

  // Floats of the sums of a pair of slabs, [tap][channel of the narrow side][channel of the wide side].
  std::int64_t sums_pitch() const { return round_up(shape.x_is_wide ? x_slabs.size : y_slabs.size, kLanes<float>); }
  std::int64_t sums_rows() const { return shape.x_is_wide ? y_slabs.size : x_slabs.size; }
  std::int64_t sums_size() const { return taps * sums_rows() * sums_pitch(); }

  // Pixels of a tile of x, and positions of a panel of y: of each phase of the columns those of the rows of one phase, and one
  // more, since a vector may be written past the last.
  std::int64_t tile_positions() const { return planes.size * h_blocks.size * w_blocks.size; }
  std::int64_t phase_positions() const { return planes.size * (h_blocks.size + h.reach) * (w_blocks.size + w.reach) + 1; }
  // Behind those of all phases lies one for columns that no tap reaches.
  std::int64_t y_positions() const { return w_group_count * phase_positions() + 2; }

  const CorrelateAxis d, h, w;
  const Table<PhaseGroup> h_groups, w_groups;
  const std::int64_t h_group_count, w_group_count;
  const Table<std::int64_t> w_group_of_phase;       // w_group_count where it has no taps
  const std::int64_t x_channels, y_channels, taps;  // of a group
  const OuterShape shape;
  const Blocks x_slabs, w_blocks, h_blocks, planes, y_slabs;  // planes are depths of samples
  const std::int64_t chunks;

 private:
  static Blocks slabs(std::int64_t channels, std::int64_t most, std::int64_t width) {
    return Blocks({0, channels}, larger(most, width), width);
  }
  std::int64_t pixels() const { return smaller(larger(kInputs / x_slabs.size, kLeastPixels), kPixels); }
  // Where taps reach other rows, blocks of several rows share what they read.
  std::int64_t row_pixels() const { return pixels() / smaller(larger(2 * h.reach, 1), 16); }
  static std::int64_t whole_or(std::int64_t size, std::int64_t part) { return size <= part + part / 2 ? size : part; }
  std::int64_t planes_together() const {
    if (w_blocks.count > 1 || h_blocks.count > 1) return 1;
    return larger(pixels() / (h.axis.in * w.axis.in), 1);
  }
  std::int64_t y_slab_limit(const Problem& p) const {
    const std::int64_t fits = kOutputs / (w_group_count * phase_positions());
    const std::int64_t others = p.groups * x_slabs.count;
    // Smaller slabs where they make the tasks that are wanted, unless x would be packed too often for its few products.
    const std::int64_t shared = taps * kLeastSlab >= 4 * kPixels ? kLeastSlab : 2 * kLeastSlab;
    return smaller(fits, larger(ceil_div(y_channels * others, kTasksWanted), shared));
  }
  std::int64_t choose_chunks(const Problem& p) const {
    const std::int64_t pixels = p.batch * in_pixels(p), others = p.groups * slab_pairs();
    const std::int64_t bytes = others * sums_size() * static_cast<std::int64_t>(sizeof(float));
    const std::int64_t wanted = smaller(ceil_div(kTasksWanted, others), pixels / kLeastChunk);
    const std::int64_t count = larger(wanted, ceil_div(pixels, kMostChunk));
    return smaller(larger(smaller(count, kPartialBytes / bytes), 1), tiles());
  }
};

}  // namespace upfold::cpu::UPFOLD_ISA
