// What the planner of tiles of the fused method by boxes of channels needs whose warpgroups alternate: whether sets are alike,
// and how planes that are read or transposed, and results that the copy engine stores, are described; host code, for one source.
#pragma once

#include "fused_last_cut.cuh"

namespace upfold::cuda {
namespace {

class LastAlternator : protected LastCutter {
 protected:
  using LastCutter::LastCutter;

  bool alternate() {
    LastJob& job = plan_.job;
    if (tile_.runs) {
      describe_runs();
      return true;
    }
    job.whole = job.stage_pairs == tile_.phases && has_whole_sets();
    if ((tile_.planes || tile_.whole) && !job.whole) return false;
    if (tile_.planes) describe_planes();
    if (tile_.weight_rows) {
      describe_rows_of_weight();
      return true;
    }
    if (tile_.transposes) describe_transposed();
    tile_.to_planes ? describe_planes_of_result() : describe_result();
    return true;
  }

  // Whether blocks that keep their set have as much to multiply as others.
  bool are_sets_alike() const {
    const LastJob& job = plan_.job;
    const auto end = [&](std::int64_t set) { return std::int64_t(job.patch[job.first_patch[set]].end); };
    for (std::int64_t set = 0; set < sets_; ++set) {
      const bool patches = job.first_patch[set + 1] - job.first_patch[set] == job.first_patch[1];
      if (!patches || end(set + 1) - end(set) != end(1) || stages_of(set) != stages_of(0)) return false;
    }
    return true;
  }
  // Whether sets have a patch each, and their phases a tap each, of one position.
  bool has_whole_sets() const {
    const LastJob& job = plan_.job;
    bool whole = plan_.patches == sets_ && std::int64_t(pairs_.size()) == sets_ * tile_.phases;
    for (std::size_t i = 0; i < pairs_.size() && whole; ++i) {
      const std::size_t first = i / std::size_t(tile_.phases) * std::size_t(tile_.phases);
      whole = (job.pair[i] >> 16 & 0xf) == i - first && (job.pair[i] & 0xffff) == (job.pair[first] & 0xffff);
    }
    return whole;
  }
  // Of the weights of a set.
  std::int64_t stages_of(std::int64_t set) const {
    const LastJob& job = plan_.job;
    std::int64_t stages = 0;
    for (std::int64_t q = job.first_patch[set] + 1; q <= job.first_patch[set + 1]; ++q)
      stages += ceil_div(job.patch[q].end - job.patch[q - 1].end, job.stage_pairs);
    return stages * job.chunks;
  }

 private:
  void describe_runs() {
    LastJob& job = plan_.job;
    const Strides& r = result_strides();
    const std::int64_t phases = run_phases();
    job.runs = {make_divisor(phases), std::int32_t(run_channels()), std::int32_t(axes_[2].pad % axes_[2].stride)};
    job.loose = true;
    std::int64_t steps = phases | job.runs.ahead | result_size_[2];
    if (p_.batch > 1) steps |= r.n;
    if (result_channels() * p_.groups > 1) steps |= r.c;
    if (result_size_[0] > 1) steps |= r.d;
    if (result_size_[1] > 1) steps |= r.h;
    job.unit = std::int8_t(steps % 2 == 0 ? 2 * element_ : element_);
  }
  // Pixels of a step along the width are channels of one, rows of a step along the height an axis, and planes and samples one.
  void describe_result() {
    const Strides& r = result_strides();
    const std::int64_t h = result_step_[1], w = result_step_[2], planes = result_size_[0];
    BoxTensor& tensor = plan_.result;
    tensor = {p_.dtype,
              {w * r.w, result_size_[2] / w, h, result_size_[1] / h, p_.batch * planes},
              {w * r.w, r.h, h * r.h, planes > 1 ? r.d : r.n},
              {std::int32_t(kLastPieceRow / element_), std::int32_t(best_.box[2]), 1, std::int32_t(best_.box[1]),
               std::int32_t(best_.box[0] * best_.samples)},
              kLastPieceRow,
              256};
    for (std::int64_t& stride : tensor.strides)
      stride = stride == 0 ? 16 : stride * element_;  // 0: of one element, never stepped
    tensor.rounds = false;
  }

