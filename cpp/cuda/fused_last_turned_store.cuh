// The end of turned tiles of the fused method by boxes of channels: bias, activation and stores. Of each eight positions that
// follow one another a lane holds two neighbours, of two channels that are eight apart.
#pragma once

#include "fused_last_rows.cuh"

namespace upfold::cuda {

template <typename Value, int kCount>
struct alignas(kCount * sizeof(Value)) LastVector {
  Value v[kCount];
};

// Some of a tile's sums, from place.first_eight on: kEights of every product.
template <typename Value, typename Tile, int kEights>
struct LastTurnedStore {
  static constexpr int kVector = 16 / int(sizeof(Value));
  static constexpr int kRowResults = 8 * Tile::kPhases;  // of a channel, of which a warp stages 16
  using Sums = float[Tile::kM][Tile::kPhases][kEights][4];

  const LastJob& job;
  const LastPlace& place;
  const Value* bias;
  Value* y;
  unsigned char* staging;  // 16 rows of each warp

  static __device__ __forceinline__ std::int32_t lane() { return std::int32_t(threadIdx.x) % 32; }
  static __device__ __forceinline__ std::int32_t warp() { return std::int32_t(threadIdx.x) / 32; }
  // The warp's first channel of 16, in its group.
  __device__ __forceinline__ std::int32_t first_channel() const {
    return place.column_tile * Tile::kColumns + (Tile::kShared ? warp() : warp() % 4) * 16;
  }
  __device__ __forceinline__ Value* plane(std::int32_t channel) const {
    return y + (std::int64_t(place.group) * job.channels.value + channel) * job.y_c;
  }

