// The kernel of the fused gradient of the input for groups.
#pragma once

#include "fused_groups_patch.cuh"

namespace upfold::cuda {

// Fragments of w: [tap][block of eight input channels][lane][words], channels 2 * (lane % 4), the next one, and both eight
// further; of float32 lane % 4, four further, and both eight further.
template <typename Tile>
struct GroupsWeight {
  using Value = typename Tile::Value;
  static constexpr int kWords = 2 * Tile::kSteps, kEach = 4 / Tile::kSize;
  struct alignas(4 * kWords) Fragment {
    std::uint32_t words[kWords];
  };

  static __device__ __forceinline__ void pack(const GroupsJob& job, const Value* w, std::int32_t group, Fragment* to) {
    const std::int32_t count = job.taps * Tile::kBlocks * 32;
#pragma unroll 1
    for (std::int32_t i = std::int32_t(threadIdx.x); i < count; i += kGroupsThreads) {
      const std::int32_t lane = i % 32, ic = i / 32 % Tile::kBlocks * 8 + lane / 4;
      const Value* const from = w + std::int64_t(group * job.ic + ic) * job.w_ic + job.tap[i / (32 * Tile::kBlocks)].weight;
      union {
        Value v[kWords][kEach];
        Fragment fragment;
      } all;
#pragma unroll
      for (int j = 0; j < kWords * kEach; ++j) {
        const std::int32_t oc = lane % 4 * kEach + j % kEach + j / kEach * 4 * kEach;
        all.v[j / kEach][j % kEach] =
            load_or_zero(ic < job.ic && oc < job.oc ? from + oc * job.w_oc : w, ic < job.ic && oc < job.oc);
      }
      if constexpr (Tile::kSize == 4) {
#pragma unroll
        for (std::uint32_t& word : all.fragment.words) word = near_tf32(word);
      }
      to[i] = all.fragment;
    }
  }
};

template <typename Tile>
struct GroupsInputs {
  using Value = typename Tile::Value;
  using Fragment = typename GroupsWeight<Tile>::Fragment;
  using Sums = float[Tile::kSegments][Tile::kBlocks][4];

  const GroupsJob& job;
  const GroupsPlace& place;
  std::uint32_t patch;
  const Fragment* weights;           // of the lane
  Value* x;                          // first channel of the sample's group
  std::int32_t lane, rows, columns;  // rows and inputs of the tile that exist

  __device__ __forceinline__ GroupsInputs(const GroupsJob& of, const GroupsPlace& at, std::uint32_t patch_, const Fragment* all,
                                          Value* to)
      : job(of),
        place(at),
        patch(patch_),
        weights(all + threadIdx.x % 32),
        x(to + at.n * of.x_n + std::int64_t(at.group * of.ic) * of.x_c + at.id * of.x_d),
        lane(std::int32_t(threadIdx.x) % 32),
        rows(of.h.in - at.ih),
        columns(of.w.in - at.iw) {}

  // Row g of the upper half of a product and row g of the lower one are neighbours: the first eight inputs lie in the upper half
  // where they are even, the others where they are odd, so that the eight reads of a matrix meet in no bank.
  static __device__ __forceinline__ std::int32_t input_of_row(std::int32_t half, std::int32_t row) {
    return 2 * row + ((row < 4) == (half == 0) ? 0 : 1);
  }

