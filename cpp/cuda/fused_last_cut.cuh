// What a tile of the fused method by boxes of channels takes: the pairs of taps and phases, the patches that they share, and the
// positions of a tile; host code, for one source.
#pragma once

#include <numeric>
#include <vector>

#include "fused_last_layout.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kLastFixedBytes = 3 << 10;  // of barriers, and of the alignment of the first patch
constexpr double kStoreBytesPerCycle = 20.0;       // of a multiprocessor, to memory
constexpr double kLoadBytesPerCycle = 40.0;        // from the second-level cache
constexpr double kTransposedBytesPerCycle = 20.0;  // to patches, by warps; an estimate
// Sectors that runs of results which begin or end within one take beside their own, in times of theirs (H200: rows of 518 bytes
// in runs of 64 took 182 us and of 512 aligned ones 49).
constexpr double kCutSectors = 3.0;
// Bytes of a run of 16-bit results that is stored by vectors whatever it begins at, at the least: a lane of each vector has one
// of the values at its ends. And how many times as long results are stored one by one: an estimate, which gives k3 s4 d3 long
// runs.
constexpr std::int64_t kLeastShiftedRun = 256;
constexpr double kOneByOne = 2.0;
constexpr std::int64_t kLeastSlices = 2;  // of planes that are transposed

class LastCutter : protected LastLayout {
 public:
  LastCutter(const Problem& p, const LastTileSize& tile, std::int64_t shared_bytes, bool aligned)
      : LastLayout(p, tile, aligned), most_shared_(shared_bytes - kLastFixedBytes - staged_bytes()) {}

 protected:
  struct Pair {
    std::int64_t set, phase, tap;
    Triple shift, origin;  // origin: of the source, what all positions add beside their shift
    bool joins(const Pair& other, int level) const {
      return set == other.set && origin == other.origin && std::equal(shift.begin(), shift.begin() + level, other.shift.begin());
    }
  };

  // The pairs of all sets, in the order of sets, and the phases.
  bool list_pairs() {
    LastJob& job = plan_.job;
    job.flat = is_flat();
    if (tile_.runs) return list_runs();
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
        if (std::max(std::abs(pair.shift[i]) * source_step_[i], std::abs(pair.origin[i])) >= INT16_MAX / 2) return false;
    return true;
  }

