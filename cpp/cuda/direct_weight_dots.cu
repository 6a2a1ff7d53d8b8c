// The direct method for the adjoint in w of few positions, in one launch.
//
// A block owns kDotRows input channels of a group times kDotTaps neighbouring taps of one row of the kernel, of one output
// channel, and all positions, counted through all samples. A thread has every kDotThreads-th position and a sum of its own for
// each of these weights; the sums of a block are added up at the end, in one order. Values are read where they lie, x in runs of
// a warp's positions, and none passes through shared memory: a layer of a few hundred positions takes the time of one read, where
// tiles that share theirs and parts that a second launch adds up take two or three times that.
#include "direct_weight.cuh"
#include "lane_sums.cuh"

namespace upfold::cuda {

constexpr int kDotThreads = 128, kDotRows = 4, kDotTaps = 4;

struct WeightDotsJob {
  WeightJob job;
  Divisor tap_groups, tap_rows, channels, row_tiles;  // of a row of the kernel; of the kernel; of a group
};

template <typename Value>
__global__ void __launch_bounds__(kDotThreads) weight_dots_kernel(const WeightDotsJob dots, const Value* __restrict__ x,
                                                                  const Value* __restrict__ y, Value* __restrict__ w) {
  take_turn();
  using Total = Sum<Value>;
  constexpr int kCount = kDotRows * kDotTaps, kWarps = kDotThreads / 32;
  __shared__ Total exchange[kWarps * kCount];
  const WeightJob& job = dots.job;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_tap = std::int32_t(take(dots.tap_groups, rest)) * kDotTaps;
  std::uint32_t tap_row = take(dots.tap_rows, rest);
  const std::uint32_t oc = take(dots.channels, rest);
  const std::int32_t row0 = std::int32_t(take(dots.row_tiles, rest)) * kDotRows;
  const std::int64_t group = rest;
  const std::int32_t kh = std::int32_t(take(job.kernel_h, tap_row)), kd = std::int32_t(tap_row);
  const std::int32_t rows = std::int32_t(job.rows) - row0, taps = std::int32_t(job.kernel_w.value) - first_tap;
  const Value* const planes = x + (group * job.rows + row0) * job.x_c;
  const Value* const plane = y + (group * dots.channels.value + oc) * job.y_c;
  Total sums[kCount] = {};
#pragma unroll 4
  for (std::uint32_t at = threadIdx.x; at < job.positions; at += kDotThreads) {
    const Position p = position_of(job, at, job.positions);
    const std::int32_t od = p.o[0] + kd * job.dilation[0], oh = p.o[1] + kh * job.dilation[1],
                       ow = p.o[2] + first_tap * job.dilation[2];
    const bool inside = std::uint32_t(od) < std::uint32_t(job.out[0]) && std::uint32_t(oh) < std::uint32_t(job.out[1]);
    const Value* const of = plane + p.y + od * job.y_axis[0] + oh * job.y_axis[1] + ow * job.y_axis[2];
    Value a[kDotRows], b[kDotTaps];
#pragma unroll
    for (int r = 0; r < kDotRows; ++r) a[r] = r < rows ? planes[p.x + r * job.x_c] : Value{};
#pragma unroll
    for (int t = 0; t < kDotTaps; ++t) {
      const std::int32_t moved = t * job.dilation[2];
      b[t] = t < taps && inside && std::uint32_t(ow + moved) < std::uint32_t(job.out[2]) ? of[moved * job.y_axis[2]] : Value{};
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) add_product(sums[i], widen(a[i / kDotTaps]), widen(b[i % kDotTaps]));
  }
  const Total sum = sum_of_block<kWarps>(sums, exchange);
  const std::int32_t own_row = std::int32_t(threadIdx.x) / kDotTaps, own_tap = std::int32_t(threadIdx.x) % kDotTaps;
  if (threadIdx.x < kCount && own_row < rows && own_tap < taps)
    w[(group * job.rows + row0 + own_row) * job.w_n + oc * job.w_c + kd * job.w_axis[0] + kh * job.w_axis[1] +
      (first_tap + own_tap) * job.w_axis[2]] = Narrow<Value>::from(sum);
}

#define UPFOLD_DOTS_TYPES(DO) \
  DO(kFloat32, float)         \
  DO(kFloat64, double)        \
  DO(kFloat16, __half)        \
  DO(kBFloat16, __nv_bfloat16)

#define UPFOLD_INSTANTIATE(dtype, Value) \
  template __global__ void weight_dots_kernel<Value>(const WeightDotsJob, const Value*, const Value*, Value*);
UPFOLD_DOTS_TYPES(UPFOLD_INSTANTIATE)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

WeightDotsJob dots_job(const Problem& p) {
  WeightDotsJob dots{weight_job(p), {}, {}, {}, {}};
  dots.tap_groups = make_divisor(ceil_div(p.kernel_w, std::int64_t(kDotTaps)));
  dots.tap_rows = make_divisor(p.kernel_d * p.kernel_h), dots.channels = make_divisor(out_channels_per_group(p));
  dots.row_tiles = make_divisor(ceil_div(in_channels_per_group(p), std::int64_t(kDotRows)));
  return dots;
}

template <typename Value>
void run(const Launch& launch, const Problem& p, const DirectOperands& operands) {
  launch_in_turn("direct", weight_dots_kernel<Value>, launch, unsigned(dots_blocks(p)), kDotThreads, dots_job(p),
                 static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.y), static_cast<Value*>(operands.w));
}

}  // namespace

std::int64_t dots_blocks(const Problem& p) {
  if (p.dtype == Dtype::kComplex64 || p.dtype == Dtype::kComplex128) return 0;
  return ceil_div(p.kernel_w, std::int64_t(kDotTaps)) * p.kernel_d * p.kernel_h * out_channels_per_group(p) *
         ceil_div(in_channels_per_group(p), std::int64_t(kDotRows)) * p.groups;
}

void dots_run(const Launch& launch, const Problem& p, const DirectOperands& operands) {
  switch (p.dtype) {
#define UPFOLD_CASE(dtype, Value) \
  case Dtype::dtype:              \
    return run<Value>(launch, p, operands);
    UPFOLD_DOTS_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
    default:
      require(false, "complex numbers have other tiles");
  }
}

}  // namespace upfold::cuda
#endif
