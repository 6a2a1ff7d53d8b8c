// Sums of which every thread holds its own part, added up over a warp and over a block, in one order.
#pragma once

#include "values.cuh"

namespace upfold::cuda {

// Of two lanes that exchange their sums one goes on with the upper half of them, one with the lower.
template <int kHalf, typename Total, int kCount>
UPFOLD_DEVICE void add_halves(Total (&sums)[kCount]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const Total sent = upper ? sums[i] : sums[i + kHalf], kept = upper ? sums[i + kHalf] : sums[i];
    sums[i] = kept + __shfl_xor_sync(~0u, sent, kHalf);
  }
  if constexpr (kHalf > 1) add_halves<kHalf / 2>(sums);
}

// Number i of the sums of all threads of a block, for thread i; `exchange` holds kWarps * kCount. All threads take part.
template <int kWarps, typename Total, int kCount>
UPFOLD_DEVICE Total sum_of_block(Total (&sums)[kCount], Total* exchange) {
  static_assert(kCount == 4 || kCount == 8 || kCount == 16 || kCount == 32, "a power of two, at most a warp");
  const int thread = int(threadIdx.x), lane = thread % 32;
  add_halves<kCount / 2>(sums);
#pragma unroll
  for (int by = 16; by >= kCount; by /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], by);
  if (lane < kCount) exchange[thread / 32 * kCount + lane] = sums[0];
  __syncthreads();  // the sums of all warps are there
  Total sum = 0;
  if (thread < kCount) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += exchange[i * kCount + thread];
  }
  return sum;
}

}  // namespace upfold::cuda
