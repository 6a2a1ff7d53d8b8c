// col2im of long strides on w (beyond kMostPhases), where y is planar: see rows.cuh. Neighbouring outputs there read rows of
// columns that lie a whole map apart, and neighbouring pixels of one row reach outputs a stride apart: whoever follows one of
// both touches a sector of the other for each value. So a block takes a square of units and phases: it sums with neighbouring
// lanes in neighbouring pixels, turns the sums in shared memory, and stores with neighbouring lanes in neighbouring outputs. Taps
// are summed in ascending order.
#include "activation.cuh"
#include "rows.cuh"
#include "taps.cuh"

namespace upfold::cuda {

constexpr int kSquare = 32, kSquareRows = kSquare / kWarps;  // units and phases of a block; of them, those of a warp

struct TurnedJob {
  AxisTaps<std::int32_t> d, h;
  Divisor phase_tiles, unit_tiles, channels, out_h, out_d;  // counted so, and then through samples
  std::int32_t stride, kernel, in_begin, in_count, first_unit;
  std::int32_t origin, out_count;  // of w: the output of unit 0 and phase 0, from the block's first one on
  std::int32_t in_h;               // of the block
  std::int64_t sample_stride, channel_stride, tap_d, tap_h, tap_w;
  std::int64_t y_n, y_c, y_d, y_h;
  Activation activation;
  float slope;
};

template <typename Value, typename Column>
__global__ void __launch_bounds__(kRowThreads) col2im_turned_kernel(const TurnedJob job, const Column* __restrict__ columns,
                                                                    const Value* __restrict__ bias, Value* __restrict__ y) {
  __shared__ float turned[kSquare][kSquare + 1];
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_phase = std::int32_t(take(job.phase_tiles, rest)) * kSquare;
  const std::int32_t first_unit = job.first_unit + std::int32_t(take(job.unit_tiles, rest)) * kSquare;
  const std::uint32_t channel = take(job.channels, rest), oh = take(job.out_h, rest), od = take(job.out_d, rest), n = rest;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  const Column* const source = columns + n * job.sample_stride + channel * job.channel_stride;
  const std::int32_t first_in = first_unit + lane - job.in_begin;
  float sums[kSquareRows] = {};
  const TapRun<std::int32_t> run_d = taps_of_output(job.d, std::int32_t(od) + job.d.out_begin),
                             run_h = taps_of_output(job.h, std::int32_t(oh) + job.h.out_begin);
  std::int32_t id = run_d.first_in;
  for (std::int32_t kd = run_d.first_tap; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    if (id < job.d.in_begin || id >= job.d.in_end) continue;
    std::int32_t ih = run_h.first_in;
    for (std::int32_t kh = run_h.first_tap; kh < job.h.kernel; kh += job.h.tap_step, ih -= job.h.in_step) {
      if (ih < job.h.in_begin || ih >= job.h.in_end) continue;
      const std::int64_t line = std::int64_t(id - job.d.in_begin) * job.in_h + (ih - job.h.in_begin);
      const Column* const rows = source + kd * job.tap_d + kh * job.tap_h + line * job.in_count;
      std::int32_t iw = first_in;
      for (std::int32_t tap = 0; tap < job.kernel; tap += job.stride, --iw) {
        Column values[kSquareRows];
#pragma unroll
        for (int i = 0; i < kSquareRows; ++i) {
          const std::int32_t phase = first_phase + i * kWarps + warp;
          const bool exists = phase < job.stride && tap + phase < job.kernel && std::uint32_t(iw) < std::uint32_t(job.in_count);
          values[i] = exists ? rows[(tap + phase) * job.tap_w + iw] : Column{};
        }
#pragma unroll
        for (int i = 0; i < kSquareRows; ++i) sums[i] += widen(values[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSquareRows; ++i) turned[i * kWarps + warp][lane] = sums[i];
  __syncthreads();  // the sums are there
  const float added = bias == nullptr ? 0.0f : widen(bias[channel]);
  Value* const to = y + n * job.y_n + channel * job.y_c + od * job.y_d + oh * job.y_h;
#pragma unroll
  for (int i = 0; i < kSquareRows; ++i) {
    const std::int32_t unit = i * kWarps + warp, phase = first_phase + lane;
    const std::int32_t ow = (first_unit + unit) * job.stride + phase + job.origin;
    if (phase >= job.stride || std::uint32_t(ow) >= std::uint32_t(job.out_count)) continue;
    const float sum = turned[lane][unit] + added;
    to[ow] = Narrow<Value>::from(job.activation == Activation::kNone ? sum : finish(job.activation, job.slope, sum));
  }
}

#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  template __global__ void col2im_turned_kernel<Value, Column>(const TurnedJob, const Column*, const Value*, Value*);
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

// False where sizes are beyond 32 bits, or neighbours of a row do not follow one another.
bool make_turned_job(const Problem& p, const ColumnBlock& block, const ColumnStrides& strides, TurnedJob& job,
                     std::int64_t& blocks) {
  if (p.stride_w <= kMostPhases || p.dilation_w != 1 || (p.y.w != 1 && p.out_w > 1)) return false;
  const std::int64_t first = block.out_w.begin + p.pad_w, last = block.out_w.end - 1 + p.pad_w;
  const std::int64_t units = last / p.stride_w - first / p.stride_w + 1;
  const std::int64_t largest[] = {last + p.stride_w * kSquare, p.kernel_w + p.stride_w, p.in_d, p.in_h, p.in_w, p.out_d, p.out_h};
  for (const std::int64_t size : largest)
    if (size >= kMost) return false;
  if (!axis_fits(axis_d(p), kMost) || !axis_fits(axis_h(p), kMost)) return false;
  const std::int64_t counts[] = {ceil_div(p.stride_w, std::int64_t(kSquare)),
                                 ceil_div(units, std::int64_t(kSquare)),
                                 length(block.oc),
                                 length(block.out_h),
                                 length(block.out_d),
                                 length(block.n)};
  blocks = 1;
  for (const std::int64_t count : counts) {
    if (count >= kMost || blocks * count >= kMost) return false;
    blocks *= count;
  }
  job.d = axis_taps<std::int32_t>(axis_d(p), block.in_d, block.out_d);
  job.h = axis_taps<std::int32_t>(axis_h(p), block.in_h, block.out_h);
  job.phase_tiles = make_divisor(counts[0]), job.unit_tiles = make_divisor(counts[1]), job.channels = make_divisor(counts[2]);
  job.out_h = make_divisor(counts[3]), job.out_d = make_divisor(counts[4]);
  job.stride = std::int32_t(p.stride_w), job.kernel = std::int32_t(p.kernel_w);
  job.in_begin = std::int32_t(block.in_w.begin), job.in_count = std::int32_t(length(block.in_w));
  job.first_unit = std::int32_t(first / p.stride_w);
  job.origin = std::int32_t(-first), job.out_count = std::int32_t(length(block.out_w));
  job.in_h = std::int32_t(length(block.in_h));
  job.sample_stride = block.sample_stride, job.channel_stride = strides.channel;
  job.tap_d = strides.tap_d, job.tap_h = strides.tap_h, job.tap_w = strides.tap_w;
  job.y_n = p.y.n, job.y_c = p.y.c, job.y_d = p.y.d, job.y_h = p.y.h;
  job.activation = p.activation, job.slope = p.activation_slope;
  return true;
}

}  // namespace

bool col2im_turned(const Launch& launch, const Problem& p, const ColumnBlock& block, const ColumnStrides& strides,
                   Dtype column_dtype, const void* columns, const void* bias, void* y) {
  TurnedJob job{};
  std::int64_t blocks = 0;
  if (!make_turned_job(p, block, strides, job, blocks)) return false;
  const std::int64_t first =
      block.n.begin * p.y.n + block.oc.begin * p.y.c + block.out_d.begin * p.y.d + block.out_h.begin * p.y.h + block.out_w.begin;
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                                                                      \
  if (p.dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) {                                                      \
    launch_kernel("col2im", col2im_turned_kernel<Value, Column>, launch, unsigned(blocks), kRowThreads, job,                     \
                  static_cast<const Column*>(columns),                                                                           \
                  bias == nullptr ? nullptr : static_cast<const Value*>(bias) + block.oc.begin, static_cast<Value*>(y) + first); \
    return true;                                                                                                                 \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
