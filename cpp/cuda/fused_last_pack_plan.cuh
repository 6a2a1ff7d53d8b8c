// How weights are packed ahead of the fused method by boxes of channels; host code, for one source.
#pragma once

#include "fused_last_plan.h"

namespace upfold::cuda {
namespace {

// Bytes of packed weights from which they are turned in shared memory: fewer are packed sooner by threads that take a vector each
// (microseconds of a layer, turned last: H100 2.1 MB 37.7 and 38.9, 4.2 MB 17.7 and 16.9, 40.0 and 38.7, 21.5 and 20.8; H200,
// where each lane found a row's place, 123 KB 12.5 and 14.1, 524 KB 44.3 and 46.3, 8.4 MB 77.9 and 70 to 76, 33.6 MB 226 and
// 209).
constexpr std::int64_t kLeastTurned = 4 << 20;

class LastPackPlanner {
 public:
  // Of a job that knows how weights lie and are packed, of elements of `element` bytes; a chunk has so many channels.
  LastPackPlanner(const Problem& p, LastPackJob& job, std::int64_t element, std::int64_t chunk_channels)
      : p_(p), job_(job), element_(element), taps_(kernel_taps(p)) {
    rows_ = std::int64_t(job.column_tiles.value) * job.columns.value;
    channel_blocks_ = ceil_div(std::int64_t(job.chunks.value) * chunk_channels, 128 / element);
  }

  // Where all begins at whole vectors; else threads take vectors each by itself.
  void plan() {
    if (lies_by_vector()) {
      job_.way = LastPacking::kByVector;
    } else if (taps_ > kMostLastPairs || 16 * std::int64_t(job_.count) < kLeastTurned) {
      return;
    } else if (lies_by_result()) {
      by_result();
    } else if (lies_by_reduction()) {
      by_reduction();
    }
  }

 private:
  bool is_whole(std::int64_t elements) const { return elements * element_ % 16 == 0; }
  // Whether taps follow one another, `unit` elements apart.
  bool has_taps(std::int64_t unit) const {
    const std::int64_t sizes[] = {p_.kernel_w, p_.kernel_h, p_.kernel_d};
    for (int i = 0; i < 3; unit *= sizes[i++])
      if (sizes[i] > 1 && job_.w_axis[2 - i] != unit) return false;
    return true;
  }
  bool has_whole_groups() const { return p_.groups == 1 || is_whole(job_.w_group); }

  bool lies_by_vector() const {
    const std::int64_t sizes[] = {p_.kernel_d, p_.kernel_h, p_.kernel_w};
    for (int i = 0; i < 3; ++i)
      if (sizes[i] > 1 && !is_whole(job_.w_axis[i])) return false;
    return !job_.spread && job_.w_source == 1 && is_whole(job_.source_channels) && is_whole(job_.w_result) && has_whole_groups();
  }
  bool lies_by_result() const {
    const std::int64_t channels = job_.result_channels;
    const bool together = (job_.w_result == taps_ && has_taps(1)) || (job_.w_result == 1 && has_taps(channels));
    return together && is_whole(channels * taps_) && is_whole(job_.w_source) && has_whole_groups();
  }
  bool lies_by_reduction() const {
    const bool together = job_.w_source == taps_ && has_taps(1) && !job_.flat && !job_.spread && job_.runs.step.value == 0;
    return together && rows_of_block() > 0 && is_whole(job_.source_channels * taps_) && is_whole(job_.w_result) &&
           has_whole_groups();
  }
  // Of kByReduction: rows of w that a block's shared memory holds, with a vector more for each eighth.
  std::int64_t rows_of_block() const { return kLastPackLines / (8 * (taps_ + 1)); }

  void by_result() {
    job_.way = LastPacking::kByResult;
    LastSourceJob& lines = job_.lines;
    lines.channels = job_.source_channels, lines.c = job_.w_source;
    lines.pixels = std::uint32_t(job_.result_channels * taps_), lines.sample = make_divisor(lines.pixels);
    // Columns of runs that nobody has are multiplied, but not stored.
    const std::int64_t lined = job_.runs.step.value > 0 ? lines.pixels : rows_ * (job_.flat ? 1 : taps_);
    job_.lined = std::int32_t(lined);
    lines.steps = source_steps(p_.groups * channel_blocks_ * ceil_div(lined, std::int64_t(kSourcePixels)));
    divide_into(ceil_div(lined, std::int64_t(kSourcePixels * lines.steps)));
  }
  void by_reduction() {
    job_.way = LastPacking::kByReduction;
    job_.rows = std::int32_t(std::min(rows_, rows_of_block()));
    job_.row_vectors = make_divisor(8 * taps_);
    divide_into(ceil_div(rows_, std::int64_t(job_.rows)));
  }
  void divide_into(std::int64_t parts) {
    job_.channel_blocks = make_divisor(channel_blocks_), job_.parts = make_divisor(parts);
    job_.all_taps = make_divisor(taps_), job_.blocks = std::uint32_t(p_.groups * channel_blocks_ * parts);
    std::fill(job_.pair_of, job_.pair_of + kMostLastPairs, kNoPair);
    for (std::uint32_t pair = 0; pair < job_.pairs.value; ++pair) job_.pair_of[job_.taps[pair]] = std::uint16_t(pair);
  }

  const Problem& p_;
  LastPackJob& job_;
  const std::int64_t element_, taps_;
  std::int64_t rows_, channel_blocks_;  // rows_: columns of all tiles of a group
};

}  // namespace
}  // namespace upfold::cuda
