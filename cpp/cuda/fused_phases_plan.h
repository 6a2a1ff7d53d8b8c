// How the fused method with pairs of a channel and a phase as rows cuts a problem into blocks; host code, for one source.
#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "fused_phases.cuh"
#include "fused_phases.h"
#include "launch.cuh"

namespace upfold::cuda {

struct PhasePlan {
  PhaseJob job;
  unsigned blocks;  // 0: the tile does not fit
  int shared_bytes;
  std::int64_t tiles;  // row tiles with products times boxes
  double cost;         // what the planner expects, to compare plans of one tile
};

namespace {

class PhasePlanner {
 public:
  // `split`: in full float32 the weight lies split, which windows want.
  PhasePlanner(const Problem& p, const PhaseTileSize& tile, std::int64_t table_bytes, std::int64_t alignment, bool exact, bool split)
      : p_(p), tile_(tile), table_bytes_(table_bytes), element_(element_bytes(p.dtype)), alignment_(alignment),
        parts_(exact ? 2 : 1) {
    job_.weight_parts = exact && split ? 2 : 1;
  }

  PhasePlan plan(const SharedMemory& shared, int multiprocessors) {
    if (!axes() || !rows() || !strides()) return {};
    choose_products();
    shared_ = shared, multiprocessors_ = multiprocessors;
    return boxes() && blocks() ? plan_ : PhasePlan{};
  }

 private:
  static constexpr std::int64_t kMost = std::int64_t(1) << 30, kReservedBytes = 1 << 10, kVector = 16;
  static constexpr std::int64_t kMostInputs = 1 << 15;  // of a box: more do not fit, whatever their type

  bool axes() {
    const Axis all[3] = {axis_d(p_), axis_h(p_), axis_w(p_)};
    for (int i = 0; i < 3; ++i) {
      const Axis& a = all[i];
      PhaseAxis& to = job_.axis[i];
      if (a.stride > kMostAxisPhases || std::max({a.in, a.out, a.pad, a.kernel * a.dilation}) > kMost / a.stride) return false;
      to.in = std::int32_t(a.in), to.out = std::int32_t(a.out), to.stride = std::int32_t(a.stride), to.pad = std::int32_t(a.pad);
      to.dilation = std::int32_t(a.dilation);
      to.first_unit = std::int32_t(a.pad / a.stride);
      units_[i] = (a.out - 1 + a.pad) / a.stride - a.pad / a.stride + 1;
      if (!classes(a, i)) return false;
    }
    return true;
  }

  // Sorts the phases of an axis by the shifts at which they have taps.
  bool classes(const Axis& a, int i) {
    PhaseAxis& to = job_.axis[i];
    std::vector<std::vector<std::int64_t>> shifts(std::size_t(a.stride));
    for (std::int64_t k = 0; k < a.kernel; ++k)
      shifts[std::size_t(k * a.dilation % a.stride)].push_back(k * a.dilation / a.stride);
    std::set<std::vector<std::int64_t>> kinds(shifts.begin(), shifts.end());
    kinds.erase(std::vector<std::int64_t>());
    if (kinds.size() > kMostClasses) return false;
    int phase_count = 0, shift_count = 0;
    std::int64_t least = kMost, most = 0;
    for (const std::vector<std::int64_t>& kind : kinds) {
      if (kind.size() > kMostAxisShifts) return false;
      for (std::int64_t phase = 0; phase < a.stride; ++phase) {
        if (shifts[std::size_t(phase)] == kind) to.phases[phase_count++] = std::uint8_t(phase);
      }
      for (const std::int64_t shift : kind) {
        if (shift > 32000) return false;
        to.shifts[shift_count++] = std::int16_t(shift);
        least = std::min(least, shift), most = std::max(most, shift);
        if (i == 2) width_shifts_.insert(shift);
      }
      ++to.classes;
      to.first_phase[to.classes] = std::uint8_t(phase_count), to.first_shift[to.classes] = std::uint8_t(shift_count);
    }
    to.most_shift = std::int32_t(most), reach_[i] = most - least;
    for (std::int64_t phase = 0; phase < a.stride; ++phase) {
      if (shifts[std::size_t(phase)].empty()) without_taps_[i].push_back(phase);
    }
    return true;
  }

