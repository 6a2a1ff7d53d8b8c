// How the fused method with pairs of a channel and a phase as rows cuts a problem into blocks; host code, for one source.
#pragma once

#include <algorithm>
#include <set>

#include "fused_phases_launch.cuh"
#include "fused_phases_rows.h"

namespace upfold::cuda {

namespace {

class PhasePlanner : PhaseRows {
 public:
  PhasePlanner(const Problem& p, const PhaseTileSize& tile, std::int64_t table_bytes, std::int64_t alignment, bool exact,
               bool split)
      : PhaseRows(p, tile, exact, split), table_bytes_(table_bytes), alignment_(alignment) {}

  PhasePlan plan(const SharedMemory& shared, int multiprocessors) {
    if (!sort_phases()) return {};
    shared_ = shared, multiprocessors_ = multiprocessors;
    return boxes() && blocks() ? plan_ : PhasePlan{};
  }

 private:
  static constexpr std::int64_t kReservedBytes = 1 << 10, kVector = 16, kLine = 128, kLongRun = 512;
  static constexpr std::int64_t kMostInputs = (1 << 15) - 64;  // of a box: more do not fit; their coordinates have 16 bits

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
    const std::int64_t grid_w = job_.window ? ceil_div(box[2], kWindowUnits) * kWindowUnits : box[2];
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
      // A lane reads its channels of both slots at a time, four inputs of them from different banks (in a window, where they lie
      // four inputs apart, two); of a folded slice those of one slot, of eight inputs.
      const std::int64_t multiple = job_.folded || job_.window ? 16 : 32;
      const std::int64_t step = (ceil_div(job_.chunk_channels * element_, multiple) | 1) * multiple;
      job_.channel_step = std::int32_t(element_), job_.input_step = std::int32_t(step);
      job_.line_step = std::int32_t(inputs * step), job_.skew = 0;
      job_.in_row = make_divisor(inputs);
      job_.places = make_divisor(lines * inputs),
      job_.copy_count = std::int32_t(lines * inputs * (job_.chunk_channels / elements));
      job_.stage_bytes = std::int32_t(lines * inputs * step);
      // Lanes of a place copy a sector of memory side by side, or more where each has four copies all the same, or some are idle.
      const std::int64_t copies = job_.chunk_channels / elements;
      std::int64_t lanes = 1;
      while (lanes * 2 <= copies &&
             (lanes * job_.grain < 32 * (job_.grain == kVector) || (lanes * 8 <= copies && lanes * job_.grain < 64) ||
              lines * inputs * lanes * 2 <= tile_.threads))
        lanes *= 2;
      job_.place_lanes = std::int32_t(lanes), job_.place_step = std::int32_t(tile_.threads / lanes);
    } else {
      const std::int64_t first = std::int64_t(job_.axis[2].first_unit) - job_.axis[2].most_shift;
      const std::int64_t multiple = job_.window ? std::max<std::int64_t>(elements, kWindowUnits) : elements;
      job_.skew = std::int32_t(first - floor_div(first, multiple) * multiple);
      const std::int64_t copies = ceil_div(job_.skew + inputs, elements), span = ceil_div(copies * job_.grain, kVector) * kVector;
      // Four channels of eight inputs (in a window, of two vectors) in different banks: an odd multiple of eight inputs apart.
      const std::int64_t eight = 8 * element_, pitch = (ceil_div(lines * span, 2 * eight) * 2 + 1) * eight;
      job_.channel_step = std::int32_t(lines * span <= pitch - 2 * eight ? pitch - 2 * eight : pitch);
      job_.input_step = std::int32_t(element_), job_.line_step = std::int32_t(span);
      job_.in_row = make_divisor(copies);
      job_.places = make_divisor(lines * copies), job_.copy_count = std::int32_t(lines * copies * job_.chunk_channels);
      job_.stage_bytes = job_.channel_step * job_.chunk_channels;
      job_.place_lanes = std::max(1, std::int32_t(tile_.threads / (lines * copies))), job_.place_step = tile_.threads;
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

  // Bytes of a store of outputs that lie apart: the widest that lie wholly in a run, and in y at multiples of their size.
  std::int64_t piece_of() const {
    std::int64_t steps = job_.oc | job_.pixel | p_.y.w | (p_.out_h > 1 ? p_.y.h : 0);
    steps |= (p_.out_d > 1 ? p_.y.d : 0) | (p_.batch > 1 ? p_.y.n : 0);
    const std::int64_t bytes = steps * element_ | alignment_ | kVector;
    return bytes & -bytes;
  }

  // Whether all runs of boxes of such a width begin and end at even elements of y.
  bool are_even(std::int64_t box_w) const {
    const PhaseAxis& w = job_.axis[2];
    std::int64_t steps = p_.y.c | p_.y.h | (std::int64_t(w.first_unit) * w.stride - w.pad) | w.out;
    steps |= (p_.batch > 1 ? p_.y.n : 0) | p_.y.d | (box_w < units_[2] ? box_w * w.stride : 0);
    return !job_.pixels && steps % 2 == 0 && alignment_ % (2 * element_) == 0;
  }

  // Room for what a line and a row of units lie behind multiples of 16 bytes; an odd number of vectors from one line to the next.
  bool lay_out_results(const std::int64_t (&box)[4], std::int64_t grid_w) {
    const std::int64_t per_vector = kVector / element_, stride = job_.axis[2].stride, box_lines = box[0] * box[1] * box[3];
    job_.joined = job_.pixel == job_.oc && p_.y.w == job_.pixel;
    job_.staged_pixel = job_.pixel;
    const bool apart = job_.pixels && !job_.joined;
    if (apart) {
      const std::int64_t piece = piece_of(), pieces = job_.pixel * element_ / piece;
      // Between outputs of whole vectors one, for other banks.
      if (piece == kVector) job_.staged_pixel += std::int32_t(per_vector);
      job_.piece = std::int32_t(piece), job_.pixel_pieces = make_divisor(pieces),
      job_.run_outputs = make_divisor(box[2] * stride);
      job_.run_vectors = make_divisor(pieces * box[2] * stride), job_.skews = job_.run_skews = 0;
    } else {
      // Stores of a warp that begin at lines of the cache touch a fifth fewer of them.
      const std::int64_t length = box[2] * stride * job_.pixel,
                         align = length * element_ >= kLongRun ? kLine / element_ : per_vector;
      job_.run_vectors = make_divisor(ceil_div(length + align - 1, align) * (align / per_vector));
      job_.skews = std::uint32_t(per_vector - 1), job_.run_skews = std::uint32_t(align - 1);
    }
    job_.run_rows = std::max<std::int32_t>(1, std::int32_t(tile_.threads) / std::int32_t(job_.run_vectors.value));
    const std::int64_t run = grid_w * stride * job_.staged_pixel + 2 * (per_vector - 1);
    job_.staged_pitch = std::int32_t((ceil_div(run, per_vector) | 1) * per_vector);
    job_.staged_line = std::int32_t(box_lines * job_.staged_pitch);
    const bool constants = job_.pixels && (job_.prefill || job_.empty_lines > 0);
    job_.pattern_bytes = constants ? std::int32_t(ceil_div(job_.oc * element_, kVector) * kVector) : 0;
    // And what stage_lines() may add.
    job_.staged_bytes = std::int32_t(job_.run_lines * (job_.staged_line * element_ + 7 * kVector) + job_.pattern_bytes);
    job_.run_count = std::int32_t((job_.run_lines + job_.empty_lines / job_.pixel) * box_lines);
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
    if (job_.lane_runs) return conflicts_of_pairs(line);
    const PhaseAxis& w = job_.axis[2];
    const int c = job_.group_class[group];
    if (c >= w.classes) return 0;
    const int count = w.first_phase[c + 1] - w.first_phase[c];
    std::set<std::int64_t> words;
    int of_bank[32] = {}, most = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const int row = (group - job_.first_group[c]) * 16 + lane / 4, in_line = job_.by_phase ? row % job_.lines : row / count;
      const int phase = job_.by_phase ? row / job_.lines : row % count;
      const std::int64_t unit = lane % 4 * 2 * (job_.window ? kWindowUnits : 1);
      const std::int64_t in_run = in_line % job_.pixel, output = w.phases[w.first_phase[c] + phase] + unit * w.stride;
      const std::int64_t at = in_line / job_.pixel * line + output * job_.staged_pixel + in_run;
      const std::int64_t word = at * element_ / 4;
      if (words.insert(word).second) most = std::max(most, ++of_bank[word % 32]);
    }
    return most;
  }

