// The depthwise method (one input channel in each group), the transposed convolution of the usual kernels. A thread owns kV
// neighbouring outputs of a row, a store of 16 bytes, in several rows, and keeps their taps in registers; every row of x that
// they need is read once for all of them. Neighbouring lanes own neighbouring runs.
//   walks: whole aligned rows (depthwise_walk.cu);
//   short: strides that divide kV, of a fixed kernel: rows of all phases of the H axis;
//   wide: strides of kV and more and kernels of kM strides: rows of one phase of the H axis, so that all have the same taps.
#include "depthwise.cuh"
#include "lanes.cuh"

namespace upfold::cuda {

template <typename Value, int kV>
constexpr int kRunWords = kV * int(sizeof(Value)) / 4;

// The first `count` outputs of a run. Where every run starts at a multiple of its size, a full one is stored at once; elsewhere
// the lanes of a warp exchange their runs, so that neighbours store neighbouring outputs. All lanes of the warp take part;
// `staged` is the warp's own.
template <typename Value, int kV>
UPFOLD_DEVICE void store_run(Value* y, std::int32_t offset, std::int32_t count, const float* results, bool vectors,
                             std::uint32_t* staged) {
  std::uint32_t words[kRunWords<Value, kV>];
  pack_results<Value>(results, words);
  if (vectors) {
    if (count >= kV) return store_words<kRunWords<Value, kV> * 4>(y + offset, words);
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      if (j < count) y[offset + j] = Narrow<Value>::from(results[j]);
    }
    return;
  }
  const std::int32_t lane = std::int32_t(threadIdx.x % 32);
  __syncwarp();  // everyone has left the runs before
  stage_words<kRunWords<Value, kV> * 4>(staged + lane * kRunWords<Value, kV>, words);
  __syncwarp();  // the runs are complete
#pragma unroll
  for (int j = 0; j < kV; ++j) {
    const std::int32_t at = j * 32 + lane, from = at / kV;
    const std::int32_t to = __shfl_sync(~0u, offset, from), there = __shfl_sync(~0u, count, from);
    if (at % kV < there) y[to + at % kV] = reinterpret_cast<const Value*>(staged)[at];
  }
}

// Where the runs of a thread lie: rows of y, and outputs that are left of them.
struct TileRows {
  std::int32_t first, step, left;
};

// Lanes exchange runs, so that `y` is the same for all of them and `to` is not.
template <typename Value, int kV, int kCount>
UPFOLD_DEVICE void store_tile(const DepthwiseJob& job, Value* y, std::int32_t to, const TileRows& rows,
                              const float (&sums)[kCount], std::uint32_t* staged) {
#pragma unroll
  for (int i = 0; i < kCount / kV; ++i) {
    const std::int32_t oh = rows.first + i * rows.step;
    store_run<Value, kV>(y, to + oh * job.y.axis[1], inside(oh, job.axis[1].out_count) ? rows.left : 0, sums + i * kV,
                         job.vectors, staged);
  }
}

// Rows of units of a thread, of at most 48 outputs: as many as registers allow beside the rows of x.
template <int kV, int kSh, int kKh>
constexpr int kShortUnits = (kKh > 4          ? 16
                             : kV * kSh == 16 ? 48
                                              : 32) /
                            (kV * kSh);

