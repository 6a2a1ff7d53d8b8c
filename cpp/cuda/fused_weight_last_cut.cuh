// How the fused gradient of the weight whose channels are innermost arranges taps: residues, patches, and the columns of
// products; host code, for one source.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "fused_weight_last_plan.h"

namespace upfold::cuda {
namespace {

using Triple = std::array<std::int64_t, 3>;  // w, h, d

constexpr std::int64_t kMostWeightCount = std::int64_t(1) << 30;
constexpr std::int64_t kSquareChannels = 16;

// An instruction: its first atom's patch in its set, where its shift is beyond the patch's least; and what is between atoms:
// shifts, or a whole patch.
struct WeightSlot {
  std::int64_t patch = 0, atoms = 0;
  Triple low{}, step{};
};
// A patch of a set: its taps' number among the groups of taps, and a chunk of channels.
struct WeightSetPatch {
  std::size_t taps;
  std::int64_t chunk;
};
struct WeightArrangement {
  bool possible = false, single = false;  // single: a patch for each tap
  Triple halo{};
  std::int64_t set_chunks = 0, most_patches = 0;
  double patches = 0;  // of a set, on average
  std::vector<std::vector<WeightSetPatch>> sets;
  std::vector<WeightSlot> slots;  // [set][unit][instruction]
  std::vector<std::uint16_t> places;
  std::vector<Triple> lows;  // of each group of taps
  std::vector<std::size_t> firsts;
};

class WeightLastTaps {
 public:
  WeightLastTaps(const Problem& p, const WeightLastTileSize& tile) : p_(p), tile_(tile) {
    for (const Axis& a : {axis_w(p), axis_h(p), axis_d(p)}) axes_.push_back(a);
    in_channels_ = in_channels_per_group(p), out_channels_ = out_channels_per_group(p);
  }

 protected:
  struct Tap {
    std::int64_t number, map, channel;  // channel: what its residue along w adds
    Triple shift;
  };

  // Taps along w that lie next to one another in y, with no pixel between: they are channels.
  bool folds(const Strides& y) const {
    const Axis& w = axes_[0];
    return w.kernel > 1 && w.kernel == w.stride && w.dilation == 1 && w.pad == 0 && w.out == w.in * w.stride && p_.groups == 1 &&
           out_channels_ % 8 == 0 && y.w == out_channels_;
  }

  // Whether y can be packed in squares (fused_last_source.cuh), whose kernel is half as large.
  bool fits_squares() const {
    for (int i = 0; i < 2; ++i) {
      const Axis& a = axes_[std::size_t(i)];
      if (a.kernel != 4 || a.stride != 2 || a.pad != 1 || a.dilation != 1 || a.out != 2 * a.in) return false;
    }
    const bool lies = p_.w.w == 1 && p_.w.h == 4 && p_.w.c == 16 && p_.w.n % 8 == 0;
    return lies && axes_[2].kernel == 1 && p_.groups == 1 && out_channels_ % kSquareChannels == 0 && !tile_.floats &&
           tile_.set_columns8() == kSquareColumns8;
  }
  void take_squares() {
    for (int i = 0; i < 2; ++i) {
      Axis& a = axes_[std::size_t(i)];
      a.kernel = 2, a.stride = 1, a.pad = 0, a.out = a.in + 1;
    }
    out_channels_ *= 4;
  }

