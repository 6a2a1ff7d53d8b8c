// The planner of the fused method; host code, for one source.
#pragma once

#include <algorithm>

#include "fused_plan.h"
#include "fused_reach.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kWeightStageBytes = 64 << 10;  // aim for one stage of the weights of all blocks of a multiprocessor
constexpr std::int64_t kAimBlocks = 132;              // on each of as many multiprocessors, where the reduction can be split
constexpr std::int64_t kLeastSplitChunks = 2;
constexpr std::int64_t kMostPatch = 4096;      // inputs of a patch
constexpr std::int64_t kFixedBytes = 3 << 10;  // of shared memory that a block takes beside what is counted here
// The same of blocks of warpgroups.
constexpr std::int64_t kGroupStageBytes = 12 << 10, kWholeStageBytes = 64 << 10, kGroupFixedBytes = 22 << 10;
// And of those whose rows are pixels; buffers of weights at the least.
constexpr std::int64_t kPixelStageBytes = 16 << 10, kPixelFixedBytes = 2 << 10;
constexpr int kWeightBuffers = 4, kPixelStages = 24, kFewPixelStages = 16;

int log2_ceil(std::int64_t v) {
  int log = 0;
  while ((std::int64_t(1) << log) < v) ++log;
  return log;
}

class Planner {
 public:
  Planner(const Problem& p, const FusedTileSize& tile, const SharedMemory& shared, std::int64_t alignment)
      : p_(p),
        tile_(tile),
        shared_(shared),
        element_(element_bytes(p.dtype)),
        alignment_(alignment),
        axes_{axis_d(p), axis_h(p), axis_w(p)} {}

  // Weights of all shifts at a time and many buffers of them, where these fit, or else of groups of shifts, and fewer.
  FusedPlan plan() {
    for (const bool generous : {true, false}) {
      generous_ = generous, plan_ = {};
      plan_.possible = lay_out();
      if (plan_.possible) break;
    }
    return plan_;
  }

 private:
  bool lay_out() {
    FusedJob& job = plan_.job;
    const std::int64_t sets[3] = {1, tile_.phases_h, tile_.phases_w};
    std::int64_t box = 1, slots = 1, set_count = 1;
    Divisor* const set_divisors[3] = {&job.sets_d, &job.sets_h, &job.sets_w};
    for (int i = 0; i < 3; ++i) {
      if (!axis_fits(axes_[i], kMost)) return false;
      const Reach reach = reach_of(axes_[i], sets[i]);
      if (tile_.whole && !is_whole(axes_[i], sets[i], reach)) return false;
      FusedAxis& axis = job.axis[i];
      axis.taps = axis_taps(axes_[i]);
      axis.in = std::int32_t(axes_[i].in), axis.out = std::int32_t(axes_[i].out);
      axis.low = std::int32_t(reach.low), axis.extent = std::int32_t(reach.high - reach.low + 1);
      axis.units = make_divisor(ceil_div(axes_[i].out, axes_[i].stride));
      *set_divisors[i] = make_divisor(ceil_div(std::min(axes_[i].stride, axes_[i].out), sets[i]));
      box *= axis.extent, slots *= reach.most_taps, set_count *= set_divisors[i]->value;
      if (box > kMostShifts || set_count > kMost) return false;
    }
    if (!channels(slots, set_count)) return false;
    plan_.weight_end = plan_.workspace_bytes;
    return pixels() && counts(set_count) && (!is_listed() || fill_slots(job, axes_, tile_, std::int32_t(box_)));
  }

