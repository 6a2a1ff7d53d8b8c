// The planner of the fused gradient of the weight whose channels are innermost; host code, for one source.
#pragma once

#include "fused_weight_last_cut.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kWeightFixedBytes = 2 << 10;                  // of barriers, and of the alignment of the first stage
constexpr std::int64_t kMostWeightLaunches = 64;                     // of parts of the samples, where operands are packed
constexpr std::int64_t kWeightMultiprocessors = 132;                 // those of an H200: parts do not depend on the device
constexpr std::int64_t kMostWeightPartial = std::int64_t(96) << 20;  // bytes of partial sums, beyond the first part
constexpr std::int64_t kMostWeightRows = 16 * kMostWeightSteps, kMostWeightBox = 256;
// In cycles (H200): a step of 64 input channels and 8 columns, of 16-bit values and of floats; bytes that a multiprocessor gets
// from the second-level cache in one; a tile of positions beside its products; a microsecond. What a block takes beside its
// tiles, in microseconds, and bytes of partial sums that are written and added in one.
constexpr double kHalfStepCycles = 4.5, kFloatStepCycles = 14.0, kWeightBytesPerCycle = 38.0, kPositionTileCycles = 80.0,
                 kWeightCyclesMicrosecond = 1755.0;
constexpr double kWeightBlockMicroseconds = 3.5, kWeightSumBytesMicrosecond = 2.0e6;
// Bytes that are packed in a microsecond, and what x as planes costs beside that: of 2 MB or less, packed beside y, it takes no
// longer (H200, by the tiles of ten layers), by tiles of few columns of 4 MB.
constexpr double kWeightPackedBytesMicrosecond = 2.5e6, kWeightPlanesMicroseconds = 1.0, kWeightFewColumnsMicroseconds = 2.2;
constexpr int kWeightFewColumns8 = 16;
// What the launch that adds parts takes beside their bytes. Blocks of a cluster, which wait for each other, and which are
// neighbours that read nothing in common. Cycles of a sector of w that is stored whole or not. Estimates, by which the choice
// between these ways agrees with the tiles that were timed (H200).
constexpr double kWeightSumMicroseconds = 6.0;
constexpr double kWeightMeetMicroseconds = 1.2, kWeightApart = 1.2, kWeightSectorCycles = 1.0, kWeightCutSectorCycles = 2.3;

class WeightLastPlanner : WeightLastTaps {
 public:
  // squares: y is packed in squares, for blocks that store w; planes: x is read as planes. Else there is no plan.
  WeightLastPlanner(const Problem& p, const WeightLastTileSize& tile, std::int64_t alignment, std::int64_t cap,
                    std::int64_t shared_bytes, bool squares, bool planes)
      : WeightLastTaps(p, tile),
        squares_(squares),
        planes_(planes),
        element_(element_bytes(p.dtype)),
        vector_(16 / element_),
        aligned_(alignment % 16 == 0),
        cap_(cap),
        most_shared_(shared_bytes - kWeightFixedBytes) {}

  WeightLastPlan plan() {
    plan_.possible = supported() && operands() && choose() && tables() && split() && sums();
    plan_.possible = plan_.possible && (!squares_ || plan_.job.whole);
    return plan_;
  }

 private:
  struct Cut {
    int level = 0, axis = 0;
    std::int64_t set_chunks = 0, box[4] = {1, 1, 1, 1};  // w, h, d, n
    double cost = -1, cycles = 0;                        // of all blocks; of a tile of positions
  };
  const bool squares_, planes_;
  const std::int64_t element_, vector_;  // bytes of an element, elements of 16 bytes
  const bool aligned_;
  const std::int64_t cap_, most_shared_;
  WeightLastPlan plan_;
  Strides x_{}, y_{};                                                 // of the operands, or of what is packed of them
  std::int64_t positions_[4] = {}, x_step_[4] = {}, y_step_[4] = {};  // w, h, d, n; y_step_: from position to position
  std::vector<std::array<std::int64_t, 4>> y_sizes_;                  // of the boxes of every residue
  bool plain_[3] = {};
  std::int64_t row_channels_ = 64, block_channels_ = 64, channel_tiles_ = 1, halo_[3] = {};
  Cut best_;
  bool stores_ = false;  // blocks can store w