  // Residues along w are channels of y too, where its width is whole strides; every other residue has boxes of its own.
  bool list_taps(const Strides& y) {
    pixel_ = y.w;
    folded_ = folds(y) ? axes_[0].kernel : 1;
    if (folded_ > 1) {
      axes_[0].kernel = axes_[0].stride = 1, axes_[0].out = axes_[0].in;
      out_channels_ *= folded_, pixel_ *= folded_;
    }
    const bool narrow = ceil_div(out_channels_, std::int64_t(32)) * 32 < ceil_div(out_channels_, std::int64_t(64)) * 64;
    width_ = narrow || tile_.floats ? 32 : 64;
    chunks_ = ceil_div(out_channels_, width_);
    const bool dense = pixel_ == out_channels_ * p_.groups;  // else the last pixel's residues end behind the tensor
    in_pixel_ = axes_[0].stride == 1 || (dense && axes_[0].out % axes_[0].stride == 0);
    const std::int64_t all = axes_[0].kernel * axes_[1].kernel * axes_[2].kernel;
    if (all > kMostWeightPlaces) return false;
    std::map<Triple, std::int64_t> maps;
    for (std::int64_t number = 0; number < all; ++number) {
      const Triple at{number % axes_[0].kernel, number / axes_[0].kernel % axes_[1].kernel,
                      number / axes_[0].kernel / axes_[1].kernel};
      Tap tap{number, 0, 0, {}};
      Triple residue;
      for (int i = 0; i < 3; ++i) {
        const std::int64_t moved = at[i] * axes_[i].dilation - axes_[i].pad;
        tap.shift[i] = floor_div(moved, axes_[i].stride), residue[i] = moved - tap.shift[i] * axes_[i].stride;
        if (std::abs(tap.shift[i]) >= INT16_MAX / 2) return false;
      }
      if (in_pixel_) tap.channel = residue[0] * pixel_, residue[0] = 0;
      tap.map = maps.emplace(residue, std::int64_t(maps.size())).first->second;
      if (tap.map == std::int64_t(residues_.size())) residues_.push_back(residue);
      taps_.push_back(tap);
    }
    return std::int64_t(residues_.size()) < kMostWeightMaps;
  }

  // Whether a tap's boxes of an axis are all of x's positions.
  bool is_plain(int axis) const {
    for (const Tap& tap : taps_)
      if (tap.shift[axis] != 0) return false;
    for (const Triple& residue : residues_)
      if (positions_of(residue, axis) != axes_[axis].in) return false;
    return true;
  }
  std::int64_t positions_of(const Triple& residue, int axis) const {
    return ceil_div(axes_[axis].out - residue[axis], axes_[axis].stride);
  }

  // Taps that share a patch: of one residue and, up to `level` axes from depth on, of one shift.
  bool shares(const Tap& a, const Tap& b, int level) const {
    if (a.map != b.map || a.channel != b.channel) return false;
    for (int i = 0; i < level; ++i)
      if (a.shift[2 - i] != b.shift[2 - i]) return false;
    return true;
  }

  // Columns by taps that follow one another along `axis`.
  WeightArrangement arrange(int level, int axis, std::int64_t set_chunks) {
    WeightArrangement result;
    group_taps(level, axis, result);
    result.single = result.firsts.size() == taps_.size();
    result.set_chunks = set_chunks;
    result.places.resize(taps_.size() * std::size_t(set_chunks));
    next_slot_ = 0;
    if (result.single) {
      place_single(result);
    } else {
      for (std::int64_t chunk = 0; chunk < set_chunks; ++chunk)
        for (std::size_t group = 0; group < result.firsts.size(); ++group) place_group(result, group, chunk, axis);
    }
    for (const auto& set : result.sets) {
      result.most_patches = std::max(result.most_patches, std::int64_t(set.size()));
      result.patches += double(set.size()) / double(result.sets.size());
    }
    const std::size_t all = std::size_t(result.patches * double(result.sets.size()) + 0.5);
    result.slots.resize(result.sets.size() * std::size_t(slots_of_set()));
    result.possible = result.sets.size() <= kMostWeightSets && result.slots.size() <= kMostWeightSlots &&
                      all <= kMostWeightPatches && result.places.size() <= kMostWeightPlaces;
    return result;
  }

  std::int64_t slots_of_set() const { return tile_.units * tile_.slots(); }
  std::int64_t atoms_of(std::int64_t slot) const {
    return 8 * (slot % tile_.slots() == 0 ? tile_.first8 : tile_.second8) / width_;
  }

  const Problem& p_;
  const WeightLastTileSize tile_;
  std::vector<Axis> axes_;  // w, h, d
  std::int64_t in_channels_, out_channels_;
  std::int64_t pixel_ = 0, folded_ = 1, width_ = 64, chunks_ = 1;
  bool in_pixel_ = false;
  std::vector<Tap> taps_;
  std::vector<Triple> residues_;

 private:
  std::int64_t next_slot_ = 0;

