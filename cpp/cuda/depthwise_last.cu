// The depthwise method, the transposed convolution of channels_last tensors. A block owns a group of channels, a few columns and
// a part of the steps down them, and stages the taps of its channels once; a thread keeps its own in registers, and reads a row
// of x at a time:
//   known: kernels and strides of a list, all phases of a unit a step, so that x is read by one thread for all of them;
//   phases: any others with few taps in each phase, of which a block owns one of the H axis;
//   loops: everything else, taps read one after the other from a packed copy.
#include "depthwise_last.cuh"

namespace upfold::cuda {

constexpr int kLanes =
    4;  // channels of a thread: 16 bytes of float32, and 8 of 16 bits, whose taps would else fill the registers

template <typename Type, int kCount, int kSh, int kKh, int kS, int kK, bool kPhaseH, bool kPhaseW>
struct LastForward {
  using Value = Type;
  using Walk = LastWalk<kSh, kKh, kS, kK, kPhaseH, kPhaseW>;
  static constexpr bool kOfPhaseH = kPhaseH, kOfPhaseW = kPhaseW;
  static constexpr int kC = kCount, kTapRows = kKh, kMh = Walk::kMh, kM = Walk::kM, kLast = kMh - 1;
  // Rows that are under way; float32 has fewer where its taps leave few registers.
  static constexpr int kUnroll = kMh == 1 ? 2 : kMh, kAhead = kPhaseH && kMh == 2 && sizeof(Value) == 4 && kK == 4 ? 1 : kUnroll;
  float taps[kKh][kK][kC], shift[kC];

  // Rows of the kernel as they are staged, in strides of a column from the first tap.
  __device__ __forceinline__ void read_taps(const DepthwiseLastJob& job, const LastThread& thread, std::int32_t first,
                                            const float* staged) {
    const std::int32_t pitch = staged_pitch<kC>(job), step = kPhaseW ? job.problem.axis[2].tap_step : 1;
    const std::int32_t kernel = std::int32_t(job.kernel_w.value);
#pragma unroll
    for (int i = 0; i < kKh * kK * kC / 2; ++i) {
      const int tap = i / (kC / 2), c = i % (kC / 2) * 2;
      const std::int32_t kw = kPhaseW ? first + tap % kS + tap % kK / kS * step : tap % kK;
      const float* const from = staged + (tap / kK * kernel + kw) * pitch + thread.lane * kC + c;
      const float2 pair = kPhaseW && kw >= kernel ? float2{} : *reinterpret_cast<const float2*>(from);
      taps[tap / kK][tap % kK][c] = pair.x, taps[tap / kK][tap % kK][c + 1] = pair.y;
    }
  }

  // The outputs of a unit, for which rows[first - mh] (modulo kMh) is row number mh before the unit's. Where kAll, there are taps
  // for all of them.
  template <bool kAll>
  __device__ __forceinline__ void finish(const float (&rows)[kMh][kM][kC], int first, std::int32_t count, bool relu,
                                         float (&sums)[kSh * kS][kC]) const {
#pragma unroll
    for (int i = 0; i < kSh * kS * kC; ++i) sums[i / kC][i % kC] = shift[i % kC];
#pragma unroll
    for (int mh = 0; mh < kMh; ++mh) {
      if (!kAll && mh >= count) continue;
#pragma unroll
      for (int i = 0; i < kM * kSh * kS * kC; ++i) {
        const int c = i % kC, p = i / kC % kS, ph = i / (kC * kS) % kSh, m = i / (kC * kS * kSh);
        if (!Walk::reaches(ph, mh, p, m)) continue;
        add_product(sums[ph * kS + p][c], rows[(first + kMh - mh) % kMh][m][c], taps[ph + mh * kSh][p + m * kS][c]);
      }
    }
    if (!relu) return;
#pragma unroll
    for (int i = 0; i < kSh * kS * kC; ++i) {
      float& sum = sums[i / kC][i % kC];
      sum = sum < 0.0f ? 0.0f : sum;  // a NaN stays
    }
  }

