// The products of the fused method's phase tiles, and their kernel.
#pragma once

#include "fused_phases_store.cuh"

namespace upfold::cuda {

// What the rounding to TF32 leaves, as TF32; nothing of what is not finite.
UPFOLD_DEVICE std::uint32_t tf32_rest(float v, std::uint32_t rounded) {
  const float rest = v - __uint_as_float(rounded);
  return to_tf32(fabsf(rest) <= fabsf(v) ? rest : 0.0f);
}

// One input as TF32: 16-bit types are such.
template <typename Value>
UPFOLD_DEVICE float input_at(const unsigned char* at) {
  return widen(*reinterpret_cast<const Value*>(at));
}
template <typename Value_, bool kExact, typename Tile_>
struct PhaseBlock : PhaseResults<Value_, kExact, Tile_> {
  using Base = PhaseResults<Value_, kExact, Tile_>;
  using Base::Base, Base::job, Base::reduced, Base::set_steps, Base::steps, Base::weight;
  using typename Base::Sums;
  using typename Base::Tile;
  using typename Base::Value;

  __device__ __forceinline__ void multiply(Sums& sums, const unsigned char* x, std::int32_t chunk,
                                           const std::int32_t (&columns)[Tile::kN8], std::int32_t warp_m,
                                           std::int32_t warp_k) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, count = set_steps(), four = 4 * job.channel_step;
    constexpr int kAhead = Tile::kM16 == 1 && !kExact ? 4 : 2;
    const float4* a_at = weight() + (chunk * count * Tile::kGroups + warp_m * Tile::kM16) * 32 + lane;
    const unsigned char* own[Tile::kN8][2];
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) own[j][0] = x + columns[j], own[j][1] = own[j][0] + four;
#pragma unroll(kAhead)
    for (std::int32_t step = warp_k; step < count; step += Tile::kWarpsK) {
      const PhaseStep at = steps()[step];
      float b[Tile::kN8][2];
#pragma unroll
      for (int j = 0; j < Tile::kN8; ++j) {
        b[j][0] = input_at<Value>(own[j][0] + at.from), b[j][1] = input_at<Value>(own[j][1] + at.from);
      }
      std::uint32_t b_high[Tile::kN8][2], b_low[Tile::kN8][2];
#pragma unroll
      for (int j = 0; j < Tile::kN8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          b_high[j][h] = sizeof(Value) == 2 ? __float_as_uint(b[j][h]) : to_tf32(b[j][h]);
          if constexpr (kExact) b_low[j][h] = tf32_rest(b[j][h], b_high[j][h]);
        }
      }
#pragma unroll
      for (int m = 0; m < Tile::kM16; ++m) {
        if ((at.groups >> (warp_m * Tile::kM16 + m) & 1) == 0) continue;
        const float4 v = a_at[(step * Tile::kGroups + m) * 32];
        const float a[4] = {v.x, v.y, v.z, v.w};
        std::uint32_t high[4], low[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          high[e] = kExact ? to_tf32(a[e]) : __float_as_uint(a[e]);
          if constexpr (kExact) low[e] = tf32_rest(a[e], high[e]);
        }
#pragma unroll
        for (int j = 0; j < Tile::kN8; ++j) {
          if constexpr (kExact) {
            // Tensor cores cut off what they add up: each step has its own sum, which is added with rounding to nearest.
            float part[4] = {};
            TensorCore<float>::add(part, low, b_high[j][0], b_high[j][1]);
            TensorCore<float>::add(part, high, b_low[j][0], b_low[j][1]);
            TensorCore<float>::add(part, high, b_high[j][0], b_high[j][1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][j][e] += part[e];
          } else {
            TensorCore<float>::add(sums[m][j], high, b_high[j][0], b_high[j][1]);
          }
        }
      }
    }
  }

  // Adds the sums of the warps that share a tile and split the reduction, in their order; true for the first of them.
  __device__ __forceinline__ bool reduce(Sums& sums, std::int32_t warp_mn, std::int32_t warp_k) const {
    if constexpr (Tile::kWarpsK > 1) {
      constexpr int kOwn = Tile::kM16 * Tile::kN8, kTiles = Tile::kWarpsM * Tile::kWarpsN;
      const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
      if (warp_k > 0) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float(&s)[4] = sums[i / Tile::kN8][i % Tile::kN8];
          reduced()[(((warp_k - 1) * kTiles + warp_mn) * kOwn + i) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
        }
      }
      __syncthreads();  // partial sums are complete
      if (warp_k > 0) return false;
#pragma unroll
      for (int k = 0; k < Tile::kWarpsK - 1; ++k) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float4 v = reduced()[((k * kTiles + warp_mn) * kOwn + i) * 32 + lane];
          float(&s)[4] = sums[i / Tile::kN8][i % Tile::kN8];
          s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
        }
      }
    }
    return true;
  }
};

