// The end of tiles of the fused method by boxes of channels to results in planes whose rows are no whole vectors, or begin at
// none: lanes store them, some channels of the tile at a time, in the order in which they lie in y.
//   staging  [warpgroup][buffers][channel][row of positions][row of phases][position][phase]   lines 16 bytes longer
#pragma once

#include "fused_last_planes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// Where a run of results begins, from the first channel's plane of the first sample on, and how many of them exist.
struct LastRun {
  std::int64_t offset;
  std::int32_t length, first;  // first: of a unit in the run
};

template <typename Value, typename Tile>
struct LastLooseStore : LastPlanesValues<Value, Tile> {
  using Base = LastPlanesValues<Value, Tile>;
  using Base::job, Base::place, Base::staging, Base::lane, Base::meet_warpgroup, Base::kPixelBytes, Base::kWords, Base::kPairs,
      Base::kParts, Base::kEights, Base::kColumns, Base::kRowPhases, Base::kPhaseRows;
  using typename Base::Sums;
  static constexpr int kSize = int(sizeof(Value)), kOfVector = 16 / kSize;
  static constexpr int kResults = Tile::kRows * Tile::kPhases, kPitch = kResults * kSize + 16;
  static constexpr int kPartBytes = last_planes_part_bytes(Tile::kRows, Tile::kColumns, Tile::kPhases* kSize, kSize, true);
  static constexpr int kStaged = Base::kBuffers * kPartBytes;
  static_assert(kPitch * kColumns <= kPartBytes && kResults % kOfVector == 0, "lines of all channels, of whole vectors");

  // Lanes hold what they do in LastPlanesStore::write_apart.
  template <int kPart>
  __device__ __forceinline__ void write_apart(const Sums& sums, unsigned char* to) const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t pixel = warp * 16 + half * 8 + (kPairs ? lane() / 8 * 2 : lane() / 4);
      unsigned char* own[Tile::kM];
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m) own[m] = to + byte_of(m * 64 + pixel);
#pragma unroll
      for (int odd = 0; odd < (kPairs ? 1 : 2); ++odd) {
        const std::int32_t channel = lane() % 4 * 2 + (kPairs ? lane() / 4 % 2 : odd);
#pragma unroll
        for (int i = 0; i < Tile::kM * kEights * kPhaseRows; ++i) {
          const int m = i / kEights / kPhaseRows, eight = i / kPhaseRows % kEights, row = i % kPhaseRows;
          std::uint32_t words[kWords];
          Base::template words_of<false>(sums, m, row * kRowPhases, kPart * kEights + eight, half * 2 + odd, words);
          if (kPhaseRows == 1 || m * 64 + pixel < job.kept)  // behind them a row would end behind its line
            Base::put(own[m] + channel * kPitch + row * bytes_of_row() + eight * 8 * kPitch, words);
        }
      }
    }
  }
  // The same of three phases of 16-bit values, whose pixels have no whole words: of two lanes with neighbouring pixels one takes
  // the first channel of both, the other the second.
  __device__ __forceinline__ void write_threes(const Sums& sums, unsigned char* to) const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32 % 4, channel = lane() % 4 * 2 + lane() / 4 % 2;
    const bool second = lane() & 4;
    unsigned char* const own = to + byte_of(warp * 16 + lane() / 8 * 2) + channel * kPitch;
