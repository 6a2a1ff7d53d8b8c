// The end of the fused method by boxes of channels where 16 bytes of neighbouring channels, what a lane holds of a row, are one
// aligned vector of the result. Layers of much output are bound by the instructions of this: the tap of a column is carried from
// vector to vector, and rows are asked for it where it changes.
#pragma once

#include "fused_last_rows.cuh"

namespace upfold::cuda {

// Two values in one word, the first in its low half, and the two of a word.
template <typename Value>
struct Pair;
template <>
struct Pair<__half> {
  static __device__ __forceinline__ std::uint32_t narrow(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  static __device__ __forceinline__ float2 widen(std::uint32_t word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
};
template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ std::uint32_t narrow(float a, float b) {
#if __CUDA_ARCH__ >= 800
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
#else
    return 0;
#endif
  }
  static __device__ __forceinline__ float2 widen(std::uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
};

// What a lane holds of a row in 16 bytes.
template <typename Value>
struct WholeVector {
  static constexpr int kCount = 16 / int(sizeof(Value));
  static __device__ __forceinline__ uint4 narrow(const float (&v)[kCount]) {
    if constexpr (sizeof(Value) == 4) {
      return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
    } else {
      using Two = Pair<Value>;
      return {Two::narrow(v[0], v[1]), Two::narrow(v[2], v[3]), Two::narrow(v[4], v[5]), Two::narrow(v[6], v[7])};
    }
  }
  static __device__ __forceinline__ void widen(const uint4& words, float (&v)[kCount]) {
    const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Value) == 4) {
        v[i] = __uint_as_float(word[i]);
      } else {
        const float2 two = Pair<Value>::widen(word[i]);
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
      }
    }
  }
};

// Of four neighbouring lanes each has two neighbours of each of four eights; word i is of eight i. Afterwards lane i has all of
// eight i.
UPFOLD_DEVICE uint4 gather_eights(const uint4& words) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const std::uint32_t first = __shfl_xor_sync(~0u, odd ? words.x : words.y, 1);
  const std::uint32_t second = __shfl_xor_sync(~0u, odd ? words.z : words.w, 1);
  // Of eights 0 or 1, and of 2 or 3, what this lane and the one beside it had.
  const std::uint32_t low[2] = {odd ? first : words.x, odd ? words.y : first};
  const std::uint32_t up[2] = {odd ? second : words.z, odd ? words.w : second};
  const std::uint32_t third = __shfl_xor_sync(~0u, high ? low[0] : up[0], 2);
  const std::uint32_t fourth = __shfl_xor_sync(~0u, high ? low[1] : up[1], 2);
  return high ? uint4{third, fourth, up[0], up[1]} : uint4{low[0], low[1], third, fourth};
}

// `Store` (LastStore) tells where rows and taps lie.
template <typename Value, typename Tile, typename Store>
struct LastVectors {
  using Vector = WholeVector<Value>;
  using Sums = typename Store::Sums;
  static constexpr int kOwn = Vector::kCount, kRun = 4 * kOwn, kRuns = Tile::kColumns / kRun, kEights = kRun / 8;

  const Store& store;
  LastRow rows[2];  // of the lane in 64 positions: as few as can be, or registers run out

  // A column of the tile: its tap and its channel, where rows store the results of that tap, and which of them have it.
  struct Column {
    std::int32_t channel, at[3];
    std::int64_t offset;
    bool in[2];
  };
  __device__ __forceinline__ void aim(Column& column, const LastTarget& target) const {
    column.offset = target.offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) column.in[half] = target.is_in(rows[half]);
  }
  __device__ __forceinline__ void next(Column& column) const {
    column.channel += kRun;
    if constexpr (Tile::kPhases == 1) {
      const std::int32_t channels = std::int32_t(store.job.channels.value);
      if (!store.job.flat) return;
      while (column.channel >= channels) {
        column.channel -= channels;
        if (++column.at[2] == std::int32_t(store.job.kernel_w.value)) {
          column.at[2] = 0;
          if (++column.at[1] == std::int32_t(store.job.kernel_h.value)) column.at[1] = 0, ++column.at[0];
        }
        aim(column, store.target_of(column.at[0], column.at[1], column.at[2]));
      }
    }
  }

  template <bool kRelu, int kPhase>
  __device__ __forceinline__ void store_runs(const Sums& sums, int m, Column column) const {
    const std::int64_t group = std::int64_t(store.place.group) * store.job.channels.value;
    std::int32_t left = store.job.columns - store.first_column(0);
    std::int32_t all_left = store.job.columns - store.place.column_tile * Tile::kColumns;  // of all lanes
#pragma unroll
    for (int run = 0; run < kRuns; ++run, left -= kRun, all_left -= kRun) {
      if (run > 0) next(column);
      if ((Store::kInOrder ? all_left : left) <= 0) break;
      Value* const to = store.y + group + column.channel + column.offset;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[kOwn];
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
          v[e] = sums[m][kPhase][run * kEights + e / 2][half * 2 + e % 2];
          if (kRelu) v[e] = larger(v[e], 0.0f);
        }
        uint4 vector = Vector::narrow(v);
        if constexpr (Store::kInOrder) vector = gather_eights(vector);
        const bool exists = column.in[half] && (!Store::kInOrder || left > 0);
        if (exists) *reinterpret_cast<uint4*>(to + rows[half].offset) = vector;
      }
    }
  }

  template <bool kRelu, int kPhase>
  __device__ __forceinline__ void store_phases(const Sums& sums, int m) const {
    if constexpr (kPhase < Tile::kPhases) {
      const LastPhase phase = store.job.phases[store.place.set * Tile::kPhases + kPhase];
      Column column{store.first_column(0), {}, 0, {}};
      aim(column, store.target_of(phase.at[0], phase.at[1], phase.at[2]));
      store_runs<kRelu, kPhase>(sums, m, column);
      store_phases<kRelu, kPhase + 1>(sums, m);
    }
  }

  template <bool kRelu>
  __device__ __forceinline__ void store_all(const Sums& sums, int m) const {
    if constexpr (Tile::kPhases == 1) {
      if (store.job.flat) {
        std::uint32_t tap = std::uint32_t(store.first_column(0));
        const std::int32_t channel = std::int32_t(take(store.job.channels, tap));
        const std::int32_t w = std::int32_t(take(store.job.kernel_w, tap)), h = std::int32_t(take(store.job.kernel_h, tap));
        Column column{channel, {std::int32_t(tap), h, w}, 0, {}};
        aim(column, store.target_of(column.at[0], h, w));
        return store_runs<kRelu, 0>(sums, m, column);
      }
    }
    store_phases<kRelu, 0>(sums, m);
  }

  __device__ __forceinline__ void run(const Sums& sums, int m) const {
    store.job.activation == Activation::kRelu ? store_all<true>(sums, m) : store_all<false>(sums, m);
  }
};

}  // namespace upfold::cuda
