// col2im at memory speed, for 16-bit and 32-bit floats, where y is planar and its rows are whole aligned accesses: see rows.cuh.
//
// A lane owns kRun neighbouring outputs of one row in kItems channels, one aligned access each, and is their only writer; lanes
// own neighbouring runs, counted through (w, h, d, n) without a break, so that narrow maps leave no lane idle. Where the columns
// of its outputs begin is worked out once and serves every channel and every tap on d and h: what limits these kernels is the
// number of instructions, not the rows that a warp reads from, which the nearest cache joins. Taps are summed in ascending order;
// what lies outside the input adds 0.
#include "activation.cuh"
#include "rows.cuh"

namespace upfold::cuda {

// Of the outputs of a lane: their first tap on w, the pixel that it reads in a row, and both as one offset.
template <int kRun>
struct RunTaps {
  std::int32_t kw[kRun], iw[kRun], at[kRun];
};

template <int kRun>
UPFOLD_DEVICE RunTaps<kRun> run_taps(const RowsJob& job, std::uint32_t ow) {
  RunTaps<kRun> taps;
  std::uint32_t phase = take(job.w.stride, ow);  // ow is the unit now
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    taps.kw[j] = job.w.first_tap[phase];
    taps.iw[j] = std::int32_t(ow) + job.w.first_in[phase];
    taps.at[j] = taps.kw[j] * job.tap_w + taps.iw[j];
    if (++phase == job.w.stride.value) phase = 0, ++ow;
  }
  return taps;
}

// Adds one row of columns of every channel, for all taps on w.
template <int kRun, int kItems, typename Column>
UPFOLD_DEVICE void add_row(const RowsJob& job, const RunTaps<kRun>& taps, std::int32_t row,
                           const Column* const (&sources)[kItems], float (&sums)[kItems][kRun]) {
  std::int32_t step = 0, back = 0;
#pragma unroll 1
  for (std::int32_t tap = 0; tap < job.w.most_taps; ++tap, step += job.w.tap_step, back += job.w.in_step) {
    const std::int32_t at = row + step * job.tap_w - back;
    Column values[kItems][kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const bool inside = taps.kw[j] + step < job.w.kernel && std::uint32_t(taps.iw[j] - back) < job.w.in_count.value;
#pragma unroll
      for (int item = 0; item < kItems; ++item) values[item][j] = inside ? sources[item][at + taps.at[j]] : Column{};
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
#pragma unroll
      for (int j = 0; j < kRun; ++j) sums[item][j] += widen(values[item][j]);
    }
  }
}

template <typename Value, typename Column, int kRun, int kItems>
__global__ void __launch_bounds__(kRowThreads)
    col2im_runs_kernel(const RowsJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  std::uint32_t rest = blockIdx.x;
  std::uint32_t position = take(job.tiles, rest) * kRowThreads + threadIdx.x;
  if (position >= job.positions) return;
  const std::uint32_t ow = take(job.w.units, position) * kRun, oh = take(job.h.out_count, position),
                      od = take(job.d.out_count, position), n = take(job.samples, position);
  // Channel tiles are counted behind the samples where positions are few.
  const std::int32_t channel = std::int32_t(rest + position) * kItems;
  const Column* sources[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    // A channel beyond the last reads the last one again, and is not written.
    const std::int32_t c = channel + item < job.channels ? channel + item : job.channels - 1;
    sources[item] = columns + n * job.sample_stride + c * job.channel_stride;
  }
  const RunTaps<kRun> taps = run_taps<kRun>(job, ow);
  float sums[kItems][kRun] = {};
  std::uint32_t unit_d = od, unit_h = oh;
  const std::uint32_t rd = take(job.d.stride, unit_d), rh = take(job.h.stride, unit_h);
  std::int32_t id = std::int32_t(unit_d) + job.d.first_in[rd];
#pragma unroll 1
  for (std::int32_t kd = job.d.first_tap[rd]; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    if (std::uint32_t(id) >= job.d.in_count.value) continue;
    std::int32_t ih = std::int32_t(unit_h) + job.h.first_in[rh];
#pragma unroll 1
    for (std::int32_t kh = job.h.first_tap[rh]; kh < job.h.kernel; kh += job.h.tap_step, ih -= job.h.in_step) {
      if (std::uint32_t(ih) >= job.h.in_count.value) continue;
      const std::int32_t line = (id * std::int32_t(job.h.in_count.value) + ih) * std::int32_t(job.w.in_count.value);
      add_row<kRun, kItems>(job, taps, kd * job.tap_d + kh * job.tap_h + line, sources, sums);
    }
  }
  y += (job.n_begin + n) * job.y_n + (job.oc_begin + channel) * job.y_c + (job.d.out_begin + std::int64_t(od)) * job.y_d +
       (job.h.out_begin + std::int64_t(oh)) * job.y_h + (job.w.out_begin + std::int64_t(ow)) * job.y_w;
#pragma unroll
  for (int item = 0; item < kItems; ++item, y += job.y_c) {
    if (channel + item >= job.channels) break;
    const float added = bias == nullptr ? 0.0f : widen(bias[job.oc_begin + channel + item]);
    Pack<Value, kRun> run;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float sum = sums[item][j] + added;
      run.v[j] = Narrow<Value>::from(job.activation == Activation::kNone ? sum : finish(job.activation, job.slope, sum));
    }
    *reinterpret_cast<Pack<Value, kRun>*>(y) = run;
  }
}

constexpr int kRunItems = 4;  // channels of a lane: enough loads in flight, and enough outputs to share what a position costs

#define UPFOLD_INSTANTIATE_RUN(Value, Column, kRun) \
  template __global__ void col2im_runs_kernel<Value, Column, kRun, kRunItems>(const RowsJob, const Column*, const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_RUN(Value, Column, 4)                     \
  UPFOLD_INSTANTIATE_RUN(Value, Column, 2)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Value, typename Column, int kRun>
bool launch_runs(const Launch& launch, RowsJob& job, const void* columns, const void* bias, void* y) {
  if (job.vector < kRun || job.w.out_count.value % kRun != 0) return false;
  const std::int64_t runs = job.w.out_count.value / kRun, plane = runs * job.h.out_count.value;  // of factors below 2^30
  if (plane >= kMost || plane * job.d.out_count.value >= kMost || plane * job.d.out_count.value * job.samples.value >= kMost)
    return false;
  job.w.units = make_divisor(runs), job.positions = std::uint32_t(plane * job.d.out_count.value * job.samples.value);
  job.h.phases = job.d.phases = job.w.phases = make_divisor(1);
  const unsigned blocks = cut_joined(job, kRowThreads, kRunItems, 1);
  if (blocks == 0) return false;
  launch_kernel("col2im", col2im_runs_kernel<Value, Column, kRun, kRunItems>, launch, blocks, kRowThreads, job,
                static_cast<const Column*>(columns), static_cast<const Value*>(bias), static_cast<Value*>(y));
  return true;
}

}  // namespace

bool col2im_runs(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                 void* y) {
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name)    \
    return launch_runs<Value, Column, 4>(launch, job, columns, bias, y) || \
           launch_runs<Value, Column, 2>(launch, job, columns, bias, y);
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
