// A thread owns kCount neighbouring columns of a row, which are one access where the result's rows and address allow it, else
// one.
#include "activation.cuh"
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256, kMany = 4;

struct FinishJob {
  Divisor vectors, run;  // vectors: of a row
  std::uint32_t count;   // of vectors
  std::int64_t y_row;
  bool innermost;
  Activation activation;
  float slope;
};

template <typename Value, int kCount>
struct alignas(kCount * sizeof(Value)) FinishVector {
  Value v[kCount];
};

template <typename Value, int kCount>
__global__ void __launch_bounds__(kThreads)
    finish_rows_kernel(const FinishJob job, const Sum<Value>* __restrict__ sums, const Value* __restrict__ bias, Value* y) {
  const std::uint32_t number = blockIdx.x * kThreads + threadIdx.x;
  if (number >= job.count) return;
  const auto own = reinterpret_cast<const FinishVector<Sum<Value>, kCount>*>(sums)[number];
  std::uint32_t row = number;
  const std::uint32_t column = take(job.vectors, row) * kCount;
  FinishVector<Value, kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    Sum<Value> sum = own.v[i];
    if (bias != nullptr) {
      std::uint32_t channel = column + i;
      const std::uint32_t remainder = take(job.run, channel);
      add(sum, widen(bias[job.innermost ? remainder : channel]));
    }
    result.v[i] = Narrow<Value>::from(finish(job.activation, job.slope, sum));
  }
  *reinterpret_cast<FinishVector<Value, kCount>*>(y + row * job.y_row + column) = result;
}

#define UPFOLD_FINISH_TYPES(DO) DO(kFloat32, float) DO(kFloat64, double) DO(kFloat16, __half) DO(kBFloat16, __nv_bfloat16)
#define UPFOLD_INSTANTIATE_COUNT(Value, kCount) \
  template __global__ void finish_rows_kernel<Value, kCount>(const FinishJob, const Sum<Value>*, const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, Value) UPFOLD_INSTANTIATE_COUNT(Value, 1) UPFOLD_INSTANTIATE_COUNT(Value, kMany)
UPFOLD_FINISH_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "finish_rows.h"
#include "launch.cuh"

namespace upfold::cuda {

void finish_rows(const Launch& launch, const Problem& p, const FinishedRows& shape, const void* sums, const void* bias, void* y) {
  const bool many = (shape.columns | shape.y_row) % kMany == 0 &&
                    reinterpret_cast<std::uintptr_t>(y) % std::uintptr_t(kMany * element_bytes(p.dtype)) == 0;
  const std::int64_t vectors = shape.columns / (many ? kMany : 1), count = shape.rows * vectors;
  const FinishJob job{make_divisor(vectors), make_divisor(shape.run), std::uint32_t(count), shape.y_row, shape.innermost,
                      p.activation,          p.activation_slope};
  const unsigned blocks = unsigned((count + kThreads - 1) / kThreads);
#define UPFOLD_CASE(dtype_name, Value)                                                                                          \
  if (p.dtype == Dtype::dtype_name)                                                                                             \
    return launch_kernel("finish_rows", many ? finish_rows_kernel<Value, kMany> : finish_rows_kernel<Value, 1>, launch, blocks, \
                         kThreads, job, static_cast<const Sum<Value>*>(sums), static_cast<const Value*>(bias),                  \
                         static_cast<Value*>(y));
  UPFOLD_FINISH_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  throw InvalidArgument(concat("dtype ", int(p.dtype), "; no activation is defined on complex numbers"));
}

}  // namespace upfold::cuda
#endif
