// The products of the fused gradient of the weight whose channels are innermost (fused_weight_last.cuh), of float32 rounded to
// TF32, as the copy engine did: by warps, which read words of both operands as they lie. A warp has 64 input channels and two
// atoms of 32 channels. Eight rows of the reduction are a product; a lane reads channels of row 2 * (lane % 4), as the product's
// element lane % 4, and of the one behind, as its element lane % 4 + 4: so that lanes read different banks, whatever row a tap
// begins with. Of x it reads pairs of channels, which are rows r and r + 8 of a product.
#pragma once

#include "fused_weight_last_store.cuh"

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

// Where a lane reads: of x pairs of channels, of y single ones.
struct WeightFloatLane {
  std::uint32_t row, x_vector, x_byte, y_vector, y_byte;  // the first row; 16 bytes of a row, before the swizzle, and bytes in it
  __device__ __forceinline__ WeightFloatLane()
      : row(threadIdx.x % 4 * 2),
        x_vector(threadIdx.x % 32 / 8),
        x_byte(threadIdx.x / 4 % 2 * 8),
        y_vector(threadIdx.x % 32 / 16),
        y_byte(threadIdx.x / 4 % 4 * 4) {}
  // Bytes from the first of 16 channels of row 0 to the lane's pair in row `number`; of the next 16 channels, 64 bytes the other
  // way.
  __device__ __forceinline__ std::uint32_t x_at(std::uint32_t number) const {
    return number * 128 + (x_vector ^ number % 8) * 16 + x_byte;
  }
  // The same of 8 channels; of the eight others i of the row, 32 * i bytes the other way.
  __device__ __forceinline__ std::uint32_t y_at(std::uint32_t number) const {
    return number * 128 + (y_vector ^ number % 8) * 16 + y_byte;
  }
};

// What products of eight rows read: of 64 channels of x, and of two atoms.
struct WeightFloatRows {
  std::uint32_t x[4][4], y[8][2];
};
UPFOLD_DEVICE void read_eight_rows(const WeightFloatLane& lane, const unsigned char* x, std::int32_t x_pitch,
                                   const unsigned char* y, const std::uint32_t (&y_row)[2], WeightFloatRows& rows) {
  const std::uint32_t x_first = lane.x_at(lane.row), x_second = lane.x_at(lane.row + 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned char* const box = x + i / 2 * x_pitch;
    const uint2 first = *reinterpret_cast<const uint2*>(box + (x_first ^ i % 2 * 64));
    const uint2 second = *reinterpret_cast<const uint2*>(box + (x_second ^ i % 2 * 64));
    rows.x[i][0] = first.x, rows.x[i][1] = first.y, rows.x[i][2] = second.x, rows.x[i][3] = second.y;
  }
#pragma unroll
  for (int atom = 0; atom < 2; ++atom) {
    const std::uint32_t first = lane.y_at(y_row[atom] + lane.row), second = lane.y_at(y_row[atom] + lane.row + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rows.y[atom * 4 + i][0] = *reinterpret_cast<const std::uint32_t*>(y + (first ^ i * 32));
      rows.y[atom * 4 + i][1] = *reinterpret_cast<const std::uint32_t*>(y + (second ^ i * 32));
    }
  }
}
UPFOLD_DEVICE void multiply_eight_rows(const WeightFloatRows& rows, WeightFloatSums& sums) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) TensorCore<float>::add(sums[i][j], rows.x[i], rows.y[j][0], rows.y[j][1]);
  }
}