#pragma unroll
    for (int i = 0; i < Tile::kM * kEights * 2; ++i) {
      const int m = i / 2 / kEights, eight = i / 2 % kEights, half = i % 2;
      const auto pair = [&](int phase, int of, int next, int of_next) {
        return Pair<Value>::narrow(sums[m][phase][eight][half * 2 + of], sums[m][next][eight][half * 2 + of_next]);
      };
      const std::uint32_t first = pair(0, 0, 1, 0), other = pair(0, 1, 1, 1), thirds = pair(2, 0, 2, 1);
      const std::uint32_t got = __shfl_xor_sync(~0u, second ? first : other, 4), got_thirds = __shfl_xor_sync(~0u, thirds, 4);
      const std::uint32_t low = second ? got : first, high = second ? other : got;  // phases 0 and 1 of either pixel
      const std::uint32_t low_thirds = second ? got_thirds : thirds, high_thirds = second ? thirds : got_thirds;
      std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(own + (m * 64 + half * 8) * kPixelBytes + eight * 8 * kPitch);
      words[0] = low, words[1] = __byte_perm(low_thirds, high, second ? 0x5432 : 0x5410);
      words[2] = __byte_perm(high, high_thirds, second ? 0x7632 : 0x5432);
    }
  }
  template <int kPart>
  __device__ __forceinline__ void write_neighbours(const Sums& sums, unsigned char* to) const {
    unsigned char* const own = to + Base::own_pixel() * kPixelBytes;
#pragma unroll
    for (int i = 0; i < Tile::kM * 2 * kEights; ++i) {
      const int m = i / 2 / kEights, odd = i / kEights % 2, eight = i % kEights;
      Base::template put_two<false, false>(own + m * 64 * kPixelBytes + (lane() % 4 * 2 + odd + eight * 8) * kPitch, sums, m,
                                           kPart * kEights + eight, odd);
    }
  }
  template <int kPart>
  __device__ __forceinline__ void write(const Sums& sums, unsigned char* to) const {
    if constexpr (Base::kNeighbours) {
      write_neighbours<kPart>(sums, to);
    } else if constexpr (kSize == 2 && kRowPhases == 3) {
      static_assert(kParts == 1 && kPhaseRows == 1, "all channels at once, one row of phases");
      write_threes(sums, to);
    } else {
      write_apart<kPart>(sums, to);
    }
  }
  // Of a row of positions in one row of phases.
  __device__ __forceinline__ std::int32_t bytes_of_row() const {
    return kPhaseRows == 1 ? 0 : std::int32_t(job.axis[2].tile.value) * kPixelBytes;
  }
  __device__ __forceinline__ std::int32_t byte_of(std::int32_t position) const {
    if constexpr (kPhaseRows == 1) return position * kPixelBytes;
    std::uint32_t row = std::uint32_t(position);
    const std::uint32_t w = take(job.axis[2].tile, row);
    return std::int32_t(row) * kPhaseRows * bytes_of_row() + std::int32_t(w) * kPixelBytes;
  }

  // The run of a result of a line.
  __device__ __forceinline__ LastRun run_of(std::int32_t result) const {
    std::uint32_t number = std::uint32_t(result);
    LastRun run = {0, 0, std::int32_t(take(job.run_results, number))};
    const std::int32_t rows = job.plane_runs ? 1 : kPhaseRows;  // of phases, a run each
    const LastPhase phase =
        job.phases[place.set * Tile::kPhases + (kPhaseRows == 1 ? 0 : std::int32_t(number) % rows * kRowPhases)];
    std::int32_t at[3], n;
    if (result >= kResults || !this->find(std::int32_t(number) / rows * job.run_positions, at, n) || n >= job.batch) return run;
    const std::int32_t w = at[2] * kRowPhases, h = at[1] * job.axis[1].result_step + phase.at[1];
    const std::int32_t d = at[0] * job.axis[0].result_step + phase.at[0];
    run.offset = n * job.y_n + d * job.y_axis[0] + h * job.y_axis[1] + w;
    if (h >= job.axis[1].size || d >= job.axis[0].size) return run;
    const std::int32_t left = job.plane_runs ? (job.axis[1].size - h) * job.axis[2].size : job.axis[2].size - w;
    const std::int32_t all = std::int32_t(job.run_results.value);
    run.length = left < all ? left : all;
    return run;
  }

  // Channels of the part.
  __device__ __forceinline__ std::int32_t count_channels(std::int32_t part) const {
    const std::int32_t left = job.columns - (place.column_tile * Tile::kColumns + part * kColumns);
    return left < kColumns ? left : kColumns;
  }
  __device__ __forceinline__ Value* first_plane(Value* y, std::int32_t part) const {
    const std::int32_t channel = place.column_tile * Tile::kColumns + part * kColumns;
    return y + (std::int64_t(place.group) * job.channels.value + channel) * job.y_c;
  }

  // What threads of a warpgroup take of lines, in units of some values: kEach units a thread, of kAtOnce channels at a time,
  // kSteps times before they are stored.
  template <int kOf>
  struct Shares {
    static constexpr int kUnits = kResults / kOf;
    static constexpr int kLanes = kUnits > 64 ? 128 : kUnits > 32 ? 64 : kUnits > 16 ? 32 : 16;
    static constexpr int kEach = (kUnits + 127) / 128, kAtOnce = 128 / kLanes;
    static constexpr int kMost = kEach > 2 ? 4 : 8, kFit = kColumns / kAtOnce;
    static constexpr int kSteps = kFit < kMost ? kFit : kMost;
    static constexpr bool kExact = kAtOnce * kSteps <= 8;  // there are eights of channels
    static_assert(kSteps > 0 && kColumns % (kAtOnce * kSteps) == 0, "lines that are read");
    static __device__ __forceinline__ std::int32_t unit() { return std::int32_t(threadIdx.x) % kLanes; }
    static __device__ __forceinline__ std::int32_t channel() { return std::int32_t(threadIdx.x) % 128 / kLanes; }
  };

  // Units of which each lies in a run, in whole. Planes are whole units apart: by steps of values the compiler would not know
  // that stores are aligned, and make one for every four bytes.
  template <typename Unit>
  __device__ __forceinline__ void copy_units(const unsigned char* lines, Value* y, std::int32_t part) const {
    constexpr int kOf = int(sizeof(Unit)) / kSize;
    using Share = Shares<kOf>;
    const std::int32_t channels = count_channels(part), first = Share::channel();
    const std::int64_t plane = job.y_c / kOf;
    Unit* to[Share::kEach];
    const unsigned char* from[Share::kEach];
    bool exists[Share::kEach];
#pragma unroll
    for (int i = 0; i < Share::kEach; ++i) {
      const std::int32_t unit = i * 128 + Share::unit(), inside = unit < Share::kUnits ? unit : 0;
      const LastRun run = run_of(unit * kOf);
      exists[i] = run.first + kOf <= run.length;
      to[i] = reinterpret_cast<Unit*>(first_plane(y, part) + (run.offset + run.first)) + first * plane;
      from[i] = lines + first * kPitch + inside * int(sizeof(Unit));
    }
#pragma unroll 1
    for (std::int32_t channel = first; channel < channels; channel += Share::kAtOnce * Share::kSteps) {
      Unit units[Share::kEach][Share::kSteps];
#pragma unroll
      for (int i = 0; i < Share::kEach * Share::kSteps; ++i)
        units[i / Share::kSteps][i % Share::kSteps] =
            *reinterpret_cast<const Unit*>(from[i / Share::kSteps] + i % Share::kSteps * Share::kAtOnce * kPitch);
#pragma unroll
      for (int i = 0; i < Share::kEach; ++i) {
#pragma unroll
        for (int step = 0; step < Share::kSteps; ++step, to[i] += Share::kAtOnce * plane)
          if (exists[i] && (Share::kExact || channel + step * Share::kAtOnce < channels)) *to[i] = units[i][step];
        from[i] += Share::kSteps * Share::kAtOnce * kPitch;
      }
    }
  }

  // Runs of 16-bit values that begin at any: a lane has the aligned vector of y behind as many of its own of the line as the
  // run's first one is short of, and one of the values that are left at both ends.
  __device__ __forceinline__ void copy_shifted(const unsigned char* lines, Value* y, std::int32_t part) const {
    using Share = Shares<kOfVector>;
    static_assert(Share::kEach == 1, "one vector of a thread");
    const std::int32_t channels = count_channels(part), first = Share::channel();
    const LastRun run = run_of(Share::unit() * kOfVector);
    if (run.length == 0) return;
    Value* to = first_plane(y, part) + (run.offset + first * job.y_c);
    const unsigned char* from = lines + first * kPitch + Share::unit() * 16;
    const std::int32_t number = run.first / kOfVector, behind = run.length - run.first - kOfVector;
    const bool ahead = number < kOfVector, has_edge = number < 2 * kOfVector;
#pragma unroll 2
    for (std::int32_t channel = first; channel < channels; channel += Share::kAtOnce) {
      const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(to);
      const std::int32_t head = std::int32_t(0 - address / kSize) & (kOfVector - 1);
      const std::int32_t whole = run.length > head ? run.length - head : 0, tail = run.length - whole % kOfVector;
      const std::int32_t edge = ahead ? number : tail + number - kOfVector, end = ahead && head < run.length ? head : run.length;
      const uint4 vector = vector_behind(from, head * kSize);
      if (head <= behind) reinterpret_cast<uint4*>((address + 15) / 16 * 16)[number] = vector;
      if (has_edge && edge < end) to[edge] = reinterpret_cast<const Value*>(from)[edge - run.first];
      from += Share::kAtOnce * kPitch, to += Share::kAtOnce * job.y_c;
    }
  }
  // Sixteen bytes, so many (an even number) behind an aligned address.
  static __device__ __forceinline__ uint4 vector_behind(const unsigned char* from, std::int32_t bytes) {
    const uint4 low = *reinterpret_cast<const uint4*>(from), high = *reinterpret_cast<const uint4*>(from + 16);
    const bool two = bytes & 8, one = bytes & 4;
    const std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    std::uint32_t moved[6], own[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) moved[i] = two ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) own[i] = one ? moved[i + 1] : moved[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = __funnelshift_r(own[i], own[i + 1], std::uint32_t(bytes & 2) * 8);
    return {own[0], own[1], own[2], own[3]};
  }

  // Rows whose source lies in planes of whole vectors begin at four bytes.
  __device__ __forceinline__ void copy_out(const unsigned char* lines, Value* y, std::int32_t part) const {
    if constexpr (kSize == 2 && !Tile::kFromPlanes) {
      if (job.shifted) return copy_shifted(lines, y, part);
    }
    if (job.unit == 16) return copy_units<uint4>(lines, y, part);
    if constexpr (kSize == 4 || Tile::kFromPlanes) {
      copy_units<std::uint32_t>(lines, y, part);
    } else {
      if (job.unit == 8) return copy_units<uint2>(lines, y, part);
      job.unit == 4 ? copy_units<std::uint32_t>(lines, y, part) : copy_units<std::uint16_t>(lines, y, part);
    }
  }

  template <int kPart>
  __device__ __forceinline__ void store_parts(const Sums& sums, Value* y) const {
    if constexpr (kPart < kParts) {
      unsigned char* const lines = staging + kPart % Base::kBuffers * kPartBytes;
      if (Base::kBuffers == 1) meet_warpgroup();  // the part before has been read
      write<kPart>(sums, lines);
      meet_warpgroup();  // the part is written, and of two buffers the other one read
      copy_out(lines, y, kPart);
      store_parts<kPart + 1>(sums, y);
    }
  }

  __device__ __forceinline__ void run(Sums& sums, Value* y) const {
    this->finish_all(sums);
    store_parts<0>(sums, y);
  }
};
#endif

}  // namespace upfold::cuda