  template <bool kAll>
  __device__ __forceinline__ void run(const DepthwiseLastJob& job, const LastThread& thread, const Walk& walk, std::int32_t count,
                                      const Value* __restrict__ x, Value* __restrict__ y) const {
    const DepthwiseJob& p = job.problem;
    const std::int32_t step_x = p.x.axis[1];
    const bool relu = p.activation == Activation::kRelu;
    std::int32_t columns[kM], ih = walk.ih - kLast, oh = walk.oh;
#pragma unroll
    for (int m = 0; m < kM; ++m) columns[m] = Walk::column_offset(job, m);
    const Value* from = x + (walk.offset_in_x(job, thread) - kLast * step_x);
    Value* to = y + walk.offset_in_y(job, thread);
    float rows[kMh][kM][kC];
    LaneVector<Value, kC> above[kLast > 0 ? kLast : 1][kM], next[kAhead][kM];
#pragma unroll
    for (int i = 0; i < kLast + kAhead; ++i, ++ih, from += step_x) {
      load_lanes(i < kLast ? above[i < kLast ? i : 0] : next[i < kLast ? 0 : i - kLast], from, inside(ih, walk.in_end),
                 walk.reads, columns);
    }
#pragma unroll
    for (int i = 0; i < kLast * kM; ++i) above[i / kM][i % kM].widen(rows[i / kM][i % kM]);
#pragma unroll 1
    for (std::uint32_t step = 0; step < walk.steps; step += kUnroll) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (i > 0 && step + i >= walk.steps) return;
#pragma unroll
        for (int m = 0; m < kM; ++m) next[i % kAhead][m].widen(rows[(i + kLast) % kMh][m]);
        load_lanes(next[i % kAhead], from, inside(ih, walk.in_end), walk.reads, columns);
        float sums[kSh * kS][kC];
        finish<kAll>(rows, i + kLast, count, relu, sums);
#pragma unroll
        for (int j = 0; j < kSh * kS; ++j) {
          const bool column = (kPhaseW && kS == 1) || walk.writes[j % kS];
          const bool there = column && (kPhaseH || inside(oh + j / kS, p.axis[1].out_count));
          if (there) store_results(to + (j / kS * p.y.axis[1] + j % kS * p.y.axis[2]), sums[j]);
        }
        ++ih, from += step_x, oh += p.axis[1].stride, to += p.axis[1].stride * p.y.axis[1];
      }
    }
  }
};

template <typename Forward, int kBlocks>
__global__ void __launch_bounds__(kDepthwiseThreads, kBlocks)
    depthwise_last_kernel(const DepthwiseLastJob job, const typename Forward::Value* __restrict__ x,
                          const typename Forward::Value* __restrict__ w, const typename Forward::Value* __restrict__ bias,
                          typename Forward::Value* __restrict__ y) {
  take_turn();
  extern __shared__ uint4 memory[];
  float* const staged = reinterpret_cast<float*>(memory);
  constexpr bool kPhaseH = Forward::kOfPhaseH, kPhaseW = Forward::kOfPhaseW;
  constexpr int kC = Forward::kC;
  const LastThread thread = last_thread<kC>(job);
  const AxisTaps<std::int32_t>& h = job.problem.axis[1];
  LastPhase phase{Forward::kMh, 0, 0};
  if (kPhaseH) phase = last_phase(h, job.stride_h, thread.phase);
  stage_taps<kC, Forward::kTapRows>(job, thread, w, phase.first_tap, kPhaseH ? h.tap_step : 1, staged);
  Forward forward;
#pragma unroll
  for (int c = 0; c < kC; ++c) {
    forward.shift[c] = bias == nullptr || thread.vector >= job.vectors ? 0.0f : widen(bias[thread.channel + c]);
  }
  __syncthreads();  // the taps are staged
  if (!thread.live) return;
  if (!kPhaseW) forward.read_taps(job, thread, 0, staged);
#pragma unroll 1
  for (std::uint32_t at = thread.begin; at < thread.end;) {
    typename Forward::Walk walk;
    walk.begin(job, thread, phase, at);
    if (kPhaseW) forward.read_taps(job, thread, walk.first_tap, staged);
    if (!kPhaseH || phase.count == Forward::kMh) {
      forward.template run<true>(job, thread, walk, phase.count, x, y);
    } else {
      forward.template run<false>(job, thread, walk, phase.count, x, y);
    }
    at += walk.taken;
  }
}

