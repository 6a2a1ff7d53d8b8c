// The kernels of the fused method whose rows are units and whose columns are channels and phases, for one type, and their
// launches.
#pragma once

#include "fused_units_kernel.cuh"

namespace upfold::cuda {

// A tile's index, its groups of eight columns.
#define UPFOLD_UNITS_TILES(DO, Value) DO(0, Value, 8)

#define UPFOLD_INSTANTIATE_UNITS_KERNEL(index, Value, kN8)                                                           \
  template __global__ void fused_units_kernel<UnitsTile<Value, kN8>>(const __grid_constant__ UnitsJob, const Value*, \
                                                                     const Value*, const Value*, Value*);
#define UPFOLD_INSTANTIATE_UNITS(Value) UPFOLD_UNITS_TILES(UPFOLD_INSTANTIATE_UNITS_KERNEL, Value)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_units_plan.h"

namespace upfold::cuda {

template <typename Value>
void run_units(const Launch& launch, const UnitsPlan& plan, int config, const FusedOperands& operands) {
  UnitsJob job = plan.job;
  while (reinterpret_cast<std::uintptr_t>(operands.y) % (std::size_t(job.together) * sizeof(Value)) != 0) job.together /= 2;
  const auto x = static_cast<const Value*>(operands.x), w = static_cast<const Value*>(operands.w);
  job.rows_of_weights = job.rows_of_weights && reinterpret_cast<std::uintptr_t>(w) % 16 == 0;
  if (reinterpret_cast<std::uintptr_t>(x) % (2 * sizeof(Value)) != 0) job.row_pairs = {};
  const auto bias = static_cast<const Value*>(operands.bias);
  const Grid grid{unsigned(plan.work.blocks), unsigned(kUnitThreads), plan.shared_bytes, true};
#define UPFOLD_RUN(index, type, kN8)                                                               \
  if (config == index)                                                                             \
    launch_grid("fused", fused_units_kernel<UnitsTile<Value, kN8>>, launch, grid, job, x, w, bias, \
                static_cast<Value*>(operands.y));
  UPFOLD_UNITS_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_units_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_units_kernel<UnitsTile<Value, 8>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
