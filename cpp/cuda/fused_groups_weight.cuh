// The kernels of the fused gradient of the weight for groups: the sums of each block, and the sum of those.
#pragma once

#include "fused_groups_patch.cuh"
#include "part_sums.cuh"

namespace upfold::cuda {

template <typename Tile>
struct GroupsProducts {
  using Value = typename Tile::Value;
  static constexpr int kWords = 2 * Tile::kSteps, kEach = 4 / Tile::kSize;
  using Sums = float[Tile::kTaps][Tile::kBlocks][4];
  // Of x, of a segment: neighbouring inputs 2 * (lane % 4) and the next one, and both eight further, of channel lane / 4; of
  // float32 input lane % 4, and those four, eight and twelve further.
  struct Inputs {
    std::uint32_t words[Tile::kBlocks][kWords];
  };

  const GroupsJob& job;
  std::uint32_t patch;
  const Value* x;                                    // the group's first channel
  std::int32_t group, lane, first_tap, first, step;  // first: segment of this warp, and from one to the next

  __device__ __forceinline__ GroupsProducts(const GroupsJob& of, const Value* from, std::int32_t group_, std::int32_t warp)
      : job(of),
        x(from + std::int64_t(group_ * of.ic) * of.x_c),
        group(group_),
        lane(std::int32_t(threadIdx.x) % 32),
        first_tap(warp % of.sets * Tile::kTaps),
        first(warp / of.sets),
        step(kGroupsWarps / of.sets) {}

  __device__ __forceinline__ Inputs load(const GroupsPlace& place, std::int32_t number) const {
    Inputs inputs;
    std::uint32_t rest = std::uint32_t(number);
    const std::int32_t column = place.iw + std::int32_t(take(job.segments, rest)) * kSegment + lane % 4 * kEach;
    const std::int32_t row = place.ih + std::int32_t(rest);
    const bool live = std::int32_t(rest) < job.tile_h && row < job.h.in;
    const Value* const of_row = x + place.n * job.x_n + place.id * job.x_d + row * job.x_h;
#pragma unroll
    for (int n = 0; n < Tile::kBlocks; ++n) {
      const std::int32_t ic = 8 * n + lane / 4;
      const Value* const from = live && ic < job.ic ? of_row + ic * job.x_c : x;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const std::int32_t at = column + i * 4 * kEach;
        const bool exists = live && ic < job.ic && at < job.w.in;
        if constexpr (Tile::kSize == 4) {
          inputs.words[n][i] = near_tf32(__float_as_uint(load_or_zero(exists ? from + at * job.x_w : x, exists)));
        } else if (job.pairs) {
          const Value* const pair = exists ? from + at : x;
          inputs.words[n][i] = __float_as_uint(load_or_zero(reinterpret_cast<const float*>(pair), exists));
        } else {
          const bool next = exists && at + 1 < job.w.in;
          const Value both[2] = {load_or_zero(exists ? from + at * job.x_w : x, exists),
                                 load_or_zero(next ? from + (at + 1) * job.x_w : x, next)};
          inputs.words[n][i] = std::uint32_t(*reinterpret_cast<const std::uint16_t*>(both + 1)) << 16 |
                               *reinterpret_cast<const std::uint16_t*>(both);
        }
      }
    }
    return inputs;
  }

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
  __device__ __forceinline__ void multiply(Sums& sums, const Inputs& inputs, std::uint32_t from, std::int32_t left) const {
    constexpr int kTogether = 2;  // taps
#pragma unroll
    for (int first = 0; first < Tile::kTaps; first += kTogether) {
      if (first_tap + first >= job.taps) break;
#pragma unroll
      for (int product = 0; product < Tile::kSteps; ++product) {
        std::uint32_t a[kTogether][4];
        // Taps behind the last one read like the first one; what they sum is not stored.
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          read<kWhole>(a[i], from + std::uint32_t(job.tap[first_tap + first + i].patch), product, left);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int n = 0; n < Tile::kBlocks; ++n)
            TensorCore<Value>::add(sums[first + i][n], a[i], inputs.words[n][2 * product], inputs.words[n][2 * product + 1]);
        }
      }
    }
  }

  // All segments of this warp in a tile, whose first inputs are here; those of the next tile's first segment, if there is one,
  // are there in the end.
  __device__ __forceinline__ void work(Sums& sums, std::uint32_t patch, const GroupsPlace& place, Inputs& inputs,
                                       const GroupsPlace& next_place, bool more) const {
    const std::int32_t rows = job.h.in - place.ih < job.tile_h ? job.h.in - place.ih : job.tile_h;
    const std::int32_t count = rows * std::int32_t(job.segments.value);
    const std::uint32_t lanes = patch + place_of_lane();
    if (first >= count && more) inputs = load(next_place, first);
#pragma unroll 1
    for (std::int32_t number = first; number < count; number += step) {
      Inputs next = {};
      if (number + step < count)
        next = load(place, number + step);
      else if (more)
        next = load(next_place, first);
      std::uint32_t row = std::uint32_t(number);
      const std::int32_t column = std::int32_t(take(job.segments, row)) * kSegment, left = job.w.in - place.iw - column;
      const std::uint32_t from = lanes + std::uint32_t(std::int32_t(row) * job.row_advance + column) * 16;
      if (left >= kSegment)
        multiply<true>(sums, inputs, from, left);
      else if (left > 0)
        multiply<false>(sums, inputs, from, left);
      inputs = next;
    }
  }

  // The sums of this warp, for all others.
  static constexpr std::int32_t kVectors = Tile::kTaps * Tile::kBlocks * 32;  // of a warp
  __device__ __forceinline__ void leave(const Sums& sums, float4* memory) const {
#pragma unroll
    for (int tap = 0; tap < Tile::kTaps; ++tap) {
#pragma unroll
      for (int n = 0; n < Tile::kBlocks; ++n) {
        const float(&v)[4] = sums[tap][n];
        memory[std::int32_t(threadIdx.x) / 32 * kVectors + (tap * Tile::kBlocks + n) * 32 + lane] = {v[0], v[1], v[2], v[3]};
      }
    }
  }
};