  bool channels(std::int64_t slots, std::int64_t set_count) {
    FusedJob& job = plan_.job;
    const std::int64_t chunk = tile_.vectors * kWordBytes / element_;
    job.ic = std::int32_t(in_channels_per_group(p_)), job.oc = std::int32_t(out_channels_per_group(p_));
    job.batch = std::int32_t(p_.batch), job.groups = std::uint32_t(p_.groups);
    job.chunks = std::int32_t(ceil_div(job.ic, chunk));
    job.oc_tiles = make_divisor(ceil_div(job.oc, tile_.channels));
    const std::int64_t slot_bytes = std::int64_t(tile_.vectors) * tile_.channels * kWordBytes;
    const std::int64_t phases = tile_.phases_h * tile_.phases_w;
    const std::int64_t box = std::int64_t(job.axis[0].extent) * job.axis[1].extent * job.axis[2].extent;
    job.most_slots = std::int32_t(slots), box_ = box;
    std::int64_t shifts = box;
    const std::int64_t stage_bytes = tile_.pixels   ? kPixelStageBytes
                                     : warpgroups() ? kGroupStageBytes * tile_.channels / 64
                                                    : kWeightStageBytes / tile_.blocks;
    if (slots * slot_bytes > stage_bytes || tile_.pixels) shifts = std::max<std::int64_t>(1, stage_bytes / slot_bytes / phases);
    job.weight_buffers = tile_.pixels   ? (generous_ ? kPixelStages : kFewPixelStages) / tile_.vectors
                         : warpgroups() ? kWeightBuffers
                                        : 2;
    if (warpgroups() && generous_ && slots * slot_bytes <= kWholeStageBytes) shifts = box, job.weight_buffers = 2;
    job.group_shifts = std::int32_t(shifts);
    job.stage_slots = std::int32_t(std::min(slots, shifts * phases));
    plan_.list_bytes = is_listed() ? 0 : ceil_div(set_count * std::int64_t(sizeof(ShiftList)), 256) * 256;
    plan_.workspace_bytes = plan_.list_bytes + p_.groups * set_count * job.oc_tiles.value * job.chunks * slots * slot_bytes;
    plan_.shared_bytes = int(job.weight_buffers * job.stage_slots * slot_bytes + (warpgroups() ? kSwizzleBytes : 0));
    return true;
  }

  // Rows (along the width) of a patch, and inputs of one.
  std::int64_t rows_of(const int (&logs)[4]) const {
    std::int64_t rows = std::int64_t(1) << logs[3];
    for (int i = 0; i < 2; ++i) rows *= (std::int64_t(1) << logs[i]) + plan_.job.axis[i].extent - 1;
    return rows;
  }
  // Rows of packed x begin at a multiple of 8 pixels, so that the swizzle of a patch is that of the whole.
  std::int64_t width_of(const int (&logs)[4]) const {
    const std::int64_t width = (std::int64_t(1) << logs[2]) + plan_.job.axis[2].extent - 1;
    return tile_.packed_inputs ? ceil_div(width, 8) * 8 : width;
  }
  std::int64_t patch_bytes(std::int64_t pixels) const { return tile_.vectors * ceil_div(pixels, 8) * 8 * kWordBytes; }

  // x can be read 16 bytes of channels at a time.
  bool is_dense() const {
    const std::int64_t vector = kWordBytes / element_;
    const std::int64_t steps = (p_.batch > 1 ? p_.x.n : 0) | p_.x.d | p_.x.h | p_.x.w | plan_.job.ic;
    return p_.x.c == 1 && steps % vector == 0 && alignment_ % kWordBytes == 0;
  }

  // The same of runs of units of all samples, which are the inputs in order where no input is left out and none is beside them.
  int grain_of_runs() const {
    bool in_order = p_.in_w == 1 || p_.x.w == 1;
    in_order = in_order && (p_.in_h == 1 || p_.x.h == p_.in_w) && (p_.in_d == 1 || p_.x.d == p_.in_w * p_.in_h);
    for (const FusedAxis& axis : plan_.job.axis)
      in_order = in_order && axis.low == 0 && axis.units.value == std::uint32_t(axis.in);
    const std::int64_t steps = (p_.batch > 1 ? p_.x.n : 0) | p_.x.c | in_pixels(p_);
    const std::int64_t bytes = in_order ? steps * element_ | alignment_ | kWordBytes : element_;
    return int(bytes & -bytes);
  }

  // Bytes of the widest aligned copies that make up the rows of every patch whose width is 1 << width_log units.
  int grain_of(int width_log) const {
    if (plan_.job.flat) return grain_of_runs();
    if (p_.in_w > 1 && p_.x.w != 1) return int(element_);
    std::int64_t steps = (p_.batch > 1 ? p_.x.n : 0) | p_.x.d | p_.x.h | p_.x.c | p_.in_w;
    if ((std::int64_t(1) << width_log) < plan_.job.axis[2].units.value) steps |= std::int64_t(1) << width_log;
    const std::int64_t bytes = steps * element_ | alignment_ | kWordBytes;
    return int(bytes & -bytes);
  }

