// What the depthwise kernels of channels_last tensors share. A lane owns kC neighbouring channels, and a thread walks down a
// column of units as in depthwise_walk.cuh: of the outputs of one unit of both axes, where kernels and strides are known when
// compiling; or of the outputs of one phase of both axes, whose taps are those of a convolution of stride 1. Lanes of a warp have
// neighbouring channels and then neighbouring columns, so that every access is of whole sectors.
#pragma once

#include "depthwise_walk.cuh"

namespace upfold::cuda {

struct DepthwiseLastJob {
  DepthwiseJob problem;
  // A block's number, fastest first: group of channels, phase of the H axis, part of the steps. A step's, fastest first: row (of
  // units or of a phase), block of columns, depth, sample. A thread's: lane, slot (column of the block).
  Divisor groups, phases, rows, column_blocks, depth, lanes, kernel_w, stride_h;
  std::int32_t slots, columns, vectors;  // columns of a block; of all; lanes of all channels
  std::int32_t first_row, first_column;  // units of row 0 and column 0
  std::uint32_t staged, steps, length;   // taps that a block stages, for all its channels; of all; of a part
  std::uint32_t parts;
};

// Channels of a thread as they lie in memory.
template <typename Value, int kC>
struct LaneVector {
  static constexpr int kWords = kC * int(sizeof(Value)) / 4;
  std::uint32_t words[kWords];

  __device__ __forceinline__ void load(const Value* __restrict__ from, bool there) {
    if constexpr (kWords == 4) {
      const uint4 found = there ? *reinterpret_cast<const uint4*>(from) : uint4{};
      words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
    } else if constexpr (kWords == 2) {
      const uint2 found = there ? *reinterpret_cast<const uint2*>(from) : uint2{};
      words[0] = found.x, words[1] = found.y;
    } else {
      words[0] = there ? *reinterpret_cast<const std::uint32_t*>(from) : 0;
    }
  }
  __device__ __forceinline__ void widen(float (&to)[kC]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) Bits<Value>::widen_word(words[i], to + i * (4 / int(sizeof(Value))));
  }
};

struct LastThread {
  std::int32_t group, phase, lane, slot, vector, channel;  // the vector is that of all channels, the channel its first
  std::uint32_t begin, end, part;                          // steps
  bool live;
};

// Columns of a row.
template <typename Value, int kC, int kColumns>
UPFOLD_DEVICE void load_lanes(LaneVector<Value, kC> (&row)[kColumns], const Value* __restrict__ from, bool there,
                              const bool (&reads)[kColumns], const std::int32_t (&columns)[kColumns]) {
#pragma unroll
  for (int m = 0; m < kColumns; ++m) row[m].load(from + columns[m], there && reads[m]);
}

template <int kC>
UPFOLD_DEVICE LastThread last_thread(const DepthwiseLastJob& job) {
  LastThread t;
  std::uint32_t rest = blockIdx.x, slot = threadIdx.x;
  t.group = std::int32_t(take(job.groups, rest)), t.phase = std::int32_t(take(job.phases, rest));
  t.lane = std::int32_t(take(job.lanes, slot)), t.slot = std::int32_t(slot);
  t.vector = t.group * std::int32_t(job.lanes.value) + t.lane, t.channel = t.vector * kC;
  t.part = rest, t.begin = rest * job.length;
  t.end = job.steps - t.begin < job.length ? job.steps : t.begin + job.length;
  t.live = t.vector < job.vectors && t.slot < job.slots;
  return t;
}

// The taps of a block's channels, as staged[(row * kernel_w + kw) * pitch + channel]: rows first, first + step, ... of the
// kernel, zero behind its end. Neighbouring threads read neighbouring taps.
constexpr int kPadding = 4;  // so that neighbouring taps lie in different banks
template <int kC>
UPFOLD_DEVICE std::int32_t staged_pitch(const DepthwiseLastJob& job) {
  return std::int32_t(job.lanes.value) * kC + kPadding;
}
template <int kC, int kRows, typename Value>
UPFOLD_DEVICE void stage_taps(const DepthwiseLastJob& job, const LastThread& thread, const Value* __restrict__ w,
                              std::int32_t first, std::int32_t step, float* staged) {
  const DepthwiseStrides& s = job.problem.w;
  const std::int32_t begin = thread.group * std::int32_t(job.lanes.value) * kC, pitch = staged_pitch<kC>(job);
#pragma unroll 8
  for (std::uint32_t i = threadIdx.x; i < job.staged; i += blockDim.x) {
    std::uint32_t rest = i;
    const std::int32_t kw = std::int32_t(take(job.kernel_w, rest)), row = std::int32_t(rest) % kRows,
                       c = std::int32_t(rest) / kRows;
    const std::int32_t kh = first + row * step;
    const bool there = kh < job.problem.axis[1].kernel && begin + c < job.vectors * kC;
    staged[(row * std::int32_t(job.kernel_w.value) + kw) * pitch + c] =
        there ? widen(w[(begin + c) * s.n + kh * s.axis[1] + kw * s.axis[2]]) : 0.0f;
  }
}