  // Lines of a row tile, and which class of the width each group of 16 rows is of.
  bool rows() {
    PhaseAxis &d = job_.axis[0], &h = job_.axis[1], &w = job_.axis[2];
    job_.ic = std::int32_t(in_channels_per_group(p_)), job_.oc = std::int32_t(out_channels_per_group(p_));
    job_.batch = std::int32_t(p_.batch), job_.prefill = w.stride > w.first_phase[w.classes];
    const int set_count = d.classes * h.classes;
    if (set_count > kMostPhaseSets) return false;
    std::int64_t most_lines = 0;
    for (int set = 0; set < set_count; ++set) most_lines = std::max(most_lines, lines_of_set(set));
    const auto groups_of = [&](std::int64_t lines) {
      std::int64_t groups = 0;
      for (int c = 0; c < w.classes; ++c) groups += ceil_div(lines * (w.first_phase[c + 1] - w.first_phase[c]), 16);
      return groups;
    };
    std::int64_t lines = 0;
    while (lines < most_lines && groups_of(lines + 1) * 16 <= tile_.rows) ++lines;
    if (lines == 0) return false;
    // As many row tiles, of equal size.
    lines = ceil_div(most_lines, ceil_div(most_lines, lines));
    job_.lines = std::int32_t(lines);
    int group = 0;
    std::fill(job_.group_class, job_.group_class + 32, std::uint8_t(w.classes));
    for (int c = 0; c < w.classes; ++c) {
      job_.first_group[c] = std::uint8_t(group);
      for (std::int64_t i = ceil_div(lines * (w.first_phase[c + 1] - w.first_phase[c]), 16); i > 0; --i)
        job_.group_class[group++] = std::uint8_t(c);
    }
    for (const std::int64_t shift : width_shifts_) {
      job_.all_shifts[job_.width_shifts] = std::int16_t(shift);
      job_.shift_weight[job_.width_shifts] = std::int32_t(shift * w.stride / w.dilation * p_.w.w);
      for (int g = 0; g < group; ++g)
        job_.shift_groups[job_.width_shifts] |= std::uint32_t(has_shift(job_.group_class[g], shift)) << g;
      ++job_.width_shifts;
    }
    std::int64_t tiles = 0;
    for (int set = 0; set < set_count; ++set)
      tiles += ceil_div(lines_of_set(set), lines), job_.set_tiles[set + 1] = std::int32_t(tiles);
    product_tiles_ = tiles;
    for (std::int64_t phase_d = 0; phase_d < d.stride; ++phase_d) {
      for (std::int64_t phase_h = 0; phase_h < h.stride; ++phase_h) {
        if (!is_in(without_taps_[0], phase_d) && !is_in(without_taps_[1], phase_h)) continue;
        if (job_.empty_count == kMostEmpty) return false;
        job_.empty_d[job_.empty_count] = std::uint8_t(phase_d), job_.empty_h[job_.empty_count++] = std::uint8_t(phase_h);
      }
    }
    job_.empty_lines = std::int32_t(ceil_div(std::int64_t(job_.empty_count) * job_.oc, tiles));
    if (tiles > kMost / p_.groups || job_.oc > kMost / 4096 || lines + job_.empty_lines > 2 * tile_.rows) return false;
    job_.row_tiles = make_divisor(tiles), job_.combinations = make_divisor(tiles * p_.groups);
    return true;
  }