  // How raw x lies in shared memory; patches of `rows` rows of `width` inputs.
  FusedRaw raw_of(std::int64_t rows, std::int64_t width, int grain) const {
    FusedRaw raw = {};
    raw.dense = is_dense();
    if (raw.dense) {
      raw.grain = kWordBytes, raw.columns = std::int32_t(rows * width);
      raw.row_columns = make_divisor(width), raw.row_groups = make_divisor(1);
      raw.pitch = std::int32_t(ceil_div(rows * width, 8) * 8 * kWordBytes);
      return raw;
    }
    raw.grain = grain;
    const std::int64_t elements = raw.grain / element_, low = plan_.job.axis[2].low;
    raw.skew = std::int32_t(low - floor_div(low, elements) * elements);
    const std::int64_t row_columns = ceil_div(raw.skew + width, elements), span = ceil_div(row_columns * elements, 8) * 8;
    raw.columns = std::int32_t(rows * row_columns), raw.span = std::int32_t(span);
    raw.row_columns = make_divisor(row_columns);
    const std::int64_t group = element_ == 2 ? 8 : 1;
    raw.row_groups = make_divisor(span / group), raw.groups = std::int32_t(rows * span / group);
    // Eight channels of 16 bytes each lie in different banks where their distance is an odd number of 16 bytes; four channels of
    // eight words each where it is 2 of these more than a multiple of 4.
    const std::int64_t vectors = rows * span * element_ / kWordBytes;
    raw.pitch = std::int32_t((tile_.pixels && element_ == 4 ? ceil_div(vectors, 4) * 4 + 2 : vectors | 1) * kWordBytes);
    return raw;
  }

  std::int64_t raw_bytes(const FusedRaw& raw) const {
    return tile_.vectors * (raw.dense ? 1 : kWordBytes / element_) * std::int64_t(raw.pitch);
  }

  // Shared memory for raw x, its columns, and the patch.
  std::int64_t input_bytes(const FusedRaw& raw, std::int64_t pixels) const {
    if (tile_.pixels) return raw.columns * std::int64_t(sizeof(RawColumn)) + 2 * raw_bytes(raw);
    if (tile_.packed_inputs) return 2 * patch_bytes(pixels);
    return raw.columns * std::int64_t(sizeof(RawColumn)) + raw_bytes(raw) + (warpgroups() ? 2 : 1) * patch_bytes(pixels);
  }

  bool warpgroups() const { return tile_.products > 0; }
  bool is_listed() const { return warpgroups() || tile_.pixels; }
  std::int64_t fixed_bytes() const {
    return tile_.pixels ? kPixelFixedBytes + tile_.staged_bytes : warpgroups() ? kGroupFixedBytes : kFixedBytes;
  }

  // Whether the groups of 8 units that one product of a warpgroup reads lie at one distance from each other.
  bool is_even(int h, int w) const {
    const int row = log2_ceil(8 * tile_.products), rows = log2_ceil(tile_.product_groups);
    return !warpgroups() || (w == row && h >= rows) || w >= row + rows;
  }

  // Units of a tile on each axis, and samples: the least work that is paid for and not needed.
  bool choose_tile(std::int64_t limit, int (&best)[4]) const {
    const int all = log2_ceil(tile_.units);
    int most[3];
    for (int i = 0; i < 3; ++i) most[i] = log2_ceil(plan_.job.axis[i].units.value);
    if (warpgroups()) {  // which has no smaller ones
      const int row = log2_ceil(8 * tile_.products), rows = log2_ceil(tile_.product_groups);
      most[2] = std::max(most[2], most[1] > 0 ? row : row + rows);
      if (most[1] > 0) most[1] = std::max(most[1], rows);
    }
    double least = 0;
    bool found = false;
    for (int w = 0; w <= std::min(all, most[2]); ++w) {
      for (int h = 0; h <= std::min(all - w, most[1]); ++h) {
        for (int d = 0; d <= std::min(all - w - h, most[0]); ++d) {
          if (!is_even(h, w)) continue;
          const int logs[4] = {d, h, w, all - w - h - d};
          const std::int64_t rows = rows_of(logs), row = width_of(logs);
          if (rows * row > kMostPatch) continue;
          const FusedRaw raw = raw_of(rows, row, grain_of(w));
          if (plan_.shared_bytes + input_bytes(raw, rows * row) > limit) continue;
          double tiles = double(ceil_div(p_.batch, std::int64_t(1) << logs[3]));
          for (int i = 0; i < 3; ++i) tiles *= double(ceil_div(plan_.job.axis[i].units.value, std::int64_t(1) << logs[i]));
          // Copies into shared memory cost by their number, and about as much as the products of as many units.
          const double copies =
              tile_.packed_inputs
                  ? 0.0
                  : double(raw.columns) * (raw.dense ? tile_.vectors : tile_.vectors * kWordBytes / double(element_));
          const double cost = tiles * (double(tile_.units) + 0.15 * copies + 0.25 * double(rows * row));
          if (!found || cost < least) least = cost, found = true, std::copy(logs, logs + 4, best);
        }
      }
    }
    return found;
  }

