// The planner of the fused gradient of the input; host code, for one source.
#pragma once

#include <numeric>

#include "fused_input_words.cuh"

namespace upfold::cuda {
namespace {

class InputPlanner {
 public:
  InputPlanner(const Problem& p, const InputTileSize& tile, std::int64_t shared_bytes, std::int64_t alignment, bool later)
      : p_(p),
        tile_(tile),
        element_(element_bytes(p.dtype)),
        staging_(later                          ? tile.later_bytes
                 : element_ == 4 && tile.stages ? kInputStagingBytes
                                                : 0),
        most_shared_(shared_bytes - kInputFixedBytes - staging_ - (tile.of_words ? kInputBoxAlignment : 0)),
        alignment_(alignment),
        later_(later),
        axes_{axis_d(p), axis_h(p), axis_w(p)} {}

  InputPlan plan() {
    plan_.possible = sizes() && choose_box() && chunks() && weights() && counts();
    return plan_;
  }

 private:
  bool sizes() {
    InputJob& job = plan_.job;
    for (int i = 0; i < 3; ++i) {
      const Axis& a = axes_[i];
      for (const std::int64_t size : {a.in, a.out, a.kernel, a.stride, a.pad, a.dilation})
        if (size >= kMostInputCount) return false;
      if (a.in * a.stride >= kMostInputCount || a.kernel * a.dilation >= kMostInputCount) return false;
      job.axis[i].in = std::int32_t(a.in), job.axis[i].out = std::int32_t(a.out), job.axis[i].stride = std::int32_t(a.stride);
      job.axis[i].low = std::int32_t(-a.pad);
    }
    const std::int64_t taps = kernel_taps(p_);
    if (taps > 2 * kMostInputEntries || p_.batch >= kMostInputCount) return false;
    if (p_.out_w > 1 && p_.y.w != 1) return false;  // rows of y are copied as they lie
    job.batch = std::int32_t(p_.batch), job.groups = make_divisor(p_.groups);
    job.ic = std::int32_t(in_channels_per_group(p_)), job.oc = std::int32_t(out_channels_per_group(p_));
    job.taps = make_divisor(taps), job.kernel_h = make_divisor(p_.kernel_h), job.kernel_w = make_divisor(p_.kernel_w);
    job.channel_tiles = make_divisor(ceil_div(job.ic, tile_.channels));
    job.run = (p_.kernel_w == 1 || p_.w.w == 1) && (p_.kernel_h == 1 || p_.w.h == p_.kernel_w) &&
              (p_.kernel_d == 1 || p_.w.d == p_.kernel_w * p_.kernel_h) && (p_.w.c == taps || job.oc == 1);
    // Channels whose taps fill whole turns of steps.
    const std::int64_t unit = 2 * (4 / element_) * tile_.turn;
    unit_channels_ = 4 * (unit / std::gcd(unit, taps));
    return true;
  }

  std::int64_t extent(int i, std::int64_t pixels) const {
    return (pixels - 1) * axes_[i].stride + (axes_[i].kernel - 1) * axes_[i].dilation + 1;
  }

  // Bytes of the widest aligned copies that make up the rows of every patch of boxes of this width.
  std::int64_t grain_of(std::int64_t width) const {
    std::int64_t steps = (p_.batch > 1 ? p_.y.n : 0) | p_.y.d | p_.y.h | p_.y.c | p_.out_w;
    if (width < p_.in_w) steps |= width * p_.stride_w;
    const std::int64_t bytes = steps * element_ | alignment_ | 16;
    return bytes & -bytes;
  }

  struct Patch {
    std::int64_t grain, skew, row_columns, span, rows;
  };
  Patch patch_of(const std::int64_t (&box)[4]) const {
    Patch patch;
    patch.grain = grain_of(box[2]);
    const std::int64_t elements = std::max<std::int64_t>(1, patch.grain / element_), low = -axes_[2].pad;
    // Counted from a multiple of four elements at the least, as vectors of two pixels are.
    const std::int64_t aligned = std::max<std::int64_t>(elements, 4);
    patch.skew = low - floor_div(low, aligned) * aligned;
    patch.row_columns = ceil_div(patch.skew + extent(2, box[2]), elements);
    patch.span = ceil_div(patch.row_columns * elements, 16 / element_) * (16 / element_);
    patch.rows = box[3] * extent(0, box[0]) * extent(1, box[1]);
    return patch;
  }

