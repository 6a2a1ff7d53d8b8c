// The planner of the fused gradients of groups; host code, for one source.
#pragma once

#include <algorithm>

#include "fused_groups_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostGroupsCount = std::int64_t(1) << 30;
constexpr std::int64_t kMostGroupsRows = 64, kMostGroupsSegments = 16;  // of a tile
// What orders tiles, in cycles of a multiprocessor: of a load of a warp, a sector of memory, a product of a warp, and a tile.
constexpr std::int64_t kGroupsLoad = 3, kGroupsSector = 1, kGroupsProduct = 6, kGroupsTileCycles = 1500;

template <int kBlocks, int kRows>
constexpr GroupsTileSize groups_size_of() {
  using Tile = GroupsTile<float, kBlocks, kRows>;
  return {Tile::kBlocks, Tile::kChannels, Tile::kResident, Tile::kSegments, Tile::kTaps, Tile::kSums};
}

struct GroupsBounds {
  SharedMemory shared;
  std::int64_t multiprocessors, alignment, workspace_cap;
};

class GroupsPlanner {
 public:
  GroupsPlanner(const Problem& p, const GroupsBounds& bounds)
      : p_(p), bounds_(bounds), size_(p.dtype == Dtype::kFloat32 ? 4 : 2), weight_(p.op == Operator::kConvTransposeWeight) {}

  GroupsPlan plan() {
    const std::int64_t ic = in_channels_per_group(p_), oc = out_channels_per_group(p_), taps = kernel_taps(p_);
    const bool wide = ic > 16 || oc > 16;
    if (ic > (weight_ ? 64 : 32) || oc > 32 || taps > kMostGroupsTaps || !counts_fit()) return plan_;
    plan_.tile = wide ? groups_size_of<4, 2>() : ic > 8 ? groups_size_of<2, 1>() : groups_size_of<1, 1>();
    const std::int64_t sets = ceil_div(taps, std::int64_t(plan_.tile.taps));
    if (weight_ && (sets > kGroupsWarps || (wide && !x_in_vectors()))) return plan_;
    plan_.x_in_vectors = weight_ && wide, plan_.job.sets = std::int32_t(sets);
    plan_.job.ic_tiles = make_divisor(weight_ ? ceil_div(ic, std::int64_t(8) * plan_.tile.blocks) : 1);
    describe();
    plan_.possible = cut() && deal();
    return plan_;
  }

 private:
  const Problem& p_;
  const GroupsBounds& bounds_;
  const std::int64_t size_;
  const bool weight_;
  GroupsPlan plan_;

  // Of one axis: rows of a patch of so many inputs, and how far neighbouring rows lie apart in y.
  struct Rows {
    std::int64_t step, advance, tap, count;
  };
  static Rows rows_of(const Axis& a, std::int64_t inputs) {
    Rows rows;
    rows.step = a.kernel == 1 ? a.stride : inputs == 1 ? a.dilation : greatest_common_divisor(a.stride, a.dilation);
    rows.advance = inputs == 1 ? 0 : a.stride / rows.step, rows.tap = a.kernel == 1 ? 0 : a.dilation / rows.step;
    rows.count = (inputs - 1) * rows.advance + (a.kernel - 1) * rows.tap + 1;
    return rows;
  }

  bool counts_fit() const {
    for (const Axis& a : {axis_d(p_), axis_h(p_), axis_w(p_)}) {
      if (a.in < 1 || a.out < 1) return false;
      for (const std::int64_t reach : {a.in * a.stride, a.kernel * a.dilation, a.pad, a.out})
        if (reach >= kMostGroupsCount / 4) return false;
    }
    const auto extent = [](const Strides& s, std::int64_t c, std::int64_t d, std::int64_t h, std::int64_t w) {
      return (c - 1) * s.c + (d - 1) * s.d + (h - 1) * s.h + (w - 1) * s.w;
    };
    for (const Strides& s : {p_.x, p_.y, p_.w})
      for (const std::int64_t stride : {s.c, s.d, s.h, s.w})
        if (stride < 0 || stride >= kMostGroupsCount) return false;
    return extent(p_.x, p_.in_channels, p_.in_d, p_.in_h, p_.in_w) < kMostGroupsCount &&
           extent(p_.y, p_.out_channels, p_.out_d, p_.out_h, p_.out_w) < kMostGroupsCount && p_.w.n >= 0 &&
           p_.w.n < kMostGroupsCount &&
           extent(p_.w, p_.w.n == 0 ? 1 : out_channels_per_group(p_), p_.kernel_d, p_.kernel_h, p_.kernel_w) < kMostGroupsCount;
  }

