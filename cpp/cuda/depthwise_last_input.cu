// The depthwise method, the adjoint in x for channels_last tensors. A block owns a group of channels, a few columns of x and a
// part of the steps down them, and stages the taps of its channels once; a thread keeps its own in registers, reads the rows of y
// of one unit at a time, and adds them to the rows of x that they reach.
#include "depthwise_last.cuh"

namespace upfold::cuda {

// kSh, kKh and kS, kK: strides and kernels of the H and W axes.
template <typename Type, int kCount, int kSh, int kKh, int kS, int kK>
struct LastInput {
  using Value = Type;
  static constexpr int kC = kCount, kTapRows = kKh, kColumns = kK, kMh = (kKh + kSh - 1) / kSh, kLast = kMh - 1;
  // Units that are under way, more of them in 16 bits, which are half as many bytes.
  static constexpr int kUnroll = kMh == 3 ? 3 : sizeof(Value) == 2 ? 4 : 2, kAhead = kUnroll;
  float taps[kKh][kK][kC];

  __device__ __forceinline__ void read_taps(const DepthwiseLastJob& job, const LastThread& thread, const float* staged) {
    const std::int32_t pitch = staged_pitch<kC>(job);
#pragma unroll
    for (int i = 0; i < kKh * kK * kC; ++i) {
      taps[i / (kK * kC)][i / kC % kK][i % kC] = staged[i / kC * pitch + thread.lane * kC + i % kC];
    }
  }

  // The products of a unit: row number mh above the step's takes the taps that reach it in `sums[first - mh]` (modulo kMh).
  __device__ __forceinline__ void add_unit(const float (&of_y)[kSh][kK][kC], int first, float (&sums)[kMh][kC]) const {
#pragma unroll
    for (int c = 0; c < kC; ++c) sums[first % kMh][c] = 0.0f;
#pragma unroll
    for (int i = 0; i < kMh * kSh * kK; ++i) {
      const int kw = i % kK, ph = i / kK % kSh, mh = i / (kK * kSh), kh = ph + mh * kSh;
      if (kh >= kKh) continue;
#pragma unroll
      for (int c = 0; c < kC; ++c) add_product(sums[(first + kMh - mh) % kMh][c], of_y[ph][kw][c], taps[kh][kw][c]);
    }
  }

  // `rows` of x below row `ih`, in the column that reads from `of`.
  __device__ __forceinline__ void run(const DepthwiseLastJob& job, std::int32_t oh, std::int32_t out_count, std::int32_t rows,
                                      const bool (&reads)[kK], const Value* __restrict__ of, Value* __restrict__ to) const {
    const DepthwiseJob& p = job.problem;
    const std::int32_t step_y = kSh * p.y.axis[1], steps = rows + kLast;
    std::int32_t columns[kK];
#pragma unroll
    for (int i = 0; i < kK; ++i) columns[i] = i * p.y.axis[2];
    LaneVector<Value, kC> next[kAhead][kSh][kK];
#pragma unroll
    for (int i = 0; i < kAhead * kSh; ++i) {
      load_lanes(next[i / kSh][i % kSh], of + i * p.y.axis[1], inside(oh + i, out_count), reads, columns);
    }
    of += kAhead * step_y, oh += kAhead * kSh;
    float sums[kMh][kC] = {};
#pragma unroll 1
    for (std::int32_t step = 0; step < steps; step += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i > 0 && step + i >= steps) return;
        float of_y[kSh][kK][kC];
#pragma unroll
        for (int j = 0; j < kSh * kK; ++j) next[i % kAhead][j / kK][j % kK].widen(of_y[j / kK][j % kK]);
#pragma unroll
        for (int ph = 0; ph < kSh; ++ph) {
          load_lanes(next[i % kAhead][ph], of + ph * p.y.axis[1], inside(oh + ph, out_count), reads, columns);
        }
        add_unit(of_y, i, sums);
        if (step + i >= kLast) store_results(to, sums[(i + 1) % kMh]), to += p.x.axis[1];
        of += step_y, oh += kSh;
      }
    }
  }
};

