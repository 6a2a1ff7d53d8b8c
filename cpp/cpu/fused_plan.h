// How the fused method cuts a problem of conv_transpose or conv into tasks, and a task's reduction into passes.
#pragma once

#include "api.h"
#include "correlate_plan.h"
#include "fused_tile.h"

namespace upfold::cpu::UPFOLD_ISA {

// One axis: outputs are o = q * out.stride + phase - out.pad, and tap k of a phase reads the source at q * q_step + shift(k).
struct FusedAxis {
  CorrelateAxis base;
  std::int64_t q_step;
  std::int64_t least_shift, most_shift;
  Table<PhaseGroup> phases;  // for conv one phase holds all taps
  std::int64_t phase_count;

  FusedAxis(const Axis& a, bool is_conv)
      : base(a, is_conv),
        q_step(is_conv ? a.stride : 1),
        least_shift(is_conv ? -a.pad : -base.reach),
        most_shift(is_conv ? (a.kernel - 1) * a.dilation - a.pad : 0),
        phases(is_conv ? 1 : phase_group_limit(a)),
        phase_count(1) {
    if (is_conv) {
      phases[0] = {0, 0, a.kernel, 1, 0, a.dilation};
    } else {
      phase_count = list_phase_groups(a, phases);
    }
  }

  std::int64_t shift(std::int64_t k) const {
    return base.is_conv ? k * base.axis.dilation - base.axis.pad : -(k * base.axis.dilation / base.axis.stride);
  }
  std::int64_t output(std::int64_t q, std::int64_t phase) const { return q * base.out.stride + phase - base.out.pad; }

  // The part of a block of q whose outputs of this phase exist.
  Range outputs_of(Range block, std::int64_t phase) const {
    const Range real = real_range(base.out, phase);
    return {larger(block.begin, real.begin), smaller(block.end, real.end)};
  }
  // The part of that for which tap k reads a pixel and not the padding.
  Range reached_by(Range block, std::int64_t phase, std::int64_t k) const {
    const Range q = outputs_of(block, phase);
    return {larger(q.begin, ceil_div(-shift(k), q_step)), smaller(q.end, floor_div(base.source.size - 1 - shift(k), q_step) + 1)};
  }

  // Whether tap k carries some pixel to some output.
  bool reaches(std::int64_t k) const {
    const Range q = reached_by(base.q, base.is_conv ? 0 : k * base.axis.dilation % base.axis.stride, k);
    return q.begin < q.end;
  }

  // Whether some tap reaches outputs of o's phase.
  bool has_taps(std::int64_t o) const {
    const std::int64_t phase = (o + base.out.pad) % base.out.stride;
    for (std::int64_t g = 0; g < phase_count; ++g) {
      if (phases[g].phase == phase) return true;
    }
    return false;
  }

  // What a block reads, padding included, and the most that a block of `count` q reads.
  Range window(Range block) const { return {block.begin * q_step + least_shift, (block.end - 1) * q_step + most_shift + 1}; }
  std::int64_t window_length(std::int64_t count) const { return (count - 1) * q_step + most_shift - least_shift + 1; }
  Range within_source(Range window) const {
    return {smaller(larger(window.begin, 0), base.source.size), larger(smaller(window.end, base.source.size), 0)};
  }
  bool reads_padding() const {
    const Range all = window(base.q);
    return all.begin < 0 || all.end > base.source.size;
  }

  // Products taken when borders are padded, and those whose pixel exists.
  double padded_products() const {
    double count = 0;
    for (std::int64_t g = 0; g < phase_count; ++g) {
      count += static_cast<double>(phases[g].count * larger(length(outputs_of(base.q, phases[g].phase)), 0));
    }
    return count;
  }
  double real_products() const {
    double count = 0;
    for (std::int64_t g = 0; g < phase_count; ++g) {
      for (std::int64_t j = 0; j < phases[g].count; ++j) {
        const std::int64_t k = phases[g].first + j * phases[g].tap_step;
        count += static_cast<double>(larger(length(reached_by(base.q, phases[g].phase, k)), 0));
      }
    }
    return count;
  }
};

// Output channels of a group in blocks of a few vectors, and its input channels in chunks of at most kBlockTerms.
struct FusedChannels {
  std::int64_t in, out;
  std::int64_t vectors, blocks;
  std::int64_t chunk, chunks;

