// The kernels of the fused gradient of the weight for groups: the sums of each block, and the sum of those.
#pragma once

#include "fused_groups_patch.cuh"
#include "fused_groups_source.cuh"
#include "part_sums.cuh"

namespace upfold::cuda {

template <typename Tile>
struct GroupsProducts {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kTaps][Tile::kRows][Tile::kBlocks][4];
  using Fragments = GroupsFragments<Tile>;

  const GroupsJob& job;
  std::int32_t lane, first_tap, first, step;  // first: segment of this warp, and from one to the next

  __device__ __forceinline__ GroupsProducts(const GroupsJob& of, std::int32_t warp)
      : job(of),
        lane(std::int32_t(threadIdx.x) % 32),
        first_tap(warp % of.sets * Tile::kTaps),
        first(warp / of.sets),
        step((kGroupsWarps - warp % of.sets + of.sets - 1) / of.sets) {}

  // The fragment of y of one product: inputs are its reduction. Those that do not exist count as zeros, which the other operand
  // has too: but not even NaN may come of them.
  template <bool kWhole>
  __device__ __forceinline__ void read(std::uint32_t (&a)[4], std::uint32_t from, std::int32_t product, std::int32_t left) const {
    if constexpr (Tile::kSize == 2) {
      load_turned_matrices(a, from);
      if constexpr (!kWhole) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::int32_t input = lane % 4 * 2 + i / 2 * 8;
          a[i] = input + 1 < left ? a[i] : input < left ? a[i] & 0xffffu : 0;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int32_t input = 8 * product + i / 2 * 4;
        a[i] = load_shared_word(from + std::uint32_t(i % 2 * 2 * job.vector_stride + input) * 16);
        if constexpr (!kWhole) a[i] = lane % 4 + input < left ? a[i] : 0;
      }
    }
  }
  // Where a lane reads: of 16 bits a row of a matrix, of float32 an input and a channel.
  __device__ __forceinline__ std::uint32_t place_of_lane() const {
    if constexpr (Tile::kSize == 2) return std::uint32_t(lane % 8 + lane / 16 * 8 + lane / 8 % 2 * job.vector_stride) * 16;
    return std::uint32_t(lane % 4 + lane / 16 * job.vector_stride) * 16 + lane / 4 % 4 * 4;
  }

  template <bool kWhole>
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& inputs, std::uint32_t from, std::int32_t left) const {
    constexpr int kTogether = 2;  // rows of 16 channels, of this tap and of others
    constexpr int kAll = Tile::kTaps * Tile::kRows;
#pragma unroll
    for (int first = 0; first < kAll; first += kTogether) {
      if (first_tap + first / Tile::kRows >= job.taps) break;
#pragma unroll
      for (int product = 0; product < Tile::kProducts; ++product) {
        std::uint32_t a[kTogether][4];
        // Taps behind the last one read like the first one; what they sum is not stored.
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const std::int32_t row = (first + i) % Tile::kRows * (16 / Tile::kEach) * job.vector_stride * 16;
          read<kWhole>(a[i], from + std::uint32_t(job.tap[first_tap + (first + i) / Tile::kRows].patch + row), product, left);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int n = 0; n < Tile::kBlocks; ++n)
            TensorCore<Value>::add(sums[(first + i) / Tile::kRows][(first + i) % Tile::kRows][n], a[i],
                                   inputs.words[n][2 * product], inputs.words[n][2 * product + 1]);
        }
      }
    }
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& inputs, std::uint32_t patch, const GroupsPlace& place,
                                           std::int32_t row, std::int32_t column) const {
    const std::int32_t left = job.w.in - place.iw - column;
    const std::uint32_t from = patch + place_of_lane() + std::uint32_t(row * job.row_advance + column) * 16;
    if (left >= kSegment)
      multiply<true>(sums, inputs, from, left);
    else if (left > 0)
      multiply<false>(sums, inputs, from, left);
  }
  // Segments of a tile that exist.
  __device__ __forceinline__ std::int32_t count(const GroupsPlace& place) const {
    const std::int32_t rows = job.h.in - place.ih < job.tile_h ? job.h.in - place.ih : job.tile_h;
    return rows * std::int32_t(job.segments.value);
  }

  // All segments of this warp in a tile, whose first inputs are here; those of the next tile's first segment, if there is one,
  // are there in the end.
  __device__ __forceinline__ void work(Sums& sums, const GroupsSource<Tile>& source, std::uint32_t patch,
                                       const GroupsPlace& place, Fragments& inputs, const GroupsPlace& next_place,
                                       bool more) const {
    const std::int32_t end = count(place);
    if (first >= end && more) inputs = source.load(next_place, first);
#pragma unroll 1
    for (std::int32_t number = first; number < end; number += step) {
      Fragments next = {};
      if (number + step < end)
        next = source.load(place, number + step);
      else if (more)
        next = source.load(next_place, first);
      std::uint32_t row = std::uint32_t(number);
      const std::int32_t column = std::int32_t(take(job.segments, row)) * kSegment;
      multiply(sums, inputs, patch, place, std::int32_t(row), column);
      inputs = next;
    }
  }
  // The same where x lies in shared memory too.
  __device__ __forceinline__ void work(Sums& sums, const GroupsSharedSource<Tile>& source, std::uint32_t patch,
                                       const GroupsPlace& place) const {
#pragma unroll 1
    for (std::int32_t number = first; number < count(place); number += step) {
      std::uint32_t row = std::uint32_t(number);
      const std::int32_t column = std::int32_t(take(job.segments, row)) * kSegment;
      multiply(sums, source.load(std::int32_t(row), column), patch, place, std::int32_t(row), column);
    }
  }

  // The sums of this warp, for all others.
  static constexpr std::int32_t kVectors = Tile::kSums * 32;  // of a warp
  __device__ __forceinline__ void leave(const Sums& sums, float4* memory) const {
    float4* const to = memory + std::int32_t(threadIdx.x) / 32 * kVectors + lane;
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      const float(&v)[4] = sums[i / (Tile::kRows * Tile::kBlocks)][i / Tile::kBlocks % Tile::kRows][i % Tile::kBlocks];
      to[i * 32] = {v[0], v[1], v[2], v[3]};
    }
  }
};

