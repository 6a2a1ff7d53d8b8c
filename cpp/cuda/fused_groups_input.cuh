// The kernel of the fused gradient of the input for groups.
#pragma once

#include "fused_groups_patch.cuh"

namespace upfold::cuda {

// Fragments of w: [tap][step][block of eight input channels][lane][2 words], channels 2 * (lane % 4), the next one, and both
// eight further; of float32 lane % 4 and four further.
template <typename Tile>
struct GroupsWeight {
  using Value = typename Tile::Value;
  static constexpr int kEach = 4 / Tile::kSize;

  // By all threads of the block.
  static __device__ __forceinline__ void pack(const GroupsJob& job, const Value* w, std::int32_t group, uint2* to) {
    constexpr std::int32_t kOfTap = Tile::kSteps * Tile::kBlocks * 32;
#pragma unroll 1
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.taps * kOfTap; i += kGroupsThreads) {
      const std::int32_t lane = i % 32, ic = i / 32 % Tile::kBlocks * 8 + lane / 4,
                         step = i / (32 * Tile::kBlocks) % Tile::kSteps;
      const Value* const from = w + std::int64_t(group * job.ic + ic) * job.w_ic + job.tap[i / kOfTap].weight;
      union {
        Value v[2][kEach];
        uint2 words;
      } all;
#pragma unroll
      for (int j = 0; j < 2 * kEach; ++j) {
        const std::int32_t oc = step * 8 * kEach + lane % 4 * kEach + j % kEach + j / kEach * 4 * kEach;
        const bool exists = ic < job.ic && oc < job.oc;
        all.v[j / kEach][j % kEach] = load_or_zero(exists ? from + oc * job.w_oc : w, exists);
      }
      if constexpr (Tile::kSize == 4) all.words = {near_tf32(all.words.x), near_tf32(all.words.y)};
      to[i] = all.words;
    }
  }
};

template <typename Tile>
struct GroupsInputs {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kSegments][Tile::kBlocks][4];

  const GroupsJob& job;
  const GroupsPlace& place;
  std::uint32_t patch;
  const uint2* weights;              // of the lane
  Value* x;                          // first channel of the sample's group
  std::int32_t lane, rows, columns;  // rows and inputs of the tile that exist

  __device__ __forceinline__ GroupsInputs(const GroupsJob& of, const GroupsPlace& at, std::uint32_t patch_, const uint2* all,
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

  // What a step of a tap multiplies; behind the last tap something of which nothing is used.
  struct Operands {
    std::uint32_t a[Tile::kSegments][4];
    uint2 b[Tile::kBlocks];
  };
  __device__ __forceinline__ void read(Operands& to, const std::uint32_t (&from)[Tile::kSegments], std::int32_t tap,
                                       std::int32_t step) const {
    const std::uint32_t distance = std::uint32_t(job.tap[tap].patch + step * 2 * job.vector_stride * 16);
    const std::int32_t number = ((tap < job.taps ? tap : 0) * Tile::kSteps + step) * Tile::kBlocks;
#pragma unroll
    for (int n = 0; n < Tile::kBlocks; ++n) to.b[n] = weights[(number + n) * 32];
#pragma unroll
    for (int m = 0; m < Tile::kSegments; ++m) load_matrices(to.a[m], from[m] + distance);
  }
  static __device__ __forceinline__ void add(Sums& sums, const Operands& of) {
#pragma unroll
    for (int n = 0; n < Tile::kBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < Tile::kSegments; ++m) TensorCore<Value>::add(sums[m][n], of.a[m], of.b[n].x, of.b[n].y);
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
    Operands operands[2];
    if constexpr (Tile::kAhead) read(operands[0], from, 0, 0);
#pragma unroll 1
    for (std::int32_t tap = 0; tap < job.taps; tap += 2) {
#pragma unroll
      for (int i = 0; i < 2 * Tile::kSteps; ++i) {
        if constexpr (Tile::kAhead) {
          read(operands[(i + 1) % 2], from, tap + (i + 1) / Tile::kSteps, (i + 1) % Tile::kSteps);
          if (tap + i / Tile::kSteps < job.taps) add(sums, operands[i % 2]);
        } else if (tap + i / Tile::kSteps < job.taps) {
          read(operands[0], from, tap + i / Tile::kSteps, i % Tile::kSteps);
          add(sums, operands[0]);
        }
      }
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

// Below compute capability 8.0 an empty kernel, as the host refuses it there.
template <typename Tile>
__global__ void __launch_bounds__(kGroupsThreads, Tile::kResident)
    fused_groups_input_kernel(const __grid_constant__ GroupsJob job, const typename Tile::Value* __restrict__ y,
                              const typename Tile::Value* __restrict__ w, typename Tile::Value* __restrict__ x) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ uint4 memory[];
  GroupsLine* const lines = reinterpret_cast<GroupsLine*>(memory);
  unsigned char* const weights = reinterpret_cast<unsigned char*>(memory) + job.table_bytes;
  unsigned char* const patch = weights + job.weight_bytes;
  const GroupsRange range = groups_range(job, std::int32_t(blockIdx.x));
  describe_lines<Tile>(job, lines);
  take_turn();
  std::int32_t packed = -1;  // the group whose weights lie there
#pragma unroll 1
  for (std::int32_t tile = range.first; tile < range.end; tile += range.step) {
    const GroupsPlace place = groups_place(job, tile, -1);
    __syncthreads();  // the lines are there, and nobody reads the patch of the tile before any more
    if (packed != place.group) GroupsWeight<Tile>::pack(job, w, place.group, reinterpret_cast<uint2*>(weights));
    packed = place.group;
    GroupsPatch<Tile, 128>(job, lines, y, place, patch).bring();
    __syncthreads();  // the weight and the patch are there
    GroupsInputs<Tile>(job, place, shared_address(patch), reinterpret_cast<const uint2*>(weights), x).work();
  }
#endif
}

}  // namespace upfold::cuda
