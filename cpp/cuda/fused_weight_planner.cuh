// What the plans of the fused gradient of the weight share (fused_weight_plan.cuh, fused_weight_boxes_plan.cuh).
#pragma once

#include <algorithm>

#include "fused_weight_launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostCount = std::int64_t(1) << 30;
constexpr std::int64_t kMostPartial = std::int64_t(64) << 20;  // bytes of partial sums, beyond the first part
constexpr std::int64_t kMultiprocessors = 132;                 // those of an H200: parts do not depend on the device
constexpr std::int64_t kMultiprocessorBytes = 228 << 10, kReservedBytes = 1 << 10;

// Those that clusters of four blocks fill: they lie within groups of multiprocessors, whose sizes are no multiples of four (H100:
// 128 blocks took two waves).
constexpr std::int64_t kClusteredMultiprocessors = 120;

// What a block reads of others of its cluster in a microsecond, in bytes (H100).
constexpr double kGatheredBytesMicrosecond = 25e3;
// What a block costs beside its steps, in microseconds, and bytes of partial sums that are added in one (H200).
constexpr double kBlockMicroseconds = 3.0, kSumBytesMicrosecond = 1.5e6;

int log_of(std::int64_t value) {
  int log = 0;
  while ((std::int64_t(2) << log) <= value) ++log;
  return log;
}

// The most bytes, a power of two and at most so many, that divide all of these.
std::int64_t divisor_of(std::int64_t most, std::initializer_list<std::int64_t> bytes) {
  for (std::int64_t b : bytes)
    while (b % most != 0) most /= 2;
  return most;
}

// Steps are `rows` rows of `row_vectors` vectors of pixels, `chunks` of which are a row of x.
struct WeightCut {
  std::int64_t rows, row_vectors, chunks;
  std::int64_t products() const { return (rows * row_vectors + 1) / 2; }
};

class WeightPlanner {
 public:
  virtual ~WeightPlanner() = default;

  bool supported() const {
    if (p_.op != Operator::kConvTransposeWeight || p_.batch == 0) return false;
    if (p_.dtype != Dtype::kFloat32 && p_.dtype != Dtype::kFloat16 && p_.dtype != Dtype::kBFloat16) return false;
    if ((p_.x.w != 1 && p_.in_w > 1) || (p_.y.w != 1 && p_.out_w > 1)) return false;
    for (const Axis& a : {axis_d(p_), axis_h(p_), axis_w(p_)}) {
      if (std::max({a.in, a.out, a.kernel, a.stride, a.pad, a.dilation}) > kMostCount) return false;
      if (a.in > kMostCount / a.stride || a.kernel > kMostCount / a.dilation) return false;
    }
    const std::int64_t rows = p_.in_d * p_.in_h;
    return p_.in_d <= kMostCount / p_.in_h && p_.batch <= kMostCount / rows && units_ <= kMostCount / 64 &&
           in_channels_per_group(p_) <= kMostCount && p_.groups <= kMostCount;
  }

  // Parts of the reduction: as many as keep the blocks of a large device busy in whole waves.
  bool split(std::int64_t workspace_cap) {
    workspace_cap_ = workspace_cap;
    part_elements_ = units_ * tile_.taps * kPlaneChannels * sum_pitch() * p_.groups;
    if (workspace_cap < packed_bytes_ || tiles() > kMostCount) return false;
    double best = -1;
    split_together(1, best);
    if (best < 0 || !shares())
      for (std::int64_t together = 2; together <= most_together_; together *= 2) split_together(together, best);
    return best >= 0 && tiles() * parts_ <= kMostCount;
  }