// kRows outputs of one phase, one above the other, of a thread. Its channels are `channels` of the job; w is packed.
template <typename Value, int kRows>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_last_loop_kernel(const DepthwiseJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                               const Value* __restrict__ bias, Value* __restrict__ y) {
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (number >= job.threads) return;
  const DepthwisePlace at = depthwise_place(job, number);
  const AxisTaps<std::int32_t>&d = job.axis[0], &h = job.axis[1], &v = job.axis[2];
  const std::int32_t oh0 = at.phase + at.tile * kRows * h.stride, channel = at.channel * kLanes;
  const TapRun<std::int32_t> run_h = taps_of_output(h, oh0), run_w = taps_of_output(v, at.column);
  const Value* const source = x + (at.sample * job.x.n + channel);
  float sums[kRows * kLanes] = {};
  DepthTaps depth = depth_taps(job, at.depth);
  for (; depth.tap < d.kernel; depth.tap += d.tap_step, depth.source -= d.in_step) {
    if (!inside(depth.source, d.in_end)) continue;
    std::int32_t ih = run_h.first_in;
    for (std::int32_t kh = run_h.first_tap; kh < h.kernel; kh += h.tap_step, ih -= h.in_step) {
      std::int32_t iw = run_w.first_in;
      for (std::int32_t kw = run_w.first_tap; kw < v.kernel; kw += v.tap_step, iw -= v.in_step) {
        if (!inside(iw, v.in_end)) continue;
        LaneVector<Value, kLanes> tap, rows[kRows];
        tap.load(w + (channel + depth.tap * job.w.axis[0] + kh * job.w.axis[1] + kw * job.w.axis[2]), true);
        const Value* const from = source + (depth.source * job.x.axis[0] + ih * job.x.axis[1] + iw * job.x.axis[2]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) rows[r].load(from + r * job.x.axis[1], inside(ih + r, h.in_end));
        float weights[kLanes];
        tap.widen(weights);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float values[kLanes];
          rows[r].widen(values);
          if (!inside(ih + r, h.in_end)) continue;
#pragma unroll
          for (int c = 0; c < kLanes; ++c) add_product(sums[r * kLanes + c], values[c], weights[c]);
        }
      }
    }
  }
  Value* const to = y + (at.sample * job.y.n + channel + at.depth * job.y.axis[0] + at.column * job.y.axis[2]);
#pragma unroll
  for (int c = 0; c < kLanes && bias != nullptr; ++c) {
    const float shift = widen(bias[channel + c]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r * kLanes + c] += shift;
  }
  finish_all(job, 0.0f, sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float results[kLanes];
#pragma unroll
    for (int c = 0; c < kLanes; ++c) results[c] = sums[r * kLanes + c];
    const std::int32_t oh = oh0 + r * h.stride;
    if (oh < h.out_count) store_results(to + oh * job.y.axis[1], results);
  }
}

// Channels of a lane, kSh, kKh, kS, kK, kPhaseH, kPhaseW, and blocks that a multiprocessor is to hold; the first that takes a
// problem is its own. The taps of a unit of these take so many registers that 16 bits, of which less is under way, go by phases
// of the H axis instead.
#define UPFOLD_UNITS(DO, Value)             \
  DO(Value, 4, 2, 4, 2, 4, false, false, 2) \
  DO(Value, 4, 2, 3, 2, 3, false, false, 2)
#define UPFOLD_WALKS(DO, Value)             \
  DO(Value, 4, 2, 2, 2, 2, false, false, 4) \
  DO(Value, 4, 1, 2, 2, 4, true, false, 3)  \
  DO(Value, 4, 1, 2, 2, 3, true, false, 3)  \
  DO(Value, 4, 1, 1, 2, 2, true, true, 4)   \
  DO(Value, 4, 1, 1, 1, 1, true, true, 4)   \
  DO(Value, 4, 1, 2, 2, 4, true, true, 3)   \
  DO(Value, 4, 1, 2, 1, 2, true, true, 3)   \
  DO(Value, 2, 1, 3, 1, 3, true, true, 3)
#define UPFOLD_ARGUMENTS(Value, Job) (const Job, const Value*, const Value*, const Value*, Value*);
#define UPFOLD_MAKE_WALK(Value, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW, kBlocks)                                      \
  template __global__ void depthwise_last_kernel<LastForward<Value, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW>, kBlocks> \
  UPFOLD_ARGUMENTS(Value, DepthwiseLastJob)
