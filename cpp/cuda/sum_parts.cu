// The parts of an element are shared out between kShares threads of a block, each adds every kShares-th one in ascending order,
// and the first adds their sums in ascending order: the same bits in every run. Neighbouring lanes read neighbouring elements.
// Many parts of few elements are shared out, so that the device is busy; few are added by one thread.
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256;

template <typename Value, int kShares>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(std::int64_t count, std::int32_t parts, bool accumulate, const Value* __restrict__ from, Value* to) {
  constexpr int kLanes = kThreads / kShares;
  __shared__ Value sums[kShares][kLanes];
  const std::int32_t lane = std::int32_t(threadIdx.x % kLanes), share = std::int32_t(threadIdx.x / kLanes);
  const std::int64_t at = std::int64_t(blockIdx.x) * kLanes + lane;
  Value sum{};
  if (at < count) {
#pragma unroll 4
    for (std::int32_t part = share; part < parts; part += kShares) add(sum, from[part * count + at]);
  }
  if (kShares > 1) {
    sums[share][lane] = sum;
    __syncthreads();  // the sums of all shares are there
  }
  if (share > 0 || at >= count) return;
  Value total{};
  if (accumulate) total = to[at];
  add(total, sum);
#pragma unroll
  for (int i = 1; i < kShares; ++i) add(total, sums[i][lane]);
  to[at] = total;
}

#define UPFOLD_SUM_TYPES(DO) \
  DO(kFloat32, float)        \
  DO(kFloat64, double)       \
  DO(kComplex64, Complex<float>) DO(kComplex128, Complex<double>)
#define UPFOLD_INSTANTIATE(dtype, Value)                                                                       \
  template __global__ void sum_parts_kernel<Value, 1>(std::int64_t, std::int32_t, bool, const Value*, Value*); \
  template __global__ void sum_parts_kernel<Value, 8>(std::int64_t, std::int32_t, bool, const Value*, Value*);
UPFOLD_SUM_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"
#include "sum_parts.h"

namespace upfold::cuda {

void sum_parts(const Launch& launch, Dtype dtype, std::int64_t count, std::int64_t parts, const void* from, void* to,
               bool accumulate) {
  constexpr std::int64_t kBusy = 1 << 17;  // threads that keep a large device busy
  const bool shared = parts >= 8 && count < kBusy;
  const std::int64_t lanes = shared ? kThreads / 8 : kThreads, blocks = (count + lanes - 1) / lanes;
  constexpr std::int64_t kMost = (std::int64_t(1) << 31) - 1;
  require(blocks <= kMost && parts <= kMost, "a sum of ", parts, " parts of ", count, " elements; both must be below 2^31");
#define UPFOLD_CASE(dtype_name, Value)                                                                                        \
  if (dtype == Dtype::dtype_name)                                                                                             \
    return launch_kernel("sum of parts", shared ? sum_parts_kernel<Value, 8> : sum_parts_kernel<Value, 1>, launch,            \
                         unsigned(blocks), kThreads, count, std::int32_t(parts), accumulate, static_cast<const Value*>(from), \
                         static_cast<Value*>(to));
  UPFOLD_SUM_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  throw InvalidArgument(concat("dtype ", int(dtype), "; sums are kept in float32, float64 or complex types"));
}

}  // namespace upfold::cuda
#endif