  // What a box costs: the products of its tiles, and the copies of their patches.
  double cost_of(const std::int64_t (&box)[4]) const {
    const Patch patch = patch_of(box);
    if (patch.grain < 4 || patch.rows * patch.row_columns > kMostInputColumns) return -1;
    if (unit_channels_ * patch.rows * patch.span * element_ > most_shared_ / 3) return -1;
    double tiles = double(ceil_div(p_.batch, box[3]));
    for (int i = 0; i < 3; ++i) tiles *= double(ceil_div(axes_[i].in, box[i]));
    const double row = double(std::max<std::int64_t>(patch.span * element_, 48) + 48) / 20 + double(patch.row_columns) / 8;
    double cost = channel_cost(double(patch.rows) * row);
    // Parts of rows that are no whole sectors. Not of few tiles, which would take wider boxes for it: there it was not measured.
    if (box[2] < p_.in_w && box[2] * element_ % 32 != 0 && tiles_of(tiles) > kInputAimBlocks)
      cost += kCutCost * double(tile_.pixels * tile_.channels * element_) / double(plan_.job.oc);
    return rounds_of(tiles) * cost;
  }
  // Of a channel of the reduction: the products of a tile, what they wait for at its ends, and the copies beside them.
  double channel_cost(double copies) const {
    const double products = double(kernel_taps(p_)) * tile_.pixels * tile_.channels * double(element_) / 4096 + kInputEndsCost;
    return std::max(products, copies) + 0.2 * std::min(products, copies);
  }
  std::int64_t tiles_of(double boxes) const { return std::int64_t(boxes) * plan_.job.channel_tiles.value * p_.groups; }
  double rounds_of(double boxes) const { return input_rounds(tiles_of(boxes), plan_.job.oc * kernel_taps(p_) * element_ / 32); }

  // Rows of pixels may be numbered over samples where kernel and stride are the same and nothing is cut off: whole rows reach
  // runs of a channel, which must be aligned as the copy engine wants them.
  bool can_number() const {
    for (const Axis& a : axes_)
      if (a.kernel != a.stride || a.pad != 0 || a.dilation != 1 || a.in * a.stride > a.out) return false;
    const std::int64_t run = p_.stride_h * p_.out_w;
    std::int64_t steps = run | p_.y.c | (p_.batch > 1 ? p_.y.n : 0);
    if (p_.in_d * p_.kernel_d > 1) steps |= p_.y.d;
    if (p_.out_h > 1 && p_.y.h != p_.out_w) return false;
    const std::int64_t together = tile_.reads == InputReads::kFours || tile_.reads == InputReads::kQuads ? 4 : 2;
    if (tile_.reads != InputReads::kSingles && p_.out_w % together != 0) return false;
    if ((of_two_pixels() && p_.in_w % 2 == 1) || p_.in_w > tile_.pixels) return false;
    return steps * element_ % 16 == 0 && alignment_ % 16 == 0 && plan_.job.oc % unit_channels_ == 0 && rows() < kMostInputCount;
  }
  std::int64_t rows() const { return p_.batch * p_.in_d * p_.in_h; }

  // The number of rows that costs least, if it costs less than that.
  std::int64_t choose_rows(double least) const {
    std::int64_t best = 0;
    const std::int64_t most = can_number() ? std::min(tile_.pixels / p_.in_w, rows()) : 0;
    for (std::int64_t count = most; count > 0; --count) {
      const std::int64_t bytes = count * p_.kernel_d * p_.stride_h * p_.out_w * element_;
      if (unit_channels_ * bytes > most_shared_ / 3) continue;
      const double cost = rounds_of(double(ceil_div(rows(), count))) * channel_cost(kRunsCost + double(bytes) / 24);
      if (least < 0 || cost < least) least = cost, best = count;
    }
    return best;
  }

