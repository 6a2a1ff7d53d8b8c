// The products of the fused gradient of the weight whose channels are innermost (fused_weight_last.cuh), of 16-bit values: by
// warpgroups. Atoms at the same distance from one another are the columns of one instruction.
#pragma once

#include "fused_weight_last_store.cuh"

namespace upfold::cuda {

// Groups of 64 input channels; groups of 8 columns of a unit's first instruction and of its second, 0 where there is none.
template <int kRowGroups_, int kFirst8_, int kSecond8_>
struct WeightLastTile {
  static constexpr int kRowGroups = kRowGroups_, kFirst8 = kFirst8_, kSecond8 = kSecond8_, kColumns8 = kFirst8 + kSecond8;
  static constexpr int kUnits = 2 / kRowGroups, kSlots = kSecond8 > 0 ? 2 : 1;  // instructions of a unit
  static constexpr int kWarps = 8, kThreads = 32 * kWarps + 128;
  static constexpr int kCopyRegisters = 40, kMultiplyRegisters = 232;
  static_assert(kColumns8 <= 48, "registers of the sums");
};

#if UPFOLD_WARPGROUPS
// A product of a step, of the first instruction or the second.
template <typename Value, bool kPlanes, int kN8, int kFirst, int kCount>
UPFOLD_DEVICE void add_weight_product(float (&sums)[kCount][4], std::uint64_t x, std::uint64_t y) {
  if constexpr (kPlanes) {
    WarpgroupCore<TurnedColumns<Value>, kN8, 1, 0>::add(reinterpret_cast<float(&)[kN8][4]>(sums[kFirst]), x, y);
  } else {
    WarpgroupTurned<Value, kN8, kFirst>::add(sums, x, y);
  }
}

// Each step is a group of products of its own, and one more may be unfinished.
template <typename Value, typename Tile, bool kPlanes>
UPFOLD_DEVICE void add_weight_products(const WeightLastJob& job, const WeightLastPlace& place, WeightLastBarriers& barriers,
                                       const unsigned char* memory, float (&sums)[Tile::kColumns8][4]) {
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
  const std::int32_t warpgroup = __shfl_sync(~0u, std::int32_t(threadIdx.x) / 128, 0);  // known to be one for a warp
  const std::int32_t unit = Tile::kUnits == 2 ? warpgroup : 0, slot = (place.set * Tile::kUnits + unit) * Tile::kSlots;
  const std::uint32_t x_own = Tile::kRowGroups == 2 ? std::uint32_t(warpgroup * job.x_pitch / 16) : 0;
  const std::uint32_t first = job.slot[slot], second = job.slot[slot + Tile::kSlots - 1];
  const std::uint64_t x_high = std::uint64_t(job.x_high) << 32, y_high = std::uint64_t(job.y_high) << 32;
  const SharedAddress of_barriers(&barriers), of_memory(memory);
  Ring ring(job.stages);
  std::uint32_t used = 0;  // the barrier of what the products before read; 0: none, released
  for (std::uint32_t tile = place.begin; tile < place.end; ++tile, ring.next()) {
    barrier_wait(of_barriers.of(&barriers.full[ring.at]), ring.parity);
    const std::uint32_t stage = in_descriptor(weight_stage(job, of_memory, ring.at)),
                        y_first = stage + std::uint32_t(job.y_at) / 16;
    std::uint32_t x_at = x_own + stage;
#pragma unroll 1
    for (std::int32_t step = 0; step < job.steps; ++step, x_at += job.x_step) {
      const std::uint32_t y_at = y_first + job.y_step[step];
      warpgroup_begin();
      add_weight_product<Value, kPlanes, Tile::kFirst8, 0>(sums, x_high | x_at, y_high | (first + y_at));
      if constexpr (Tile::kSlots == 2)
        add_weight_product<Value, kPlanes, Tile::kSecond8, Tile::kFirst8>(sums, x_high | x_at, y_high | (second + y_at));
      if constexpr (kPlanes) x_at += step % 4 == 3 ? kWeightPlanePixels * 128 / 16 - 8 : 0;
      warpgroup_commit();
      warpgroup_wait<1>();
      if (lane == 0 && used != 0) barrier_arrive(used);
      used = 0;
    }
    used = of_barriers.of(&barriers.empty[ring.at]);
  }
  warpgroup_wait<0>();
#pragma unroll
  for (int i = 0; i < Tile::kColumns8 * 4; ++i) pin(sums[i / 4][i % 4]);
}
#endif

// partial[part][tile][group of 64 input channels][8 columns][thread of a warpgroup]: four sums each, where w is not stored.
// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Value, typename Tile, bool kPlanes>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_weight_last_kernel(const __grid_constant__ WeightLastJob job, const __grid_constant__ WeightLastMaps maps,
                             float4* __restrict__ partial, Value* __restrict__ w) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ WeightLastBarriers barriers;
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kWeightLastAlignment;
  const WeightLastPlace place(job);
  if constexpr (!kPlanes) clear_weight_tails(job, place, first, Tile::kThreads / 32);
  make_weight_barriers(job, barriers, Tile::kWarps);
  if (threadIdx.x >= 32 * Tile::kWarps) {
    give_registers_back<Tile::kCopyRegisters>();
    if (threadIdx.x == 32 * Tile::kWarps) copy_weight_boxes<kPlanes>(job, maps, place, barriers, first);
    return;
  }
  take_registers<Tile::kMultiplyRegisters>();
  float sums[Tile::kColumns8][4] = {};
  add_weight_products<Value, Tile, kPlanes>(job, place, barriers, first, sums);
  // The second warpgroup is the second group of channels, or the second unit, whose columns lie there too.
  const std::int32_t warpgroup = std::int32_t(threadIdx.x) / 128, thread = std::int32_t(threadIdx.x) % 128;
  if (!job.whole) {
    float4* const own = partial + (std::int64_t(blockIdx.x) * 2 + warpgroup) * (Tile::kColumns8 * 128) + thread;
    if (job.adds) {
#pragma unroll
      for (int i = 0; i < Tile::kColumns8; ++i) {
        const float4 v = own[i * 128];
        sums[i][0] += v.x, sums[i][1] += v.y, sums[i][2] += v.z, sums[i][3] += v.w;
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kColumns8; ++i) own[i * 128] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
    return;
  }
  const WeightLastFinish<Value, Tile::kRowGroups, Tile::kUnits * Tile::kColumns8> finish{job, place,
                                                                                         reinterpret_cast<float*>(first)};
  meet<1, kWeightStoring>();  // all products have read what the sums overwrite
  const std::int32_t group = Tile::kRowGroups == 2 ? warpgroup : 0,
                     first8 = Tile::kRowGroups == 2 ? 0 : warpgroup * Tile::kColumns8;
#pragma unroll
  for (int i = 0; i < Tile::kColumns8; ++i)
    finish.keep(group, first8 + i, thread, {sums[i][0], sums[i][1], sums[i][2], sums[i][3]});
  finish.run(w);
#endif
}

}  // namespace upfold::cuda