  bool supported() const {
    if (p_.op != Operator::kConvTransposeWeight || p_.batch == 0) return false;
    if (tile_.floats ? p_.dtype != Dtype::kFloat32 : p_.dtype != Dtype::kFloat16 && p_.dtype != Dtype::kBFloat16) return false;
    for (const Axis& a : axes_) {
      if (std::max({a.in, a.out, a.kernel, a.stride, a.pad, a.dilation}) >= kMostWeightCount) return false;
      if (a.in > kMostWeightCount / a.stride || a.kernel > kMostWeightCount / a.dilation) return false;
    }
    if (p_.batch * in_pixels(p_) >= kMostWeightCount || out_pixels(p_) >= kMostWeightCount) return false;
    if (std::max(p_.in_channels, p_.out_channels) * kernel_taps(p_) >= kMostWeightCount) return false;
    return p_.groups == 1 || (in_channels_ % vector_ == 0 && out_channels_ % vector_ == 0);
  }

  // Whether boxes can be described of an operand as it lies. Axes on which elements repeat are packed.
  bool lies_in_boxes(const Strides& s, const std::int64_t (&sizes)[3]) const {
    if (s.c != 1 || !aligned_) return false;
    const std::int64_t strides[] = {s.w, s.h, s.d, s.n}, counts[] = {sizes[0], sizes[1], sizes[2], p_.batch};
    for (int i = 0; i < 4; ++i) {
      if (strides[i] < (counts[i] > 1 ? 1 : 0) || strides[i] % vector_ != 0 || strides[i] >= std::int64_t(1) << 37) return false;
    }
    return true;
  }

  // The strides of an operand, as it lies or packed.
  Strides operand(const Strides& s, std::int64_t channels, const std::int64_t (&sizes)[3], WeightLastOperand& own) const {
    own.sample = s.n;
    const std::int64_t vectors = ceil_div(channels, vector_), pixels = sizes[0] * sizes[1] * sizes[2];
    Strides result = s;
    if (!lies_in_boxes(s, sizes)) {
      own.pack = source_job(s, channels, vectors, pixels, sizes[0], sizes[1]);
      quicken_source(own.pack, s, p_.batch, element_);
      own.packed_bytes = 16 * vectors * pixels;  // of a sample
      result = {0, 1, 0, 0, 0};
    }
    if (result.w == 0) result.w = vector_ * vectors;
    if (result.h == 0) result.h = result.w * sizes[0];
    if (result.d == 0) result.d = result.h * sizes[1];
    if (result.n == 0) result.n = result.d * sizes[2];
    return result;
  }

  // Elements of x from one to the next along h, d, its channels and samples, of boxes; where there is one a vector, which says
  // nothing.
  std::array<std::int64_t, 4> plane_steps() const {
    const auto step = [&](std::int64_t count, std::int64_t own) { return count > 1 ? own : vector_; };
    return {step(p_.in_h, p_.x.h), step(p_.in_d, p_.x.d), step(p_.in_channels, p_.x.c), step(p_.batch, p_.x.n)};
  }
  // Whether rows of x are long, whole vectors.
  bool take_planes() {
    if (tile_.floats || plan_.x.packed_bytes == 0 || p_.groups > 1) return false;
    for (const std::int64_t step : plane_steps())
      if (step < 1 || step % vector_ != 0 || step >= std::int64_t(1) << 37) return false;
    if (p_.x.w != 1 || !aligned_ || p_.in_w < kWeightPlanePixels) return false;
    plan_.x.packed_bytes = 0;
    return true;
  }

  bool pack_squares() {
    if (!fits_squares() || plan_.y.packed_bytes == 0) return false;
    take_squares();
    plan_.y.pack.squares = true, plan_.job.squares = true;
    y_ = {0, 1, 0, 0, 0};
    y_.w = out_channels_, y_.h = y_.w * axes_[0].out, y_.d = y_.h * axes_[1].out, y_.n = y_.d * p_.out_d;
    plan_.y.packed_bytes = y_.n * element_;
    return true;
  }

