// The depthwise method, the adjoint in w for channels_last tensors. A block owns a group of channels, a few columns and a part of
// the steps down them, as forward (depthwise_last.cu). A thread sums the products of its channels in registers; the columns of a
// block are added in a fixed order, and a second kernel adds the parts in a fixed order. partial[part][tap][channel].
#include "depthwise_last.cuh"
#include "depthwise_weight.cuh"

namespace upfold::cuda {

template <typename Type, int kCount, int kSh, int kKh, int kS, int kK, bool kPhaseH, bool kPhaseW>
struct LastWeight {
  using Value = Type;
  using Walk = LastWalk<kSh, kKh, kS, kK, kPhaseH, kPhaseW>;
  static constexpr bool kOfPhaseH = kPhaseH, kOfPhaseW = kPhaseW;
  static constexpr int kC = kCount, kRows = kKh, kRun = kS, kColumns = kK, kSums = kKh * kK * kC;
  static constexpr int kMh = Walk::kMh, kM = Walk::kM, kLast = kMh - 1;
  // Rows of y and of x that are under way: those of y come from memory, those of x are read by the neighbours too.
  static constexpr int kUnroll = kMh == 3 ? 3 : kPhaseW && kS * sizeof(Value) < 8 ? 4 : 2;
  static constexpr int kAheadY = kUnroll, kAheadX = kMh == 3 ? 3 : 2;
  float sums[kSums];

  // The products of a step: those of row first - mh (modulo kMh) with the outputs of the unit. Where kAll, all are inside; what
  // is not is not multiplied, so that no NaN meets a zero in its place.
  template <bool kAll>
  __device__ __forceinline__ void add_step(const float (&rows)[kMh][kM][kC], const float (&of_y)[kSh][kS][kC], int first,
                                           const Walk& walk, const bool (&x_rows)[kMh], const bool (&y_rows)[kSh]) {
#pragma unroll
    for (int i = 0; i < kSh * kS * kMh * kM; ++i) {
      const int m = i % kM, p = i / kM % kS, mh = i / (kM * kS) % kMh, ph = i / (kM * kS * kMh);
      if (!Walk::reaches(ph, mh, p, m)) continue;
      if (!(kAll || (x_rows[mh] && y_rows[ph] && walk.reads[m] && walk.writes[p]))) continue;
#pragma unroll
      for (int c = 0; c < kC; ++c) {
        float& sum = sums[((ph + mh * kSh) * kK + p + m * kS) * kC + c];
        add_product(sum, rows[(first + kMh - mh) % kMh][m][c], of_y[ph][p][c]);
      }
    }
  }

  // Steps whose rows are all inside, of a thread whose columns are: from `first` on, so many.
  struct Inner {
    std::int32_t first, count;
  };
  static __device__ __forceinline__ Inner inner_steps(const Walk& walk, std::int32_t count, std::int32_t steps,
                                                      std::int32_t y_end) {
    bool whole = count == kMh;
#pragma unroll
    for (int m = 0; m < kM; ++m) whole = whole && walk.reads[m];
#pragma unroll
    for (int i = 0; i < kS; ++i) whole = whole && walk.writes[i];
    const std::int32_t first = max(kLast - walk.ih, walk.oh < 0 ? 1 : 0);
    const std::int32_t below = kSh > 1 && y_end - walk.oh < steps * kSh ? steps - 1 : steps;
    return {first, whole ? max(min(below, walk.in_end - walk.ih) - first, 0) : 0};
  }