  FusedChannels(std::int64_t in_channels, std::int64_t out_channels)
      : in(in_channels),
        out(out_channels),
        vectors(ceil_div(out, kLanes<float>)),
        blocks(ceil_div(vectors, kMostTileVectors)),
        chunk(in <= kBlockTerms ? in : round_up(ceil_div(in, ceil_div(in, kBlockTerms)), 8)),
        chunks(ceil_div(in, chunk)) {}

  std::int64_t first_vector(std::int64_t block) const { return block * (vectors / blocks) + smaller(block, vectors % blocks); }
  std::int64_t block_vectors(std::int64_t block) const { return first_vector(block + 1) - first_vector(block); }
  std::int64_t most_width() const { return ceil_div(vectors, blocks) * kLanes<float>; }
  std::int64_t chunk_length(std::int64_t c) const { return smaller(chunk, in - c * chunk); }
  // Neighbouring pixels of packed x: not a power of two apart where few of their channels are read at a time.
  std::int64_t pixel_pitch() const { return chunks == 1 ? in : round_up(in, 16) + 16; }
};

class FusedPlan {
  // Floats of packed x and of sums that leave room in the second-level cache for the weights.
  static constexpr std::int64_t kInputs = 49152, kSums = 65536;
  // Enough pixels to use what is read of the weights, and enough channels for a tile to fill its lines.
  static constexpr std::int64_t kFewPixels = 384, kLeastPixels = 64, kMostPixels = 4096, kGroupedChannels = 16;
  static constexpr std::int64_t kManyWeights = 262144;
  static constexpr double kPaddedShare = 1.02;
  static constexpr double kPackingProducts = 3 * kLanes<float>;  // that take as long as to pack a value

 public:
  FusedPlan(const Problem& p, int threads)
      : is_conv(p.op == Operator::kConv),
        channels(is_conv ? out_channels_per_group(p) : in_channels_per_group(p),
                 is_conv ? in_channels_per_group(p) : out_channels_per_group(p)),
        d(axis_d(p), is_conv),
        h(axis_h(p), is_conv),
        w(axis_w(p), is_conv),
        tap_by_tap(takes_tap_by_tap()),
        multiplies_padding(!tap_by_tap && (h.reads_padding() || w.reads_padding())),
        groups({0, p.groups}, kGroupedChannels / larger(channels.in, channels.out)),
        blocks_(cut(p.batch, kernel_taps(p), threads)),
        samples(blocks_.samples),
        h_blocks(blocks_.h),
        w_blocks(blocks_.w),
        slabs({0, channels.blocks}, blocks_.slab),
        packs_weights_in_tasks(spatial_tasks() == 1 && !multiplies_padding) {}

  std::int64_t tasks() const { return groups.count * slabs.count * spatial_tasks(); }
  std::int64_t spatial_tasks() const { return samples.count * length(d.base.q) * h_blocks.count * w_blocks.count; }
  std::int64_t depth_limit() const { return smaller(d.base.axis.kernel, d.base.source.size); }

  const bool is_conv;
  const FusedChannels channels;
  const FusedAxis d, h, w;
  // Each tap runs for itself over the outputs that it reaches, and no product is taken with the padding.
  const bool tap_by_tap;
  // Otherwise zeros stand for the padding, whose products with weights are harmless only where these are finite.
  const bool multiplies_padding;
  const Blocks groups;

 private:
  struct Cut {
    Blocks samples, h, w;
    std::int64_t slab;
  };
  const Cut blocks_;

