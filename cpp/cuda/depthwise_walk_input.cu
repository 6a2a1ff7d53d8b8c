// The depthwise method, the adjoint in x of whole rows (depthwise_walk.cuh), for kernels and strides that are known when
// compiling.
//   short: a thread owns a run of x that a vector of y lies above, and walks down: each step reads the rows of y of one stride,
//     adds them to all rows of x that they reach, and stores the one that is then complete;
//   eights: 16-bit types, kernels of 16 and strides of 8, so that a vector of y is as wide as a stride: a warp owns one phase of
//     the H axis and neighbouring vectors of y, a lane one of them; its sums for the column of x below and those beside it go to
//     their lanes, and what the eight warps have for a row of x is added up through shared memory.
#include "depthwise_walk.cuh"

namespace upfold::cuda {

// kSh, kKh and kS, kK: strides and kernels of the H and W axes; kP: padding of the W axis.
template <typename Value, int kSh, int kKh, int kS, int kK, int kP>
struct InputWalk {
  static constexpr int kC = kVector<Value> / kS, kMh = (kKh + kSh - 1) / kSh;
  static constexpr int kTail = kK - kS - kP > 0 ? kK - kS - kP : 0;
  using Row = RunRow<Value, kP, kVector<Value>, kTail>;
};

template <typename Value, int kSh, int kKh, int kS, int kK, int kP>
__global__ void __launch_bounds__(kDepthwiseThreads, kWalkBlocks<kKh * kK, kS>)
    depthwise_walk_input_kernel(const DepthwiseJob job, const Value* __restrict__ y, const Value* __restrict__ w,
                                Value* __restrict__ x) {
  using Walk = InputWalk<Value, kSh, kKh, kS, kK, kP>;
  using Row = typename Walk::Row;
  take_turn();
  constexpr int kMh = Walk::kMh, kC = Walk::kC;
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (number >= job.threads) return;
  const DepthwisePlace at = depthwise_place(job, number);
  const AxisTaps<std::int32_t>&d = job.axis[0], &h = job.axis[1];
  const std::int32_t ih0 = at.tile * job.tiles_of_run, od = at.depth * d.stride - d.pad;
  const std::int32_t steps = h.in_end - ih0 < job.tiles_of_run ? h.in_end - ih0 : job.tiles_of_run;
  const std::int32_t out_count = inside(od, d.out_count) ? h.out_count : 0;
  const std::int32_t column = at.column * kVector<Value>;
  const typename Row::Edges edges = Row::edges(column, job.axis[2].out_count);
  // The last kSh taps of a row of x: those that it is the first to see. They reach kMh - 1 rows below it too.
  std::int32_t oh = (ih0 - (kMh - 1)) * kSh - h.pad + kKh - kSh;
  const Value* plane = y + (at.sample * job.y.n + at.channel * job.y.c + od * job.y.axis[0] + oh * job.y.axis[1] + column);
  Row next[kSh];
#pragma unroll
  for (int q = 0; q < kSh; ++q) next[q].load(plane + q * job.y.axis[1], inside(oh + q, out_count), edges);
  const Value* const taps = w + weight_offset(job, at.channel);
  float weights[kKh][kK];
#pragma unroll
  for (int i = 0; i < kKh * kK; ++i) weights[i / kK][i % kK] = widen(taps[i / kK * job.w.axis[1] + i % kK]);
  Value* to = x + (at.sample * job.x.n + at.channel * job.x.c + at.depth * job.x.axis[0] + ih0 * job.x.axis[1] + at.column * kC);
  float sums[kMh][kC] = {};
#pragma unroll 1
  for (std::int32_t step = 1 - kMh; step < steps; ++step) {
    float rows[kSh][Row::kCount];
#pragma unroll
    for (int q = 0; q < kSh; ++q) next[q].widen(rows[q]);
    oh += kSh, plane += kSh * job.y.axis[1];
#pragma unroll
    for (int q = 0; q < kSh; ++q) next[q].load(plane + q * job.y.axis[1], inside(oh + q, out_count), edges);
#pragma unroll
    for (int i = 0; i < kSh * kMh * kC * kK; ++i) {
      const int k = i % kK, c = i / kK % kC, t = i / (kK * kC) % kMh, q = i / (kK * kC * kMh), kh = kKh - kSh + q - t * kSh;
      if (kh >= 0) add_product(sums[t][c], rows[q][c * kS + k], weights[kh][k]);
    }
    if (step >= 0) store_results(to, sums[0]), to += job.x.axis[1];
#pragma unroll
    for (int i = 0; i < kMh * kC; ++i) sums[i / kC][i % kC] = i / kC + 1 < kMh ? sums[(i / kC + 1) % kMh][i % kC] : 0.0f;
  }
}

constexpr int kEight = 8, kEightColumns = 30;  // of x whose neighbours are in the same warp

// What the warps of a block have for rows of x, in order of the warps; the rows of a batch.
using EightShares = float[kEight][kEight][32];

// Adds up the shares of row number `warp` of the batch.
template <typename Value>
UPFOLD_DEVICE void store_eight(const EightShares& shares, Value* to, bool owned) {
  const int lane = int(threadIdx.x) % 32, row = int(threadIdx.x) / 32;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEight; ++i) sum += shares[row][i][lane];
  if (owned) *to = Narrow<Value>::from(sum);
}

