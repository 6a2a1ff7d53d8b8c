// The depthwise method, the adjoint in w: w[tap] = sum over samples and positions i of x[i] * y[i * stride - pad + tap *
// dilation]. A block owns taps of one channel and one part of its items (positions, or columns of several rows), of which each
// thread sums every so-manieth in registers; the threads' sums are added in a fixed order, and a second kernel adds the parts in
// order. Parts do not depend on the device, so that the same call gives the same bits everywhere.
//   short: kernels and strides that are known when compiling: a thread sums all taps of a plane;
//   wide: kernels of kMh strides on the H axis: a block has the taps of one phase of that axis, a thread four columns of them;
//   walks: whole aligned rows of 16-bit types (depthwise_walk_weight.cu);
//   general: everything else: a thread sums one tap of one channel; lanes are taps, or channels where these are the fastest axis.
#include "depthwise_weight.cuh"

namespace upfold::cuda {

constexpr int kLaneTaps = 4;  // of a thread whose lanes are channels
constexpr int kItemRows = 8;

// A column of kItemRows rows of x, and where tap (kd, 0, 0) finds its first row in y.
struct WeightItem {
  std::int32_t x, y, ih0, oh0, ow0;
  bool live;
};

UPFOLD_DEVICE WeightItem weight_item(const DepthwiseJob& job, const WeightBlock& block, std::uint32_t item, bool live) {
  const AxisTaps<std::int32_t>& d = job.axis[0];
  const std::int32_t iw = std::int32_t(take(job.columns, item)), ih0 = std::int32_t(take(job.tiles, item)) * kItemRows;
  const std::int32_t id = std::int32_t(take(job.depth, item)), n = std::int32_t(item);
  const std::int32_t od = id * d.stride - d.pad + block.kd * d.dilation;
  const std::int32_t ic = std::int32_t(divide(job.multiplier, std::uint32_t(block.channel)));
  WeightItem found;
  found.ih0 = ih0, found.oh0 = ih0 * job.axis[1].stride - job.axis[1].pad, found.ow0 = iw * job.axis[2].stride - job.axis[2].pad;
  found.x = n * job.x.n + ic * job.x.c + id * job.x.axis[0] + ih0 * job.x.axis[1] + iw * job.x.axis[2];
  found.y = n * job.y.n + block.channel * job.y.c + od * job.y.axis[0] + found.oh0 * job.y.axis[1] + found.ow0;
  found.live = live && inside(od, d.out_count);
  return found;
}

template <typename Value>
UPFOLD_DEVICE void load_column(const DepthwiseJob& job, const WeightItem& item, const Value* __restrict__ x,
                               float (&column)[kItemRows]) {
#pragma unroll
  for (int t = 0; t < kItemRows; ++t) {
    column[t] = item.live && item.ih0 + t < job.axis[1].in_end ? widen(x[item.x + t * job.x.axis[1]]) : 0.0f;
  }
}

template <typename Value, int kSh, int kKh, int kS, int kK>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_weight_short_kernel(const DepthwiseWeightJob job, const Value* __restrict__ x, const Value* __restrict__ y,
                                  float* __restrict__ partial) {
  __shared__ float exchange[kWarps][kKh * kK];
  const WeightBlock block = weight_block(job, true);
  const DepthwiseJob& p = job.problem;
  const std::int32_t thread = std::int32_t(threadIdx.x);
  float sums[kKh * kK] = {};
  for (std::uint32_t i = block.begin + threadIdx.x; i < block.end; i += kDepthwiseThreads) {
    const WeightItem item = weight_item(p, block, i, true);
    const std::uint32_t mask = item.live ? positions_mask<kK>(item.ow0, p.axis[2].out_count) : 0;
    float column[kItemRows];
    load_column(p, item, x, column);
#pragma unroll
    for (int r = 0; r < (kItemRows - 1) * kSh + kKh; ++r) {
      float row[kK];
      load_row(y + (item.y + r * p.y.axis[1]), inside(item.oh0 + r, p.axis[1].out_count) ? mask : 0, row);
#pragma unroll
      for (int j = 0; j < kItemRows * kK; ++j) {
        const int t = j / kK, kh = r - t * kSh;
        if (kh >= 0 && kh < kKh) add_product(sums[kh * kK + j % kK], column[t], row[j % kK]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kKh * kK; ++j) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], by);
    if (thread % 32 == 0) exchange[thread / 32][j] = sums[j];
  }
  __syncthreads();  // the sums of all warps are there
  if (thread >= kKh * kK) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += exchange[i][thread];
  partial[block.part * job.elements + std::uint32_t((block.channel * p.axis[0].kernel + block.kd) * (kKh * kK) + thread)] = sum;
}

template <typename Value, int kMh, bool kVectors>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_weight_wide_kernel(const DepthwiseWeightJob job, const Value* __restrict__ x, const Value* __restrict__ y,
                                 float* __restrict__ partial) {
  __shared__ float exchange[kWarps][32 * kMh * 4];
  const WeightBlock block = weight_block(job, true);
  const DepthwiseJob& p = job.problem;
  const AxisTaps<std::int32_t>&h = p.axis[1], &v = p.axis[2];
  const std::int32_t thread = std::int32_t(threadIdx.x), lane = thread % p.lanes, warp = thread / 32, kw = lane * 4;
  const std::uint32_t used = positions_mask<4>(kw, v.kernel), slots = kDepthwiseThreads / std::uint32_t(p.lanes);
  float sums[kMh][4] = {};
  for (std::uint32_t i = block.begin + std::uint32_t(thread / p.lanes); i < block.end; i += slots) {
    const WeightItem item = weight_item(p, block, i, true);
    const std::uint32_t mask = item.live ? positions_mask<4>(item.ow0 + kw, v.out_count) & used : 0;
    float column[kItemRows];
    load_column(p, item, x, column);
#pragma unroll
    for (int r = 0; r < kItemRows + kMh - 1; ++r) {
      const std::int32_t down = r * h.stride + block.group;
      float row[4];
      load_four<kVectors>(y + (item.y + down * p.y.axis[1] + kw), inside(item.oh0 + down, h.out_count) ? mask : 0, row);
#pragma unroll
      for (int j = 0; j < kMh * 4; ++j) {
        const int t = r - j / 4;
        if (t >= 0 && t < kItemRows) add_product(sums[j / 4][j % 4], column[t], row[j % 4]);
      }
    }
  }
  for (std::int32_t by = 16; by >= p.lanes; by /= 2) {
#pragma unroll
    for (int j = 0; j < kMh * 4; ++j) sums[j / 4][j % 4] += __shfl_xor_sync(~0u, sums[j / 4][j % 4], by);
  }
#pragma unroll
  for (int j = 0; j < kMh * 4; ++j) {
    if (thread % 32 == lane) exchange[warp][lane * kMh * 4 + j] = sums[j / 4][j % 4];
  }
  __syncthreads();  // the sums of all warps are there
  if (thread >= p.lanes * kMh * 4) return;
  const std::int32_t kh = block.group + thread / 4 % kMh * h.stride, column = thread / (kMh * 4) * 4 + thread % 4;
  if (column >= v.kernel) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += exchange[i][thread];
  const std::int32_t element = ((block.channel * p.axis[0].kernel + block.kd) * h.kernel + kh) * v.kernel + column;
  partial[block.part * job.elements + std::uint32_t(element)] = sum;
}

// kTaps neighbouring taps of the W axis a thread.
template <typename Value, int kTaps>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_weight_general_kernel(const DepthwiseWeightJob job, const Value* __restrict__ x, const Value* __restrict__ y,
                                    float* __restrict__ partial) {
  __shared__ float exchange[kTaps][kDepthwiseThreads];
  const WeightBlock block = weight_block(job, false);
  const DepthwiseJob& p = job.problem;
  const AxisTaps<std::int32_t>& v = p.axis[2];
  std::uint32_t slice = threadIdx.x;
  const std::int32_t inner = std::int32_t(take(job.inner, slice)), width = std::int32_t(job.inner.value);
  const std::uint32_t slices = kDepthwiseThreads / job.inner.value;
  const std::int32_t group = p.lanes_are_channels ? block.group : block.group * width + inner;
  const std::int32_t channel = p.lanes_are_channels ? block.channel * width + inner : block.channel;
  const bool live = slice < slices && group < job.tap_groups && channel < std::int32_t(p.channels.value);
  std::uint32_t rest = std::uint32_t(group);
  const std::int32_t kw = std::int32_t(take(job.groups_w, rest)) * kTaps, kh = std::int32_t(take(job.kernel_h, rest));
  const std::int32_t k[3] = {std::int32_t(rest), kh, kw};
  const std::int32_t ic = live ? std::int32_t(divide(p.multiplier, std::uint32_t(channel))) : 0;
  float sums[kTaps] = {};
  for (std::uint32_t i = block.begin + slice; live && i < block.end; i += slices) {
    std::uint32_t item = i;
    std::int32_t at[3];
    at[2] = std::int32_t(take(p.columns, item)), at[1] = std::int32_t(take(job.in_h, item));
    at[0] = std::int32_t(take(p.depth, item));
    std::int32_t from = std::int32_t(item) * p.x.n + ic * p.x.c, of = std::int32_t(item) * p.y.n + channel * p.y.c, o[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      o[a] = at[a] * p.axis[a].stride - p.axis[a].pad + k[a] * p.axis[a].dilation;
      from += at[a] * p.x.axis[a], of += o[a] * p.y.axis[a];
    }
    if (!inside(o[0], p.axis[0].out_count) || !inside(o[1], p.axis[1].out_count)) continue;
    const float value = widen(x[from]);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const bool reached = kw + j < v.kernel && inside(o[2] + j * v.dilation, v.out_count);
      if (reached) add_product(sums[j], value, widen(y[of + j * v.dilation * p.y.axis[2]]));
    }
  }
#pragma unroll
  for (int j = 0; j < kTaps; ++j) exchange[j][threadIdx.x] = sums[j];
  __syncthreads();  // the sums of all slices are there
  if (slice > 0 || !live) return;
  const std::uint32_t first =
      std::uint32_t((channel * p.axis[0].kernel + k[0]) * p.axis[1].kernel + kh) * std::uint32_t(v.kernel);
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    for (std::uint32_t i = 1; i < slices; ++i) sums[j] += exchange[j][i * std::uint32_t(width) + std::uint32_t(inner)];
    if (kw + j < v.kernel) partial[block.part * job.elements + first + std::uint32_t(kw + j)] = sums[j];
  }
}

