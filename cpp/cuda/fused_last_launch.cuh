// The kernels of the fused method whose channels are innermost, for one type, and their launches.
#pragma once

#include "fused_last_kernel.cuh"

namespace upfold::cuda {

// A tile's index, its kM, kSub8, kPhases, kBlocks, kVectors.
#define UPFOLD_LAST_TILES(DO, Value) \
  DO(0, Value, 2, 16, 1, 1, 8)       \
  DO(1, Value, 1, 32, 1, 1, 8)       \
  DO(2, Value, 1, 8, 4, 1, 8)        \
  DO(3, Value, 1, 16, 1, 2, 8)       \
  DO(4, Value, 2, 8, 1, 2, 8)        \
  DO(5, Value, 2, 4, 1, 2, 4)        \
  DO(6, Value, 2, 4, 1, 2, 8)        \
  DO(7, Value, 1, 8, 2, 2, 8)        \
  DO(8, Value, 2, 4, 4, 1, 8)

#define UPFOLD_INSTANTIATE_LAST_KERNEL(index, Value, ...)                   \
  template __global__ void fused_last_kernel<Value, LastTile<__VA_ARGS__>>( \
      const __grid_constant__ LastJob, const __grid_constant__ BoxMap, const unsigned char*, const Value*, Value*);
#define UPFOLD_INSTANTIATE_LAST(Value)                     \
  UPFOLD_LAST_TILES(UPFOLD_INSTANTIATE_LAST_KERNEL, Value) \
  template __global__ void fused_last_pack_kernel<Value>(const __grid_constant__ LastPackJob, const Value*, uint4*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "fused_last_plan.h"

namespace upfold::cuda {

template <typename Value>
void pack_last(const Launch& launch, const LastPlan& plan, const void* w, void* packed) {
  if (plan.pack.count == 0) return;
  const unsigned blocks = (plan.pack.count + kLastPackThreads - 1) / kLastPackThreads;
  launch_kernel("fused", fused_last_pack_kernel<Value>, launch, blocks, kLastPackThreads, plan.pack, static_cast<const Value*>(w),
                static_cast<uint4*>(packed));
}

struct LastOperands {
  const void *source, *w, *bias;
  void* result;
  void* packed;
  bool is_packed;
};

template <typename Value>
void run_last(const Launch& launch, const LastPlan& plan, int config, const LastOperands& operands) {
  const bool packs = !operands.is_packed && plan.pack.count > 0;
  if (packs) pack_last<Value>(launch, plan, operands.w, operands.packed);
  const BoxMap source = describe_boxes(plan.source, operands.source);
  LastJob job = plan.job;
  job.wide = job.wide && reinterpret_cast<std::uintptr_t>(operands.result) % 16 == 0;
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, launch.device), "cudaDeviceGetAttribute");
#define UPFOLD_RUN(index, type, ...)                                                                                 \
  if (config == index) {                                                                                             \
    using Tile = LastTile<__VA_ARGS__>;                                                                              \
    const Grid grid{std::min(job.tiles, unsigned(count * Tile::kBlocks)), Tile::kThreads, plan.shared_bytes, packs}; \
    launch_grid("fused", fused_last_kernel<Value, Tile>, launch, grid, job, source,                                  \
                static_cast<const unsigned char*>(operands.packed), static_cast<const Value*>(operands.bias),        \
                static_cast<Value*>(operands.result));                                                               \
  }
  UPFOLD_LAST_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_last_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_last_kernel<Value, LastTile<2, 16, 1, 1, 8>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
