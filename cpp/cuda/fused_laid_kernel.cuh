// The kernel of the gradient of the input by taps that are laid out in shared memory.
#pragma once

#include "fused_laid_columns.cuh"
#include "fused_laid_store.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct LaidBlock : LaidColumns<Tile> {
  using Base = LaidColumns<Tile>;
  using Base::job, Base::barriers, Base::address, Base::stage;
  using typename Base::Cursor;
  using typename Base::Value;
  using Sums = float[Tile::kM][Tile::kN8][4];

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.stages; ++i) {
        barrier_make(address(barriers.full[i]), 1 + Tile::kLanes / 32);  // the thread that copies w, and warps
        barrier_make(address(barriers.empty[i]), Tile::kWorkers / 32);
      }
      for (int i = 0; i < job.buffers; ++i) {
        barrier_make(address(barriers.raw_full[i]), job.box_bytes > 0 ? 1 : Tile::kWorkers / 32);
      }
      barriers_made();
    }
    this->clear_margins();
    __syncthreads();  // barriers are made, margins are zeros
  }

  __device__ __forceinline__ void leave(std::uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
  // The last chunk's stage is still held at the end, whose number is returned.
  __device__ __forceinline__ std::uint32_t multiply(Ring& ring, std::int32_t chunks, std::int32_t warpgroup, const BoxMap& planes,
                                                    const unsigned char* y, Cursor& copies, Sums& sums) const {
    constexpr std::uint32_t kGroup = 64, kPart = 64 * 128 / 16, kStep = 2;  // of 16 bytes: eight rows, a product's rows, a step
    const std::uint64_t rows = long_row_descriptor(std::uint32_t(warpgroup * Tile::kM) * kPart, kGroup);
    const std::uint64_t pixels = long_row_descriptor(Tile::kWeightBytes / 16, kGroup);
    std::uint32_t used = 0, last = 0;
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk, ring.next()) {
      barrier_wait(address(barriers.full[ring.at]), ring.parity);
      const std::uint32_t at = in_descriptor(stage(ring.at));
      warpgroup_begin();
#pragma unroll
      for (int k = 0; k < Tile::kProducts; ++k) {
#pragma unroll
        for (int i = 0; i < Tile::kM; ++i)
          WarpgroupCore<Value, Tile::kN8, 1, 0>::add(sums[i], rows + at + i * kPart + k * kStep, pixels + at + k * kStep);
      }
      warpgroup_commit();
      warpgroup_wait<1>();
      if (used != 0) leave(used);
      used = address(barriers.empty[ring.at]), last = ring.at;
      this->copy_next(planes, y, copies);  // while these are multiplied
      this->copy_next(planes, y, copies);
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kN8 * 4; ++i) pin(sums[i / 4 / Tile::kN8][i / 4 % Tile::kN8][i % 4]);
    return last;
  }

  // kTogether: with the other blocks of the cluster. `last`: the stage whose products were the last ones.
  template <bool kTogether>
  __device__ __forceinline__ void finish(const LaidPlace& place, std::int32_t warpgroup, std::uint32_t last, const Sums& sums,
                                         Value* x) const {
    unsigned char* const memory = kTogether ? this->memory : this->memory + last * Tile::kStageBytes;
    if constexpr (sizeof(Value) == 2) {
      if (job.vector == 8) return LaidStore<Tile, 8>{job, place, x}.template run<kTogether>(memory, warpgroup, sums);
    }
    if (job.vector == 4) return LaidStore<Tile, 4>{job, place, x}.template run<kTogether>(memory, warpgroup, sums);
    if (job.vector == 2) return LaidStore<Tile, 2>{job, place, x}.template run<kTogether>(memory, warpgroup, sums);
    LaidStore<Tile, 1>{job, place, x}.template run<kTogether>(memory, warpgroup, sums);
  }

  __device__ __forceinline__ void work(const BoxMap& planes, const Value* y, Value* x) const {
    const std::int32_t warpgroup = std::int32_t(threadIdx.x) / 128;
    const unsigned char* const from = reinterpret_cast<const unsigned char*>(y);
    Cursor copies{blockIdx.x, 0, 0, nullptr, 0, 0, 0, 0, Ring(job.buffers)};
    this->begin_tile(from, copies);
    for (std::int32_t i = 0; i < job.buffers / 2 * 2; ++i) this->copy_next(planes, from, copies);
    Ring ring(job.stages);
    if (job.splits.value > 1) {  // a tile of its own: what adds up has all registers
      const LaidPlace place = laid_place(job, blockIdx.x, Tile::kRows);
      Sums sums = {};
      multiply(ring, place.chunks, warpgroup, planes, from, copies, sums);
      return finish<true>(place, warpgroup, 0, sums, x);
    }
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      const LaidPlace place = laid_place(job, tile, Tile::kRows);
      Sums sums = {};
      const std::uint32_t last = multiply(ring, place.chunks, warpgroup, planes, from, copies, sums);
      finish<false>(place, warpgroup, last, sums, x);
      __syncwarp();  // all lanes have read what they staged
      leave(address(barriers.empty[last]));
    }
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_laid_kernel(const __grid_constant__ LaidJob job, const __grid_constant__ BoxMap w,
                      const __grid_constant__ BoxMap planes, const typename Tile::Value* __restrict__ y,
                      typename Tile::Value* __restrict__ x) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ LaidBarriers barriers;
  if (threadIdx.x == Tile::kWorkers) {
    expect_boxes(w);
    if (job.box_bytes > 0) expect_boxes(planes);
  }
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kLaidAlignment;
  const LaidBlock<Tile> block{{job, barriers, first, SharedAddress(&barriers), SharedAddress(first)}};
  block.make_barriers();
  take_turn();
  if (threadIdx.x >= Tile::kWorkers) {
    give_registers_back<Tile::kLoadRegisters>();
    block.produce(w);
    return;
  }
  take_registers<Tile::kWorkRegisters>();
  block.work(planes, y, x);
#endif
}

}  // namespace upfold::cuda
