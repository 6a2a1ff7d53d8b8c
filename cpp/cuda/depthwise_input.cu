// The depthwise method, the adjoint in x: x[i] = sum over output channels and taps of y[i * stride - pad + tap * dilation] * w. A
// thread owns one column of x in several rows, which share what is read of y.
//   short: float32, kernels and strides that are known when compiling: every row of y is read once for all rows of x;
//   wide: kernels of kMh strides on the H axis: lanes share out the columns of the kernel, four each, and add up at the end; rows
//     of y of one phase follow one another, so that the taps stay in registers; or lanes run along channels, each with all
//     columns;
//   walks: whole aligned rows (depthwise_walk_input.cu);
//   general: everything else, and lanes along channels where the channel is the fastest axis.
#include "depthwise_walk.cuh"

namespace upfold::cuda {

constexpr int kInputRows = 8;  // of a thread

// Where the rows of a thread lie: x and y of the first output channel, and what is inside.
struct InputPlace {
  std::int32_t ih0, iw, x, y, channel, id;
};

UPFOLD_DEVICE InputPlace input_place(const DepthwiseJob& job, std::uint32_t number, int rows) {
  const DepthwisePlace at = depthwise_place(job, number);
  const std::int32_t channel = at.channel * std::int32_t(job.multiplier.value);
  InputPlace place{at.tile * rows, at.column, 0, 0, channel, at.depth};
  place.x = at.sample * job.x.n + at.channel * job.x.c + at.depth * job.x.axis[0] + at.column * job.x.axis[2];
  place.y = at.sample * job.y.n + channel * job.y.c;
  return place;
}

template <typename Value>
UPFOLD_DEVICE void store_rows(const DepthwiseJob& job, const InputPlace& place, Value* x, const float (&sums)[kInputRows]) {
#pragma unroll
  for (int t = 0; t < kInputRows; ++t) {
    if (place.ih0 + t < job.axis[1].in_end) x[place.x + (place.ih0 + t) * job.x.axis[1]] = Narrow<Value>::from(sums[t]);
  }
}

template <typename Value, int kSh, int kKh, int kS, int kK>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_input_short_kernel(const DepthwiseJob job, const Value* __restrict__ y, const Value* __restrict__ w,
                                 Value* __restrict__ x) {
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (number >= job.threads) return;
  const InputPlace place = input_place(job, number, kInputRows);
  const AxisTaps<std::int32_t>& d = job.axis[0];
  const std::int32_t oh0 = place.ih0 * kSh - job.axis[1].pad, ow0 = place.iw * kS - job.axis[2].pad;
  const std::uint32_t mask = positions_mask<kK>(ow0, job.axis[2].out_count);
  float sums[kInputRows] = {};
  for (std::int32_t oc = 0; oc < std::int32_t(job.multiplier.value); ++oc) {
    const Value* const taps = w + weight_offset(job, place.channel + oc);
    for (std::int32_t kd = 0; kd < d.kernel; ++kd) {
      const std::int32_t od = place.id * d.stride - d.pad + kd * d.dilation;
      if (!inside(od, d.out_count)) continue;
      float weights[kKh][kK];
#pragma unroll
      for (int i = 0; i < kKh * kK; ++i) {
        weights[i / kK][i % kK] = widen(taps[kd * job.w.axis[0] + i / kK * job.w.axis[1] + i % kK]);
      }
      const Value* const plane = y + (place.y + oc * job.y.c + od * job.y.axis[0] + oh0 * job.y.axis[1] + ow0);
#pragma unroll
      for (int r = 0; r < (kInputRows - 1) * kSh + kKh; ++r) {
        float row[kK];
        load_row(plane + r * job.y.axis[1], inside(oh0 + r, job.axis[1].out_count) ? mask : 0, row);
#pragma unroll
        for (int i = 0; i < kInputRows * kK; ++i) {
          const int t = i / kK, kh = r - t * kSh;
          if (kh >= 0 && kh < kKh) add_product(sums[t], row[i % kK], weights[kh][i % kK]);
        }
      }
    }
  }
  store_rows(job, place, x, sums);
}

// How four neighbours of a row are read.
enum class Reads { kVectors, kNeighbours, kChannels };  // at once; one by one; one by one, a row of channels apart

template <Reads kReads, typename Value>
UPFOLD_DEVICE void read_four(const Value* __restrict__ row, std::int32_t first, std::int32_t step, std::uint32_t mask,
                             float (&four)[4]) {
  if constexpr (kReads == Reads::kChannels) {
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = mask >> i & 1 ? widen(row[(first + i) * step]) : 0.0f;
  } else {
    load_four<kReads == Reads::kVectors>(row + first, mask, four);
  }
}

template <typename Value, int kMh, Reads kReads>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_input_wide_kernel(const DepthwiseJob job, const Value* __restrict__ y, const Value* __restrict__ w,
                                Value* __restrict__ x) {
  constexpr int kT = kInputRows;
  const std::uint32_t thread = blockIdx.x * kDepthwiseThreads + threadIdx.x, number = thread / std::uint32_t(job.lanes);
  const std::int32_t lane = std::int32_t(thread % std::uint32_t(job.lanes));
  const bool live = number < job.threads;
  const InputPlace place = input_place(job, live ? number : 0, kT);
  const AxisTaps<std::int32_t>&d = job.axis[0], &h = job.axis[1], &v = job.axis[2];
  const std::int32_t oh0 = place.ih0 * h.stride - h.pad, ow0 = place.iw * v.stride - v.pad;
  float sums[kT] = {};
  const std::int32_t planes = live ? std::int32_t(job.multiplier.value) * d.kernel : 0;
  for (std::int32_t i = 0; i < planes; ++i) {
    const std::int32_t oc = i / d.kernel, kd = i % d.kernel, od = place.id * d.stride - d.pad + kd * d.dilation;
    if (!inside(od, d.out_count)) continue;
    const Value* const taps = w + (weight_offset(job, place.channel + oc) + kd * job.w.axis[0]);
    const Value* const plane = y + (place.y + oc * job.y.c + od * job.y.axis[0]);
    for (std::int32_t kw = lane * 4; kw < v.kernel; kw += job.lanes * 4) {
      const std::uint32_t used = positions_mask<4>(kw, v.kernel), mask = positions_mask<4>(ow0 + kw, v.out_count) & used;
      for (std::int32_t phase = 0; phase < h.stride; ++phase) {
        float weights[kMh][4];
#pragma unroll
        for (int m = 0; m < kMh; ++m) {
          read_four<kReads>(taps + (phase + m * h.stride) * job.w.axis[1], kw, job.w.axis[2], used, weights[m]);
        }
#pragma unroll
        for (int r = 0; r < kT + kMh - 1; ++r) {
          const std::int32_t oh = oh0 + r * h.stride + phase;
          float row[4];
          read_four<kReads>(plane + oh * job.y.axis[1], ow0 + kw, job.y.axis[2], inside(oh, h.out_count) ? mask : 0, row);
#pragma unroll
          for (int j = 0; j < kMh * 4; ++j) {
            const int t = r - j / 4;
            if (t >= 0 && t < kT) add_product(sums[t], row[j % 4], weights[j / 4][j % 4]);
          }
        }
      }
    }
  }
  for (std::int32_t by = job.lanes / 2; by > 0; by /= 2) {
#pragma unroll
    for (int t = 0; t < kT; ++t) sums[t] += __shfl_xor_sync(~0u, sums[t], by);
  }
  if (live && lane == 0) store_rows(job, place, x, sums);
}

constexpr int kPairRows = 4;  // of a thread with two channels

// Four words of a row, a row of channels apart; as words, so that the loads of several rows are under way together.
UPFOLD_DEVICE void read_words(const void* from, std::int32_t step, std::uint32_t mask, std::uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = mask >> i & 1 ? static_cast<const std::uint32_t*>(from)[i * step] : 0;
}

// Two neighbouring channels of a 16-bit type, whose weight is packed: as the wide kernels with lanes along channels.
template <typename Value, int kMh>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    depthwise_input_pairs_kernel(const DepthwiseJob job, const Value* __restrict__ y, const Value* __restrict__ w,
                                 Value* __restrict__ x) {
  constexpr int kT = kPairRows;
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (number >= job.threads) return;
  const DepthwisePlace at = depthwise_place(job, number);
  const AxisTaps<std::int32_t>&d = job.axis[0], &h = job.axis[1], &v = job.axis[2];
  const std::int32_t ih0 = at.tile * kT, oh0 = ih0 * h.stride - h.pad, ow0 = at.column * v.stride - v.pad;
  float sums[kT][2] = {};
  for (std::int32_t kd = 0; kd < d.kernel; ++kd) {
    const std::int32_t od = at.depth * d.stride - d.pad + kd * d.dilation;
    if (!inside(od, d.out_count)) continue;
    const Value* const taps = w + (at.channel * 2 + kd * job.w.axis[0]);
    const Value* const plane = y + (at.sample * job.y.n + at.channel * 2 + od * job.y.axis[0]);
    for (std::int32_t phase = 0; phase < h.stride; ++phase) {
      for (std::int32_t kw = 0; kw < v.kernel; kw += 4) {
        const std::uint32_t used = positions_mask<4>(kw, v.kernel), mask = positions_mask<4>(ow0 + kw, v.out_count) & used;
        std::uint32_t weights[kMh][4], words[kT + kMh - 1][4];
#pragma unroll
        for (int m = 0; m < kMh; ++m) {
          const std::int32_t kh = phase + m * h.stride;
          read_words(taps + (kh * job.w.axis[1] + kw * job.w.axis[2]), job.w.axis[2] / 2, used, weights[m]);
        }
#pragma unroll
        for (int r = 0; r < kT + kMh - 1; ++r) {
          const std::int32_t oh = oh0 + r * h.stride + phase;
          const Value* const from = plane + (oh * job.y.axis[1] + (ow0 + kw) * job.y.axis[2]);
          read_words(from, job.y.axis[2] / 2, inside(oh, h.out_count) ? mask : 0, words[r]);
        }
#pragma unroll
        for (int i = 0; i < (kT + kMh - 1) * 4; ++i) {
          float values[2];
          Bits<Value>::widen_word(words[i / 4][i % 4], values);
#pragma unroll
          for (int m = 0; m < kMh; ++m) {
            const int t = i / 4 - m;
            if (t < 0 || t >= kT) continue;
            float taps_of[2];
            Bits<Value>::widen_word(weights[m][i % 4], taps_of);
            add_product(sums[t < 0 ? 0 : t][0], values[0], taps_of[0]),
                add_product(sums[t < 0 ? 0 : t][1], values[1], taps_of[1]);
          }
        }
      }
    }
  }
  Value* const to = x + (at.sample * job.x.n + at.channel * 2 + at.depth * job.x.axis[0] + at.column * job.x.axis[2]);
#pragma unroll
  for (int t = 0; t < kT; ++t) {
    std::uint32_t word[1];
    pack_results<Value>(sums[t], word);
    if (ih0 + t < h.in_end) store_words<4>(to + (ih0 + t) * job.x.axis[1], word);
  }
}

template <typename Value>
__global__ void __launch_bounds__(kDepthwiseThreads)
    depthwise_input_general_kernel(const DepthwiseJob job, const Value* __restrict__ y, const Value* __restrict__ w,
                                   Value* __restrict__ x) {
  const std::uint32_t number = blockIdx.x * kDepthwiseThreads + threadIdx.x;
  if (number >= job.threads) return;
  const InputPlace place = input_place(job, number, kInputRows);
  const AxisTaps<std::int32_t>&d = job.axis[0], &h = job.axis[1], &v = job.axis[2];
  const std::int32_t oh0 = place.ih0 * h.stride - h.pad, ow0 = place.iw * v.stride - v.pad;
  float sums[kInputRows] = {};
  for (std::int32_t oc = 0; oc < std::int32_t(job.multiplier.value); ++oc) {
    const Value* const taps = w + weight_offset(job, place.channel + oc);
    for (std::int32_t i = 0; i < d.kernel * h.kernel; ++i) {
      const std::int32_t kd = i / h.kernel, kh = i % h.kernel, od = place.id * d.stride - d.pad + kd * d.dilation;
      if (!inside(od, d.out_count)) continue;
      const std::int32_t oh = oh0 + kh * h.dilation;
      const Value* const plane = y + (place.y + oc * job.y.c + od * job.y.axis[0] + oh * job.y.axis[1]);
      for (std::int32_t kw = 0; kw < v.kernel; ++kw) {
        const std::int32_t ow = ow0 + kw * v.dilation;
        if (!inside(ow, v.out_count)) continue;
        const float weight = widen(taps[kd * job.w.axis[0] + kh * job.w.axis[1] + kw * job.w.axis[2]]);
#pragma unroll
        for (int r = 0; r < kInputRows; ++r) {
          if (!inside(oh + r * h.stride, h.out_count)) continue;
          add_product(sums[r], widen(plane[r * h.stride * job.y.axis[1] + ow * job.y.axis[2]]), weight);
        }
      }
    }
  }
  store_rows(job, place, x, sums);
}

// kSh, kKh, kS, kK
#define UPFOLD_SHORT(DO, Value) \
  DO(Value, 2, 4, 2, 4)         \
  DO(Value, 2, 2, 2, 2)         \
  DO(Value, 2, 3, 2, 3)         \
  DO(Value, 1, 3, 1, 3)         \
  DO(Value, 1, 5, 1, 5)         \
  DO(Value, 1, 1, 2, 4)
#define UPFOLD_MAKE_SHORT(Value, kSh, kKh, kS, kK)                                                                               \
  template __global__ void depthwise_input_short_kernel<Value, kSh, kKh, kS, kK>(const DepthwiseJob, const Value*, const Value*, \
                                                                                 Value*);
// kMh, kReads
#define UPFOLD_WIDE(DO, Value)     \
  DO(Value, 1, Reads::kVectors)    \
  DO(Value, 1, Reads::kNeighbours) \
  DO(Value, 1, Reads::kChannels)   \
  DO(Value, 2, Reads::kVectors)    \
  DO(Value, 2, Reads::kNeighbours) \
  DO(Value, 2, Reads::kChannels)
#define UPFOLD_MAKE_WIDE(Value, kMh, kReads)                                                                               \
  template __global__ void depthwise_input_wide_kernel<Value, kMh, kReads>(const DepthwiseJob, const Value*, const Value*, \
                                                                           Value*);
UPFOLD_SHORT(UPFOLD_MAKE_SHORT, float)
#define UPFOLD_MAKE(dtype, Value)      \
  UPFOLD_WIDE(UPFOLD_MAKE_WIDE, Value) \
  template __global__ void depthwise_input_general_kernel<Value>(const DepthwiseJob, const Value*, const Value*, Value*);
UPFOLD_DEPTHWISE_TYPES(UPFOLD_MAKE)
#define UPFOLD_MAKE_PAIRS(Value)                                                                                           \
  template __global__ void depthwise_input_pairs_kernel<Value, 1>(const DepthwiseJob, const Value*, const Value*, Value*); \
  template __global__ void depthwise_input_pairs_kernel<Value, 2>(const DepthwiseJob, const Value*, const Value*, Value*);
UPFOLD_MAKE_PAIRS(__half)
UPFOLD_MAKE_PAIRS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

bool short_fits(const Problem& p) {
#define UPFOLD_IS_SHORT(Value, kSh, kKh, kS, kK) || has_kernel(p, kSh, kKh, kS, kK)
  return false UPFOLD_SHORT(UPFOLD_IS_SHORT, );
#undef UPFOLD_IS_SHORT
}

bool wide_fits(const Problem& p) { return p.kernel_w >= 4 && (p.kernel_h == p.stride_h || p.kernel_h == 2 * p.stride_h); }

// The wide kernels with lanes along channels.
bool channels_fit(const Problem& p) { return p.x.c == 1 && wide_fits(p) && dense_taps(axis_h(p)) && dense_taps(axis_w(p)); }

// Lanes that share out a kernel's columns, four each.
std::int32_t lanes_of(const Problem& p) {
  std::int32_t lanes = 1;
  while (lanes < 32 && lanes * 4 < p.kernel_w) lanes *= 2;
  return lanes;
}

// Whether lanes along channels may own two each.
bool pairs_fit(const Problem& p, const DepthwiseOperands& operands) {
  std::int64_t sizes = p.in_channels | p.w.d | p.w.h | p.w.w;
  std::uintptr_t addresses = 0;
  for (const Strides& s : {p.x, p.y}) sizes |= s.n | s.d | s.h | s.w;
  for (const void* tensor : {operands.x, operands.w, operands.y}) addresses |= reinterpret_cast<std::uintptr_t>(tensor);
  return channels_fit(p) && element_bytes(p.dtype) == 2 && p.out_channels == p.in_channels && p.y.c == 1 && p.w.n == 1 &&
         sizes % 2 == 0 && addresses % 4 == 0;
}

DepthwiseJob input_job(const Problem& p, bool special) {
  DepthwiseJob job = depthwise_job(p);
  job.lanes_are_channels = !special && p.x.c == 1;
  job.channels = make_divisor(p.in_channels);
  job.columns = make_divisor(p.in_w), job.tiles = make_divisor(ceil_div(p.in_h, kInputRows)), job.depth = make_divisor(p.in_d);
  job.threads = std::uint32_t(depthwise_threads(job, p.batch));
  job.lanes = special && !short_fits(p) ? lanes_of(p) : 1;
  return job;
}

template <typename Value>
void run_pairs(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  if constexpr (sizeof(Value) == 2) {
    DepthwiseJob job = input_job(p, false);
    job.channels = make_divisor(p.in_channels / 2), job.tiles = make_divisor(ceil_div(p.in_h, kPairRows));
    job.threads = std::uint32_t(depthwise_threads(job, p.batch));
    const auto kernel =
        p.kernel_h == p.stride_h ? depthwise_input_pairs_kernel<Value, 1> : depthwise_input_pairs_kernel<Value, 2>;
    launch_kernel("depthwise", kernel, launch, unsigned(ceil_div(job.threads, kDepthwiseThreads)), kDepthwiseThreads, job,
                  static_cast<const Value*>(operands.y), static_cast<const Value*>(operands.w), static_cast<Value*>(operands.x));
  }
}

template <typename Value>
void run(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, bool special) {
  if (!special && pairs_fit(p, operands)) return run_pairs<Value>(launch, p, operands);
  const DepthwiseJob job = input_job(p, special);
  const Reads reads = !special                                       ? Reads::kChannels
                      : depthwise_by_four(p, operands.y, operands.w) ? Reads::kVectors
                                                                     : Reads::kNeighbours;
  const auto kernel = [&]() -> void (*)(const DepthwiseJob, const Value*, const Value*, Value*) {
    if (!special && !channels_fit(p)) return depthwise_input_general_kernel<Value>;
#define UPFOLD_CHOOSE(type, kSh, kKh, kS, kK) \
  if (has_kernel(p, kSh, kKh, kS, kK)) return depthwise_input_short_kernel<Value, kSh, kKh, kS, kK>;
    if constexpr (sizeof(Value) == 4) {
      if (special) {
        UPFOLD_SHORT(UPFOLD_CHOOSE, Value)
      }
    }
#undef UPFOLD_CHOOSE
#define UPFOLD_CHOOSE(type, kMh, kReads) \
  if (p.kernel_h == kMh * p.stride_h && reads == kReads) return depthwise_input_wide_kernel<Value, kMh, kReads>;
    UPFOLD_WIDE(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
    return nullptr;
  }();
  const std::int64_t threads = std::int64_t(job.threads) * job.lanes;
  launch_kernel("depthwise", kernel, launch, unsigned(ceil_div(threads, kDepthwiseThreads)), kDepthwiseThreads, job,
                static_cast<const Value*>(operands.y), static_cast<const Value*>(operands.w), static_cast<Value*>(operands.x));
}

}  // namespace

bool depthwise_input_special(const Problem& p) {
  if (!depthwise_dense(p)) return false;
  if (!short_fits(p) && !wide_fits(p)) return false;
  const DepthwiseJob job = input_job(p, true);
  return depthwise_threads(job, p.batch) <= kDepthwiseMost / job.lanes;
}

void depthwise_input(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, bool special) {
  if (special && depthwise_walk_input(launch, p, operands)) return;
  // Element by element, the 16-bit ones of short kernels are read faster by the general kernel (on an H200).
  const bool known = special && (p.dtype == Dtype::kFloat32 || !short_fits(p));
  return with_value(p, [&](auto value) { return run<decltype(value)>(launch, p, operands, known); });
}

}  // namespace upfold::cuda
#endif