// The sums of all warps, in ascending order, to the block's part: [tap][16 output channels][8 input channels][lane][4].
template <typename Tile>
UPFOLD_DEVICE void add_warps(const GroupsJob& job, const float4* memory, float4* part) {
  constexpr std::int32_t kVectors = GroupsProducts<Tile>::kVectors;
  for (std::int32_t i = std::int32_t(threadIdx.x); i < job.taps * (kVectors / Tile::kTaps); i += kGroupsThreads) {
    const std::int32_t set = i / kVectors, at = i % kVectors;
    float4 sum = memory[set * kVectors + at];
    for (std::int32_t warp = set + job.sets; warp < kGroupsWarps; warp += job.sets) add(sum, memory[warp * kVectors + at]);
    part[i] = sum;
  }
}

// All tiles of a block.
template <typename Tile>
UPFOLD_DEVICE void add_tiles(const GroupsJob& job, const GroupsProducts<Tile>& products,
                             typename GroupsProducts<Tile>::Sums& sums, const GroupsLine* lines, unsigned char* patch,
                             const typename Tile::Value* x, const typename Tile::Value* y, std::int32_t group,
                             std::int32_t ic_tile, const GroupsRange& range) {
  if constexpr (Tile::kShared) {
    const GroupsSharedSource<Tile> source(job, x, group, ic_tile, patch + job.x_first);
#pragma unroll 1
    for (std::int32_t tile = range.first; tile < range.end; tile += range.step) {
      const GroupsPlace place = groups_place(job, tile, group);
      __syncthreads();  // the lines are there, and nobody reads the tile before any more
      source.bring(place);
      GroupsPatch<Tile, Tile::kSize == 4 ? 64 : 128>(job, lines, y, place, patch).bring();
      __syncthreads();  // x and the patch are there
      products.work(sums, source, shared_address(patch), place);
    }
  } else {
    const GroupsSource<Tile> source(job, x, group);
    GroupsPlace place = groups_place(job, range.first, group);
    auto inputs = source.load(place, products.first);
#pragma unroll 1
    for (std::int32_t tile = range.first; tile < range.end; tile += range.step) {
      __syncthreads();  // the lines are there, and nobody reads the patch of the tile before any more
      GroupsPatch<Tile, 64>(job, lines, y, place, patch).bring();
      __syncthreads();  // the patch is there
      const GroupsPlace next = groups_place(job, tile + range.step, group);
      products.work(sums, source, shared_address(patch), place, inputs, next, tile + range.step < range.end);
      place = next;
    }
  }
}