// w from the sums of the parts, in order; one element a thread.
template <typename Value>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_weight_sum_kernel(const DepthwiseWeightJob job, const float* __restrict__ partial, Value* __restrict__ w) {
  const std::uint32_t element = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (element >= job.elements) return;
  take_turn();
  float sum = 0.0f;
#pragma unroll 8
  for (std::uint32_t part = 0; part < job.parts.value; ++part) sum += partial[part * job.elements + element];
  const DepthwiseStrides& s = job.problem.w;
  std::uint32_t rest = element;
  std::uint32_t tap = take(job.taps, rest);
  const std::int32_t kw = std::int32_t(take(job.kernel_w, tap)), kh = std::int32_t(take(job.kernel_h, tap));
  w[weight_offset(job.problem, std::int32_t(rest)) + std::int32_t(tap) * s.axis[0] + kh * s.axis[1] + kw * s.axis[2]] =
      Narrow<Value>::from(sum);
}

// kSh, kKh, kS, kK
#define UPFOLD_SHORT(DO, Value) \
  DO(Value, 2, 4, 2, 4)         \
  DO(Value, 2, 2, 2, 2)         \
  DO(Value, 2, 3, 2, 3)         \
  DO(Value, 1, 3, 1, 3)         \
  DO(Value, 1, 5, 1, 5)         \
  DO(Value, 1, 1, 2, 4)
