// The kernels of the fused gradients of groups, for one type, and their launches.
#pragma once

#include "fused_groups_input.cuh"
#include "fused_groups_weight.cuh"

namespace upfold::cuda {

#define UPFOLD_INSTANTIATE_GROUPS_INPUT(Value, ...)                                                                     \
  template __global__ void fused_groups_input_kernel<GroupsTile<Value, __VA_ARGS__>>(const __grid_constant__ GroupsJob, \
                                                                                     const Value*, const Value*, Value*);
#define UPFOLD_INSTANTIATE_GROUPS_WEIGHT(Value, ...)                                                                        \
  template __global__ void fused_groups_weight_kernel<GroupsTile<Value, __VA_ARGS__>>(const __grid_constant__ GroupsJob,    \
                                                                                      const Value*, const Value*, float4*); \
  template __global__ void fused_groups_sum_kernel<GroupsTile<Value, __VA_ARGS__>>(const __grid_constant__ GroupsJob,       \
                                                                                   const float4*, Value*);
#define UPFOLD_INSTANTIATE_GROUPS(Value)        \
  UPFOLD_INSTANTIATE_GROUPS_INPUT(Value, 1, 1)  \
  UPFOLD_INSTANTIATE_GROUPS_INPUT(Value, 2, 1)  \
  UPFOLD_INSTANTIATE_GROUPS_INPUT(Value, 4, 2)  \
  UPFOLD_INSTANTIATE_GROUPS_WEIGHT(Value, 1, 1) \
  UPFOLD_INSTANTIATE_GROUPS_WEIGHT(Value, 2, 1) UPFOLD_INSTANTIATE_GROUPS_WEIGHT(Value, 4, 2)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_groups_plan.h"

namespace upfold::cuda {

template <typename Tile>
void run_groups_input(const Launch& launch, const GroupsPlan& plan, const GroupsJob& job, const FusedOperands& operands) {
  using Value = typename Tile::Value;
  launch_grid("fused", fused_groups_input_kernel<Tile>, launch, Grid{plan.blocks, kGroupsThreads, plan.shared_bytes, true}, job,
              static_cast<const Value*>(operands.y), static_cast<const Value*>(operands.w),
              static_cast<Value*>(const_cast<void*>(operands.x)));
}

template <typename Tile>
void run_groups_weight(const Launch& launch, const GroupsPlan& plan, const GroupsJob& job, const FusedOperands& operands) {
  using Value = typename Tile::Value;
  const auto partial = static_cast<float4*>(operands.workspace);
  launch_grid("fused", fused_groups_weight_kernel<Tile>, launch, Grid{plan.blocks, kGroupsThreads, plan.shared_bytes, true}, job,
              static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.y), partial);
  launch_in_turn("fused", fused_groups_sum_kernel<Tile>, launch, plan.sum_blocks, 32 * kSumWarps, job, partial,
                 static_cast<Value*>(const_cast<void*>(operands.w)));
}

template <typename Value>
void run_groups(const Launch& launch, const GroupsPlan& plan, bool of_weight, const FusedOperands& operands) {
  GroupsJob job = plan.job;
  job.pairs = job.pairs && reinterpret_cast<std::uintptr_t>(operands.x) % (2 * sizeof(Value)) == 0;
  if (of_weight) {
    if (plan.tile.blocks == 1) return run_groups_weight<GroupsTile<Value, 1, 1>>(launch, plan, job, operands);
    if (plan.tile.blocks == 2) return run_groups_weight<GroupsTile<Value, 2, 1>>(launch, plan, job, operands);
    return run_groups_weight<GroupsTile<Value, 4, 2>>(launch, plan, job, operands);
  }
  if (plan.tile.blocks == 1) return run_groups_input<GroupsTile<Value, 1, 1>>(launch, plan, job, operands);
  if (plan.tile.blocks == 2) return run_groups_input<GroupsTile<Value, 2, 1>>(launch, plan, job, operands);
  run_groups_input<GroupsTile<Value, 4, 2>>(launch, plan, job, operands);
}

}  // namespace upfold::cuda
#endif