  bool operands() {
    x_ = operand(p_.x, p_.in_channels, {p_.in_w, p_.in_h, p_.in_d}, plan_.x);
    if (planes_ && !take_planes()) return false;
    y_ = operand(p_.y, p_.out_channels, {p_.out_w, p_.out_h, p_.out_d}, plan_.y);
    if (squares_ && !pack_squares()) return false;
    if (!list_taps(y_)) return false;
    row_channels_ = in_channels_ <= 32 || tile_.floats ? 32 : 64;
    block_channels_ = tile_.row_groups * (tile_.floats ? 64 : row_channels_);
    channel_tiles_ = ceil_div(in_channels_, block_channels_);
    const std::int64_t x_steps[] = {x_.w, x_.h, x_.d, x_.n};
    const std::int64_t y_steps[] = {pixel_ * axes_[0].stride, y_.h * axes_[1].stride, y_.d * axes_[2].stride, y_.n};
    for (const Triple& residue : residues_) {
      std::array<std::int64_t, 4> sizes{1, 1, 1, 1};
      for (int i = 0; i < 3; ++i) sizes[std::size_t(i)] = positions_of(residue, i);
      if (sizes[0] < 1 || sizes[1] < 1 || sizes[2] < 1) return false;
      y_sizes_.push_back(sizes);
    }
    for (int i = 0; i < 4; ++i) {
      positions_[i] = i < 3 ? axes_[std::size_t(i)].in : 1;
      x_step_[i] = x_steps[i], y_step_[i] = y_steps[i];
      if (i < 3) plain_[i] = is_plain(i);
    }
    for (int i = 0; i < 3 && !planes_; ++i) merge(i);
    plan_.x.sample_size = plan_.y.sample_size = positions_[3];
    return true;
  }

  // Positions of an axis that all taps read alike, and which lie as if they were the next one's, are that axis's.
  void merge(int i) {
    int next = i + 1;
    while (next < 3 && positions_[next] == 1 && plain_[next]) ++next;
    if (!plain_[i] || positions_[i] == 1 || (next == 3 ? p_.batch == 1 : !plain_[next])) return;
    if (x_step_[next] != positions_[i] * x_step_[i] || y_step_[next] != positions_[i] * y_step_[i]) return;
    positions_[next] *= positions_[i], positions_[i] = 1;
    x_step_[next] = x_step_[i], y_step_[next] = y_step_[i];
    for (auto& sizes : y_sizes_) sizes[std::size_t(next)] = positions_[next], sizes[std::size_t(i)] = 1;
  }
  std::int64_t samples() const { return positions_[3] * p_.batch; }

  std::int64_t y_bytes() const { return element_ * width_; }  // of a row
  std::int64_t x_bytes() const { return element_ * row_channels_; }
  std::int64_t x_room() const { return planes_ ? 128 : x_bytes(); }  // of 64 channels as planes, whatever there are
  std::int64_t x_boxes() const { return block_channels_ / row_channels_; }
  static std::int64_t round_up(std::int64_t bytes) { return ceil_div(bytes, kWeightLastAlignment) * kWeightLastAlignment; }
  std::int64_t patch_size(const WeightArrangement& a, const Cut& cut, int axis) const {
    return cut.box[axis] + a.halo[std::size_t(axis)];
  }
  std::int64_t rows_of(const Cut& cut) const { return cut.box[0] * cut.box[1] * cut.box[2] * cut.box[3]; }
  std::int64_t patch_rows(const WeightArrangement& a, const Cut& cut) const {
    return patch_size(a, cut, 0) * patch_size(a, cut, 1) * patch_size(a, cut, 2) * cut.box[3];
  }

