// col2im of the fused method whose columns stay in shared memory: each output is the sum of its columns in the order of its taps,
// its bias and its activation.
#pragma once

#include "fused_columns.cuh"

namespace upfold::cuda {

// Where outputs go, and of what.
template <typename Tile>
struct ColumnsOutputs {
  using Value = typename Tile::Value;

  const ColumnsJob& job;
  const ColumnsWalk& walk;
  const float* columns;
  const Value* bias;  // of the first channel, or null
  Value* y;           // of the first channel of the sample
  std::int32_t channels;

  // The floats from the first column's beginning to a pixel of an input row that is in the ring.
  __device__ __forceinline__ std::int32_t row_at(std::int32_t ih) const {
    std::uint32_t slot = std::uint32_t(ih - walk.first_ih);
    return std::int32_t(take(job.ring, slot)) * job.pitch - walk.first_iw;
  }
  static __device__ __forceinline__ std::int32_t pixel_at(std::int32_t pixel) {
    return pixel / kColumnPixels * Tile::kPixelsFloats + pixel % kColumnPixels;
  }
  __device__ __forceinline__ Value finished(float sum, std::int32_t c) const {
    const float added = bias == nullptr ? 0.0f : widen(bias[c]);
    return Narrow<Value>::from(finish(job.activation, job.slope, sum + added));
  }

  // Visits the numbers first + i and begin + j of `units` by `rows`, by all workers: neighbouring threads have neighbouring i.
  template <typename Visit>
  static __device__ __forceinline__ void each(std::int32_t units, std::int32_t begin, std::int32_t end, const Visit& visit) {
    std::int32_t row = begin;
    for (std::int32_t unit = std::int32_t(threadIdx.x);; unit += Tile::kWorkers) {
      for (; unit >= units; unit -= units) ++row;
      if (row >= end) return;
      visit(unit, row);
    }
  }

  // Any kernel and stride: an output at a time.
  __device__ __forceinline__ void run(std::int32_t begin, std::int32_t end) const {
    each(walk.end_ow - walk.first_ow, begin, end, [&](std::int32_t unit, std::int32_t oh) {
      std::uint32_t iw = std::uint32_t(walk.first_ow + unit + job.w.pad), ih = std::uint32_t(oh + job.h.pad);
      const std::int32_t phase_w = std::int32_t(take(job.w.strides, iw)), phase_h = std::int32_t(take(job.h.strides, ih));
      for (std::int32_t c = 0; c < channels; ++c) {
        const float sum = sum_of(c, {phase_h, phase_w, std::int32_t(ih), std::int32_t(iw)});
        y[oh * job.y_h + (walk.first_ow + unit) * job.y_w + c * job.y_c] = finished(sum, c);
      }
    });
  }

 private:
  // Of an output: its first tap on each axis, and the input that this one reads.
  struct Taps {
    std::int32_t kh, kw, ih, iw;
  };
  __device__ __forceinline__ float sum_of(std::int32_t c, const Taps& first) const {
    float sum = 0.0f;
    for (std::int32_t kh = first.kh, ih = first.ih; kh < job.h.kernel; kh += job.h.stride, --ih) {
      if (std::uint32_t(ih) >= std::uint32_t(job.h.in)) continue;
      const std::int32_t row = row_at(ih);
      const float* const own = columns + (c * job.h.kernel + kh) * job.w.kernel * kColumnPitch;
      for (std::int32_t kw = first.kw, iw = first.iw; kw < job.w.kernel; kw += job.w.stride, --iw) {
        if (std::uint32_t(iw) < std::uint32_t(job.w.in)) sum += own[kw * kColumnPitch + pixel_at(row + iw)];
      }
    }
    return sum;
  }
};

// Kernel 4 and stride 2: a thread has the four outputs of a unit of the height and a pair of the width, whose columns lie at
// known distances from six pixels, or from four where the padding of the width is even (kOdd: it is odd).
template <typename Tile, bool kOdd>
struct ColumnsPairs {
  using Value = typename Tile::Value;
  static constexpr int kInputs = kOdd ? 3 : 2;
  struct alignas(2 * sizeof(Value)) Pair {
    Value v[2];
  };

  const ColumnsOutputs<Tile>& outputs;
  const ColumnsJob& job;

  // The pixels of a unit: number i of the width is the farthest one minus i, number a of the height the last one minus a.
  struct Inputs {
    std::int32_t at[2][kInputs];
    bool live[2][kInputs];
  };
  __device__ __forceinline__ Inputs inputs(std::int32_t unit, std::int32_t pair) const {
    Inputs own;
    const std::int32_t last = pair + job.w.pad / 2 + (kOdd ? 1 : 0);
#pragma unroll
    for (int a = 0; a < 2; ++a) {
      const std::int32_t ih = unit - a, row = outputs.row_at(ih);
      const bool is_row = std::uint32_t(ih) < std::uint32_t(job.h.in);
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        own.live[a][i] = is_row && std::uint32_t(last - i) < std::uint32_t(job.w.in);
        own.at[a][i] = outputs.pixel_at(row + last - i);
      }
    }
    return own;
  }

  // The sums of output row `r` of a unit, in one channel.
  __device__ __forceinline__ void sum(const Inputs& own, std::int32_t channel_at, int r, float (&sums)[2]) const {
    const float* const first = outputs.columns + channel_at;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sums[e] = 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int a = k / 2, tap = k % 2;  // kw = phase + 2 * tap
        const int phase = kOdd ? 1 - e : e, input = kOdd && e == 0 ? 1 + tap : tap;
        if (own.live[a][input]) sums[e] += first[own.at[a][input] + ((r + 2 * a) * 4 + phase + 2 * tap) * kColumnPitch];
      }
    }
  }

  __device__ __forceinline__ void run(std::int32_t begin, std::int32_t end) const {
    const ColumnsWalk& walk = outputs.walk;
    const std::int32_t pairs = (walk.end_ow - walk.first_ow + 1) / 2, pad = job.h.pad;
    outputs.each(pairs, (begin + pad) / 2, (end + pad + 1) / 2, [&](std::int32_t pair, std::int32_t unit) {
      const std::int32_t ow = walk.first_ow + 2 * pair;
      const bool whole = ow + 1 < walk.end_ow;
      const Inputs own = inputs(unit, ow / 2);
#pragma unroll 1
      for (std::int32_t c = 0; c < outputs.channels; ++c) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const std::int32_t oh = 2 * unit - pad + r;
          if (oh < begin || oh >= end) continue;
          float sums[2];
          sum(own, c * 16 * kColumnPitch, r, sums);
          const Pair values{{outputs.finished(sums[0], c), outputs.finished(sums[1], c)}};
          Value* const to = outputs.y + oh * job.y_h + ow * job.y_w + c * job.y_c;
          if (job.paired && whole) {
            *reinterpret_cast<Pair*>(to) = values;
          } else {
            to[0] = values.v[0];
            if (whole) to[job.y_w] = values.v[1];
          }
        }
      }
    });
  }
};

}  // namespace upfold::cuda
