// The kernels of the fused method of whole maps, for one type, and their launches.
#pragma once

#include "fused_maps_kernel.cuh"

namespace upfold::cuda {

// The tile's index; whether warpgroups work side by side, taps of an output, eighths of the pixels, whether lanes copy x.
#define UPFOLD_MAPS_TILES_OF(DO, index, Value, kBeside, ...) \
  DO(index, Value, kBeside, 1, __VA_ARGS__) DO(index, Value, kBeside, 2, __VA_ARGS__) DO(index, Value, kBeside, 4, __VA_ARGS__)
#define UPFOLD_MAPS_TILES(DO, Value)                   \
  UPFOLD_MAPS_TILES_OF(DO, 0, Value, false, 16, false) \
  UPFOLD_MAPS_TILES_OF(DO, 1, Value, true, 16, false)  \
  UPFOLD_MAPS_TILES_OF(DO, 2, Value, true, 24, true)   \
  UPFOLD_MAPS_TILES_OF(DO, 3, Value, true, 16, true)

#define UPFOLD_INSTANTIATE_MAPS_KERNEL(index, Value, ...)                                                            \
  template __global__ void fused_maps_kernel<MapsTile<Value, __VA_ARGS__>>(                                          \
      const __grid_constant__ MapsJob, const __grid_constant__ BoxMap, const __grid_constant__ BoxMap, const Value*, \
      const Value*, Value*);
#define UPFOLD_INSTANTIATE_MAPS(Value) UPFOLD_MAPS_TILES(UPFOLD_INSTANTIATE_MAPS_KERNEL, Value)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_maps_plan.h"

namespace upfold::cuda {

template <typename Value>
void run_maps(const Launch& launch, const MapsPlan& plan, int config, const FusedOperands& operands) {
  const BoxMap x = plan.by_lanes ? BoxMap{} : describe_boxes(plan.x, operands.x), w = describe_boxes(plan.w, operands.w);
  const auto values = static_cast<const Value*>(operands.x);
  const auto bias = static_cast<const Value*>(operands.bias);
  const auto y = static_cast<Value*>(operands.y);
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, launch.device), "cudaDeviceGetAttribute");
  const unsigned blocks = plan.job.tiles < unsigned(multiprocessors) ? plan.job.tiles : unsigned(multiprocessors);
#define UPFOLD_RUN(index, type, kBeside, kEach, ...)                                                                            \
  if (config == index && plan.each == kEach)                                                                                    \
    return launch_grid("fused", fused_maps_kernel<MapsTile<Value, kBeside, kEach, __VA_ARGS__>>, launch,                        \
                       Grid{blocks, MapsTile<Value, kBeside, kEach, __VA_ARGS__>::kThreads, plan.shared_bytes, true}, plan.job, \
                       x, w, values, bias, y);
  UPFOLD_MAPS_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_maps_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_maps_kernel<MapsTile<Value, false, 1, 16, false>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
