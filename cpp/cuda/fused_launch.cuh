// The fused method's tiles, and the launches of one of them: the weight is packed, unless it was before, then everything happens
// in one kernel, and a split reduction ends in another. Each type of values is compiled in a source of its own.
#pragma once

#include "fused_kernel.cuh"
#include "fused_warpgroup.cuh"

// The tiles: kOc16, kPhasesH, kPhasesW, kWarpsM, kWarpsN, kN8, kVectors, kBlocks.
#define UPFOLD_FUSED_TILES(DO, Value)  \
  DO(0, Value, 1, 2, 2, 2, 4, 4, 4, 2) \
  DO(1, Value, 2, 1, 2, 2, 4, 4, 4, 2) \
  DO(2, Value, 4, 1, 1, 2, 4, 4, 4, 2) \
  DO(3, Value, 4, 1, 1, 1, 8, 4, 4, 2) \
  DO(4, Value, 2, 1, 1, 1, 8, 4, 4, 2) \
  DO(5, Value, 1, 2, 2, 1, 8, 4, 4, 2) \
  DO(6, Value, 1, 2, 2, 4, 1, 4, 4, 4)

// Tiles of warpgroups, numbered after them: kPhasesH, kPhasesW, kWarpsM, kInsts, kInstN8, and whether x is packed
// first.
#define UPFOLD_WARPGROUP_TILES(DO, Value) \
  DO(7, Value, 1, 2, 8, 1, 16, false)     \
  DO(8, Value, 1, 2, 4, 1, 16, false)     \
  DO(9, Value, 1, 1, 8, 2, 16, false)     \
  DO(10, Value, 1, 1, 4, 2, 16, false)    \
  DO(11, Value, 2, 2, 8, 1, 8, false)     \
  DO(12, Value, 1, 2, 8, 1, 16, true)     \
  DO(13, Value, 1, 2, 4, 1, 16, true)     \
  DO(14, Value, 1, 1, 8, 2, 16, true)     \
  DO(15, Value, 1, 1, 4, 2, 16, true)     \
  DO(16, Value, 2, 2, 8, 1, 8, true)      \
  DO(17, Value, 2, 2, 4, 1, 8, true)

#define UPFOLD_INSTANTIATE_TILE(index, Value, ...)                                                                         \
  template __global__ void fused_kernel<Value, FusedTile<__VA_ARGS__>>(const FusedJob, const Value*, const ShiftList*,     \
                                                                       const uint4*, const Value*, Value*, float4*);       \
  template __global__ void fused_reduce_kernel<Value, FusedTile<__VA_ARGS__>>(const FusedJob, const float4*, const Value*, \
                                                                              Value*);                                     \
  template __global__ void fused_pack_kernel<Value, FusedTile<__VA_ARGS__>>(                                               \
      const __grid_constant__ FusedJob, const Value*, ShiftList*, uint4*, const Value*, uint4*, std::uint32_t);
#define UPFOLD_INSTANTIATE_WARPGROUP(index, Value, ...)                                                                          \
  template __global__ void fused_warpgroup_kernel<Value, WarpgroupTile<__VA_ARGS__>>(                                            \
      const __grid_constant__ FusedJob, std::uint32_t, const Value*, const uint4*, const Value*, Value*, float4*, const uint4*); \
  template __global__ void fused_reduce_kernel<Value, WarpgroupTile<__VA_ARGS__>>(const FusedJob, const float4*, const Value*,   \
                                                                                  Value*);                                       \
  template __global__ void fused_pack_kernel<Value, WarpgroupTile<__VA_ARGS__>>(                                                 \
      const __grid_constant__ FusedJob, const Value*, ShiftList*, uint4*, const Value*, uint4*, std::uint32_t);
// In namespace upfold::cuda, each once for each type.
#define UPFOLD_INSTANTIATE_FUSED(Value) UPFOLD_FUSED_TILES(UPFOLD_INSTANTIATE_TILE, Value)
#define UPFOLD_INSTANTIATE_WARPGROUPS(Value) UPFOLD_WARPGROUP_TILES(UPFOLD_INSTANTIATE_WARPGROUP, Value)

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "fused_plan.h"
#include "launch.cuh"

namespace upfold::cuda {

constexpr int kFirstWarpgroupTile = 7;

inline int multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

template <typename Tile>
constexpr bool kOfWarpgroups = false;
template <int a, int b, int c, int d, int e, bool kPacked>
constexpr bool kOfWarpgroups<WarpgroupTile<a, b, c, d, e, kPacked>> = true;

// Whether a launch that packs goes ahead of the kernel that multiplies, which may then begin before it has ended.
inline bool packs(const FusedPlan& plan) { return plan.pack_blocks + plan.input_blocks > 0; }

// The operands as kernels take them. A weight that was packed before has no room in the workspace.
template <typename Value>
struct TypedOperands {
  const Value* x;
  const Value* w;
  const Value* bias;
  Value* y;
  ShiftList* lists;
  uint4* packed;
  uint4* inputs;
  float4* partial;