  bool divides(std::int64_t elements, const Strides& s, bool channels) const {
    for (const std::int64_t stride : {p_.batch == 1 ? 0 : s.n, channels ? s.c : 0, s.d, s.h})
      if (stride % elements != 0) return false;
    return true;
  }

  // Rows of x are whole vectors of 16 bytes.
  bool x_in_vectors() const {
    const std::int64_t vector = 16 / size_;
    return p_.x.w == 1 && p_.in_w % vector == 0 && divides(vector, p_.x, true) && bounds_.alignment % 16 == 0;
  }

  static GroupsAxis groups_axis(const Axis& a) {
    return {std::int32_t(a.in), std::int32_t(a.out), std::int32_t(a.stride), std::int32_t(a.pad), std::int32_t(a.dilation)};
  }

  void describe() {
    GroupsJob& job = plan_.job;
    job.d = groups_axis(axis_d(p_)), job.h = groups_axis(axis_h(p_)), job.w = groups_axis(axis_w(p_));
    job.ic = std::int32_t(in_channels_per_group(p_)), job.oc = std::int32_t(out_channels_per_group(p_));
    job.taps = std::int32_t(kernel_taps(p_));
    job.in_d = make_divisor(p_.in_d), job.groups = make_divisor(p_.groups), job.stride_w = make_divisor(p_.stride_w);
    job.x_n = p_.x.n, job.x_c = std::int32_t(p_.x.c), job.x_d = std::int32_t(p_.x.d), job.x_h = std::int32_t(p_.x.h);
    job.x_w = std::int32_t(p_.x.w), job.w_ic = std::int32_t(p_.w.n), job.w_oc = std::int32_t(p_.w.c);
    job.y_n = p_.y.n, job.y_c = std::int32_t(p_.y.c), job.y_d = std::int32_t(p_.y.d), job.y_h = std::int32_t(p_.y.h);
    job.y_w = std::int32_t(p_.y.w);
    job.pairs =
        (p_.x.w == 1 || p_.in_w == 1) && p_.in_w % 2 == 0 && divides(2, p_.x, true) && bounds_.alignment % (2 * size_) == 0;
    const std::int64_t each = 16 / size_;
    const bool last = p_.y.c == 1 && job.oc % each == 0 && divides(each, p_.y, false) && p_.y.w % each == 0;
    job.reads = GroupsReads::kElements, job.lead = 0;
    if (last && bounds_.alignment % 16 == 0) {
      job.reads = GroupsReads::kVectors;
    } else if (size_ == 2 && p_.y.w == 1 && p_.out_w % 2 == 0 && divides(2, p_.y, true) && bounds_.alignment % 4 == 0) {
      job.reads = GroupsReads::kPairs, job.lead = std::int32_t(p_.pad_w % 2);
    }
    job.groups_first = job.reads == GroupsReads::kVectors && !weight_, job.whole = job.oc == plan_.tile.channels;
    const std::int64_t words = plan_.tile.blocks * std::int64_t(plan_.tile.channels) * size_ / 4;
    job.weight_bytes = weight_ ? 0 : std::int32_t(job.taps * 32 * words);
  }

