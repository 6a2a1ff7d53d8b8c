// What a tile of the fused method by boxes of channels takes: the pairs of taps and phases, the patches that they share, and the
// positions of a tile; host code, for one source.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "fused_last_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostLastCount = std::int64_t(1) << 30;  // of what the kernels keep in 32 bits
constexpr std::int64_t kLastFixedBytes = 3 << 10;               // of barriers, and of the alignment of the first patch
constexpr std::int64_t kMostTurnedStep = 64;                   // so that eight positions are less than LastTurnedStore::Row holds
constexpr std::int64_t kMostBox = 256, kMostBoxStep = 8;       // of an axis
constexpr std::int64_t kMostBoxBytes = std::int64_t(1) << 40;  // from element to element of an axis
constexpr std::int64_t kSector = 32;                           // bytes of memory that are written together
constexpr double kStoreBytesPerCycle = 20.0;                   // and to it
constexpr double kLoadBytesPerCycle = 40.0;                    // of a multiprocessor, from the second-level cache
constexpr double kTransposedBytesPerCycle = 20.0;              // to patches, by warps
constexpr std::int64_t kLeastPieces = 2;                       // of planes that are transposed

using Triple = std::array<std::int64_t, 3>;

class LastCutter {
 public:
  LastCutter(const Problem& p, const LastTileSize& tile, std::int64_t shared_bytes, bool aligned)
      : p_(p),
        tile_(tile),
        element_(element_bytes(p.dtype)),
        chunk_bytes_(16 * tile.vectors),
        forward_(p.op == Operator::kConvTranspose),
        most_shared_(shared_bytes - kLastFixedBytes - staged_bytes()),
        aligned_(aligned),
        axes_{axis_d(p), axis_h(p), axis_w(p)} {
    for (int i = 0; i < 3; ++i) {
      positions_[i] = forward_ ? ceil_div(axes_[i].out, axes_[i].stride) : axes_[i].in;
      source_step_[i] = forward_ ? 1 : axes_[i].stride, result_step_[i] = forward_ ? axes_[i].stride : 1;
      source_size_[i] = forward_ ? axes_[i].in : axes_[i].out, result_size_[i] = forward_ ? axes_[i].out : axes_[i].in;
    }
    folded_ = folds();
    if (folded_) source_step_ = {1, 1, 1};
  }

 protected:
  struct Pair {
    std::int64_t set, phase, tap;
    Triple shift, origin;  // origin: of the source, what all positions add beside their shift
    bool joins(const Pair& other, int level) const {
      return set == other.set && origin == other.origin && std::equal(shift.begin(), shift.begin() + level, other.shift.begin());
    }
  };

  const Strides& source_strides() const { return forward_ ? p_.x : p_.y; }
  const Strides& result_strides() const { return forward_ ? p_.y : p_.x; }
  std::int64_t source_channels() const { return forward_ ? in_channels_per_group(p_) : out_channels_per_group(p_); }
  std::int64_t result_channels() const { return forward_ ? out_channels_per_group(p_) : in_channels_per_group(p_); }
  std::int64_t chunk() const { return chunk_bytes_ / element_; }

  // Whether boxes can be described of the source as it lies. Axes on which elements repeat are packed.
  bool lies_in_boxes() const {
    const Strides& s = source_strides();
    if (s.c != 1 || !aligned_) return false;
    const std::int64_t strides[] = {s.n, s.d, s.h, s.w}, sizes[] = {p_.batch, source_size_[0], source_size_[1], source_size_[2]};
    for (int i = 0; i < 4; ++i) {
      if (strides[i] < (sizes[i] > 1 ? 1 : 0) || strides[i] * element_ % 16 != 0) return false;
      if (strides[i] * element_ >= kMostBoxBytes) return false;
    }
    return true;
  }

  // A source whose stride divides its height and width is folded: the pixels of a step along the width are channels of one, and
  // the rows of a step along the height are a depth, so that boxes have no steps. Chunks end with their pixel.
  bool folds() const {
    const Axis &d = axes_[0], &h = axes_[1], &w = axes_[2];
    if (forward_ || d.out != 1 || d.stride != 1 || d.kernel != 1 || d.pad != 0 || (h.stride == 1 && w.stride == 1)) return false;
    const bool dense = !lies_in_boxes() || source_strides().w == source_channels() * p_.groups;
    return dense && source_channels() % chunk() == 0 && h.out % h.stride == 0 && w.out % w.stride == 0;
  }