 public:
  const Blocks samples, h_blocks, w_blocks, slabs;  // slabs of blocks of output channels
  // Each weight is used by one task alone, which lays it out where it needs it.
  const bool packs_weights_in_tasks;

 private:
  bool takes_tap_by_tap() const {
    if (!h.reads_padding() && !w.reads_padding()) return false;
    // Beyond half of kBlockTerms a pass holds one tap anyway.
    if (2 * channels.chunk > kBlockTerms) return true;
    const double padded = h.padded_products() * w.padded_products(), real = h.real_products() * w.real_products();
    return channels.in >= 32 && padded > kPaddedShare * real;
  }

  Cut cut(std::int64_t batch, std::int64_t taps, int threads) const {
    const std::int64_t stride = h.base.out.stride * w.base.out.stride, wanted = 4 * larger(threads, 1);
    const std::int64_t read = h.q_step * w.q_step;  // source positions a pixel takes
    std::int64_t pixels = larger(kInputs / (channels.in * depth_limit() * read), larger(kFewPixels / read, kLeastPixels));
    pixels = smaller(smaller(pixels, kMostPixels), larger(kSums / (channels.most_width() * stride), kLeastPixels));
    const std::int64_t positions = batch * length(d.base.q) * length(h.base.q) * length(w.base.q) * groups.count;
    // Fewer pixels where that gives every thread its share, unless each would then read many weights: these are shared out.
    const bool shares_weights = taps * channels.in * channels.out > kManyWeights && groups.count * channels.blocks >= wanted;
    if (!shares_weights) pixels = smaller(pixels, larger(ceil_div(positions, wanted), kLeastPixels));
    const std::int64_t reach = (h.most_shift - h.least_shift) / h.q_step, rows = smaller(larger(4 * reach, 1), 16);
    const std::int64_t row = larger(pixels / rows, kLeastPixels);
    const Blocks w_cut(w.base.q, length(w.base.q) <= row + row / 2 ? length(w.base.q) : row_block(w.base, row));
    const Blocks h_cut(h.base.q, smaller(larger(pixels / w_cut.size, 1), length(h.base.q)));
    std::int64_t together = 1;
    if (w_cut.count == 1 && h_cut.count == 1) {
      together = smaller(larger(pixels / (length(h.base.q) * length(w.base.q)), 1), batch);
    }
    const Blocks samples_cut({0, batch}, together);
    const std::int64_t tasks = groups.count * samples_cut.count * length(d.base.q) * h_cut.count * w_cut.count;
    const std::int64_t reads = channels.out * taps / (is_conv ? d.q_step * h.q_step * w.q_step : 1);
    return {samples_cut, h_cut, w_cut, slab(larger(tasks, 1), larger(threads, 1), wanted, reads)};
  }

  // Blocks of output channels that a task takes: as many as leave the tasks wanted, or fewer where the threads then share the
  // work more evenly. Each slab packs the source again, of which each value takes part in `reads` products.
  std::int64_t slab(std::int64_t tasks, std::int64_t threads, std::int64_t wanted, std::int64_t reads) const {
    const double ideal = static_cast<double>(tasks * channels.blocks) / static_cast<double>(threads);
    const double packing = kPackingProducts / static_cast<double>(larger(reads, 1));
    const std::int64_t least = smaller(ceil_div(wanted, tasks), channels.blocks);
    std::int64_t best = ceil_div(channels.blocks, least);
    double shortest = 0;
    for (std::int64_t count = least; count <= smaller(4 * least, channels.blocks); ++count) {
      const std::int64_t size = ceil_div(channels.blocks, count), slabs = ceil_div(channels.blocks, size);
      const double work = static_cast<double>(ceil_div(tasks * slabs, threads) * size) / ideal;
      const double time = work + packing * static_cast<double>(slabs);
      if (count > least && time >= shortest) continue;
      best = size;
      shortest = time;
    }
    return best;
  }
};

}  // namespace upfold::cpu::UPFOLD_ISA
