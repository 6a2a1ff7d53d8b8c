// The end of the fused method whose channels are innermost: bias, activation and stores, from registers. Columns are in such an
// order (channel_of_column) that a lane holds 16 bytes of neighbouring channels of a row, or in that of channels (kInOrder, where
// results are whole vectors of 16 bits): then lanes exchange them.
#pragma once

#include "fused_last_vectors.cuh"

namespace upfold::cuda {

template <typename Value, typename Tile, bool kPlanes, bool kInOrder_>
struct LastStore {
  static constexpr bool kInOrder = kInOrder_;
  static_assert(!kInOrder || (sizeof(Value) == 2 && !kPlanes), "words that lanes exchange");
  static constexpr int kOwn = 16 / int(sizeof(Value)), kRun = 4 * kOwn, kRuns = Tile::kColumns / kRun, kEights = kRun / 8;
  static constexpr int kHalves = 2 * Tile::kM;  // rows of a thread
  using Sums = float[Tile::kM][Tile::kPhases][Tile::kSub8][4];

  const LastJob& job;
  const LastPlace& place;
  const Value* bias;
  Value* y;
  unsigned char* staging;  // kLastStagedBytes, where results are staged

  static __device__ __forceinline__ std::int32_t lane() { return std::int32_t(threadIdx.x) % 32; }
  // The lane's first channel in run number `run`, counted through all taps where columns are those too.
  __device__ __forceinline__ std::int32_t first_column(int run) const {
    return place.column_tile * Tile::kColumns + run * kRun + lane() % 4 * kOwn;
  }

  // Not where sums begin: products that find other instructions write their sums wait for each other.
  __device__ __forceinline__ void add_bias(Sums& sums) const {
    if (bias == nullptr) return;
    const std::int32_t channels = std::int32_t(job.channels.value);
    const Value* const own = bias + std::int64_t(place.group) * channels;
    const bool vectors = channels % kOwn == 0 &&  // as where columns are flat
                         reinterpret_cast<std::uintptr_t>(bias) % 16 == 0;
    std::uint32_t tap = std::uint32_t(first_column(0));
    std::int32_t left = job.columns - std::int32_t(tap);
    std::int32_t channel = job.flat ? std::int32_t(take(job.channels, tap)) : std::int32_t(tap);
#pragma unroll
    for (int run = 0; run < kRuns; ++run, left -= kRun, channel += kRun) {
      while (job.flat && channel >= channels) channel -= channels;
      float added[kOwn] = {};
      if (vectors && left > 0) {
        WholeVector<Value>::widen(__ldg(reinterpret_cast<const uint4*>(own + channel)), added);
      } else {
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
          if (e < left) added[e] = widen(own[channel + e]);
        }
      }
#pragma unroll
      for (int i = 0; i < kHalves * Tile::kPhases * kOwn; ++i) {
        const int e = i % kOwn, row = i / kOwn % kHalves, phase = i / kOwn / kHalves;
        sums[row / 2][phase][run * kEights + e / 2][row % 2 * 2 + e % 2] += added[e];
      }
    }
  }

  // The same of columns in order, eight at a time, of one tap. As many as fit registers are asked for before the
  // first is added, so that they are waited for together.
  __device__ __forceinline__ void add_bias_in_order(Sums& sums) const {
    if (bias == nullptr) return;
    const std::int32_t channels = std::int32_t(job.channels.value), first = place.column_tile * Tile::kColumns;
    std::uint32_t tap = std::uint32_t(first);
    std::int32_t channel = job.flat ? std::int32_t(take(job.channels, tap)) : first;
    const Value* const own = bias + std::int64_t(place.group) * channels + lane() % 4 * 2;
    constexpr int kAtOnce = Tile::kSub8 < 8 ? Tile::kSub8 : 8;
#pragma unroll
    for (int begin = 0; begin < Tile::kSub8; begin += kAtOnce) {
      Value added[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i, channel += 8) {
        if (job.flat && channel >= channels) channel -= channels;
        const bool exists = first + (begin + i) * 8 < job.columns;
        added[i][0] = own[exists ? channel : 0], added[i][1] = own[exists ? channel + 1 : 0];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce * Tile::kM * Tile::kPhases * 4; ++i) {
        const int e = i % 4, phase = i / 4 % Tile::kPhases, m = i / 4 / Tile::kPhases % Tile::kM,
                  eight = i / 4 / Tile::kPhases / Tile::kM;
        sums[m][phase][begin + eight][e] += widen(added[eight][e % 2]);
      }
    }
  }