// Below compute capability 8.0 an empty kernel, as the host refuses it there.
template <typename Tile>
__global__ void __launch_bounds__(kGroupsThreads, Tile::kResident)
    fused_groups_weight_kernel(const __grid_constant__ GroupsJob job, const typename Tile::Value* __restrict__ x,
                               const typename Tile::Value* __restrict__ y, float4* __restrict__ partial) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ uint4 memory[];
  GroupsLine* const lines = reinterpret_cast<GroupsLine*>(memory);
  unsigned char* const patch = reinterpret_cast<unsigned char*>(memory) + job.table_bytes;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t ic_tile = std::int32_t(take(job.ic_tiles, rest)), group = std::int32_t(take(job.groups, rest));
  const std::int32_t part = std::int32_t(rest);
  describe_lines<Tile>(job, lines);
  take_turn();
  const GroupsProducts<Tile> products(job, own_warp());
  typename GroupsProducts<Tile>::Sums sums = {};
  add_tiles<Tile>(job, products, sums, lines, patch, x, y, group, ic_tile, groups_range(job, part));
  __syncthreads();  // nobody reads patches any more
  products.leave(sums, reinterpret_cast<float4*>(patch));
  __syncthreads();  // the sums of all warps are there
  const std::int64_t vectors = std::int64_t(job.taps) * (Tile::kRows * Tile::kBlocks) * 32;
  const std::int64_t number = (std::int64_t(group) * job.ic_tiles.value + ic_tile) * job.parts + part;
  add_warps<Tile>(job, reinterpret_cast<const float4*>(patch), partial + number * vectors);
#endif
}

// A block sums the parts of a tap, 16 output channels and 8 input channels: each warp every kSumWarps-th one.
constexpr int kSumWarps = 8;
template <typename Tile>
__global__ void __launch_bounds__(32 * kSumWarps)
    fused_groups_sum_kernel(const __grid_constant__ GroupsJob job, const float4* __restrict__ partial,
                            typename Tile::Value* __restrict__ w) {
  using Value = typename Tile::Value;
  constexpr std::int32_t kOfTap = Tile::kRows * Tile::kBlocks;
  __shared__ float4 sums[kSumWarps][32];
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, lane = std::int32_t(threadIdx.x) % 32;
  const std::int32_t of_group = job.taps * kOfTap, own = std::int32_t(blockIdx.x) % of_group;
  std::uint32_t group = blockIdx.x / std::uint32_t(of_group);
  const std::int64_t vectors = std::int64_t(of_group) * 32;
  const float4* from[1] = {partial + (std::int64_t(group) * job.parts + warp) * vectors + own * 32 + lane};
  const std::int32_t ic_tile = std::int32_t(take(job.ic_tiles, group));
  float4 total[1] = {};
  take_turn();  // the sums of all parts
  if (warp < job.parts) add_parts(total, from, kSumWarps * vectors, (job.parts - warp + kSumWarps - 1) / kSumWarps, true);
  sums[warp][lane] = total[0];
  __syncthreads();  // the sums of all warps are there
  if (warp > 0) return;
  const std::int32_t warps = job.parts < kSumWarps ? job.parts : kSumWarps;
  for (std::int32_t i = 1; i < warps; ++i) add(total[0], sums[i][lane]);
  const float values[4] = {total[0].x, total[0].y, total[0].z, total[0].w};
  Value* const to = w + std::int64_t(std::int32_t(group) * job.ic) * job.w_ic + job.tap[own / kOfTap].weight;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int32_t oc = own / Tile::kBlocks % Tile::kRows * 16 + lane / 4 + i / 2 * 8;
    const std::int32_t ic = (ic_tile * Tile::kBlocks + own % Tile::kBlocks) * 8 + lane % 4 * 2 + i % 2;
    if (oc < job.oc && ic < job.ic) to[std::int64_t(ic) * job.w_ic + oc * job.w_oc] = Narrow<Value>::from(values[i]);
  }
}

}  // namespace upfold::cuda