  __device__ __forceinline__ void run(const DepthwiseLastJob& job, const LastThread& thread, const Walk& walk, std::int32_t count,
                                      const Value* __restrict__ x, const Value* __restrict__ y) {
    const DepthwiseJob& p = job.problem;
    const AxisTaps<std::int32_t>& h = p.axis[1];
    const std::int32_t step_x = p.x.axis[1], step_y = h.stride * p.y.axis[1];
    std::int32_t columns[kM], outputs[kS], ih = walk.ih - kLast, oh = walk.oh;
#pragma unroll
    for (int m = 0; m < kM; ++m) columns[m] = Walk::column_offset(job, m);
#pragma unroll
    for (int i = 0; i < kS; ++i) outputs[i] = i * p.y.axis[2];
    const std::int32_t steps = std::int32_t(walk.steps), y_end = min(h.out_count, walk.oh + steps * h.stride);
    const Value* from = x + (walk.offset_in_x(job, thread) - kLast * step_x);
    const Value* of = y + walk.offset_in_y(job, thread);
    float rows[kMh][kM][kC];
    LaneVector<Value, kC> above[kLast > 0 ? kLast : 1][kM], next_x[kAheadX][kM], next_y[kAheadY][kSh][kS];
#pragma unroll
    for (int i = 0; i < kAheadY * kSh; ++i) {
      const std::int32_t row = i / kSh * h.stride + i % kSh;
      load_lanes(next_y[i / kSh][i % kSh], of + row * p.y.axis[1], inside(oh + row, y_end), walk.writes, outputs);
    }
#pragma unroll
    for (int i = 0; i < kLast + kAheadX; ++i, ++ih, from += step_x) {
      load_lanes(i < kLast ? above[i < kLast ? i : 0] : next_x[i < kLast ? 0 : i - kLast], from, inside(ih, walk.in_end),
                 walk.reads, columns);
    }
#pragma unroll
    for (int i = 0; i < kLast * kM; ++i) above[i / kM][i % kM].widen(rows[i / kM][i % kM]);
    ih = walk.ih;
    of += kAheadY * step_y;
    const Inner inner = inner_steps(walk, count, steps, y_end);
#pragma unroll 1
    for (std::int32_t step = 0; step < steps; step += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i > 0 && step + i >= steps) return;
        float of_y[kSh][kS][kC];
        bool x_rows[kMh], y_rows[kSh];
#pragma unroll
        for (int m = 0; m < kM; ++m) next_x[i % kAheadX][m].widen(rows[(i + kLast) % kMh][m]);
        load_lanes(next_x[i % kAheadX], from, inside(ih + kAheadX, walk.in_end), walk.reads, columns);
#pragma unroll
        for (int j = 0; j < kSh * kS; ++j) next_y[i % kAheadY][j / kS][j % kS].widen(of_y[j / kS][j % kS]);
#pragma unroll
        for (int ph = 0; ph < kSh; ++ph) {
          const bool there = inside(oh + kAheadY * h.stride + ph, y_end);
          load_lanes(next_y[i % kAheadY][ph], of + ph * p.y.axis[1], there, walk.writes, outputs);
          y_rows[ph] = inside(oh + ph, y_end);
        }
#pragma unroll
        for (int mh = 0; mh < kMh; ++mh) x_rows[mh] = mh < count && inside(ih - mh, walk.in_end);
        inside(step + i - inner.first, inner.count) ? add_step<true>(rows, of_y, i + kLast, walk, x_rows, y_rows)
                                                    : add_step<false>(rows, of_y, i + kLast, walk, x_rows, y_rows);
        ++ih, from += step_x, oh += h.stride, of += step_y;
      }
    }
  }
};

// Adds the sums of slots that have the same taps to those of the first of them. All threads of a block take part.
template <int kSums>
UPFOLD_DEVICE void add_slots(float (&sums)[kSums], std::int32_t copy, std::int32_t copies, std::int32_t at, std::int32_t width,
                             float* exchange) {
  constexpr int kHalf = kDepthwiseThreads / 2;
  for (std::int32_t count = copies; count > 1;) {
    const std::int32_t half = (count + 1) / 2;
    if (copy >= half && copy < count) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) exchange[i * kHalf + (copy - half) * width + at] = sums[i];
    }
    __syncthreads();  // the upper half is there
    if (copy < count - half) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] += exchange[i * kHalf + copy * width + at];
    }
    __syncthreads();  // and has been read
    count = half;
  }
}