  // The patch of a tile: reads of a row, and warps that share it; its sizes in vectors, the lines of all vectors, the loads of
  // all warps and the sectors of memory behind them.
  struct Patch {
    Rows d, h;
    std::int64_t columns, reads, warps, residue, row, vector, bytes, lines, loads, sectors;
  };
  Patch patch_of(std::int64_t tile_h, std::int64_t segments) const {
    const Axis w = axis_w(p_);
    Patch patch;
    patch.d = rows_of(axis_d(p_), 1), patch.h = rows_of(axis_h(p_), tile_h);
    const bool pairs = plan_.job.reads == GroupsReads::kPairs;
    patch.columns = plan_.job.lead + (segments * kSegment - 1) * w.stride + (w.kernel - 1) * w.dilation + 1;
    patch.columns += pairs ? patch.columns % 2 : 0;
    const std::int64_t side = plan_.job.reads == GroupsReads::kVectors ? plan_.tile.channels * size_ / 16 : 1;
    patch.reads = pairs ? patch.columns / 2 : patch.columns * side;
    patch.warps = std::min<std::int64_t>(kGroupsWarps, ceil_div(patch.reads, std::int64_t(32)));
    patch.residue = residue_of(ceil_div(patch.columns, w.stride)), patch.row = patch.residue * w.stride;
    const std::int64_t rows = patch.d.count * patch.h.count, vectors = rows * patch.row;
    patch.vector = vectors + (12 - vectors % 8) % 8;  // four words of float32 from vector to vector meet in no bank
    patch.bytes = plan_.tile.channels * size_ * patch.vector;
    patch.lines = plan_.tile.channels * size_ / 16 * rows;
    const std::int64_t each = side > 1 ? 1 : 16 / size_, together = kGroupsWarps / patch.warps;
    patch.loads = each * ceil_div(patch.lines / side, together) * ceil_div(patch.reads, 32 * patch.warps) * kGroupsWarps;
    // Whole sectors of 32 bytes: of vectors, of each position; else of each row, on average one more.
    const std::int64_t of_vectors = patch.columns * std::max<std::int64_t>(32, plan_.job.oc * size_);
    patch.sectors = rows * (side > 1 ? of_vectors : plan_.job.oc * (patch.columns * size_ + 32)) / 32;
    return patch;
  }

  // Positions of a residue, or some more: where stores of a warp's neighbouring reads meet in fewest banks.
  std::int64_t residue_of(std::int64_t least) const {
    const std::int64_t step = plan_.job.reads == GroupsReads::kPairs ? 2 : 1;
    std::int64_t best = least, fewest = 0;
    for (std::int64_t residue = least; residue < least + 8; ++residue) {
      std::int64_t turns = 0;
      for (std::int64_t first = 0; first < 32; first += 8) {  // lanes that store at a time
        std::int64_t vectors[8] = {};
        for (std::int64_t lane = first; lane < first + 8; ++lane)
          ++vectors[(lane * step % p_.stride_w * residue + lane * step / p_.stride_w) % 8];
        turns += *std::max_element(vectors, vectors + 8);
      }
      if (fewest == 0 || turns < fewest) fewest = turns, best = residue;
    }
    return best;
  }

  // The tile with which the device takes least; blocks beyond the number of tiles have nothing to do.
  bool cut() {
    GroupsJob& job = plan_.job;
    const std::int64_t together = weight_ ? std::max(1, kGroupsWarps / job.sets) : kGroupsWarps * plan_.tile.segments;
    const std::int64_t product = kGroupsProduct * job.taps * (plan_.tile.channels * size_ / 32) * plan_.tile.blocks;
    const std::int64_t most_segments = std::min(ceil_div(p_.in_w, std::int64_t(kSegment)), kMostGroupsSegments);
    constexpr std::int64_t kReserved = 1 << 10;  // bytes of each block, by the device
    const std::int64_t most =
        std::min(bounds_.shared.of_block, bounds_.shared.of_multiprocessor / plan_.tile.resident - kReserved);
    std::int64_t best = 0;
    for (std::int64_t tile_h = 1; tile_h <= std::min(p_.in_h, kMostGroupsRows); ++tile_h) {
      for (std::int64_t segments = 1; segments <= most_segments; ++segments) {
        const Patch patch = patch_of(tile_h, segments);
        if (shared_bytes(patch, tile_h, segments) > most) break;
        const std::int64_t tiles = ceil_div(p_.in_h, tile_h) * ceil_div(p_.in_w, segments * kSegment) * p_.in_d * p_.batch;
        const std::int64_t products = ceil_div(tile_h * segments, together) * together * product;
        const std::int64_t tile = patch.loads * kGroupsLoad + patch.sectors * kGroupsSector + products + kGroupsTileCycles;
        const std::int64_t cycles = std::max(tiles * p_.groups, bounds_.multiprocessors * plan_.tile.resident) * tile;
        if (best > 0 && cycles >= best) continue;
        best = cycles, job.tile_h = std::int32_t(tile_h), job.segments = make_divisor(segments);
      }
    }
    if (best == 0) return false;
    const Patch patch = patch_of(job.tile_h, job.segments.value);
    plan_.loads = patch.loads, plan_.shared_bytes = int(shared_bytes(patch, job.tile_h, job.segments.value));
    job.x_pitch = std::int32_t(x_pitch(job.segments.value)), job.x_first = std::int32_t(patch.bytes);
    job.table_bytes = std::int32_t(patch.lines * std::int64_t(sizeof(GroupsLine)));
    lay_out(patch);
    return true;
  }
  // The lines, and w and the patch or the patch and x, or the sums of all warps, which lie there in the end.
  std::int64_t shared_bytes(const Patch& patch, std::int64_t tile_h, std::int64_t segments) const {
    const std::int64_t sums = weight_ ? std::int64_t(kGroupsWarps) * plan_.tile.sums * 32 * 16 : 0;
    const std::int64_t x = plan_.x_in_vectors ? tile_h * 8 * plan_.tile.blocks * x_pitch(segments) : 0;
    return patch.lines * std::int64_t(sizeof(GroupsLine)) + std::max(plan_.job.weight_bytes + patch.bytes + x, sums);
  }
  // Bytes from channel to channel of x: a vector more, so that neighbours meet in no bank.
  std::int64_t x_pitch(std::int64_t segments) const { return segments * kSegment * size_ + 16; }

