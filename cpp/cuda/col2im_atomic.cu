// col2im in scatter form: every column is added to its output by an atomic addition, so that the order of a sum, and with it its
// rounding, changes from run to run. It stands beside the gather form to be compared with it.
//
// Three passes over a block: its outputs are set to 0 (in y, or for 16-bit types in a float32 staging area); a warp adds 128
// neighbouring pixels of one row of columns, a lane every 32nd; the outputs get bias, activation and rounding.
#include "activation.cuh"
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256;
constexpr int kPixels = 128;  // of a warp

struct ScatterAxis {
  std::int32_t stride, dilation, offset, out_count;  // output = input * stride + offset + tap * dilation, all local to the block
};

// Where local outputs lie.
struct Target {
  std::int64_t n, c, d, h, w;
};

struct ScatterJob {
  ScatterAxis d, h, w;
  Divisor tiles, taps, channels, kernel_h, kernel_w, in_h, in_w, out_d, out_h, out_w;
  std::uint32_t warps, pixels, outputs;
  std::int64_t sample_stride, row_stride;
  Target to, y;
  std::int64_t oc_begin;
  Activation activation;
  float slope;
};

UPFOLD_DEVICE void add_atomic(float* to, float v) { atomicAdd(to, v); }
UPFOLD_DEVICE void add_atomic(double* to, double v) { atomicAdd(to, v); }
template <typename Real>
UPFOLD_DEVICE void add_atomic(Complex<Real>* to, Complex<Real> v) {
  atomicAdd(&to->re, v.re);
  atomicAdd(&to->im, v.im);
}

template <typename Total, typename Column>
__global__ void __launch_bounds__(kThreads) scatter_kernel(const ScatterJob job, const Column* columns, Total* to) {
  std::uint32_t rest = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (rest >= job.warps) return;
  const std::uint32_t first = take(job.tiles, rest) * kPixels + threadIdx.x % 32;
  std::uint32_t tap = take(job.taps, rest);
  const std::uint32_t oc = take(job.channels, rest), n = rest;
  const Column* row = columns + n * job.sample_stride + (std::int64_t(oc) * job.taps.value + tap) * job.row_stride;
  to += n * job.to.n + oc * job.to.c;
  const std::int32_t kw = std::int32_t(take(job.kernel_w, tap)), kh = std::int32_t(take(job.kernel_h, tap));
  const std::int32_t kd = std::int32_t(tap);
  for (std::uint32_t pixel = first; pixel < first + kPixels && pixel < job.pixels; pixel += 32) {
    std::uint32_t at = pixel;
    const std::int32_t ow = std::int32_t(take(job.in_w, at)) * job.w.stride + job.w.offset + kw * job.w.dilation;
    const std::int32_t oh = std::int32_t(take(job.in_h, at)) * job.h.stride + job.h.offset + kh * job.h.dilation;
    const std::int32_t od = std::int32_t(at) * job.d.stride + job.d.offset + kd * job.d.dilation;
    const bool inside = std::uint32_t(ow) < std::uint32_t(job.w.out_count) &&
                        std::uint32_t(oh) < std::uint32_t(job.h.out_count) && std::uint32_t(od) < std::uint32_t(job.d.out_count);
    if (inside) add_atomic(to + od * job.to.d + oh * job.to.h + ow * job.to.w, widen(row[pixel]));
  }
}

// The place of local output number `i` along the block's outputs, ow fastest.
struct OutputPlace {
  std::uint32_t n, oc, od, oh, ow;
};
UPFOLD_DEVICE OutputPlace output_place(const ScatterJob& job, std::uint32_t i) {
  OutputPlace at;
  at.ow = take(job.out_w, i), at.oh = take(job.out_h, i), at.od = take(job.out_d, i), at.oc = take(job.channels, i), at.n = i;
  return at;
}
UPFOLD_DEVICE std::int64_t offset_in(const Target& t, const OutputPlace& at) {
  return at.n * t.n + at.oc * t.c + at.od * t.d + at.oh * t.h + at.ow * t.w;
}

template <typename Total>
__global__ void __launch_bounds__(kThreads) clear_kernel(const ScatterJob job, Total* to) {
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i < job.outputs) to[offset_in(job.to, output_place(job, i))] = Total{};
}

// `from` is the staging area, or y itself.
template <typename Value, typename Total>
__global__ void __launch_bounds__(kThreads) finish_kernel(const ScatterJob job, const Total* from, const Value* bias, Value* y) {
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= job.outputs) return;
  const OutputPlace at = output_place(job, i);
  Total sum = from[offset_in(job.to, at)];
  if (bias != nullptr) add(sum, widen(bias[job.oc_begin + at.oc]));
  y[offset_in(job.y, at)] = Narrow<Value>::from(activate(job.activation, job.slope, sum));
}

#define UPFOLD_INSTANTIATE_TOTAL(Total) template __global__ void clear_kernel<Total>(const ScatterJob, Total*);
UPFOLD_INSTANTIATE_TOTAL(float)
UPFOLD_INSTANTIATE_TOTAL(double)
UPFOLD_INSTANTIATE_TOTAL(Complex<float>)
UPFOLD_INSTANTIATE_TOTAL(Complex<double>)

// The type of y; columns are in the type that its sums are kept in.
#define UPFOLD_SCATTER_TYPES(DO) \
  DO(kFloat32, float)            \
  DO(kFloat64, double)           \
  DO(kFloat16, __half)           \
  DO(kBFloat16, __nv_bfloat16)   \
  DO(kComplex64, Complex<float>) \
  DO(kComplex128, Complex<double>)
