// The products of the fused gradient of the weight whose channels are innermost (fused_weight_last.cuh), of float32 rounded to
// TF32, as the copy engine did: by warps, which read words of both operands as they lie. A warp has 64 input channels and two
// atoms of 32 channels. Eight rows of the reduction are a product; a lane reads pairs of neighbouring channels of the rows
// 2 * (lane % 4), as the product's element lane % 4, and the one behind, as its element lane % 4 + 4: so that half a warp reads
// different banks, whatever row a tap begins with. Of a pair, the channels are rows r and r + 8 of a product, or the same
// column of two.
#pragma once

#include "fused_weight_last.cuh"

namespace upfold::cuda {

// Groups of 64 input channels, units.
template <int kRowGroups_, int kUnits_>
struct WeightLastFloatTile {
  static constexpr int kRowGroups = kRowGroups_, kUnits = kUnits_, kSlots = 2, kColumns8 = 8;  // of a unit
  static constexpr int kWarps = kRowGroups * kUnits, kThreads = 32 * kWarps + 128;
  static constexpr int kCopyRegisters = 40, kMultiplyRegisters = 232;
  static_assert(kWarps == 8, "registers of a block");
};

#if UPFOLD_WARPGROUPS
using WeightFloatSums = float[4][8][4];  // of 16 rows and 8 columns

struct WeightFloatLane {
  std::uint32_t row, vector, half;  // of the pair of rows; 16 bytes of the row, and which 8 of these, before the swizzle
  __device__ __forceinline__ WeightFloatLane() : row(threadIdx.x % 4 * 2), vector(threadIdx.x % 32 / 8), half(threadIdx.x / 4 % 2) {}
  // Bytes from the first of 16 channels of row 0 to the lane's pair in row `number`; of the next 16 channels, 64 bytes the other way.
  __device__ __forceinline__ std::uint32_t at(std::uint32_t number) const {
    return number * 128 + ((vector ^ number % 8) * 16 + half * 8);
  }
};
UPFOLD_DEVICE uint2 pair_at(const unsigned char* memory, std::uint32_t at) { return *reinterpret_cast<const uint2*>(memory + at); }

// The products of eight rows: x's first at `x_at`, y's row numbers of both atoms from y_at on.
template <typename Tile>
UPFOLD_DEVICE void add_eight_rows(const WeightFloatLane& lane, const unsigned char* x, std::int32_t x_pitch,
                                  const unsigned char* y, const std::uint32_t (&y_row)[2], WeightFloatSums& sums) {
  const std::uint32_t x_first = lane.at(lane.row), x_second = lane.at(lane.row + 1);
  std::uint32_t a[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned char* const box = x + i / 2 * x_pitch;
    const uint2 first = pair_at(box, x_first ^ i % 2 * 64), second = pair_at(box, x_second ^ i % 2 * 64);
    a[i][0] = first.x, a[i][1] = first.y, a[i][2] = second.x, a[i][3] = second.y;
  }
#pragma unroll
  for (int atom = 0; atom < 2; ++atom) {
    const std::uint32_t y_first = lane.at(y_row[atom] + lane.row), y_second = lane.at(y_row[atom] + lane.row + 1);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const uint2 first = pair_at(y, y_first ^ q * 64), second = pair_at(y, y_second ^ q * 64);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        TensorCore<float>::add(sums[i][atom * 4 + q * 2], a[i], first.x, second.x);
        TensorCore<float>::add(sums[i][atom * 4 + q * 2 + 1], a[i], first.y, second.y);
      }
    }
  }
}

template <typename Tile>
UPFOLD_DEVICE void add_weight_floats(const WeightLastJob& job, const WeightLastPlace& place, WeightLastBarriers& barriers,
                                     const unsigned char* memory, WeightFloatSums& sums) {
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, group = warp % Tile::kRowGroups, unit = warp / Tile::kRowGroups;
  const std::uint32_t* const slot = job.slot + (place.set * Tile::kUnits + unit) * Tile::kSlots;
  const std::uint32_t first[2] = {slot[0] % 65536 / 8, slot[1] % 65536 / 8}, apart = job.y_apart / 8;  // rows
  const WeightFloatLane lane;
  Ring ring(job.stages);
  for (std::uint32_t tile = place.begin; tile < place.end; ++tile, ring.next()) {
    barrier_wait(shared_address(&barriers.full[ring.at]), ring.parity);
    const unsigned char* const stage = memory + ring.at * std::uint32_t(job.stage_bytes);
    const unsigned char* x = stage + group * 2 * job.x_pitch;
    const unsigned char* const y = stage + job.y_at;
#pragma unroll 1
    for (std::int32_t step = 0; step < job.steps; ++step, x += 16 * 128) {
      const std::uint32_t row = job.y_step[step] / 8u;
      const std::uint32_t upper[2] = {first[0] + row, first[1] + row};
      const std::uint32_t lower[2] = {upper[0] + apart, upper[1] + apart};
      add_eight_rows<Tile>(lane, x, job.x_pitch, y, upper, sums);
      add_eight_rows<Tile>(lane, x + 8 * 128, job.x_pitch, y, lower, sums);
    }
    __syncwarp();  // all lanes have read the stage
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barriers.empty[ring.at]));
  }
}

// In the order of fused_weight_last_kernel: of two neighbouring columns and two rows eight apart.
template <typename Tile>
UPFOLD_DEVICE void store_weight_floats(const WeightFloatSums& sums, float2* __restrict__ partial) {
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, group = warp % Tile::kRowGroups, unit = warp / Tile::kRowGroups;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, row = lane / 4 * 2, four = lane % 4;
  const std::int64_t tile = std::int64_t(blockIdx.x) * Tile::kRowGroups + group;
  float2* const own = partial + (tile * Tile::kUnits + unit) * (Tile::kColumns8 * 256);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // of 16 columns
      const float(&even)[4] = sums[i][2 * j], (&odd)[4] = sums[i][2 * j + 1];
      // The lane that holds a row and two columns there, and which of its halves.
      float2* const to = own + ((2 * j + four / 2) * 128 + i * 32) * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2* const at = to + ((row + r) % 8 * 4 + four % 2 * 2) * 2 + (row + r) / 8;
        at[0] = {even[2 * r], odd[2 * r]}, at[2] = {even[2 * r + 1], odd[2 * r + 1]};
      }
    }
  }
}
#endif

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_weight_last_float_kernel(const __grid_constant__ WeightLastJob job, const __grid_constant__ WeightLastMaps maps,
                                   float2* __restrict__ partial) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ WeightLastBarriers barriers;
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kWeightLastAlignment;
  const WeightLastPlace place(job);
  clear_weight_tails(job, first, Tile::kThreads);
  make_weight_barriers(job, barriers, Tile::kWarps);
  if (threadIdx.x >= 32 * Tile::kWarps) {
    give_registers_back<Tile::kCopyRegisters>();
    if (threadIdx.x == 32 * Tile::kWarps) copy_weight_boxes(job, maps, place, barriers, first);
    return;
  }
  take_registers<Tile::kMultiplyRegisters>();
  WeightFloatSums sums = {};
  add_weight_floats<Tile>(job, place, barriers, first, sums);
  store_weight_floats<Tile>(sums, partial);
#endif
}

}  // namespace upfold::cuda