  __device__ __forceinline__ void activate(Sums& sums) const {
    if (!is_activated_before(job.activation)) return;
    with_activation(job.activation, job.slope, ActivateLast<Tile::kM, Tile::kPhases, Tile::kSub8>{sums});
  }

  using Row = LastRow;
  using Target = LastTarget;
  __device__ __forceinline__ Row row_at(std::int32_t number) const { return last_row(job, place, number); }
  // The thread's row number `half`, of two in each 64 positions.
  __device__ __forceinline__ Row row_of(int half) const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32, block = warp / 4 * Tile::kM + half / 2;
    return row_at(block * 64 + warp % 4 * 16 + half % 2 * 8 + lane() / 4);
  }
  __device__ __forceinline__ Target target_of(std::int32_t d, std::int32_t h, std::int32_t w) const {
    return last_target(job, d, h, w);
  }

  template <int kPhase>
  __device__ __forceinline__ void store_run(const Sums& sums, const Row (&rows)[kHalves], const Target& target, int run,
                                            std::int32_t channel) const {
    const std::int32_t left = job.columns - first_column(run);
    Value* const to = y + std::int64_t(place.group) * job.channels.value + channel + target.offset;
    const bool relu = job.activation == Activation::kRelu;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (!target.is_in(rows[half])) continue;
      struct alignas(16) {
        Value v[kOwn];
      } vector;
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        const float v = sums[half / 2][kPhase][run * kEights + e / 2][half % 2 * 2 + e % 2];
        vector.v[e] = Narrow<Value>::from(relu && v < 0.0f ? 0.0f : v);
      }
      Value* const own = to + rows[half].offset;
