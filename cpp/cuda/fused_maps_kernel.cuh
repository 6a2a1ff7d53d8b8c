// The kernel of the fused method of whole maps.
#pragma once

#include "fused_maps_sum.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct MapsBlock {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kM][Tile::kN8][4];

  const MapsJob& job;
  MapsBarriers& barriers;
  unsigned char* memory;
  SharedAddress of_barriers, of_memory;

  __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) const { return of_barriers.of(&barrier); }
  __device__ __forceinline__ std::uint32_t stage(std::uint32_t number) const {
    return of_memory.first + number * Tile::kStageBytes;
  }
  __device__ __forceinline__ unsigned char* sums() const { return memory + job.stages * Tile::kStageBytes; }
  __device__ __forceinline__ MapsPosition* positions() const { return reinterpret_cast<MapsPosition*>(sums() + Tile::kSumBytes); }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.stages; ++i) {
        barrier_make(address(barriers.full[i]), 1);
        barrier_make(address(barriers.empty[i]), Tile::kBeside ? 8 : 4);  // warps that read it
      }
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  // One thread: the stages of all tiles in order.
  __device__ __forceinline__ void copy(const BoxMap& x, const BoxMap& w) const {
    const std::uint32_t bytes =
        std::uint32_t(job.samples * job.in[0] * job.in[1] * job.in[2] + Tile::kColumns) * 2 * Tile::kChunk;
    Ring ring(job.stages);
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      const MapsPlace place = maps_place(job, tile, Tile::kColumns);
      for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk, ring.next()) {
        const std::uint32_t full = address(barriers.full[ring.at]), to = stage(ring.at);
        const std::int32_t channel = place.group * job.ic + chunk * Tile::kChunk;
        barrier_wait(address(barriers.empty[ring.at]), ring.parity ^ 1);  // a new barrier counts as passed
        barrier_arrive_expecting(full, bytes);
        copy_box(to, x, {0, channel, 0, place.sample, 0}, full);
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 64; ++i)
          copy_box(to + Tile::kPixelBytes + i * 64 * 2 * Tile::kChunk, w, {place.column + i * 64, channel, 0, 0, 0}, full);
      }
    }
  }

  __device__ __forceinline__ void leave(std::uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void multiply(Ring& ring, std::int32_t warpgroup, Sums& sums) const {
    constexpr std::uint64_t kColumnStep = 16 * 128 / 16, kColumnPart = 64 * 128 / 16;  // of 16 channels; of 64 columns
    const std::uint64_t pixels =
        std::uint64_t(job.swizzle) << 62 | matrix_descriptor(0, std::uint32_t(job.vector_pitch), std::uint32_t(job.segment));
    const std::uint64_t columns =
        turned_descriptor(Tile::kPixelBytes / 16 + (Tile::kBeside ? std::uint32_t(warpgroup * Tile::kM * kColumnPart) : 0));
    const std::uint64_t pixel_step = std::uint64_t(job.segment) * 2;  // of 16 channels, in 16 bytes
    std::uint32_t used = 0;
    for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk, ring.next()) {
      barrier_wait(address(barriers.full[ring.at]), ring.parity);
      const std::uint32_t at = in_descriptor(stage(ring.at));
      const std::uint64_t a = columns + at, b = pixels + at;
      warpgroup_begin();
#pragma unroll
      for (int k = 0; k < Tile::kProducts; ++k) {
#pragma unroll
        for (int i = 0; i < Tile::kM; ++i)
          WarpgroupTurned<Value, Tile::kN8, 0>::add(sums[i], a + i * kColumnPart + k * kColumnStep, b + k * pixel_step);
      }
      warpgroup_commit();
      warpgroup_wait<1>();
      if (used != 0) leave(used);
      used = address(barriers.empty[ring.at]);
    }
    if constexpr (!Tile::kBeside) arrive<Tile::kWorkers>(2 - warpgroup);  // the other one's turn
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kN8 * 4; ++i) pin(sums[i / 4 / Tile::kN8][i / 4 % Tile::kN8][i % 4]);
    leave(used);
  }

  __device__ __forceinline__ unsigned char* rows() const { return sums() + threadIdx.x / 32 * Tile::kWarpBytes; }
  __device__ __forceinline__ void write(const float (&sums)[Tile::kN8][4]) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    float* const own = reinterpret_cast<float*>(rows()) + lane / 4 * Tile::kPitch + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
      *reinterpret_cast<float2*>(own + 8 * j) = {sums[j][0], sums[j][1]};
      *reinterpret_cast<float2*>(own + 8 * Tile::kPitch + 8 * j) = {sums[j][2], sums[j][3]};
    }
  }
  // The outputs of a product's rows, a warp's own ones.
  __device__ __forceinline__ void finish(const MapsPlace& place, std::int32_t part, const Value* bias, Value* y) const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32;
    const std::int32_t column = (Tile::kBeside ? warp / 4 * Tile::kOwnColumns : 0) + part * 64 + warp % 4 * kMapsRows;
    const std::int32_t channel = std::int32_t(divide(job.taps, std::uint32_t(place.column + column)));
    if (channel >= job.oc) return;
    const std::int64_t first = std::int64_t(place.group) * job.oc + channel;
    const MapsOutputs<Tile> outputs{job,
                                    positions(),
                                    rows(),
                                    bias == nullptr ? nullptr : bias + first,
                                    y + place.sample * job.y_n + first * job.y_c,
                                    job.oc - channel,
                                    job.batch - place.sample};
    outputs.run();
  }

  // A warpgroup: every tile, or every second one. Then it multiplies when the other one has: a barrier tells apart two phases
  // that follow one another, not those that a whole tile lies between.
  __device__ __forceinline__ void work(const Value* bias, Value* y) const {
    const std::int32_t warpgroup = std::int32_t(threadIdx.x) / 128;
    list_positions<Tile>(job, positions(), std::int32_t(threadIdx.x) / 32, Tile::kWorkers / 32);
    meet<3, Tile::kWorkers>();  // positions are listed
    Ring ring(job.stages);
    std::uint32_t tile = blockIdx.x;
    if (!Tile::kBeside && warpgroup == 1) ring.skip(job.chunks), tile += gridDim.x, arrive<Tile::kWorkers>(1);
    for (; tile < job.tiles; tile += (Tile::kBeside ? 1 : 2) * gridDim.x) {
      const MapsPlace place = maps_place(job, tile, Tile::kColumns);
      Sums sums = {};
      if constexpr (!Tile::kBeside) meet<Tile::kWorkers>(1 + warpgroup);
      multiply(ring, warpgroup, sums);
      if constexpr (!Tile::kBeside) ring.skip(job.chunks);
#pragma unroll 1
      for (int part = 0; part < Tile::kM; ++part) {
        __syncwarp();  // the rows before are summed
#pragma unroll
        for (int i = 0; i < Tile::kM; ++i)
          if (part == i) write(sums[i]);
        __syncwarp();  // and these are there
        finish(place, part, bias, y);
      }
    }
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_maps_kernel(const __grid_constant__ MapsJob job, const __grid_constant__ BoxMap x, const __grid_constant__ BoxMap w,
                      const typename Tile::Value* __restrict__ bias, typename Tile::Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ MapsBarriers barriers;
  if (threadIdx.x == Tile::kWorkers) expect_boxes(x), expect_boxes(w);
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kMapsAlignment;
  const MapsBlock<Tile> block{job, barriers, first, SharedAddress(&barriers), SharedAddress(first)};
  block.make_barriers();
  take_turn();
  if (threadIdx.x >= Tile::kWorkers) {
    give_registers_back<Tile::kLoadRegisters>();
    if (threadIdx.x == Tile::kWorkers) block.copy(x, w);
    return;
  }
  take_registers<Tile::kWorkRegisters>();
  block.work(bias, y);
#endif
}

}  // namespace upfold::cuda
