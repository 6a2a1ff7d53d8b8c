// Sums of parts that other blocks stored, four neighbouring values by a thread. Kernels that only add are chains of loads: the
// parts are read in batches whose loads do not wait for one another, and added in ascending order.
#pragma once

#include "values.cuh"

namespace upfold::cuda {

UPFOLD_DEVICE void add(float4& sum, const float4& v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// kCount parts of each vector. Loads are not predicated, of which the compiler would keep few in flight; where `last` is false,
// the last part does not exist: the one ahead of it is read again, and counts as zeros, which leave sums that began at +0 as they
// are.
template <int kCount, int kVectors>
UPFOLD_DEVICE void add_batch(float4 (&sums)[kVectors], const float4* const (&from)[kVectors], std::int64_t step, bool last) {
  float4 parts[kCount][kVectors];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) parts[i][j] = from[j][(i < kCount - 1 || last ? i : i - 1) * step];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) add(sums[j], i < kCount - 1 || last ? parts[i][j] : float4{0, 0, 0, 0});
  }
}

constexpr int kPartBatch = 8;  // loads of a thread at a time

// Parts 0, 1, ... of each vector, which are `step` vectors apart: `count` of them, the last one only where `last` is true,
// which it is of one part. All vectors are read, and can be: what is not wanted is not stored.
template <int kVectors>
UPFOLD_DEVICE void add_parts(float4 (&sums)[kVectors], const float4* (&from)[kVectors], std::int64_t step, std::int32_t count,
                             bool last) {
  constexpr std::int32_t kBatch = kPartBatch / kVectors;
  static_assert(kBatch == 4 || kBatch == 8, "the cases below");
#pragma unroll 1
  for (; count > kBatch; count -= kBatch) {
    add_batch<kBatch>(sums, from, step, true);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) from[j] += kBatch * step;
  }
  if constexpr (kBatch == 8) {
    if (count > 6) return count == 8 ? add_batch<8>(sums, from, step, last) : add_batch<7>(sums, from, step, last);
    if (count > 4) return count == 6 ? add_batch<6>(sums, from, step, last) : add_batch<5>(sums, from, step, last);
  }
  if (count > 2) return count == 4 ? add_batch<4>(sums, from, step, last) : add_batch<3>(sums, from, step, last);
  if (count > 0) return count == 2 ? add_batch<2>(sums, from, step, last) : add_batch<1>(sums, from, step, last);
}

// Of the lanes `apart`, 2 * apart, ... from one another, within aligned groups of `together`; powers of two. All of them get the
// same sum: of two addends the order does not matter.
UPFOLD_DEVICE void add_lanes(float4& sum, std::int32_t apart, std::int32_t together) {
  for (std::int32_t mask = apart; mask < together; mask *= 2) {
    const float4 other = {__shfl_xor_sync(~0u, sum.x, mask), __shfl_xor_sync(~0u, sum.y, mask), __shfl_xor_sync(~0u, sum.z, mask),
                          __shfl_xor_sync(~0u, sum.w, mask)};
    add(sum, other);
  }
}

// Of `count` sums, at most 8, which are `step` apart.
UPFOLD_DEVICE float add_eight(const float* sums, std::int32_t step, std::int32_t count) {
  float sum = sums[0];
#pragma unroll
  for (int i = 1; i < 8; ++i)
    if (i < count) sum += sums[i * step];
  return sum;
}

}  // namespace upfold::cuda
