// col2im of the fused method of whole maps: a warp sums the outputs of the channels whose columns it holds.
#pragma once

#include "fused_maps.cuh"

namespace upfold::cuda {

template <int kBytes>
struct MapsWord;
template <>
struct MapsWord<2> {
  using Type = std::uint16_t;
};
template <>
struct MapsWord<4> {
  using Type = std::uint32_t;
};
template <>
struct MapsWord<8> {
  using Type = uint2;
};
template <>
struct MapsWord<16> {
  using Type = uint4;
};

// What the positions of a tile have in common for all tiles, by some warps: half of one for each, a lane for each entry.
template <typename Tile>
UPFOLD_DEVICE void list_positions(const MapsJob& job, MapsPosition* positions, std::int32_t warp, std::int32_t warps) {
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, l = lane % kMapsRows, half = lane / kMapsRows;
  std::int32_t shift[3], phase[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) shift[i] = job.shift[l][i], phase[i] = job.phase[l / Tile::kEach][i];
  for (std::int32_t first = 2 * warp; first < job.positions; first += 2 * warps) {
    std::uint32_t rest = std::uint32_t(first + half);
    std::int32_t at[3];
#pragma unroll
    for (int i = 2; i >= 0; --i) at[i] = std::int32_t(take(job.grid[i], rest));
    const std::int32_t sample = std::int32_t(rest);
    std::int64_t result = sample * job.y_n;
    std::int32_t pixel = sample;
    bool has_input = true, exists = true;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      pixel = pixel * job.in[i] + at[i], result += at[i] * job.stride[i] * job.y_axis[i];
      has_input = has_input && std::uint32_t(at[i] + shift[i]) < std::uint32_t(job.in[i]);
      exists = exists && at[i] * job.stride[i] + phase[i] < job.out[i];
    }
    const std::uint32_t inputs = __ballot_sync(~0u, has_input) >> half * kMapsRows;
    const std::uint32_t outputs = __ballot_sync(~0u, exists) >> half * kMapsRows;
    if (l == 0 && first + half < job.positions)
      positions[first + half] = {(inputs & 0xffff) | outputs << 16, pixel * 4, std::int32_t(result), sample};
  }
}

// The rows of a warp, as they lie in shared memory, and the outputs of the channel of its first one.
template <typename Tile>
struct MapsOutputs {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kResults];
  static constexpr int kTogether = Tile::kResults > 8 ? 1 : 2;  // positions of a lane at a time, as registers allow

  const MapsJob& job;
  const MapsPosition* positions;
  const unsigned char* rows;
  const Value* bias;               // of the first channel, or null
  Value* y;                        // of the first channel of the first sample
  std::int32_t channels, samples;  // that there are

  // The sums of a position in the order of its taps. All are begun to be read before any is asked for.
  __device__ __forceinline__ void sum(const MapsPosition& own, const Sums& added, Sums& sums) const {
    float values[kMapsRows];
#pragma unroll
    for (int l = 0; l < kMapsRows; ++l) {
      const bool has_input = own.taps >> l & 1;
      values[l] = *reinterpret_cast<const float*>(rows + (has_input ? own.pixel + job.entry[l] : 0));
      if (!has_input) values[l] = 0.0f;
    }
#pragma unroll
    for (int e = 0; e < Tile::kResults; ++e) {
      sums[e] = values[e * Tile::kEach];
#pragma unroll
      for (int i = 1; i < Tile::kEach; ++i) sums[e] += values[e * Tile::kEach + i];
      sums[e] += added[e];
    }
  }
  struct Activate {
    Sums (&sums)[kTogether];
    template <typename Function>
    __device__ __forceinline__ void operator()(const Function& function) const {
#pragma unroll
      for (int i = 0; i < kTogether * Tile::kResults; ++i) {
        float& sum = sums[i / Tile::kResults][i % Tile::kResults];
        sum = function(sum);
      }
    }
  };
  struct Rectify {
    __device__ __forceinline__ float operator()(float v) const { return v < 0.0f ? 0.0f : v; }
  };

  // kJoined: results that are one vector of y.
  template <int kJoined>
  __device__ __forceinline__ void store_joined(const MapsPosition& own, const Sums& sums, bool all) const {
    using Word = typename MapsWord<2 * kJoined>::Type;
    struct alignas(2 * kJoined) {
      Value v[kJoined];
    } values;
#pragma unroll
    for (int e = 0; e < Tile::kResults; e += kJoined) {
#pragma unroll
      for (int i = 0; i < kJoined; ++i) values.v[i] = Narrow<Value>::from(sums[e + i]);
      if (all || ((own.taps >> (16 + e * Tile::kEach) & 1) && job.channel[e] < channels))
        *reinterpret_cast<Word*>(y + (own.result + job.result[e])) = *reinterpret_cast<const Word*>(&values);
    }
  }
  __device__ __forceinline__ void store(const MapsPosition& own, const Sums& sums, bool all) const {
    if constexpr (Tile::kResults >= 8) {
      if (job.joined == 8) return store_joined<8>(own, sums, all);
    }
    if (job.joined == 4) return store_joined<4>(own, sums, all);
    if (job.joined == 2) return store_joined<2>(own, sums, all);
    store_joined<1>(own, sums, all);
  }

  __device__ __forceinline__ void run() const {
    const bool all = job.whole && job.channel[Tile::kResults - 1] < channels;
    Sums added;
#pragma unroll
    for (int e = 0; e < Tile::kResults; ++e)
      added[e] = bias == nullptr || job.channel[e] >= channels ? 0.0f : widen(bias[job.channel[e]]);
#pragma unroll 1
    for (std::int32_t first = std::int32_t(threadIdx.x) % 32; first < job.positions; first += 32 * kTogether) {
      MapsPosition own[kTogether];
      Sums sums[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const std::int32_t number = first + 32 * i;
        own[i] = positions[number < job.positions ? number : first];
        if (number >= job.positions) own[i].sample = samples;
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum(own[i], added, sums[i]);
      if (job.activation != Activation::kNone) {
        const Activate activate{sums};
        if (is_activated_before(job.activation)) with_activation(job.activation, job.slope, activate);
        if (job.activation == Activation::kRelu) activate(Rectify{});
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (own[i].sample < samples) store(own[i], sums[i], all);
    }
  }
};

}  // namespace upfold::cuda