  void lay_out(const Patch& patch) {
    GroupsJob& job = plan_.job;
    job.tiles_h = make_divisor(ceil_div(p_.in_h, std::int64_t(job.tile_h)));
    job.tiles_w = make_divisor(ceil_div(p_.in_w, std::int64_t(job.segments.value) * kSegment));
    job.plane_rows = make_divisor(patch.h.count), job.patch_rows = make_divisor(patch.d.count * patch.h.count);
    job.row_step = std::int32_t(patch.h.step), job.row_advance = std::int32_t(patch.h.advance * patch.row);
    job.row_reads = std::int32_t(patch.reads), job.row_warps = make_divisor(patch.warps);
    job.residue_vectors = std::int32_t(patch.residue), job.row_vectors = std::int32_t(patch.row);
    job.vector_stride = std::int32_t(patch.vector);
    std::int32_t number = 0;
    for (std::int64_t kd = 0; kd < p_.kernel_d; ++kd)
      for (std::int64_t kh = 0; kh < p_.kernel_h; ++kh)
        for (std::int64_t kw = 0; kw < p_.kernel_w; ++kw) {
          const std::int64_t row = kd * patch.h.count + kh * patch.h.tap, column = job.lead + kw * p_.dilation_w;
          const std::int64_t at = row * patch.row + column % p_.stride_w * patch.residue + column / p_.stride_w;
          job.tap[number++] = {std::int32_t(at * 16), std::int32_t(kd * p_.w.d + kh * p_.w.h + kw * p_.w.w)};
        }
  }

  // Blocks and what they store.
  bool deal() {
    GroupsJob& job = plan_.job;
    const std::int64_t of_group = p_.in_d * job.tiles_h.value * job.tiles_w.value * p_.batch, all = of_group * p_.groups;
    if (all >= kMostGroupsCount) return false;
    if (!weight_) {
      std::int64_t parts = std::min(all, bounds_.multiprocessors * plan_.tile.resident);
      if (job.groups_first && parts > p_.groups) parts -= parts % p_.groups;  // each keeps its group, and the weights of it
      job.tiles = std::int32_t(all), job.parts = std::int32_t(parts);
      plan_.blocks = unsigned(job.parts);
      return true;
    }
    const std::int64_t outputs = job.taps * std::int64_t(plan_.tile.blocks) * (plan_.tile.channels / 16);
    const std::int64_t groups = p_.groups * job.ic_tiles.value, part = groups * outputs * 32 * 16;
    const std::int64_t wanted = std::max<std::int64_t>(1, bounds_.multiprocessors * plan_.tile.resident / groups);
    const std::int64_t parts = std::min({wanted, of_group, bounds_.workspace_cap / part});
    if (parts < 1) return false;
    job.tiles = std::int32_t(of_group), job.parts = std::int32_t(parts);
    plan_.blocks = unsigned(parts * groups), plan_.workspace_bytes = parts * part;
    plan_.sum_blocks = unsigned(groups * outputs);
    return groups * outputs < kMostGroupsCount;
  }
};

}  // namespace
}  // namespace upfold::cuda