// kSh, kKh and kS, kK: strides and kernels of the H and W axes; kR = padding mod kS, the phase of a run's first output.
template <typename Value, int kV, int kSh, int kKh, int kS, int kK, int kR>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_short_kernel(const DepthwiseJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                           const Value* __restrict__ bias, Value* __restrict__ y) {
  constexpr int kMh = (kKh + kSh - 1) / kSh, kM = (kK + kS - 1) / kS, kT = kShortUnits<kV, kSh, kKh>;
  constexpr int kColumns = (kR + kV - 1) / kS + kM;
  static_assert(kV % kS == 0, "every run of outputs starts at the same phase");
  alignas(16) __shared__ std::uint32_t staged[kDepthwiseThreads / 32][32 * kRunWords<Value, kV>];
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  const bool live = number < job.threads;
  const DepthwisePlace at = depthwise_place(job, live ? number : 0);
  std::int32_t unit = job.first_unit + at.tile * job.tiles_of_run * kT;
  const std::int32_t column0 = (at.column * kV + job.axis[2].pad - kR) / kS - (kM - 1);
  const std::uint32_t mask = positions_mask<kColumns>(column0, job.axis[2].in_end);
  const Value* const taps = w + weight_offset(job, at.channel);
  const Value* const plane = x + (plane_offset(job, at) + column0);
  const float shift = bias == nullptr ? 0.0f : widen(bias[at.channel]);
  const AxisTaps<std::int32_t>& d = job.axis[0];
  const DepthTaps nearest = depth_taps(job, at.depth);
  float weights[kKh][kK];
  for (std::int32_t tile = 0; tile < job.tiles_of_run; ++tile, unit += kT) {
    if (!__any_sync(~0u, unit * kSh - job.axis[1].pad < job.axis[1].out_count)) break;  // for the warp: lanes exchange runs
    const std::int32_t row0 = unit - (kMh - 1);
    float sums[kT * kSh * kV] = {};
    for (DepthTaps depth = nearest; depth.tap < d.kernel; depth.tap += d.tap_step, depth.source -= d.in_step) {
      if (!inside(depth.source, d.in_end)) continue;
      const bool reads = tile == 0 || d.kernel > 1;  // else the taps stay
#pragma unroll
      for (int kh = 0; kh < kKh; ++kh)
#pragma unroll
        for (int k = 0; k < kK; ++k) {
          if (!reads) continue;
          weights[kh][k] = widen(taps[depth.tap * job.w.axis[0] + kh * job.w.axis[1] + k]);
        }
#pragma unroll
      for (int r = 0; r < kT + kMh - 1; ++r) {
        float row[kColumns];
        load_row(plane + (depth.source * job.x.axis[0] + (row0 + r) * job.x.axis[1]),
                 inside(row0 + r, job.axis[1].in_end) ? mask : 0, row);
#pragma unroll
        for (int i = 0; i < kMh * kSh * kV * kM; ++i) {
          const int m = i % kM, j = i / kM % kV, kh = i / (kM * kV), t = r - (kMh - 1) + kh / kSh;
          const int k = (kR + j) % kS + m * kS;
          if (t < 0 || t >= kT || kh >= kKh || k >= kK) continue;
          add_product(sums[(t * kSh + kh % kSh) * kV + j], row[(kR + j) / kS - m + kM - 1], weights[kh][k]);
        }
      }
    }
    finish_all(job, shift, sums);
    const std::int32_t first = at.column * kV, left = job.axis[2].out_count - first;
    const std::int32_t to = at.sample * job.y.n + at.channel * job.y.c + at.depth * job.y.axis[0] + first;
    store_tile<Value, kV>(job, y, to, {unit * kSh - job.axis[1].pad, 1, live ? left : 0}, sums, staged[threadIdx.x / 32]);
  }
}

template <int kV>
constexpr int kWideUnits = 32 / kV;  // rows of a thread, a stride apart

// A run of the W axis: the phase of its first output, how many lie in the same unit, and the columns of x that those and the
// others read, with masks of what is inside.
struct WideColumns {
  std::int32_t phase, split, columns[2];
  std::uint32_t masks[2];
};

template <int kV, int kM, int kSplit>
UPFOLD_DEVICE WideColumns wide_columns(const DepthwiseJob& job, std::int32_t first) {
  const std::int32_t stride = job.axis[2].stride;
  std::uint32_t unit = std::uint32_t(first + job.axis[2].pad);
  WideColumns run;
  run.phase = std::int32_t(take(job.stride_w, unit));
  run.split = kSplit > 0 ? kSplit : kSplit == 0 || stride - run.phase > kV ? kV : stride - run.phase;
  run.columns[0] = std::int32_t(unit) - (kM - 1);
  run.columns[1] = run.columns[0] + (run.phase + run.split >= stride ? 1 : 0);
  run.masks[0] = positions_mask<kM>(run.columns[0], job.axis[2].in_end);
  run.masks[1] = kSplit == 0 ? 0 : positions_mask<kM>(run.columns[1], job.axis[2].in_end);
  return run;
}

