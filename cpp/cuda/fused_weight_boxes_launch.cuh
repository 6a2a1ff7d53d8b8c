// The kernels of the fused gradient of the weight whose operands the copy engine brings, for one type, and their launches.
#pragma once

#include "fused_weight_boxes.cuh"
#include "fused_weight_launch.cuh"
#include "fused_weight_pack_launch.cuh"

namespace upfold::cuda {

// Ways of reading halves, those of tiles whose threads copy, and four taps at a time where a tile has two.
#define UPFOLD_WEIGHT_BOX_HALF_READS(DO, index, Value, kTaps, ...) \
  UPFOLD_WEIGHT_HALF_READS(DO, index, Value, kTaps, __VA_ARGS__) UPFOLD_WEIGHT_FOURS_##kTaps(DO, index, Value, __VA_ARGS__)
#define UPFOLD_WEIGHT_FOURS_2(DO, index, Value, ...) DO(index, kFours, Value, 2, __VA_ARGS__)
#define UPFOLD_WEIGHT_FOURS_3(DO, index, Value, ...)
#define UPFOLD_WEIGHT_FOURS_4(DO, index, Value, ...)
// A tile's index, its kTaps, kChannels, kWarpgroups, kBlocks.
#define UPFOLD_WEIGHT_BOX_TILES(DO, reads, Value)                                                     \
  reads(DO, 5, Value, 2, 128, 2, 1) reads(DO, 6, Value, 2, 64, 1, 3) reads(DO, 7, Value, 3, 64, 2, 1) \
      reads(DO, 8, Value, 4, 64, 2, 1) reads(DO, 9, Value, 3, 32, 1, 3)

#define UPFOLD_INSTANTIATE_WEIGHT_BOXES_KERNEL(kReads, kSums, Value, ...)                                               \
  template __global__ void fused_weight_box_kernel<Value, __VA_ARGS__, kReads, kSums>(                                  \
      const __grid_constant__ FusedWeightJob, const __grid_constant__ FusedWeightBoxes, const __grid_constant__ BoxMap, \
      const __grid_constant__ BoxMap, float*, float*);
// Tiles of 128 channels can share y, cut rows and add parts up too (kWeightIsWide).
#define UPFOLD_INSTANTIATE_WEIGHT_BOXES_OF(kReads, kSums, Value, kTaps, kChannels, ...)                           \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_KERNEL(kReads, kSums, Value, FusedWeightBoxTile<kTaps, kChannels, __VA_ARGS__>) \
  UPFOLD_WEIGHT_WIDE_##kChannels(kReads, kSums, Value, FusedWeightBoxTile<kTaps, kChannels, __VA_ARGS__>)
#define UPFOLD_WEIGHT_WIDE_128(kReads, kSums, Value, ...)                                                          \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_KERNEL(kReads, kSums, Value, FusedWeightSharing<__VA_ARGS__>)                    \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_KERNEL(kReads, kSums, Value, FusedWeightCutting<__VA_ARGS__>)                    \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_KERNEL(kReads, kSums, Value, FusedWeightAdding<__VA_ARGS__>)                     \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_KERNEL(kReads, kSums, Value, FusedWeightAdding<FusedWeightCutting<__VA_ARGS__>>) \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_KERNEL(kReads, kSums, Value, FusedWeightSharing<FusedWeightCutting<__VA_ARGS__>>)
#define UPFOLD_WEIGHT_WIDE_64(kReads, kSums, Value, ...)
#define UPFOLD_WEIGHT_WIDE_32(kReads, kSums, Value, ...)
#define UPFOLD_INSTANTIATE_WEIGHT_BOX_KERNEL(index, kReads, Value, ...) \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_OF(kReads, false, Value, __VA_ARGS__)
// Those that sum the channels of y as well: of 16-bit values, with strides of two and multiples of four.
#define UPFOLD_WEIGHT_SUM_TILES(DO, Value) \
  DO(5, kPairs, Value, 2, 128, 2, 1)       \
  DO(6, kPairs, Value, 2, 64, 1, 3)        \
  DO(7, kShiftedPairs, Value, 3, 64, 2, 1) DO(5, kFours, Value, 2, 128, 2, 1) DO(6, kFours, Value, 2, 64, 1, 3)
#define UPFOLD_INSTANTIATE_WEIGHT_SUM_KERNEL(index, kReads, Value, ...) \
  UPFOLD_INSTANTIATE_WEIGHT_BOXES_OF(kReads, true, Value, __VA_ARGS__)
#define UPFOLD_INSTANTIATE_WEIGHT_SUMS(Value) UPFOLD_WEIGHT_SUM_TILES(UPFOLD_INSTANTIATE_WEIGHT_SUM_KERNEL, Value)
#define UPFOLD_INSTANTIATE_WEIGHT_BOXES(Value, reads) UPFOLD_WEIGHT_BOX_TILES(UPFOLD_INSTANTIATE_WEIGHT_BOX_KERNEL, reads, Value)
#define UPFOLD_INSTANTIATE_WEIGHT_PACK(Bits) \
  template __global__ void fused_weight_pack_kernel<Bits>(const __grid_constant__ FusedWeightPackJob, const Bits*, uint4*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template <typename Value, typename Tile, int kReads, bool kSums>
void run_fused_weight_box_tile(const Launch& launch, const FusedWeightPlan& plan, const BoxMap& x, const BoxMap& y,
                               float* partial, float* row_partial) {
  if constexpr (kWeightIsWide<Tile> && !Tile::kCuts && !Tile::kShares && !Tile::kAdds) {
    if (plan.cuts)
      return run_fused_weight_box_tile<Value, FusedWeightCutting<Tile>, kReads, kSums>(launch, plan, x, y, partial, row_partial);
  }
  if constexpr (kWeightIsWide<Tile> && !Tile::kShares && !Tile::kAdds) {
    if (plan.job.together.value > 1)
      return run_fused_weight_box_tile<Value, FusedWeightAdding<Tile>, kReads, kSums>(launch, plan, x, y, partial, row_partial);
    if (plan.sharers > 1)
      return run_fused_weight_box_tile<Value, FusedWeightSharing<Tile>, kReads, kSums>(launch, plan, x, y, partial, row_partial);
  }
  const int bytes = plan.job.stages * plan.job.stage_bytes + kBoxAlignment;
  launch_grid("fused", fused_weight_box_kernel<Value, Tile, kReads, kSums>, launch,
              Grid{plan.blocks, plan.threads, bytes, true, plan.sharers * plan.job.together.value}, plan.job, plan.boxes, x, y,
              partial, row_partial);
}

template <typename Value>
void run_fused_weight_boxes(const Launch& launch, const FusedWeightPlan& plan, int config, const FusedOperands& operands) {
  const auto partial = static_cast<float*>(operands.workspace);
  const std::int64_t y_at = plan.partial_bytes + 16 * std::int64_t(plan.x_pack.vectors);
  const void* const x = packed_operand<Value>(launch, plan.x_pack, operands.x, operands.workspace, plan.partial_bytes);
  const void* const y = packed_operand<Value>(launch, plan.y_pack, operands.y, operands.workspace, y_at);
  const BoxMap x_map = describe_boxes(plan.x, x), y_map = describe_boxes(plan.y, y);
  const bool sums = operands.bias != nullptr;
  float* const row_partial = sums ? partial + plan.row_sums_at / std::int64_t(sizeof(float)) : nullptr;
#define UPFOLD_RUN_BOXES(kReads, kSums, ...)                                                                            \
  run_fused_weight_box_tile<Value, FusedWeightBoxTile<__VA_ARGS__>, kReads, kSums>(launch, plan, x_map, y_map, partial, \
                                                                                   row_partial)
#define UPFOLD_RUN_SUMS(index, kReads, type, ...) \
  if (config == index && plan.reads == kReads) return UPFOLD_RUN_BOXES(kReads, true, __VA_ARGS__);
  if constexpr (sizeof(Value) == 2) {
    if (sums) {
      UPFOLD_WEIGHT_SUM_TILES(UPFOLD_RUN_SUMS, Value)
    }
  }
#define UPFOLD_RUN(index, kReads, type, ...) \
  if (config == index && plan.reads == kReads) UPFOLD_RUN_BOXES(kReads, false, __VA_ARGS__);
  if constexpr (sizeof(Value) == 2) {
    UPFOLD_WEIGHT_BOX_TILES(UPFOLD_RUN, UPFOLD_WEIGHT_BOX_HALF_READS, Value)
  } else {
    UPFOLD_WEIGHT_BOX_TILES(UPFOLD_RUN, UPFOLD_WEIGHT_FLOAT_READS, Value)
  }
#undef UPFOLD_RUN
#undef UPFOLD_RUN_SUMS
#undef UPFOLD_RUN_BOXES
}

}  // namespace upfold::cuda
#endif