  bool has_shift(int c, std::int64_t shift) const {
    const PhaseAxis& w = job_.axis[2];
    return std::find(w.shifts + w.first_shift[c], w.shifts + w.first_shift[c + 1], shift) != w.shifts + w.first_shift[c + 1];
  }
  static bool is_in(const std::vector<std::int64_t>& phases, std::int64_t phase) {
    return std::find(phases.begin(), phases.end(), phase) != phases.end();
  }
  std::int64_t lines_of_set(int set) const {
    const PhaseAxis &d = job_.axis[0], &h = job_.axis[1];
    const int c_d = set / h.classes, c_h = set % h.classes;
    return std::int64_t(job_.oc) * (d.first_phase[c_d + 1] - d.first_phase[c_d]) * (h.first_phase[c_h + 1] - h.first_phase[c_h]);
  }

  bool strides() {
    job_.x_n = p_.x.n, job_.x_c = p_.x.c, job_.y_n = p_.y.n, job_.y_c = p_.y.c, job_.w_ic = p_.w.n, job_.w_oc = p_.w.c;
    const Strides* const from[3] = {&p_.x, &p_.y, &p_.w};
    std::int64_t* const to[3] = {job_.x_axis, job_.y_axis, job_.w_axis};
    for (int i = 0; i < 3; ++i) to[i][0] = from[i]->d, to[i][1] = from[i]->h, to[i][2] = from[i]->w;
    if (p_.out_w == 1) job_.y_axis[2] = 1;
    job_.channels_fastest = job_.y_axis[2] != 1;
    job_.activation = p_.activation, job_.slope = p_.activation_slope;
    job_.dense = p_.x.c == 1 && p_.in_w > 1 && p_.x.w != 1;
    const std::int64_t farthest = (job_.ic - 1) * p_.w.n + (job_.oc - 1) * p_.w.c + (p_.kernel_d - 1) * p_.w.d +
                                  (p_.kernel_h - 1) * p_.w.h + (p_.kernel_w - 1) * p_.w.w;
    return farthest < kMost && (job_.dense || p_.in_w == 1 || p_.x.w == 1);
  }

  // Whether the shifts of the width are a window, and whether the two slots of a product are shifts.
  void choose_products() {
    PhaseAxis& w = job_.axis[2];
    job_.window = job_.weight_parts == parts_ && !job_.dense && job_.width_shifts <= kMostWindow && *width_shifts_.rbegin() == job_.width_shifts - 1;
    const std::int64_t slot = element_ == 2 ? 8 : 4;
    job_.folded = job_.window && element_ == 2 && job_.width_shifts == 2 && job_.ic <= slot;
    for (int c = 0; c < w.classes; ++c) job_.folded = job_.folded && has_shift(c, 0);
    job_.step_channels = std::int32_t(job_.folded ? slot : 2 * slot);
    job_.slices = make_divisor(job_.folded ? 1 : job_.width_shifts);
    if (!job_.window) return;
    // Units begin at multiples of a vector of four, as inputs do.
    units_[2] += w.first_unit % kMostWindow, w.first_unit -= w.first_unit % kMostWindow;
  }

  // Bytes of the widest copies that lie wholly inside or outside of x.
  int grain_of(std::int64_t box_w) const {
    std::int64_t steps = (p_.batch > 1 ? p_.x.n : 0) | p_.x.d | p_.x.h;
    if (job_.dense) {
      steps |= p_.x.w | job_.ic;
    } else {
      steps |= p_.x.c | p_.in_w | (box_w < units_[2] ? box_w : 0);
    }
    const std::int64_t bytes = steps * element_ | alignment_ | kVector;
    return int(bytes & -bytes);
  }