template <typename Weight, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    depthwise_last_weight_kernel(const DepthwiseLastJob job, const typename Weight::Value* __restrict__ x,
                                 const typename Weight::Value* __restrict__ y, float* __restrict__ partial) {
  constexpr int kC = Weight::kC, kRows = Weight::kRows, kColumns = Weight::kColumns;
  constexpr bool kPhaseH = Weight::kOfPhaseH, kPhaseW = Weight::kOfPhaseW;
  const AxisTaps<std::int32_t>&h = job.problem.axis[1], &v = job.problem.axis[2];
  take_turn();
  __shared__ float exchange[Weight::kSums * kDepthwiseThreads / 2];
  const LastThread thread = last_thread<kC>(job);
  LastPhase phase{Weight::Walk::kMh, 0, 0};
  if (kPhaseH) phase = last_phase(h, job.stride_h, thread.phase);
  Weight weight;
#pragma unroll
  for (int i = 0; i < Weight::kSums; ++i) weight.sums[i] = 0.0f;
#pragma unroll 1
  for (std::uint32_t at = thread.begin; at < thread.end;) {
    typename Weight::Walk walk;
    walk.begin(job, thread, phase, at);
    weight.run(job, thread, walk, phase.count, x, y);
    at += walk.taken;
  }
  const std::int32_t width = kPhaseW ? v.stride / Weight::kRun : 1, lanes = std::int32_t(job.lanes.value);
  const bool used = thread.slot < job.slots;
  add_slots(weight.sums, used ? thread.slot / width : job.slots, job.slots / width, thread.slot % width * lanes + thread.lane,
            width * lanes, exchange);
  if (!thread.live || thread.slot >= width) return;
  std::int32_t first_tap = 0;
  if (kPhaseW) first_tap = last_phase(v, job.problem.stride_w, thread.slot * Weight::kRun).first_tap;
  const std::int32_t channels = job.vectors * kC;
  float* const to = partial + std::int64_t(thread.part) * channels * h.kernel * v.kernel + thread.channel;
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) {
    const int column = i % kColumns;
    const std::int32_t kh = phase.first_tap + i / kColumns * (kPhaseH ? h.tap_step : 1);
    const std::int32_t kw = kPhaseW ? first_tap + column % Weight::kRun + column / Weight::kRun * v.tap_step : column;
    if (kh >= h.kernel || kw >= v.kernel) continue;
#pragma unroll
    for (int c = 0; c < kC; ++c) to[(kh * v.kernel + kw) * channels + c] = weight.sums[i * kC + c];
  }
}

constexpr int kShares = 16;  // of the parts of an element

struct LastSumJob {
  Divisor channels, kernel_w;
  DepthwiseStrides w;
  std::uint32_t elements, parts;
};

// w from the sums of the parts: kShares threads add every so-manieth part of an element, and the first of them their sums.
template <typename Value>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_last_weight_sum_kernel(const LastSumJob job, const float* __restrict__ partial, Value* __restrict__ w) {
  constexpr int kElements = kDepthwiseThreads / kShares;
  __shared__ float sums[kShares][kElements];
  const std::uint32_t at = threadIdx.x % kElements, share = threadIdx.x / kElements;
  const std::uint32_t element = blockIdx.x * kElements + at;
  take_turn();
  float sum = 0.0f;
  if (element < job.elements) {
#pragma unroll 8
    for (std::uint32_t part = share; part < job.parts; part += kShares)
      sum += partial[std::int64_t(part) * job.elements + element];
  }
  sums[share][at] = sum;
  __syncthreads();  // the sums of all shares are there
  if (share > 0 || element >= job.elements) return;
#pragma unroll
  for (int i = 1; i < kShares; ++i) sum += sums[i][at];
  std::uint32_t tap = element;
  const std::int32_t channel = std::int32_t(take(job.channels, tap)), kw = std::int32_t(take(job.kernel_w, tap));
  w[channel * job.w.n + std::int32_t(tap) * job.w.axis[1] + kw * job.w.axis[2]] = Narrow<Value>::from(sum);
}

// float32 has twice as much under way.
template <typename Value, int kBlocks>
constexpr int kFitting = sizeof(Value) == 4 && kBlocks > 2 ? kBlocks - 1 : kBlocks;

// Channels of a lane, kSh, kKh, kS, kK, kPhaseH, kPhaseW, and blocks that a multiprocessor is to hold; the first that takes a
// problem is its own.
#define UPFOLD_WALKS(DO, Value)             \
  DO(Value, 4, 2, 2, 2, 2, false, false, 2) \
  DO(Value, 4, 1, 2, 2, 4, true, false, 2)  \
  DO(Value, 2, 2, 3, 2, 3, false, false, 3) \
  DO(Value, 4, 1, 1, 2, 2, true, true, 3)   \
  DO(Value, 4, 1, 1, 1, 1, true, true, 4)   \
  DO(Value, 4, 1, 2, 2, 4, true, true, 2)   \
  DO(Value, 4, 1, 2, 1, 2, true, true, 3)   \
  DO(Value, 2, 1, 3, 1, 3, true, true, 3)
