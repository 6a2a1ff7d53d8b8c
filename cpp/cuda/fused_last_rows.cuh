// What every end of the fused method by boxes of channels needs: where positions lie in the result, and activations.
#pragma once

#include "fused_last.cuh"

namespace upfold::cuda {

// Where a row of a product lies in the result, in phase 0 of no offset; sizes left behind it on each axis.
struct LastRow {
  std::int64_t offset;
  std::int32_t left[3];
};
constexpr std::int32_t kNothingLeft = -(1 << 30);

UPFOLD_DEVICE LastRow last_row(const LastJob& job, const LastPlace& place, std::int32_t number) {
  LastRow row;
  std::uint32_t rest = std::uint32_t(number);
  row.offset = 0;
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    const std::int32_t at = place.first[i] + std::int32_t(take(job.axis[i].tile, rest));
    row.left[i] = job.axis[i].size - at * job.axis[i].result_step;
    row.offset += std::int64_t(at * job.axis[i].result_step) * job.y_axis[i];
  }
  const std::int32_t n = place.n + std::int32_t(rest);
  row.offset += n * job.y_n;
  if (n >= job.batch || rest >= job.tile_n.value) row.left[2] = kNothingLeft;
  return row;
}

// The offset of a phase, or of a tap, and whether a row has it.
struct LastTarget {
  std::int32_t at[3];
  std::int64_t offset;
  __device__ __forceinline__ bool is_in(const LastRow& row) const {
    return at[0] < row.left[0] && at[1] < row.left[1] && at[2] < row.left[2];
  }
};
UPFOLD_DEVICE LastTarget last_target(const LastJob& job, std::int32_t d, std::int32_t h, std::int32_t w) {
  return {{d, h, w}, d * job.y_axis[0] + h * job.y_axis[1] + w * job.y_axis[2]};
}

// Eight at a time: of all of them at once the compiler would run out of registers.
template <int kM, int kPhases, int kEights>
struct ActivateLast {
  float (&sums)[kM][kPhases][kEights][4];
  __device__ __forceinline__ float& sum(int i) const {
    return sums[i / 4 / kEights / kPhases][i / 4 / kEights % kPhases][i / 4 % kEights][i % 4];
  }
  template <typename Function>
  __device__ __forceinline__ void operator()(const Function& function) const {
#pragma unroll
    for (int first = 0; first < kM * kPhases * kEights * 4; first += 8) {
#pragma unroll
      for (int i = first; i < first + 8; ++i) pin(sum(i));
#pragma unroll
      for (int i = first; i < first + 8; ++i) sum(i) = function(sum(i));
#pragma unroll
      for (int i = first; i < first + 8; ++i) pin(sum(i));
    }
  }
};

}  // namespace upfold::cuda
