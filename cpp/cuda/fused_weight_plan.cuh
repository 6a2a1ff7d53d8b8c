// How the fused gradient of the weight cuts a problem into blocks and steps, of tiles whose threads copy the operands.
#pragma once

#include "fused_weight_boxes_plan.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kStaticBytes = sizeof(FusedWeightShared) + sizeof(FusedWeightBarriers);

// What a step costs, in products of one unit-tile; and such a product, in microseconds (H200).
constexpr double kStepProducts = 0.7, kProductMicroseconds = 0.26;

// The logarithm of the bytes, at most 16, that divide where rows begin.
int grain_of(const Problem& p, std::int64_t alignment, const Strides& s, std::int64_t width) {
  const std::int64_t size = element_bytes(p.dtype);
  return log_of(
      divisor_of(std::min<std::int64_t>(16, alignment), {s.n * size, s.c * size, s.d * size, s.h * size, width * size}));
}

// Of 1 << log threads that copy neighbouring pieces: as few turns as can be, and few threads without a piece.
int lanes_of(std::int64_t pieces, int least, int most) {
  int best = most;
  std::int64_t best_slots = -1;
  for (int log = most; log >= std::max(least, 2); --log) {
    const std::int64_t slots = ceil_div(pieces, std::int64_t(1) << log) << log;
    if (best_slots < 0 || slots < best_slots) best = log, best_slots = slots;
  }
  return best;
}

class CopyPlanner : public WeightPlanner {
 public:
  CopyPlanner(const Problem& p, const FusedWeightTileSize& tile, std::int64_t alignment)
      : WeightPlanner(p, tile, std::int64_t(1) << grain_of(p, alignment, p.y, p.out_w)),
        x_grain_(grain_of(p, alignment, p.x, p.in_w)),
        y_grain_(grain_of(p, alignment, p.y, p.out_w)) {
    const bool pairs = w_.dilation == 1 && w_.stride == 2 && tile_.taps % 2 == 0 && shift_ % 2 == 0;
    reads_ = size_ == 2 ? half_reads() : pairs ? kPairs : kAny;
  }

  // The cut that takes the fewest products and steps, among those of which three stages fit where any does.
  bool cut(const SharedMemory& shared) {
    const std::int64_t planned = kMultiprocessorBytes / tile_.blocks - kReservedBytes - kStaticBytes;
    const std::int64_t all = ceil_div(p_.in_w, vector_);
    double best = -1;
    for (int stages = 3; stages >= 2 && best < 0; --stages) {
      for (std::int64_t vectors = 1; vectors <= std::min<std::int64_t>(all, kStepVectors); ++vectors) {
        const std::int64_t chunks = ceil_div(all, vectors);
        if (ceil_div(all, chunks) != vectors) continue;
        for (std::int64_t rows = 1; rows * vectors <= kStepVectors && (rows == 1 || chunks == 1) && rows <= total_rows();
             ++rows) {
          const WeightCut cut{rows, vectors, chunks};
          if (stages * stage_bytes(cut) > planned) continue;
          const double cost = double(ceil_div(total_rows(), rows) * chunks) * (double(cut.products()) + kStepProducts);
          if (best < 0 || cost < best) best = cost, cut_ = cut;
        }
      }
    }
    if (best < 0) return false;
    pitch_ = pitch(cut_), x_bytes_ = x_bytes(cut_), stage_bytes_ = stage_bytes(cut_);
    const std::int64_t allowed =
        std::min(shared.of_block, shared.of_multiprocessor / tile_.blocks - kReservedBytes) - kStaticBytes;
    stages_ = std::min<std::int64_t>(kWeightMostStages, std::min(allowed, std::max(planned, allowed)) / stage_bytes_);
    if (stages_ < 2) stages_ = (shared.of_block - kStaticBytes) / stage_bytes_ >= 2 ? 2 : 0;
    steps_ = ceil_div(total_rows(), cut_.rows) * cut_.chunks;
    step_microseconds_ = kProductMicroseconds * sums() * (double(cut_.products()) + kStepProducts);
    return stages_ >= 2 && steps_ <= kMostCount;
  }

  FusedWeightPlan plan() const {
    FusedWeightPlan plan = WeightPlanner::plan();
    FusedWeightJob& job = plan.job;
    job.x_grain = x_grain_, job.y_grain = y_grain_;
    job.x_pieces = (2 * job.products) << (kVectorLog - x_grain_);
    job.y_pieces = std::int32_t(ceil_div(columns(cut_.row_vectors * vector_) * size_, std::int64_t(1) << y_grain_));
    job.x_lanes = lanes_of(job.x_pieces, log_of(tile_.copiers) - log_of(tile_.channels), 4);
    job.y_lanes = lanes_of(job.y_pieces, 0, 4);
    return plan;
  }

 private:
  int x_grain_, y_grain_;

  // Bytes between rows: as few as meet in the fewest banks, the words behind a pair of values included.
  std::int64_t pitch(const WeightCut& cut) const {
    const std::int64_t least = least_pitch(cut.row_vectors * vector_, 8 / size_);
    std::int64_t best = least;
    int fewest = 99;
    for (std::int64_t bytes = least; bytes < least + 128; bytes += 16) {
      const int most = conflicts(bytes);
      if (most < fewest) fewest = most, best = bytes;
    }
    return best;
  }
  std::int64_t x_bytes(const WeightCut& cut) const { return 2 * cut.products() * (16 * tile_.channels + 16); }
  std::int64_t stage_bytes(const WeightCut& cut) const { return x_bytes(cut) + planes_ * cut.rows * kPlaneChannels * pitch(cut); }
};

template <typename Planner>
FusedWeightPlan planned(Planner planner, std::int64_t workspace_cap, const SharedMemory& shared) {
  if (!planner.supported() || !planner.cut(shared) || !planner.split(workspace_cap)) return {};
  return planner.plan();
}

}  // namespace

FusedWeightPlan plan_fused_weight(const Problem& p, const FusedWeightTileSize& tile, std::int64_t alignment,
                                  std::int64_t workspace_cap, const SharedMemory& shared) {
  if (tile.boxes) return planned(BoxPlanner(p, tile, alignment), workspace_cap, shared);
  return planned(CopyPlanner(p, tile, alignment), workspace_cap, shared);
}

}  // namespace upfold::cuda
