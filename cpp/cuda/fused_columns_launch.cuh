// The kernels of the fused method whose columns stay in shared memory, for one type, and their launches.
#pragma once

#include "fused_columns_kernel.cuh"

namespace upfold::cuda {

// Whether channels are innermost, groups of 8 columns, warpgroups.
#define UPFOLD_COLUMNS_SIZES(DO, Value, kLast) \
  DO(Value, kLast, 2, 1)                       \
  DO(Value, kLast, 4, 1)                       \
  DO(Value, kLast, 6, 1)                       \
  DO(Value, kLast, 8, 1)                       \
  DO(Value, kLast, 16, 1) DO(Value, kLast, 2, 2) DO(Value, kLast, 4, 2) DO(Value, kLast, 6, 2)
#define UPFOLD_COLUMNS_TILES(DO, Value) UPFOLD_COLUMNS_SIZES(DO, Value, false) UPFOLD_COLUMNS_SIZES(DO, Value, true)

#define UPFOLD_INSTANTIATE_COLUMNS_KERNEL(Value, ...)                             \
  template __global__ void fused_columns_kernel<ColumnsTile<Value, __VA_ARGS__>>( \
      const __grid_constant__ ColumnsJob, const __grid_constant__ BoxMap, const Value*, const Value*, Value*);
#define UPFOLD_INSTANTIATE_COLUMNS(Value) UPFOLD_COLUMNS_TILES(UPFOLD_INSTANTIATE_COLUMNS_KERNEL, Value)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_columns_plan.h"

namespace upfold::cuda {

template <typename Value>
void run_columns(const Launch& launch, const ColumnsPlan& plan, int warpgroups, const FusedOperands& operands) {
  const BoxMap x = describe_boxes(plan.x, operands.x);
  ColumnsJob job = plan.job;
  job.paired = job.paired && reinterpret_cast<std::uintptr_t>(operands.y) % (2 * sizeof(Value)) == 0;
  if (reinterpret_cast<std::uintptr_t>(operands.w) % 16 != 0) job.raw_bytes = 0;
  const auto w = static_cast<const Value*>(operands.w), bias = static_cast<const Value*>(operands.bias);
  const auto y = static_cast<Value*>(operands.y);
#define UPFOLD_RUN(type, kLast, kN8, kWarpgroups)                                                                      \
  if (plan.last == kLast && plan.n8 == kN8 && warpgroups == kWarpgroups) {                                             \
    using Tile = ColumnsTile<Value, kLast, kN8, kWarpgroups>;                                                          \
    return launch_grid("fused", fused_columns_kernel<Tile>, launch,                                                    \
                       Grid{unsigned(plan.work.blocks), Tile::kThreads, plan.shared_bytes, true}, job, x, w, bias, y); \
  }
  UPFOLD_COLUMNS_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_columns_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_columns_kernel<ColumnsTile<Value, false, 2, 1>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