  bool sizes() {
    for (int i = 0; i < 3; ++i) {
      const Axis& a = axes_[i];
      for (const std::int64_t size : {a.in, a.out, a.kernel, a.stride, a.pad, a.dilation})
        if (size >= kMostLastCount) return false;
      if (a.in * a.stride + a.kernel * a.dilation + a.pad >= kMostLastCount) return false;
      if (source_step_[i] > kMostBoxStep) return false;
    }
    const std::int64_t most = std::max(p_.in_channels, p_.out_channels) * kernel_taps(p_);
    if (most >= kMostLastCount || p_.batch >= kMostLastCount || kernel_taps(p_) > 4 * kMostLastPairs) return false;
    if (tile_.alternates && !(tile_.planes ? lies_in_planes() : tile_.to_planes ? stores_planes() : stores_boxes())) return false;
    if (tile_.transposes && !can_transpose()) return false;
    if (tile_.turned) {
      const std::int64_t step = *std::max_element(result_step_.begin(), result_step_.end());
      if (result_strides().w != 1 || result_strides().c == 1 || step > kMostTurnedStep) return false;
    }
    // Chunks end with their group: a NaN of the next one would meet zeros.
    return p_.groups == 1 || source_channels() % chunk() == 0;
  }

  // Whether pieces of results are boxes: they end with the channels of a pixel, or, where columns are taps too and pixels of a
  // row follow one another, with those of a row of taps. Rows and pixels of all phases are there.
  bool stores_boxes() const {
    const Strides& r = result_strides();
    const std::int64_t piece = kLastPieceRow / element_, steps = r.n | r.d | r.h | r.w;
    if (r.c != 1 || !aligned_ || steps * element_ % 16 != 0 || r.n < 0 || r.d < 0 || r.h < 0 || r.w <= 0) return false;
    // One element repeats on an axis of more.
    if ((r.n == 0 && p_.batch > 1) || (r.d == 0 && result_size_[0] > 1) || (r.h == 0 && result_size_[1] > 1)) return false;
    const bool rows = is_flat() && p_.groups == 1 && r.w == result_channels() && result_step_[2] * r.w % piece == 0;
    if (result_channels() % piece != 0 && !rows) return false;
    if (result_size_[1] % result_step_[1] != 0 || result_size_[2] % result_step_[2] != 0) return false;
    const std::int64_t planes = p_.batch * result_size_[0];
    if (p_.batch > 1 && result_size_[0] > 1 && r.n != result_size_[0] * r.d) return false;
    return planes < kMostLastCount &&
           std::max({r.n, r.d, r.h * result_step_[1], r.w * result_step_[2]}) * element_ < kMostBoxBytes;
  }
  // The same of a tile's positions: samples and planes of a box follow one another, and planes end with their sample.
  bool stores_box(std::int64_t planes, std::int64_t samples) const {
    if (samples > 1 && result_size_[0] > 1) return false;
    return planes == 1 || (result_step_[0] == 1 && positions_[0] % planes == 0);
  }

