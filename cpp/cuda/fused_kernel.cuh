// The fused method: a transposed convolution in one pass on tensor cores, without columns.
//
// A block owns kChannels output channels of one group, one set of phases (fused.cuh) and one tile of kUnits units, and is the
// only writer of these outputs. Rows of the products are output channels, one 16-row tile for each phase; columns are units. A
// warp owns kOc16 * 16 channels in every phase of the set and kN8 * 8 units, so that a thread holds neighbouring outputs: the
// width's phases of two neighbouring units.
//   raw      [channel][row of the patch][element]         a chunk of x as it lies in memory, or [vector][pixel][16 bytes]
//   patch    [vector][pixel][16 bytes]                    the same, turned so that 16 bytes hold the channels of one pixel
//   weight   [2][slot][vector][channel][16 bytes]         by chunk and group of shifts, as the pack kernel laid it out
// Raw inputs and packed weights are copied asynchronously one step ahead. Sums are taken in one fixed order.
#pragma once

#include "fused_load.cuh"
#include "fused_pack.cuh"

namespace upfold::cuda {

// Multiplies the slots of the shifts from `begin` to `end`; `b_rows` are this lane's rows of each pair of unit tiles.
template <typename Value, typename Tile>
UPFOLD_DEVICE void multiply_shifts(const ShiftList& list, std::int32_t begin, std::int32_t end, std::uint32_t a_at,
                                   const std::uint32_t (&b_rows)[Tile::kN8 / 2], std::uint32_t vector_pitch,
                                   float (&sums)[Tile::kPhases][Tile::kOc16][Tile::kN8][4]) {
  constexpr std::uint32_t kVectorBytes = Tile::kChannels * kWordBytes, kSlotBytes = Tile::kVectors * kVectorBytes;
  for (std::int32_t s = begin; s < end; ++s) {
    const std::uint32_t phases = list.phases[s];
    const std::uint32_t b_at = std::uint32_t(list.offset[s]) * kWordBytes;
#pragma unroll
    for (int k = 0; k < Tile::kVectors; k += 2) {
      std::uint32_t b[Tile::kN8 / 2][4];
#pragma unroll
      for (int j = 0; j < Tile::kN8 / 2; ++j) load_matrices(b[j], b_at + b_rows[j] + std::uint32_t(k) * vector_pitch);
      std::uint32_t a_slot = a_at + std::uint32_t(k) * kVectorBytes;
#pragma unroll
      for (int p = 0; p < Tile::kPhases; ++p) {
        if (Tile::kPhases > 1 && (phases >> p & 1) == 0) continue;
        std::uint32_t a[Tile::kOc16][4];
#pragma unroll
        for (int o = 0; o < Tile::kOc16; ++o) load_matrices(a[o], a_slot + std::uint32_t(o * 16 * kWordBytes));
#pragma unroll
        for (int o = 0; o < Tile::kOc16; ++o) {
#pragma unroll
          for (int j = 0; j < Tile::kN8; ++j) {
            TensorCore<Value>::add(sums[p][o][j], a[o], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
        a_slot += kSlotBytes;
      }
    }
    a_at += std::uint32_t(Tile::kPhases > 1 ? __popc(phases) : 1) * kSlotBytes;
  }
}

template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_kernel(const FusedJob job, const Value* __restrict__ x, const ShiftList* __restrict__ lists,
                 const uint4* __restrict__ packed, const Value* __restrict__ bias, Value* __restrict__ y,
                 float4* __restrict__ partial) {
  if constexpr (!kMultiplied<Value>) return;
  constexpr int kChunk = Tile::kVectors * kVectorOf<Value>;
  extern __shared__ uint4 memory[];
  __shared__ ShiftList list;
  const std::int32_t tid = std::int32_t(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const std::int32_t warp_m = warp % Tile::kWarpsM, warp_n = warp / Tile::kWarpsM;
  const FusedPlace place = place_of_block<Tile>(job, blockIdx.x);
  constexpr std::int32_t kSlotWords = Tile::kVectors * Tile::kChannels;
  const std::int32_t stage_words = job.stage_slots * kSlotWords;
  RawColumn* const columns = reinterpret_cast<RawColumn*>(memory);
  uint4* const patch = memory + job.raw.columns;
  const std::uint32_t weight_address = shared_address(patch + Tile::kVectors * job.patch_pitch);
  unsigned char* const raw = reinterpret_cast<unsigned char*>(patch + Tile::kVectors * job.patch_pitch + 2 * stage_words);

  const std::int32_t set_number = number_of_set<Tile>(job, place.set);
  for (std::int32_t i = tid; i < job.raw.columns; i += Tile::kThreads) {
    columns[i] = raw_column<Tile>(job, place, i, std::int32_t(sizeof(Value)));
  }
  for (std::int32_t i = tid; i < std::int32_t(sizeof(ShiftList) / 16); i += Tile::kThreads) {
    reinterpret_cast<uint4*>(&list)[i] = reinterpret_cast<const uint4*>(lists + set_number)[i];
  }
  __syncthreads();  // columns and list are complete

  const uint4* const own_packed = packed + packed_at<Tile>(job, place, set_number);
  const std::int32_t shifts = list.shifts, groups = (shifts + job.group_shifts - 1) / job.group_shifts;
  const auto copy_weights = [&](std::int32_t chunk, std::int32_t group, std::int32_t stage) {
    const std::int32_t begin = group * job.group_shifts, end = begin + job.group_shifts;
    const std::int32_t first = list.first_slot[begin],
                       words = (list.first_slot[end < shifts ? end : shifts] - first) * kSlotWords;
    const uint4* from = own_packed + (std::int64_t(chunk) * job.most_slots + first) * kSlotWords + tid;
    std::uint32_t to = weight_address + std::uint32_t(stage * stage_words + tid) * kWordBytes;
    for (std::int32_t i = tid; i < words; i += Tile::kThreads) {
      copy_async<kWordBytes>(to, from, true);
      from += Tile::kThreads, to += Tile::kThreads * kWordBytes;
    }
  };
  const Value* const own_x = x + std::int64_t(place.group) * job.ic * job.x_c;

  // Rows that this lane names to ldmatrix: of b, unit lane % 8 of tiles 2j and 2j + 1, vector lane / 8 % 2; of a, channel
  // lane % 16, vector lane / 16.
  std::uint32_t b_rows[Tile::kN8 / 2];
#pragma unroll
  for (int j = 0; j < Tile::kN8 / 2; ++j) {
    const std::int32_t unit = warp_n * Tile::kN8 * 8 + (2 * j + lane / 16) * 8 + lane % 8;
    b_rows[j] = shared_address(patch + patch_pixel(job, unit) + lane / 8 % 2 * job.patch_pitch);
  }
  const std::uint32_t a_row = std::uint32_t(lane / 16 * Tile::kChannels + warp_m * Tile::kOc16 * 16 + lane % 16) * kWordBytes;

  float sums[Tile::kPhases][Tile::kOc16][Tile::kN8][4] = {};
  std::int32_t group = 0, chunk = place.split * job.split_chunks;
  const std::int32_t left = job.chunks - chunk, own_chunks = left < job.split_chunks ? left : job.split_chunks;
  const std::int32_t end_chunk = chunk + own_chunks;
  if (groups > 0) {
    copy_raw<Value, Tile>(job, columns, own_x + chunk * kChunk * job.x_c, job.ic - chunk * kChunk, raw);
    copy_weights(chunk, 0, 0);
    copy_async_commit();
    for (std::int32_t step = 0; step < groups * own_chunks; ++step) {
      copy_async_wait<0>();
      __syncthreads();  // this step's weights and raw inputs are complete, and everyone has left the step before
      const std::int32_t next_group = group + 1 == groups ? 0 : group + 1, next_chunk = next_group == 0 ? chunk + 1 : chunk;
      if (next_chunk < end_chunk) copy_weights(next_chunk, next_group, (step + 1) % 2);
      if (group == 0) {
        turn<Value, Tile>(job, raw, patch);
        __syncthreads();  // the patch is complete, and raw inputs may be overwritten
        const std::int32_t first = (chunk + 1) * kChunk;
        if (chunk + 1 < end_chunk) copy_raw<Value, Tile>(job, columns, own_x + first * job.x_c, job.ic - first, raw);
      }
      copy_async_commit();
      const std::int32_t begin = group * job.group_shifts, end = begin + job.group_shifts;
      multiply_shifts<Value, Tile>(list, begin, end < shifts ? end : shifts,
                                   weight_address + std::uint32_t(step % 2 * stage_words) * kWordBytes + a_row, b_rows,
                                   std::uint32_t(job.patch_pitch) * kWordBytes, sums);
      group = next_group, chunk = next_chunk;
    }
  }
  if (job.splits.value == 1) {
    __syncthreads();  // everyone has left the last step: shared memory serves the stores
    store_tile<Value, Tile, Tile::kN8>(job, place, {bias, y, memory, 0}, sums);
    return;
  }
  float4* const own = partial + std::int64_t(blockIdx.x) * kPartialVectors<Tile> * Tile::kThreads + tid;
#pragma unroll
  for (int i = 0; i < kPartialVectors<Tile>; ++i) {
    const float(&v)[4] = sums[i / Tile::kOc16 % Tile::kPhases][i % Tile::kOc16][i / Tile::kOc16 / Tile::kPhases];
    own[i * Tile::kThreads] = {v[0], v[1], v[2], v[3]};
  }
}

}  // namespace upfold::cuda
