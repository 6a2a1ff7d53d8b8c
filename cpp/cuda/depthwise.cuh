// What the depthwise kernels share: how a problem with one input channel in each group is stated in 32 bits, and what of it a
// thread owns.
#pragma once

#include "activation.cuh"
#include "divide.cuh"
#include "taps.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kDepthwiseThreads = 256;

struct DepthwiseStrides {
  std::int32_t n, c, axis[3];
};

struct DepthwiseJob {
  AxisTaps<std::int32_t> axis[3];
  DepthwiseStrides x, w, y;
  // A thread's number, fastest first: channel where lanes run along channels, column, phase, tile of rows, depth, channel,
  // sample.
  Divisor columns, phases, tiles, depth, channels;
  Divisor multiplier;  // output channels of an input channel
  Divisor stride_w;
  std::uint32_t threads;
  std::int32_t first_unit;  // of the H axis: that of output row 0
  bool lanes_are_channels;
  std::int32_t tiles_of_run;  // tiles of rows that a thread takes one after the other
  std::int32_t lanes;         // that share out the columns of a kernel, four each: a power of two
  bool vectors;               // runs of outputs start at multiples of their size
  Activation activation;
  float slope;
};

struct DepthwisePlace {
  std::int32_t column, phase, tile, depth, channel, sample;
};

UPFOLD_DEVICE DepthwisePlace depthwise_place(const DepthwiseJob& job, std::uint32_t number) {
  DepthwisePlace at;
  if (job.lanes_are_channels) at.channel = std::int32_t(take(job.channels, number));
  at.column = std::int32_t(take(job.columns, number)), at.phase = std::int32_t(take(job.phases, number));
  at.tile = std::int32_t(take(job.tiles, number)), at.depth = std::int32_t(take(job.depth, number));
  if (!job.lanes_are_channels) at.channel = std::int32_t(take(job.channels, number));
  at.sample = std::int32_t(number);
  return at;
}

UPFOLD_DEVICE bool inside(std::int32_t at, std::int32_t size) { return std::uint32_t(at) < std::uint32_t(size); }

// The weight of an output channel.
UPFOLD_DEVICE std::int32_t weight_offset(const DepthwiseJob& job, std::int32_t channel) {
  std::uint32_t ic = std::uint32_t(channel);
  const std::int32_t oc = std::int32_t(take(job.multiplier, ic));
  return std::int32_t(ic) * job.w.n + oc * job.w.c;
}

// The plane of x that an output channel reads.
UPFOLD_DEVICE std::int32_t plane_offset(const DepthwiseJob& job, const DepthwisePlace& at) {
  return at.sample * job.x.n + std::int32_t(divide(job.multiplier, std::uint32_t(at.channel))) * job.x.c;
}

// kCount neighbours of which bit i of the mask says whether number i is there; the others are 0.
template <int kCount, typename Value>
UPFOLD_DEVICE void load_row(const Value* __restrict__ from, std::uint32_t mask, float (&row)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) row[i] = mask >> i & 1 ? widen(from[i]) : 0.0f;
}

// Four of them; where kVectors, all or none are there and they start at a multiple of their size. They are widened behind the
// load, so that the loads of several rows are under way together.
template <bool kVectors, typename Value>
UPFOLD_DEVICE void load_four(const Value* __restrict__ from, std::uint32_t mask, float (&row)[4]) {
  if constexpr (kVectors) {
    struct alignas(4 * sizeof(Value)) Four {
      Value v[4];
    };
    Four four{};
    if (mask != 0) four = *reinterpret_cast<const Four*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i] = widen(four.v[i]);
  } else {
    load_row(from, mask, row);
  }
}

// Bit i: whether first + i is a position of the axis.
template <int kCount>
UPFOLD_DEVICE std::uint32_t positions_mask(std::int32_t first, std::int32_t size) {
  std::uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) mask |= inside(first + i, size) ? 1u << i : 0u;
  return mask;
}

// The taps of the D axis, one after the other: tap, source position; empty where out of range.
struct DepthTaps {
  std::int32_t tap, source;
};
UPFOLD_DEVICE DepthTaps depth_taps(const DepthwiseJob& job, std::int32_t depth) {
  const AxisTaps<std::int32_t>& a = job.axis[0];
  if (a.kernel == 1 && a.stride == 1) return {0, depth + a.pad};
  const TapRun<std::int32_t> run = taps_of_output(a, depth);
  return {run.first_tap, run.first_in};
}