  TypedOperands(const FusedPlan& plan, const FusedOperands& operands)
      : x(static_cast<const Value*>(operands.x)),
        w(static_cast<const Value*>(operands.w)),
        bias(static_cast<const Value*>(operands.bias)),
        y(static_cast<Value*>(operands.y)) {
    unsigned char* const workspace = static_cast<unsigned char*>(operands.workspace);
    const bool apart = operands.packed != nullptr;
    unsigned char* const weight = apart ? static_cast<unsigned char*>(operands.packed) : workspace;
    unsigned char* const rest = apart ? workspace : workspace + plan.weight_end;
    lists = reinterpret_cast<ShiftList*>(weight), packed = reinterpret_cast<uint4*>(weight + plan.list_bytes);
    inputs = reinterpret_cast<uint4*>(rest);
    partial = reinterpret_cast<float4*>(rest + (plan.packed_end - plan.weight_end));
  }
};

// Packs the weight, and x where the tile wants it; returns the job with what depends on where y lies.
template <typename Value, typename Tile>
FusedJob pack_weight(const Launch& launch, const FusedPlan& plan, const TypedOperands<Value>& typed) {
  if (packs(plan)) {
    launch_in_turn("fused", fused_pack_kernel<Value, Tile>, launch, plan.pack_blocks + plan.input_blocks, kPackThreads, plan.job,
                   typed.w, typed.lists, typed.packed, typed.x, typed.inputs, plan.pack_blocks);
  }
  FusedJob job = plan.job;
  // Outputs of neighbouring units, in the width phases of a set, are one vector of at most 16 bytes, or several.
  constexpr std::int64_t kRun = std::int64_t(sizeof(Value)) * 2 * Tile::kPhasesW, kWide = kRun <= kWordBytes ? kRun : kWordBytes;
  const auto address = std::int64_t(reinterpret_cast<std::uintptr_t>(typed.y));
  const std::int64_t outer = job.y_n | job.y_axis[0] | job.y_axis[1], size = std::int64_t(sizeof(Value));
  job.wide = job.y_axis[2] == 1 && job.axis[2].taps.stride == Tile::kPhasesW && ((outer | job.y_c) * size | address) % kWide == 0;
  job.dense_y = job.y_c == 1 && ((outer | job.y_axis[2] | job.oc) * size | address) % kWordBytes == 0;
  // A thread's outputs, of one unit or two, are one vector.
  const std::int64_t unit = size * Tile::kPhasesW, apart = (outer | job.y_c) * size | address;
  job.direct = job.y_axis[2] == 1 && job.axis[2].taps.stride == Tile::kPhasesW && job.axis[2].out % Tile::kPhasesW == 0 &&
               apart % unit == 0;
  job.joined = apart % (2 * unit) == 0;
  return job;
}

template <typename Value, typename Tile>
void run_tile(const Launch& launch, const FusedPlan& plan, const FusedOperands& operands) {
  const TypedOperands<Value> typed(plan, operands);
  const FusedJob job = pack_weight<Value, Tile>(launch, plan, typed);
  if (plan.blocks == 0) return;
  if constexpr (kOfWarpgroups<Tile>) {
    const unsigned blocks = std::min(plan.blocks, unsigned(multiprocessors(launch.device)));
    launch_grid("fused", fused_warpgroup_kernel<Value, Tile>, launch,
                Grid{blocks, Tile::kBlockThreads, plan.shared_bytes, packs(plan)}, job, plan.blocks, typed.x, typed.packed,
                typed.bias, typed.y, typed.partial, typed.inputs);
  } else {
    launch_grid("fused", fused_kernel<Value, Tile>, launch, Grid{plan.blocks, Tile::kThreads, plan.shared_bytes}, job, typed.x,
                typed.lists, typed.packed, typed.bias, typed.y, typed.partial);
  }
  if (job.splits.value == 1) return;
  launch_kernel("fused", fused_reduce_kernel<Value, Tile>, launch, plan.blocks / job.splits.value * Tile::kN8, Tile::kThreads,
                job, typed.partial, typed.bias, typed.y);
}

#define UPFOLD_RUN(index, Value, ...) \
  if (config == index) return run_tile<Value, FusedTile<__VA_ARGS__>>(launch, plan, operands);
#define UPFOLD_RUN_WARPGROUP(index, Value, ...) \
  if (config == index) return run_tile<Value, WarpgroupTile<__VA_ARGS__>>(launch, plan, operands);
// For each type in the source that compiles its kernels.
template <typename Value>
void run_fused(const Launch& launch, const FusedPlan& plan, const FusedOperands& operands, int config) {
  UPFOLD_FUSED_TILES(UPFOLD_RUN, Value)
}
template <typename Value>
void run_warpgroups(const Launch& launch, const FusedPlan& plan, const FusedOperands& operands, int config) {
  UPFOLD_WARPGROUP_TILES(UPFOLD_RUN_WARPGROUP, Value)
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_warpgroups() {
  cudaFuncAttributes found;
#define UPFOLD_FIRST(index, Value, ...)                                                               \
  if (index == kFirstWarpgroupTile) {                                                                 \
    const auto kernel = fused_warpgroup_kernel<Value, WarpgroupTile<__VA_ARGS__>>;                    \
    check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes"); \
  }
  UPFOLD_WARPGROUP_TILES(UPFOLD_FIRST, Value)
#undef UPFOLD_FIRST
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
