// The kernel of the gradient of the weight by taps that are laid out in shared memory.
#pragma once

#include "cluster_sums.cuh"
#include "fused_weight_laid_columns.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// The sums of a block's rows and columns: added up by the blocks of its cluster, in their order, each some of them, and stored:
// rounded in w, or where there are more clusters as they are, for the launch behind.
template <typename Tile>
struct WeightLaidStore {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kM][Tile::kN8][4];
  using Group = float[4][4];  // four eights of columns, of a product

  const WeightLaidJob& job;
  const WeightLaidPlace& place;
  Value* w;
  float* partial;  // null: there is one cluster

  // Eights `eight` and the three behind it, of product `product` of the tile. All lanes of a warp at once.
  __device__ __forceinline__ void store(std::int32_t product, std::int32_t eight, const Group& v) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, own = lane % 4, column = place.column + 8 * eight;
    const std::int32_t first_row = place.row + product * 64 + std::int32_t(threadIdx.x) / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t row = first_row + 8 * half;
      if (partial == nullptr) {
        std::uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = pair_of<Value>(v[k][2 * half], v[k][2 * half + 1]);
        gather_words(std::uint32_t(own), words);
        if (row < job.rows && column + 8 * own < job.columns)
          *reinterpret_cast<uint4*>(w + row * job.w_n + column + 8 * own) = {words[0], words[1], words[2], words[3]};
        continue;
      }
      float* const to = partial + (std::int64_t(place.cluster) * job.rows + row) * job.columns + column + 2 * own;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (row < job.rows && column + 8 * k < job.columns) store_neighbours(to + 8 * k, v[k][2 * half], v[k][2 * half + 1]);
    }
  }

  __device__ __forceinline__ void add_together(unsigned char* memory, std::int32_t warpgroup, const Sums& sums) const {
    add_in_cluster<Tile::kWorkers>(memory, job.splits.value, warpgroup, sums,
                                   [&](std::int32_t product, std::int32_t eight, const Group& v) { store(product, eight, v); });
  }
};

template <typename Tile>
struct WeightLaidBlock : WeightLaidColumns<Tile> {
  using Base = WeightLaidColumns<Tile>;
  using Base::job, Base::barriers, Base::address, Base::stage;
  using typename Base::Value;
  using Sums = typename WeightLaidStore<Tile>::Sums;

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.stages; ++i) {
        barrier_make(address(barriers.full[i]), 1 + Tile::kLanes / 32);  // the thread that copies x, and warps
        barrier_make(address(barriers.empty[i]), Tile::kWorkers / 32);
      }
      for (int i = 0; i < job.buffers; ++i) barrier_make(address(barriers.raw_full[i]), Tile::kWorkers / 32);
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  __device__ __forceinline__ void multiply(const BoxMap& y, const WeightLaidPlace& place, std::int32_t warpgroup,
                                           Sums& sums) const {
    constexpr std::uint32_t kGroup = 64, kPart = 64 * 128 / 16;  // of 16 bytes: eight rows of x, a product's
    constexpr std::uint32_t kX = 2, kColumns = 16 * 128 / 16;    // a step of the reduction
    const std::uint64_t rows = long_row_descriptor(std::uint32_t(warpgroup * Tile::kM) * kPart, kGroup);
    const std::uint64_t columns = turned_columns_descriptor<64>(Tile::kXBytes / 16, kWeightLaidPixels);
    const std::int32_t end = place.first + place.chunks;
    Ring ring(job.stages), raw(job.buffers);
    std::uint32_t used = 0;
    for (std::int32_t chunk = place.first; chunk < end; ++chunk, ring.next(), raw.next()) {
      barrier_wait(address(barriers.full[ring.at]), ring.parity);
      const std::uint32_t at = in_descriptor(stage(ring.at));
      warpgroup_begin();
#pragma unroll
      for (int k = 0; k < Tile::kProducts; ++k) {
#pragma unroll
        for (int i = 0; i < Tile::kM; ++i)
          WarpgroupCore<TurnedColumns<Value>, Tile::kN8, 1, 0>::add(sums[i], rows + at + i * kPart + k * kX,
                                                                    columns + at + k * kColumns);
      }
      warpgroup_commit();
      warpgroup_wait<1>();
      if (used != 0 && threadIdx.x % 32 == 0) barrier_arrive(used);
      used = address(barriers.empty[ring.at]);
      if (chunk + job.buffers < end) this->bring(y, place, chunk + job.buffers, raw.at);  // while these are multiplied
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kN8 * 4; ++i) pin(sums[i / 4 / Tile::kN8][i / 4 % Tile::kN8][i % 4]);
  }

  __device__ __forceinline__ void work(const BoxMap& y, Value* w, float* partial, const WeightLaidPlace& place) const {
    const std::int32_t warpgroup = std::int32_t(threadIdx.x) / 128, count = min(job.buffers, place.chunks);
    for (std::int32_t i = 0; i < count; ++i) this->bring(y, place, place.first + i, std::uint32_t(i));
    Sums sums = {};
    multiply(y, place, warpgroup, sums);
    WeightLaidStore<Tile>{job, place, w, partial}.add_together(this->memory, warpgroup, sums);
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_weight_laid_kernel(const __grid_constant__ WeightLaidJob job, const __grid_constant__ BoxMap x,
                             const __grid_constant__ BoxMap y, typename Tile::Value* __restrict__ w, float* __restrict__ partial,
                             float* __restrict__ row_sums) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ WeightLaidBarriers barriers;
  __shared__ alignas(16) WeightLaidPlaces places[kMostWeightLaidBuffers];
  if (threadIdx.x == Tile::kWorkers) expect_boxes(x), expect_boxes(y);
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kWeightLaidAlignment;
  const WeightLaidBlock<Tile> block{{job, barriers, places, first, SharedAddress(&barriers), SharedAddress(first)}};
  const WeightLaidPlace place = weight_laid_place(job, Tile::kRows, Tile::kColumns, Tile::kChannels);
  block.make_barriers();
  take_turn();
  if (threadIdx.x >= Tile::kWorkers) {
    give_registers_back<Tile::kLoadRegisters>();
    if constexpr (!Tile::kPaired) {
      if (row_sums != nullptr && place.row == 0) return block.template produce<true>(x, place, row_sums);
    }
    return block.template produce<false>(x, place, nullptr);
  }
  take_registers<Tile::kWorkRegisters>();
  block.work(y, w, partial, place);
#endif
}

}  // namespace upfold::cuda