  // The same of pairs: as many lanes at a time as have 128 bytes.
  int conflicts_of_pairs(std::int64_t line) const {
    const int lanes = std::min<int>(32, int(kLine / (2 * element_)));
    int of_bank[32] = {}, most = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const std::int64_t first = lane / 4 * line + lane % 4 * 2 * kWindowUnits * job_.axis[2].stride;
      for (std::int64_t byte = 0; byte < 2 * element_; byte += 4)
        most = std::max(most, ++of_bank[(first * element_ + byte) / 4 % 32]);
    }
    return most;
  }

  std::int64_t shared_bytes() const {
    return std::int64_t(job_.weight_bytes) + (job_.last_stage + 1) * std::int64_t(job_.stage_bytes) + job_.staged_bytes +
           table_bytes_ + std::int64_t(job_.steps) * std::int64_t(sizeof(PhaseStep)) +
           (job_.run_count + job_.kept_places) * std::int64_t(sizeof(PhaseRun));
  }
  // Keeps the places of threads where no block has to make room for them.
  void keep_places() {
    static_assert(sizeof(PhasePlace) == sizeof(PhaseRun), "they lie behind each other");
    const std::int64_t before = blocks_together();
    job_.kept_places = tile_.threads;
    if (blocks_together() < before || shared_bytes() > shared_.of_block) job_.kept_places = 0;
  }

