// How the fused method with pairs of a channel and a phase as rows sorts the phases of a problem into rows; host code, for one
// source.
#pragma once

#include <algorithm>
#include <set>
#include <vector>

#include "fused_phases.cuh"
#include "fused_phases.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

class PhaseRows {
 protected:
  static constexpr std::int64_t kMost = std::int64_t(1) << 30;

  // `split`: in full float32 the weight lies split, which windows want.
  PhaseRows(const Problem& p, const PhaseTileSize& tile, bool exact, bool split)
      : p_(p), tile_(tile), element_(element_bytes(p.dtype)), parts_(exact ? 2 : 1) {
    job_.weight_parts = exact && split ? 2 : 1;
  }

  // False where a count is beyond what the job holds.
  bool sort_phases() {
    if (!axes() || !rows() || !strides()) return false;
    choose_products();
    return true;
  }

  const Problem& p_;
  const PhaseTileSize& tile_;
  const std::int64_t element_, parts_;
  std::int64_t units_[3] = {}, reach_[3] = {}, product_tiles_ = 0;
  PhaseJob job_ = {};

 private:
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
    job_.pixels = p_.out_w > 1 && p_.y.w != 1;
    if (job_.pixels && p_.y.c != 1) return false;
    const int set_count = d.classes * h.classes;
    if (set_count > kMostPhaseSets) return false;
    job_.pair_channels = job_.oc;
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
    lines = job_.pixels ? lines_of_pixels(most_lines, lines) : ceil_div(most_lines, ceil_div(most_lines, lines));
    job_.pixel = job_.pixels ? std::int32_t(std::min<std::int64_t>(lines, job_.oc)) : 1;
    job_.lines = std::int32_t(lines), job_.run_lines = job_.lines / job_.pixel;
    job_.by_phase = is_by_phase();
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
    job_.empty_lines =
        std::int32_t(ceil_div(std::int64_t(job_.empty_count) * job_.pair_channels / job_.pixel, tiles) * job_.pixel);
    if (tiles > kMost / p_.groups || job_.oc > kMost / 4096 || lines + job_.empty_lines > 2 * tile_.rows) return false;
    job_.row_tiles = make_divisor(tiles), job_.combinations = make_divisor(tiles * p_.groups);
    return true;
  }

  // Whether 16 lines in all phases of the width, which are sorted as they are numbered, fill the tile; of several phases, as no
  // layer with one was timed so.
  bool is_by_phase() const {
    const PhaseAxis& w = job_.axis[2];
    bool sorted =
        !job_.pixels && w.stride > 1 && job_.lines == 16 && w.stride * 16 == tile_.rows && w.first_phase[w.classes] == w.stride;
    for (int i = 0; sorted && i < w.stride; ++i) sorted = w.phases[i] == i;
    return sorted;
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
    const std::int64_t pairs = (d.first_phase[c_d + 1] - d.first_phase[c_d]) * (h.first_phase[c_h + 1] - h.first_phase[c_h]);
    return job_.pair_channels * pairs;
  }
  // Of at most `lines` all channels of some pairs of phases, or equal parts of one pair's, in vectors where they are such.
  std::int64_t lines_of_pixels(std::int64_t most_lines, std::int64_t lines) {
    const std::int64_t channels = job_.oc, vector = 16 / element_;
    if (lines >= channels) {
      const std::int64_t pairs = most_lines / channels;
      return channels * ceil_div(pairs, ceil_div(pairs, lines / channels));
    }
    std::int64_t part = ceil_div(channels, ceil_div(channels, lines));
    if (channels % vector == 0 && lines >= vector) part = std::min(ceil_div(part, vector), lines / vector) * vector;
    job_.pair_channels = std::int32_t(ceil_div(channels, part) * part);
    return part;
  }

  bool strides() {
    job_.x_n = p_.x.n, job_.x_c = p_.x.c, job_.y_n = p_.y.n, job_.y_c = p_.y.c, job_.w_ic = p_.w.n, job_.w_oc = p_.w.c;
    const Strides* const from[3] = {&p_.x, &p_.y, &p_.w};
    std::int64_t* const to[3] = {job_.x_axis, job_.y_axis, job_.w_axis};
    for (int i = 0; i < 3; ++i) to[i][0] = from[i]->d, to[i][1] = from[i]->h, to[i][2] = from[i]->w;
    if (p_.out_w == 1) job_.y_axis[2] = 1;
    job_.activation = p_.activation, job_.slope = p_.activation_slope;
    job_.dense = p_.x.c == 1 && p_.in_w > 1 && p_.x.w != 1;
    const std::int64_t farthest = (job_.ic - 1) * p_.w.n + (job_.oc - 1) * p_.w.c + (p_.kernel_d - 1) * p_.w.d +
                                  (p_.kernel_h - 1) * p_.w.h + (p_.kernel_w - 1) * p_.w.w;
    return farthest < kMost && (job_.dense || p_.in_w == 1 || p_.x.w == 1);
  }

  // Whether the shifts of the width are a window, and whether the two slots of a product are shifts.
  void choose_products() {
    PhaseAxis& w = job_.axis[2];
    const bool neighbours = *width_shifts_.rbegin() == job_.width_shifts - 1;
    // Of neighbouring channels windows pay where a product of 16 rows reads all inputs; others wait for their banks.
    const bool fits = job_.dense ? parts_ == 1 && tile_.rows == 16 : job_.weight_parts == parts_ && !job_.pixels;
    job_.window = fits && neighbours && job_.width_shifts <= kMostWindowShifts;
    const std::int64_t slot = element_ == 2 ? 8 : 4;
    job_.folded = (job_.window || (job_.dense && neighbours)) && element_ == 2 && job_.width_shifts == 2 && job_.ic <= slot;
    for (int c = 0; c < w.classes; ++c) job_.folded = job_.folded && has_shift(c, 0);
    // Neighbouring inputs of so few channels lie in few banks.
    if (job_.dense && job_.folded) job_.window = false;
    job_.step_channels = std::int32_t(job_.folded ? slot : 2 * slot);
    job_.slices = make_divisor(job_.folded ? 1 : job_.width_shifts);
    if (!job_.window) return;
    // Units begin at multiples of a vector of four, as inputs do.
    units_[2] += w.first_unit % kWindowUnits, w.first_unit -= w.first_unit % kWindowUnits;
  }

  std::vector<std::int64_t> without_taps_[3];
  std::set<std::int64_t> width_shifts_;
};

}  // namespace
}  // namespace upfold::cuda