#define UPFOLD_ARGUMENTS(Value) (const DepthwiseWeightJob, const Value*, const Value*, float*)
#define UPFOLD_MAKE_SHORT(Value, kSh, kKh, kS, kK) \
  template __global__ void depthwise_weight_short_kernel<Value, kSh, kKh, kS, kK> UPFOLD_ARGUMENTS(Value);
// kMh, kVectors
#define UPFOLD_WIDE(DO, Value) DO(Value, 1, false) DO(Value, 1, true) DO(Value, 2, false) DO(Value, 2, true)
#define UPFOLD_MAKE_WIDE(Value, kMh, kVectors) \
  template __global__ void depthwise_weight_wide_kernel<Value, kMh, kVectors> UPFOLD_ARGUMENTS(Value);
#define UPFOLD_MAKE(dtype, Value)                                                                     \
  UPFOLD_SHORT(UPFOLD_MAKE_SHORT, Value)                                                              \
  UPFOLD_WIDE(UPFOLD_MAKE_WIDE, Value)                                                                \
  template __global__ void depthwise_weight_general_kernel<Value, 1> UPFOLD_ARGUMENTS(Value);         \
  template __global__ void depthwise_weight_general_kernel<Value, kLaneTaps> UPFOLD_ARGUMENTS(Value); \
  template __global__ void depthwise_weight_sum_kernel<Value>(const DepthwiseWeightJob, const float*, Value*);
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kBlocksWanted = 1056;  // eight for each of an H200's multiprocessors