template <typename Input, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    depthwise_last_input_kernel(const DepthwiseLastJob job, const typename Input::Value* __restrict__ y,
                                const typename Input::Value* __restrict__ w, typename Input::Value* __restrict__ x) {
  constexpr int kC = Input::kC, kColumns = Input::kColumns;
  take_turn();
  extern __shared__ uint4 memory[];
  float* const staged = reinterpret_cast<float*>(memory);
  const LastThread thread = last_thread<kC>(job);
  stage_taps<kC, Input::kTapRows>(job, thread, w, 0, 1, staged);
  __syncthreads();  // the taps are staged
  if (!thread.live) return;
  Input input;
  input.read_taps(job, thread, staged);
  const DepthwiseJob& p = job.problem;
  const AxisTaps<std::int32_t>&d = p.axis[0], &h = p.axis[1], &v = p.axis[2];
#pragma unroll 1
  for (std::uint32_t at = thread.begin; at < thread.end;) {
    std::uint32_t rest = at;
    const std::int32_t ih = std::int32_t(take(job.rows, rest));
    const std::int32_t iw = std::int32_t(take(job.column_blocks, rest)) * job.slots + thread.slot;
    const std::int32_t id = std::int32_t(take(job.depth, rest)), n = std::int32_t(rest);
    const std::uint32_t left = min(job.rows.value - std::uint32_t(ih), thread.end - at);
    const std::int32_t od = id - d.pad, oh = ih * h.stride - h.pad, ow = iw * v.stride - v.pad;
    at += left;
    if (iw >= job.columns) continue;
    bool reads[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) reads[i] = inside(ow + i, v.out_count);
    const std::int32_t of = n * p.y.n + thread.channel + od * p.y.axis[0] + oh * p.y.axis[1] + ow * p.y.axis[2];
    const std::int32_t to = n * p.x.n + thread.channel + id * p.x.axis[0] + ih * p.x.axis[1] + iw * p.x.axis[2];
    input.run(job, oh, inside(od, d.out_count) ? h.out_count : 0, std::int32_t(left), reads, y + of, x + to);
  }
}

// Channels of a lane, kSh, kKh, kS, kK, and blocks that a multiprocessor is to hold
#define UPFOLD_KNOWN(DO, Value) \
  DO(Value, 2, 2, 4, 2, 4, 2)   \
  DO(Value, 4, 2, 2, 2, 2, 2)   \
  DO(Value, 2, 2, 3, 2, 3, 2)   \
  DO(Value, 4, 1, 3, 1, 3, 2)
#define UPFOLD_MAKE_WALK(Value, kC, kSh, kKh, kS, kK, kBlocks)                                           \
  template __global__ void depthwise_last_input_kernel<LastInput<Value, kC, kSh, kKh, kS, kK>, kBlocks>( \
      const DepthwiseLastJob, const Value*, const Value*, Value*);
#define UPFOLD_MAKE(dtype, Value) UPFOLD_KNOWN(UPFOLD_MAKE_WALK, Value)
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Value>
bool run(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
#define UPFOLD_RUN_KNOWN(type, kC, kSh, kKh, kS, kK, kBlocks)                                                                   \
  if (last_is(p, kSh, kKh, kS, kK)) {                                                                                           \
    const LastShape shape{LastShape::kPixels, LastShape::kPixels, 1, false, kC, kKh, kMultiprocessors * kBlocks};               \
    const DepthwiseLastJob job = depthwise_last_job(p, shape);                                                                  \
    const Grid grid{last_blocks(job), last_threads(job), last_staged_bytes(job, kKh * kK, kC), true};                           \
    launch_grid("depthwise", depthwise_last_input_kernel<LastInput<Value, kC, kSh, kKh, kS, kK>, kBlocks>, launch, grid, job,   \
                static_cast<const Value*>(operands.y), static_cast<const Value*>(operands.w), static_cast<Value*>(operands.x)); \
    return true;                                                                                                                \
  }
  UPFOLD_KNOWN(UPFOLD_RUN_KNOWN, Value)
#undef UPFOLD_RUN_KNOWN
  return false;
}

}  // namespace

bool depthwise_last_input_fits(const Problem& p) {
#define UPFOLD_IS_KNOWN(Value, kC, kSh, kKh, kS, kK, kBlocks) || last_is(p, kSh, kKh, kS, kK)
  const bool known = false UPFOLD_KNOWN(UPFOLD_IS_KNOWN, );
#undef UPFOLD_IS_KNOWN
  if (depthwise_last_eight_fits(p)) return true;
  return known && p.kernel_d == 1 && p.stride_d == 1 && depthwise_last_vectors(p);
}

bool depthwise_last_input(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if (!depthwise_last_aligned(p, operands)) return false;
  if (depthwise_last_eight_fits(p)) return depthwise_last_eight(launch, p, operands);
  return with_value(p, [&](auto value) { return run<decltype(value)>(launch, p, operands); });
}

}  // namespace upfold::cuda
#endif