// kHalves: the second half of a vector lies above the column after.
template <typename Value, bool kHalves>
__global__ void __launch_bounds__(kDepthwiseThreads, 4)
    depthwise_walk_input_eight_kernel(const DepthwiseJob job, const Value* __restrict__ y, const Value* __restrict__ w,
                                      Value* __restrict__ x) {
  static_assert(kDepthwiseThreads == 32 * kEight && kVector<Value> == kEight, "a warp for each phase, a vector for each stride");
  using Row = RunRow<Value, 0, kEight, 0>;
  take_turn();
  __shared__ EightShares shares[2];
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  const DepthwisePlace at = depthwise_place(job, blockIdx.x);
  const AxisTaps<std::int32_t>&d = job.axis[0], &h = job.axis[1], &v = job.axis[2];
  const std::int32_t ih0 = at.tile * job.tiles_of_run, od = at.depth * d.stride - d.pad;
  const std::int32_t count = h.in_end - ih0 < job.tiles_of_run ? h.in_end - ih0 : job.tiles_of_run;
  const std::int32_t out_count = inside(od, d.out_count) ? h.out_count : 0;
  const std::int32_t iw = at.column * kEightColumns + lane, column = (iw - v.pad / kEight) * kEight;
  // Lanes at the ends lack a neighbour, unless that is outside.
  const bool complete = (lane > 0 || at.column == 0) && (lane < 31 || (kHalves && iw == v.in_end - 1));
  const bool owned = complete && iw < v.in_end;
  const typename Row::Edges edges = Row::edges(column, v.out_count);
  std::int32_t oh = ih0 * kEight - h.pad + warp;
  const Value* plane = y + (at.sample * job.y.n + at.channel * job.y.c + od * job.y.axis[0] + oh * job.y.axis[1] + column);
  Row next;
  next.load(plane, inside(oh, out_count), edges);
  const Value* const taps = w + (weight_offset(job, at.channel) + warp * job.w.axis[1]);
  float weights[2][2][kEight];  // of this row of x and the one above, of a column and the one before
#pragma unroll
  for (int i = 0; i < 4 * kEight; ++i) {
    const int j = i % kEight, m = i / kEight % 2, kw = kHalves ? (j + kEight / 2) % kEight : j;
    weights[i / (2 * kEight)][m][j] = widen(taps[i / (2 * kEight) * kEight * job.w.axis[1] + m * kEight + kw]);
  }
  Value* const to = x + (at.sample * job.x.n + at.channel * job.x.c + at.depth * job.x.axis[0] + ih0 * job.x.axis[1] + iw);
  float sums[2][3] = {};  // of this row of x and the one above; of the column before, this one and the one after
#pragma unroll 1
  for (std::int32_t step = 0; step <= count; ++step) {
    float row[kEight];
    next.widen(row);
    oh += kEight, plane += kEight * job.y.axis[1];
    next.load(plane, inside(oh, out_count), edges);
#pragma unroll
    for (int i = 0; i < 3; ++i) sums[1][i] = sums[0][i], sums[0][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kEight; ++i) {
      const int j = i % kEight, m = i / kEight % 2, mh = i / (2 * kEight);
      add_product(sums[mh][1 - m + (kHalves && j >= kEight / 2 ? 1 : 0)], row[j], weights[mh][m][j]);
    }
    if (step == 0) continue;
    const float of_next = __shfl_down_sync(~0u, sums[1][0], 1), of_last = __shfl_up_sync(~0u, sums[1][2], 1);
    const std::int32_t done = (step - 1) % kEight, batch = (step - 1) / kEight;
    shares[batch % 2][done][warp][lane] = sums[1][1] + (lane < 31 ? of_next : 0.0f) + (lane > 0 ? of_last : 0.0f);
    if (done + 1 < kEight && step < count) continue;
    __syncthreads();  // the batch is complete, and the one before has been read
    store_eight(shares[batch % 2], to + (batch * kEight + warp) * job.x.axis[1], owned && warp <= done);
  }
}