enum class Kind { kShort, kWide, kGeneral };

Kind kind_of(const Problem& p, bool special) {
  if (!special || !depthwise_dense(p)) return Kind::kGeneral;
#define UPFOLD_IS_SHORT(Value, kSh, kKh, kS, kK) || has_kernel(p, kSh, kKh, kS, kK)
  if (false UPFOLD_SHORT(UPFOLD_IS_SHORT, )) return Kind::kShort;
#undef UPFOLD_IS_SHORT
  const bool wide = p.kernel_w >= 4 && p.kernel_w <= 128 && (p.kernel_h == p.stride_h || p.kernel_h == 2 * p.stride_h);
  return wide ? Kind::kWide : Kind::kGeneral;
}

// The job, and the blocks of one part.
struct Launchable {
  DepthwiseWeightJob job;
  std::int64_t blocks;
};

Launchable weight_job(const Problem& p, Kind kind) {
  DepthwiseWeightJob job{};
  job.problem = depthwise_job(p);
  DepthwiseJob& base = job.problem;
  const bool general = kind == Kind::kGeneral;
  const std::int64_t taps = kernel_taps(p), elements = p.out_channels * taps;
  base.lanes_are_channels = general && p.y.c == 1;
  base.columns = make_divisor(p.in_w), base.tiles = make_divisor(ceil_div(p.in_h, kItemRows)), base.depth = make_divisor(p.in_d);
  base.lanes = 1;
  while (kind == Kind::kWide && base.lanes * 4 < p.kernel_w) base.lanes *= 2;
  job.kernel_h = make_divisor(p.kernel_h), job.kernel_w = make_divisor(p.kernel_w), job.taps = make_divisor(taps);
  job.in_h = make_divisor(p.in_h);
  const std::int64_t groups_w = base.lanes_are_channels ? ceil_div(p.kernel_w, kLaneTaps) : p.kernel_w;
  const std::int64_t tap_groups = p.kernel_d * p.kernel_h * groups_w;
  job.groups_w = make_divisor(groups_w), job.tap_groups = std::int32_t(tap_groups);
  const std::int64_t inner = base.lanes_are_channels ? std::min<std::int64_t>(p.out_channels, 32)
                                                     : std::min<std::int64_t>(tap_groups, kDepthwiseThreads);
  job.inner = make_divisor(inner);
  const std::int64_t groups = kind == Kind::kShort ? 1 : kind == Kind::kWide ? p.stride_h : 0;
  job.groups = make_divisor(!general ? groups : base.lanes_are_channels ? tap_groups : ceil_div(tap_groups, inner));
  const std::int64_t outer = !general                  ? p.out_channels * p.kernel_d
                             : base.lanes_are_channels ? ceil_div(p.out_channels, inner)
                                                       : p.out_channels;
  const std::int64_t blocks = outer * job.groups.value;
  job.items = std::uint32_t(p.batch * p.in_d * p.in_w * (general ? p.in_h : std::int64_t(base.tiles.value)));
  const std::int64_t at_once = kind == Kind::kWide ? kDepthwiseThreads / base.lanes
                               : general           ? kDepthwiseThreads / inner * 16
                                                   : kDepthwiseThreads;
  job.elements = std::uint32_t(elements);
  depthwise_share_parts(job, std::max<std::int64_t>(1, kBlocksWanted / blocks), at_once);
  return {job, blocks * job.parts.value};
}

