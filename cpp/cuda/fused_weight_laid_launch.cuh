// The kernels of the gradient of the weight by taps that are laid out, for one type, and their launches.
#pragma once

#include "fused_weight_laid_kernel.cuh"

namespace upfold::cuda {

// The tile's index; products of a warpgroup, eighths of the columns; rows of the kernel, whether pixels are paired.
#define UPFOLD_WEIGHT_LAID_TILES_OF(DO, index, Value, ...) \
  DO(index, Value, __VA_ARGS__, 2, false) DO(index, Value, __VA_ARGS__, 4, false) DO(index, Value, __VA_ARGS__, 4, true)
#define UPFOLD_WEIGHT_LAID_TILES(DO, Value)        \
  UPFOLD_WEIGHT_LAID_TILES_OF(DO, 0, Value, 2, 24) \
  UPFOLD_WEIGHT_LAID_TILES_OF(DO, 1, Value, 2, 16) \
  UPFOLD_WEIGHT_LAID_TILES_OF(DO, 2, Value, 1, 24) \
  UPFOLD_WEIGHT_LAID_TILES_OF(DO, 3, Value, 1, 16)

#define UPFOLD_INSTANTIATE_WEIGHT_LAID_KERNEL(index, Value, ...)                                                             \
  template __global__ void fused_weight_laid_kernel<WeightLaidTile<Value, __VA_ARGS__>>(                                     \
      const __grid_constant__ WeightLaidJob, const __grid_constant__ BoxMap, const __grid_constant__ BoxMap, Value*, float*, \
      float*);
#define UPFOLD_INSTANTIATE_WEIGHT_LAID(Value)                                                                             \
  UPFOLD_WEIGHT_LAID_TILES(UPFOLD_INSTANTIATE_WEIGHT_LAID_KERNEL, Value)                                                  \
  template __global__ void weight_laid_pack_kernel<Value, false>(const __grid_constant__ WeightLaidPackJob, const Value*, \
                                                                 uint4*);                                                 \
  template __global__ void weight_laid_pack_kernel<Value, true>(const __grid_constant__ WeightLaidPackJob, const Value*,  \
                                                                uint4*);                                                  \
  template __global__ void weight_laid_sum_kernel<Value>(const __grid_constant__ WeightLaidSumJob, const float4*, Value*, \
                                                         const float*, Value*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_weight_laid_plan.h"

namespace upfold::cuda {

template <typename Value>
void run_weight_laid(const Launch& launch, const WeightLaidPlan& plan, int config, const FusedOperands& operands) {
  constexpr unsigned kThreads = kWeightPackThreads;
  const WeightLaidJob& job = plan.job;
  const void* x = operands.x;
  const auto w = static_cast<Value*>(const_cast<void*>(operands.w)), bias = static_cast<Value*>(const_cast<void*>(operands.bias));
  const auto space = static_cast<unsigned char*>(operands.workspace);
  float* const partial = plan.clusters > 1 ? reinterpret_cast<float*>(space) : nullptr;
  float* const row_sums = bias != nullptr ? reinterpret_cast<float*>(space + plan.partial_bytes) : nullptr;
  const std::int64_t packed_at = plan.partial_bytes + plan.row_sums_bytes;
  if (plan.pack.vectors > 0) {
    const auto kernel = plan.packs_fours ? weight_laid_pack_kernel<Value, true> : weight_laid_pack_kernel<Value, false>;
    const unsigned of_block = kThreads * (plan.packs_fours ? kLaidPackVectors : 1);
    launch_in_turn("fused", kernel, launch, (plan.pack.vectors + of_block - 1) / of_block, kThreads, plan.pack,
                   static_cast<const Value*>(x), reinterpret_cast<uint4*>(space + packed_at));
    x = space + packed_at;
  } else {
    x = packed_operand<Value>(launch, plan.pad, x, space, packed_at);
  }
  const BoxMap x_map = describe_boxes(plan.x, x), y_map = describe_boxes(plan.y, operands.y);
  const unsigned splits = job.splits.value, blocks = unsigned(plan.tiles * plan.clusters) * splits;
#define UPFOLD_RUN(index, type, kM, kN8, kKernel, kPaired)                                                       \
  if (config == index && plan.kernel == kKernel && plan.paired == kPaired) {                                     \
    using Tile = WeightLaidTile<Value, kM, kN8, kKernel, kPaired>;                                               \
    const Grid grid{blocks, Tile::kThreads, plan.shared_bytes, true, splits};                                    \
    launch_grid("fused", fused_weight_laid_kernel<Tile>, launch, grid, job, x_map, y_map, w, partial, row_sums); \
  }
  UPFOLD_WEIGHT_LAID_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
  const unsigned sum_blocks = (plan.sum.fours + kThreads - 1) / kThreads;
  const unsigned bias_blocks = bias == nullptr ? 0 : unsigned((job.channels + kLaidSumChannels - 1) / kLaidSumChannels);
  if (sum_blocks + bias_blocks > 0)
    launch_in_turn("fused", weight_laid_sum_kernel<Value>, launch, sum_blocks + bias_blocks, kThreads, plan.sum,
                   reinterpret_cast<const float4*>(partial), w, row_sums, bias);
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_weight_laid_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_weight_laid_kernel<WeightLaidTile<Value, 2, 24, 2, false>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
