// The fused method's tiles whose rows are pixels, and the launches of one of them.
#pragma once

#include "fused_launch.cuh"
#include "fused_pixels.cuh"

// Numbered after those of warpgroups: kWhole, kPhasesH, kPhasesW, kOc8, kM, kVectors.
#define UPFOLD_PIXEL_TILES(DO, Value) \
  DO(18, Value, true, 2, 2, 8, 1, 8)  \
  DO(19, Value, true, 2, 2, 4, 2, 4)  \
  DO(20, Value, true, 1, 4, 8, 1, 8)  \
  DO(21, Value, true, 1, 1, 16, 2, 4) \
  DO(22, Value, false, 2, 2, 8, 1, 8) \
  DO(23, Value, false, 2, 2, 4, 2, 4) \
  DO(24, Value, false, 1, 2, 8, 2, 4) \
  DO(25, Value, false, 1, 4, 8, 1, 8)

#define UPFOLD_INSTANTIATE_PIXEL(index, Value, ...)                                                                         \
  template __global__ void fused_pixels_kernel<Value, PixelTile<__VA_ARGS__>>(                                              \
      const __grid_constant__ FusedJob, std::uint32_t, const Value*, const uint4*, const Value*, Value*, float4*);          \
  template __global__ void pixels_reduce_kernel<Value, PixelTile<__VA_ARGS__>>(const FusedJob, const float4*, const Value*, \
                                                                               Value*);                                     \
  template __global__ void fused_pack_kernel<Value, PixelTile<__VA_ARGS__>>(                                                \
      const __grid_constant__ FusedJob, const Value*, ShiftList*, uint4*, const Value*, uint4*, std::uint32_t);
// In namespace upfold::cuda, once for each type.
#define UPFOLD_INSTANTIATE_PIXELS(Value) UPFOLD_PIXEL_TILES(UPFOLD_INSTANTIATE_PIXEL, Value)

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

constexpr int kFirstPixelTile = 18;

template <typename Tile>
constexpr bool kOfPixels = false;
template <bool kWhole, int... kSizes>
constexpr bool kOfPixels<PixelTile<kWhole, kSizes...>> = true;

template <typename Value, typename Tile>
void run_pixel_tile(const Launch& launch, const FusedPlan& plan, const FusedOperands& operands) {
  const TypedOperands<Value> typed(plan, operands);
  const FusedJob job = pack_weight<Value, Tile>(launch, plan, typed);
  if (plan.blocks == 0) return;
  unsigned blocks = unsigned(multiprocessors(launch.device));
  if (job.resident) blocks = std::max(blocks / unsigned(plan.combinations), 1u) * unsigned(plan.combinations);
  launch_grid("fused", fused_pixels_kernel<Value, Tile>, launch,
              Grid{std::min(plan.blocks, blocks), Tile::kBlockThreads, plan.shared_bytes, packs(plan)}, job, plan.blocks, typed.x,
              typed.packed, typed.bias, typed.y, typed.partial);
  if (job.splits.value == 1) return;
  launch_kernel("fused", pixels_reduce_kernel<Value, Tile>, launch, plan.blocks / job.splits.value * (Tile::kM * Tile::kOc8 / 2),
                Tile::kThreads, job, typed.partial, typed.bias, typed.y);
}

#define UPFOLD_RUN_PIXEL(index, Value, ...) \
  if (config == index) return run_pixel_tile<Value, PixelTile<__VA_ARGS__>>(launch, plan, operands);
// For each type in the source that compiles its kernels.
template <typename Value>
void run_pixels(const Launch& launch, const FusedPlan& plan, const FusedOperands& operands, int config) {
  UPFOLD_PIXEL_TILES(UPFOLD_RUN_PIXEL, Value)
}

}  // namespace upfold::cuda
#endif
