// The tiles of the fused method whose rows are pairs of a channel and a phase, and their launches.
#pragma once

#include "fused_phases_kernel.cuh"

// kWarpsM, kWarpsN, kWarpsK, kM16, kN8, kBlocks.
#define UPFOLD_PHASE_TILES(DO, Value, kExact, kLast) \
  DO(0, Value, kExact, kLast, 1, 8, 1, 1, 4, 2)      \
  DO(1, Value, kExact, kLast, 1, 2, 4, 1, 4, 2)      \
  DO(2, Value, kExact, kLast, 1, 4, 1, 3, 4, 4)      \
  DO(3, Value, kExact, kLast, 1, 4, 1, 4, 4, 4)      \
  DO(4, Value, kExact, kLast, 2, 4, 1, 4, 4, 2)      \
  DO(5, Value, kExact, kLast, 1, 8, 1, 3, 4, 2)

#define UPFOLD_INSTANTIATE_PHASES(index, Value, kExact, ...)                           \
  template __global__ void fused_phases_kernel<Value, kExact, PhaseTile<__VA_ARGS__>>( \
      const __grid_constant__ PhaseJob, const Value*, const Value*, const Value*, Value*);
// In namespace upfold::cuda, once for contiguous and once for channels-last operands.
#define UPFOLD_INSTANTIATE_ALL_PHASES(kLast)                          \
  UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE_PHASES, float, false, kLast)  \
  UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE_PHASES, float, true, kLast)   \
  UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE_PHASES, __half, false, kLast) \
  UPFOLD_PHASE_TILES(UPFOLD_INSTANTIATE_PHASES, __nv_bfloat16, false, kLast)

#ifndef __CUDACC_RTC__
#include "fused_phases.h"
#include "launch.cuh"

namespace upfold::cuda {

struct PhasePlan {
  PhaseJob job;
  unsigned blocks;  // 0: the tile does not fit
  int shared_bytes;
  std::int64_t tiles;  // row tiles with products times boxes
  double cost;         // what the planner expects, to compare plans of one tile
};

template <typename Value, bool kExact, bool kLast>
void run_phase_tile(const Launch& launch, const PhasePlan& plan, const FusedOperands& operands, int config) {
  const auto x = static_cast<const Value*>(operands.x), w = static_cast<const Value*>(operands.w);
  const auto bias = static_cast<const Value*>(operands.bias);
  const auto y = static_cast<Value*>(operands.y);
#define UPFOLD_RUN(index, Value, kExact, ...)                                                                                  \
  if (config == index)                                                                                                         \
    return launch_grid("fused", fused_phases_kernel<Value, kExact, PhaseTile<__VA_ARGS__>>, launch,                            \
                       Grid{plan.blocks, unsigned(PhaseTile<__VA_ARGS__>::kThreads), plan.shared_bytes, true}, plan.job, x, w, \
                       bias, y);
  UPFOLD_PHASE_TILES(UPFOLD_RUN, Value, kExact, kLast)
#undef UPFOLD_RUN
}

// For each kLast in the source that compiles its kernels.
template <bool kLast>
void run_phases(const Launch& launch, Dtype dtype, const PhasePlan& plan, bool exact, const FusedOperands& operands, int config) {
  if (dtype == Dtype::kFloat16) return run_phase_tile<__half, false, kLast>(launch, plan, operands, config);
  if (dtype == Dtype::kBFloat16) return run_phase_tile<__nv_bfloat16, false, kLast>(launch, plan, operands, config);
  if (exact) return run_phase_tile<float, true, kLast>(launch, plan, operands, config);
  run_phase_tile<float, false, kLast>(launch, plan, operands, config);
}

}  // namespace upfold::cuda
#endif