// kMh and kM: kernels of the H and W axes in strides. The outputs of a run lie in one unit (kSplit 0), or those from number
// kSplit on may lie in the next one; kSplit -1: from a number on that each run has of its own.
template <typename Value, int kV, int kMh, int kM, int kSplit>
__global__ void __launch_bounds__(kDepthwiseThreads, kSplit < 0 ? 1 : 2)
    depthwise_wide_kernel(const DepthwiseJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                          const Value* __restrict__ bias, Value* __restrict__ y) {
  constexpr int kT = kWideUnits<kV>;
  alignas(16) __shared__ std::uint32_t staged[kDepthwiseThreads / 32][32 * kRunWords<Value, kV>];
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  const bool live = number < job.threads;
  const DepthwisePlace at = depthwise_place(job, live ? number : 0);
  const std::int32_t stride_h = job.axis[1].stride, stride_w = job.axis[2].stride;
  // The first row: its phase and, before the taps, its source.
  std::int32_t first_row = at.tile * job.tiles_of_run * kT * stride_h + at.phase;
  const std::int32_t shifted = first_row + job.axis[1].pad;
  const std::int32_t unit = shifted / stride_h, tap_row = shifted - unit * stride_h;
  std::int32_t row0 = unit - (kMh - 1);
  const std::int32_t first = at.column * kV;
  const WideColumns run = wide_columns<kV, kM, kSplit>(job, first);
  const Value* const taps = w + (weight_offset(job, at.channel) + tap_row * job.w.axis[1] + run.phase);
  const Value* const plane = x + plane_offset(job, at);
  const float shift = bias == nullptr ? 0.0f : widen(bias[at.channel]);
  const AxisTaps<std::int32_t>& d = job.axis[0];
  const DepthTaps nearest = depth_taps(job, at.depth);
  float weights[kMh][kM][kV];
  for (std::int32_t tile = 0; tile < job.tiles_of_run; ++tile, row0 += kT, first_row += kT * stride_h) {
    if (!__any_sync(~0u, first_row < job.axis[1].out_count)) break;  // for the warp: lanes exchange runs
    float sums[kT * kV] = {};
    for (DepthTaps depth = nearest; depth.tap < d.kernel; depth.tap += d.tap_step, depth.source -= d.in_step) {
      if (!inside(depth.source, d.in_end)) continue;
      const bool reads = tile == 0 || d.kernel > 1;  // else the taps stay
#pragma unroll
      for (int i = 0; i < kMh * kM; ++i) {
        if (!reads) continue;
        const Value* const from = taps + (depth.tap * job.w.axis[0] + i / kM * stride_h * job.w.axis[1] + i % kM * stride_w);
        const Value* const next = from - (run.phase + run.split >= stride_w ? stride_w : 0);
#pragma unroll
        for (int j = 0; j < kV; ++j) weights[i / kM][i % kM][j] = widen((kSplit == 0 || j < run.split ? from : next)[j]);
      }
#pragma unroll
      for (int r = 0; r < kT + kMh - 1; ++r) {
        const Value* const from = plane + (depth.source * job.x.axis[0] + (row0 + r) * job.x.axis[1]);
        const bool there = inside(row0 + r, job.axis[1].in_end);
        float row[2][kM];
        load_row(from + run.columns[0], there ? run.masks[0] : 0, row[0]);
        if (kSplit != 0) load_row(from + run.columns[1], there ? run.masks[1] : 0, row[1]);
#pragma unroll
        for (int i = 0; i < kMh * kV * kM; ++i) {
          const int m = i % kM, j = i / kM % kV, mh = i / (kM * kV), t = r - (kMh - 1) + mh;
          if (t < 0 || t >= kT) continue;
          const bool next = kSplit == 0 ? false : kSplit > 0 ? j >= kSplit : j >= run.split;
          add_product(sums[t * kV + j], next ? row[1][kM - 1 - m] : row[0][kM - 1 - m], weights[mh][m][j]);
        }
      }
    }
    finish_all(job, shift, sums);
    const std::int32_t left = job.axis[2].out_count - first;
    const std::int32_t to = at.sample * job.y.n + at.channel * job.y.c + at.depth * job.y.axis[0] + first;
    store_tile<Value, kV>(job, y, to, {first_row, stride_h, live ? left : 0}, sums, staged[threadIdx.x / 32]);
  }
}

// kSh, kKh, kS, kK, kR
#define UPFOLD_SHORT(DO, Value, kV) \
  DO(Value, kV, 2, 4, 2, 4, 0)      \
  DO(Value, kV, 2, 4, 2, 4, 1)      \
  DO(Value, kV, 2, 2, 2, 2, 0)      \
  DO(Value, kV, 2, 3, 2, 3, 0)      \
  DO(Value, kV, 2, 3, 2, 3, 1)      \
  DO(Value, kV, 1, 3, 1, 3, 0)      \
  DO(Value, kV, 1, 5, 1, 5, 0)      \
  DO(Value, kV, 2, 5, 2, 5, 0)      \
  DO(Value, kV, 2, 5, 2, 5, 1)      \
  DO(Value, kV, 2, 6, 2, 6, 0)      \
  DO(Value, kV, 2, 8, 2, 8, 1)      \
  DO(Value, kV, 1, 1, 2, 4, 1)      \
  DO(Value, kV, 1, 1, 2, 12, 0)     \
  DO(Value, kV, 1, 1, 2, 12, 1)