 protected:
  const Problem& p_;
  const FusedWeightTileSize& tile_;
  Axis w_;
  // Elements: of a vector; in y from the first column that is copied to that of pixel 0 and tap 0.
  std::int64_t size_, vector_, shift_;
  std::int64_t tap_units_, row_taps_, units_, planes_;
  // Of blocks: units of a plane, planes of 16 channels, rows of a map of x, which are one where maps are (BoxPlanner).
  std::int64_t plane_units_, channel_planes_, height_;
  // What the plans choose: how taps are read and steps are cut, bytes of a row of y, of a stage, and of what is packed first.
  FusedWeightReads reads_ = kAny;
  WeightCut cut_{};
  std::int64_t pitch_ = 0, x_bytes_ = 0, stage_bytes_ = 0, packed_bytes_ = 0, stages_ = 0, steps_ = 0;
  double step_microseconds_ = 0;
  std::int64_t channel_tiles_ = 0, unit_tiles_ = 0, part_elements_ = 0, parts_ = 0, length_ = 0, workspace_cap_ = 0;
  // Parts that a cluster of blocks adds up; how many may be.
  std::int64_t together_ = 1, most_together_ = 1;

  // Copies of y begin at multiples of `grain` bytes.
  WeightPlanner(const Problem& p, const FusedWeightTileSize& tile, std::int64_t grain) : p_(p), tile_(tile) {
    size_ = element_bytes(p.dtype), vector_ = 16 / size_, w_ = axis_w(p);
    if (w_.kernel == 1) w_.dilation = 1;
    const std::int64_t elements = grain / size_;
    shift_ = ((-w_.pad) % elements + elements) % elements;
    tap_units_ = ceil_div(w_.kernel, tile.taps), row_taps_ = p.kernel_d * p.kernel_h;
    units_ = ceil_div(out_channels_per_group(p), kPlaneChannels) * row_taps_ * tap_units_;
    channel_tiles_ = ceil_div(in_channels_per_group(p), tile.channels), unit_tiles_ = ceil_div(units_, tile.warps);
    number_planes(false);
  }
  // Bytes of the sums of a block.
  std::int64_t sum_bytes() const { return std::int64_t(tile_.taps) * kPlaneChannels * tile_.warps * tile_.channels * 4; }
  std::int64_t tiles() const { return channel_tiles_ * unit_tiles_ * p_.groups; }
  // Whether blocks are clusters for another reason, split as they are.
  virtual bool shares() const { return false; }
  // The best number of parts of which so many are added up together.
  void split_together(std::int64_t together, double& best) {
    const std::int64_t slots = (together > 2 ? kClusteredMultiprocessors : kMultiprocessors) * tile_.blocks;
    const std::int64_t bytes = part_elements_ * 4;
    const std::int64_t most = together * std::min((workspace_cap_ - packed_bytes_) / bytes, 1 + kMostPartial / bytes);
    const double gathered = double(sum_bytes() * (together - 1) / together);
    for (std::int64_t parts = together; parts <= std::min(most, steps_ + together - 1); parts += together) {
      if (parts > together && tiles() * parts > std::max(4 * slots, 2 * tiles())) break;
      const std::int64_t length = ceil_div(steps_, parts);
      if (ceil_div(steps_, length) <= parts - together) continue;
      const double block = double(length) * step_microseconds_ + kBlockMicroseconds + gathered / kGatheredBytesMicrosecond;
      const double cost =
          double(ceil_div(tiles() * parts, slots)) * block + double(parts / together * bytes) / kSumBytesMicrosecond;
      if (best < 0 || cost < best) best = cost, parts_ = parts, length_ = length, together_ = together;
    }
  }
  // `merged`: a plane is of all taps of its height.
  void number_planes(bool merged) {
    plane_units_ = merged ? p_.kernel_h * tap_units_ : tap_units_, channel_planes_ = merged ? p_.kernel_d : row_taps_;
    height_ = merged ? 1 : p_.in_h;
    const std::int64_t warps = tile_.warps, units = plane_units_;
    planes_ = warps % units == 0 ? warps / units : units % warps == 0 ? 1 : std::min(warps, (warps + units - 2) / units + 1);
  }