  // Whether axes of so many elements can be described behind one that is dense.
  bool is_box(std::int64_t stride, std::int64_t size) const {
    return size == 1 || (stride > 0 && stride * element_ % 16 == 0 && stride * element_ < kMostBoxBytes);
  }
  // Whether results lie in planes, and the tile's phases are those of the width.
  bool stores_planes() const {
    const Strides& r = result_strides();
    const std::int64_t channels = result_channels(), step = result_step_[2];
    if (r.w != 1 || r.c == 1 || tile_.phases != step || result_size_[2] < step) return false;
    if (channels % 8 != 0) return false;                                         // lanes read the bias in eights
    const std::int64_t part = tile_.columns / last_planes_parts(int(element_));  // ends with its group
    return p_.groups == 1 || channels % part == 0;
  }
  // Whether those are stored as boxes: planes of whole vectors.
  bool stores_boxes_of_planes() const {
    const Strides& r = result_strides();
    const Triple& sizes = result_size_;
    // Stores of boxes cut a row behind its last vector, not behind its last element.
    return aligned_ && tile_.phases != 3 && sizes[2] * element_ % 16 == 0 && is_box(r.h, sizes[1]) && is_box(r.d, sizes[0]) &&
           is_box(r.c, result_channels() * p_.groups) && is_box(r.n, p_.batch) && (!tile_.planes || run_of_planes() > 0);
  }
  // Whether x lies in planes of whole vectors, and each pixel has results of its own.
  bool lies_in_planes() const {
    const Strides& x = p_.x;
    if (!forward_ || !aligned_ || !is_equal()) return false;
    if ((p_.in_w > 1 && x.w != 1) || (p_.in_h > 1 && x.h != p_.in_w) || (p_.in_d > 1 && x.d != p_.in_h * p_.in_w)) return false;
    return is_box(x.c, p_.in_channels) && is_box(x.n, p_.batch) && stores_planes();
  }
  // Whether boxes of some channels of the source can be described, pixels of a row innermost.
  bool can_transpose() const {
    const Strides& s = source_strides();
    const Triple& sizes = source_size_;
    if (!aligned_ || folded_ || s.w != 1 || s.c == 1) return false;
    for (const std::int64_t step : source_step_)
      if (step != 1) return false;
    return is_box(s.h, sizes[1]) && is_box(s.d, sizes[0]) && is_box(s.c, source_channels() * p_.groups) && is_box(s.n, p_.batch);
  }
  // Pixels whose results are stored as one row: of 128 or 64 bytes, else as many as fill most of 64; 0: none make whole sectors,
  // of which parts are stored 2.5 times as slowly (H200: rows of 112 bytes, 294 us where tiles with other ends take 179).
  std::int64_t run_of_planes() const {
    const std::int64_t pixel = tile_.phases * element_;
    for (const std::int64_t row : {128, 64})
      if (p_.in_w % (row / pixel) == 0) return row / pixel;
    std::int64_t best = 0;
    for (std::int64_t run = 1; run <= 64 && run * tile_.phases <= kMostBox; ++run) {
      const bool whole = p_.in_w % run == 0 && run * pixel % kSector == 0;
      if (whole && (best == 0 || 64 / run * run >= 64 / best * best)) best = run;
    }
    return best;
  }

  // Kernel and stride are equal, and nothing is cut or added.
  bool is_equal() const {
    for (const Axis& a : axes_)
      if (a.kernel != a.stride || a.dilation != 1 || a.pad != 0 || a.out != a.in * a.stride) return false;
    return true;
  }
  // All phases read one position: columns are taps times channels.
  bool is_flat() const {
    if (!forward_ || result_strides().c != 1 || tile_.phases > 1 || result_channels() % (16 / element_) != 0) return false;
    return is_equal();
  }

  // The pairs of all sets, in the order of sets, and the phases.
  bool list_pairs() {
    LastJob& job = plan_.job;
    job.flat = is_flat();
    Triple phases{1, 1, 1};
    for (int i = 0; i < 3; ++i)
      if (forward_ && !job.flat) phases[i] = std::min(axes_[i].stride, axes_[i].out);
    // Phases of a set lie in whole rows, or in one, which may end with none.
    const bool whole = phases[2] % tile_.phases == 0 || tile_.phases % phases[2] == 0;
    row_phases_ = whole ? phases[2] : ceil_div(phases[2], std::int64_t(tile_.phases)) * tile_.phases;
    const std::int64_t all = phases[0] * phases[1] * row_phases_;
    sets_ = ceil_div(all, std::int64_t(tile_.phases));
    if (sets_ > kMostLastSets || sets_ * tile_.phases > kMostLastPhases || result_size_[0] >= INT16_MAX) return false;
    for (std::int64_t i = 0; i < sets_ * tile_.phases; ++i) {
      const std::int64_t w = i % row_phases_, h = i / row_phases_ % phases[1], d = i / row_phases_ / phases[1];
      job.phases[i] = {{std::int16_t(d), std::int16_t(h), std::int16_t(w)}};
      if (i >= all || w >= phases[2]) job.phases[i].at[0] = INT16_MAX;  // behind every result
      if (std::max({d, h, w}) >= INT16_MAX) return false;
    }
    if (job.flat) {
      pairs_.push_back({0, 0, 0, {0, 0, 0}, {0, 0, 0}});
      return true;
    }
    for (std::int64_t tap = 0; tap < kernel_taps(p_); ++tap) add_tap(tap, phases);
    // Where no tap reaches a result other tiles fill it with the bias.
    if (pairs_.empty() || std::int64_t(pairs_.size()) > kMostLastPairs) return false;
    for (const Pair& pair : pairs_)
      for (int i = 0; i < 3; ++i)
        if (std::max(std::abs(pair.shift[i]) * source_step_[i], pair.origin[i]) >= INT16_MAX / 2) return false;
    return true;
  }