  // Lays x out in shared memory for a box and a chunk of channels; false where counts are far beyond what fits.
  bool lay_out(const std::int64_t (&box)[4], std::int64_t channels) {
    job_.grain = grain_of(box[2]);
    const std::int64_t grid_w = job_.window ? ceil_div(box[2], kMostWindow) * kMostWindow : box[2];
    const std::int64_t elements = job_.grain / element_, inputs = grid_w + reach_[2];
    const std::int64_t lines = (box[0] + reach_[0]) * (box[1] + reach_[1]) * box[3];
    for (const std::int64_t count : {inputs, box[0] + reach_[0], box[1] + reach_[1]}) {
      if (count > kMostInputs) return false;
    }
    if (lines > kMostInputs || lines * inputs > kMostInputs) return false;
    // Offsets of a box are 32-bit.
    const std::int64_t farthest = (box[3] - 1) * p_.x.n + (box[0] + reach_[0]) * p_.x.d + (box[1] + reach_[1]) * p_.x.h;
    if (farthest + (inputs + 2 * kVector) * p_.x.w > kMost) return false;
    job_.grid_w = make_divisor(grid_w);
    job_.chunk_channels = std::int32_t(ceil_div(channels, job_.step_channels) * job_.step_channels),
    job_.chunks = std::int32_t(ceil_div(job_.ic, job_.chunk_channels));
    if (job_.dense) {
      // Eight inputs of four channels in different banks.
      const std::int64_t step = ceil_div(job_.chunk_channels * element_, 32) * 32 + 16;
      job_.channel_step = std::int32_t(element_), job_.input_step = std::int32_t(step);
      job_.line_step = std::int32_t(inputs * step), job_.skew = 0;
      job_.in_row = make_divisor(inputs);
      job_.place_count = std::int32_t(lines * inputs),
      job_.copy_count = std::int32_t(lines * inputs * (job_.chunk_channels / elements));
      job_.stage_bytes = std::int32_t(lines * inputs * step);
    } else {
      const std::int64_t first = std::int64_t(job_.axis[2].first_unit) - job_.axis[2].most_shift;
      const std::int64_t multiple = job_.window ? std::max<std::int64_t>(elements, kMostWindow) : elements;
      job_.skew = std::int32_t(first - floor_div(first, multiple) * multiple);
      const std::int64_t copies = ceil_div(job_.skew + inputs, elements), span = ceil_div(copies * job_.grain, kVector) * kVector;
      // Four channels of eight inputs (in a window, of two vectors) in different banks: an odd multiple of eight inputs apart.
      const std::int64_t eight = 8 * element_, pitch = (ceil_div(lines * span, 2 * eight) * 2 + 1) * eight;
      job_.channel_step = std::int32_t(lines * span <= pitch - 2 * eight ? pitch - 2 * eight : pitch);
      job_.input_step = std::int32_t(element_), job_.line_step = std::int32_t(span);
      job_.in_row = make_divisor(copies);
      job_.place_count = std::int32_t(lines * copies), job_.copy_count = std::int32_t(lines * copies * job_.chunk_channels);
      job_.stage_bytes = job_.channel_step * job_.chunk_channels;
    }
    job_.in_h = make_divisor(box[1] + reach_[1]), job_.in_d = make_divisor(box[0] + reach_[0]);
    return lay_out_weight() && lay_out_results(box, grid_w);
  }

  bool lay_out_weight() {
    std::int64_t shifts = 1;
    for (int i = 0; i < 2; ++i) {
      std::int64_t most = 0;
      for (int c = 0; c < job_.axis[i].classes; ++c)
        most = std::max<std::int64_t>(most, job_.axis[i].first_shift[c + 1] - job_.axis[i].first_shift[c]);
      shifts *= most;
    }
    job_.steps = std::int32_t(shifts * (job_.chunk_channels / job_.step_channels));
    const std::int64_t fragments = std::int64_t(job_.chunks) * job_.steps * job_.slices.value * (tile_.rows / 16);
    if (fragments * job_.weight_parts * kFragmentBytes > shared_.of_block) return false;
    job_.weight_bytes = std::int32_t(fragments * job_.weight_parts * kFragmentBytes);
    return true;
  }

