// The kernels of the fused method for heads, for one type, and their launches.
#pragma once

#include "fused_heads_kernel.cuh"

namespace upfold::cuda {

// Blocks of eight pixels, whether the padding of the width is odd.
#define UPFOLD_HEADS_NARROW(DO, Value) DO(Value, 4, false) DO(Value, 4, true)
#define UPFOLD_HEADS_WIDE(DO, Value) DO(Value, 8, false) DO(Value, 8, true)

#define UPFOLD_INSTANTIATE_HEADS_KERNEL(Value, ...)                           \
  template __global__ void fused_heads_kernel<HeadsTile<Value, __VA_ARGS__>>( \
      const __grid_constant__ HeadsJob, const __grid_constant__ BoxMap, const Value*, const Value*, Value*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_heads_plan.h"

namespace upfold::cuda {

template <typename Tile>
void run_heads_tile(const Launch& launch, const HeadsPlan& plan, const FusedOperands& operands) {
  using Value = typename Tile::Value;
  const BoxMap x = describe_boxes(plan.x, operands.x);
  HeadsJob job = plan.job;
  job.wide = job.wide && reinterpret_cast<std::uintptr_t>(operands.y) % (4 * sizeof(Value)) == 0;
  job.taps_together = job.taps_together && reinterpret_cast<std::uintptr_t>(operands.w) % (4 * sizeof(Value)) == 0;
  launch_grid("fused", fused_heads_kernel<Tile>, launch,
              Grid{unsigned(plan.blocks), unsigned(32 * plan.warps), plan.shared_bytes, true}, job, x,
              static_cast<const Value*>(operands.w), static_cast<const Value*>(operands.bias), static_cast<Value*>(operands.y));
}

template <typename Value>
void run_heads(const Launch& launch, const HeadsPlan& plan, int blocks, const FusedOperands& operands) {
#define UPFOLD_RUN(type, kBlocks, kOdd) \
  if (blocks == kBlocks && plan.odd == kOdd) return run_heads_tile<HeadsTile<Value, kBlocks, kOdd>>(launch, plan, operands);
  UPFOLD_HEADS_NARROW(UPFOLD_RUN, Value)
  if constexpr (sizeof(Value) == 2) {
    UPFOLD_HEADS_WIDE(UPFOLD_RUN, Value)
  }
#undef UPFOLD_RUN
}

// Whether the kernels were compiled with the instructions that they need: elsewhere they are empty.
template <typename Value>
bool has_heads_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_heads_kernel<HeadsTile<Value, 4, false>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