// Taps of a phase, the first of them, and where that reads.
struct LastPhase {
  std::int32_t count, first_tap, first_in;
};
UPFOLD_DEVICE LastPhase last_phase(const AxisTaps<std::int32_t>& a, const Divisor& stride, std::int32_t o) {
  if (a.dilation != 1) {
    const TapRun<std::int32_t> run = taps_of_output(a, o);
    return {run.first_tap < a.kernel ? (a.kernel - 1 - run.first_tap) / a.tap_step + 1 : 0, run.first_tap, run.first_in};
  }
  std::uint32_t in = std::uint32_t(o + a.pad);
  const std::int32_t tap = std::int32_t(take(stride, in));
  const std::int32_t count = tap < a.kernel ? std::int32_t(divide(stride, std::uint32_t(a.kernel - 1 - tap))) + 1 : 0;
  return {count, tap, std::int32_t(in)};
}

// A walk. kSh, kKh and kS, kK: strides and kernels of the H and W axes. Or where kPhaseH, 1 and the taps of a phase at most;
// where kPhaseW, the neighbouring outputs of a thread, which lie in one unit, and all their taps.
template <int kSh, int kKh, int kS, int kK, bool kPhaseH, bool kPhaseW>
struct LastWalk {
  static constexpr int kMh = (kKh + kSh - 1) / kSh, kM = (kK + kS - 1) / kS;
  std::int32_t sample, id, od;
  std::int32_t ih, oh, in_end;     // of the first step
  std::int32_t iw, ow, first_tap;  // of the W axis
  std::uint32_t steps, taken;      // of them are some beyond the last output
  bool reads[kM], writes[kS];

  // `phase`: of the block, where it has one.
  __device__ __forceinline__ void begin(const DepthwiseLastJob& job, const LastThread& thread, const LastPhase& phase,
                                        std::uint32_t at) {
    const AxisTaps<std::int32_t>&h = job.problem.axis[1], &v = job.problem.axis[2];
    std::uint32_t rest = at;
    const std::int32_t row = std::int32_t(take(job.rows, rest));
    const std::int32_t column = std::int32_t(take(job.column_blocks, rest)) * job.slots + thread.slot;
    od = std::int32_t(take(job.depth, rest)), id = od + job.problem.axis[0].pad, sample = std::int32_t(rest);
    const std::uint32_t left = job.rows.value - std::uint32_t(row);
    taken = thread.end - at < left ? thread.end - at : left;
    const bool live = thread.live && column < job.columns;
    ih = kPhaseH ? phase.first_in + row : job.first_row + row;
    oh = kPhaseH ? thread.phase + row * h.stride : ih * kSh - h.pad;
    if constexpr (kPhaseW) {
      const LastPhase found = last_phase(v, job.problem.stride_w, live ? column * kS : 0);
      iw = found.first_in, ow = column * kS, first_tap = found.first_tap;
#pragma unroll
      for (int m = 0; m < kM; ++m) reads[m] = live && m < found.count && inside(iw - m * v.in_step, v.in_end);
    } else {
      iw = job.first_column + column, ow = iw * kS - v.pad, first_tap = 0;
#pragma unroll
      for (int m = 0; m < kM; ++m) reads[m] = live && inside(iw - m, v.in_end);
    }
#pragma unroll
    for (int p = 0; p < kS; ++p) writes[p] = live && inside(ow + p, v.out_count);
    const std::uint32_t rows = oh < h.out_count ? divide(job.stride_h, std::uint32_t(h.out_count - 1 - oh)) + 1 : 0;
    steps = !live ? 0 : rows < taken ? rows : taken;
    const std::int32_t end = ih + std::int32_t(steps);
    in_end = !inside(id, job.problem.axis[0].in_end) ? 0 : h.in_end < end ? h.in_end : end;
  }
  // Of column m of x, beside the first.
  static __device__ __forceinline__ std::int32_t column_offset(const DepthwiseLastJob& job, int m) {
    return -m * (kPhaseW ? job.problem.axis[2].in_step : 1) * job.problem.x.axis[2];
  }
  __device__ __forceinline__ std::int32_t offset_in_x(const DepthwiseLastJob& job, const LastThread& thread) const {
    const DepthwiseStrides& s = job.problem.x;
    return sample * s.n + thread.channel + id * s.axis[0] + ih * s.axis[1] + iw * s.axis[2];
  }
  __device__ __forceinline__ std::int32_t offset_in_y(const DepthwiseLastJob& job, const LastThread& thread) const {
    const DepthwiseStrides& s = job.problem.y;
    return sample * s.n + thread.channel + od * s.axis[0] + oh * s.axis[1] + ow * s.axis[2];
  }
  static __device__ __forceinline__ constexpr bool reaches(int phase, int mh, int p, int m) {
    return phase + mh * kSh < kKh && p + m * kS < kK;
  }
};