  void add_tap(std::int64_t tap, const Triple& phases) {
    const Triple taps{tap / p_.kernel_w / p_.kernel_h, tap / p_.kernel_w % p_.kernel_h, tap % p_.kernel_w};
    Pair pair{0, 0, tap, {}, {}};
    Triple residue;
    for (int i = 0; i < 3; ++i) {
      const std::int64_t at = taps[i] * axes_[i].dilation - axes_[i].pad, turn = floor_div(at, axes_[i].stride);
      residue[i] = at - turn * axes_[i].stride;
      if (forward_ && residue[i] >= phases[i]) return;  // no result has this phase
      pair.shift[i] = forward_ ? -turn : turn, pair.origin[i] = forward_ ? 0 : residue[i];
    }
    if (forward_) {
      const std::int64_t phase = (residue[0] * phases[1] + residue[1]) * row_phases_ + residue[2];
      pair.set = phase / tile_.phases, pair.phase = phase % tile_.phases;
    }
    pairs_.push_back(pair);
  }

  // A patch for the taps of a set that share their constant and, from level 1 on, their shift in depth, height, width.
  struct Cut {
    int level = 3;
    Triple box{}, halo{};
    std::int64_t samples = 1, patches = 0, rows = 0;
    std::int64_t beside = 1;  // products of a row, each 8 positions wide, else 1
    std::int64_t skip = 0;    // pixels that boxes of planes begin ahead of a patch, at most
    double cost = -1;
    Triple patch() const { return {box[0] + halo[0], box[1] + halo[1], box[2] + halo[2]}; }
    bool is_dense() const { return halo[0] == 0 && halo[1] == 0 && halo[2] == 0; }
  };

  void sort_pairs(int level) {
    std::stable_sort(pairs_.begin(), pairs_.end(), [level](const Pair& a, const Pair& b) {
      if (a.set != b.set) return a.set < b.set;
      if (a.origin != b.origin) return a.origin < b.origin;
      for (int i = 0; i < level; ++i)
        if (a.shift[i] != b.shift[i]) return a.shift[i] < b.shift[i];
      return a.tap < b.tap;
    });
  }

