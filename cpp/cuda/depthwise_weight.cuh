// What the kernels of the depthwise adjoint in w share (depthwise_weight.cu says what they compute): what a block owns.
#pragma once

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

#include "depthwise.cuh"
#include "lane_sums.cuh"

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
