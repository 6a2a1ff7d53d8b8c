// The depthwise method, the transposed convolution of whole rows: every run of 16 bytes of y, and of short kernels every vector
// of x too, is aligned and complete, so that nothing is asked of single elements. A thread owns a run of y and walks down: each
// step reads one row of x, and finishes the outputs of one unit of the H axis.
//   short: strides that divide the run, of a fixed kernel: rows of all phases of the H axis in a step;
//   wide: strides of a run and more and kernels of kM strides: rows of one phase of the H axis.
// Taps stay in registers, as do the rows of x that the next step needs again.
#include "depthwise_walk.cuh"

namespace upfold::cuda {

// By how many columns of x a run's first unit lies behind its vector, with as much padding as keeps the size of x times the
// stride.
template <int kK, int kS>
constexpr int kUnitsBefore = (kK - 1) / 2 / kS;

// kSh, kKh and kS, kK: strides and kernels of the H and W axes; kR = padding mod kS, the phase of a run's first output.
template <typename Type, int kSh, int kKh, int kS, int kK, int kR>
struct ShortWalk {
  using Value = Type;
  static constexpr int kV = kVector<Value>, kPhases = kSh, kMh = (kKh + kSh - 1) / kSh, kM = (kK + kS - 1) / kS;
  static_assert(kV % kS == 0, "every run of outputs starts at the same phase");
  static constexpr int kMiddle = kV / kS, kBefore = kUnitsBefore<kK, kS>, kLead = kM - 1 - kBefore;
  static constexpr int kColumns = (kR + kV - 1) / kS + kM, kTail = kColumns - kLead - kMiddle;
  using Row = RunRow<Value, kLead, kMiddle, kTail>;

  typename Row::Edges edges;
  float taps[kKh][kK];
  std::int32_t column;  // of the vector

  __device__ __forceinline__ std::int32_t begin(const DepthwiseJob& job, const DepthwisePlace& at) {
    column = at.column * kMiddle;
    edges = Row::edges(column, job.axis[2].in_end);
    return (job.first_unit + at.tile * job.tiles_of_run) * kSh - job.axis[1].pad;
  }
  __device__ __forceinline__ void read_taps(const DepthwiseJob& job, const Value* __restrict__ w, std::int32_t) {
#pragma unroll
    for (int i = 0; i < kKh * kK; ++i) taps[i / kK][i % kK] = widen(w[i / kK * job.w.axis[1] + i % kK]);
  }
  __device__ __forceinline__ void load(Row& row, const Value* __restrict__ plane, bool there) const {
    row.load(plane + column, there, edges);
  }
  // Tap m of output j in the column that it reads, of row number mh before the unit's.
  static __device__ __forceinline__ constexpr bool reaches(int phase, int mh, int j, int m) {
    return phase + mh * kSh < kKh && (kR + j) % kS + m * kS < kK;
  }
  static __device__ __forceinline__ constexpr int source(int j, int m) { return (kR + j) / kS - m + kM - 1; }
  __device__ __forceinline__ float tap(int phase, int mh, int j, int m) const {
    return taps[phase + mh * kSh][(kR + j) % kS + m * kS];
  }
};

// kMh and kM: kernels of the H and W axes in strides. The outputs of a run lie in one unit; or where kHalves a stride is a run,
// and the second half of it lies in the unit after.
template <typename Type, int kRows, int kTaps, bool kHalves>
struct WideWalk {
  using Value = Type;
  static constexpr int kV = kVector<Value>, kPhases = 1, kMh = kRows, kM = kTaps, kColumns = kM + (kHalves ? 1 : 0);
  using Row = RunRow<Value, kColumns, 0, 0>;

  typename Row::Edges edges;
  float taps[kMh][kM][kV];
  std::int32_t phase, column;  // the latter behind the last one that is read