// The rows of the next products are read ahead of the products before, those of the next stage too.
template <typename Tile>
UPFOLD_DEVICE void add_weight_floats(const WeightLastJob& job, const WeightLastPlace& place, WeightLastBarriers& barriers,
                                     const unsigned char* memory, WeightFloatSums& sums) {
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, group = warp % Tile::kRowGroups, unit = warp / Tile::kRowGroups;
  const std::uint32_t* const slot = job.slot + (place.set * Tile::kUnits + unit) * Tile::kSlots;
  const std::uint32_t first[2] = {slot[0] % 65536 / 8, slot[1] % 65536 / 8}, apart = job.y_apart / 8;  // rows
  const WeightFloatLane lane;
  const SharedAddress of_barriers(&barriers);
  Ring ring(job.stages);
  const unsigned char *x = nullptr, *y = nullptr;
  const auto enter = [&] {
    barrier_wait(of_barriers.of(&barriers.full[ring.at]), ring.parity);
    const unsigned char* const stage = memory + ring.at * std::uint32_t(job.stage_bytes);
    x = stage + group * 2 * job.x_pitch, y = stage + job.y_at;
  };
  const auto read = [&](std::uint32_t row, WeightFloatRows& rows) {
    const std::uint32_t y_row[2] = {first[0] + row, first[1] + row};
    read_eight_rows(lane, x, job.x_pitch, y, y_row, rows);
    x += 8 * 128;
  };
  std::uint32_t tile = place.begin;
  if (tile >= place.end) return;
  WeightFloatRows even, odd;
  enter();
  read(job.y_step[0] / 8u, even);
  std::int32_t step = 0;
#pragma unroll 1
  while (tile < place.end) {
    read(job.y_step[step] / 8u + apart, odd);
    multiply_eight_rows(even, sums);
    std::uint32_t asked = 0;  // barrier of the stage whose last rows were asked for
    if (++step == job.steps) {
      asked = of_barriers.of(&barriers.empty[ring.at]);
      ring.next(), step = 0, ++tile;
      if (tile < place.end) enter();
    }
    if (tile < place.end) read(job.y_step[step] / 8u, even);
    multiply_eight_rows(odd, sums);
    // They begin when all rows have come: an arrival ahead of them would not wait for reads that are under way.
    if (asked != 0 && threadIdx.x % 32 == 0) barrier_arrive(asked);
  }
}

// In the order of fused_weight_last_kernel: to(8 columns, thread of a warpgroup, half of its vector, sums) takes those of two
// neighbouring columns, of a row.
template <typename To>
UPFOLD_DEVICE void pass_weight_floats(const WeightFloatSums& sums, const To& to) {
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, row = lane / 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The lane that holds that row there, and which of its halves.
        const std::int32_t of_lane = (row + r) % 8 * 4 + lane % 4;
        to(j, i * 32 + of_lane, (row + r) / 8, float2{sums[i][j][2 * r], sums[i][j][2 * r + 1]});
      }
    }
  }
}
#endif

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_weight_last_float_kernel(const __grid_constant__ WeightLastJob job, const __grid_constant__ WeightLastMaps maps,
                                   float4* __restrict__ partial, float* __restrict__ w) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ WeightLastBarriers barriers;
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kWeightLastAlignment;
  const WeightLastPlace place(job);
  clear_weight_tails(job, place, first, Tile::kThreads / 32);
  make_weight_barriers(job, barriers, Tile::kWarps);
  if (threadIdx.x >= 32 * Tile::kWarps) {
    give_registers_back<Tile::kCopyRegisters>();
    if (threadIdx.x == 32 * Tile::kWarps) copy_weight_boxes(job, maps, place, barriers, first);
    return;
  }
  take_registers<Tile::kMultiplyRegisters>();
  WeightFloatSums sums = {};
  add_weight_floats<Tile>(job, place, barriers, first, sums);
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, group = warp % Tile::kRowGroups, unit = warp / Tile::kRowGroups;
  constexpr int kSetColumns8 = Tile::kUnits * Tile::kColumns8;
  if (!job.whole) {
    float4* const own = partial + (std::int64_t(blockIdx.x) * Tile::kRowGroups + group) * (kSetColumns8 * 128);
    pass_weight_floats(sums, [&](int column8, std::int32_t thread, std::int32_t half, const float2& v) {
      float2& sum = reinterpret_cast<float2*>(own + (unit * Tile::kColumns8 + column8) * 128 + thread)[half];
      sum = job.adds ? float2{sum.x + v.x, sum.y + v.y} : v;
    });
    return;
  }
  const WeightLastFinish<float, Tile::kRowGroups, kSetColumns8> finish{job, place, reinterpret_cast<float*>(first)};
  meet<1, kWeightStoring>();  // all warps have read what the sums overwrite
  pass_weight_floats(sums, [&](int column8, std::int32_t thread, std::int32_t half, const float2& v) {
    finish.keep(group, unit * Tile::kColumns8 + column8, thread, half, v);
  });
  finish.run(w);
#endif
}

}  // namespace upfold::cuda
