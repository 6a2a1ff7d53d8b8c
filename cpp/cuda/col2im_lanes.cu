// col2im at memory speed, for 16-bit and 32-bit floats, where kernel_w == stride_w is 2 or 4 and the outputs of a few pixels are
// one aligned access; col2im_runs.cu takes what does not fit.
//
// A lane owns kVector neighbouring pixels of one line of y for kItems channels: kStride accesses to columns for every tap of d
// and h and channel, and one access to y for every channel. Lanes are counted through the pixels of a line, the lines, the
// planes and the samples without a break, so that warps read and write whole runs. Taps are summed in ascending order; a row
// outside the input is skipped.
#include "activation.cuh"
#include "rows.cuh"

namespace upfold::cuda {

struct LanesJob {
  RowsJob rows;
  Divisor vectors;  // of a line
  std::uint32_t lanes;
};

// The columns of one tap of d and h, in the order of y.
template <int kStride, int kVector, int kItems, typename Column>
UPFOLD_DEVICE void add_tap(const RowsJob& job, const Column* source, std::int32_t channels,
                           float (&sums)[kItems][kStride * kVector]) {
  Pack<Column, kVector> values[kItems][kStride];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const Column* const from = source + item * job.channel_stride;
#pragma unroll
    for (int r = 0; r < kStride; ++r) {
      values[item][r] =
          item < channels ? *reinterpret_cast<const Pack<Column, kVector>*>(from + r * job.tap_w) : Pack<Column, kVector>{};
    }
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
#pragma unroll
    for (int i = 0; i < kStride * kVector; ++i) sums[item][i] += widen(values[item][i % kStride].v[i / kStride]);
  }
}

// Adds the bias to the sums of a channel and applies the activation.
template <int kCount>
UPFOLD_DEVICE void finish_run(const RowsJob& job, float bias, float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += bias;
  if (job.activation == Activation::kNone) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = finish(job.activation, job.slope, sums[i]);
}

template <typename Value, typename Column, int kStride, int kVector, int kItems>
__global__ void __launch_bounds__(kRowThreads)
    col2im_lanes_kernel(const LanesJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  constexpr int kRun = kStride * kVector;
  const RowsJob& rows = job.rows;
  std::uint32_t rest = blockIdx.x * kRowThreads + threadIdx.x;
  if (rest >= job.lanes) return;
  const std::int32_t q = std::int32_t(take(job.vectors, rest)) * kVector;
  std::uint32_t oh = take(rows.h.out_count, rest), od = take(rows.d.out_count, rest);
  const std::uint32_t n = take(rows.samples, rest);
  const std::int32_t channel = std::int32_t(rest) * kItems, channels = rows.channels - channel;
  columns += n * rows.sample_stride + channel * rows.channel_stride;
  y += (rows.n_begin + n) * rows.y_n + (rows.oc_begin + channel) * rows.y_c + (rows.d.out_begin + std::int64_t(od)) * rows.y_d +
       (rows.h.out_begin + std::int64_t(oh)) * rows.y_h + (rows.w.out_begin + q * kStride);
  float added[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item)
    added[item] = bias != nullptr && item < channels ? widen(bias[rows.oc_begin + channel + item]) : 0.0f;
  const std::uint32_t rd = take(rows.d.stride, od), rh = take(rows.h.stride, oh);
  const std::int32_t in_h = std::int32_t(rows.h.in_count.value), in_w = std::int32_t(rows.w.in_count.value);
  float sums[kItems][kRun] = {};
  std::int32_t id = std::int32_t(od) + rows.d.first_in[rd];
  for (std::int32_t kd = rows.d.first_tap[rd]; kd < rows.d.kernel; kd += rows.d.tap_step, id -= rows.d.in_step) {
    if (std::uint32_t(id) >= rows.d.in_count.value) continue;
    std::int32_t ih = std::int32_t(oh) + rows.h.first_in[rh];
    for (std::int32_t kh = rows.h.first_tap[rh]; kh < rows.h.kernel; kh += rows.h.tap_step, ih -= rows.h.in_step) {
      if (std::uint32_t(ih) >= rows.h.in_count.value) continue;
      const std::int32_t offset = kd * rows.tap_d + kh * rows.tap_h + (id * in_h + ih) * in_w + q;
      add_tap<kStride, kVector, kItems>(rows, columns + offset, channels, sums);
    }
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    finish_run(rows, added[item], sums[item]);
    Pack<Value, kRun> wide;
#pragma unroll
    for (int i = 0; i < kRun; ++i) wide.v[i] = Narrow<Value>::from(sums[item][i]);
    if (item < channels) *reinterpret_cast<Pack<Value, kRun>*>(y + item * rows.y_c) = wide;
  }
}