// kMh, kM, kSplit
#define UPFOLD_WIDE(DO, Value, kV) \
  DO(Value, kV, 2, 2, 0)           \
  DO(Value, kV, 2, 2, kV / 2)      \
  DO(Value, kV, 2, 2, -1)          \
  DO(Value, kV, 1, 2, 0)           \
  DO(Value, kV, 1, 2, kV / 2)      \
  DO(Value, kV, 1, 2, -1)          \
  DO(Value, kV, 1, 1, 0)           \
  DO(Value, kV, 1, 1, -1)

// Of the types that store runs of eight: those of four, where a stride holds no more.
#define UPFOLD_WIDE_OF_FOUR(DO, Value, kV) DO(Value, kV, 2, 2, 0) DO(Value, kV, 2, 2, 2) DO(Value, kV, 2, 2, -1)

#define UPFOLD_ARGUMENTS(Value) (const DepthwiseJob, const Value*, const Value*, const Value*, Value*);
#define UPFOLD_MAKE_SHORT(Value, kV, kSh, kKh, kS, kK, kR) \
  template __global__ void depthwise_short_kernel<Value, kV, kSh, kKh, kS, kK, kR> UPFOLD_ARGUMENTS(Value)
#define UPFOLD_MAKE_WIDE(Value, kV, kMh, kM, kSplit) \
  template __global__ void depthwise_wide_kernel<Value, kV, kMh, kM, kSplit> UPFOLD_ARGUMENTS(Value)
UPFOLD_SHORT(UPFOLD_MAKE_SHORT, float, 4)
UPFOLD_SHORT(UPFOLD_MAKE_SHORT, __half, 8)
UPFOLD_SHORT(UPFOLD_MAKE_SHORT, __nv_bfloat16, 8)
UPFOLD_WIDE(UPFOLD_MAKE_WIDE, float, 4)
UPFOLD_WIDE(UPFOLD_MAKE_WIDE, __half, 8)
UPFOLD_WIDE(UPFOLD_MAKE_WIDE, __nv_bfloat16, 8)
UPFOLD_WIDE_OF_FOUR(UPFOLD_MAKE_WIDE, __half, 4)
UPFOLD_WIDE_OF_FOUR(UPFOLD_MAKE_WIDE, __nv_bfloat16, 4)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

bool is_short(const Problem& p, std::int64_t stride_h, std::int64_t kernel_h, std::int64_t stride, std::int64_t kernel,
              std::int64_t phase) {
  return has_kernel(p, stride_h, kernel_h, stride, kernel) && p.pad_w % stride == phase;
}

bool short_fits(const Problem& p) {
#define UPFOLD_IS_SHORT(Value, kV, kSh, kKh, kS, kK, kR) || is_short(p, kSh, kKh, kS, kK, kR)
  return false UPFOLD_SHORT(UPFOLD_IS_SHORT, , );
#undef UPFOLD_IS_SHORT
}

// kV, kMh, kM and kSplit; kV is 0 where none fits.
struct Wide {
  int run, kernel_h, kernel_w, split;
};

Wide wide_of(const Problem& p) {
  const int kernel_h = int(p.kernel_h == p.stride_h ? 1 : 2), kernel_w = int(p.kernel_w == p.stride_w ? 1 : 2);
  if (p.kernel_h != kernel_h * p.stride_h || p.kernel_w != kernel_w * p.stride_w || kernel_h > kernel_w) return {};
  const int widest = int(16 / element_bytes(p.dtype)), run = p.stride_w >= widest ? widest : 4;
  if (p.stride_w < run || (run < widest && kernel_h < 2)) return {};
  if (p.stride_w % run == 0 && p.pad_w % run == 0) return {run, kernel_h, kernel_w, 0};
  const bool half = kernel_w == 2 && p.stride_w % run == 0 && p.pad_w % run == run / 2;
  return {run, kernel_h, kernel_w, half ? run / 2 : -1};
}

