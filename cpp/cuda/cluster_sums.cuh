// Sums of a tile of which the blocks of a cluster have parts (compute capability 9.0).
#pragma once

#include "mma.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// The warps that multiply put their sums where the operands were, and each block adds some of those of all blocks up, in their
// order: four neighbouring eights of columns of a product at a time, for which it calls use(product of the tile, first eight,
// sums). All lanes of a warp call it at once. All but the threads of these warps have ended, or end without meeting others.
template <int kWorkers, int kM, int kN8, typename Use>
UPFOLD_DEVICE void add_in_cluster(unsigned char* memory, std::uint32_t parts, std::int32_t warpgroup,
                                  const float (&sums)[kM][kN8][4], Use use) {
  constexpr std::uint32_t kOfProduct = kN8 / 4;
  constexpr std::uint32_t kAtOnce = 4;  // blocks whose sums are on their way to a lane
  static_assert(kN8 % 4 == 0, "whole groups");
  meet<1, kWorkers>();  // all products have read what the sums overwrite
  float4* const own = reinterpret_cast<float4*>(memory) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kM * kN8; ++i) {
    const float(&v)[4] = sums[i / kN8][i % kN8];
    own[i * kWorkers] = {v[0], v[1], v[2], v[3]};
  }
  meet_cluster();  // the sums of all are there
  const std::uint32_t first = shared_address(own);
#pragma unroll 1
  for (std::uint32_t group = blockIdx.x % parts; group < kM * kOfProduct; group += parts) {
    float v[4][4] = {};
#pragma unroll 1
    for (std::uint32_t block = 0; block < parts; block += kAtOnce) {
      float4 read[kAtOnce][4];
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        if (block + i >= parts) break;
#pragma unroll
        for (std::uint32_t k = 0; k < 4; ++k) read[i][k] = load_of_block(first + (4 * group + k) * (kWorkers * 16), block + i);
      }
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        if (block + i >= parts) break;
#pragma unroll
        for (std::uint32_t k = 0; k < 4; ++k)
          v[k][0] += read[i][k].x, v[k][1] += read[i][k].y, v[k][2] += read[i][k].z, v[k][3] += read[i][k].w;
      }
    }
    use(warpgroup * kM + std::int32_t(group / kOfProduct), std::int32_t(group % kOfProduct * 4), v);
  }
  leave_cluster();
  await_cluster();  // a block stays while others read its sums
}
#endif

}  // namespace upfold::cuda