// Bias and activation of all sums of a thread, which is asked for once.
template <int kCount>
UPFOLD_DEVICE void finish_all(const DepthwiseJob& job, float bias, float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += bias;
  if (job.activation == Activation::kNone) return;
  if (job.activation == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = sums[i] < 0.0f ? 0.0f : sums[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = activate_called(job.activation, job.slope, sums[i]);
}

#define UPFOLD_DEPTHWISE_TYPES(DO) DO(kFloat32, float) DO(kFloat16, __half) DO(kBFloat16, __nv_bfloat16)

#ifndef __CUDACC_RTC__
struct Launch;
struct DepthwiseOperands;
constexpr std::int64_t kDepthwiseMost = std::int64_t(1) << 30;  // of any size, offset or count

// A problem of one axis with its samples as rows, which share a weight; every other problem as it is.
Problem depthwise_plane(const Problem& p);
// What all operators fill in alike, and how many threads it makes of its divisors.
DepthwiseJob depthwise_job(const Problem& p);
inline std::int64_t depthwise_threads(const DepthwiseJob& job, std::int64_t batch) {
  double count = double(batch);  // beyond 64 bits at worst
  for (const Divisor* by : {&job.columns, &job.phases, &job.tiles, &job.depth, &job.channels}) count *= by->value;
  return count <= double(kDepthwiseMost) ? std::int64_t(count) : kDepthwiseMost + 1;
}
// body(Value{}) for the type of a problem's elements.
template <typename Body>
auto with_value(const Problem& p, Body body) -> decltype(body(float{})) {
  if (p.dtype == Dtype::kFloat32) return body(float{});
  return p.dtype == Dtype::kFloat16 ? body(__half{}) : body(__nv_bfloat16{});
}
// Whether strides and kernels of the H and W axes are these.
inline bool has_kernel(const Problem& p, std::int64_t stride_h, std::int64_t kernel_h, std::int64_t stride, std::int64_t kernel) {
  return p.stride_h == stride_h && p.kernel_h == kernel_h && p.stride_w == stride && p.kernel_w == kernel;
}
// Rows of w neighbours that lie together.
inline bool together(std::int64_t stride, std::int64_t size) { return stride == 1 || size == 1; }
inline bool dense_taps(const Axis& a) { return a.dilation == 1 || a.kernel == 1; }
// What all but the general kernels want.
inline bool depthwise_dense(const Problem& p) {
  const bool rows = together(p.x.w, p.in_w) && together(p.y.w, p.out_w) && together(p.w.w, p.kernel_w);
  return rows && dense_taps(axis_h(p)) && dense_taps(axis_w(p));
}

// Whether every row of a tensor, of `width` neighbours, consists of whole vectors of `bytes` that are aligned to their size.
bool depthwise_aligned(const Problem& p, const Strides& s, std::int64_t width, const void* tensor, std::int64_t bytes);

// Whether columns of the kernel, taken by four, start at multiples of four in every row of y and of w, and none is left over.
bool depthwise_by_four(const Problem& p, const void* y, const void* w);

// A copy of the weight in which neighbouring channels follow one another, for lanes that run along channels: its bytes, and the
// problem with the copy's strides. `packed` is filled on the stream.
std::int64_t depthwise_packed_bytes(const Problem& p);
Problem depthwise_pack(const Launch& launch, const Problem& p, const void* w, void* packed);

// What walks down whole aligned rows; false where a problem or its operands are none of these.
bool depthwise_walk(const Launch& launch, const Problem& p, const DepthwiseOperands& operands);
bool depthwise_walk_input(const Launch& launch, const Problem& p, const DepthwiseOperands& operands);
// What owns vectors of channels, whether these are whole, and their kernels; false where an address is not aligned. The workspace
// has depthwise_packed_bytes().
bool depthwise_last_vectors(const Problem& p);
bool depthwise_last(const Launch& launch, const Problem& p, const DepthwiseOperands& operands);
bool depthwise_last_input_fits(const Problem& p);
bool depthwise_last_input(const Launch& launch, const Problem& p, const DepthwiseOperands& operands);
// The runs of rows, the adjoint in x and the adjoint in w, a file each; `p` is a depthwise_plane.
bool depthwise_rows_fits(const Problem& p);
void depthwise_rows(const Launch& launch, const Problem& p, const DepthwiseOperands& operands);
bool depthwise_input_special(const Problem& p);
void depthwise_input(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, bool special);
bool depthwise_weight_special(const Problem& p);
std::int64_t depthwise_weight_bytes(const Problem& p, bool special);
void depthwise_weight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, bool special);
#endif

}  // namespace upfold::cuda