UPFOLD_UNITS(UPFOLD_MAKE_WALK, float)
#define UPFOLD_MAKE(dtype, Value)                                                                                       \
  UPFOLD_WALKS(UPFOLD_MAKE_WALK, Value)                                                                                 \
  template __global__ void depthwise_last_loop_kernel<Value, 2>                                                         \
  UPFOLD_ARGUMENTS(Value, DepthwiseJob) template __global__ void depthwise_last_loop_kernel<Value, 8> UPFOLD_ARGUMENTS( \
      Value, DepthwiseJob)
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

// Whether every vector of a tensor's channels begins at a multiple of its size.
bool whole_lanes(const Strides& s, std::int64_t channels) { return s.c == 1 && (s.n | s.d | s.h | s.w | channels) % kLanes == 0; }

}  // namespace

bool depthwise_last_vectors(const Problem& p) {
  return p.in_channels == p.out_channels && whole_lanes(p.x, p.in_channels) && whole_lanes(p.y, p.out_channels);
}

bool depthwise_last_aligned(const Problem& p, const DepthwiseOperands& operands) {
  const auto addresses = reinterpret_cast<std::uintptr_t>(operands.x) | reinterpret_cast<std::uintptr_t>(operands.y);
  return addresses % std::uintptr_t(kLanes * element_bytes(p.dtype)) == 0;
}

LastTaps depthwise_last_taps(const Problem& p) {
  const AxisTaps<std::int32_t> h = axis_taps(axis_h(p)), v = axis_taps(axis_w(p));
  const std::int64_t most = 64, of_h = ceil_div(h.kernel, h.tap_step), of_w = ceil_div(v.kernel, v.tap_step);
  return {h.in_step == 1 ? int(std::min(of_h, most)) : 0, int(std::min(of_w, most))};
}

DepthwiseLastJob depthwise_last_job(const Problem& p, const LastShape& shape) {
  DepthwiseLastJob job{};
  job.problem = depthwise_job(p);
  const std::int64_t vectors = p.out_channels / shape.channels, staged_taps = shape.staged_rows * p.kernel_w;
  std::int64_t lanes = std::min<std::int64_t>(64, vectors);
  const std::int64_t fewest = std::min(lanes, kFewestLanes);
  if (staged_taps > 0) lanes = std::min(lanes, (kMostStaged / staged_taps - kPadding) / shape.channels);
  if (shape.whole) lanes = std::min(lanes, kDepthwiseThreads / (p.stride_w / shape.run));
  if (lanes < fewest) return job;
  const std::int64_t groups = ceil_div(vectors, lanes);
  lanes = ceil_div(vectors, groups);
  job.first_row = std::int32_t(p.pad_h / p.stride_h), job.first_column = std::int32_t(p.pad_w / p.stride_w);
  std::int64_t rows = p.in_h, columns = p.in_w, phases = 1;
  if (shape.rows == LastShape::kUnits) rows = (p.out_h - 1 + p.pad_h) / p.stride_h - job.first_row + 1;
  if (shape.rows == LastShape::kPhases) rows = ceil_div(p.out_h, p.stride_h), phases = std::min(p.stride_h, p.out_h);
  if (shape.columns == LastShape::kUnits) columns = (p.out_w - 1 + p.pad_w) / p.stride_w - job.first_column + 1;
  if (shape.columns == LastShape::kPhases) columns = ceil_div(p.out_w, shape.run);
  const std::int64_t depth = shape.rows == LastShape::kPixels ? p.in_d : p.out_d,
                     least = shape.whole ? p.stride_w / shape.run : 1;
  const std::int64_t most = kDepthwiseThreads / lanes / least * least, column_blocks = ceil_div(columns, most);
  const std::int64_t slots = ceil_div(ceil_div(columns, column_blocks), least) * least;
  const std::int64_t steps = rows * column_blocks * depth * p.batch;
  job.groups = make_divisor(groups), job.phases = make_divisor(phases), job.rows = make_divisor(rows);
  job.column_blocks = make_divisor(column_blocks), job.depth = make_divisor(depth);
  job.lanes = make_divisor(lanes), job.kernel_w = make_divisor(p.kernel_w);
  job.stride_h = make_divisor(p.stride_h);
  job.slots = std::int32_t(slots), job.columns = std::int32_t(columns), job.vectors = std::int32_t(vectors);
  job.staged = std::uint32_t(staged_taps * lanes * shape.channels), job.steps = std::uint32_t(steps);
  const std::int64_t wanted = std::max<std::int64_t>(1, shape.blocks / (groups * phases));
  std::int64_t length = std::max(ceil_div(steps, wanted), std::min(rows, kFewestSteps));
  // Whole walks, where that takes little longer: each has to wait for its first rows.
  const std::int64_t whole = ceil_div(length, rows) * rows;
  if (16 * whole <= 17 * length) length = whole;
  job.length = std::uint32_t(length), job.parts = std::uint32_t(ceil_div(steps, length));
  return job;
}