  // Rows of a patch that instructions read from its first on, those of atoms that are none included.
  std::int64_t read_rows(const WeightArrangement& a, const Cut& cut) const {
    if (a.single) return ceil_div(rows_of(cut), 16) * 16;
    std::int64_t most = 0;
    const std::int64_t last = row_of(a, cut, rows_of(cut) - 1) + 1;
    for (std::size_t i = 0; i < a.slots.size(); ++i) {
      const WeightSlot& slot = a.slots[i];
      most = std::max(most, row_of(a, cut, slot.low) + (atoms_of(std::int64_t(i)) - 1) * row_of(a, cut, slot.step) + last);
    }
    return std::max(most, patch_rows(a, cut));
  }
  std::int64_t row_of(const WeightArrangement& a, const Cut& cut, const Triple& shift) const {
    return (shift[2] * patch_size(a, cut, 1) + shift[1]) * patch_size(a, cut, 0) + shift[0];
  }
  std::int64_t row_of(const WeightArrangement& a, const Cut& cut, std::int64_t number) const {
    if (a.single) return number;
    const std::int64_t w = number % cut.box[0], h = number / cut.box[0] % cut.box[1];
    const std::int64_t d = number / cut.box[0] / cut.box[1] % cut.box[2], n = number / cut.box[0] / cut.box[1] / cut.box[2];
    return n * (patch_rows(a, cut) / cut.box[3]) + row_of(a, cut, Triple{w, h, d});
  }
  std::int64_t stage_bytes(const WeightArrangement& a, const Cut& cut) const {
    const std::int64_t rows = ceil_div(rows_of(cut), 16) * 16, x = x_boxes() * round_up(rows * x_room());
    const std::int64_t patches = a.single ? slots_of_set_atoms() : a.most_patches;
    const std::int64_t pitch = round_up(a.single ? rows * y_bytes() : patch_rows(a, cut) * y_bytes());
    return x + (patches - 1) * pitch + std::max(pitch, round_up(read_rows(a, cut) * y_bytes()));
  }
  std::int64_t slots_of_set_atoms() const {
    std::int64_t atoms = 0;
    for (std::int64_t i = 0; i < slots_of_set(); ++i) atoms += atoms_of(i);
    return atoms;
  }

  bool choose() {
    for (int level = 0; level <= 3; ++level) {
      for (int axis = 0; axis < (level == 3 ? 1 : 3 - level); ++axis) {
        std::int64_t last = 0;
        for (std::int64_t parts = 1; parts <= chunks_; ++parts) {
          const std::int64_t set_chunks = ceil_div(chunks_, parts);
          if (set_chunks == last) continue;
          last = set_chunks;
          const WeightArrangement a = arrange(level, axis, set_chunks);
          if (!a.possible) continue;
          Cut cut;
          cut.level = level, cut.axis = axis, cut.set_chunks = set_chunks;
          a.single ? try_rows(a, cut) : try_blocks(a, cut);
          if (parts >= 4 && best_.cost >= 0) break;
        }
      }
    }
    return best_.cost >= 0;
  }

  void keep(const WeightArrangement& a, Cut cut) {
    const std::int64_t rows = rows_of(cut), steps = ceil_div(rows, 16);
    if (planes_ && (cut.box[0] % kWeightPlanePixels != 0 || cut.box[2] > 1 || cut.box[3] > 1)) return;
    for (int i = 0; i < 3; ++i)
      if (patch_size(a, cut, i) > kMostWeightBox) return;
    if (rows > kMostWeightRows || cut.box[3] > kMostWeightBox || patch_rows(a, cut) * y_bytes() >= 1 << 18) return;
    const std::int64_t stage = stage_bytes(a, cut), stages = most_shared_ / stage;
    if (stages < 2) return;
    double tiles = 1;
    for (int i = 0; i < 4; ++i) tiles *= double(ceil_div(i == 3 ? samples() : positions_[i], cut.box[i]));
    const double step = tile_.row_groups * tile_.set_columns8() * (tile_.floats ? kFloatStepCycles : kHalfStepCycles);
    const double products = double(steps) * step;
    const double bytes = double(x_boxes() * rows * x_bytes()) + a.patches * double(patch_rows(a, cut) * y_bytes());
    const double loads = bytes / kWeightBytesPerCycle;
    cut.cycles = std::max(products, loads) + 0.1 * std::min(products, loads) + kPositionTileCycles;
    cut.cycles *= stages == 2 ? 1.2 : stages == 3 ? 1.05 : 1.0;
    const double blocks = double(channel_tiles_ * ceil_div(chunks_, cut.set_chunks) * std::int64_t(a.sets.size()) * p_.groups);
    // A tail of few tiles of positions leaves multiprocessors idle.
    cut.cost = (blocks * tiles + double(kWeightMultiprocessors)) * cut.cycles;
    if (best_.cost < 0 || cut.cost < best_.cost) best_ = cut;
  }
  // Whether no smaller part makes as few parts.
  static bool is_fair(std::int64_t size, std::int64_t part) {
    return part == 1 || ceil_div(size, part - 1) > ceil_div(size, part);
  }

