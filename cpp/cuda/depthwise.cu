// The depthwise method (one input channel in each group): what `config` chooses between, and the kernel that takes every stride,
// dilation and layout. Its threads own outputs of one column and one phase, which have the same taps; lanes run along the fastest
// axis of y, channels or columns. Choice 0 is that of rows whose neighbours lie together, or of vectors of channels
// (depthwise_last.cuh); choice 1 takes everything.
#include "depthwise.cuh"

namespace upfold::cuda {

constexpr int kGeneralRows = 8;  // outputs of a thread, one above the other and of one phase

template <typename Value>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_general_kernel(const DepthwiseJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                             const Value* __restrict__ bias, Value* __restrict__ y) {
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (number >= job.threads) return;
  const DepthwisePlace at = depthwise_place(job, number);
  const AxisTaps<std::int32_t>&d = job.axis[0], &h = job.axis[1], &v = job.axis[2];
  // Row r is output at.phase + (tile * rows + r) * stride: all have the taps of the first, sources one apart.
  const std::int32_t oh0 = at.phase + at.tile * kGeneralRows * h.stride;
  const TapRun<std::int32_t> run_h = taps_of_output(h, oh0), run_w = taps_of_output(v, at.column);
  const Value* const taps = w + weight_offset(job, at.channel);
  const Value* const source = x + plane_offset(job, at);
  float sums[kGeneralRows] = {};
  DepthTaps depth = depth_taps(job, at.depth);
  for (; depth.tap < d.kernel; depth.tap += d.tap_step, depth.source -= d.in_step) {
    if (!inside(depth.source, d.in_end)) continue;
    std::int32_t ih = run_h.first_in;
    for (std::int32_t kh = run_h.first_tap; kh < h.kernel; kh += h.tap_step, ih -= h.in_step) {
      std::int32_t iw = run_w.first_in;
      for (std::int32_t kw = run_w.first_tap; kw < v.kernel; kw += v.tap_step, iw -= v.in_step) {
        if (!inside(iw, v.in_end)) continue;
        const float weight = widen(taps[depth.tap * job.w.axis[0] + kh * job.w.axis[1] + kw * job.w.axis[2]]);
        const Value* const from = source + (depth.source * job.x.axis[0] + ih * job.x.axis[1] + iw * job.x.axis[2]);
#pragma unroll
        for (int r = 0; r < kGeneralRows; ++r) {
          if (inside(ih + r, h.in_end)) add_product(sums[r], widen(from[r * job.x.axis[1]]), weight);
        }
      }
    }
  }
  const float shift = bias == nullptr ? 0.0f : widen(bias[at.channel]);
  Value* const to = y + (at.sample * job.y.n + at.channel * job.y.c + at.depth * job.y.axis[0] + at.column * job.y.axis[2]);
#pragma unroll
  for (int r = 0; r < kGeneralRows; ++r) {
    const std::int32_t oh = oh0 + r * h.stride;
    if (oh < h.out_count) to[oh * job.y.axis[1]] = Narrow<Value>::from(finish(job.activation, job.slope, sums[r] + shift));
  }
}

// packed[tap][channel]; one element a thread.
struct DepthwisePackJob {
  Divisor channels, multiplier, kernel_h, kernel_w;
  DepthwiseStrides w;
  std::uint32_t elements;
};

template <typename Value>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_pack_kernel(const DepthwisePackJob job, const Value* __restrict__ w, Value* __restrict__ packed) {
  const std::uint32_t element = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (element >= job.elements) return;
  std::uint32_t tap = element, ic = take(job.channels, tap);
  const std::uint32_t oc = take(job.multiplier, ic), kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
  packed[element] = w[std::int32_t(ic) * job.w.n + std::int32_t(oc) * job.w.c + std::int32_t(tap) * job.w.axis[0] +
                      std::int32_t(kh) * job.w.axis[1] + std::int32_t(kw) * job.w.axis[2]];
}

#define UPFOLD_MAKE_GENERAL(dtype, Value)                                                              \
  template __global__ void depthwise_pack_kernel<Value>(const DepthwisePackJob, const Value*, Value*); \
  template __global__ void depthwise_general_kernel<Value>(const DepthwiseJob, const Value*, const Value*, const Value*, Value*);
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE_GENERAL)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

