// The results of the fused method for heads: a unit's sums of both taps of the width, bias, activation, and stores.
#pragma once

#include "fused_heads.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct HeadsResults {
  using Value = typename Tile::Value;
  static constexpr int kBlocks = Tile::kBlocks;
  using Sums = float[2][kBlocks][4];  // of both tiles: rows g and g + 8, of two pixels each
  using Outputs = float[kBlocks][4];  // neighbours in y, from the lane's first pixel on
  struct alignas(4 * sizeof(Value)) Four {
    Value v[4];
  };

  const HeadsJob& job;
  Value* const first;  // of the lane's channel
  const std::int32_t phase, t;
  const bool exists;
  float bias = 0.0f;

  __device__ __forceinline__ HeadsResults(const HeadsJob& of, const Value* biases, Value* y)
      : job(of),
        first(y + channel() * of.y_c),
        phase(std::int32_t(threadIdx.x) / 4 % 2),
        t(std::int32_t(threadIdx.x) % 4),
        exists(channel() < of.oc) {
    if (biases != nullptr && exists) bias = widen(biases[channel()]);
  }
  static __device__ __forceinline__ std::int32_t channel() { return std::int32_t(threadIdx.x) % 32 / 8; }
  static __device__ __forceinline__ float of_lane(float v, std::int32_t lane) { return __shfl_sync(~0u, v, lane); }

  __device__ __forceinline__ void finish(const Sums& sums, std::int32_t n, std::int32_t unit) const {
    Outputs outputs;
    float behind[2] = {};  // of the pixel before the next block's first, in lanes that want it
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, before = lane / 4 * 4 + (t + 3) % 4,
                       after = lane / 4 * 4 + (t + 1) % 4;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const bool is_row = 8 * j < job.in_w;  // else nothing is stored, nor wanted of a neighbour
      const float left = of_lane(sums[0][j][3], before);
      outputs[j][0] = sums[0][j][0] + (t == 0 ? behind[0] : left), outputs[j][2] = sums[0][j][1] + sums[0][j][2];
      if (is_row) behind[0] = left;
      if constexpr (Tile::kOdd) {
        const float next = j + 1 < kBlocks && 8 * (j + 1) < job.in_w ? sums[1][j + 1 < kBlocks ? j + 1 : j][2] : 0.0f;
        const float right = of_lane(t == 0 ? next : sums[1][j][2], after);
        outputs[j][1] = sums[1][j][0] + sums[1][j][3], outputs[j][3] = sums[1][j][1] + right;
      } else {
        const float other = of_lane(sums[1][j][3], before);
        outputs[j][1] = sums[1][j][0] + (t == 0 ? behind[1] : other), outputs[j][3] = sums[1][j][1] + sums[1][j][2];
        if (is_row) behind[1] = other;
      }
    }
    const std::int32_t oh = kHeadsStride * unit + phase - job.pad_h;
    if (!exists || std::uint32_t(oh) >= std::uint32_t(job.out_h)) return;
    Value* const row = first + n * job.y_n + oh * job.y_h;
    activate_all(outputs);
    store(row, outputs);
    // Behind the last pixel a pair has taps of it alone.
    const std::int32_t ow = kHeadsStride * job.in_w + job.first_ow;
    if (t != 0 || ow >= job.out_w) return;
    row[ow * job.y_w] = finished(behind[0] + bias);
    if (!Tile::kOdd && ow + 1 < job.out_w) row[(ow + 1) * job.y_w] = finished(behind[1] + bias);
  }

 private:
  __device__ __forceinline__ Value finished(float sum) const {
    return Narrow<Value>::from(finish_quickly(job.activation, job.slope, sum));
  }
  struct ActivateAll {
    Outputs& outputs;
    template <typename Function>
    __device__ __forceinline__ void operator()(const Function& function) const {
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) outputs[i / 4][i % 4] = function(outputs[i / 4][i % 4]);
    }
  };
  __device__ __forceinline__ void activate_all(Outputs& outputs) const {
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) outputs[i / 4][i % 4] += bias;
    if (is_activated_before(job.activation)) with_activation(job.activation, job.slope, ActivateAll{outputs});
    if (job.activation != Activation::kRelu) return;
    ActivateAll{outputs}([](float v) { return v < 0.0f ? 0.0f : v; });
  }
  __device__ __forceinline__ void store(Value* row, const Outputs& outputs) const {
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const std::int32_t ow = 16 * j + 4 * t + job.first_ow;
      if (8 * j >= job.in_w) break;
      if (job.wide && ow >= 0 && ow + 4 <= job.out_w) {
        Four four;
#pragma unroll
        for (int e = 0; e < 4; ++e) four.v[e] = Narrow<Value>::from(outputs[j][e]);
        *reinterpret_cast<Four*>(row + ow) = four;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (std::uint32_t(ow + e) < std::uint32_t(job.out_w)) row[(ow + e) * job.y_w] = Narrow<Value>::from(outputs[j][e]);
      }
    }
  }
};
#endif

}  // namespace upfold::cuda