  // Blocks that a multiprocessor holds at a time.
  std::int64_t blocks_together() const {
    return std::min<std::int64_t>(tile_.blocks, shared_.of_multiprocessor / (shared_bytes() + kReservedBytes));
  }
  // Instructions of the warps for a chunk's products and copies, and the passes of shared memory for its products: counted in the
  // code for compute capability 9.0.
  struct Work {
    double instructions, passes;
  };
  Work chunk_work() const {
    const double slices = job_.slices.value, warps = tile_.units / 32.0 * (tile_.rows > 64 ? 2 : 1);
    const double fragments = slices * (tile_.units / 32.0) * (tile_.rows / 16.0);
    const double inputs = parts_ == 2     ? 100
                          : element_ == 4 ? 42
                                          : 28,
                 product = parts_ == 1              ? 7
                           : job_.weight_parts == 2 ? 25
                                                    : 53;
    const double places = double(ceil_div(job_.places.value, tile_.threads)) * tile_.threads / 32.0;
    return {job_.steps * ((job_.window ? 1 : slices) * inputs * warps + product * fragments) + 60.0 * places +
                12.0 / 32.0 * job_.copy_count + 120.0 * tile_.threads / 32.0,
            job_.steps * ((job_.window ? 16 : 8 * slices) * warps + 4.0 * job_.weight_parts * fragments) + job_.copy_count / 8.0};
  }
  // What the boxes of the layout take, in cycles of a multiprocessor of an H200.
  double cost_of(const std::int64_t (&box)[4]) const {
    std::int64_t tiles = ceil_div(p_.batch, box[3]) * job_.combinations.value;
    for (int i = 0; i < 3; ++i) tiles *= ceil_div(units_[i], box[i]);
    const double results = tile_.rows * tile_.units / 32.0, vectors = double(job_.run_count) * job_.run_vectors.value;
    const bool apart = job_.pixels && !job_.joined;
    Work work = chunk_work();
    work.instructions = job_.chunks * work.instructions + 250.0 * tile_.threads / 32.0 + 5.0 * results + 23.0 / 32.0 * vectors +
                        job_.run_count * (apart ? 4.0 : 4.0 + 1.2 * double(kVector / element_));
    work.passes = job_.chunks * work.passes + 2.0 * results + vectors / 4.0;
    // Both ends of a run leave a sector half written, and its vectors begin at no line of the cache: it takes as long as 16 more
    // (runs of 624 bytes 2.1 TB/s, of 3 KB 3.0). Inputs come from the second-level cache as often as from memory.
    const double written = apart ? vectors * job_.piece / double(kVector) : vectors + 16.0 * job_.run_count;
    // Memory gives neighbouring channels 64 bytes at a time.
    const double wasted = job_.dense && job_.chunks > 1 ? std::max(1.0, 64.0 / double(job_.chunk_channels * element_)) : 1.0;
    const double moved = written + 0.6 * wasted * job_.chunks * job_.copy_count * job_.grain / 16.0;
    const double cycles = std::max(work.instructions / 2.2, work.passes) + 0.3 * std::min(work.instructions / 2.2, work.passes);
    const double both = std::max(cycles, moved) + 0.3 * std::min(cycles, moved),
                 waits = (job_.last_stage > 0 ? 1000.0 : 1300.0) + 300.0 * job_.chunks;
    const std::int64_t together = std::min(blocks_together(), ceil_div(tiles, multiprocessors_));
    // Fewer warps than these leave instructions waiting for each other.
    const double slowed = std::max(1.0, 16.0 * 32.0 / double(together * tile_.threads));
    return double(ceil_div(tiles, together * multiprocessors_)) * (double(together) * both * slowed + waits);
  }

