// The kernel of the fused method's phase tiles.
#pragma once

#include "fused_phases_multiply.cuh"

namespace upfold::cuda {

template <typename Value, bool kExact, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_phases_kernel(const __grid_constant__ PhaseJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                        const Value* __restrict__ bias, Value* __restrict__ y) {
  if constexpr (!kMultiplied<Value>) return;
  take_turn();
  extern __shared__ uint4 memory[];
  std::uint32_t number = blockIdx.x;
  const std::uint32_t combination = take(job.combinations, number);
  const PhaseBlock<Value, kExact, Tile> block(job, reinterpret_cast<unsigned char*>(memory), combination);
  const std::uint32_t box_step = gridDim.x / job.combinations.value, boxes = job.boxes.value;

  const std::int32_t warp = std::int32_t(threadIdx.x) / 32;
  const std::int32_t warp_mn = warp % (Tile::kWarpsM * Tile::kWarpsN), warp_k = warp / (Tile::kWarpsM * Tile::kWarpsN);
  const std::int32_t warp_m = warp_mn % Tile::kWarpsM, warp_n = warp_mn / Tile::kWarpsM;
  // What is copied next.
  std::uint32_t copy_box = number;
  std::int32_t copy_chunk = 0;
  std::int32_t columns[Tile::kN8];
  float sums[Tile::kM16][Tile::kN8][4];
  // Copies run two chunks ahead, or, of one place for x, begin where products of the chunk before end: two turns begin before
  // there is anything to multiply.
  std::int32_t chunk = 0;
  for (std::int32_t turn = -2; number < boxes; ++turn) {
    unsigned char* const stage = block.stage(turn & job.last_stage);
    PhaseNext* const next = block.tables().next;  // that of this turn is read while that of the one after is made
    if (turn == -1) {
      const auto biases = block.make_lines(bias);
      block.make_pattern(bias);
      block.make_steps();
      __syncthreads();  // the tables are complete
      block.load_weight(w);
      block.put_biases(biases);
      block.find_units(columns, warp_n);
      if (block.kBiasFirst) __syncthreads();  // biases are there
      block.begin(sums, warp_m, warp_k);
    } else if (turn >= 0) {
      job.last_stage > 0 ? copy_async_wait<1>() : copy_async_wait<0>();
      __syncthreads();  // inputs are there, weights and the next box too, and the results of the box before are stored
      if (chunk == 0) {
        block.make_runs(number, y);
        if (job.prefill) block.fill_staged(number, y);
      }
      block.multiply(sums, stage, chunk, columns, warp_m, warp_k);
      __syncthreads();  // everyone has left the inputs, and the runs are known
    }
    if (copy_box < boxes && (turn != -1 || job.last_stage > 0)) {
      block.copy_inputs(block.kFindsAnew || turn == -2 ? block.next_at(x, copy_box) : next[turn & 1], block.share(), turn == -2,
                        copy_chunk, stage);
      if (++copy_chunk == job.chunks) copy_chunk = 0, copy_box += box_step;
    }
    copy_async_commit();
    // By a thread of the warp that has the fewest places to copy.
    if (!block.kFindsAnew && std::int32_t(threadIdx.x) == Tile::kThreads - 1 && copy_box < boxes)
      next[~turn & 1] = block.next_at(x, copy_box);
    if (turn < 0 || ++chunk < job.chunks) continue;
    if (block.reduce(sums, warp_mn, warp_k)) block.put(sums, warp_m, warp_n);
    __syncthreads();  // results are complete
    block.store(number);
    // Not where the first chunk begins: sums would keep their registers while results are stored.
    block.begin(sums, warp_m, warp_k);
    chunk = 0, number += box_step;
  }
}

}  // namespace upfold::cuda