#define UPFOLD_INSTANTIATE(dtype, Value) \
  template __global__ void finish_kernel<Value, Sum<Value>>(const ScatterJob, const Sum<Value>*, const Value*, Value*);
UPFOLD_SCATTER_TYPES(UPFOLD_INSTANTIATE)
template __global__ void scatter_kernel<float, float>(const ScatterJob, const float*, float*);
template __global__ void scatter_kernel<double, double>(const ScatterJob, const double*, double*);
template __global__ void scatter_kernel<Complex<float>, Complex<float>>(const ScatterJob, const Complex<float>*, Complex<float>*);
template __global__ void scatter_kernel<Complex<double>, Complex<double>>(const ScatterJob, const Complex<double>*,
                                                                          Complex<double>*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>
#include <type_traits>

#include "columns.cuh"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;

ScatterAxis scatter_axis(const Axis& a, const Range& in, const Range& out) {
  const std::int64_t reach = a.in * a.stride + a.kernel * a.dilation + a.pad + a.out;
  require(reach <= kMost, "size ", a.in, " with stride ", a.stride, " and dilation ", a.dilation,
          "; the atomic col2im takes axes below 2^30");
  return {std::int32_t(a.stride), std::int32_t(a.dilation), std::int32_t(in.begin * a.stride - a.pad - out.begin),
          std::int32_t(length(out))};
}

Divisor count_divisor(std::int64_t count) {
  require(count < kMost, count, " elements; the atomic col2im takes blocks below 2^30");
  return make_divisor(std::max<std::int64_t>(count, 1));
}

ScatterJob scatter_job(const Problem& p, const ColumnBlock& block) {
  ScatterJob job{};
  job.d = scatter_axis(axis_d(p), block.in_d, block.out_d);
  job.h = scatter_axis(axis_h(p), block.in_h, block.out_h);
  job.w = scatter_axis(axis_w(p), block.in_w, block.out_w);
  const std::int64_t out_d = length(block.out_d), out_h = length(block.out_h), out_w = length(block.out_w);
  const std::int64_t channels = length(block.oc), samples = length(block.n), taps = kernel_taps(p);
  const std::int64_t pixels = length(block.in_d) * length(block.in_h) * length(block.in_w);
  const std::int64_t tiles = ceil_div(pixels, kPixels), warps = samples * channels * taps * tiles;
  const std::int64_t outputs = samples * channels * out_d * out_h * out_w;
  require(warps < kMost && outputs < kMost, warps, " warps for ", outputs, " outputs; the atomic col2im takes less than 2^30");
  job.warps = std::uint32_t(warps), job.pixels = std::uint32_t(pixels), job.outputs = std::uint32_t(outputs);
  job.tiles = count_divisor(tiles), job.taps = count_divisor(taps), job.channels = count_divisor(channels);
  job.kernel_h = count_divisor(p.kernel_h), job.kernel_w = count_divisor(p.kernel_w);
  job.in_h = count_divisor(length(block.in_h)), job.in_w = count_divisor(length(block.in_w));
  job.out_d = count_divisor(out_d), job.out_h = count_divisor(out_h), job.out_w = count_divisor(out_w);
  job.sample_stride = block.sample_stride, job.row_stride = block.row_stride, job.oc_begin = block.oc.begin;
  job.y = {p.y.n, p.y.c, p.y.d, p.y.h, p.y.w};
  job.activation = p.activation, job.slope = p.activation_slope;
  return job;
}

template <typename Value>
void scatter(const Launch& launch, const Problem& p, const ColumnBlock& block, const ScatterOperands& operands) {
  using Total = Sum<Value>;
  constexpr bool kStaged = !std::is_same<Value, Total>::value;
  ScatterJob job = scatter_job(p, block);
  if (job.outputs == 0) return;
  Value* const y = static_cast<Value*>(operands.y) + block.n.begin * p.y.n + block.oc.begin * p.y.c + block.out_d.begin * p.y.d +
                   block.out_h.begin * p.y.h + block.out_w.begin * p.y.w;
  job.to = job.y;
  if (kStaged) {
    const std::int64_t row = length(block.out_w), plane = row * length(block.out_h), volume = plane * length(block.out_d);
    job.to = {volume * length(block.oc), volume, plane, row, 1};
  }
  Total* const to = kStaged ? static_cast<Total*>(operands.staging) : reinterpret_cast<Total*>(y);
  const DeviceScope scope(launch.device);
  const unsigned output_blocks = unsigned(ceil_div(job.outputs, kThreads));
  launch_kernel("col2im_atomic", clear_kernel<Total>, launch, output_blocks, kThreads, job, to);
  if (job.warps > 0) {
    launch_kernel("col2im_atomic", scatter_kernel<Total, Total>, launch, unsigned(ceil_div(job.warps, kThreads / 32)), kThreads,
                  job, static_cast<const Total*>(operands.columns), to);
  }
  if (kStaged || operands.bias != nullptr || p.activation != Activation::kNone) {
    launch_kernel("col2im_atomic", finish_kernel<Value, Total>, launch, output_blocks, kThreads, job,
                  static_cast<const Total*>(to), static_cast<const Value*>(operands.bias), y);
  }
}

}  // namespace

void col2im_atomic(const Launch& launch, const Problem& p, const ColumnBlock& block, const ScatterOperands& operands) {
  require_block(p, block);
  require_outputs(p, block);
  switch (p.dtype) {
#define UPFOLD_CASE(dtype, Value) \
  case Dtype::dtype:              \
    return scatter<Value>(launch, p, block, operands);
    UPFOLD_SCATTER_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  }
  throw InvalidArgument(concat("dtype ", int(p.dtype), "; no such dtype"));
}

}  // namespace upfold::cuda
#endif
