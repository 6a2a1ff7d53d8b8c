// The kernel of the fused method whose rows are units and whose columns are channels and phases.
#pragma once

#include "fused_activate.cuh"
#include "fused_units_fill.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct UnitsBlock : UnitsOperands<Tile> {
  using Base = UnitsOperands<Tile>;
  using Base::job, Base::memory, Base::columns, Base::n, Base::group, Base::first_column, Base::first_tile, Base::end_tile,
      Base::weights;
  using Value = typename Tile::Value;
  using Sums = float[Tile::kN8][4];
  template <int kCount>
  struct alignas(kCount * sizeof(Value)) Run {
    Value v[kCount];
  };

  __device__ __forceinline__ void multiply(Sums& sums, std::int32_t tile) const {
    const std::uint32_t at = shared_address(memory) / 16 + std::uint32_t(tile - first_tile) * 64;
    std::uint64_t b = matrix_descriptor(shared_address(weights()) / 16, std::uint32_t(Tile::kN), 8);
    // Each product is a group of its own: a commit behind a loop would make each wait for the one before.
#pragma unroll 1
    for (std::int32_t i = 0; i < job.products; ++i, b += 2 * Tile::kN) {
      const UnitsProduct product = job.product[i];
      const std::uint64_t a = matrix_descriptor(at + product.first, product.pitch, 8);
      warpgroup_begin();
      WarpgroupCore<Value, Tile::kN8, 1, 0>::add(sums, a, b);
      warpgroup_commit();
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < 4 * Tile::kN8; ++i) pin(sums[i / 4][i % 4]);
  }

  // A place of a lane's: where its outputs begin in y, and its first output. Of a place that is no unit none is there.
  struct Place {
    Value* y;
    std::int32_t oh, ow;
    bool whole, exists;
  };
  __device__ __forceinline__ Place place_of(Value* y, std::int32_t number) const {
    std::uint32_t row = std::uint32_t(number);
    const std::int32_t in_row = std::int32_t(take(job.pitch, row)) - job.before;
    const std::int32_t oh = (job.first_h + std::int32_t(row)) * job.stride_h - job.pad_h;
    const std::int32_t ow = (job.first_w + in_row) * job.stride_w - job.pad_w;
    const bool exists = number < job.places && in_row >= 0;
    const bool whole = exists && oh >= 0 && ow >= 0 && oh + job.stride_h <= job.out_h && ow + job.stride_w <= job.out_w;
    return {y + oh * job.y_h + ow * job.y_w, oh, ow, whole, exists};
  }

  // Outputs of two columns of a place whose phases say that they are there.
  __device__ __forceinline__ void store_parts(const Place& place, std::int32_t column, const float (&sums)[2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const UnitsColumn& own = columns[column + e];
      const bool is_there = std::uint32_t(place.oh + own.h) < std::uint32_t(job.out_h) &&
                            std::uint32_t(place.ow + own.w) < std::uint32_t(job.out_w);
      if (place.exists && is_there && own.at >= 0) place.y[own.at] = Narrow<Value>::from(sums[e]);
    }
  }

  struct ActivateAll {
    Sums& sums;
    template <typename Function>
    __device__ __forceinline__ void operator()(const Function& function) const {
#pragma unroll
      for (int i = 0; i < 4 * Tile::kN8; ++i) sums[i / 4][i % 4] = function(sums[i / 4][i % 4]);
    }
  };

  // Of a lane's columns, two of each eight, where the first of two lies in y: in registers for all tiles.
  using Offsets = std::int32_t[Tile::kN8];
  static __device__ __forceinline__ std::int32_t lane_column() { return std::int32_t(threadIdx.x % 4) * 2; }
  __device__ __forceinline__ void find_columns(Offsets& at) const {
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) at[j] = columns[8 * j + lane_column()].at;
  }
  // Sums begin with the bias.
  __device__ __forceinline__ void begin(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < 4 * Tile::kN8; ++i) sums[i / 4][i % 4] = columns[i / 4 * 8 + lane_column() + i % 2].bias;
  }

  // Of those columns and two places: activation and stores. Where all outputs are there, as nearly always, there are no questions
  // between stores.
  __device__ __forceinline__ void store(Sums& sums, const Offsets& at, const Place& first, const Place& second) const {
    if (job.activation == Activation::kRelu) {
#pragma unroll
      for (int i = 0; i < 4 * Tile::kN8; ++i) sums[i / 4][i % 4] = sums[i / 4][i % 4] < 0.0f ? 0.0f : sums[i / 4][i % 4];
    } else if (job.activation != Activation::kNone) {
      with_activation(job.activation, job.slope, ActivateAll{sums});
    }
    const bool simple = first.whole == first.exists && second.whole == second.exists;
    if (job.together > 1 && first_column + Tile::kN <= job.columns && __all_sync(~0u, simple)) {
      if constexpr (sizeof(Value) == 2) {
        if (job.together == 4) return store_runs<2, 0>(sums, at, first), store_runs<2, 2>(sums, at, second);
      }
      return store_runs<1, 0>(sums, at, first), store_runs<1, 2>(sums, at, second);
    }
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
      store_parts(first, 8 * j + lane_column(), {sums[j][0], sums[j][1]});
      store_parts(second, 8 * j + lane_column(), {sums[j][2], sums[j][3]});
    }
  }
  // Of a place, whose sums are kFirst and the next one of four: two outputs of each of so many groups of eight columns together,
  // 8 bytes where those are 16-bit values. More are no faster.
  template <int kGroups, int kFirst>
  __device__ __forceinline__ void store_runs(const Sums& sums, const Offsets& at, const Place& place) const {
    if (!place.whole) return;
#pragma unroll
    for (int j = 0; j < Tile::kN8; j += kGroups) {
      Run<2 * kGroups> run;
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) run.v[i] = Narrow<Value>::from(sums[j + i / 2][kFirst + i % 2]);
      *reinterpret_cast<Run<2 * kGroups>*>(place.y + at[j]) = run;
    }
  }

  // The warpgroups take tiles in turn: one multiplies while the other stores.
  __device__ __forceinline__ void run_tiles(Value* y) const {
    const std::int32_t warp = __shfl_sync(~0u, std::int32_t(threadIdx.x / 32), 0), warpgroup = warp / 4;
    Offsets at;
    find_columns(at);
#pragma unroll 1
    for (std::int32_t tile = first_tile + warpgroup; tile < end_tile; tile += kUnitThreads / 128) {
      if (tile > first_tile) meet<kUnitThreads>(1 + warpgroup);
      Sums sums;
      begin(sums);
      multiply(sums, tile);
      if (tile + 1 < end_tile) arrive<kUnitThreads>(2 - warpgroup);
      const std::int32_t place = tile * 64 + warp % 4 * 16 + std::int32_t(threadIdx.x) % 32 / 4;
      store(sums, at, place_of(y, place), place_of(y, place + 8));
    }
  }

  __device__ __forceinline__ void run(const Value* x, const Value* w, const Value* bias, Value* y) const {
    this->fill(x, w, bias);
    publish_to_products();
    __syncthreads();  // all is filled
    run_tiles(y + n * job.y_n + std::int64_t(group) * job.oc * job.y_c);
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Tile>
__global__ void __launch_bounds__(kUnitThreads, kUnitBlocks)
    fused_units_kernel(const __grid_constant__ UnitsJob job, const typename Tile::Value* __restrict__ x,
                       const typename Tile::Value* __restrict__ w, const typename Tile::Value* __restrict__ bias,
                       typename Tile::Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ alignas(16) UnitsColumn columns[Tile::kN];
  std::uint32_t rest = blockIdx.x;
  const std::int32_t column_tile = std::int32_t(take(job.column_tiles, rest)), group = std::int32_t(take(job.groups, rest));
  const std::int32_t first = std::int32_t(take(job.strips, rest)) * job.strip_tiles, end = first + job.strip_tiles;
  const UnitsBlock<Tile> block{
      {job, memory, columns, std::int32_t(rest), group, column_tile * Tile::kN, first, end < job.tiles ? end : job.tiles}};
  block.ask(w);
  take_turn();
  block.run(x, w, bias, y);
#endif
}

}  // namespace upfold::cuda
