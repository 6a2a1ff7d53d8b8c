// The kernels of the fused gradient of the weight for one type, and their launches.
#pragma once

#include "fused_weight_boxes.cuh"
#include "fused_weight_pack.cuh"
#include "fused_weight_sum.cuh"

namespace upfold::cuda {

// Ways of reading that a tile is made for, by type: floats, halves; kPairs where its taps are even, of 16-bit values 2.
#define UPFOLD_WEIGHT_FLOAT_READS(DO, index, Value, kTaps, ...) \
  DO(index, kAny, Value, kTaps, __VA_ARGS__)                    \
  UPFOLD_WEIGHT_PAIRS_##kTaps(DO, index, Value, __VA_ARGS__)
#define UPFOLD_WEIGHT_HALF_READS(DO, index, Value, kTaps, ...)                                                      \
  DO(index, kAny, Value, kTaps, __VA_ARGS__)                                                                        \
  UPFOLD_WEIGHT_HALF_PAIRS_##kTaps(DO, index, Value, __VA_ARGS__) DO(index, kUnitStride, Value, kTaps, __VA_ARGS__) \
      DO(index, kShiftedPairs, Value, kTaps, __VA_ARGS__) DO(index, kWords, Value, kTaps, __VA_ARGS__)
#define UPFOLD_WEIGHT_PAIRS_2(DO, index, Value, ...) DO(index, kPairs, Value, 2, __VA_ARGS__)
#define UPFOLD_WEIGHT_PAIRS_3(DO, index, Value, ...)
#define UPFOLD_WEIGHT_PAIRS_4(DO, index, Value, ...) DO(index, kPairs, Value, 4, __VA_ARGS__)
#define UPFOLD_WEIGHT_HALF_PAIRS_2(DO, index, Value, ...) DO(index, kPairs, Value, 2, __VA_ARGS__)
#define UPFOLD_WEIGHT_HALF_PAIRS_3(DO, index, Value, ...)
#define UPFOLD_WEIGHT_HALF_PAIRS_4(DO, index, Value, ...)

// A tile's index, its kTaps, kChannels, kWarpgroups, kCopyGroups, kBlocks.
#define UPFOLD_FIRST_WEIGHT_TILE 2, 128, 2, 2, 1
#define UPFOLD_WEIGHT_TILES(DO, reads, Value)                                                                  \
  reads(DO, 0, Value, 2, 128, 2, 2, 1) reads(DO, 1, Value, 2, 64, 1, 1, 3) reads(DO, 2, Value, 3, 64, 2, 2, 1) \
      reads(DO, 3, Value, 4, 64, 2, 2, 1) reads(DO, 4, Value, 3, 32, 1, 1, 3)
#define UPFOLD_WEIGHT_NO_READS(DO, index, Value, ...) DO(index, kAny, Value, __VA_ARGS__)

#define UPFOLD_INSTANTIATE_WEIGHT_KERNEL(index, kReads, Value, ...)                          \
  template __global__ void fused_weight_kernel<Value, FusedWeightTile<__VA_ARGS__>, kReads>( \
      const __grid_constant__ FusedWeightJob, const Value*, const Value*, float*);
#define UPFOLD_INSTANTIATE_WEIGHT(Value, reads)                                                                            \
  UPFOLD_WEIGHT_TILES(UPFOLD_INSTANTIATE_WEIGHT_KERNEL, reads, Value)                                                      \
  template __global__ void fused_weight_sum_kernel<Value>(const __grid_constant__ FusedWeightSumJob, const float*, Value*, \
                                                          const float*, Value*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "boxes.h"
#include "fused_weight.h"
#include "launch.cuh"
#include "to_planes.h"

namespace upfold::cuda {

struct FusedWeightPlan {
  bool possible;  // false: nothing else holds
  FusedWeightJob job;
  FusedWeightReads reads;
  FusedWeightSumJob sum;
  unsigned blocks, threads, sum_blocks;
  std::int64_t parts, partial_bytes, workspace_bytes;
  bool sums;                 // whether calls that name a bias get its gradient too, from sums of y's rows in the workspace
  std::int64_t row_sums_at;  // bytes
  // Of tiles whose operands the copy engine brings; they may have to be packed behind the partial sums first, x and then y.
  FusedWeightBoxes boxes;
  bool cuts;                   // whether columns behind a row of y are left out
  unsigned sharers;            // blocks of a cluster that share y, neighbouring tiles of input channels: one or two
  std::int64_t engine_cycles;  // of a step of a block, as planned
  BoxTensor x, y;
  FusedWeightPackJob x_pack, y_pack;
  // Of operands whose channels are innermost: they are copied as planes first, x and then y, ahead of all else in the workspace.
  Pixels x_pixels, y_pixels;
  std::int64_t planes_bytes;
};

// Everything but the sum of the parts; compiled in sources of its own (fused_weight_boxes_launch.cuh).
template <typename Value>
void run_fused_weight_boxes(const Launch& launch, const FusedWeightPlan& plan, int config, const FusedOperands& operands);
extern template void run_fused_weight_boxes<float>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);
extern template void run_fused_weight_boxes<__half>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);
extern template void run_fused_weight_boxes<__nv_bfloat16>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);

template <typename Value>
void run_fused_weight(const Launch& launch, const FusedWeightPlan& plan, int config, const FusedOperands& operands) {
  const auto x = static_cast<const Value*>(operands.x), y = static_cast<const Value*>(operands.y);
  const auto partial = static_cast<float*>(operands.workspace);
  const int bytes = plan.job.stages * plan.job.stage_bytes;
#define UPFOLD_RUN(index, kReads, type, ...)                                                       \
  if (config == index && plan.reads == kReads)                                                     \
    launch_grid("fused", fused_weight_kernel<Value, FusedWeightTile<__VA_ARGS__>, kReads>, launch, \
                Grid{plan.blocks, plan.threads, bytes, true}, plan.job, x, y, partial);
  if constexpr (sizeof(Value) == 2) {
    UPFOLD_WEIGHT_TILES(UPFOLD_RUN, UPFOLD_WEIGHT_HALF_READS, Value)
  } else {
    UPFOLD_WEIGHT_TILES(UPFOLD_RUN, UPFOLD_WEIGHT_FLOAT_READS, Value)
  }
#undef UPFOLD_RUN
  if (plan.boxes.width > 0) run_fused_weight_boxes<Value>(launch, plan, config, operands);
  const unsigned bias_blocks = operands.bias != nullptr ? plan.sum.channel_planes.value * plan.job.groups.value : 0;
  launch_in_turn("fused", fused_weight_sum_kernel<Value>, launch, plan.sum_blocks + bias_blocks, kSumThreads, plan.sum, partial,
                 static_cast<Value*>(const_cast<void*>(operands.w)), partial + plan.row_sums_at / std::int64_t(sizeof(float)),
                 static_cast<Value*>(const_cast<void*>(operands.bias)));
}

}  // namespace upfold::cuda
#endif
