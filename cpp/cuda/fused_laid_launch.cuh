// The kernels of the gradient of the input by taps that are laid out, for one type, and their launches.
#pragma once

#include "fused_laid_kernel.cuh"

namespace upfold::cuda {

// The tile's index; products of a warpgroup, eighths of the pixels; rows of the kernel, and how these may lie beside the plane.
// Pairs of floats are for whole sets of four warps, which have 32 pixels each.
#define UPFOLD_LAID_TILES(DO, edges, Value, ...) \
  DO(0, Value, 2, 24, __VA_ARGS__, edges)        \
  DO(1, Value, 2, 16, __VA_ARGS__, edges) DO(2, Value, 1, 24, __VA_ARGS__, edges) DO(3, Value, 1, 16, __VA_ARGS__, edges)
#define UPFOLD_LAID_INSIDE_TILES(DO, Value) \
  UPFOLD_LAID_TILES(DO, kLaidInside, Value, 2) UPFOLD_LAID_TILES(DO, kLaidInside, Value, 4)
#define UPFOLD_LAID_HALF_TILES(DO, Value) UPFOLD_LAID_INSIDE_TILES(DO, Value) UPFOLD_LAID_TILES(DO, kLaidPairs, Value, 4)
#define UPFOLD_LAID_FLOAT_PAIRS(DO, Value) DO(1, Value, 2, 16, 4, kLaidPairs) DO(3, Value, 1, 16, 4, kLaidPairs)
#define UPFOLD_LAID_FLOAT_TILES(DO, Value) \
  UPFOLD_LAID_INSIDE_TILES(DO, Value)      \
  UPFOLD_LAID_TILES(DO, kLaidBeside, Value, 4) UPFOLD_LAID_FLOAT_PAIRS(DO, Value)

#define UPFOLD_INSTANTIATE_LAID_KERNEL(index, Value, ...)                   \
  template __global__ void fused_laid_kernel<LaidTile<Value, __VA_ARGS__>>( \
      const __grid_constant__ LaidJob, const __grid_constant__ BoxMap, const __grid_constant__ BoxMap, const Value*, Value*);
#define UPFOLD_INSTANTIATE_LAID(Value, tiles) tiles(UPFOLD_INSTANTIATE_LAID_KERNEL, Value)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_laid_plan.h"

namespace upfold::cuda {

template <typename Value>
void run_laid(const Launch& launch, const LaidPlan& plan, int config, const FusedOperands& operands) {
  const LaidJob& job = plan.job;
  const BoxMap w = describe_boxes(plan.w, operands.w);
  const BoxMap planes = job.box_bytes > 0 ? describe_boxes(plan.planes, operands.y) : BoxMap{};
  const auto y = static_cast<const Value*>(operands.y);
  const auto x = static_cast<Value*>(const_cast<void*>(operands.x));
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, launch.device), "cudaDeviceGetAttribute");
  const unsigned splits = job.splits.value;
  const unsigned blocks = splits > 1 || job.tiles < unsigned(multiprocessors) ? job.tiles : unsigned(multiprocessors);
#define UPFOLD_RUN(index, type, kM, kN8, kKernel, kEdges)                              \
  if (config == index && plan.kernel == kKernel && plan.edges == kEdges) {             \
    using Tile = LaidTile<Value, kM, kN8, kKernel, kEdges>;                            \
    const Grid grid{blocks, Tile::kThreads, plan.shared_bytes, true, splits};          \
    launch_grid("fused", fused_laid_kernel<Tile>, launch, grid, job, w, planes, y, x); \
  }
  if constexpr (sizeof(Value) == 2) {
    UPFOLD_LAID_HALF_TILES(UPFOLD_RUN, Value)
  } else {
    UPFOLD_LAID_FLOAT_TILES(UPFOLD_RUN, Value)
  }
#undef UPFOLD_RUN
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_laid_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_laid_kernel<LaidTile<Value, 2, 24, 2, kLaidInside>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