#ifndef __CUDACC_RTC__
constexpr std::int64_t kMostStaged = 8192;      // floats
constexpr std::int64_t kFewestLanes = 4;        // of neighbouring channels, unless there are no more
constexpr std::int64_t kMultiprocessors = 132;  // of an H200

// Whether kernels and strides are those of a list, without dilation.
inline bool last_is(const Problem& p, std::int64_t stride_h, std::int64_t kernel_h, std::int64_t stride, std::int64_t kernel) {
  return has_kernel(p, stride_h, kernel_h, stride, kernel) && dense_taps(axis_h(p)) && dense_taps(axis_w(p));
}
// Whether tensors begin at a vector of channels.
bool depthwise_last_aligned(const Problem& p, const DepthwiseOperands& operands);
// Taps of a phase at most: those of an instance on both axes, or 0 where none has as many.
struct LastTaps {
  int h, w;
};
LastTaps depthwise_last_taps(const Problem& p);

struct LastShape {
  enum Steps { kUnits, kPhases, kPixels } rows, columns;  // of all phases of a unit; of one phase of y; of x
  std::int64_t run;                                       // neighbouring outputs of a thread, where it has one phase
  bool whole;                                             // every slot keeps its phase of the W axis
  std::int64_t channels;                                  // of a lane
  std::int64_t staged_rows;                               // of the kernel, in shared memory
  std::int64_t blocks;                                    // wanted
};
// The adjoint in x of strides of eight.
bool depthwise_last_eight_fits(const Problem& p);
bool depthwise_last_eight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands);
// Without parts where no block is possible.
DepthwiseLastJob depthwise_last_job(const Problem& p, const LastShape& shape);
// Whether an instance is for a problem whose phases have so many taps: kSh, kKh and kS, kK of a LastWalk. Of the H axis, more
// taps will do.
inline bool last_takes(const Problem& p, const LastTaps& taps, const LastTaps& of, int stride_h, int stride, bool phase_h,
                       bool phase_w) {
  const bool row = phase_h ? taps.h > 0 && taps.h <= of.h : p.stride_h == stride_h && p.kernel_h == of.h && dense_taps(axis_h(p));
  const bool runs =
      stride == 1 || (p.stride_w % stride == 0 && p.pad_w % stride == 0 && p.kernel_w % p.stride_w == 0 && dense_taps(axis_w(p)));
  const bool column =
      phase_w ? runs && taps.w <= of.w / stride : p.stride_w == stride && p.kernel_w == of.w && dense_taps(axis_w(p));
  return row && column;
}
inline int last_staged_bytes(const DepthwiseLastJob& job, std::int64_t taps, std::int64_t channels) {
  return int(taps * (job.lanes.value * channels + kPadding) * 4);
}
inline unsigned last_threads(const DepthwiseLastJob& job) { return unsigned(ceil_div(job.lanes.value * job.slots, 32) * 32); }
inline unsigned last_blocks(const DepthwiseLastJob& job) { return job.groups.value * job.phases.value * job.parts; }
#endif

}  // namespace upfold::cuda