  void number_rows(std::int64_t count) {
    InputJob& job = plan_.job;
    job.numbered = true, job.batch = 1, job.axis[0].in = 1, job.axis[1].in = std::int32_t(rows());
    const std::int64_t box[3] = {1, count, p_.in_w};
    for (int i = 0; i < 3; ++i) {
      job.axis[i].tile = make_divisor(box[i]), job.axis[i].tiles = make_divisor(i == 1 ? ceil_div(rows(), count) : 1);
      job.axis[i].extent = make_divisor(extent(i, box[i]));
    }
    job.tile_n = make_divisor(1), job.tiles_n = make_divisor(1);
    job.rows_h = make_divisor(p_.in_h), job.rows_d = make_divisor(p_.in_d);
    job.skew = 0, job.span = std::int32_t(p_.out_w), job.row_columns = make_divisor(1);
    patch_bytes_ = p_.kernel_d * count * p_.stride_h * p_.out_w * element_;
    job.grain = std::int32_t(count * p_.stride_h * p_.out_w * element_), job.columns = std::int32_t(p_.kernel_d);
  }

  bool choose_box() {
    double least = -1;
    std::int64_t best[4] = {};
    std::vector<std::int64_t> widths;
    for (std::int64_t parts = 1; parts <= p_.in_w; parts = parts < 64 ? parts + 1 : parts * 2) {
      const std::int64_t width = ceil_div(p_.in_w, parts);
      for (const std::int64_t w : {width, width + width % 2, ceil_div(width, 8) * 8}) widths.push_back(w);
    }
    for (std::int64_t width = 2; width <= tile_.pixels; width *= 2) widths.push_back(width);
    std::sort(widths.rbegin(), widths.rend());
    for (const std::int64_t w : widths) {
      if (w > tile_.pixels || (of_two_pixels() && w % 2 == 1)) continue;
      for (std::int64_t h = std::min(p_.in_h, tile_.pixels / w); h > 0; --h) {
        for (std::int64_t d = std::min(p_.in_d, tile_.pixels / (w * h)); d > 0; --d) {
          const std::int64_t n = std::min(p_.batch, tile_.pixels / (w * h * d));
          const std::int64_t box[4] = {d, h, w, std::max<std::int64_t>(n, 1)};
          const double cost = cost_of(box);
          if (cost < 0 || (least >= 0 && cost >= least)) continue;
          least = cost;
          std::copy(box, box + 4, best);
        }
      }
    }
    if (const std::int64_t count = choose_rows(least)) {
      number_rows(count);
      return true;
    }
    if (least < 0) return false;
    InputJob& job = plan_.job;
    for (int i = 0; i < 3; ++i) {
      job.axis[i].tile = make_divisor(best[i]), job.axis[i].tiles = make_divisor(ceil_div(axes_[i].in, best[i]));
      job.axis[i].extent = make_divisor(extent(i, best[i]));
    }
    job.tile_n = make_divisor(best[3]), job.tiles_n = make_divisor(ceil_div(p_.batch, best[3]));
    const Patch patch = patch_of(best);
    job.grain = std::int32_t(patch.grain), job.skew = std::int32_t(patch.skew), job.span = std::int32_t(patch.span);
    job.row_columns = make_divisor(patch.row_columns), job.columns = std::int32_t(patch.rows * patch.row_columns);
    patch_bytes_ = patch.rows * patch.span * element_;
    return true;
  }

  // Whether neighbouring pixels are read together, which lie in one row where the box is of an even width.
  bool of_two_pixels() const {
    return tile_.reads == InputReads::kFours || tile_.reads == InputReads::kRows || tile_.reads == InputReads::kThrees;
  }

  InputWords words() const { return {p_, plan_.job, element_, alignment_}; }