#pragma unroll
      for (int e = 0; e < kOwn; ++e) {
        if (e < left) own[e] = vector.v[e];
      }
    }
  }

  template <int kPhase>
  __device__ __forceinline__ void store_phase(const Sums& sums, const Row (&rows)[kHalves]) const {
    if constexpr (kPhase < Tile::kPhases) {
      const LastPhase phase = job.phases[place.set * Tile::kPhases + kPhase];
      const Target target = target_of(phase.at[0], phase.at[1], phase.at[2]);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const std::int32_t channel = first_column(run);
        if (channel < job.columns) store_run<kPhase>(sums, rows, target, run, channel);
      }
      store_phase<kPhase + 1>(sums, rows);
    }
  }

  // Where channels are not innermost: lanes whose rows are neighbours store neighbouring results, of kJoin phases each: a sector
  // together, but for one result of 16 bits. There (kPaired, with a row for each m, the first of a lane's two) such lanes
  // exchange values, so that one has both rows of the first eight, the other those of the second.
  template <int kPhase, int kJoin, bool kPaired, int kRowCount>
  __device__ __forceinline__ void store_planes(const Sums& sums, const Row (&rows)[kRowCount]) const {
    if constexpr (kPhase < Tile::kPhases) {
      const LastPhase phase = job.phases[place.set * Tile::kPhases + kPhase];
      const Target target = target_of(phase.at[0], phase.at[1], phase.at[2]);
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
        const std::int32_t channel = first_column(run);
        Value* to = y + (std::int64_t(place.group) * job.channels.value + channel) * job.y_c + target.offset;
#pragma unroll
        for (int e = 0; e < kOwn; ++e, to += job.y_c) {
          const bool exists = channel + e < job.columns;
#pragma unroll
          for (int m = 0; m < Tile::kM; ++m) {
            float first[kJoin], second[kJoin];
#pragma unroll
            for (int j = 0; j < kJoin; ++j) {
              const float(&v)[4] = sums[m][kPhase + j][run * kEights + e / 2];
              first[j] = v[e % 2], second[j] = v[2 + e % 2];
            }
            if constexpr (kPaired) {
              const bool odd = lane() & 4;
              const float got = __shfl_xor_sync(~0u, odd ? first[0] : second[0], 4), own = odd ? second[0] : first[0];
              const float both[2] = {odd ? got : own, odd ? own : got};
              store_row<2>(both, rows[m], target, to, exists);
            } else {
              store_row<kJoin>(first, rows[2 * m], target, to, exists);
              store_row<kJoin>(second, rows[2 * m + 1], target, to, exists);
            }
          }
        }
      }
      store_planes<kPhase + kJoin, kJoin, kPaired>(sums, rows);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void store_row(const float (&values)[kCount], const Row& row, const Target& target, Value* to,
                                            bool exists) const {
    if (exists && target.is_in(row)) store_vector<kCount>(values, to + row.offset, row.left[2] - target.at[2]);
  }
  // `left`: how many of them lie inside; the others do not where it is less.
  template <int kCount>
  __device__ __forceinline__ void store_vector(const float (&values)[kCount], Value* to, std::int32_t left) const {
    constexpr int kWide = kCount * int(sizeof(Value)) <= 16 ? kCount : 16 / int(sizeof(Value));
    const bool relu = job.activation == Activation::kRelu;
#pragma unroll
    for (int first = 0; first < kCount; first += kWide) {
      struct alignas(kWide * sizeof(Value)) {
        Value v[kWide];
      } vector;
#pragma unroll
      for (int j = 0; j < kWide; ++j)
        vector.v[j] = Narrow<Value>::from(relu && values[first + j] < 0.0f ? 0.0f : values[first + j]);
      if constexpr (kCount > 1) {
        if (left < kCount) {
#pragma unroll
          for (int j = 0; j < kWide; ++j) {
            if (first + j < left) to[first + j] = vector.v[j];
          }
          continue;
        }
      }
      *reinterpret_cast<decltype(vector)*>(to + first) = vector;
    }
  }
  __device__ __forceinline__ void store_pairs(const Sums& sums, const Row (&rows)[kHalves]) const {
    const bool odd = lane() & 4;
    const std::int32_t back = odd ? job.axis[2].result_step : 0;
    Row own[Tile::kM];
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
      own[m].offset = (odd ? rows[2 * m + 1].offset : rows[2 * m].offset) - back;
#pragma unroll
      for (int i = 0; i < 3; ++i) own[m].left[i] = (odd ? rows[2 * m + 1].left[i] : rows[2 * m].left[i]) + (i == 2 ? back : 0);
    }
    store_planes<0, 1, true>(sums, own);
  }

  // Results of neighbouring positions and kJoin phases that lie together, but not in aligned vectors: through shared memory, the
  // 16 rows of a warp in four channels at a time, so that neighbouring lanes store neighbouring results.
  template <int kJoin>
  __device__ __forceinline__ void store_staged(const Sums& sums) const {
    constexpr int kLine = 16 * kJoin, kSteps = 4 * kLine / 32, kPatterns = kLine > 32 ? kLine / 32 : 1;
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32, phase = lane() % kJoin;
    Value* const own = reinterpret_cast<Value*>(staging) + warp * 4 * kLine;
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
#pragma unroll
      for (int first = 0; first < Tile::kPhases; first += kJoin) {
        const LastPhase of_lane = job.phases[place.set * Tile::kPhases + first + phase];
        const Target target = target_of(of_lane.at[0], of_lane.at[1], of_lane.at[2]);
        std::int64_t offsets[kPatterns];
        bool exists[kPatterns];
#pragma unroll
        for (int i = 0; i < kPatterns; ++i) {
          const std::int32_t position = (i * 32 + lane()) % kLine / kJoin;
          const Row row = row_at((warp / 4 * Tile::kM + m) * 64 + warp % 4 * 16 + position);
          offsets[i] = row.offset + target.offset, exists[i] = target.is_in(row);
        }
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
#pragma unroll
          for (int e = 0; e < kOwn; ++e) {
            stage<kJoin>(sums[m], first, run * kEights + e / 2, e % 2, own);
            __syncwarp();  // the channels are there
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              const std::int32_t number = step * 32 + lane();
              const std::int32_t channel = place.column_tile * Tile::kColumns + run * kRun + number / kLine * kOwn + e;
              if (!exists[step % kPatterns] || channel >= job.columns) continue;
              y[(std::int64_t(place.group) * job.channels.value + channel) * job.y_c + offsets[step % kPatterns]] = own[number];
            }
            __syncwarp();  // and are stored
          }
        }
      }
    }
  }
  template <int kJoin>
  __device__ __forceinline__ void stage(const float (&sums)[Tile::kPhases][Tile::kSub8][4], int first, int eight, int odd,
                                        Value* own) const {
    const bool relu = job.activation == Activation::kRelu;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      struct alignas(kJoin * sizeof(Value)) {
        Value v[kJoin];
      } vector;
#pragma unroll
      for (int j = 0; j < kJoin; ++j) {
        const float v = sums[first + j][eight][half * 2 + odd];
        vector.v[j] = Narrow<Value>::from(relu && v < 0.0f ? 0.0f : v);
      }
      *reinterpret_cast<decltype(vector)*>(own + (lane() % 4 * 16 + half * 8 + lane() / 4) * kJoin) = vector;
    }
  }

  __device__ __forceinline__ void store_to_planes(const Sums& sums, const Row (&rows)[kHalves]) const {
    if constexpr (Tile::kPhases % 4 == 0) {
      if (job.joined == 4) return store_planes<0, 4, false>(sums, rows);
      if (job.staged == 4) return store_staged<4>(sums);
    }
    if constexpr (Tile::kPhases % 2 == 0) {
      if (job.joined == 2) return store_planes<0, 2, false>(sums, rows);
      if (job.staged == 2) return store_staged<2>(sums);
    }
    if (job.staged == 1) return store_staged<1>(sums);
    if constexpr (sizeof(Value) == 2) {
      if (job.paired) return store_pairs(sums, rows);
    }
    store_planes<0, 1, false>(sums, rows);
  }

  __device__ __forceinline__ void store_taps(const Sums& sums, const Row (&rows)[kHalves]) const {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      std::uint32_t tap = std::uint32_t(first_column(run));
      if (std::int32_t(tap) >= job.columns) continue;
      const std::int32_t channel = std::int32_t(take(job.channels, tap));
      const std::int32_t w = std::int32_t(take(job.kernel_w, tap)), h = std::int32_t(take(job.kernel_h, tap));
      store_run<0>(sums, rows, target_of(std::int32_t(tap), h, w), run, channel);
    }
  }

  __device__ __forceinline__ void store_vectors(const Sums& sums) const {
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m)
      LastVectors<Value, Tile, LastStore>{*this, {row_of(2 * m), row_of(2 * m + 1)}}.run(sums, m);
  }

  __device__ __forceinline__ void store_values(const Sums& sums) const {
    Row rows[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) rows[half] = row_of(half);
    if constexpr (kPlanes) {
      store_to_planes(sums, rows);
    } else if (Tile::kPhases == 1 && job.flat) {
      store_taps(sums, rows);
    } else {
      store_phase<0>(sums, rows);
    }
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    if constexpr (kInOrder) {
      add_bias_in_order(sums);
    } else {
      add_bias(sums);
    }
    activate(sums);
    if constexpr (kInOrder) {
      store_vectors(sums);
    } else if (!kPlanes && job.wide) {
      if constexpr (!kPlanes) store_vectors(sums);
    } else {
      store_values(sums);
    }
  }
};

}  // namespace upfold::cuda
