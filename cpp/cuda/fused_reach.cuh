// What the taps of a problem reach: displacements on each axis, and the slots of every set (fused.cuh). Host code, for one
// source.
#pragma once

#include <algorithm>

#include "fused_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // of any size or count that the kernels keep in 32 bits

// Displacements of the taps of every phase, and the most taps that the phases of one set have together.
struct Reach {
  std::int64_t low, high, most_taps;
};

Reach reach_of(const Axis& a, std::int64_t set) {
  Reach reach{kMost, -kMost, 0};
  for (std::int64_t first = 0; first < a.stride; first += set) {
    std::int64_t together = 0;
    for (std::int64_t residue = first; residue < std::min(first + set, a.stride); ++residue) {
      const PhaseTaps taps = phase_taps(a, (residue + a.pad) % a.stride);
      if (taps.count == 0) continue;
      const std::int64_t from = input_of(a, residue, taps.first);
      reach.high = std::max(reach.high, from), reach.low = std::min(reach.low, from - (taps.count - 1) * taps.in_step);
      together += taps.count;
    }
    reach.most_taps = std::max(reach.most_taps, together);
  }
  return reach.low > reach.high ? Reach{0, 0, 0} : reach;
}

// The tap that carries displacement `shift` to a phase, or -1.
std::int64_t tap_of(const Axis& a, std::int64_t residue, std::int64_t shift) {
  if (residue >= a.stride) return -1;
  const PhaseTaps taps = phase_taps(a, (residue + a.pad) % a.stride);
  if (taps.count == 0) return -1;
  const std::int64_t back = input_of(a, residue, taps.first) - shift;
  if (back < 0 || back % taps.in_step != 0 || back / taps.in_step >= taps.count) return -1;
  return taps.first + back / taps.in_step * taps.tap_step;
}

// Whether every phase of every set has a tap at every displacement from reach.low to reach.high.
bool is_whole(const Axis& a, std::int64_t set, const Reach& reach) {
  bool whole = a.stride % set == 0;
  for (std::int64_t residue = 0; residue < a.stride; ++residue)
    whole = whole && phase_taps(a, (residue + a.pad) % a.stride).count == reach.high - reach.low + 1;
  return whole;
}

// Fills the tables of slots and of their taps, of every set in the order of their numbers; false where there are too many. `box`
// is the number of displacements on all axes.
bool fill_slots(FusedJob& job, const Axis (&axes)[3], const FusedTileSize& tile, std::int32_t box) {
  const std::int32_t sets[3] = {1, tile.phases_h, tile.phases_w}, patch_h = std::int32_t(job.axis[1].patch.value);
  const std::int32_t patch_w = std::int32_t(job.axis[2].patch.value);
  const auto count = [&job](int axis) {
    return std::int32_t((axis == 0 ? job.sets_d : axis == 1 ? job.sets_h : job.sets_w).value);
  };
  if (std::int64_t(count(0)) * count(1) * count(2) * job.most_slots > kMostSlotEntries) return false;
  for (std::int32_t set = 0; set < count(0) * count(1) * count(2); ++set) {
    const std::int32_t first[3] = {set / count(2) / count(1) * sets[0], set / count(2) % count(1) * sets[1],
                                   set % count(2) * sets[2]};
    SlotEntry* const own = job.slots + set * job.most_slots;
    std::int32_t slots = 0, shifts = 0, listed = 0;
    for (std::int32_t at = 0; at < box; ++at) {
      const std::int32_t shift[3] = {at / job.axis[2].extent / job.axis[1].extent, at / job.axis[2].extent % job.axis[1].extent,
                                     at % job.axis[2].extent};
      const std::int32_t offset = job.flat ? 0 : (shift[0] * patch_h + shift[1]) * patch_w + shift[2], before = slots;
      for (std::int32_t p = 0; p < sets[1] * sets[2]; ++p) {
        std::int64_t tap = 0;
        for (int i = 0; i < 3 && tap >= 0; ++i) {
          const std::int32_t phase = i == 0 ? 0 : i == 1 ? p / sets[2] : p % sets[2];
          const std::int64_t of_axis = tap_of(axes[i], first[i] + phase, shift[i] + job.axis[i].low);
          tap = of_axis < 0 ? -1 : tap * axes[i].kernel + of_axis;
        }
        if (tap < 0) continue;
        job.taps[set * job.most_slots + listed++] = std::uint16_t(tap);
        if (slots == before || !tile.pixels) own[slots++] = SlotEntry(offset) << kSlotOffsetShift;
        own[slots - 1] |= tile.pixels ? 1u << p : SlotEntry(p);
      }
      if (slots > before && ++shifts % job.group_shifts == 0) own[slots - 1] |= kSlotEndsGroup;
    }
    std::fill(job.taps + set * job.most_slots + listed, job.taps + (set + 1) * job.most_slots, kNoTap);
    if (slots == 0) own[0] = kNoSlot;
    if (slots > 0) own[slots - 1] |= kSlotEndsGroup | kSlotEndsSet;
  }
  return true;
}

}  // namespace
}  // namespace upfold::cuda