  __device__ __forceinline__ void add_bias(Sums& sums) const {
    if (bias == nullptr) return;
    const Value* const own = bias + std::int64_t(place.group) * job.channels.value;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t channel = first_channel() + lane() / 4 + half * 8;
      const float added = channel < job.columns ? widen(own[channel]) : 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kM * Tile::kPhases * kEights; ++i) {
        float(&sum)[4] = sums[i / kEights / Tile::kPhases][i / kEights % Tile::kPhases][i % kEights];
        sum[2 * half] += added, sum[2 * half + 1] += added;
      }
    }
  }
  __device__ __forceinline__ void activate(Sums& sums) const {
    if (!is_activated_before(job.activation)) return;
    with_activation(job.activation, job.slope, ActivateLast<Tile::kM, Tile::kPhases, kEights>{sums});
  }
  __device__ __forceinline__ Value narrow(float v) const {
    return Narrow<Value>::from(job.activation == Activation::kRelu && v < 0.0f ? 0.0f : v);
  }

  // The first position of an eight, counted in the tile.
  __device__ __forceinline__ std::int32_t number_of(std::int32_t m, std::int32_t eight) const {
    const std::int32_t product = (Tile::kShared ? 0 : warp() / 4 * Tile::kM) + m, in_row = product & ((1 << job.beside) - 1);
    const std::int32_t line = (product >> job.beside) * Tile::kSub8 + place.first_eight + eight;
    return ((line << job.beside) + in_row) * 8;
  }
  // Where an eight lies; what is left of an axis is as much as its phases can ask for.
  struct Row {
    std::int64_t offset;
    std::uint32_t left;  // ten bits of each axis
    __device__ __forceinline__ std::int32_t left_of(int axis) const { return std::int32_t(left >> (20 - 10 * axis) & 1023); }
    // How many results of a row lie from this phase on.
    __device__ __forceinline__ std::int32_t from(const LastTarget& target) const {
      const bool exists = target.at[0] < left_of(0) && target.at[1] < left_of(1);
      return exists ? left_of(2) - target.at[2] : 0;
    }
  };
  __device__ __forceinline__ Row row_at(std::int32_t number, std::int32_t back) const {
    const LastRow row = last_row(job, place, number);
    Row packed{row.offset - back, 0};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const std::int32_t left = row.left[i] > 0 ? row.left[i] + (i == 2 ? back : 0) : 0;
      packed.left = packed.left << 10 | std::uint32_t(left < 1023 ? left : 1023);
    }
    return packed;
  }
  // Each lane's own eight of the warpgroup's.
  __device__ __forceinline__ Row own_row() const {
    const std::int32_t slot = lane() % (Tile::kM * kEights);
    return row_at(number_of(slot / kEights, slot % kEights), 0);
  }
  __device__ __forceinline__ Row row_of(const Row& own, std::int32_t slot) const {
    if (job.eights) return {__shfl_sync(~0u, own.offset, slot), __shfl_sync(~0u, own.left, slot)};
    // Of the lane's two positions alone, counted from an eight that begins before them.
    const std::int32_t first = lane() % 4 * 2;
    return row_at(number_of(slot / kEights, slot % kEights) + first, first * job.axis[2].result_step);
  }
  __device__ __forceinline__ LastTarget target(int phase) const {
    const LastPhase at = job.phases[place.set * Tile::kPhases + phase];
    return last_target(job, at.at[0], at.at[1], at.at[2]);
  }

  // kCount neighbouring results, from kFrom on, of which `left` lie inside.
  template <bool kAligned, int kFrom, int kCount, int kAll>
  static __device__ __forceinline__ void store_some(const Value (&v)[kAll], Value* to, std::int32_t left) {
    constexpr int kWide = kCount < kVector ? kCount : kVector;
    if (kAligned && left >= kCount) {
#pragma unroll
      for (int first = 0; first < kCount; first += kWide) {
        LastVector<Value, kWide> vector;
#pragma unroll
        for (int i = 0; i < kWide; ++i) vector.v[i] = v[kFrom + first + i];
        *reinterpret_cast<LastVector<Value, kWide>*>(to + first) = vector;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < left) to[i] = v[kFrom + i];
      }
    }
  }
  template <bool kAligned, int kCount>
  static __device__ __forceinline__ void store_span(const Value (&v)[kCount], Value* to, std::int32_t left) {
    store_some<kAligned, 0, kCount>(v, to, left);
  }

  // Both positions of a lane in kJoins phases, whose results are neighbours, and all together where the stride is kJoins.
  template <int kJoins, bool kTogether, bool kAligned>
  __device__ __forceinline__ void store_pairs(const Sums& sums) const {
    const Row own = own_row();
    const std::int32_t step = job.axis[2].result_step, first = lane() % 4 * 2 * step;
#pragma unroll
    for (int slot = 0; slot < Tile::kM * kEights; ++slot) {
      const Row row = row_of(own, slot);
#pragma unroll
      for (int phase = 0; phase < Tile::kPhases; phase += kJoins) {
        const LastTarget at = target(phase);
        const std::int32_t left = row.from(at) - first;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::int32_t channel = first_channel() + lane() / 4 + half * 8;
          if (channel >= job.columns) continue;
          Value* const to = plane(channel) + row.offset + at.offset + first;
          Value v[2 * kJoins];
#pragma unroll
          for (int i = 0; i < 2 * kJoins; ++i)
            v[i] = narrow(sums[slot / kEights][phase + i % kJoins][slot % kEights][2 * half + i / kJoins]);
          if constexpr (kTogether) {
            store_span<kAligned>(v, to, left);
          } else {
            store_some<kAligned, 0, kJoins>(v, to, left);
            store_some<kAligned, kJoins, kJoins>(v, to + step, left - step);
          }
        }
      }
    }
  }

  // Of one phase: neighbouring lanes exchange values of two eights that are neighbours, so that one has four of the first, the
  // other four of the second.
  template <bool kOfProducts>
  __device__ __forceinline__ void store_fours(const Sums& sums) const {
    constexpr int kOther = kOfProducts ? kEights : 1;  // from an eight to its neighbour
    const Row own = own_row();
    const bool odd = lane() & 1;
    const std::int32_t first = lane() % 4 / 2 * 4;
    const LastTarget at = target(0);
#pragma unroll
    for (int slot = 0; slot < Tile::kM * kEights; ++slot) {
      if ((kOfProducts ? slot / kEights : slot % kEights) % 2 != 0) continue;
      const Row row = row_of(own, odd ? slot + kOther : slot);
      const std::int32_t left = row.from(at) - first;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&low)[4] = sums[slot / kEights][0][slot % kEights];
        const float(&high)[4] = sums[(slot + kOther) / kEights][0][(slot + kOther) % kEights];
        Value v[4];
        exchange(odd, low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1], v);
        const std::int32_t channel = first_channel() + lane() / 4 + half * 8;
        if (channel < job.columns) store_span<true>(v, plane(channel) + row.offset + at.offset + first, left);
      }
    }
  }
  __device__ __forceinline__ void exchange(bool odd, float low0, float low1, float high0, float high1, Value (&v)[4]) const {
    const float send[2] = {odd ? low0 : high0, odd ? low1 : high1}, keep[2] = {odd ? high0 : low0, odd ? high1 : low1};
    LastVector<Value, 2> sent{{narrow(send[0]), narrow(send[1])}}, got;
    if constexpr (sizeof(Value) == 2) {
      const std::uint32_t word = __shfl_xor_sync(~0u, *reinterpret_cast<const std::uint32_t*>(&sent), 1);
      got = *reinterpret_cast<const LastVector<Value, 2>*>(&word);
    } else {
      got.v[0] = __shfl_xor_sync(~0u, sent.v[0], 1), got.v[1] = __shfl_xor_sync(~0u, sent.v[1], 1);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Value own = narrow(keep[i]);
      v[i] = odd ? got.v[i] : own, v[2 + i] = odd ? own : got.v[i];
    }
  }

  // Through shared memory: 16 channels of eight positions in kJoins phases, which together are neighbours, at a time.
  template <int kJoins, bool kAligned>
  __device__ __forceinline__ void store_staged(const Sums& sums) const {
    constexpr int kRun = 8 * kJoins, kWide = kAligned ? 4 : 1, kSteps = kRun * 16 / 32 / kWide;
    constexpr int kSets = Tile::kPhases / kJoins;
    const Row own = own_row();
    Value* const rows = reinterpret_cast<Value*>(staging) + warp() * 16 * kRowResults;
    Value* const to_stage = rows + lane() / 4 * kRun + lane() % 4 * 2 * kJoins;
#pragma unroll
    for (int slot = 0; slot < Tile::kM * kEights; ++slot) {
      const Row row = row_of(own, slot);
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const LastTarget at = target(set * kJoins);
        const std::int32_t left = row.from(at);
#pragma unroll
        for (int i = 0; i < 4 * kJoins; ++i) {
          const float v = sums[slot / kEights][set * kJoins + i % kJoins][slot % kEights][i / kJoins];
          to_stage[i / kJoins / 2 * 8 * kRun + i % (2 * kJoins)] = narrow(v);
        }
        __syncwarp();  // the channels are there
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const std::int32_t number = (step * 32 + lane()) * kWide, channel = first_channel() + number / kRun;
          if (channel >= job.columns) continue;
          Value v[kWide];
          const auto vector = *reinterpret_cast<const LastVector<Value, kWide>*>(rows + number);
#pragma unroll
          for (int i = 0; i < kWide; ++i) v[i] = vector.v[i];
          store_span<kAligned>(v, plane(channel) + row.offset + at.offset + number % kRun, left - number % kRun);
        }
        __syncwarp();  // and are stored
      }
    }
  }

  template <int kJoins>
  __device__ __forceinline__ void store_joined(const Sums& sums) const {
    constexpr int kCount = 2 * kJoins < kVector ? 2 * kJoins : kVector;
    if (job.aligned >= kCount) return store_pairs<kJoins, true, true>(sums);
    if (job.eights) return store_staged<kJoins, false>(sums);
    store_pairs<kJoins, true, false>(sums);
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    add_bias(sums);
    activate(sums);
    if constexpr (Tile::kPhases == 1) {
      if constexpr (Tile::kM % 2 == 0) {
        if (job.pairing == LastPairing::kProducts) return store_fours<true>(sums);
      }
      if (job.pairing == LastPairing::kEights) return store_fours<false>(sums);
      if (job.joins == 1) return store_joined<1>(sums);
    }
    if constexpr (Tile::kPhases == 2) {
      if (job.apart) return store_pairs<2, false, true>(sums);
    }
    if constexpr (Tile::kPhases % 2 == 0) {
      if (job.joins == 2) return store_joined<2>(sums);
    }
    if constexpr (Tile::kPhases == 4) {
      if (job.apart) return store_pairs<4, false, true>(sums);
      if (job.joins == 3 && job.aligned >= 4) return store_staged<3, true>(sums);
      if (job.joins == 3) return store_staged<3, false>(sums);
      if (job.joins == 4) return store_joined<4>(sums);
    }
    store_pairs<1, false, false>(sums);
  }
};

}  // namespace upfold::cuda