  std::int64_t axis_bytes(std::int64_t stride, std::int64_t size) const { return size == 1 ? 16 : stride * element_; }
  // Of planes that are transposed to patches: pixels of a row, channels, rows, planes and samples.
  void describe_transposed() {
    LastJob& job = plan_.job;
    const Strides& s = source_strides();
    const Triple patch = best_.patch();
    const std::int64_t channels = source_channels() * p_.groups, pixels = slice_pixels(best_);
    job.pixels = std::int32_t(pixels), job.patch_width = std::int32_t(patch[2]);
    job.patch_lines = std::int32_t(best_.rows / patch[2]);
    job.slice_row = make_divisor(element_ == 2 ? pixels / 8 : patch[2]);
    plan_.source = {p_.dtype,
                    {source_size_[2], channels, source_size_[1], source_size_[0], p_.batch},
                    {axis_bytes(s.c, channels), axis_bytes(s.h, source_size_[1]), axis_bytes(s.d, source_size_[0]),
                     axis_bytes(s.n, p_.batch)},
                    {std::int32_t(pixels), std::int32_t(kLastSliceVectors * 16 / element_), std::int32_t(patch[1]),
                     std::int32_t(patch[0]), std::int32_t(best_.samples)},
                    16,
                    128};  // rows of no whole sectors take the copy engine a fourth less time than with 256
  }
  // Pixels, channels and samples of x.
  void describe_planes() {
    const Strides& x = p_.x;
    plan_.job.plane_row = make_divisor(p_.in_w), plan_.job.plane_rows = make_divisor(p_.in_h);
    plan_.source = {p_.dtype,
                    {positions_[2], p_.in_channels, p_.batch, 1, 1},
                    {axis_bytes(x.c, p_.in_channels), axis_bytes(x.n, p_.batch), 16, 16},
                    {std::int32_t(128 / element_), std::int32_t(chunk()), 1, 1, 1},
                    128,
                    256};
  }
  void describe_rows_of_weight() {
    LastJob& job = plan_.job;
    const Strides& r = result_strides();
    job.loose = !tile_.row_boxes, job.run_results = make_divisor(p_.kernel_d);
    job.paired = ((p_.batch > 1 ? r.n : 0) | r.c | r.d | r.h) % 2 == 0;
    job.run = job.loose ? 64 : std::int32_t(run_of_planes()), job.kept = 64 / job.run * job.run;
    if (!job.loose) describe_runs_of_planes(p_.kernel_w, tile_.columns / kernel_taps(p_));
    // All columns of a group, and channels of the source, in boxes of 64 of each.
    const std::int64_t columns = result_channels() * kernel_taps(p_), row = axis_bytes(p_.w.n, p_.in_channels);
    plan_.weights = LastWeights::kByResult;
    plan_.lying = {p_.dtype, {columns, 1, 1, 1, p_.in_channels}, {16, 16, 16, row}, {64, 1, 1, 1, std::int32_t(chunk())}, 128,
                   256};
  }
  // Pixels of a row, rows, planes, channels and samples: runs of positions are stored as rows of 128 or 64 bytes, or of fewer.
  void describe_planes_of_result() {
    LastJob& job = plan_.job;
    const std::int64_t pixel = tile_.row_phases * element_;
    job.loose = !stores_boxes_of_planes();
    if (job.loose) {
      const std::int64_t run = run_results(best_);
      job.kept = std::int32_t(tile_.planes ? 64 : best_.box[0] * best_.box[1] * best_.box[2] * best_.samples);
      job.run_results = make_divisor(run), job.run_positions = std::int32_t(run_positions(best_));
      job.plane_runs = has_plane_runs(best_), job.unit = std::int8_t(unit_of_runs(best_, 16));
      job.shifted = is_narrow(job.unit) && shifts(run);
      return;
    }
    std::int64_t run = std::min<std::int64_t>(best_.box[2], 128 / pixel);
    if (tile_.planes) run = run_of_planes();
    job.run = std::int32_t(run), job.kept = tile_.planes ? 64 / job.run * job.run : 64;
    describe_runs_of_planes(tile_.row_phases, tile_.columns / last_planes_parts(int(element_)));
  }
  // Boxes of so many channels, of runs of positions which have so many phases in a row.
  void describe_runs_of_planes(std::int64_t phases, std::int64_t of_box) {
    const Strides& r = result_strides();
    const std::int64_t channels = result_channels() * p_.groups;
    const std::int32_t row = std::int32_t(plan_.job.run * phases), bytes = row * std::int32_t(element_);
    plan_.result = {p_.dtype,
                    {result_size_[2], result_size_[1], result_size_[0], channels, p_.batch},
                    {axis_bytes(r.h, result_size_[1]), axis_bytes(r.d, result_size_[0]), axis_bytes(r.c, channels),
                     axis_bytes(r.n, p_.batch)},
                    {row, 1, 1, std::int32_t(of_box), 1},
                    bytes == 128 || bytes == 64 ? bytes : 16,
                    256};
    plan_.result.rounds = false;
  }
};

}  // namespace
}  // namespace upfold::cuda