  // Of tiles of runs a pair for as many taps of a row as there are phases in a set.
  bool list_runs() {
    const std::int64_t step = axes_[2].stride, phases = run_phases();
    row_phases_ = 1, sets_ = step / phases;
    for (std::int64_t tap = 0; tap < kernel_taps(p_); tap += phases) {
      const std::int64_t row = tap / p_.kernel_w, w = tap % p_.kernel_w;
      const std::int64_t d = row / p_.kernel_h * axes_[0].dilation - axes_[0].pad;
      const std::int64_t h = row % p_.kernel_h * axes_[1].dilation - axes_[1].pad;
      pairs_.push_back({w % step / phases, 0, tap, {-d, -h, first_run_ - w / step}, {0, 0, 0}});
    }
    if (std::int64_t(pairs_.size()) > kMostLastPairs || result_size_[0] >= INT16_MAX) return false;
    for (const Pair& pair : pairs_)
      for (const std::int64_t shift : pair.shift)
        if (std::abs(shift) >= INT16_MAX / 2) return false;
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
    if (counted_) pair.origin[2] = pair.shift[1] * packed_row(), pair.shift[1] = 0;
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
  std::int64_t slice_pixels(const Cut& cut) const {
    const std::int64_t vectors = ceil_div(cut.skip + cut.patch()[2], 16 / element_);
    return (vectors | 1) * (16 / element_);
  }
  std::int64_t slice_bytes(const Cut& cut) const {
    if (!tile_.transposes) return 0;
    return cut.rows / cut.patch()[2] * slice_pixels(cut) * 16 * kLastSliceVectors;
  }

  std::int64_t staged_bytes() const {
    if (tile_.turned) return kLastTurnedStaged;
    if (tile_.runs) return 0;
    if (tile_.weight_rows) return tile_.row_boxes ? tile_.warpgroups * tile_rows() * tile_.columns * element_ : 0;
    if (tile_.alternates) {
      const int element = int(element_), buffers = tile_.warpgroups * last_planes_buffers(tile_.columns, element);
      if (tile_.to_planes) {
        const bool lines = !stores_boxes_of_planes();
        const int pixel = (lines ? tile_.phases : tile_.row_phases) * element;
        return buffers * last_planes_part_bytes(int(tile_rows()), tile_.columns, pixel, element, lines);
      }
      const int row = tile_.columns * tile_.phases * int(element_);
      return tile_.warpgroups * last_pieces_at_once(row, int(element_)) * tile_rows() * kLastPieceRow;
    }
    return result_strides().c == 1 ? 0 : kLastStagedBytes;
  }
  std::int64_t tile_rows() const { return std::int64_t(tile_.product) * tile_.products; }
  std::int64_t pair_bytes() const { return tile_.columns * chunk_bytes_; }

  // Cycles of all tiles, but for what does not depend on the cut.
  bool cost_of(Cut& cut) const {
    const Triple patch = cut.patch();
    if (tile_.alternates && !tile_.to_planes && !tile_.runs && !stores_box(cut.box[0], cut.samples)) return false;
    double tiles = double(ceil_div(p_.batch, cut.samples));
    for (int i = 0; i < 3; ++i) {
      if ((patch[i] - 1) * source_step_[i] + 1 > kMostBox) return false;
      tiles *= double(ceil_div(positions_[i], cut.box[i]));
    }
    cut.rows = cut.samples * patch[0] * patch[1] * patch[2];
    const std::int64_t bytes = std::max(cut.rows, cut.is_dense() ? tile_rows() : 0) * chunk_bytes_;
    if (2 * round_up(bytes) + 2 * pair_bytes() + kLeastSlices * slice_bytes(cut) > most_shared_ || cut.rows >= INT16_MAX)
      return false;
    if (tile_.transposes && slice_pixels(cut) > kMostBox) return false;
    const double products = double(pairs_.size()) * double(tile_rows() * tile_.columns * chunk_bytes_) / 4096;
    const double loads = double(cut.patches * cut.rows * chunk_bytes_) + double(std::int64_t(pairs_.size()) * pair_bytes());
    const double transposed = tile_.transposes ? double(cut.patches * cut.rows * chunk_bytes_) / kTransposedBytesPerCycle : 0;
    const double cycles = std::max(loads / kLoadBytesPerCycle, transposed);
    const double cost = tiles * (store_cycles(cut, tiles) + std::max(products, cycles) + 0.2 * std::min(products, cycles) +
                                 50.0 * double(cut.patches));
    const bool better = cut.cost < 0 || cost < cut.cost;
    cut.cost = cost;
    return better;
  }

  // Of channels that are not innermost: results of eight positions in all width phases of a set lie together, of wider tiles
  // those of more.
  double store_cycles(const Cut& cut, double tiles) const {
    if (result_strides().c == 1) return 0;
    if (tile_.runs) return double(tile_rows() * tile_.columns * element_) / kStoreBytesPerCycle;
    if (tile_.to_planes && !stores_boxes_of_planes()) return loose_cycles(cut, tiles);
    const std::int64_t phases = std::min<std::int64_t>(tile_.phases, result_step_[2]);
    const std::int64_t beside = cut.beside > 1 ? 8 * std::min<std::int64_t>(cut.beside, tile_.m) : cut.box[2];
    const std::int64_t run = std::min<std::int64_t>(beside, tile_.turned ? 64 : 16) * phases * element_;
    const double slow = (run >= 64 ? 1.0 : run >= 32 ? 1.3 : 2.5) + (tile_.turned && run < 128 ? 0.2 : 0.0);
    return slow * double(tile_rows() * tile_.columns * tile_.phases * element_) / kStoreBytesPerCycle;
  }

  // Whether the rows of a tile in a plane of the result follow one another.
  bool has_plane_runs(const Cut& cut) const {
    const std::int64_t w = result_size_[2], rows = tile_.phases / tile_.row_phases;
    return !tile_.planes && cut.box[2] * tile_.row_phases == w && result_strides().h == w && result_step_[1] == rows &&
           result_size_[1] * w < kMostLastCount;
  }
  std::int64_t run_positions(const Cut& cut) const {
    if (tile_.planes) return std::gcd(p_.in_w, std::int64_t(64));
    return has_plane_runs(cut) ? cut.box[1] * cut.box[2] : cut.box[2];
  }
  std::int64_t run_results(const Cut& cut) const {
    return run_positions(cut) * (has_plane_runs(cut) ? tile_.phases : tile_.row_phases);
  }
  // Runs that begin or end within a sector: others write the rest of it.
  double loose_cycles(const Cut& cut, double tiles) const {
    const std::int64_t run = run_results(cut) * element_;
    double slow = unit_of_runs(cut, kSector) == kSector ? 1.0 : 1.0 + kCutSectors * double(kSector) / double(run);
    if (is_narrow(unit_of_runs(cut, kSector)) && !shifts(run_results(cut))) slow *= kOneByOne;
    const double positions = double(p_.batch * positions_[0] * positions_[1] * positions_[2]) / tiles;  // that there are
    return slow * positions * double(tile_.columns * tile_.phases * element_) / kStoreBytesPerCycle;
  }
  // Whether units of so many bytes are stored one by one, by tiles that know a way of vectors too. Of floats vectors took longer
  // than words (H200, k3 s4 d3: 207 us for 171).
  bool is_narrow(std::int64_t unit) const { return element_ == 2 && unit == 2 && !tile_.planes; }
  // Whether runs of so many results can be stored by vectors whatever they begin at.
  bool shifts(std::int64_t results) const { return results * element_ % 16 == 0 && results * element_ >= kLeastShiftedRun; }
  // The largest unit, of a power of two of bytes up to `most`, at multiples of which runs begin and end, and tiles' lines too.
  std::int64_t unit_of_runs(const Cut& cut, std::int64_t most) const {
    const Strides& r = result_strides();
    std::int64_t steps = run_results(cut);
    if (p_.batch > 1) steps |= r.n;
    if (result_channels() * p_.groups > 1) steps |= r.c;
    if (result_size_[0] > 1) steps |= r.d;
    if (result_size_[1] > 1) steps |= has_plane_runs(cut) ? result_size_[1] * result_size_[2] : r.h;
    if (!has_plane_runs(cut)) steps |= result_size_[2];
    std::int64_t unit = most;
    while (steps * element_ % unit != 0) unit /= 2;
    return unit;
  }

  bool choose() {
    if (tile_.planes) {  // pixels of a sample in their order
      const bool boxes = tile_.weight_rows ? tile_.row_boxes : stores_boxes_of_planes();
      const std::int64_t run = boxes ? run_of_planes() : 1, kept = 64 / run * run;
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
    const bool boxes = tile_.to_planes && stores_boxes_of_planes();
    const std::int64_t grain = boxes || tile_.turned ? 2 : 1;  // two neighbours of a row are a lane's
    const std::int64_t most = boxes ? tile_rows() : std::min(ceil_div(positions_[2], grain) * grain, tile_rows());
    for (std::int64_t w = most; w > 0; w -= grain) {
      if (boxes ? !is_row_of_planes(w) : !is_fair(positions_[2], w, grain)) continue;
      // Boxes of planes begin with a vector: elsewhere the copy engine stops with an illegal instruction.
      if (tile_.transposes && w < positions_[2] && w * element_ % 16 != 0) continue;
      for (std::int64_t h = std::min(positions_[1], tile_rows() / w); h > 0; --h) {
        if (!is_fair(positions_[1], h, 1)) continue;
        const std::int64_t d = std::min(positions_[0], tile_rows() / (w * h));
        cut.box = {d, h, w}, cut.samples = std::min({p_.batch, tile_rows() / (w * h * d), kMostBox, most_samples_});
        // What parts of many samples store lies far apart: only where rows are whole, and sectors of results too.
        const bool part = w < positions_[2] || h < positions_[1] || d < positions_[0];
        if (tile_.to_planes && !boxes && part && !(w == positions_[2] && unit_of_runs(cut, kSector) == kSector)) cut.samples = 1;
        keep(cut);
      }
    }
  }
  // Whether so many positions of a row are stored as boxes of planes: fewer than eight if they are the row.
  bool is_row_of_planes(std::int64_t w) const {
    if ((w & (w - 1)) != 0 || (w < 8 && w < positions_[2])) return false;
    return w >= 8 || w * tile_.row_phases * element_ % 16 == 0;
  }
  // Whether no smaller part makes as few parts, unless it is a multiple of eight.
  static bool is_fair(std::int64_t size, std::int64_t part, std::int64_t grain) {
    return part % 8 == 0 || part == grain || ceil_div(size, part - grain) > ceil_div(size, part);
  }

  // The positions of a product lie in one row, or in rows of eight, one above the other.
  void try_blocks(Cut cut) {
    for (std::int64_t w = tile_rows(); w >= tile_.product; w /= 2) try_blocks_of(cut, w, 1);
    const std::int64_t most = tile_.turned ? tile_.products : 1;
    // Without rows above or below, of planes too that follow one another: those of other samples are as far away.
    if (tile_.runs && cut.halo[0] == 0 && cut.halo[1] == 0) try_blocks_of(cut, 8, 1);
    for (cut.beside = 1; cut.beside <= most; cut.beside *= 2) try_blocks_of(cut, 8 * cut.beside, tile_.product / 8);
  }
  void try_blocks_of(Cut cut, std::int64_t w, std::int64_t least_h) {
    const std::int64_t most_d = folded_ ? 1 : tile_rows();  // what is a depth of a folded source is one row of a step
    for (std::int64_t h = least_h; w * h <= tile_rows(); h *= 2) {
      for (std::int64_t d = 1; w * h * d <= tile_rows() && d <= most_d; d *= 2) {
        cut.box = {d, h, w}, cut.samples = tile_rows() / (w * h * d);
        if (cut.samples <= most_samples_) keep(cut);
      }
    }
  }

  static std::int64_t round_up(std::int64_t bytes) { return ceil_div(bytes, kLastAlignment) * kLastAlignment; }

  const std::int64_t most_shared_;
  std::int64_t most_samples_ = kMostLastCount;  // of a tile
  std::int64_t sets_ = 1, row_phases_ = 1;
  std::vector<Pair> pairs_;
  Cut best_;
  LastPlan plan_;
};

}  // namespace
}  // namespace upfold::cuda
