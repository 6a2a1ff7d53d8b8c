// What the kernels of the depthwise adjoint in w share (depthwise_weight.cu says what they compute): what a block owns.
#pragma once

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

#include "depthwise.cuh"

namespace upfold::cuda {

constexpr int kWarps = kDepthwiseThreads / 32;

struct DepthwiseWeightJob {
  DepthwiseJob problem;
  Divisor parts, groups, kernel_h, kernel_w, taps;  // groups: of taps that blocks share out
  Divisor in_h;                                     // general: positions are counted row by row
  Divisor inner;                                    // general: neighbouring threads, groups of taps or channels
  Divisor groups_w;                                 // general: groups of taps of the W axis
  std::int32_t tap_groups;                          // general: of a channel
  std::uint32_t items, length, elements;            // of a channel; of a part; of w
};

struct WeightBlock {
  std::uint32_t part, begin, end;
  std::int32_t group, kd, channel;
};

UPFOLD_DEVICE WeightBlock weight_block(const DepthwiseWeightJob& job, bool by_depth) {
  std::uint32_t rest = blockIdx.x;
  WeightBlock block;
  block.part = take(job.parts, rest), block.group = std::int32_t(take(job.groups, rest)), block.kd = 0;
  if (by_depth) {
    block.kd = std::int32_t(rest) % job.problem.axis[0].kernel;
    rest /= std::uint32_t(job.problem.axis[0].kernel);
  }
  block.channel = std::int32_t(rest), block.begin = block.part * job.length;
  block.end = job.items - block.begin < job.length ? job.items : block.begin + job.length;
  return block;
}

// Of two lanes that exchange their sums one goes on with the upper half of them, one with the lower.
template <int kHalf, int kCount>
UPFOLD_DEVICE void add_halves(float (&sums)[kCount]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float sent = upper ? sums[i] : sums[i + kHalf], kept = upper ? sums[i + kHalf] : sums[i];
    sums[i] = kept + __shfl_xor_sync(~0u, sent, kHalf);
  }
  if constexpr (kHalf > 1) add_halves<kHalf / 2>(sums);
}

// Number i of the sums of all threads of a block, for thread i; `exchange` holds kWarps * kCount. All threads take part.
template <int kCount>
UPFOLD_DEVICE float sum_of_block(float (&sums)[kCount], float* exchange) {
  static_assert(kCount == 4 || kCount == 8 || kCount == 16 || kCount == 32, "a power of two, at most a warp");
  const int thread = int(threadIdx.x), lane = thread % 32;
  add_halves<kCount / 2>(sums);
#pragma unroll
  for (int by = 16; by >= kCount; by /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], by);
  if (lane < kCount) exchange[thread / 32 * kCount + lane] = sums[0];
  __syncthreads();  // the sums of all warps are there
  float sum = 0.0f;
  if (thread < kCount) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += exchange[i * kCount + thread];
  }
  return sum;
}

#ifndef __CUDACC_RTC__
constexpr std::int64_t kMostParts = 128;                       // which one thread adds up
constexpr std::int64_t kMostPartial = std::int64_t(64) << 20;  // bytes of partial sums, beyond the first part

// Shares out a job's items between about `wanted` parts, each of a multiple of `at_once` items.
inline void depthwise_share_parts(DepthwiseWeightJob& job, std::int64_t wanted, std::int64_t at_once) {
  const std::int64_t fit = std::max<std::int64_t>(1, kMostPartial / (std::int64_t(job.elements) * 4));
  wanted = std::min({wanted, fit, kMostParts});
  job.length = std::uint32_t(ceil_div(ceil_div(job.items, wanted), at_once) * at_once);
  job.parts = make_divisor(ceil_div(job.items, job.length));
}

// Of channels_last tensors (depthwise_last_weight.cu): bytes of the partial sums, 0 where no kernel is for it; false where an
// address is not aligned.
std::int64_t depthwise_last_weight_bytes(const Problem& p);
bool depthwise_last_weight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands);

// The job of the walks; false where the sizes are none of whole rows of a known kernel.
bool depthwise_walk_weight_job(const Problem& p, DepthwiseWeightJob& job);
// Fills the parts; false where the operands are not aligned.
bool depthwise_walk_weight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands,
                           const DepthwiseWeightJob& job);
#endif

}  // namespace upfold::cuda