  // The box with the least cost among those that fit; as many channels at a time as pay.
  bool boxes() {
    double least = 0;
    std::int64_t best[4] = {}, best_channels = 0;
    std::int32_t best_stage = 0;
    for (std::int64_t w = std::min<std::int64_t>(units_[2], tile_.units); w > 0; --w) {
      if (w < units_[2] && w % (job_.dense ? 8 : kVector / element_) != 0) continue;
      const std::int64_t grid_w = job_.window ? ceil_div(w, kWindowUnits) * kWindowUnits : w;
      if (grid_w > tile_.units) continue;
      std::int64_t box[4] = {1, 1, w, 1};
      const auto balanced = [](std::int64_t size, std::int64_t most) {
        return ceil_div(size, ceil_div(size, std::min(size, most)));
      };
      box[1] = balanced(units_[1], tile_.units / grid_w), box[0] = balanced(units_[0], tile_.units / grid_w / box[1]);
      const std::int64_t most_n = std::min(tile_.units / grid_w / box[1] / box[0],
                                           std::max<std::int64_t>(1, kMost / 2 / std::max<std::int64_t>(1, p_.x.n)));
      box[3] = balanced(p_.batch, most_n);
      for (std::int64_t channels = job_.ic;; channels = ceil_div(channels, 2)) {
        if (!lay_out(box, channels)) break;
        // Chunks are copied while others are multiplied, or, of few inputs beside results, while those are stored.
        const bool while_stored = job_.chunks == 1 && job_.stage_bytes < job_.staged_bytes;
        for (job_.last_stage = 1; job_.last_stage >= (while_stored ? 0 : 1); --job_.last_stage) {
          if (shared_bytes() > std::min(shared_.of_block, shared_.of_multiprocessor - kReservedBytes)) continue;
          const double cost = cost_of(box);
          if (best_channels > 0 && cost >= least) continue;
          least = cost, best_channels = channels, best_stage = job_.last_stage, std::copy(box, box + 4, best);
        }
        if (channels <= job_.step_channels) break;
      }
    }
    if (best_channels == 0 || !lay_out(best, best_channels)) return false;
    plan_.cost = least, job_.last_stage = best_stage;
    job_.pairs = are_even(best[2]), job_.lane_runs = job_.by_phase && job_.pairs && job_.window;
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
    keep_places();
    const std::int64_t slots = blocks_together() * multiprocessors_;
    // Blocks of a row tile take boxes in turn; as many each.
    const std::int64_t most = std::min(count, std::max<std::int64_t>(1, slots / combinations));
    const std::int64_t each = ceil_div(count, most), own = ceil_div(count, each);
    if (combinations * own > kMost) return false;
    plan_.blocks = unsigned(combinations * own), plan_.shared_bytes = int(shared_bytes()), plan_.job = job_;
    plan_.tiles = product_tiles_ * p_.groups * count;
    return true;
  }

  const std::int64_t table_bytes_, alignment_;
  SharedMemory shared_ = {};
  std::int64_t multiprocessors_ = 0;
  PhasePlan plan_ = {};
};

}  // namespace
}  // namespace upfold::cuda