  bool can_read() const {
    const InputJob& job = plan_.job;
    if (tile_.of_words) return words().can_read();
    const std::int64_t taps = p_.kernel_w;
    const bool joined = p_.dilation_w == 1 && taps > 1, paired = p_.stride_w == 2;
    if (tile_.reads == InputReads::kFours) return joined && paired && taps == 2 && job.skew % 4 == 0;
    if (tile_.reads == InputReads::kRows) return joined && paired && taps % 4 == 0 && job.skew % 4 == 3;
    if (tile_.reads == InputReads::kThrees) return joined && paired && taps == 3 && job.skew % 4 == 3;
    if (tile_.reads == InputReads::kQuads) return joined && taps % 4 == 0 && p_.stride_w % 4 == 0 && job.skew % 4 == 0;
    return tile_.reads == InputReads::kSingles || (joined && taps % 2 == 0 && p_.stride_w % 2 == 0 && job.skew % 2 == 0);
  }

  // How taps are read, from which pitch of channels, and how many channels are a chunk.
  bool chunks() {
    InputJob& job = plan_.job;
    if (!can_read()) return false;
    const InputReads reads = tile_.reads;
    const int width = reads == InputReads::kPairs                                    ? int(element_) / 2
                      : reads == InputReads::kSingles || reads == InputReads::kWords ? 1
                                                                                     : int(element_);
    std::int64_t best = 0;
    int least = 1 << 30;
    for (std::int64_t more = 0; more < 8; ++more) {
      const std::int64_t pitch = ceil_div(patch_bytes_, 16) * 4 + more * 4;
      std::int64_t from[4];
      for (int i = 0; i < 4; ++i) from[i] = tile_.of_words ? words().at(i, pitch * 4) / 4 : i * pitch;
      const int conflicts = read_conflicts(from, double(2 * p_.stride_w * element_) / 4, width);
      if (conflicts < least) least = conflicts, best = pitch;
    }
    job.pitch = std::int32_t(best * 4);
    const std::int64_t taps = kernel_taps(p_), entries = unit_channels_ * taps / 8;
    const std::int64_t most =
        std::min({kInputRawBytes / (unit_channels_ * job.pitch), kMostInputEntries / entries, ceil_div(job.oc, unit_channels_)});
    // The fewest chunks, each as small as they then may be.
    const std::int64_t units = ceil_div(job.oc, unit_channels_);
    std::int64_t parts = ceil_div(units, std::max<std::int64_t>(most, 1));
    while (job.numbered && units % parts != 0) ++parts;  // nothing makes zeros of channels behind the last one
    const std::int64_t channels = unit_channels_ * ceil_div(units, parts);
    if (entries > kMostInputEntries || channels * job.pitch / element_ > 0xffff || channels * taps > 0xffff) return false;
    job.chunk_channels = std::int32_t(channels), job.raw_bytes = std::int32_t(channels * job.pitch);
    job.chunks = std::int32_t(ceil_div(job.oc, channels));
    job.steps = std::int32_t(channels * taps * element_ / 32);
    if (tile_.of_words) {
      words().place(tile_.channels, plan_);
    } else {
      list_taps(channels);
    }
    return true;
  }

  void list_taps(std::int64_t channels) {
    InputJob& job = plan_.job;
    std::int32_t number = 0;
    for (std::int64_t quad = 0; quad < channels / 4; ++quad) {
      for (std::int64_t tap = 0; tap < kernel_taps(p_); ++tap, ++number) {
        const std::int64_t kw = tap % p_.kernel_w, kh = tap / p_.kernel_w % p_.kernel_h, kd = tap / p_.kernel_w / p_.kernel_h;
        const std::int64_t row = kd * p_.dilation_d * job.axis[1].extent.value + kh * p_.dilation_h;
        const std::int64_t offset = quad * 4 * job.pitch / element_ + row * job.span + kw * p_.dilation_w + job.skew;
        InputEntry &to = job.offsets[number / 2], &from = job.sources[number / 2];
        (number % 2 == 0 ? to.a : to.b) = std::uint16_t(offset);
        (number % 2 == 0 ? from.a : from.b) = std::uint16_t(quad * kernel_taps(p_) + tap);
      }
    }
  }