// Channels of a lane: 16 sums, so that enough loads are in flight and enough lanes fit.
template <int kStride, int kVector>
constexpr int kLaneItems = 16 / (kStride * kVector);

#define UPFOLD_INSTANTIATE_LANES(Value, Column, kStride, kVector)                                                               \
  template __global__ void col2im_lanes_kernel<Value, Column, kStride, kVector, 1>(const LanesJob, const Column*, const Value*, \
                                                                                   Value*);                                     \
  template __global__ void col2im_lanes_kernel<Value, Column, kStride, kVector, kLaneItems<kStride, kVector>>(                  \
      const LanesJob, const Column*, const Value*, Value*);
#define UPFOLD_INSTANTIATE_HALF(Value, Column)  \
  UPFOLD_INSTANTIATE_LANES(Value, Column, 2, 4) \
  UPFOLD_INSTANTIATE_LANES(Value, Column, 2, 2) \
  UPFOLD_INSTANTIATE_LANES(Value, Column, 4, 2)
UPFOLD_INSTANTIATE_LANES(float, float, 2, 2)
UPFOLD_INSTANTIATE_LANES(float, float, 4, 1)
UPFOLD_INSTANTIATE_HALF(__half, __half)
UPFOLD_INSTANTIATE_HALF(__half, float)
UPFOLD_INSTANTIATE_HALF(__nv_bfloat16, __nv_bfloat16)
UPFOLD_INSTANTIATE_HALF(__nv_bfloat16, float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"

namespace upfold::cuda {
namespace {

// Whether `count` neighbouring pixels are one aligned access in every row of columns, and their outputs one in y.
bool vectors_fit(const RowsJob& job, const void* columns, std::int64_t element, std::int64_t count) {
  const auto fits = [count](std::int64_t step) { return step % count == 0; };
  return std::int64_t(reinterpret_cast<std::uintptr_t>(columns)) % (count * element) == 0 && fits(job.w.in_count.value) &&
         fits(job.sample_stride) && fits(job.channel_stride) && fits(job.tap_d) && fits(job.tap_h) && fits(job.tap_w) &&
         job.vector >= count * std::int64_t(job.w.stride.value);
}

template <typename Value, typename Column, int kStride, int kVector>
bool launch_lanes(const Launch& launch, const RowsJob& rows, const void* columns, const void* bias, void* y) {
  if (std::int32_t(rows.w.stride.value) != kStride || !vectors_fit(rows, columns, sizeof(Column), kVector)) return false;
  LanesJob job{};
  job.rows = rows;
  const int items = lane_channels(rows, kLaneItems<kStride, kVector>);
  const std::int64_t vectors = rows.w.in_count.value / kVector, groups = ceil_div(rows.channels, items);
  const std::int64_t lines = std::int64_t(rows.h.out_count.value) * rows.d.out_count.value;
  if (lines >= kMost || lines * vectors >= kMost || lines * vectors * rows.samples.value >= kMost) return false;
  if (lines * vectors * rows.samples.value * groups >= kMost) return false;
  job.vectors = make_divisor(vectors);
  job.lanes = std::uint32_t(lines * vectors * rows.samples.value * groups);
  const auto kernel = items == 1 ? col2im_lanes_kernel<Value, Column, kStride, kVector, 1>
                                 : col2im_lanes_kernel<Value, Column, kStride, kVector, kLaneItems<kStride, kVector>>;
  launch_kernel("col2im", kernel, launch, (job.lanes + kRowThreads - 1) / kRowThreads, kRowThreads, job,
                static_cast<const Column*>(columns), static_cast<const Value*>(bias), static_cast<Value*>(y));
  return true;
}

template <typename Value, typename Column>
bool launch_any(const Launch& launch, const RowsJob& job, const void* columns, const void* bias, void* y) {
  if constexpr (sizeof(Value) == 4) {
    return launch_lanes<Value, Column, 2, 2>(launch, job, columns, bias, y) ||
           launch_lanes<Value, Column, 4, 1>(launch, job, columns, bias, y);
  } else {
    return launch_lanes<Value, Column, 2, 4>(launch, job, columns, bias, y) ||
           launch_lanes<Value, Column, 2, 2>(launch, job, columns, bias, y) ||
           launch_lanes<Value, Column, 4, 2>(launch, job, columns, bias, y);
  }
}

}  // namespace

bool col2im_lanes(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                  void* y) {
  const bool whole = job.w.origin == job.w.out_begin && job.w.in_count.value * job.w.stride.value == job.w.out_count.value;
  const bool equal = job.w.kernel == std::int32_t(job.w.stride.value) && job.w.dilation == 1 && job.w.in_count.value > 0;
  if (!equal || !whole) return false;
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)             \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) \
    return launch_any<Value, Column>(launch, job, columns, bias, y);
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