// The sums of all warps, in ascending order, to the block's part: [tap][block of eight channels][lane][4].
template <typename Tile>
UPFOLD_DEVICE void add_warps(const GroupsJob& job, const float4* memory, float4* part) {
  constexpr std::int32_t kVectors = GroupsProducts<Tile>::kVectors;
  for (std::int32_t i = std::int32_t(threadIdx.x); i < job.taps * Tile::kBlocks * 32; i += kGroupsThreads) {
    const std::int32_t set = i / kVectors, at = i % kVectors;
    float4 sum = memory[set * kVectors + at];
    for (std::int32_t warp = set + job.sets; warp < kGroupsWarps; warp += job.sets) add(sum, memory[warp * kVectors + at]);
    part[i] = sum;
  }
}

template <typename Tile>
__global__ void __launch_bounds__(kGroupsThreads, Tile::kResident)
    fused_groups_weight_kernel(const __grid_constant__ GroupsJob job, const typename Tile::Value* __restrict__ x,
                               const typename Tile::Value* __restrict__ y, float4* __restrict__ partial) {
  extern __shared__ uint4 memory[];
  GroupsLine* const lines = reinterpret_cast<GroupsLine*>(memory);
  unsigned char* const patch = reinterpret_cast<unsigned char*>(memory) + job.table_bytes;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t group = std::int32_t(take(job.groups, rest)), part = std::int32_t(rest);
  const GroupsRange range = groups_range(job, part);
  describe_lines<Tile>(job, lines);
  const GroupsProducts<Tile> products(job, x, group, own_warp());
  typename GroupsProducts<Tile>::Sums sums = {};
  GroupsPlace place = groups_place(job, range.first, group);
  auto inputs = products.load(place, products.first);
#pragma unroll 1
  for (std::int32_t tile = range.first; tile < range.end; ++tile) {
    __syncthreads();  // the lines are there, and nobody reads the patch of the tile before any more
    GroupsPatch<Tile, 64>(job, lines, y, place, patch).bring();
    __syncthreads();  // the patch is there
    const GroupsPlace next = groups_place(job, tile + 1, group);
    products.work(sums, shared_address(patch), place, inputs, next, tile + 1 < range.end);
    place = next;
  }
  __syncthreads();  // nobody reads patches any more
  products.leave(sums, reinterpret_cast<float4*>(patch));
  __syncthreads();  // the sums of all warps are there
  const std::int64_t vectors = std::int64_t(job.taps) * Tile::kBlocks * 32;
  add_warps<Tile>(job, reinterpret_cast<const float4*>(patch), partial + (std::int64_t(group) * job.parts + part) * vectors);
}

// A block sums the parts of a tap and a block of channels: each warp every kSumWarps-th one.
constexpr int kSumWarps = 8;
template <typename Tile>
__global__ void __launch_bounds__(32 * kSumWarps)
    fused_groups_sum_kernel(const __grid_constant__ GroupsJob job, const float4* __restrict__ partial,
                            typename Tile::Value* __restrict__ w) {
  using Value = typename Tile::Value;
  __shared__ float4 sums[kSumWarps][32];
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, lane = std::int32_t(threadIdx.x) % 32;
  const std::int32_t of_group = job.taps * Tile::kBlocks, group = std::int32_t(blockIdx.x) / of_group;
  const std::int32_t own = std::int32_t(blockIdx.x) % of_group;
  const std::int64_t vectors = std::int64_t(of_group) * 32;
  const float4* from[1] = {partial + (std::int64_t(group) * job.parts + warp) * vectors + own * 32 + lane};
  float4 total[1] = {};
  await_previous();  // the sums of all parts
  if (warp < job.parts) add_parts(total, from, kSumWarps * vectors, (job.parts - warp + kSumWarps - 1) / kSumWarps, true);
  sums[warp][lane] = total[0];
  __syncthreads();  // the sums of all warps are there
  if (warp > 0) return;
  const std::int32_t warps = job.parts < kSumWarps ? job.parts : kSumWarps;
  for (std::int32_t i = 1; i < warps; ++i) add(total[0], sums[i][lane]);
  const float values[4] = {total[0].x, total[0].y, total[0].z, total[0].w};
  Value* const to = w + std::int64_t(group * job.ic) * job.w_ic + job.tap[own / Tile::kBlocks].weight;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::int32_t oc = lane / 4 + i / 2 * 8, ic = own % Tile::kBlocks * 8 + lane % 4 * 2 + i % 2;
    if (oc < job.oc && ic < job.ic) to[std::int64_t(ic) * job.w_ic + oc * job.w_oc] = Narrow<Value>::from(values[i]);
  }
}

}  // namespace upfold::cuda