  __device__ __forceinline__ std::int32_t begin(const DepthwiseJob& job, const DepthwisePlace& at) {
    std::uint32_t unit = std::uint32_t(at.column * kV + job.axis[2].pad);
    phase = std::int32_t(take(job.stride_w, unit)), column = std::int32_t(unit) + (kHalves ? 2 : 1);
    edges = Row::edges(column, job.axis[2].in_end);
    return at.tile * job.tiles_of_run * job.axis[1].stride + at.phase;
  }
  __device__ __forceinline__ void read_taps(const DepthwiseJob& job, const Value* __restrict__ w, std::int32_t tap_row) {
    constexpr int kHalf = kHalves ? kV / 2 : kV;
#pragma unroll
    for (int i = 0; i < kMh * kM * kV / kHalf; ++i) {
      const int half = i % (kV / kHalf), m = i / (kV / kHalf) % kM, mh = i / (kV / kHalf * kM);
      const std::int32_t first = phase + m * job.axis[2].stride - (half > 0 ? job.axis[2].stride - kHalf : 0);
      const Value* const from = w + ((tap_row + mh * job.axis[1].stride) * job.w.axis[1] + first);
#pragma unroll
      for (int j = 0; j < kHalf; ++j) taps[mh][m][half * kHalf + j] = widen(from[j]);
    }
  }
  __device__ __forceinline__ void load(Row& row, const Value* __restrict__ plane, bool there) const {
    row.load(plane + column, there, edges);
  }
  static __device__ __forceinline__ constexpr bool reaches(int, int, int, int) { return true; }
  static __device__ __forceinline__ constexpr int source(int j, int m) { return (kHalves && j >= kV / 2 ? kM : kM - 1) - m; }
  __device__ __forceinline__ float tap(int, int mh, int j, int m) const { return taps[mh][m][j]; }
};

// The outputs of one unit, for which `rows[first - mh]` (modulo kMh) is row number mh before the unit's.
template <typename Walk>
UPFOLD_DEVICE void finish_unit(const DepthwiseJob& job, const Walk& walk, const float (&rows)[Walk::kMh][Walk::kColumns],
                               int first, float shift, float (&sums)[Walk::kPhases][Walk::kV]) {
#pragma unroll
  for (int i = 0; i < Walk::kPhases * Walk::kV; ++i) {
    const int phase = i / Walk::kV, j = i % Walk::kV;
    float sum = shift;
#pragma unroll
    for (int t = Walk::kMh * Walk::kM - 1; t >= 0; --t) {
      const int mh = t / Walk::kM, m = t % Walk::kM;
      if (!Walk::reaches(phase, mh, j, m)) continue;
      add_product(sum, rows[(first + Walk::kMh - mh) % Walk::kMh][Walk::source(j, m)], walk.tap(phase, mh, j, m));
    }
    sums[phase][j] = sum;
  }
  if (job.activation != Activation::kRelu) return;
#pragma unroll
  for (int i = 0; i < Walk::kPhases * Walk::kV; ++i) {
    float& sum = sums[i / Walk::kV][i % Walk::kV];
    sum = sum < 0.0f ? 0.0f : sum;  // a NaN stays
  }
}

template <typename Walk, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    depthwise_walk_kernel(const DepthwiseJob job, const typename Walk::Value* __restrict__ x,
                          const typename Walk::Value* __restrict__ w, const typename Walk::Value* __restrict__ bias,
                          typename Walk::Value* __restrict__ y) {
  take_turn();
  constexpr int kMh = Walk::kMh, kLast = kMh - 1;
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (number >= job.threads) return;
  const DepthwisePlace at = depthwise_place(job, number);
  const AxisTaps<std::int32_t>& h = job.axis[1];
  Walk walk;
  std::int32_t oh = walk.begin(job, at);
  if (oh >= h.out_count) return;
  const std::int32_t left = (h.out_count - 1 - oh) / h.stride + 1;  // rows of units to the end
  const std::int32_t steps = left < job.tiles_of_run ? left : job.tiles_of_run;
  const std::int32_t unit = (oh + h.pad) / h.stride, id = at.depth + job.axis[0].pad;
  const std::int32_t in_end = inside(id, job.axis[0].in_end) ? h.in_end : 0;
  std::int32_t ih = unit - kLast;
  const typename Walk::Value* plane = x + (plane_offset(job, at) + id * job.x.axis[0] + ih * job.x.axis[1]);
  typename Walk::Row next;
  float rows[kMh][Walk::kColumns];
#pragma unroll
  for (int i = 0; i < kMh; ++i, ++ih, plane += job.x.axis[1]) {
    walk.load(next, plane, inside(ih, in_end));
    if (i < kLast) next.widen(rows[i]);
  }
  walk.read_taps(job, w + weight_offset(job, at.channel), oh + h.pad - unit * h.stride);
  const float shift = bias == nullptr ? 0.0f : widen(bias[at.channel]);
  typename Walk::Value* to =
      y + (at.sample * job.y.n + at.channel * job.y.c + at.depth * job.y.axis[0] + oh * job.y.axis[1] + at.column * Walk::kV);
  for (std::int32_t step = 0; step < steps; step += kMh) {
#pragma unroll
    for (int i = 0; i < kMh; ++i) {
      if (i > 0 && step + i >= steps) return;
      next.widen(rows[(i + kLast) % kMh]);
      walk.load(next, plane, inside(ih, in_end));  // of the step after
      float sums[Walk::kPhases][Walk::kV];
      finish_unit(job, walk, rows, i + kLast, shift, sums);
#pragma unroll
      for (int phase = 0; phase < Walk::kPhases; ++phase) {
        if (Walk::kPhases == 1 || inside(oh + phase, h.out_count)) store_results(to + phase * job.y.axis[1], sums[phase]);
      }
      ++ih, plane += job.x.axis[1];
      oh += h.stride, to += h.stride * job.y.axis[1];
    }
  }
}

// kSh, kKh, kS, kK, kR, and blocks that a multiprocessor is to hold
#define UPFOLD_SHORT(DO, Value) \
  DO(Value, 2, 4, 2, 4, 1, 4)   \
  DO(Value, 2, 2, 2, 2, 0, 4)   \
  DO(Value, 2, 3, 2, 3, 1, 4)   \
  DO(Value, 1, 3, 1, 3, 0, 3)   \
  DO(Value, 1, 5, 1, 5, 0, 2)   \
  DO(Value, 2, 5, 2, 5, 0, 3)   \
  DO(Value, 2, 6, 2, 6, 0, 2)   \
  DO(Value, 2, 8, 2, 8, 1, 2)   \
  DO(Value, 1, 1, 2, 4, 1, 4)
// kMh, kM, kHalves, and the same
#define UPFOLD_WIDE(DO, Value) \
  DO(Value, 2, 2, false, 4)    \
  DO(Value, 2, 2, true, 4)     \
  DO(Value, 1, 2, false, 4)    \
  DO(Value, 1, 2, true, 4)     \
  DO(Value, 1, 1, false, 4)

#define UPFOLD_ARGUMENTS(Value) (const DepthwiseJob, const Value*, const Value*, const Value*, Value*);
#define UPFOLD_MAKE_SHORT(Value, kSh, kKh, kS, kK, kR, kBlocks) \
  template __global__ void depthwise_walk_kernel<ShortWalk<Value, kSh, kKh, kS, kK, kR>, kBlocks> UPFOLD_ARGUMENTS(Value)
#define UPFOLD_MAKE_WIDE(Value, kMh, kM, kHalves, kBlocks) \
  template __global__ void depthwise_walk_kernel<WideWalk<Value, kMh, kM, kHalves>, kBlocks> UPFOLD_ARGUMENTS(Value)
#define UPFOLD_MAKE(dtype, Value)        \
  UPFOLD_SHORT(UPFOLD_MAKE_SHORT, Value) \
  UPFOLD_WIDE(UPFOLD_MAKE_WIDE, Value)
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

// A short walk's kernel, and whether its vectors of x begin where those of y do.
bool is_short(const Problem& p, std::int64_t stride_h, std::int64_t kernel_h, std::int64_t stride, std::int64_t kernel,
              std::int64_t phase) {
  const std::int64_t before = (kernel - 1) / 2 / stride;  // kUnitsBefore
  return has_kernel(p, stride_h, kernel_h, stride, kernel) && p.pad_w == before * stride + phase;
}

// Short walks: on an H200 four waves of them were 5 % faster than one.
DepthwiseJob walk_job(const Problem& p, bool all_phases) {
  DepthwiseJob job = depthwise_job(p);
  job.first_unit = std::int32_t(p.pad_h / p.stride_h);
  const std::int64_t units =
      all_phases ? (p.out_h - 1 + p.pad_h) / p.stride_h - job.first_unit + 1 : ceil_div(p.out_h, p.stride_h);
  job.columns = make_divisor(p.out_w * element_bytes(p.dtype) / 16);
  job.phases = make_divisor(all_phases ? 1 : std::min(p.stride_h, p.out_h)), job.depth = make_divisor(p.out_d);
  const Walks walks = walks_of(units, depthwise_threads(job, p.batch), 4);
  job.tiles = make_divisor(walks.count), job.tiles_of_run = std::int32_t(walks.steps);
  job.threads = std::uint32_t(depthwise_threads(job, p.batch));
  return job;
}

template <typename Value>
using WalkKernel = void (*)(const DepthwiseJob, const Value*, const Value*, const Value*, Value*);

// The kernel for a problem, or null.
template <typename Value>
WalkKernel<Value> kernel_of(const Problem& p, const DepthwiseOperands& operands, bool& all_phases) {
  all_phases = true;
  if (!depthwise_aligned(p, p.y, p.out_w, operands.y, 16)) return nullptr;
#define UPFOLD_CHOOSE(type, kSh, kKh, kS, kK, kR, kBlocks)                                                         \
  if (is_short(p, kSh, kKh, kS, kK, kR)) {                                                                         \
    using Walk = ShortWalk<Value, kSh, kKh, kS, kK, kR>;                                                           \
    const bool whole = depthwise_aligned(p, p.x, p.in_w, operands.x, std::int64_t(Walk::kMiddle * sizeof(Value))); \
    return whole ? depthwise_walk_kernel<Walk, kBlocks> : nullptr;                                                 \
  }
  UPFOLD_SHORT(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
  all_phases = false;
#define UPFOLD_CHOOSE(type, kMh, kM, kHalves, kBlocks) \
  if (is_wide(p, kVector<Value>, kMh, kM, kHalves)) return depthwise_walk_kernel<WideWalk<Value, kMh, kM, kHalves>, kBlocks>;
  UPFOLD_WIDE(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
  return nullptr;
}

template <typename Value>
bool run(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  bool all_phases;
  const WalkKernel<Value> kernel = kernel_of<Value>(p, operands, all_phases);
  if (kernel == nullptr) return false;
  const DepthwiseJob job = walk_job(p, all_phases);
  launch_in_turn("depthwise", kernel, launch, unsigned(ceil_div(job.threads, kDepthwiseThreads)), kDepthwiseThreads, job,
                 static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.w),
                 static_cast<const Value*>(operands.bias), static_cast<Value*>(operands.y));
  return true;
}

}  // namespace

bool depthwise_walk(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  // A call of any other activation would take the registers that the taps lie in.
  if (p.activation != Activation::kNone && p.activation != Activation::kRelu) return false;
  if (!depthwise_dense(p) || p.kernel_d != 1 || p.stride_d != 1) return false;
  return with_value(p, [&](auto value) { return run<decltype(value)>(launch, p, operands); });
}

}  // namespace upfold::cuda
#endif
