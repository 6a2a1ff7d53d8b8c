// col2im of the fused method of whole maps: a warp sums the outputs of the channels whose columns it holds.
#pragma once

#include "fused_maps.cuh"

namespace upfold::cuda {

// What the positions of a tile have in common for all tiles, by those that sum: half of the entries of one for each.
template <typename Tile>
UPFOLD_DEVICE void list_positions(const MapsJob& job, MapsTaps* taps, MapsPosition* positions) {
  constexpr std::int32_t kHalf = kMapsRows / 2;
  for (std::int32_t item = std::int32_t(threadIdx.x); item < 2 * job.positions; item += Tile::kWorkers) {
    const std::int32_t half = item >= job.positions, position = item - half * job.positions;
    std::uint32_t rest = std::uint32_t(position);
    std::int32_t at[3];
#pragma unroll
    for (int i = 2; i >= 0; --i) at[i] = std::int32_t(take(job.grid[i], rest));
    const std::int32_t sample = std::int32_t(rest);
    MapsTaps own;
#pragma unroll
    for (int l = 0; l < kHalf; ++l) {
      const std::uint32_t shift = job.shift[half * kHalf + l];
      std::int32_t pixel = sample;
      bool has_input = true;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const std::int32_t from = at[i] + (std::int32_t(shift << (24 - 8 * i)) >> 24);
        pixel = pixel * job.in[i] + from, has_input = has_input && std::uint32_t(from) < std::uint32_t(job.in[i]);
      }
      own.at[l] = std::uint16_t(4 * (has_input ? pixel : Tile::kPixels));
    }
    taps[item] = own;
    if (half != 0) continue;
    std::int64_t result = sample * job.y_n;
#pragma unroll
    for (int i = 0; i < 3; ++i) result += at[i] * job.stride[i] * job.y_axis[i];
    std::uint32_t outputs = 0;
    if (job.whole) outputs = 0xffff;
#pragma unroll 1
    for (int e = 0; e < Tile::kResults && !job.whole; ++e) {
      bool exists = true;
#pragma unroll
      for (int i = 0; i < 3; ++i) exists = exists && at[i] * job.stride[i] + job.phase[e][i] < job.out[i];
      outputs |= std::uint32_t(exists) << e;
    }
    positions[position] = {std::int32_t(result), std::uint16_t(sample), std::uint16_t(outputs)};
  }
}

// The rows of a warp, as they lie in shared memory, and the outputs of the channel of its first one.
template <typename Tile>
struct MapsOutputs {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kResults];
  // Positions of a lane at a time, as registers allow: while a lane waits for one it asks for the others.
  static constexpr int kTogether = Tile::kResults > 8 ? 1 : Tile::kResults > 4 ? 2 : Tile::kN8 > 16 ? 3 : 4;

  const MapsJob& job;
  const MapsTaps* taps;
  const MapsPosition* positions;
  const unsigned char* rows;
  const Value* bias;               // of the first channel, or null
  Value* y;                        // of the first channel of the first sample
  std::int32_t channels, samples;  // that there are

  // The sums of a position in the order of its taps. All are begun to be read before any is asked for.
  __device__ __forceinline__ void sum(std::int32_t position, const Sums& added, Sums& sums) const {
    float values[kMapsRows];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const MapsTaps own = taps[position + half * job.positions];
#pragma unroll
      for (int i = 0; i < kMapsRows / 2; ++i) {
        const int l = half * (kMapsRows / 2) + i;
        values[l] = *reinterpret_cast<const float*>(rows + own.at[i] + l * Tile::kPitch * 4);
      }
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
  __device__ __forceinline__ void store_joined(const MapsPosition& own, const Sums& sums) const {
    using Joined = Word<2 * kJoined>;
    struct alignas(2 * kJoined) {
      Value v[kJoined];
    } values;
    Value* const to = y + own.result;
#pragma unroll
    for (int e = 0; e < Tile::kResults; e += kJoined) {
#pragma unroll
      for (int i = 0; i < kJoined; ++i) values.v[i] = Narrow<Value>::from(sums[e + i]);
      if (own.outputs >> e & 1) *reinterpret_cast<Joined*>(to + job.result[e]) = *reinterpret_cast<const Joined*>(&values);
    }
  }

  __device__ __forceinline__ void run() const {
    if constexpr (Tile::kResults >= 8) {
      if (job.joined == 8) return run_joined<8>();
    }
    if (job.joined == 4) return run_joined<4>();
    if (job.joined == 2) return run_joined<2>();
    run_joined<1>();
  }
  template <int kJoined>
  __device__ __forceinline__ void run_joined() const {
    Sums added;
    std::uint32_t present = 0;  // results whose channel exists
#pragma unroll
    for (int e = 0; e < Tile::kResults; ++e) {
      present |= std::uint32_t(job.channel[e] < channels) << e;
      added[e] = bias == nullptr || job.channel[e] >= channels ? 0.0f : widen(bias[job.channel[e]]);
    }
#pragma unroll 1
    for (std::int32_t first = std::int32_t(threadIdx.x) % 32; first < job.positions; first += 32 * kTogether) {
      MapsPosition own[kTogether];
      Sums sums[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const std::int32_t number = first + 32 * i;
        const bool exists = number < job.positions;
        own[i] = positions[exists ? number : first];
        sum(exists ? number : first, added, sums[i]);
        own[i].outputs = exists && own[i].sample < samples ? own[i].outputs & present : 0;
      }
      if (job.activation != Activation::kNone) {
        const Activate activate{sums};
        if (is_activated_before(job.activation)) with_activation(job.activation, job.slope, activate);
        if (job.activation == Activation::kRelu) activate(Rectify{});
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) store_joined<kJoined>(own[i], sums[i]);
    }
  }
};

}  // namespace upfold::cuda