  std::int64_t total_rows() const { return p_.batch * p_.in_d * height_; }
  std::int64_t sum_pitch() const { return ceil_div(in_channels_per_group(p_), 8) * 8; }
  // Sums of the blocks of a multiprocessor, of 2048 taps of warps times channels.
  double sums() const { return double(tile_.taps * tile_.channels * tile_.warps) / 2048.0 * tile_.blocks; }

  // How taps of 16-bit values are read.
  FusedWeightReads half_reads() const {
    if (w_.dilation != 1) return kAny;
    if (w_.stride == 2) return tile_.taps == 2 && shift_ % 4 == 0 && w_.kernel <= 2 ? kPairs : kShiftedPairs;
    return w_.stride == 1 ? kUnitStride : kWords;
  }

  // Columns of y that so many pixels of a row read, the shift included; and bytes, with `behind` elements that nobody wants.
  std::int64_t columns(std::int64_t pixels) const {
    return shift_ + (pixels - 1) * w_.stride + (w_.kernel - 1) * w_.dilation + 1;
  }
  std::int64_t least_pitch(std::int64_t pixels, std::int64_t behind) const {
    const std::int64_t read = columns(pixels) + (tap_units_ * tile_.taps - w_.kernel) * w_.dilation + behind;
    return ceil_div(read * size_, 16) * 16;
  }
  // How many lanes meet in a bank when eight rows and four lanes of each are read; pairs are read half a warp at a time, whose
  // rows are some bytes apart.
  int conflicts(std::int64_t apart) const {
    const int words = reads_ == kPairs ? 2 : 1, rows = 8 / words;
    int banks[32] = {}, most = 0;
    for (int row = 0; row < rows; ++row)
      for (int lane = 0; lane < 4; ++lane)
        for (int word = 0; word < words; ++word)
          most = std::max(most, ++banks[(row * (apart / 4) + lane * w_.stride % 32 + word) % 32]);
    return most;
  }
  // The same of four taps of a pixel, four rows at a time, two of which have its neighbour's.
  int conflicts_of_fours(std::int64_t apart) const {
    int banks[32] = {}, most = 0;
    for (int row = 0; row < 4; ++row)
      for (int lane = 0; lane < 4; ++lane)
        for (int word = 0; word < 2; ++word)
          most = std::max(most, ++banks[(row * (apart / 4) + (2 * lane + row / 2) * w_.stride / 2 % 32 + word) % 32]);
    return most;
  }

  FusedWeightPlan plan() const {
    FusedWeightPlan plan{};
    plan.possible = true, plan.reads = reads_, plan.parts = parts_;
    plan.job = job();
    plan.sum = sum();
    plan.blocks = unsigned(channel_tiles_ * unit_tiles_ * p_.groups * parts_);
    plan.threads = unsigned(tile_.threads);
    plan.sum_blocks = unsigned(cut_sum(plan.sum)), plan.sum.weight_blocks = plan.sum_blocks;
    plan.partial_bytes = parts_ / together_ * part_elements_ * 4, plan.workspace_bytes = plan.partial_bytes + packed_bytes_;
    return plan;
  }