constexpr std::int64_t kBusyBlocks = 4 * 264;  // from which an H200 is busy
constexpr std::int64_t kMostTiles = 4;         // of a thread, which reads its taps once for all of them

// Threads own `units` units of rows of all phases of the H axis, or rows of one phase.
DepthwiseJob rows_job(const Problem& p, int run, int units, bool all_phases) {
  DepthwiseJob job = depthwise_job(p);
  job.first_unit = std::int32_t(p.pad_h / p.stride_h);
  const std::int64_t all = (p.out_h - 1 + p.pad_h) / p.stride_h - job.first_unit + 1, each = ceil_div(p.out_h, p.stride_h);
  job.columns = make_divisor(ceil_div(p.out_w, run));
  job.phases = make_divisor(all_phases ? 1 : std::min(p.stride_h, p.out_h));
  const std::int64_t tiles = ceil_div(all_phases ? all : each, units);
  job.tiles = make_divisor(tiles), job.depth = make_divisor(p.out_d);
  const std::int64_t busy = depthwise_threads(job, p.batch) / (kBusyBlocks * kDepthwiseThreads);
  job.tiles_of_run = std::int32_t(std::max<std::int64_t>(1, std::min<std::int64_t>(kMostTiles, busy)));
  job.tiles = make_divisor(ceil_div(tiles, job.tiles_of_run));
  job.threads = std::uint32_t(depthwise_threads(job, p.batch));
  return job;
}

// Whether runs of `bytes` start at multiples of their size.
bool runs_aligned(const Problem& p, std::int64_t bytes, const void* y) {
  const std::int64_t steps = p.y.n | p.y.c | p.y.d | p.y.h;
  return steps * element_bytes(p.dtype) % bytes == 0 && reinterpret_cast<std::uintptr_t>(y) % std::uintptr_t(bytes) == 0;
}

template <typename Value>
using RowsKernel = void (*)(const DepthwiseJob, const Value*, const Value*, const Value*, Value*);

template <typename Value>
void launch_rows(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, DepthwiseJob job, int run,
                 RowsKernel<Value> kernel) {
  job.vectors = runs_aligned(p, run * element_bytes(p.dtype), operands.y);
  launch_kernel("depthwise", kernel, launch, unsigned(ceil_div(job.threads, kDepthwiseThreads)), kDepthwiseThreads, job,
                static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.w),
                static_cast<const Value*>(operands.bias), static_cast<Value*>(operands.y));
}

template <typename Value>
void run(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  constexpr int kWidest = 16 / int(sizeof(Value));
#define UPFOLD_RUN_SHORT(type, kV, kSh, kKh, kS, kK, kR)                                                 \
  if (is_short(p, kSh, kKh, kS, kK, kR))                                                                 \
    return launch_rows<Value>(launch, p, operands, rows_job(p, kV, kShortUnits<kV, kSh, kKh>, true), kV, \
                              depthwise_short_kernel<Value, kV, kSh, kKh, kS, kK, kR>);
  UPFOLD_SHORT(UPFOLD_RUN_SHORT, Value, kWidest)
  const Wide wide = wide_of(p);
#define UPFOLD_RUN_WIDE(type, kV, kMh, kM, kSplit)                                             \
  if (wide.run == kV && wide.kernel_h == kMh && wide.kernel_w == kM && wide.split == kSplit)   \
    return launch_rows<Value>(launch, p, operands, rows_job(p, kV, kWideUnits<kV>, false), kV, \
                              depthwise_wide_kernel<Value, kV, kMh, kM, kSplit>);
  UPFOLD_WIDE(UPFOLD_RUN_WIDE, Value, kWidest)
  if constexpr (kWidest > 4) {
    UPFOLD_WIDE_OF_FOUR(UPFOLD_RUN_WIDE, Value, 4)
  }
#undef UPFOLD_RUN_SHORT
#undef UPFOLD_RUN_WIDE
}

}  // namespace

bool depthwise_rows_fits(const Problem& p) {
  if (!depthwise_dense(p)) return false;
  if (short_fits(p)) return depthwise_threads(rows_job(p, 4, 1, true), p.batch) <= kDepthwiseMost;
  return wide_of(p).run > 0 && depthwise_threads(rows_job(p, 4, 4, false), p.batch) <= kDepthwiseMost;
}

void depthwise_rows(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if (depthwise_walk(launch, p, operands)) return;
  return with_value(p, [&](auto value) { return run<decltype(value)>(launch, p, operands); });
}

}  // namespace upfold::cuda
#endif
