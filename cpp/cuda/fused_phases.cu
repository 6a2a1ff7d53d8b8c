// The fused method with pairs of an output channel and a phase as rows: its plans, and its kernels for contiguous operands.
#include "fused_phases_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_ALL_PHASES(false)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_phases_plan.h"

namespace upfold::cuda {

extern template void run_phases<true>(const Launch&, Dtype, const PhasePlan&, bool, const FusedOperands&, int);

namespace {

template <typename Tile>
constexpr PhaseTileSize size_of() {
  return {Tile::kRows, Tile::kUnits, Tile::kBlocks, Tile::kThreads};
}
constexpr PhaseTileSize kTiles[] = {
#define UPFOLD_TILE(index, Value, kExact, ...) size_of<PhaseTile<__VA_ARGS__>>(),
    UPFOLD_PHASE_TILES(UPFOLD_TILE, , , false)
#undef UPFOLD_TILE
};
// Beside x, weights and results.
constexpr std::int64_t kTableBytes[] = {
#define UPFOLD_TILE(index, Value, kExact, ...) \
  sizeof(PhaseTables<PhaseTile<__VA_ARGS__>>) + PhaseTile<__VA_ARGS__>::kReduced * sizeof(float4),
    UPFOLD_PHASE_TILES(UPFOLD_TILE, , , false)
#undef UPFOLD_TILE
};
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

}  // namespace

std::vector<PhaseTileSize> phase_tiles() { return {kTiles, kTiles + kTileCount}; }

std::shared_ptr<const PhasePlan> plan_phases(int device, const Problem& p, int config, std::int64_t alignment, bool exact) {
  if (config < 0 || config >= kTileCount) return nullptr;
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const auto plan_with = [&](bool three_products, bool split) {
    PhasePlanner planner(p, kTiles[config], kTableBytes[config], alignment, three_products, split);
    return planner.plan(shared_memory(device), count);
  };
  const bool three_products = exact && p.dtype == Dtype::kFloat32;
  PhasePlan plan = plan_with(three_products, true);
  if (three_products) {
    const PhasePlan other = plan_with(true, false);
    if (other.blocks > 0 && (plan.blocks == 0 || other.cost < plan.cost)) plan = other;
  }
  return plan.blocks > 0 ? std::make_shared<const PhasePlan>(plan) : nullptr;
}

FusedWork phase_work(const PhasePlan& plan) {
  return {plan.tiles, plan.job.chunks * plan.job.steps * plan.job.slices.value, plan.job.chunks * plan.job.copy_count,
          plan.blocks};
}

void fused_phases(const Launch& launch, const Problem& p, const PhasePlan& plan, bool exact, const FusedOperands& operands,
                  int config) {
  if (plan.job.dense || plan.job.pixels) return run_phases<true>(launch, p.dtype, plan, exact, operands, config);
  run_phases<false>(launch, p.dtype, plan, exact, operands, config);
}

}  // namespace upfold::cuda
#endif