  // What a tap multiplies; behind the last one that of tap 0, or nothing that is used.
  struct Operands {
    std::uint32_t a[Tile::kSteps][Tile::kSegments][4];
    Fragment b[Tile::kBlocks];
  };
  __device__ __forceinline__ void read(Operands& to, const std::uint32_t (&from)[Tile::kSegments], std::int32_t tap) const {
    const std::uint32_t distance = std::uint32_t(job.tap[tap].patch);
    const std::int32_t number = tap < job.taps ? tap : 0;
#pragma unroll
    for (int n = 0; n < Tile::kBlocks; ++n) to.b[n] = weights[(number * Tile::kBlocks + n) * 32];
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < Tile::kSegments; ++m)
        load_matrices(to.a[step][m], from[m] + distance + std::uint32_t(step * 2 * job.vector_stride) * 16);
    }
  }
  static __device__ __forceinline__ void add(Sums& sums, const Operands& of) {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < Tile::kBlocks; ++n) {
#pragma unroll
        for (int m = 0; m < Tile::kSegments; ++m)
          TensorCore<Value>::add(sums[m][n], of.a[step][m], of.b[n].words[2 * step], of.b[n].words[2 * step + 1]);
      }
    }
  }

  __device__ __forceinline__ void multiply(Sums& sums, std::int32_t first) const {
    std::uint32_t from[Tile::kSegments];
    const std::int32_t own = input_of_row(lane / 8 % 2, lane % 8), vector = lane / 16 * job.vector_stride;
#pragma unroll
    for (int m = 0; m < Tile::kSegments; ++m) {
      std::uint32_t row = std::uint32_t(first + m);
      const std::int32_t segment = std::int32_t(take(job.segments, row));
      const std::int32_t at = std::int32_t(row) < job.tile_h ? std::int32_t(row) * job.row_advance + segment * kSegment : 0;
      from[m] = patch + std::uint32_t(at + own + vector) * 16;
    }
    // The operands of a tap are read ahead of the products of the one before.
    Operands operands[2];
    read(operands[0], from, 0);
#pragma unroll 1
    for (std::int32_t tap = 0; tap < job.taps; tap += 2) {
      read(operands[1], from, tap + 1);
      add(sums, operands[0]);
      if (tap + 1 >= job.taps) break;
      read(operands[0], from, tap + 2);
      add(sums, operands[1]);
    }
  }

  __device__ __forceinline__ void store(const Sums& sums, std::int32_t first) const {
    const std::int32_t g = lane / 4;
#pragma unroll
    for (int m = 0; m < Tile::kSegments; ++m) {
      std::uint32_t rest = std::uint32_t(first + m);
      const std::int32_t column = std::int32_t(take(job.segments, rest)) * kSegment + 2 * g, row = std::int32_t(rest);
      if (row >= job.tile_h || row >= rows || column >= columns) continue;
      Value* const to = x + (place.ih + row) * job.x_h + (place.iw + column) * job.x_w;
#pragma unroll
      for (int n = 0; n < Tile::kBlocks; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::int32_t ic = 8 * n + lane % 4 * 2 + i;
          if (ic >= job.ic) continue;
          struct alignas(2 * sizeof(Value)) Pair {
            Value v[2];
          };
          const float upper = sums[m][n][i], lower = sums[m][n][2 + i];
          const Pair pair = {Narrow<Value>::from(g < 4 ? upper : lower), Narrow<Value>::from(g < 4 ? lower : upper)};
          Value* const at = to + ic * job.x_c;
          if (job.pairs) {
            *reinterpret_cast<Pair*>(at) = pair;
          } else {
            at[0] = pair.v[0];
            if (column + 1 < columns) at[job.x_w] = pair.v[1];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void work() const {
#pragma unroll 1
    for (std::int32_t first = own_warp() * Tile::kSegments; first < job.tile_h * std::int32_t(job.segments.value);
         first += kGroupsWarps * Tile::kSegments) {
      Sums sums = {};
      multiply(sums, first);
      store(sums, first);
    }
  }
};

template <typename Tile>
__global__ void __launch_bounds__(kGroupsThreads, kGroupsBlocks)
    fused_groups_input_kernel(const __grid_constant__ GroupsJob job, const typename Tile::Value* __restrict__ y,
                              const typename Tile::Value* __restrict__ w, typename Tile::Value* __restrict__ x) {
  using Fragment = typename GroupsWeight<Tile>::Fragment;
  extern __shared__ uint4 memory[];
  GroupsLine* const lines = reinterpret_cast<GroupsLine*>(memory);
  unsigned char* const weights = reinterpret_cast<unsigned char*>(memory) + job.table_bytes;
  unsigned char* const patch = weights + job.weight_bytes;
  const GroupsRange range = groups_range(job, std::int32_t(blockIdx.x));
  describe_lines<Tile>(job, lines);
  std::int32_t packed = -1;  // the group whose weights lie there
#pragma unroll 1
  for (std::int32_t tile = range.first; tile < range.end; tile += range.step) {
    const GroupsPlace place = groups_place(job, tile, -1);
    __syncthreads();  // the lines are there, and nobody reads the patch of the tile before any more
    if (packed != place.group) GroupsWeight<Tile>::pack(job, w, place.group, reinterpret_cast<Fragment*>(weights));
    packed = place.group;
    GroupsPatch<Tile, 128>(job, lines, y, place, patch).bring();
    __syncthreads();  // the weight and the patch are there
    GroupsInputs<Tile>(job, place, shared_address(patch), reinterpret_cast<const Fragment*>(weights), x).work();
  }
}

}  // namespace upfold::cuda