DepthwiseStrides narrow_strides(const Strides& s) {
  return {std::int32_t(s.n), std::int32_t(s.c), {std::int32_t(s.d), std::int32_t(s.h), std::int32_t(s.w)}};
}

// The largest offset of a tensor.
std::int64_t reach(const Strides& s, std::int64_t n, std::int64_t c, std::int64_t d, std::int64_t h, std::int64_t w) {
  return (n - 1) * s.n + (c - 1) * s.c + (d - 1) * s.d + (h - 1) * s.h + (w - 1) * s.w;
}

}  // namespace

Problem depthwise_plane(const Problem& p) {
  Problem q = p;
  const auto trivial = [](const Axis& a) { return a.in == 1 && a.out == 1 && a.kernel == 1 && a.pad == 0; };
  if (!trivial(axis_d(p)) || !trivial(axis_h(p)) || p.batch == 1) return q;
  q.in_h = q.out_h = p.batch, q.stride_h = q.dilation_h = 1, q.pad_h = 0, q.batch = 1;
  q.x.h = p.x.n, q.y.h = p.y.n, q.x.n = q.y.n = 0;
  return q;
}

std::int64_t depthwise_packed_bytes(const Problem& p) { return p.out_channels * kernel_taps(p) * element_bytes(p.dtype); }

Problem depthwise_pack(const Launch& launch, const Problem& p, const void* w, void* packed) {
  const std::int64_t elements = p.out_channels * kernel_taps(p);
  const DepthwisePackJob job{make_divisor(p.out_channels), make_divisor(out_channels_per_group(p)),
                             make_divisor(p.kernel_h),     make_divisor(p.kernel_w),
                             narrow_strides(p.w),          std::uint32_t(elements)};
  const unsigned blocks = unsigned(ceil_div(elements, kDepthwiseThreads));
  with_value(p, [&](auto value) {
    using Value = decltype(value);
    launch_kernel("depthwise", depthwise_pack_kernel<Value>, launch, blocks, kDepthwiseThreads, job, static_cast<const Value*>(w),
                  static_cast<Value*>(packed));
  });
  Problem q = p;
  q.w.w = p.out_channels, q.w.h = p.kernel_w * q.w.w, q.w.d = p.kernel_h * q.w.h;
  q.w.n = out_channels_per_group(p), q.w.c = 1;
  return q;
}

bool depthwise_aligned(const Problem& p, const Strides& s, std::int64_t width, const void* tensor, std::int64_t bytes) {
  const std::int64_t sizes = (s.n | s.c | s.d | s.h | width) * element_bytes(p.dtype);
  return sizes % bytes == 0 && reinterpret_cast<std::uintptr_t>(tensor) % std::uintptr_t(bytes) == 0;
}

bool depthwise_by_four(const Problem& p, const void* y, const void* w) {
  const std::int64_t of_y = p.y.n | p.y.c | p.y.d | p.y.h | p.stride_w | p.pad_w | p.out_w;
  const std::int64_t of_w = p.w.n | p.w.c | p.w.d | p.w.h | p.kernel_w;
  const auto addresses = reinterpret_cast<std::uintptr_t>(y) | reinterpret_cast<std::uintptr_t>(w);
  return (of_y | of_w) % 4 == 0 && addresses % std::uintptr_t(4 * element_bytes(p.dtype)) == 0;
}

DepthwiseJob depthwise_job(const Problem& p) {
  DepthwiseJob job{};
  job.axis[0] = axis_taps(axis_d(p)), job.axis[1] = axis_taps(axis_h(p)), job.axis[2] = axis_taps(axis_w(p));
  job.x = narrow_strides(p.x), job.w = narrow_strides(p.w), job.y = narrow_strides(p.y);
  job.columns = job.phases = job.tiles = job.depth = make_divisor(1);
  job.channels = make_divisor(p.out_channels), job.multiplier = make_divisor(out_channels_per_group(p));
  job.stride_w = make_divisor(p.stride_w);
  job.activation = p.activation, job.slope = p.activation_slope;
  return job;
}

