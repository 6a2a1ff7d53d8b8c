// A thread owns one vector of 16 bytes of a row where rows and addresses allow it, else one element; neighbouring threads have
// neighbouring ones.
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256;

// Distances and counts in vectors.
struct RowsJob {
  Divisor vectors;  // of a row
  std::uint32_t count;
  std::int64_t from_row, to_row;
};

template <typename Value, int kCount>
struct alignas(kCount * sizeof(Value)) RowVector {
  Value v[kCount];
};

// The comparison is written so that a NaN stays a NaN, as in torch.
template <typename Value>
UPFOLD_DEVICE Value rectified(Value v) {
  return widen(v) < Sum<Value>(0) ? Narrow<Value>::from(Sum<Value>(0)) : v;
}

template <typename Value, int kCount, bool kRelu>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const RowsJob job, const RowVector<Value, kCount>* __restrict__ from,
                                                             RowVector<Value, kCount>* __restrict__ to) {
  const std::uint32_t number = blockIdx.x * kThreads + threadIdx.x;
  if (number >= job.count) return;
  std::uint32_t row = number;
  const std::uint32_t in_row = take(job.vectors, row);
  RowVector<Value, kCount> own = from[row * job.from_row + in_row];
  if (kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) own.v[i] = rectified(own.v[i]);
  }
  to[row * job.to_row + in_row] = own;
}

#define UPFOLD_ROW_TYPES(DO) DO(kFloat32, float) DO(kFloat64, double) DO(kFloat16, __half) DO(kBFloat16, __nv_bfloat16)
#define UPFOLD_INSTANTIATE_ROWS(Value, kCount, kRelu)                                                             \
  template __global__ void copy_rows_kernel<Value, kCount, kRelu>(const RowsJob, const RowVector<Value, kCount>*, \
                                                                  RowVector<Value, kCount>*);
#define UPFOLD_INSTANTIATE(dtype, Value)                         \
  UPFOLD_INSTANTIATE_ROWS(Value, 1, false)                       \
  UPFOLD_INSTANTIATE_ROWS(Value, 1, true)                        \
  UPFOLD_INSTANTIATE_ROWS(Value, 16 / int(sizeof(Value)), false) \
  UPFOLD_INSTANTIATE_ROWS(Value, 16 / int(sizeof(Value)), true)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostVectors = std::int64_t(1) << 31;

template <typename Value, int kCount, bool kRelu>
void run_rows(const Launch& launch, const Rows& rows, const void* from, void* to) {
  const std::int64_t vectors = rows.columns / kCount, count = rows.rows * vectors;
  require(count < kMostVectors, "rows.rows = ", rows.rows, ", rows.columns = ", rows.columns, "; 2^31 vectors are too many");
  const RowsJob job{make_divisor(vectors), std::uint32_t(count), rows.from_row / kCount, rows.to_row / kCount};
  launch_kernel("copy_rows", copy_rows_kernel<Value, kCount, kRelu>, launch, unsigned((count + kThreads - 1) / kThreads),
                kThreads, job, static_cast<const RowVector<Value, kCount>*>(from), static_cast<RowVector<Value, kCount>*>(to));
}

}  // namespace

void copy_rows(const Launch& launch, Dtype dtype, const Rows& rows, bool relu, const void* from, void* to) {
  if (rows.rows * rows.columns == 0) return;
  const DeviceScope scope(launch.device);
  const std::int64_t vector = 16 / element_bytes(dtype);
  const bool whole = (rows.columns | rows.from_row | rows.to_row) % vector == 0 &&
                     (reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to)) % 16 == 0;
#define UPFOLD_CASE(dtype_name, Value)                                                            \
  if (dtype == Dtype::dtype_name) {                                                               \
    constexpr int kMany = 16 / int(sizeof(Value));                                                \
    const auto run = whole  ? relu ? run_rows<Value, kMany, true> : run_rows<Value, kMany, false> \
                      : relu ? run_rows<Value, 1, true>                                           \
                            : run_rows<Value, 1, false>;                                          \
    return run(launch, rows, from, to);                                                           \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  throw InvalidArgument(concat("dtype ", int(dtype), "; rows of real numbers are copied"));
}

}  // namespace upfold::cuda
#endif