template <typename Value, bool kExact, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_phases_kernel(const __grid_constant__ PhaseJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                        const Value* __restrict__ bias, Value* __restrict__ y) {
  extern __shared__ uint4 memory[];
  std::uint32_t number = blockIdx.x;
  const std::uint32_t combination = take(job.combinations, number);
  PhaseBlock<Value, kExact, Tile> block(job, reinterpret_cast<unsigned char*>(memory), combination);
  const std::uint32_t box_step = gridDim.x / job.combinations.value, boxes = job.boxes.value;

  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, lane = std::int32_t(threadIdx.x) % 32;
  const std::int32_t warp_mn = warp % (Tile::kWarpsM * Tile::kWarpsN), warp_k = warp / (Tile::kWarpsM * Tile::kWarpsN);
  const std::int32_t warp_m = warp_mn % Tile::kWarpsM, warp_n = warp_mn / Tile::kWarpsM;
  // What is copied next.
  std::uint32_t copy_box = number, copy_stage = 0;
  std::int32_t copy_chunk = 0;
  const auto share = block.share();
  const std::int32_t first_place = share.number < job.place_count ? share.number : 0;
  auto box = block.box_at(number), next_box = box;
  auto place = block.place_at(first_place, box);
  const auto copy_next = [&] {
    if (copy_box < boxes) {
      block.copy_inputs(x, next_box, share, place, copy_chunk, block.stage(int(copy_stage)));
      if (++copy_chunk == job.chunks) {
        copy_chunk = 0, copy_box += box_step;
        if (copy_box < boxes) next_box = block.box_at(copy_box), place = block.place_at(first_place, next_box);
      }
    }
    copy_async_commit();
    copy_stage ^= 1;
  };
  copy_next();
  block.make_lines(bias);
  block.make_steps();
  __syncthreads();  // the tables are complete
  block.load_weight(w);
  std::int32_t columns[Tile::kN8];  // where this lane's units begin in x, with its channel of a step
#pragma unroll
  for (int j = 0; j < Tile::kN8; ++j) {
    std::uint32_t rest = std::uint32_t((warp_n * Tile::kN8 + j) * 8 + lane / 4);
    const std::int32_t unit = std::int32_t(take(job.box_w, rest));
    if (rest >= job.box_lines.value) rest = 0;
    const std::uint32_t h = take(job.box_h, rest), d = take(job.box_d, rest);
    const std::uint32_t line = (rest * job.in_d.value + d) * job.in_h.value + h;
    columns[j] = std::int32_t(line) * job.line_step + (unit + job.skew) * job.input_step + lane % 4 * job.channel_step;
  }
  std::uint32_t stage = 0;
  const auto address = std::uint32_t(reinterpret_cast<std::uintptr_t>(y) / sizeof(Value));
  for (; number < boxes; number += box_step) {
    box = block.box_at(number);
    float sums[Tile::kM16][Tile::kN8][4] = {};
    for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk, stage ^= 1) {
      copy_next();
      copy_async_wait<1>();
      __syncthreads();  // inputs are there, weights too, and the results of the box before are stored
      if (chunk == 0) block.make_runs(box, address);
      if (chunk == 0 && job.prefill) block.fill_staged();
      block.multiply(sums, block.stage(int(stage)), chunk, columns, warp_m, warp_k);
      __syncthreads();  // everyone has left the inputs, and the runs are known
    }
    if (block.reduce(sums, warp_mn, warp_k)) block.put(sums, warp_m, warp_n);
    __syncthreads();  // results are complete
    block.store(box, address, y);
  }
}

}  // namespace upfold::cuda
