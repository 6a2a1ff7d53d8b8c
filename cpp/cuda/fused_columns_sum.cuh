// col2im of the fused method whose columns stay in shared memory: each output is the sum of its columns in the order of its taps,
// its bias and its activation.
#pragma once

#include "fused_columns.cuh"

namespace upfold::cuda {

// Outputs of some rows of a walk. kRun neighbouring outputs along the width are a *unit*; where it is 2, so is the stride, and
// an output has at most two taps there.
template <typename Value, int kRun, int kWorkers>
struct ColumnsSum {
  const ColumnsJob& job;
  const ColumnsWalk& walk;
  const float* columns;
  const Value* bias;  // of the first channel, or null
  Value* y;           // of the first channel of the sample
  std::int32_t channels;

  struct Row {
    std::int32_t oh, quotient, phase;
  };

  __device__ __forceinline__ Row row(std::int32_t oh) const {
    std::uint32_t quotient = std::uint32_t(oh + job.h.pad);
    const std::int32_t phase = std::int32_t(take(job.h.strides, quotient));
    return {oh, std::int32_t(quotient), phase};
  }

  // Calls visit(the columns of a tap of the height for its input row) for every such tap of an output.
  template <typename Visit>
  __device__ __forceinline__ void each_tap(const Row& at, std::int32_t c, const Visit& visit) const {
    std::int32_t ih = at.quotient;
    for (std::int32_t kh = at.phase; kh < job.h.kernel; kh += job.h.stride, --ih) {
      if (std::uint32_t(ih) >= std::uint32_t(job.h.in)) continue;
      std::uint32_t rest = std::uint32_t(ih - walk.first_ih);
      const std::int32_t slot = std::int32_t(take(job.ring, rest));
      visit(columns + (c * job.h.kernel + kh) * job.w.kernel * job.plane + slot * job.pitch);
    }
  }

  __device__ __forceinline__ float finished(float sum, std::int32_t c) const {
    return finish(job.activation, job.slope, sum + (bias == nullptr ? 0.0f : widen(bias[c])));
  }

  // One output of a stride and a kernel of any size.
  __device__ __forceinline__ void store_one(const Row& at, std::int32_t ow, std::int32_t c) const {
    std::uint32_t quotient = std::uint32_t(ow + job.w.pad);
    const std::int32_t phase = std::int32_t(take(job.w.strides, quotient));
    float sum = 0.0f;
    each_tap(at, c, [&](const float* row) {
      std::int32_t iw = std::int32_t(quotient);
      for (std::int32_t kw = phase; kw < job.w.kernel; kw += job.w.stride, --iw) {
        if (std::uint32_t(iw) < std::uint32_t(job.w.in)) sum += row[kw * job.plane + iw - walk.first_iw];
      }
    });
    y[at.oh * job.y_h + ow * job.y_w + c * job.y_c] = Narrow<Value>::from(finished(sum, c));
  }

  // Two outputs of stride 2.
  __device__ __forceinline__ void store_two(const Row& at, std::int32_t ow, std::int32_t c) const {
    float sums[2] = {0.0f, 0.0f};
    bool live[2][2];
    std::int32_t offsets[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t reach = ow + r + job.w.pad, phase = reach % 2;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const std::int32_t iw = reach / 2 - j, kw = phase + 2 * j;
        live[r][j] = std::uint32_t(iw) < std::uint32_t(job.w.in) && kw < job.w.kernel;
        offsets[r][j] = kw * job.plane + iw - walk.first_iw;
      }
    }
    each_tap(at, c, [&](const float* row) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (live[i / 2][i % 2]) sums[i / 2] += row[offsets[i / 2][i % 2]];
      }
    });
    Value* const to = y + at.oh * job.y_h + ow * job.y_w + c * job.y_c;
    struct alignas(2 * sizeof(Value)) {
      Value v[2];
    } values;
#pragma unroll
    for (int r = 0; r < 2; ++r) values.v[r] = Narrow<Value>::from(finished(sums[r], c));
    if (job.paired && ow + 1 < walk.end_ow) {
      *reinterpret_cast<decltype(values)*>(to) = values;
      return;
    }
    to[0] = values.v[0];
    if (ow + 1 < walk.end_ow) to[job.y_w] = values.v[1];
  }

  __device__ __forceinline__ void store(const Row& at, std::int32_t ow, std::int32_t c) const {
    if constexpr (kRun == 2) {
      store_two(at, ow, c);
    } else {
      store_one(at, ow, c);
    }
  }

  // Outputs [begin, end) of the height, by all workers: neighbouring threads have neighbouring units.
  __device__ __forceinline__ void run(std::int32_t begin, std::int32_t end) const {
    const std::int32_t units = (walk.end_ow - walk.first_ow + kRun - 1) / kRun, each = job.inside ? 1 : channels;
    std::int32_t oh = begin, c = 0;
    for (std::int32_t unit = std::int32_t(threadIdx.x);; unit += kWorkers) {
      for (; unit >= units; unit -= units) {
        if (++c == each) c = 0, ++oh;
      }
      if (oh >= end) break;
      const Row at = row(oh);
      const std::int32_t ow = walk.first_ow + kRun * unit;
      if (job.inside) {
        for (std::int32_t channel = 0; channel < channels; ++channel) store(at, ow, channel);
      } else {
        store(at, ow, c);
      }
    }
  }
};

}  // namespace upfold::cuda
