// The packing of an operand of the fused gradient of the weight: what it takes, and its launch; host code.
#pragma once

#ifndef __CUDACC_RTC__
#include "fused_weight_pack.cuh"
#include "launch.cuh"

namespace upfold::cuda {

// Rows of whole vectors, `row` of them: [sample][channel][depth][height], of `size` (width, height, depth).
inline FusedWeightPackJob weight_pack_job(std::int64_t batch, const Strides& s, std::int64_t channels,
                                          const std::int64_t (&size)[3], std::int64_t row) {
  FusedWeightPackJob job{};
  job.row_vectors = make_divisor(row), job.height = make_divisor(size[1]), job.depth = make_divisor(size[2]);
  job.channels = make_divisor(channels);
  job.vectors = std::uint32_t(batch * channels * size[1] * size[2] * row), job.width = std::int32_t(size[0]);
  job.n = s.n, job.c = s.c, job.d = s.d, job.h = s.h;
  job.end = (batch - 1) * s.n + (channels - 1) * s.c + (size[2] - 1) * s.d + (size[1] - 1) * s.h + size[0];
  std::int64_t next = s.h * size[1];
  job.dense = size[1] > 1 && (size[2] == 1 || s.d == next);
  next *= size[2];
  job.dense = job.dense && (channels == 1 || s.c == next) && (batch == 1 || s.n == next * channels);
  return job;
}

// The operand itself, or what is packed of it into the workspace, `at` bytes behind its beginning.
template <typename Value>
const void* packed_operand(const Launch& launch, const FusedWeightPackJob& job, const void* operand, void* workspace,
                           std::int64_t at) {
  if (job.vectors == 0) return operand;
  using Bits = Word<sizeof(Value)>;
  void* const to = static_cast<unsigned char*>(workspace) + at;
  launch_in_turn("fused", fused_weight_pack_kernel<Bits>, launch, (job.vectors + kWeightPackThreads - 1) / kWeightPackThreads,
                 kWeightPackThreads, job, static_cast<const Bits*>(operand), static_cast<uint4*>(to));
  return to;
}

}  // namespace upfold::cuda
#endif