template <typename Value>
void add_parts(const Launch& launch, const DepthwiseWeightJob& job, const DepthwiseOperands& operands) {
  launch_in_turn("depthwise", depthwise_weight_sum_kernel<Value>, launch, unsigned(ceil_div(job.elements, kDepthwiseThreads)),
                 kDepthwiseThreads, job, static_cast<const float*>(operands.workspace), static_cast<Value*>(operands.w));
}

template <typename Value>
void run(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, Kind kind) {
  DepthwiseWeightJob walks{};
  if (kind != Kind::kGeneral && depthwise_walk_weight_job(p, walks) && depthwise_walk_weight(launch, p, operands, walks))
    return add_parts<Value>(launch, walks, operands);
  const Launchable found = weight_job(p, kind);
  const bool vectors = depthwise_by_four(p, operands.y, nullptr);
  const auto kernel = [&]() -> void (*)(const DepthwiseWeightJob, const Value*, const Value*, float*) {
    if (kind == Kind::kGeneral && found.job.problem.lanes_are_channels) return depthwise_weight_general_kernel<Value, kLaneTaps>;
    if (kind == Kind::kGeneral) return depthwise_weight_general_kernel<Value, 1>;
#define UPFOLD_CHOOSE(type, kSh, kKh, kS, kK) \
  if (has_kernel(p, kSh, kKh, kS, kK)) return depthwise_weight_short_kernel<Value, kSh, kKh, kS, kK>;
    UPFOLD_SHORT(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
#define UPFOLD_CHOOSE(type, kMh, kVectors) \
  if (p.kernel_h == kMh * p.stride_h && vectors == kVectors) return depthwise_weight_wide_kernel<Value, kMh, kVectors>;
    UPFOLD_WIDE(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
    return nullptr;
  }();
  launch_kernel("depthwise", kernel, launch, unsigned(found.blocks), kDepthwiseThreads, found.job,
                static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.y),
                static_cast<float*>(operands.workspace));
  add_parts<Value>(launch, found.job, operands);
}

}  // namespace

bool depthwise_weight_special(const Problem& p) {
  if (depthwise_last_weight_bytes(p) > 0) return true;
  const Kind kind = kind_of(p, true);
  return kind != Kind::kGeneral && weight_job(p, kind).blocks <= kDepthwiseMost;
}

std::int64_t depthwise_weight_bytes(const Problem& p, bool special) {
  const Kind kind = kind_of(p, special);
  const DepthwiseWeightJob job = weight_job(p, kind).job;
  DepthwiseWeightJob walks{};
  const bool may_walk = kind != Kind::kGeneral && depthwise_walk_weight_job(p, walks);
  const std::int64_t last = special && kind == Kind::kGeneral ? depthwise_last_weight_bytes(p) : 0;
  return std::max(last, std::int64_t(std::max(job.parts.value, may_walk ? walks.parts.value : 0)) * job.elements * 4);
}

void depthwise_weight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, bool special) {
  const bool last = special && kind_of(p, true) == Kind::kGeneral;
  if (last && depthwise_last_weight(launch, p, operands)) return;
  return with_value(p, [&](auto value) { return run<decltype(value)>(launch, p, operands, kind_of(p, special)); });
}

}  // namespace upfold::cuda
#endif