  // From tile number `whole` on the reduction is cut into at most `parts`; the tiles all in all.
  void split(std::int64_t tiles, std::int64_t whole, std::int64_t parts) {
    InputJob& job = plan_.job;
    job.split_chunks = std::int32_t(ceil_div(job.chunks, parts));
    job.splits = make_divisor(ceil_div(job.chunks, job.split_chunks));
    job.whole = std::uint32_t(job.splits.value > 1 ? whole : tiles);
    plan_.blocks = unsigned(job.whole + (tiles - job.whole) * job.splits.value);
    plan_.combinations = std::int64_t(job.splits.value) * job.channel_tiles.value * p_.groups;
  }

  // Parts of each tile's reduction that a cluster of blocks has and adds up, in place of so many; 1: the sums go through memory.
  std::int64_t parts_together(std::int64_t tiles, std::int64_t parts) const {
    if (parts <= 2) return parts;
    if (!tile_.of_words) return 1;  // not measured
    // So many such clusters run at once on an H100 (the runtime's word). Where parts are a fifth longer so, or most
    // multiprocessors idle anyway, that gains nothing.
    constexpr std::int64_t kAtOnce[][2] = {{8, 15}, {4, 30}, {3, 39}};
    for (const auto& [blocks, clusters] : kAtOnce)
      if (tiles <= clusters && blocks <= parts && blocks * 5 >= parts * 4 && 2 * tiles * blocks >= kInputAimBlocks) return blocks;
    return 1;
  }

  // Parts of the reduction, buffers of weights and of y. A constant aim of blocks: the sums are the same on every device.
  bool weights() {
    const InputJob& job = plan_.job;
    std::int64_t tiles = std::int64_t(job.tiles_n.value) * job.channel_tiles.value * p_.groups;
    for (const InputAxis& axis : job.axis) tiles *= axis.tiles.value;
    if (tiles * kInputAimBlocks >= kMostInputCount) return false;
    const std::int64_t steps = std::int64_t(job.chunks) * job.steps, last = tiles % kInputAimBlocks;
    const std::int64_t most = std::min<std::int64_t>(steps / kLeastInputSteps, job.chunks);
    const std::int64_t parts = input_parts(tiles, most);
    split(tiles, 0, parts);
    const std::int64_t together = parts_together(tiles, job.splits.value);
    if (together > 2) split(tiles, 0, together);
    plan_.job.clustered = together > 1 && job.splits.value == together;
    if (job.clustered && (keep_weights() || stream_weights()) && sums_fit()) return true;
    plan_.job.clustered = false;
    split(tiles, 0, parts);
    if (keep_weights()) return true;
    // A last wave of few tiles would leave the other multiprocessors idle.
    if (last > 0 && splits_last(tiles, steps)) {
      split(tiles, tiles - last, input_parts(last, most));
    }
    return stream_weights();
  }

  // Whether a block's sums fit where y and the weights were.
  bool sums_fit() const {
    return plan_.shared_bytes - (tile_.of_words ? kInputBoxAlignment : 0) >= tile_.pixels * tile_.channels * 4;
  }

  // All weights of a tile, where they fit beside three buffers of y and nine of ten multiprocessors are used.
  bool keep_weights() {
    const InputJob& job = plan_.job;
    const std::int64_t all = std::int64_t(job.split_chunks) * job.steps * step_bytes();
    const std::int64_t used = kInputAimBlocks / plan_.combinations * plan_.combinations;
    if (all + 3 * job.raw_bytes > most_shared_ || used * 10 < kInputAimBlocks * 9) return false;
    const std::int64_t stage = stage_of(kInputKeptBytes), stages = job.split_chunks * job.steps / stage;
    return stages <= kMostInputBuffers && buffers(true, stage, stages);
  }

  bool stream_weights() {
    const std::int64_t stage = stage_of(kInputStageBytes);
    const std::int64_t some = std::max<std::int64_t>(2, ceil_div(kInputWeightBytes, stage * step_bytes()));
    const std::int64_t all = std::int64_t(plan_.job.chunks) * plan_.job.steps / stage;
    return buffers(false, stage, std::min<std::int64_t>({some, all + 1, kMostInputBuffers}));
  }

