// A block owns kLanes neighbouring elements; its warps share the parts out, each adds every kWarps-th one in ascending order, and
// the first warp adds the warps' sums in ascending order: the same bits in every run. Neighbouring lanes read neighbouring
// elements.
#include "values.cuh"

namespace upfold::cuda {

constexpr int kLanes = 32, kWarps = 8;

template <typename Value>
__global__ void __launch_bounds__(kLanes* kWarps)
    sum_parts_kernel(std::int64_t count, std::int32_t parts, bool accumulate, const Value* __restrict__ from, Value* to) {
  __shared__ Value sums[kWarps][kLanes];
  const std::int32_t lane = std::int32_t(threadIdx.x % kLanes), warp = std::int32_t(threadIdx.x / kLanes);
  const std::int64_t at = std::int64_t(blockIdx.x) * kLanes + lane;
  Value sum{};
  if (at < count) {
#pragma unroll 4
    for (std::int32_t part = warp; part < parts; part += kWarps) add(sum, from[part * count + at]);
  }
  sums[warp][lane] = sum;
  __syncthreads();  // the sums of all warps are there
  if (warp > 0 || at >= count) return;
  Value total{};
  if (accumulate) total = to[at];
#pragma unroll
  for (int i = 0; i < kWarps; ++i) add(total, sums[i][lane]);
  to[at] = total;
}

#define UPFOLD_SUM_TYPES(DO) \
  DO(kFloat32, float)        \
  DO(kFloat64, double)       \
  DO(kComplex64, Complex<float>) DO(kComplex128, Complex<double>)
#define UPFOLD_INSTANTIATE(dtype, Value) \
  template __global__ void sum_parts_kernel<Value>(std::int64_t, std::int32_t, bool, const Value*, Value*);
UPFOLD_SUM_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"
#include "sum_parts.h"

namespace upfold::cuda {

void sum_parts(const Launch& launch, Dtype dtype, std::int64_t count, std::int64_t parts, const void* from, void* to,
               bool accumulate) {
  const std::int64_t blocks = (count + kLanes - 1) / kLanes, most = (std::int64_t(1) << 31) - 1;
  require(blocks <= most && parts <= most, "a sum of ", parts, " parts of ", count, " elements; it takes fewer than 2^31 blocks");
#define UPFOLD_CASE(dtype_name, Value)                                                                              \
  if (dtype == Dtype::dtype_name)                                                                                   \
    return launch_kernel("sum of parts", sum_parts_kernel<Value>, launch, unsigned(blocks), kLanes * kWarps, count, \
                         std::int32_t(parts), accumulate, static_cast<const Value*>(from), static_cast<Value*>(to));
  UPFOLD_SUM_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  throw InvalidArgument(concat("dtype ", int(dtype), "; sums are kept in float32, float64 or complex types"));
}

}  // namespace upfold::cuda
#endif
