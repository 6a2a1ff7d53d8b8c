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
  __device__ __forceinline__ std::int32_t pixel_at(std::int32_t pixel) const {
    return pixel / kColumnPixels * job.pixels_floats + pixel % kColumnPixels;
  }
  __device__ __forceinline__ Value finished(float sum, std::int32_t c) const {
    const float added = bias == nullptr ? 0.0f : widen(bias[c]);
    return Narrow<Value>::from(finish_quickly(job.activation, job.slope, sum + added));
  }

  // Visits the numbers first + i and begin + j of `units` by `rows`, by all threads that sum: neighbouring ones have neighbouring
  // i.
  template <typename Visit>
  static __device__ __forceinline__ void each(std::int32_t units, std::int32_t begin, std::int32_t end, const Visit& visit) {
    std::int32_t row = begin;
    for (std::int32_t unit = std::int32_t(threadIdx.x) - Tile::kWorkers;; unit += Tile::kWorkers) {
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
// known distances from six pixels, or from four where the padding of the width is even (kOdd: it is odd). kPixels: three channels
// are neighbours in y.
template <typename Tile, bool kOdd, bool kPixels>
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
    std::int32_t at[2][kInputs];  // bytes
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
        own.at[a][i] = outputs.pixel_at(row + last - i) * 4;
      }
    }
    return own;
  }

  // The sums of a unit's outputs in one channel: [row][of the pair].
  __device__ __forceinline__ void sum(const Inputs& own, float (&sums)[2][2]) const {
    const unsigned char* const first = reinterpret_cast<const unsigned char*>(outputs.columns);
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // kh = r + 2 * a; kw = phase + 2 * tap
      const int r = i % 4 / 2, e = i % 2, a = i / 8, tap = i / 4 % 2;
      const int phase = kOdd ? 1 - e : e, input = kOdd && e == 0 ? 1 + tap : tap;
      const int column = ((r + 2 * a) * 4 + phase + 2 * tap) * kColumnPitch * 4;
      if (own.live[a][input]) sums[r][e] += *reinterpret_cast<const float*>(first + own.at[a][input] + column);
    }
  }

  __device__ __forceinline__ void store(Value* to, const float (&sums)[2], bool whole) const {
    const Pair values{{Narrow<Value>::from(sums[0]), Narrow<Value>::from(sums[1])}};
    if (!kPixels && job.paired && whole) {
      *reinterpret_cast<Pair*>(to) = values;
    } else {
      to[0] = values.v[0];
      if (whole) to[job.y_w] = values.v[1];
    }
  }

  // The outputs of a unit and a pair in one channel, of which `own` then names the columns of the next one.
  __device__ __forceinline__ void finish_channel(Inputs& own, std::int32_t c, float (&sums)[2][2]) const {
    const float added = outputs.bias == nullptr ? 0.0f : widen(outputs.bias[c]);
    sum(own, sums);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i / 2][i % 2] += added;
    if (job.activation != Activation::kNone) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i / 2][i % 2] = finish_quickly(job.activation, job.slope, sums[i / 2][i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 2 * kInputs; ++i) own.at[i / kInputs][i % kInputs] += 16 * kColumnPitch * 4;
  }

  // Outputs of a unit and a pair whose first is at (oh, ow); of rows, those in [begin, end).
  __device__ __forceinline__ void store_all(Inputs own, std::int32_t oh, std::int32_t ow, std::int32_t begin,
                                            std::int32_t end) const {
    const bool whole = ow + 1 < outputs.walk.end_ow, above = oh >= begin, below = oh + 1 < end;
    Value* to = outputs.y + oh * job.y_h + ow * job.y_w;
    if (kPixels && whole) return store_pixels(own, to, above, below);
#pragma unroll 1
    for (std::int32_t c = 0; c < outputs.channels; ++c, to += job.y_c) {
      float sums[2][2] = {};
      finish_channel(own, c, sums);
      if (above) store(to, sums[0], whole);
      if (below) store(to + job.y_h, sums[1], whole);
    }
  }

  // Two neighbouring pixels of three channels are three pairs.
  __device__ __forceinline__ void store_pixels(Inputs own, Value* to, bool above, bool below) const {
    float sums[3][2][2] = {};
#pragma unroll
    for (int c = 0; c < 3; ++c) finish_channel(own, c, sums[c]);
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      const int r = i / 3, first = i % 3 * 2, second = first + 1;  // numbers of values in two pixels
      const Pair values{
          {Narrow<Value>::from(sums[first % 3][r][first / 3]), Narrow<Value>::from(sums[second % 3][r][second / 3])}};
      if (r == 0 ? above : below) *reinterpret_cast<Pair*>(to + r * job.y_h + first) = values;
    }
  }

  __device__ __forceinline__ void run(std::int32_t begin, std::int32_t end) const {
    const ColumnsWalk& walk = outputs.walk;
    const std::int32_t pairs = (walk.end_ow - walk.first_ow + 1) / 2, pad = job.h.pad;
    outputs.each(pairs, (begin + pad) / 2, (end + pad + 1) / 2, [&](std::int32_t pair, std::int32_t unit) {
      const std::int32_t ow = walk.first_ow + 2 * pair;
      store_all(inputs(unit, ow / 2), 2 * unit - pad, ow, begin, end);
    });
  }
};

}  // namespace upfold::cuda