  bool pixels() {
    FusedJob& job = plan_.job;
    job.units = p_.batch;
    job.flat = true;
    for (FusedAxis& axis : job.axis) {
      job.units *= axis.units.value;
      job.flat = job.flat && axis.extent == 1;
    }
    if (job.units > kMost || (job.flat && tile_.packed_inputs)) return false;
    int logs[4] = {0, 0, 0, 0};
    // As many blocks of a multiprocessor as the kernel was made for, or else one.
    const std::int64_t most = shared_.of_block - fixed_bytes(), shared = shared_.of_multiprocessor / tile_.blocks - fixed_bytes();
    if (!job.flat && !choose_tile(std::min(most, shared), logs) && !choose_tile(most, logs)) return false;
    for (int i = 0; i < 3; ++i) {
      FusedAxis& axis = job.axis[i];
      axis.tile_log = logs[i], axis.tile = 1 << logs[i];
      axis.tiles = make_divisor(job.flat ? 1 : ceil_div(axis.units.value, axis.tile));
      axis.patch = make_divisor(axis.tile + axis.extent - 1);
    }
    job.tile_n = 1 << logs[3];
    std::int64_t tiles = ceil_div(p_.batch, job.tile_n);
    for (const FusedAxis& axis : job.axis) tiles *= axis.tiles.value;
    if (job.flat) tiles = ceil_div(job.units, tile_.units);
    job.pixel_tiles = make_divisor(tiles);
    const std::int64_t rows = job.flat ? 1 : rows_of(logs), width = job.flat ? tile_.units : width_of(logs);
    job.patch_pixels = std::int32_t(rows * width), job.patch_pitch = std::int32_t(ceil_div(rows * width, 8) * 8);
    if (tile_.packed_inputs) job.axis[2].patch = make_divisor(width);
    const bool in_rows = !job.flat && warpgroups() && (std::int64_t(1) << logs[2]) == 8 * tile_.products;
    job.group_pitch = std::int32_t(in_rows ? width : 8 * tile_.products);
    job.raw = raw_of(rows, width, grain_of(logs[2]));
    plan_.shared_bytes += int(input_bytes(job.raw, rows * width));
    job.raw_bytes = std::int32_t(raw_bytes(job.raw)), job.raw_buffers = tile_.pixels ? 2 : 1;
    if (tile_.pixels) reads();
    if (tile_.packed_inputs) return packed_inputs(most, rows * width);
    if (warpgroups() && plan_.shared_bytes + job.raw_bytes <= most) {
      job.raw_buffers = 2, plan_.shared_bytes += job.raw_bytes;
    }
    return true;
  }

  // x in workspace, laid out as patches are; as many patches in shared memory as fit.
  bool packed_inputs(std::int64_t most, std::int64_t pixels) {
    FusedJob& job = plan_.job;
    std::int64_t padded = 1;
    for (FusedAxis& axis : job.axis) {
      std::int64_t size = std::int64_t(axis.tiles.value) * axis.tile + axis.extent - 1;
      if (&axis == &job.axis[2]) {
        size = ceil_div(size, 8) * 8;
        job.live_columns = std::int32_t(axis.units.value) + axis.extent - 1;
      }
      axis.padded = make_divisor(size), padded *= size;
      if (padded > kMost) return false;
    }
    const std::int64_t all = padded * p_.batch * p_.groups * job.chunks;
    if (all > kMost) return false;
    const std::int64_t runs = ceil_div(padded, (element_ == 4 ? kPackedPixels<4> : kPackedPixels<2>));
    const std::int64_t warps =
        runs * p_.batch * p_.groups * ceil_div(job.chunks, element_ == 4 ? kPackedChunks<4> : kPackedChunks<2>);
    plan_.input_blocks = unsigned(ceil_div(warps, kPackThreads / 32));
    plan_.workspace_bytes += all * tile_.vectors * kWordBytes;
    job.raw_buffers = 2;
    while (job.raw_buffers < kMostPatches && plan_.shared_bytes + patch_bytes(pixels) <= most)
      ++job.raw_buffers, plan_.shared_bytes += int(patch_bytes(pixels));
    return true;
  }

  void reads() {
    FusedJob& job = plan_.job;
    const std::int32_t pitch = job.raw.pitch;
    if (job.raw.dense) {
      job.reads = {PixelReads::kWords, kWordBytes, 4, pitch, 2 * pitch, 0};
      return;
    }
    if (!job.flat) job.axis[2].patch = make_divisor(job.raw.span);  // pixels are numbered as they lie
    const std::int32_t skew = job.flat ? 0 : job.raw.skew;
    if (element_ == 4) {
      job.reads = {job.flat ? PixelReads::kPairs : PixelReads::kWords, 4, pitch, 4 * pitch, 8 * pitch, skew};
    } else {
      job.reads = {job.flat ? PixelReads::kMatrices : PixelReads::kHalves, 2, 2 * pitch, 8 * pitch, 16 * pitch, skew};
    }
  }