 private:
  FusedWeightJob job() const {
    FusedWeightJob job{};
    job.chunks = make_divisor(cut_.chunks), job.in_h = make_divisor(height_), job.in_d = make_divisor(p_.in_d);
    job.rows = make_divisor(cut_.rows), job.row_vectors = make_divisor(cut_.row_vectors);
    job.total_rows = std::uint32_t(total_rows()), job.steps = std::uint32_t(steps_), job.length = std::uint32_t(length_);
    job.step_vectors = std::int32_t(cut_.rows * cut_.row_vectors), job.products = std::int32_t(cut_.products());
    job.channel_tiles = make_divisor(channel_tiles_), job.unit_tiles = make_divisor(unit_tiles_);
    job.groups = make_divisor(p_.groups), job.together = make_divisor(together_), job.tap_units = make_divisor(plane_units_),
    job.row_taps = make_divisor(channel_planes_);
    job.kernel_h = make_divisor(channel_planes_ / p_.kernel_d);
    job.units = std::int32_t(units_), job.block_planes = std::int32_t(planes_);
    job.in_channels = std::int32_t(in_channels_per_group(p_)), job.out_channels = std::int32_t(out_channels_per_group(p_));
    job.in_w = std::int32_t(p_.in_w);
    job.out_d = std::int32_t(p_.out_d), job.out_h = std::int32_t(p_.out_h), job.out_w = std::int32_t(p_.out_w);
    int i = 0;
    for (const Axis& a : {axis_d(p_), axis_h(p_), w_}) {
      job.stride[i] = std::int32_t(a.stride), job.pad[i] = std::int32_t(a.pad), job.dilation[i++] = std::int32_t(a.dilation);
    }
    job.x_n = p_.x.n, job.x_c = p_.x.c, job.x_d = p_.x.d, job.x_h = p_.x.h;
    job.y_n = p_.y.n, job.y_c = p_.y.c, job.y_d = p_.y.d, job.y_h = p_.y.h;
    job.y_at = std::int32_t(x_bytes_), job.shift = std::int32_t(shift_ * size_), job.pitch = std::int32_t(pitch_);
    job.stage_bytes = std::int32_t(stage_bytes_), job.stages = std::int32_t(stages_);
    job.sum_pitch = std::int32_t(sum_pitch());
    return job;
  }

  // Blocks of the sum: shares of the parts until threads read theirs in one batch and blocks keep a large device busy, or until
  // there are so many that they hide each other's waits. Few shares have whole lines of channels, more have more outputs.
  std::int64_t cut_sum(FusedWeightSumJob& sum) const {
    constexpr std::int64_t kManyBlocks = 8 * kMultiprocessors;
    for (std::int32_t shares = 0;; ++shares) {
      const std::int64_t most = std::min<std::int64_t>(sum_pitch(), shares < 2 ? 32 : 16);
      std::int32_t channels = 3;
      while (std::int64_t(1) << channels < most) ++channels;
      sum.share_log = shares, sum.channel_log = channels, sum.output_log = kSumThreadsLog + 2 - shares - channels;
      sum.channel_tiles = make_divisor(ceil_div(in_channels_per_group(p_), std::int64_t(1) << channels));
      sum.output_tiles = make_divisor(ceil_div(std::int64_t(sum.outputs), std::int64_t(1) << sum.output_log));
      const std::int64_t blocks = std::int64_t(sum.channel_tiles.value) * sum.output_tiles.value * p_.groups;
      const bool enough = blocks >= kMultiprocessors && sum.parts <= std::int64_t(kPartBatch) << shares;
      if (enough || blocks >= kManyBlocks || shares == kMostSumShares || std::int64_t(2) << shares > sum.parts) return blocks;
    }
  }

  FusedWeightSumJob sum() const {
    FusedWeightSumJob sum{};
    sum.taps = make_divisor(kernel_taps(p_)), sum.kernel_w = make_divisor(p_.kernel_w);
    sum.kernel_h = make_divisor(p_.kernel_h), sum.row_taps = make_divisor(row_taps_), sum.unit_taps = make_divisor(tile_.taps);
    sum.tap_units = std::int32_t(tap_units_), sum.in_channels = std::int32_t(in_channels_per_group(p_));
    sum.outputs = std::int32_t(out_channels_per_group(p_) * kernel_taps(p_)), sum.parts = std::int32_t(parts_ / together_);
    sum.row_parts = std::int32_t(parts_);
    sum.sum_pitch = std::int32_t(sum_pitch());
    sum.part_elements = part_elements_, sum.group_elements = part_elements_ / p_.groups;
    sum.w_n = p_.w.n, sum.w_c = p_.w.c, sum.w_d = p_.w.d, sum.w_h = p_.w.h, sum.w_w = p_.w.w;
    return sum;
  }
};

}  // namespace
}  // namespace upfold::cuda