  // Rows of boxes follow one another: tiles of any size.
  void try_rows(const WeightArrangement& a, Cut cut) {
    const std::int64_t most = 256;
    for (std::int64_t w = std::min(positions_[0], most); w > 0; --w) {
      if (!is_fair(positions_[0], w) && w % 16 != 0) continue;
      for (std::int64_t h = std::min(positions_[1], most / w); h > 0; --h) {
        if (!is_fair(positions_[1], h) && h % 8 != 0) continue;
        if (h > 1 && w < positions_[0]) continue;
        for (std::int64_t d = std::min(positions_[2], most / (w * h)); d > 0; --d) {
          if (!is_fair(positions_[2], d) || (d > 1 && h < positions_[1])) continue;
          for (std::int64_t n = std::min(samples(), most / (w * h * d)); n > 0; n = n > 16 ? (n - 1) / 8 * 8 : n - 1) {
            cut.box[0] = w, cut.box[1] = h, cut.box[2] = d, cut.box[3] = n;
            keep(a, cut);
            if (d < positions_[2]) break;
          }
        }
      }
    }
  }

  // Sixteen positions lie in one row, or eight in each of two, one above the other.
  void try_blocks(const WeightArrangement& a, Cut cut) {
    for (std::int64_t w = 8; w <= 128; w += w == 8 ? 8 : 16) {
      if (w > 16 && w >= positions_[0] + 16) break;
      for (std::int64_t h = w == 8 ? 2 : 1; h * w <= 256; h += w == 8 ? 2 : 1) {
        for (std::int64_t d = 1; d * h * w <= 256; d *= 2) {
          for (std::int64_t n = 1; n * d * h * w <= 256; n *= 2) {
            cut.box[0] = w, cut.box[1] = h, cut.box[2] = d, cut.box[3] = n;
            keep(a, cut);
            if (n >= samples()) break;
          }
          if (d >= positions_[2]) break;
        }
        if (h >= positions_[1]) break;
      }
    }
  }

  bool taps_are_neighbours() const { return p_.w.c != 1 || out_channels_per_group(p_) == 1; }                     // in w
  std::int64_t sums_of_tile() const { return std::int64_t(tile_.row_groups) * tile_.set_columns8() * 128 * 16; }  // bytes

  bool tables();
  void list_atoms(const WeightArrangement& a);
  void list_square_atoms(const WeightArrangement& a);
  bool columns(const WeightArrangement& a);
  bool launches(std::int64_t part_bytes);
  bool split();
  bool sums();
  void cut_sums();
  void describe();
};

// y in squares, and x as planes, where that takes least.
inline WeightLastPlan plan_weight_last(const Problem& p, const WeightLastTileSize& tile, std::int64_t alignment, std::int64_t cap,
                                       std::int64_t shared_bytes) {
  const auto takes = [&](const WeightLastPlan& plan) {
    const std::int64_t packed = (plan.x.packed_bytes + plan.y.packed_bytes) / plan.batch * p.batch;
    const double planes = tile.set_columns8() <= kWeightFewColumns8 ? kWeightFewColumnsMicroseconds : kWeightPlanesMicroseconds;
    return plan.microseconds * double(plan.launches) + double(packed) / kWeightPackedBytesMicrosecond +
           (plan.planes ? planes : 0);
  };
  WeightLastPlan best;
  for (const bool squares : {false, true}) {
    for (const bool planes : {false, true}) {
      WeightLastPlan plan = WeightLastPlanner(p, tile, alignment, cap, shared_bytes, squares, planes).plan();
      if (plan.possible && (!best.possible || takes(plan) < takes(best))) best = std::move(plan);
    }
  }
  return best;
}

}  // namespace
}  // namespace upfold::cuda
