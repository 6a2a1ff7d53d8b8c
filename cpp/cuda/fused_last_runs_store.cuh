// The end of tiles of runs of the fused method by boxes of channels: lanes store what they hold from registers, as results of
// eight positions in a channel lie together in y. By way of shared memory it took several times the instructions.
#pragma once

#include "fused_last_boxes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct LastRunsStore : LastStaged<Value, Tile> {
  using Base = LastStaged<Value, Tile>;
  using Base::job, Base::place, Base::lane, Base::kHalves;
  using typename Base::Sums;
  using Added = typename Base::Added;
  static constexpr std::int64_t kSize = sizeof(Value);
  static constexpr int kRows = 2 * Tile::kM;  // positions of a lane

  Value* y;

  // The channel and the phase of the first of a lane's two columns in each eight, in turn, and how many bytes it lies from the
  // first channel's first phase in y. The second column is the next phase, or, of an odd stride, the next channel.
  template <bool kEven>
  struct Columns {
    static constexpr std::int32_t kChannels = kEven ? 1 : 2, kPhases = kEven ? 8 : 4;  // side by side; of an eight
    const std::int32_t step, more_channels, more_phases;
    const std::int64_t more, wraps;  // of an eight, and where its phases end
    std::int32_t channel, phase;
    std::int64_t at;
    __device__ __forceinline__ explicit Columns(const LastJob& job)
        : step(std::int32_t(job.runs.step.value)),
          more_channels(kPhases / step * kChannels),
          more_phases(kPhases % step),
          more((more_channels * job.y_c + more_phases) * kSize),
          wraps((kChannels * job.y_c - step) * kSize) {
      const LastRunColumn own = last_run_column(job.runs, lane() % 4 * 2);
      channel = own.channel, phase = own.phase, at = (own.channel * job.y_c + own.phase) * kSize;
    }
    __device__ __forceinline__ void next() {
      const bool ends = phase + more_phases >= step;
      channel += more_channels + (ends ? kChannels : 0), phase += more_phases - (ends ? step : 0);
      at += more + (ends ? wraps : 0);
    }
  };

  static __device__ __forceinline__ std::int32_t first_channel(const LastJob& job, const LastPlace& place) {
    return place.column_tile * job.runs.channels;
  }
  // Of the tile's channels.
  static __device__ __forceinline__ std::int32_t count_channels(const LastJob& job, const LastPlace& place) {
    return min(std::int32_t(job.channels.value) - first_channel(job, place), job.runs.channels);
  }

  template <bool kEven>
  static __device__ __forceinline__ void read_columns(const LastJob& job, const LastPlace& place, const Value* bias,
                                                      Added& added) {
    const Value* const own = bias + (std::int64_t(place.group) * job.channels.value + first_channel(job, place));
    const std::int32_t last = count_channels(job, place) - 1;
    Columns<kEven> columns(job);
#pragma unroll
    for (int e = 0; e < Tile::kSub8; ++e, columns.next()) {
      const float first = widen(own[min(columns.channel, last)]);
      const float second = kEven ? first : widen(own[min(columns.channel + 1, last)]);
      if constexpr (kHalves) {
        added[e] = Pair<Value>::narrow(first, second);
      } else {
        added[e] = {first, second};
      }
    }
  }
  static __device__ __forceinline__ void read_bias(const LastJob& job, const LastPlace& place, const Value* bias, Added& added) {
    if (bias == nullptr) return;
    job.runs.step.value % 2 == 0 ? read_columns<true>(job, place, bias, added) : read_columns<false>(job, place, bias, added);
  }

  // The address of a position's results in the tile's first channel, and which of its phases exist.
  struct Row {
    std::uint64_t to;
    std::int32_t first;   // of the phases
    std::uint32_t count;  // of those from there on
    __device__ __forceinline__ bool has(std::int32_t phase) const { return std::uint32_t(phase - first) < count; }
  };
  __device__ __forceinline__ Row row_of(std::int32_t number) const {
    std::uint32_t rest = std::uint32_t(number);
    std::int32_t at[3];
#pragma unroll
    for (int i = 2; i >= 0; --i) at[i] = place.first[i] + std::int32_t(take(job.axis[i].tile, rest));
    const std::int32_t n = place.n + std::int32_t(rest), phases = std::int32_t(job.runs.step.value);
    const std::int32_t begin = at[2] * job.axis[2].result_step + place.set * phases - job.runs.ahead,
                       first = begin < 0 ? -begin : 0;
    const bool exists = rest < job.tile_n.value && n < job.batch && at[0] < job.axis[0].size && at[1] < job.axis[1].size;
    const std::int32_t end = exists ? min(phases, job.axis[2].size - begin) : 0;
    const std::int64_t offset = n * job.y_n +
                                (std::int64_t(place.group) * job.channels.value + first_channel(job, place)) * job.y_c +
                                at[0] * job.y_axis[0] + at[1] * job.y_axis[1] + begin;
    std::uint64_t to = reinterpret_cast<std::uint64_t>(y) + std::uint64_t(offset * kSize);
    hide(to);  // else the compiler adds offsets of values up, and makes an address of each sum
    return {to, first, std::uint32_t(end > first ? end - first : 0)};
  }

  static __device__ __forceinline__ void put(std::uint64_t to, float v, bool exists) {
    if constexpr (kHalves) {
      const Value own = Narrow<Value>::from(v);
      store_global_if(exists, to, *reinterpret_cast<const std::uint16_t*>(&own));
    } else {
      store_global_if(exists, to, v);
    }
  }
  static __device__ __forceinline__ void put_two(std::uint64_t to, float a, float b, bool exists) {
    if constexpr (kHalves) {
      store_global_if(exists, to, Pair<Value>::narrow(a, b));
    } else {
      store_global_if(exists, to, float2{a, b});
    }
  }

  // kTwo: two neighbouring phases are a word of y, which exists or does not. kWhole: all phases of all positions exist.
  template <bool kEven, bool kTwo, bool kWhole>
  __device__ __forceinline__ void store(const Sums& sums, const Row (&rows)[kRows]) const {
    const std::int32_t channels = count_channels(job, place);
    const std::uint64_t channel = std::uint64_t(job.y_c * kSize);
    Columns<kEven> columns(job);
#pragma unroll
    for (int e = 0; e < Tile::kSub8; ++e, columns.next()) {
      const bool exists = columns.channel < channels, has_next = columns.channel + 1 < channels;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const Row& row = rows[i];
        const float first = sums[i / 2][0][e][i % 2 * 2], second = sums[i / 2][0][e][i % 2 * 2 + 1];
        const bool has = kWhole || row.has(columns.phase);
        const std::uint64_t to = row.to + std::uint64_t(columns.at);
        if constexpr (kTwo) {
          put_two(to, first, second, exists && has);
        } else {
          put(to, first, exists && has);
          if constexpr (kEven) {
            put(to + kSize, second, exists && (kWhole || row.has(columns.phase + 1)));
          } else {
            put(to + channel, second, has_next && has);
          }
        }
      }
    }
  }
  template <bool kEven, bool kTwo>
  __device__ __forceinline__ void store_rows(const Sums& sums) const {
    const std::int32_t position = std::int32_t(threadIdx.x) / 32 % 4 * 16 + lane() / 4;
    Row rows[kRows];
    bool whole = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = row_of(i / 2 * 64 + i % 2 * 8 + position);
      whole = whole && rows[i].count == job.runs.step.value;
    }
    __all_sync(~0u, whole) ? store<kEven, kTwo, true>(sums, rows) : store<kEven, kTwo, false>(sums, rows);
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    this->finish_all(sums);
    if (job.runs.step.value % 2 != 0) return store_rows<false, false>(sums);
    job.unit > std::int32_t(sizeof(Value)) ? store_rows<true, true>(sums) : store_rows<true, false>(sums);
  }
};
#endif

}  // namespace upfold::cuda