  // Blocks whose rows are pixels keep all weights where they fit and the multiprocessors are still used, and copy as much of x
  // ahead as fits.
  void buffers(std::int64_t combinations) {
    FusedJob& job = plan_.job;
    const std::int64_t most = shared_.of_block - fixed_bytes();
    const std::int64_t stage = std::int64_t(job.stage_slots) * tile_.vectors * tile_.channels * kWordBytes;
    const std::int64_t all = job.split_chunks * ceil_div(box_, job.group_shifts), used = kAimBlocks / combinations * combinations;
    const std::int64_t more = (all - job.weight_buffers) * stage;
    // Three buffers of x at the least, and nine of ten multiprocessors.
    if (p_.groups == 1 && all <= kMostWeightBuffers && plan_.shared_bytes + more + job.raw_bytes <= most &&
        used * 10 >= kAimBlocks * 9) {
      job.resident = true, job.weight_buffers = std::int32_t(all), plan_.shared_bytes += int(more);
    }
    while (job.raw_buffers < kMostRawBuffers && plan_.shared_bytes + job.raw_bytes <= most)
      ++job.raw_buffers, plan_.shared_bytes += job.raw_bytes;
  }

  bool counts(std::int64_t set_count) {
    FusedJob& job = plan_.job;
    job.x_n = p_.x.n, job.x_c = p_.x.c, job.y_n = p_.y.n, job.y_c = p_.y.c, job.w_ic = p_.w.n, job.w_oc = p_.w.c;
    const Strides* const strides[3] = {&p_.x, &p_.y, &p_.w};
    std::int64_t* const axes[3] = {job.x_axis, job.y_axis, job.w_axis};
    for (int i = 0; i < 3; ++i) axes[i][0] = strides[i]->d, axes[i][1] = strides[i]->h, axes[i][2] = strides[i]->w;
    job.activation = p_.activation, job.slope = p_.activation_slope;
    const std::int64_t fixed = p_.groups * set_count * job.oc_tiles.value;
    if (fixed > kMost || fixed * job.pixel_tiles.value > kMost || fixed * job.chunks * tile_.vectors > kMost) return false;
    const std::int64_t blocks = fixed * job.pixel_tiles.value;
    // A constant aim: the sums are the same on every device.
    const std::int64_t wanted = std::min(kAimBlocks * tile_.blocks / blocks, job.chunks / kLeastSplitChunks);
    job.split_chunks = std::int32_t(wanted > 1 ? ceil_div(job.chunks, wanted) : job.chunks);
    job.splits = make_divisor(ceil_div(job.chunks, job.split_chunks));
    if (tile_.pixels) {
      plan_.combinations = std::int64_t(job.splits.value) * job.oc_tiles.value * set_count;
      buffers(plan_.combinations);
    }
    plan_.packed_end = plan_.workspace_bytes;
    if (job.splits.value > 1) {
      const std::int64_t sums = std::int64_t(tile_.channels) * tile_.phases_h * tile_.phases_w * tile_.units;
      plan_.workspace_bytes += blocks * job.splits.value * sums * std::int64_t(sizeof(float));
    }
    plan_.blocks = unsigned(blocks * job.splits.value), plan_.pack_blocks = unsigned(fixed * job.chunks * tile_.vectors);
    return plan_.shared_bytes <= shared_.of_block - fixed_bytes();
  }

  const Problem& p_;
  const FusedTileSize& tile_;
  const SharedMemory shared_;
  const std::int64_t element_, alignment_;
  std::int64_t box_ = 0;  // shifts of a set, at the most
  bool generous_ = true;
  Axis axes_[3];
  FusedPlan plan_;
};

}  // namespace

// Where packed x is beyond the workspace's cap, the plan is of a part of the samples. A pure function of its arguments;
// `alignment` bytes divide the address of x.
inline FusedPlan plan_fused(const Problem& p, const FusedTileSize& tile, const SharedMemory& shared, std::int64_t alignment,
                            std::int64_t workspace_cap) {
  FusedPlan plan = Planner(p, tile, shared, alignment).plan();
  Problem part = p;
  while (plan.possible && tile.packed_inputs && plan.workspace_bytes > workspace_cap && part.batch > 1) {
    part.batch = ceil_div(part.batch, 2);
    plan = Planner(part, tile, shared, alignment).plan();
  }
  plan.batch = part.batch;
  return plan;
}

}  // namespace upfold::cuda
