// The kernels of the fused method of whole maps, for one type, and their launches.
#pragma once

#include "fused_maps_kernel.cuh"

namespace upfold::cuda {

// Whether warpgroups work side by side, taps of an output.
#define UPFOLD_MAPS_TILES(DO, Value) \
  DO(Value, false, 1) DO(Value, false, 2) DO(Value, false, 4) DO(Value, true, 1) DO(Value, true, 2) DO(Value, true, 4)

#define UPFOLD_INSTANTIATE_MAPS_KERNEL(Value, ...)                          \
  template __global__ void fused_maps_kernel<MapsTile<Value, __VA_ARGS__>>( \
      const __grid_constant__ MapsJob, const __grid_constant__ BoxMap, const __grid_constant__ BoxMap, const Value*, Value*);
#define UPFOLD_INSTANTIATE_MAPS(Value) UPFOLD_MAPS_TILES(UPFOLD_INSTANTIATE_MAPS_KERNEL, Value)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_maps_plan.h"

namespace upfold::cuda {

template <typename Value>
void run_maps(const Launch& launch, const MapsPlan& plan, bool beside, const FusedOperands& operands) {
  const BoxMap x = describe_boxes(plan.x, operands.x), w = describe_boxes(plan.w, operands.w);
  const auto bias = static_cast<const Value*>(operands.bias);
  const auto y = static_cast<Value*>(operands.y);
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, launch.device), "cudaDeviceGetAttribute");
  const unsigned blocks = plan.job.tiles < unsigned(multiprocessors) ? plan.job.tiles : unsigned(multiprocessors);
#define UPFOLD_RUN(type, kBeside, kEach)                                                                                       \
  if (beside == kBeside && plan.each == kEach)                                                                                 \
    return launch_grid("fused", fused_maps_kernel<MapsTile<Value, kBeside, kEach>>, launch,                                    \
                       Grid{blocks, MapsTile<Value, kBeside, kEach>::kThreads, plan.shared_bytes, true}, plan.job, x, w, bias, \
                       y);
  UPFOLD_MAPS_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_maps_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_maps_kernel<MapsTile<Value, false, 1>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