// kSh, kKh, kS, kK, kP
#define UPFOLD_SHORT(DO, Value) \
  DO(Value, 2, 4, 2, 4, 1)      \
  DO(Value, 2, 2, 2, 2, 0)      \
  DO(Value, 2, 3, 2, 3, 1)      \
  DO(Value, 1, 3, 1, 3, 1)      \
  DO(Value, 1, 5, 1, 5, 2)      \
  DO(Value, 1, 1, 2, 4, 1)
#define UPFOLD_MAKE_SHORT(Value, kSh, kKh, kS, kK, kP)                                                                \
  template __global__ void depthwise_walk_input_kernel<Value, kSh, kKh, kS, kK, kP>(const DepthwiseJob, const Value*, \
                                                                                    const Value*, Value*);
#define UPFOLD_MAKE(dtype, Value) UPFOLD_SHORT(UPFOLD_MAKE_SHORT, Value)
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE)
// kHalves
#define UPFOLD_EIGHTS(DO, Value) DO(Value, false) DO(Value, true)
#define UPFOLD_MAKE_EIGHT(Value, kHalves)                                                                                    \
  template __global__ void depthwise_walk_input_eight_kernel<Value, kHalves>(const DepthwiseJob, const Value*, const Value*, \
                                                                             Value*);
UPFOLD_EIGHTS(UPFOLD_MAKE_EIGHT, __half)
UPFOLD_EIGHTS(UPFOLD_MAKE_EIGHT, __nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Value>
using InputKernel = void (*)(const DepthwiseJob, const Value*, const Value*, Value*);

// The kernel for a problem, or null.
template <typename Value>
InputKernel<Value> kernel_of(const Problem& p) {
#define UPFOLD_CHOOSE(type, kSh, kKh, kS, kK, kP)       \
  if (has_kernel(p, kSh, kKh, kS, kK) && p.pad_w == kP) \
    return p.in_w % (kVector<Value> / kS) == 0 ? depthwise_walk_input_kernel<Value, kSh, kKh, kS, kK, kP> : nullptr;
  UPFOLD_SHORT(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
  return nullptr;
}

bool is_eight(const Problem& p) { return has_kernel(p, kEight, 2 * kEight, kEight, 2 * kEight) && p.pad_w % (kEight / 2) == 0; }

template <typename Value>
InputKernel<Value> eight_kernel_of(const Problem& p) {
  if constexpr (sizeof(Value) == 2) {
    const bool halves = p.pad_w % kEight != 0;
    return halves ? depthwise_walk_input_eight_kernel<Value, true> : depthwise_walk_input_eight_kernel<Value, false>;
  }
  return nullptr;
}

// `lanes`: threads that share a place.
DepthwiseJob walk_job(const Problem& p, std::int64_t columns, std::int64_t lanes) {
  DepthwiseJob job = depthwise_job(p);
  job.channels = make_divisor(p.in_channels), job.columns = make_divisor(columns), job.depth = make_divisor(p.in_d);
  const Walks walks = walks_of(p.in_h, depthwise_threads(job, p.batch) * lanes, lanes > 1 ? 1 : 2);
  job.tiles = make_divisor(walks.count), job.tiles_of_run = std::int32_t(walks.steps);
  job.threads = std::uint32_t(depthwise_threads(job, p.batch));
  return job;
}

template <typename Value>
bool run(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if (!depthwise_aligned(p, p.y, p.out_w, operands.y, 16)) return false;
  const bool eight = is_eight(p);
  const InputKernel<Value> kernel = eight ? eight_kernel_of<Value>(p) : kernel_of<Value>(p);
  if (kernel == nullptr || (!eight && !depthwise_aligned(p, p.x, p.in_w, operands.x, 16 / p.stride_w))) return false;
  const std::int64_t last = p.in_w - (p.pad_w % kEight != 0 ? 2 : 1);  // a column that no warp begins behind
  const std::int64_t columns =
      eight ? std::max<std::int64_t>(1, ceil_div(last, kEightColumns)) : p.in_w * p.stride_w / kVector<Value>;
  const DepthwiseJob job = walk_job(p, columns, eight ? kDepthwiseThreads : 1);
  const unsigned blocks = eight ? job.threads : unsigned(ceil_div(job.threads, kDepthwiseThreads));
  launch_in_turn("depthwise", kernel, launch, blocks, kDepthwiseThreads, job, static_cast<const Value*>(operands.y),
                 static_cast<const Value*>(operands.w), static_cast<Value*>(operands.x));
  return true;
}

}  // namespace

bool depthwise_walk_input(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if (!depthwise_dense(p) || p.kernel_d != 1 || p.in_channels != p.out_channels) return false;
  return with_value(p, [&](auto value) { return run<decltype(value)>(launch, p, operands); });
}

}  // namespace upfold::cuda
#endif