  std::int64_t step_bytes() const { return tile_.channels * 32; }
  // The most steps that divide a chunk's, in whole turns, and are at most that many bytes of weights; or one turn.
  std::int64_t stage_of(std::int64_t bytes) const {
    if (tile_.of_words) return kInputBoxSteps;
    std::int64_t stage = tile_.turn;
    for (std::int64_t steps = tile_.turn; steps <= plan_.job.steps; steps += tile_.turn)
      if (plan_.job.steps % steps == 0 && steps * step_bytes() <= bytes) stage = steps;
    return stage;
  }

  bool buffers(bool resident, std::int64_t stage, std::int64_t stages) {
    InputJob& job = plan_.job;
    const std::int64_t weights = stages * stage * step_bytes();
    job.resident = resident, job.stage_steps = std::int32_t(stage), job.weight_buffers = std::int32_t(stages);
    job.raw_buffers = std::int32_t(std::min<std::int64_t>(kMostInputBuffers / 4, (most_shared_ - weights) / job.raw_bytes));
    plan_.shared_bytes = int(staging_ + weights + job.raw_buffers * job.raw_bytes);
    if (tile_.of_words) plan_.shared_bytes += kInputBoxAlignment;
    return weights < most_shared_ && job.raw_buffers >= 2;
  }

  bool counts() {
    InputJob& job = plan_.job;
    job.x_n = p_.x.n, job.x_c = p_.x.c, job.y_n = p_.y.n, job.y_c = p_.y.c, job.w_ic = p_.w.n, job.w_oc = p_.w.c;
    const Strides* const strides[3] = {&p_.x, &p_.y, &p_.w};
    std::int64_t* const axes[3] = {job.x_axis, job.y_axis, job.w_axis};
    for (int i = 0; i < 3; ++i) axes[i][0] = strides[i]->d, axes[i][1] = strides[i]->h, axes[i][2] = strides[i]->w;
    const std::int64_t taps = kernel_taps(p_), run = job.chunk_channels * taps;
    constexpr std::int64_t kAimRun = 128;  // elements of a row: a lane waits once for all of its own
    job.pack_chunks = std::int32_t(std::min<std::int64_t>(job.chunks, std::max<std::int64_t>(1, kAimRun / run)));
    plan_.pack_pitch = std::int32_t(job.pack_chunks * run + 32 / element_ / 2 + 1);
    plan_.pack_bytes = int(8 * plan_.pack_pitch * element_);
    job.pack_blocks = make_divisor(ceil_div(job.chunks, job.pack_chunks)), job.pack_steps = make_divisor(job.steps);
    const std::int64_t pack_blocks = p_.groups * job.channel_tiles.value * (tile_.channels / 8) * job.pack_blocks.value;
    if (pack_blocks >= kMostInputCount || job.chunks * run >= kMostInputCount || job.ic >= kMostInputCount) return false;
    plan_.pack_blocks = unsigned(pack_blocks);
    plan_.packed_bytes =
        tile_.of_words ? 0 : p_.groups * job.channel_tiles.value * job.chunks * std::int64_t(job.steps) * tile_.channels * 32;
    plan_.workspace_bytes = plan_.packed_bytes;
    if (!job.clustered) plan_.workspace_bytes += std::int64_t(plan_.blocks - job.whole) * tile_.pixels * tile_.channels * 4;
    const std::int64_t outer = (p_.batch > 1 ? p_.x.n : 0) | p_.x.d | p_.x.h | p_.x.c | p_.in_w;
    const auto are_vectors = [&](std::int64_t pixels) {
      return p_.x.w == 1 && outer % pixels == 0 && std::int64_t(job.axis[2].tile.value) % pixels == 0;
    };
    job.wide = are_vectors(2), job.together = std::int32_t(are_vectors(16 / element_) ? 16 / element_ : job.wide ? 2 : 1);
    job.later = later_ ? 1 : 0;
    return true;
  }

  const Problem& p_;
  const InputTileSize& tile_;
  const std::int64_t element_, staging_, most_shared_, alignment_;
  const bool later_;
  const Axis axes_[3];
  std::int64_t unit_channels_ = 4, patch_bytes_ = 0;
  InputPlan plan_;
};

}  // namespace
}  // namespace upfold::cuda
