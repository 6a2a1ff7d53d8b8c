// The fused method with pairs of a channel and a phase as rows: its tiles and launches.
#include "fused_phases_kernel.cuh"

namespace upfold::cuda {

// kWarpsM, kWarpsN, kWarpsK, kM16, kN8, kBlocks.
#define UPFOLD_PHASE_TILES(DO, Value, kExact) \
  DO(0, Value, kExact, 1, 8, 1, 1, 4, 2)      \
  DO(1, Value, kExact, 1, 2, 4, 1, 4, 2)      \
  DO(2, Value, kExact, 1, 4, 1, 3, 4, 4)      \
  DO(3, Value, kExact, 1, 4, 1, 4, 4, 4)      \
  DO(4, Value, kExact, 2, 4, 1, 4, 4, 2)

#define UPFOLD_INSTANTIATE(index, Value, kExact, ...)                                  \
  template __global__ void fused_phases_kernel<Value, kExact, PhaseTile<__VA_ARGS__>>( \
      const __grid_constant__ PhaseJob, const Value*, const Value*, const Value*, Value*);
UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE, float, false)
UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE, float, true)
UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE, __half, false)
UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE, __nv_bfloat16, false)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_phases_plan.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Tile>
constexpr PhaseTileSize size_of() {
  return {Tile::kRows, Tile::kUnits, Tile::kBlocks, Tile::kThreads};
}
constexpr PhaseTileSize kTiles[] = {
#define UPFOLD_TILE(index, Value, kExact, ...) size_of<PhaseTile<__VA_ARGS__>>(),
    UPFOLD_PHASE_TILES(UPFOLD_TILE, , )
#undef UPFOLD_TILE
};
// Beside x, weights and results.
constexpr std::int64_t kTableBytes[] = {
#define UPFOLD_TILE(index, Value, kExact, ...) \
  sizeof(PhaseTables<PhaseTile<__VA_ARGS__>>) + PhaseTile<__VA_ARGS__>::kReduced * sizeof(float4),
    UPFOLD_PHASE_TILES(UPFOLD_TILE, , )
#undef UPFOLD_TILE
};
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

template <typename Value, bool kExact>
void run(const Launch& launch, const PhasePlan& plan, const FusedOperands& operands, int config) {
  const auto x = static_cast<const Value*>(operands.x), w = static_cast<const Value*>(operands.w);
  const auto bias = static_cast<const Value*>(operands.bias);
  const auto y = static_cast<Value*>(operands.y);
#define UPFOLD_RUN(index, Value, kExact, ...)                                                       \
  if (config == index)                                                                              \
    return launch_grid("fused", fused_phases_kernel<Value, kExact, PhaseTile<__VA_ARGS__>>, launch, \
                       Grid{plan.blocks, unsigned(kTiles[index].threads), plan.shared_bytes}, plan.job, x, w, bias, y);
  UPFOLD_PHASE_TILES(UPFOLD_RUN, Value, kExact)
#undef UPFOLD_RUN
}

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
  if (p.dtype == Dtype::kFloat16) return run<__half, false>(launch, plan, operands, config);
  if (p.dtype == Dtype::kBFloat16) return run<__nv_bfloat16, false>(launch, plan, operands, config);
  exact ? run<float, true>(launch, plan, operands, config) : run<float, false>(launch, plan, operands, config);
}

}  // namespace upfold::cuda
#endif
