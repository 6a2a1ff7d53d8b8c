// Where the fragments of x come from, for the fused gradient of the weight of groups.
#pragma once

#include "fused_groups.cuh"

namespace upfold::cuda {

// Of x, of a segment: neighbouring inputs 2 * (lane % 4) and the next one, and both eight further, of channel lane / 4 of each
// block; of float32 input lane % 4, and those four, eight and twelve further.
template <typename Tile>
struct GroupsFragments {
  std::uint32_t words[Tile::kBlocks][2 * Tile::kProducts];
};

// Memory, as x lies there.
template <typename Tile>
struct GroupsSource {
  using Value = typename Tile::Value;
  static constexpr int kWords = 2 * Tile::kProducts, kEach = 4 / Tile::kSize;

  const GroupsJob& job;
  const Value* x;  // the group's first channel

  __device__ __forceinline__ GroupsSource(const GroupsJob& of, const Value* from, std::int32_t group)
      : job(of), x(from + std::int64_t(group * of.ic) * of.x_c) {}

  __device__ __forceinline__ GroupsFragments<Tile> load(const GroupsPlace& place, std::int32_t number) const {
    GroupsFragments<Tile> inputs;
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    std::uint32_t rest = std::uint32_t(number);
    const std::int32_t column = place.iw + std::int32_t(take(job.segments, rest)) * kSegment + lane % 4 * kEach;
    const std::int32_t row = place.ih + std::int32_t(rest);
    const bool live = std::int32_t(rest) < job.tile_h && row < job.h.in;
    const Value* const of_row = x + place.n * job.x_n + place.id * job.x_d + row * job.x_h;
#pragma unroll
    for (int n = 0; n < Tile::kBlocks; ++n) {
      const std::int32_t ic = 8 * n + lane / 4;
      const Value* const from = live && ic < job.ic ? of_row + ic * job.x_c : x;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const std::int32_t at = column + i * 4 * kEach;
        const bool exists = live && ic < job.ic && at < job.w.in;
        if constexpr (Tile::kSize == 4) {
          inputs.words[n][i] = near_tf32(__float_as_uint(load_or_zero(exists ? from + at * job.x_w : x, exists)));
        } else if (job.pairs) {
          const Value* const pair = exists ? from + at : x;
          inputs.words[n][i] = __float_as_uint(load_or_zero(reinterpret_cast<const float*>(pair), exists));
        } else {
          const bool next = exists && at + 1 < job.w.in;
          const Value both[2] = {load_or_zero(exists ? from + at * job.x_w : x, exists),
                                 load_or_zero(next ? from + (at + 1) * job.x_w : x, next)};
          inputs.words[n][i] = std::uint32_t(*reinterpret_cast<const std::uint16_t*>(both + 1)) << 16 |
                               *reinterpret_cast<const std::uint16_t*>(both);
        }
      }
    }
    return inputs;
  }
};

// Shared memory, where a tile lies as [row][32 channels][inputs], rows of channels in whole vectors a vector apart, so that those
// of eight channels meet in no bank. x is aligned, and rows of it are whole vectors.
template <typename Tile>
struct GroupsSharedSource {
  using Value = typename Tile::Value;
  static constexpr int kChannels = 8 * Tile::kBlocks, kVectors = kSegment / Tile::kEach;  // of 16 bytes, of a segment

  const GroupsJob& job;
  const Value* x;  // the tile's first channel
  unsigned char* memory;
  std::int32_t channels;  // that exist

  __device__ __forceinline__ GroupsSharedSource(const GroupsJob& of, const Value* from, std::int32_t group, std::int32_t ic_tile,
                                                unsigned char* to)
      : job(of),
        x(from + std::int64_t(group * of.ic + ic_tile * kChannels) * of.x_c),
        memory(to),
        channels(of.ic - ic_tile * kChannels) {}

  // By all threads of the block.
  __device__ __forceinline__ void bring(const GroupsPlace& place) const {
    constexpr std::int32_t kTogether = 4;
    const std::int32_t count = job.tile_h * kChannels * std::int32_t(job.segments.value) * kVectors;
    const Value* const sample = x + place.n * job.x_n + place.id * job.x_d;
#pragma unroll 1
    for (std::int32_t first = std::int32_t(threadIdx.x); first < count; first += kTogether * kGroupsThreads) {
      uint4 v[kTogether];
      std::int32_t to[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const std::int32_t number = first + i * kGroupsThreads;
        std::uint32_t rest = std::uint32_t(number / kVectors);
        const std::int32_t vector = std::int32_t(take(job.segments, rest)) * kVectors + number % kVectors;
        const std::int32_t channel = std::int32_t(rest) % kChannels, row = std::int32_t(rest) / kChannels;
        const std::int32_t column = place.iw + vector * Tile::kEach;
        const bool exists = number < count && channel < channels && place.ih + row < job.h.in && column < job.w.in;
        v[i] = {0, 0, 0, 0};
        if (exists)
          v[i] = __ldg(reinterpret_cast<const uint4*>(sample + channel * job.x_c + (place.ih + row) * job.x_h + column));
        to[i] = number < count ? (row * kChannels + channel) * job.x_pitch + vector * 16 : -1;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (to[i] < 0) continue;
        if constexpr (Tile::kSize == 4) v[i] = {near_tf32(v[i].x), near_tf32(v[i].y), near_tf32(v[i].z), near_tf32(v[i].w)};
        *reinterpret_cast<uint4*>(memory + to[i]) = v[i];
      }
    }
  }

  // Of the segment at this column of a row of the tile.
  __device__ __forceinline__ GroupsFragments<Tile> load(std::int32_t row, std::int32_t column) const {
    GroupsFragments<Tile> inputs;
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    const std::uint32_t from = shared_address(memory) + std::uint32_t((row * kChannels + lane / 16 * 8 + lane % 8) * job.x_pitch +
                                                                      column * Tile::kSize + lane / 8 % 2 * 16);
#pragma unroll
    for (int n = 0; n < Tile::kBlocks; n += 2) {
#pragma unroll
      for (int product = 0; product < Tile::kProducts; ++product) {
        std::uint32_t words[4];
        load_matrices(words, from + std::uint32_t(n * 8 * job.x_pitch + product * 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) inputs.words[n + i / 2][2 * product + i % 2] = words[i];
      }
    }
    return inputs;
  }
};

}  // namespace upfold::cuda