namespace {

template <typename Value>
using LastKernel = void (*)(const DepthwiseLastJob, const Value*, const Value*, const Value*, Value*);

// A kernel, channels of a lane, blocks of it that a multiprocessor holds, the rows of the kernel that it stages, and outputs of a
// thread.
template <typename Value>
struct Found {
  LastKernel<Value> kernel;
  int channels, blocks, rows, run;
  bool phase_h, phase_w;
};

template <typename Value>
Found<Value> kernel_of(const Problem& p) {
  const LastTaps taps = depthwise_last_taps(p);
#define UPFOLD_CHOOSE(type, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW, kBlocks)                            \
  if (last_takes(p, taps, {kKh, kK}, kSh, kS, kPhaseH, kPhaseW))                                        \
    return {depthwise_last_kernel<LastForward<Value, kC, kSh, kKh, kS, kK, kPhaseH, kPhaseW>, kBlocks>, \
            kC,                                                                                         \
            kBlocks,                                                                                    \
            kKh,                                                                                        \
            kS,                                                                                         \
            kPhaseH,                                                                                    \
            kPhaseW};
  if constexpr (sizeof(Value) == 4) {
    UPFOLD_UNITS(UPFOLD_CHOOSE, Value)
  }
  UPFOLD_WALKS(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
  return {};
}

template <typename Value>
bool walk(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if (p.activation != Activation::kNone && p.activation != Activation::kRelu) return false;
  if (p.kernel_d != 1 || p.stride_d != 1) return false;
  const Found<Value> found = kernel_of<Value>(p);
  if (found.kernel == nullptr) return false;
  const LastShape shape{found.phase_h ? LastShape::kPhases : LastShape::kUnits,
                        found.phase_w ? LastShape::kPhases : LastShape::kUnits,
                        found.run,
                        false,
                        found.channels,
                        found.rows,
                        kMultiprocessors * found.blocks};
  const DepthwiseLastJob job = depthwise_last_job(p, shape);
  if (job.parts == 0) return false;
  const int bytes = last_staged_bytes(job, found.rows * p.kernel_w, found.channels);
  launch_grid("depthwise", found.kernel, launch, Grid{last_blocks(job), last_threads(job), bytes, true}, job,
              static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.w),
              static_cast<const Value*>(operands.bias), static_cast<Value*>(operands.y));
  return true;
}

template <typename Value>
void loop(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  const Problem q = depthwise_pack(launch, p, operands.w, operands.workspace);
  DepthwiseJob job = depthwise_job(q);
  job.lanes_are_channels = true, job.channels = make_divisor(p.out_channels / kLanes);
  job.columns = make_divisor(p.out_w), job.phases = make_divisor(std::min(p.stride_h, p.out_h));
  job.depth = make_divisor(p.out_d);
  const std::int64_t rows = ceil_div(p.out_h, p.stride_h);
  const bool few = depthwise_threads(job, p.batch) * ceil_div(rows, 8) < kWalkThreads;
  job.tiles = make_divisor(ceil_div(rows, few ? 2 : 8));
  job.threads = std::uint32_t(depthwise_threads(job, p.batch));
  launch_kernel("depthwise", few ? depthwise_last_loop_kernel<Value, 2> : depthwise_last_loop_kernel<Value, 8>, launch,
                unsigned(ceil_div(job.threads, kDepthwiseThreads)), kDepthwiseThreads, job, static_cast<const Value*>(operands.x),
                static_cast<const Value*>(operands.workspace), static_cast<const Value*>(operands.bias),
                static_cast<Value*>(operands.y));
}

}  // namespace

bool depthwise_last(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if (!depthwise_last_vectors(p) || !depthwise_last_aligned(p, operands)) return false;
  with_value(p, [&](auto value) {
    if (!walk<decltype(value)>(launch, p, operands)) loop<decltype(value)>(launch, p, operands);
  });
  return true;
}

}  // namespace upfold::cuda
#endif