  // Room for what a line and a row of units lie behind multiples of 16 bytes; an odd number of vectors from one line to the next.
  bool lay_out_results(const std::int64_t (&box)[4], std::int64_t grid_w) {
    const std::int64_t per_vector = kVector / element_, stride = job_.axis[2].stride, box_lines = box[0] * box[1] * box[3];
    job_.staged_pitch = std::int32_t((ceil_div(grid_w * stride + 2 * (per_vector - 1), per_vector) | 1) * per_vector);
    job_.run_vectors = make_divisor(ceil_div(box[2] * stride + per_vector - 1, per_vector));
    job_.staged_line = std::int32_t(box_lines * job_.staged_pitch);
    job_.staged_bytes = std::int32_t(job_.lines * (job_.staged_line * element_ + 7 * kVector));  // and what stage_lines() may add
    job_.run_count = std::int32_t((job_.lines + job_.empty_lines) * box_lines);
    return true;
  }

  // The distance of staged lines, at which the results of one product go to as many banks as possible.
  void stage_lines() {
    const std::int64_t per_vector = kVector / element_, least = job_.staged_line;
    int fewest = 64;
    for (std::int64_t line = least; line < least + 8 * per_vector; line += per_vector) {
      int worst = 0;
      for (int group = 0; group < tile_.rows / 16; group += std::max(1, tile_.rows / 32))
        worst = std::max(worst, conflicts(group, line));
      if (worst < fewest) fewest = worst, job_.staged_line = std::int32_t(line);
    }
  }
  // The most words of one bank among those that a warp stages at a time, of the first eight rows of a group of 16.
  int conflicts(int group, std::int64_t line) const {
    const PhaseAxis& w = job_.axis[2];
    const int c = job_.group_class[group];
    if (c >= w.classes) return 0;
    const int count = w.first_phase[c + 1] - w.first_phase[c];
    std::set<std::int64_t> words;
    int of_bank[32] = {}, most = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const int row = (group - job_.first_group[c]) * 16 + lane / 4;
      const std::int64_t unit = lane % 4 * 2 * (job_.window ? kMostWindow : 1);
      const std::int64_t at = row / count * line + w.phases[w.first_phase[c] + row % count] + unit * w.stride;
      const std::int64_t word = at * element_ / 4;
      if (words.insert(word).second) most = std::max(most, ++of_bank[word % 32]);
    }
    return most;
  }

  std::int64_t shared_bytes() const {
    return std::int64_t(job_.weight_bytes) + 2 * std::int64_t(job_.stage_bytes) + job_.staged_bytes + table_bytes_ +
           std::int64_t(job_.steps) * std::int64_t(sizeof(PhaseStep)) + job_.run_count * std::int64_t(sizeof(PhaseRun));
  }

  // Blocks that a multiprocessor holds at a time.
  std::int64_t blocks_together() const {
    return std::min<std::int64_t>(tile_.blocks, shared_.of_multiprocessor / (shared_bytes() + kReservedBytes));
  }
  // What the boxes of the layout take, in cycles of a multiprocessor; fitted by eye on an H200. Both ends of a run leave a sector
  // half written.
  double cost_of(const std::int64_t (&box)[4]) const {
    std::int64_t tiles = ceil_div(p_.batch, box[3]) * job_.combinations.value;
    for (int i = 0; i < 3; ++i) tiles *= ceil_div(units_[i], box[i]);
    const double slices = double(job_.steps) * job_.slices.value, warps = tile_.units / 32.0, parts = double(parts_);
    const double fragments = slices * warps * tile_.rows / 16.0;
    const double products = fragments * (parts_ == 1 ? 7.0 : job_.weight_parts == 2 ? 28.0 : 39.0);
    const double loads = job_.steps * warps * 16.0 * parts + fragments * 4.0 * job_.weight_parts;
    const double copies = (element_ == 4 ? 0.6 + 0.2 * parts : 0.6) * job_.copy_count;
    const double stores = job_.run_count * (1.5 + 1.0 * job_.run_vectors.value);
    const double work = 150.0 + stores + job_.chunks * (60.0 + std::max(products, loads) + 0.3 * std::min(products, loads) + copies);
    const double waits = 1000.0 + 300.0 * job_.chunks;
    const std::int64_t together = std::min(blocks_together(), ceil_div(tiles, multiprocessors_));
    // Fewer warps than these leave instructions waiting for each other.
    const double slowed = std::max(1.0, 16.0 * 32.0 / double(together * tile_.threads));
    return double(ceil_div(tiles, together * multiprocessors_)) * (double(together) * work * slowed + waits);
  }

