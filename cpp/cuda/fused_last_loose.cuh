// The end of tiles of the fused method by boxes of channels to results in planes whose rows are no whole vectors, or begin at
// none: lanes store them, some channels of the tile at a time.
//   staging  [warpgroup][buffers][channel][results of all positions]   lines 16 bytes longer than their results
#pragma once

#include "fused_last_planes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct LastLooseStore : LastPlanesValues<Value, Tile> {
  using Base = LastPlanesValues<Value, Tile>;
  using Base::job, Base::place, Base::staging, Base::lane, Base::meet_warpgroup, Base::kPixelBytes, Base::kWords, Base::kPairs,
      Base::kParts, Base::kEights, Base::kColumns;
  using typename Base::Sums;
  static constexpr int kPitch = Tile::kRows * kPixelBytes + 16;
  static_assert(kPitch * kColumns <= Base::kPartBytes, "lines of all channels");

  // Lanes hold what they do in LastPlanesStore::write.
  template <bool kRelu, int kPart>
  __device__ __forceinline__ void write(const Sums& sums, unsigned char* to) const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t pixel = warp * 16 + half * 8 + (kPairs ? lane() / 8 * 2 : lane() / 4);
#pragma unroll
      for (int odd = 0; odd < (kPairs ? 1 : 2); ++odd) {
        const std::int32_t channel = lane() % 4 * 2 + (kPairs ? lane() / 4 % 2 : odd);
        unsigned char* const own = to + channel * kPitch + pixel * kPixelBytes;
#pragma unroll
        for (int i = 0; i < Tile::kM * kEights; ++i) {
          const int m = i / kEights, eight = i % kEights;
          std::uint32_t words[kWords];
          Base::template words_of<kRelu>(sums, m, kPart * kEights + eight, half * 2 + odd, words);
          Base::put(own + m * 64 * kPixelBytes + eight * 8 * kPitch, words);
        }
      }
    }
  }

  // A thread has some neighbouring results, those of a Unit, in all channels: several such units, of some channels at a time.
  template <typename Unit>
  __device__ __forceinline__ void copy_out(const unsigned char* lines, Value* y, std::int32_t part) const {
    constexpr int kOf = int(sizeof(Unit) / sizeof(Value)), kResults = Tile::kRows * Tile::kPhases;
    constexpr int kUnits = (kResults / kOf + 127) / 128;
    constexpr int kChannels = kUnits > 2 ? 4 : 8;  // at a time
    const std::int32_t column = place.column_tile * Tile::kColumns + part * kColumns;
    const std::int32_t channels = job.columns - column < kColumns ? job.columns - column : kColumns;
    Value* to[kUnits];
    bool exists[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const std::int32_t result = (i * 128 + std::int32_t(threadIdx.x) % 128) * kOf;
      const std::int64_t offset = result < kResults ? place_of(result) : -1;
      exists[i] = offset >= 0;
      to[i] = y + (offset + (std::int64_t(place.group) * job.channels.value + column) * job.y_c);
    }
    const unsigned char* from = lines + threadIdx.x % 128 * sizeof(Unit);
#pragma unroll 1
    for (std::int32_t first = 0; first < channels; first += kChannels, from += kChannels * kPitch) {
      Unit units[kUnits][kChannels];
#pragma unroll
      for (int i = 0; i < kUnits * kChannels; ++i)
        units[i / kChannels][i % kChannels] =
            *reinterpret_cast<const Unit*>(from + i / kChannels * 128 * int(sizeof(Unit)) + i % kChannels * kPitch);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c, to[i] += job.y_c)
          if (exists[i]) *reinterpret_cast<Unit*>(to[i]) = units[i][c];
      }
    }
  }
  // From the first channel's plane of the first sample on; -1: there is no such result.
  __device__ __forceinline__ std::int64_t place_of(std::int32_t result) const {
    const LastPhase phase = job.phases[place.set * Tile::kPhases];
    std::int32_t at[3], n;
    if (!this->find(result / Tile::kPhases, at, n) || n >= job.batch) return -1;
    const std::int32_t w = at[2] * Tile::kPhases + result % Tile::kPhases;
    const std::int32_t h = at[1] * job.axis[1].result_step + phase.at[1], d = at[0] * job.axis[0].result_step + phase.at[0];
    if (w >= job.axis[2].size || h >= job.axis[1].size || d >= job.axis[0].size) return -1;
    return n * job.y_n + d * job.y_axis[0] + h * job.y_axis[1] + w;
  }

  template <bool kRelu, int kPart>
  __device__ __forceinline__ void store_parts(const Sums& sums, Value* y) const {
    if constexpr (kPart < kParts) {
      unsigned char* const lines = staging + kPart % Base::kBuffers * Base::kPartBytes;
      if (Base::kBuffers == 1) meet_warpgroup();  // the part before has been read
      write<kRelu, kPart>(sums, lines);
      meet_warpgroup();  // the part is written, and of two buffers the other one read
      if (sizeof(Value) == 4 || job.words) {
        copy_out<std::uint32_t>(lines, y, kPart);
      } else if constexpr (sizeof(Value) == 2) {
        copy_out<std::uint16_t>(lines, y, kPart);
      }
      store_parts<kRelu, kPart + 1>(sums, y);
    }
  }

  __device__ __forceinline__ void run(Sums& sums, Value* y) const {
    this->finish(sums);
    job.activation == Activation::kRelu ? store_parts<true, 0>(sums, y) : store_parts<false, 0>(sums, y);
  }
};
#endif

}  // namespace upfold::cuda