#define UPFOLD_MAKE_WALK(Value, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW, kBlocks)                                     \
  template __global__ void                                                                                           \
  depthwise_last_weight_kernel<LastWeight<Value, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW>, kFitting<Value, kBlocks>>( \
      const DepthwiseLastJob, const Value*, const Value*, float*);
#define UPFOLD_MAKE(dtype, Value)       \
  UPFOLD_WALKS(UPFOLD_MAKE_WALK, Value) \
  template __global__ void depthwise_last_weight_sum_kernel<Value>(const LastSumJob, const float*, Value*);
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Value>
using LastKernel = void (*)(const DepthwiseLastJob, const Value*, const Value*, float*);

template <typename Value>
struct Found {
  LastKernel<Value> kernel;
  int channels, blocks, run;
  bool phase_h, phase_w;
};

template <typename Value>
Found<Value> kernel_of(const Problem& p) {
  const LastTaps taps = depthwise_last_taps(p);
#define UPFOLD_CHOOSE(type, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW, kBlocks)                                                   \
  if (last_takes(p, taps, {kKh, kK}, kSh, kS, kPhaseH, kPhaseW))                                                               \
    return {depthwise_last_weight_kernel<LastWeight<Value, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW>, kFitting<Value, kBlocks>>, \
            kC,                                                                                                                \
            kFitting<Value, kBlocks>,                                                                                          \
            kS,                                                                                                                \
            kPhaseH,                                                                                                           \
            kPhaseW};
  UPFOLD_WALKS(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
  return {};
}

// Without parts where nothing fits. One wave of blocks, so that there are few parts.
template <typename Value>
DepthwiseLastJob job_of(const Problem& p, const Found<Value>& found) {
  if (found.kernel == nullptr || p.kernel_d != 1 || p.stride_d != 1 || !depthwise_last_vectors(p)) return {};
  if (found.phase_h && p.out_h < p.stride_h) return {};  // not all taps have an owner
  const std::int64_t fit = std::max<std::int64_t>(1, kMostPartial / (p.out_channels * kernel_taps(p) * 4));
  const LastShape shape{found.phase_h ? LastShape::kPhases : LastShape::kUnits,
                        found.phase_w ? LastShape::kPhases : LastShape::kUnits,
                        found.run,
                        found.phase_w,
                        found.channels,
                        0,
                        kMultiprocessors * found.blocks};
  DepthwiseLastJob job = depthwise_last_job(p, shape);
  return std::int64_t(job.parts) <= fit ? job : DepthwiseLastJob{};
}

template <typename Value>
void run(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  const Found<Value> found = kernel_of<Value>(p);
  const DepthwiseLastJob job = job_of(p, found);
  float* const partial = static_cast<float*>(operands.workspace);
  launch_grid("depthwise", found.kernel, launch, Grid{last_blocks(job), last_threads(job), 0, true}, job,
              static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.y), partial);
  const std::int64_t elements = p.out_channels * kernel_taps(p);
  const LastSumJob sum{make_divisor(p.out_channels), make_divisor(p.kernel_w), job.problem.w, std::uint32_t(elements), job.parts};
  launch_in_turn("depthwise", depthwise_last_weight_sum_kernel<Value>, launch,
                 unsigned(ceil_div(elements, kDepthwiseThreads / kShares)), kDepthwiseThreads, sum,
                 static_cast<const float*>(partial), static_cast<Value*>(operands.w));
}

}  // namespace

std::int64_t depthwise_last_weight_bytes(const Problem& p) {
  const std::int64_t parts = with_value(p, [&](auto value) { return job_of(p, kernel_of<decltype(value)>(p)).parts; });
  return parts * p.out_channels * kernel_taps(p) * 4;
}

bool depthwise_last_weight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if (!depthwise_last_aligned(p, operands)) return false;
  with_value(p, [&](auto value) { run<decltype(value)>(launch, p, operands); });
  return true;
}

}  // namespace upfold::cuda
#endif
