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
  __device__ __forceinline__ MapsTaps* taps() const { return reinterpret_cast<MapsTaps*>(sums() + Tile::kSumBytes); }
  __device__ __forceinline__ MapsPosition* positions() const {
    return reinterpret_cast<MapsPosition*>(taps() + 2 * job.positions);
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.stages; ++i) {
        barrier_make(address(barriers.full[i]), Tile::kByLanes ? 1 + Tile::kLanes : 1);
        barrier_make(address(barriers.empty[i]), Tile::kBeside ? 8 : 4);  // warps that read it
      }
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  // One thread: the columns of a stage.
  __device__ __forceinline__ void copy_columns(const BoxMap& w, const MapsPlace& place, std::int32_t channel, std::uint32_t to,
                                               std::uint32_t full) const {
#pragma unroll
    for (int i = 0; i < Tile::kColumns / 64; ++i)
      copy_box(to + Tile::kPixelBytes + i * 64 * 2 * Tile::kChunk, w, {place.column + i * 64, channel, 0, 0, 0}, full);
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
        copy_columns(w, place, channel, to, full);
      }
    }
  }

  // A warpgroup: the same, x by lanes.
  __device__ __forceinline__ void copy_by_lanes(const Value* x, const BoxMap& w) const {
    const std::uint32_t thread = threadIdx.x - Tile::kWorkers;
    Ring ring(job.stages);
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      const MapsPlace place = maps_place(job, tile, Tile::kColumns);
      const std::int32_t samples = min(job.samples, job.batch - place.sample);
      std::uint32_t from[Tile::kPieces], to[Tile::kPieces];  // bytes from a tile's first value, and of a stage
#pragma unroll
      for (int i = 0; i < Tile::kPieces; ++i) {
        std::uint32_t rest =
            (thread + i * Tile::kLanes) % (job.sample_vectors.value * job.samples);  // some again, if they are few
        const std::uint32_t sample = divide(job.sample_vectors, rest), vector = take(job.vectors, rest);
        const std::uint32_t channel = rest % Tile::kChunk, pixels = sample * job.vectors.value + vector;
        // Of samples behind the last, which nobody asks for, the first.
        const std::int64_t values = (std::int32_t(sample) < samples ? sample : 0) * job.x_n + channel * job.x_c + vector * 8;
        from[i] = std::uint32_t(values * 2);
        to[i] = pixels / 8 * (128 * Tile::kChunk) + channel * 128 + (pixels % 8 ^ channel % 8) * 16;
      }
      const char* tile_x =
          reinterpret_cast<const char*>(x + place.sample * job.x_n + std::int64_t(place.group) * job.ic * job.x_c);
      for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk, ring.next(), tile_x += 2 * Tile::kChunk * job.x_c) {
        const std::uint32_t full = address(barriers.full[ring.at]), at = stage(ring.at);
        barrier_wait(address(barriers.empty[ring.at]), ring.parity ^ 1);  // a new barrier counts as passed
        if (thread == 0) {
          barrier_arrive_expecting(full, Tile::kColumns * 2 * Tile::kChunk);
          copy_columns(w, place, place.group * job.ic + chunk * Tile::kChunk, at, full);
        }
        const std::uint32_t channels = std::uint32_t(job.ic - chunk * Tile::kChunk);
        if (channels >= Tile::kChunk) {
#pragma unroll
          for (int i = 0; i < Tile::kPieces; ++i) copy_async<16>(at + to[i], tile_x + from[i], true);
        } else {
#pragma unroll
          for (int i = 0; i < Tile::kPieces; ++i) {
            const bool exists = to[i] / 128 % Tile::kChunk < channels;  // else it is zeros
            copy_async<16>(at + to[i], exists ? tile_x + from[i] : tile_x, exists);
          }
        }
        barrier_arrive_copied(full);
      }
    }
    copy_async_wait_all();
  }

  __device__ __forceinline__ void leave(std::uint32_t barrier) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void multiply(Ring& ring, std::int32_t warpgroup, Sums& sums) const {
    constexpr std::uint64_t kColumnStep = 16 * 128 / 16, kColumnPart = Tile::kChunk * 128 / 16;  // of 16 channels; of 64 columns
    const std::uint64_t pixels =
        std::uint64_t(job.swizzle) << 62 | matrix_descriptor(0, std::uint32_t(job.vector_pitch), std::uint32_t(job.segment));
    const std::uint64_t columns =
        turned_descriptor(Tile::kPixelBytes / 16 + (Tile::kBeside ? std::uint32_t(warpgroup * Tile::kM * kColumnPart) : 0));
    const std::uint64_t pixel_step = std::uint64_t(job.segment) * 2;  // of 16 channels, in 16 bytes
    std::uint32_t used = 0;
    for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk, ring.next()) {
      barrier_wait(address(barriers.full[ring.at]), ring.parity);
      if constexpr (Tile::kByLanes) publish_to_products();  // what lanes copied, which the barrier made known here
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
    float* const own = reinterpret_cast<float*>(rows()) + lane % 4 * 2;
    float *const upper = own + job.entry[lane / 4] * Tile::kPitch, *const lower = own + job.entry[lane / 4 + 8] * Tile::kPitch;
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
      *reinterpret_cast<float2*>(upper + 8 * j) = {sums[j][0], sums[j][1]};
      *reinterpret_cast<float2*>(lower + 8 * j) = {sums[j][2], sums[j][3]};
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
                                    taps(),
                                    positions(),
                                    rows(),
                                    bias == nullptr ? nullptr : bias + first,
                                    y + place.sample * job.y_n + first * job.y_c,
                                    job.oc - channel,
                                    min(job.samples, job.batch - place.sample)};
    outputs.run();
  }

  // Those that sum: what all tiles have in common.
  __device__ __forceinline__ void prepare() const {
    list_positions<Tile>(job, taps(), positions());
    const std::int32_t row = std::int32_t(threadIdx.x);
    if (row < Tile::kWorkers / 32 * kMapsRows) reinterpret_cast<float*>(sums())[row * Tile::kPitch + Tile::kPixels] = 0.0f;
    meet<3, Tile::kWorkers>();
  }

  // A warpgroup: every tile, or every second one. Then it multiplies when the other one has: a barrier tells apart two phases
  // that follow one another, not those that a whole tile lies between.
  __device__ __forceinline__ void work(const Value* bias, Value* y) const {
    const std::int32_t warpgroup = std::int32_t(threadIdx.x) / 128;
    Ring ring(job.stages);
    constexpr int kParts =
        Tile::kN8 > 16 ? Tile::kM : 1;  // that are written apart, as registers allow: the sums of one are free then
    std::uint32_t tile = blockIdx.x;
    if (!Tile::kBeside && warpgroup == 1) ring.skip(job.chunks), tile += gridDim.x, arrive<Tile::kWorkers>(1);
    for (; tile < job.tiles; tile += (Tile::kBeside ? 1 : 2) * gridDim.x) {
      const MapsPlace place = maps_place(job, tile, Tile::kColumns);
      Sums sums = {};
      if constexpr (!Tile::kBeside) meet<Tile::kWorkers>(1 + warpgroup);
      multiply(ring, warpgroup, sums);
      if constexpr (!Tile::kBeside) ring.skip(job.chunks);
#pragma unroll kParts
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
                      const typename Tile::Value* __restrict__ values, const typename Tile::Value* __restrict__ bias,
                      typename Tile::Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ MapsBarriers barriers;
  if (threadIdx.x == Tile::kWorkers) {
    if (!Tile::kByLanes) expect_boxes(x);
    expect_boxes(w);
  }
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kMapsAlignment;
  const MapsBlock<Tile> block{job, barriers, first, SharedAddress(&barriers), SharedAddress(first)};
  block.make_barriers();
  if (threadIdx.x >= Tile::kWorkers) {
    give_registers_back<Tile::kLoadRegisters>();
    take_turn();
    if constexpr (Tile::kByLanes) {
      block.copy_by_lanes(values, w);
    } else if (threadIdx.x == Tile::kWorkers) {
      block.copy(x, w);
    }
    return;
  }
  take_registers<Tile::kWorkRegisters>();
  block.prepare();
  take_turn();
  block.work(bias, y);
#endif
}

}  // namespace upfold::cuda
