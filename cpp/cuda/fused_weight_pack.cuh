// x or y of the fused gradient of the weight with rows of whole vectors of 16 bytes, for the copy engine, where they are not.
#pragma once

#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kWeightPackThreads = 256;

struct FusedWeightPackJob {
  Divisor row_vectors, height, depth, channels;
  std::uint32_t vectors;  // 0: nothing is packed
  std::int32_t width;     // elements of a row
  bool dense;             // rows follow one another at the same distance
  std::int64_t n, c, d, h;
  std::int64_t end;  // elements from the operand's first to behind its last
};

// The words of 4 bytes that hold `live` 16-bit elements from `at` on, as four whose other elements are zeros. Words are loaded
// whole: those that hold an element and also something outside of the operand's memory are put together from elements.
UPFOLD_DEVICE uint4 packed_vector(const std::uint16_t* __restrict__ from, std::int64_t at, std::int32_t live, std::int64_t end) {
  const std::int32_t skew = std::int32_t(at % 2), words = (skew + live + 1) / 2;
  const std::int64_t first = at - skew;
  std::uint32_t in[5] = {}, out[4];
  if (live == 8 && reinterpret_cast<std::uintptr_t>(from + at) % 8 == 0) {
    const auto* const half = reinterpret_cast<const uint2*>(from + at);
    const uint2 low = __ldg(half), high = __ldg(half + 1);
    return {low.x, low.y, high.x, high.y};
  }
  if (first + 2 * words <= end) {
    const auto* const word = reinterpret_cast<const std::uint32_t*>(from + first);
#pragma unroll
    for (int i = 0; i < 5; ++i)
      if (i < words) in[i] = __ldg(word + i);
  } else {
#pragma unroll
    for (int i = 0; i < 10; ++i)
      if (i >= skew && i < skew + live) in[i / 2] |= std::uint32_t(from[first + i]) << (i % 2 * 16);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = __funnelshift_r(in[i], in[i + 1], std::uint32_t(skew) * 16);
    if (live < 2 * i + 2) out[i] = live > 2 * i ? out[i] & 0xffff : 0;
  }
  return {out[0], out[1], out[2], out[3]};
}
UPFOLD_DEVICE uint4 packed_vector(const std::uint32_t* __restrict__ from, std::int64_t at, std::int32_t live, std::int64_t) {
  std::uint32_t out[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < live) out[i] = __ldg(from + at + i);
  return {out[0], out[1], out[2], out[3]};
}

// A thread writes a vector. The operand begins at a multiple of 4 bytes.
template <typename Bits>
__global__ void __launch_bounds__(kWeightPackThreads)
    fused_weight_pack_kernel(const __grid_constant__ FusedWeightPackJob job, const Bits* __restrict__ from,
                             uint4* __restrict__ to) {
  constexpr std::int32_t kVector = 16 / int(sizeof(Bits));
  const std::uint32_t number = blockIdx.x * kWeightPackThreads + threadIdx.x;
  take_turn();
  if (number >= job.vectors) return;
  std::uint32_t row = number;
  const std::int32_t column = std::int32_t(take(job.row_vectors, row)) * kVector, left = job.width - column;
  std::int64_t at = std::int64_t(row) * job.h;
  if (!job.dense) {
    const std::uint32_t h = take(job.height, row), d = take(job.depth, row), c = take(job.channels, row);
    at = row * job.n + c * job.c + d * job.d + h * job.h;
  }
  to[number] = packed_vector(from, at + column, left < kVector ? left : kVector, job.end);
}

}  // namespace upfold::cuda