  // The patches of a level: where each ends among the sorted pairs, and the largest halo.
  Triple halo_of(int level, std::vector<std::size_t>& ends) {
    sort_pairs(level);
    ends.clear();
    Triple halo{0, 0, 0};
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      if (i + 1 == pairs_.size() || !pairs_[i].joins(pairs_[i + 1], level)) {
        const std::size_t begin = ends.empty() ? 0 : ends.back();
        for (int axis = 0; axis < 3; ++axis) {
          const auto [low, high] = range(begin, i + 1, axis);
          halo[axis] = std::max(halo[axis], high - low);
        }
        ends.push_back(i + 1);
      }
    }
    return halo;
  }
  std::pair<std::int64_t, std::int64_t> range(std::size_t begin, std::size_t end, int axis) const {
    std::int64_t low = pairs_[begin].shift[axis], high = low;
    for (std::size_t i = begin; i < end; ++i)
      low = std::min(low, pairs_[i].shift[axis]), high = std::max(high, pairs_[i].shift[axis]);
    return {low, high};
  }

  // Where boxes of planes begin at whole vectors.
  std::int64_t most_skip(const std::vector<std::size_t>& ends) const {
    std::int64_t most = 0;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const std::int64_t low = range(i == 0 ? 0 : ends[i - 1], ends[i], 2).first;
      most = std::max(most, low - floor_div(low, 16 / element_) * (16 / element_));
    }
    return most;
  }
  // Pixels of a row of such a box: an odd number of vectors.
  std::int64_t piece_pixels(const Cut& cut) const {
    const std::int64_t vectors = ceil_div(cut.skip + cut.patch()[2], 16 / element_);
    return (vectors | 1) * (16 / element_);
  }
  std::int64_t piece_bytes(const Cut& cut) const {
    if (!tile_.transposes) return 0;
    return cut.rows / cut.patch()[2] * piece_pixels(cut) * 16 * kLastPieceVectors;
  }

  std::int64_t staged_bytes() const {
    if (tile_.turned) return kLastTurnedStaged;
    if (tile_.alternates) {
      const int element = int(element_), buffers = 2 * last_planes_buffers(tile_.columns, element);
      if (tile_.to_planes)
        return buffers * last_planes_part_bytes(int(tile_rows()), tile_.columns, tile_.phases * element, element);
      const int row = tile_.columns * tile_.phases * int(element_);
      return 2 * last_pieces_at_once(row, int(element_)) * tile_rows() * kLastPieceRow;
    }
    return result_strides().c == 1 ? 0 : kLastStagedBytes;
  }
  std::int64_t tile_rows() const { return std::int64_t(tile_.product) * tile_.products; }
  std::int64_t pair_bytes() const { return tile_.columns * chunk_bytes_; }

  // Cycles of all tiles, but for what does not depend on the cut.
  bool cost_of(Cut& cut) const {
    const Triple patch = cut.patch();
    if (tile_.alternates && !tile_.to_planes && !stores_box(cut.box[0], cut.samples)) return false;
    double tiles = double(ceil_div(p_.batch, cut.samples));
    for (int i = 0; i < 3; ++i) {
      if ((patch[i] - 1) * source_step_[i] + 1 > kMostBox) return false;
      tiles *= double(ceil_div(positions_[i], cut.box[i]));
    }
    cut.rows = cut.samples * patch[0] * patch[1] * patch[2];
    const std::int64_t bytes = std::max(cut.rows, cut.is_dense() ? tile_rows() : 0) * chunk_bytes_;
    if (2 * round_up(bytes) + 2 * pair_bytes() + kLeastPieces * piece_bytes(cut) > most_shared_ || cut.rows >= INT16_MAX)
      return false;
    if (tile_.transposes && piece_pixels(cut) > kMostBox) return false;
    const double products = double(pairs_.size()) * double(tile_rows() * tile_.columns * chunk_bytes_) / 4096;
    const double loads = double(cut.patches * cut.rows * chunk_bytes_) + double(std::int64_t(pairs_.size()) * pair_bytes());
    const double transposed = tile_.transposes ? double(cut.patches * cut.rows * chunk_bytes_) / kTransposedBytesPerCycle : 0;
    const double cycles = std::max(loads / kLoadBytesPerCycle, transposed);
    const double cost =
        tiles * (store_cycles(cut) + std::max(products, cycles) + 0.2 * std::min(products, cycles) + 50.0 * double(cut.patches));
    const bool better = cut.cost < 0 || cost < cut.cost;
    cut.cost = cost;
    return better;
  }

  // Of channels that are not innermost: results of eight positions in all width phases of a set lie together, of wider tiles
  // those of more.
  double store_cycles(const Cut& cut) const {
    if (result_strides().c == 1) return 0;
    const std::int64_t phases = std::min<std::int64_t>(tile_.phases, result_step_[2]);
    const std::int64_t beside = cut.beside > 1 ? 8 * std::min<std::int64_t>(cut.beside, tile_.m) : cut.box[2];
    const std::int64_t run = std::min<std::int64_t>(beside, tile_.turned ? 64 : 16) * phases * element_;
    const double slow = (run >= 64 ? 1.0 : run >= 32 ? 1.3 : 2.5) + (tile_.turned && run < 128 ? 0.2 : 0.0);
    return slow * double(tile_rows() * tile_.columns * tile_.phases * element_) / kStoreBytesPerCycle;
  }

  bool choose() {
    if (tile_.planes) {  // pixels of a sample in their order
      const std::int64_t run = stores_boxes_of_planes() ? run_of_planes() : 1, kept = 64 / run * run;
      best_.box = {1, 1, kept * tile_.products}, best_.halo = {0, 0, 0}, best_.level = 0, best_.rows = tile_rows(),
      best_.cost = 0;
      positions_ = {1, 1, positions_[0] * positions_[1] * positions_[2]};
      return positions_[2] < kMostLastCount;
    }
    std::vector<std::size_t> ends;
    for (int level = 0; level <= 3; ++level) {
      Cut cut;
      cut.level = level, cut.halo = halo_of(level, ends), cut.patches = std::int64_t(ends.size()), cut.skip = most_skip(ends);
      if (cut.patches > kMostLastPatches) continue;
      cut.is_dense() ? try_dense(cut) : try_blocks(cut);
    }
    return best_.cost >= 0;
  }
  void keep(Cut cut) {
    cut.cost = best_.cost;
    const bool better = cost_of(cut);
    if (better) best_ = cut;
  }

  // Rows of the patch follow one another: tiles of any size.
  void try_dense(Cut cut) {
    const std::int64_t grain = tile_.to_planes || tile_.turned ? 2 : 1;  // two neighbours of a row are a lane's
    const std::int64_t most = tile_.to_planes ? tile_rows() : std::min(ceil_div(positions_[2], grain) * grain, tile_rows());
    for (std::int64_t w = most; w > 0; w -= grain) {
      if (tile_.to_planes ? !is_row_of_planes(w) : !is_fair(positions_[2], w, grain)) continue;
      for (std::int64_t h = std::min(positions_[1], tile_rows() / w); h > 0; --h) {
        if (!is_fair(positions_[1], h, 1)) continue;
        const std::int64_t d = std::min(positions_[0], tile_rows() / (w * h));
        cut.box = {d, h, w}, cut.samples = std::min({p_.batch, tile_rows() / (w * h * d), kMostBox});
        keep(cut);
      }
    }
  }
  // Whether so many positions of a row are stored in planes: whole boxes of results, and fewer than eight if they are the row.
  bool is_row_of_planes(std::int64_t w) const {
    if ((w & (w - 1)) != 0 || (w < 8 && w < positions_[2])) return false;
    return w >= 8 || !stores_boxes_of_planes() || w * tile_.phases * element_ % 16 == 0;
  }
  // Whether no smaller part makes as few parts, unless it is a multiple of eight.
  static bool is_fair(std::int64_t size, std::int64_t part, std::int64_t grain) {
    return part % 8 == 0 || part == grain || ceil_div(size, part - grain) > ceil_div(size, part);
  }

  // The positions of a product lie in one row, or in rows of eight, one above the other.
  void try_blocks(Cut cut) {
    for (std::int64_t w = tile_rows(); w >= tile_.product; w /= 2) try_blocks_of(cut, w, 1);
    const std::int64_t most = tile_.turned ? tile_.products : 1;
    for (cut.beside = 1; cut.beside <= most; cut.beside *= 2) try_blocks_of(cut, 8 * cut.beside, tile_.product / 8);
  }
  void try_blocks_of(Cut cut, std::int64_t w, std::int64_t least_h) {
    for (std::int64_t h = least_h; w * h <= tile_rows(); h *= 2) {
      for (std::int64_t d = 1; w * h * d <= tile_rows(); d *= 2) {
        cut.box = {d, h, w}, cut.samples = tile_rows() / (w * h * d);
        keep(cut);
      }
    }
  }

  static std::int64_t round_up(std::int64_t bytes) { return ceil_div(bytes, kLastAlignment) * kLastAlignment; }

  const Problem p_;
  const LastTileSize tile_;
  const std::int64_t element_, chunk_bytes_;
  const bool forward_;
  const std::int64_t most_shared_;
  const bool aligned_;
  const Axis axes_[3];
  bool folded_ = false;
  Triple positions_, source_step_, result_step_, source_size_, result_size_;
  std::int64_t sets_ = 1, row_phases_ = 1;
  std::vector<Pair> pairs_;
  Cut best_;
  LastPlan plan_;
};

}  // namespace
}  // namespace upfold::cuda