  // In an order in which the taps of a patch follow one another, and of these those of a line along the axis.
  void group_taps(int level, int axis, WeightArrangement& result) {
    const auto key = [&](const Tap& t) {
      std::array<std::int64_t, 9> key{t.map, t.channel};
      for (int i = 0; i < level; ++i) key[std::size_t(2 + i)] = t.shift[std::size_t(2 - i)];
      for (int i = 2, at = 5; i >= 0; --i)
        if (i != axis) key[std::size_t(at++)] = t.shift[std::size_t(i)];
      key[7] = t.shift[std::size_t(axis)], key[8] = t.number;
      return key;
    };
    std::sort(taps_.begin(), taps_.end(), [&](const Tap& a, const Tap& b) { return key(a) < key(b); });
    for (std::size_t i = 0; i < taps_.size(); ++i) {
      if (i == 0 || !shares(taps_[i - 1], taps_[i], level)) {
        result.firsts.push_back(i);
        result.lows.push_back(taps_[i].shift);
      }
      for (std::size_t a = 0; a < 3; ++a) result.lows.back()[a] = std::min(result.lows.back()[a], taps_[i].shift[a]);
    }
    for (std::size_t g = 0; g < result.firsts.size(); ++g)
      for (std::size_t i = result.firsts[g]; i < last_of(result, g); ++i)
        for (std::size_t a = 0; a < 3; ++a) result.halo[a] = std::max(result.halo[a], taps_[i].shift[a] - result.lows[g][a]);
  }
  std::size_t last_of(const WeightArrangement& result, std::size_t group) const {
    return group + 1 < result.firsts.size() ? result.firsts[group + 1] : taps_.size();
  }

  // The next instruction; its set exists.
  WeightSlot& next_slot(WeightArrangement& result) {
    const std::size_t set = std::size_t(next_slot_ / slots_of_set());
    if (set == result.sets.size()) result.sets.emplace_back();
    result.slots.emplace_back();
    ++next_slot_;
    return result.slots.back();
  }
  void place(WeightArrangement& result, std::size_t tap, std::int64_t chunk, std::int64_t atom) {
    const std::int64_t slot = next_slot_ - 1, unit = slot / tile_.slots();  // of all sets
    const std::int64_t column8 = (slot % tile_.slots() == 0 ? 0 : tile_.first8) + atom * width_ / 8;
    result.places[std::size_t(taps_[tap].number * result.set_chunks + chunk)] = std::uint16_t(unit * tile_.columns8() + column8);
  }

  void place_single(WeightArrangement& result) {
    WeightSlot* slot = nullptr;
    for (std::int64_t chunk = 0; chunk < result.set_chunks; ++chunk) {
      for (std::size_t tap = 0; tap < taps_.size(); ++tap) {
        if (slot == nullptr || slot->atoms == atoms_of(next_slot_ - 1)) {
          slot = &next_slot(result);
          slot->patch = std::int64_t(result.sets.back().size());
        }
        place(result, tap, chunk, slot->atoms++);
        result.sets.back().push_back({tap, chunk});
      }
    }
  }

  // The lines of a patch, in pieces as long as instructions take.
  void place_group(WeightArrangement& result, std::size_t group, std::int64_t chunk, int axis) {
    const std::size_t last = last_of(result, group);
    WeightSlot* slot = nullptr;
    for (std::size_t i = result.firsts[group]; i < last; ++i) {
      const Triple& shift = taps_[i].shift;
      Triple step{};
      bool follows = slot != nullptr && slot->atoms < atoms_of(next_slot_ - 1);
      if (follows) {
        for (std::size_t a = 0; a < 3; ++a) step[a] = shift[a] - taps_[i - 1].shift[a];
        for (std::size_t a = 0; a < 3; ++a) follows = follows && (int(a) == axis ? step[a] > 0 : step[a] == 0);
        follows = follows && (slot->atoms == 1 || step == slot->step);
      }
      if (!follows) {
        slot = &next_slot(result);
        auto& set = result.sets.back();
        const auto found =
            std::find_if(set.begin(), set.end(), [&](const WeightSetPatch& s) { return s.taps == group && s.chunk == chunk; });
        slot->patch = found - set.begin();
        if (found == set.end()) set.push_back({group, chunk});
        for (std::size_t a = 0; a < 3; ++a) slot->low[a] = shift[a] - result.lows[group][a];
      } else {
        slot->step = step;
      }
      place(result, i, chunk, slot->atoms++);
    }
  }
};

}  // namespace
}  // namespace upfold::cuda