namespace {

DepthwiseJob general_job(const Problem& p) {
  DepthwiseJob job = depthwise_job(p);
  job.lanes_are_channels = p.y.c == 1;
  job.columns = make_divisor(p.out_w), job.phases = make_divisor(std::min(p.stride_h, p.out_h));
  job.tiles = make_divisor(ceil_div(ceil_div(p.out_h, p.stride_h), kGeneralRows)), job.depth = make_divisor(p.out_d);
  job.threads = std::uint32_t(depthwise_threads(job, p.batch));
  return job;
}

template <typename Value>
void general(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  const DepthwiseJob job = general_job(p);
  launch_kernel("depthwise", depthwise_general_kernel<Value>, launch, unsigned(ceil_div(job.threads, kDepthwiseThreads)),
                kDepthwiseThreads, job, static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.w),
                static_cast<const Value*>(operands.bias), static_cast<Value*>(operands.y));
}

// Whether choice 0 is that of whole vectors of channels, with choice 1 for operands that are not aligned.
bool lasts(const Problem& p) {
  if (p.op == Operator::kConv) return !depthwise_input_special(p) && depthwise_last_input_fits(p);
  return p.op == Operator::kConvTranspose && !depthwise_rows_fits(p) && depthwise_last_vectors(p);
}

// Whether the general kernels have lanes along channels.
bool along_channels(const Problem& p) { return (p.op == Operator::kConv ? p.x.c : p.y.c) == 1; }

void transposed(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, bool special) {
  if (special) return depthwise_rows(launch, p, operands);
  return with_value(p, [&](auto value) { return general<decltype(value)>(launch, p, operands); });
}

// Whether the problem can be stated in 32 bits.
bool stated(const Problem& p) {
  if (p.groups != p.in_channels || element_bytes(p.dtype) > 4) return false;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    if (!axis_fits(a, kDepthwiseMost)) return false;
  }
  if (p.batch == 0) return true;
  const std::int64_t most = std::max({reach(p.x, p.batch, p.in_channels, p.in_d, p.in_h, p.in_w),
                                      reach(p.w, p.in_channels, out_channels_per_group(p), p.kernel_d, p.kernel_h, p.kernel_w),
                                      reach(p.y, p.batch, p.out_channels, p.out_d, p.out_h, p.out_w)});
  const std::int64_t counts[] = {in_pixels(p), out_pixels(p), kernel_taps(p)};
  for (const std::int64_t count : counts) {
    if (count > kDepthwiseMost / (p.batch * p.out_channels)) return false;
  }
  return most <= kDepthwiseMost;
}

}  // namespace

bool depthwise_fits(const Problem& p, int config) {
  if (config < 0 || config > 1 || !stated(p)) return false;
  if (p.batch == 0) return true;
  const Problem q = depthwise_plane(p);
  if (p.op == Operator::kConvTransposeWeight) return config == 1 || depthwise_weight_special(q);
  if (p.op == Operator::kConv) return config == 1 || depthwise_input_special(q) || lasts(q);
  if (config == 0 && depthwise_rows_fits(q)) return true;
  return (config == 1 || lasts(q)) && depthwise_threads(general_job(q), q.batch) <= kDepthwiseMost;
}

std::int64_t depthwise_workspace_bytes(const Problem& p, int config) {
  if (p.batch == 0) return 0;
  if (p.op == Operator::kConvTransposeWeight) return depthwise_weight_bytes(depthwise_plane(p), config == 0);
  const bool packs = config == 1 ? along_channels(p) : lasts(depthwise_plane(p));
  return packs ? depthwise_packed_bytes(p) : 0;
}

void depthwise(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, int config) {
  if (p.batch == 0) return;
  require(depthwise_fits(p, config), "config = ", config, "; it does not fit this problem");
  const DeviceScope scope(launch.device);
  Problem q = depthwise_plane(p);
  if (p.op == Operator::kConvTransposeWeight) return depthwise_weight(launch, q, operands, config == 0);
  if (config == 0 && lasts(q)) {
    const bool ran = p.op == Operator::kConv ? depthwise_last_input(launch, q, operands) : depthwise_last(launch, q, operands);
    if (ran) return;
    config = 1;
  }
  DepthwiseOperands taken = operands;
  if (config == 1 && along_channels(q)) {
    q = depthwise_pack(launch, q, operands.w, operands.workspace);
    taken.w = operands.workspace;
  }
  if (p.op == Operator::kConv) return depthwise_input(launch, q, taken, config == 0);
  transposed(launch, q, taken, config == 0);
}

}  // namespace upfold::cuda
#endif