  // The box with the least cost among those that fit; as many channels at a time as pay.
  bool boxes() {
    double least = 0;
    std::int64_t best[4] = {}, best_channels = 0;
    for (std::int64_t w = std::min<std::int64_t>(units_[2], tile_.units); w > 0; --w) {
      if (w < units_[2] && w % (job_.dense ? 8 : kVector / element_) != 0) continue;
      const std::int64_t grid_w = job_.window ? ceil_div(w, kMostWindow) * kMostWindow : w;
      if (grid_w > tile_.units) continue;
      std::int64_t box[4] = {1, 1, w, 1};
      const auto balanced = [](std::int64_t size, std::int64_t most) {
        return ceil_div(size, ceil_div(size, std::min(size, most)));
      };
      box[1] = balanced(units_[1], tile_.units / grid_w), box[0] = balanced(units_[0], tile_.units / grid_w / box[1]);
      const std::int64_t most_n = std::min(tile_.units / grid_w / box[1] / box[0], std::max<std::int64_t>(1, kMost / 2 / std::max<std::int64_t>(1, p_.x.n)));
      box[3] = balanced(p_.batch, most_n);
      for (std::int64_t channels = job_.ic;; channels = ceil_div(channels, 2)) {
        if (!lay_out(box, channels)) break;
        if (shared_bytes() <= std::min(shared_.of_block, shared_.of_multiprocessor - kReservedBytes)) {
          const double cost = cost_of(box);
          if (best_channels == 0 || cost < least) least = cost, best_channels = channels, std::copy(box, box + 4, best);
        }
        if (channels <= job_.step_channels) break;
      }
    }
    if (best_channels == 0 || !lay_out(best, best_channels)) return false;
    plan_.cost = least;
    stage_lines();
    for (int i = 0; i < 3; ++i)
      job_.axis[i].box = std::int32_t(best[i]), job_.axis[i].tiles = make_divisor(ceil_div(units_[i], best[i]));
    job_.box_n = std::int32_t(best[3]);
    job_.box_d = make_divisor(best[0]), job_.box_h = make_divisor(best[1]);
    job_.box_lines = make_divisor(best[0] * best[1] * best[3]);
    std::int64_t count = ceil_div(p_.batch, best[3]);
    for (int i = 0; i < 3; ++i) count *= job_.axis[i].tiles.value;
    if (count > kMost) return false;
    job_.boxes = make_divisor(count);
    return true;
  }

  bool blocks() {
    const std::int64_t combinations = job_.combinations.value, count = job_.boxes.value;
    if (combinations * count > (std::int64_t(1) << 40)) return false;
    const std::int64_t slots = blocks_together() * multiprocessors_;
    // Blocks of a row tile take boxes in turn; as many each.
    const std::int64_t most = std::min(count, std::max<std::int64_t>(1, slots / combinations));
    const std::int64_t each = ceil_div(count, most), own = ceil_div(count, each);
    if (combinations * own > kMost) return false;
    plan_.blocks = unsigned(combinations * own), plan_.shared_bytes = int(shared_bytes()), plan_.job = job_;
    plan_.tiles = product_tiles_ * p_.groups * count;
    return true;
  }

  const Problem& p_;
  const PhaseTileSize& tile_;
  const std::int64_t table_bytes_, element_, alignment_, parts_;
  SharedMemory shared_ = {};
  std::int64_t multiprocessors_ = 0;
  std::int64_t units_[3] = {}, reach_[3] = {}, product_tiles_ = 0;
  std::vector<std::int64_t> without_taps_[3];
  std::set<std::int64_t> width_shifts_;
  PhaseJob job_ = {};
  PhasePlan plan_ = {};
};

}  // namespace
}  // namespace upfold::cuda
