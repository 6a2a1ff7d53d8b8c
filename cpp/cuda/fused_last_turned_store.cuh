// The end of turned tiles of the fused method by boxes of channels: bias, activation and stores. Of each eight positions that
// follow one another a lane holds two neighbours, of two channels that are eight apart. A warp's 16 channels go through shared
// memory, as many eights at a time as are 128 bytes of a channel, so that neighbouring lanes store neighbouring results; and so
// that little code is unrolled: with addresses in it that of 128 sums would not stay in the cache of instructions.
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
  static constexpr int kAll = Tile::kM * kEights;
  using Sums = float[Tile::kM][Tile::kPhases][kEights][4];

  const LastJob& job;
  const LastPlace& place;
  const Value* bias;
  Value* y;
  unsigned char* staging;  // kLastTurnedStaged

  static __device__ __forceinline__ std::int32_t lane() { return std::int32_t(threadIdx.x) % 32; }
  static __device__ __forceinline__ std::int32_t warp() { return std::int32_t(threadIdx.x) / 32; }
  // The warp's first channel of 16, in its group.
  __device__ __forceinline__ std::int32_t first_channel() const {
    return place.column_tile * Tile::kColumns + (Tile::kShared ? warp() : warp() % 4) * 16;
  }

  __device__ __forceinline__ void add_bias(Sums& sums) const {
    if (bias == nullptr) return;
    const Value* const own = bias + std::int64_t(place.group) * job.channels.value;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t channel = first_channel() + lane() / 4 + half * 8;
      const float added = channel < job.columns ? widen(own[channel]) : 0.0f;
#pragma unroll
      for (int i = 0; i < kAll * Tile::kPhases; ++i) {
        float(&sum)[4] = sums[i / kEights / Tile::kPhases][i / kEights % Tile::kPhases][i % kEights];
        sum[2 * half] += added, sum[2 * half + 1] += added;
      }
    }
  }
  __device__ __forceinline__ void activate(Sums& sums) const {
    using All = ActivateLast<Tile::kM, Tile::kPhases, kEights>;
    if (job.activation == Activation::kRelu) return All{sums}([](float v) { return v < 0.0f ? 0.0f : v; });
    if (is_activated_before(job.activation)) with_activation(job.activation, job.slope, All{sums});
  }

  // The order of eights, of the products in turn or of one after the other: where eights of two products are neighbours, so that
  // neighbours follow one another.
  template <bool kInTurn>
  static __device__ __forceinline__ constexpr int product_of(int number) {
    return kInTurn ? number % Tile::kM : number / kEights;
  }
  template <bool kInTurn>
  static __device__ __forceinline__ constexpr int eight_of(int number) {
    return kInTurn ? number / Tile::kM : number % kEights;
  }
  // The first position of an eight, counted in the tile.
  template <bool kInTurn>
  __device__ __forceinline__ std::int32_t position_of(std::int32_t number) const {
    const std::int32_t product = (Tile::kShared ? 0 : warp() / 4 * Tile::kM) + product_of<kInTurn>(number);
    const std::int32_t in_row = product & ((1 << job.beside) - 1);
    const std::int32_t line = (product >> job.beside) * Tile::kSub8 + place.first_eight + eight_of<kInTurn>(number);
    return ((line << job.beside) + in_row) * 8;
  }

  // Where a position lies; of each axis as much of what is left as phases and eights ask for.
  struct Row {
    std::int64_t offset;
    std::uint32_t left;  // ten bits of each axis
    __device__ __forceinline__ std::int32_t left_of(int axis) const { return std::int32_t(left >> (20 - 10 * axis) & 1023); }
    // How many results of its row lie from this phase on.
    __device__ __forceinline__ std::int32_t from(const LastTarget& target) const {
      const bool exists = target.at[0] < left_of(0) && target.at[1] < left_of(1);
      return exists ? left_of(2) - target.at[2] : 0;
    }
  };
  __device__ __forceinline__ Row row_at(std::int32_t position) const {
    const LastRow row = last_row(job, place, position);
    Row packed{row.offset, 0};
#pragma unroll
    for (int i = 0; i < 3; ++i)
      packed.left = packed.left << 10 | std::uint32_t(row.left[i] < 0 ? 0 : row.left[i] < 1023 ? row.left[i] : 1023);
    return packed;
  }

  // A batch of eights, from number kFirst on, in kJoins phases from `phase` on, to shared memory: [channel][result].
  template <int kJoins, bool kInTurn, int kBatch>
  __device__ __forceinline__ void stage(const Sums& sums, int first, int phase, Value* rows) const {
    constexpr int kCount = 2 * kJoins, kBytes = kCount * int(sizeof(Value)),
                  kWide = kBytes % 16 == 0  ? 16 / int(sizeof(Value))
                          : kBytes % 8 == 0 ? 8 / int(sizeof(Value))
                                            : 4 / int(sizeof(Value));
    Value* const own = rows + lane() / 4 * kPitch + lane() % 4 * kCount;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int from = 0; from < kCount; from += kWide) {
          LastVector<Value, kWide> vector;
#pragma unroll
          for (int j = 0; j < kWide; ++j) {
            const int position = (from + j) / kJoins, of = phase + (from + j) % kJoins;
            vector.v[j] =
                Narrow<Value>::from(sums[product_of<kInTurn>(first + i)][of][eight_of<kInTurn>(first + i)][2 * half + position]);
          }
          *reinterpret_cast<LastVector<Value, kWide>*>(own + half * 8 * kPitch + i * 8 * kJoins + from) = vector;
        }
      }
    }
  }
  static constexpr int kPitch = kLastTurnedPitch / int(sizeof(Value));

  // Where kWide neighbouring results of a batch lie in their plane, and how many of them and behind them lie inside.
  struct Run {
    std::int64_t offset;
    std::int32_t left;
  };
  template <int kJoins, bool kInTurn>
  __device__ __forceinline__ Run run_of(const Row& own, int first, const LastTarget& target, std::int32_t result) const {
    const std::int32_t eight = result / (8 * kJoins), position = result % (8 * kJoins) / kJoins;
    Row row;
    std::int32_t along = result % kJoins;
    if (job.eights) {
      row = {__shfl_sync(~0u, own.offset, first + eight), __shfl_sync(~0u, own.left, first + eight)};
      along += position * job.axis[2].result_step;
    } else {
      row = row_at(position_of<kInTurn>(first + eight) + position);
    }
    return {row.offset + along + target.offset, row.from(target) - along};
  }
  template <int kWide>
  __device__ __forceinline__ void store_run(const Run& run, std::int32_t channel, const Value* from) const {
    if (run.left <= 0 || first_channel() + channel >= job.columns) return;
    Value* const to = y + (std::int64_t(place.group) * job.channels.value + first_channel() + channel) * job.y_c + run.offset;
    if (run.left >= kWide) {
      *reinterpret_cast<LastVector<Value, kWide>*>(to) = *reinterpret_cast<const LastVector<Value, kWide>*>(from);
    } else {
#pragma unroll 1
      for (std::int32_t i = 0; i < run.left; ++i) to[i] = from[i];
    }
  }
  // Stores a batch, kWide results at a time.
  template <int kJoins, bool kInTurn, int kBatch, int kWide>
  __device__ __forceinline__ void store_batch(const Row& own, int first, const LastTarget& target, const Value* rows) const {
    constexpr int kParts = kBatch * 8 * kJoins / kWide, kSteps = 16 * kParts / 32;
    static_assert(16 * kParts % 32 == 0, "whole steps");
    if constexpr (32 % kParts == 0) {  // a lane has the same part of every channel
      const std::int32_t result = lane() % kParts * kWide;
      const Run run = run_of<kJoins, kInTurn>(own, first, target, result);
#pragma unroll(kSteps < 4 ? kSteps : 4)
      for (int step = 0; step < kSteps; ++step) {
        const std::int32_t channel = step * (32 / kParts) + lane() / kParts;
        store_run<kWide>(run, channel, rows + channel * kPitch + result);
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        const std::int32_t number = step * 32 + lane(), channel = number / kParts, result = number % kParts * kWide;
        const Run run = run_of<kJoins, kInTurn>(own, first, target, result);
        store_run<kWide>(run, channel, rows + channel * kPitch + result);
      }
    }
  }

  // Results of kJoins phases lie together, and those of neighbouring positions where the stride is kJoins. Templates, not loops:
  // the compiler must unroll what names sums.
  template <int kJoins, bool kInTurn>
  __device__ __forceinline__ void store_joined(const Sums& sums) const {
    const Row own = row_at(position_of<kInTurn>(lane() % kAll));
    store_phases<kJoins, kInTurn, 0>(sums, own);
  }
  template <int kJoins, bool kInTurn, int kPhase>
  __device__ __forceinline__ void store_phases(const Sums& sums, const Row& own) const {
    if constexpr (kPhase + kJoins <= Tile::kPhases) {
      const LastPhase at = job.phases[place.set * Tile::kPhases + kPhase];
      store_batches<kJoins, kInTurn, kPhase, 0>(sums, own, last_target(job, at.at[0], at.at[1], at.at[2]));
      store_phases<kJoins, kInTurn, kPhase + kJoins>(sums, own);
    }
  }
  template <int kJoins, bool kInTurn, int kPhase, int kFirst>
  __device__ __forceinline__ void store_batches(const Sums& sums, const Row& own, const LastTarget& target) const {
    if constexpr (kFirst < kAll) {
      constexpr int kMost = 128 / (8 * kJoins * int(sizeof(Value))), kBatch = kMost < kAll ? kMost : kAll;
      constexpr int kVector = 16 / int(sizeof(Value)), kWord = 4 / int(sizeof(Value));
      Value* const rows = reinterpret_cast<Value*>(staging + warp() * 16 * kLastTurnedPitch);
      stage<kJoins, kInTurn, kBatch>(sums, kFirst, kPhase, rows);
      __syncwarp();  // the batch is there
      if (job.vector >= kVector) {
        store_batch<kJoins, kInTurn, kBatch, kVector>(own, kFirst, target, rows);
      } else if (kWord == 1 || job.vector >= kWord) {
        store_batch<kJoins, kInTurn, kBatch, kWord>(own, kFirst, target, rows);
      } else {
        store_batch<kJoins, kInTurn, kBatch, 1>(own, kFirst, target, rows);
      }
      __syncwarp();  // and is stored
      store_batches<kJoins, kInTurn, kPhase, kFirst + kBatch>(sums, own, target);
    }
  }
  template <bool kInTurn>
  __device__ __forceinline__ void store(const Sums& sums) const {
    if constexpr (Tile::kPhases == 4) {
      if (job.joins == 4) return store_joined<4, kInTurn>(sums);
      if (job.joins == 3) return store_joined<3, kInTurn>(sums);
    }
    if constexpr (Tile::kPhases % 2 == 0) {
      if (job.joins == 2) return store_joined<2, kInTurn>(sums);
    }
    store_joined<1, kInTurn>(sums);
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    add_bias(sums);
    activate(sums);
    if constexpr (Tile::kM > 1) {
      if (job.beside > 0) return store<true>(sums);
    }
    store<false>(sums);
  }
};

}  // namespace upfold::cuda
