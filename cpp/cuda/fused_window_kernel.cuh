// The kernel of the fused method for windows.
#pragma once

#include "fused_window_load.cuh"

namespace upfold::cuda {

// What a warp multiplies.
template <typename Tile>
struct WindowWarp {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kRows][Tile::kBlocks][4];
  static constexpr int kAcrossPlanes = Tile::kChannels / 8;
  // Of a chunk: words of channels in both halves of it, of the weight and of eight positions each.
  struct Operands {
    std::uint32_t weight[2][Tile::kRows][4], pixels[Tile::kBlocks][4];
  };

  const WindowJob& job;
  const std::uint32_t* weight;  // the lane's words
  std::uint32_t pixels;         // and the vector of a pixel that it names
  std::int32_t across, along, split;

  __device__ __forceinline__ WindowWarp(const WindowJob& job_, const unsigned char* memory) : job(job_) {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32, lane = std::int32_t(threadIdx.x) % 32;
    across = warp % Tile::kAcross, along = warp / Tile::kAcross % Tile::kAlong, split = warp / Tile::kAcross / Tile::kAlong;
    weight = reinterpret_cast<const std::uint32_t*>(memory + job.weight_at) + across * 2 * Tile::kRows * kWindowPlane + lane;
    pixels = shared_address(memory) + std::uint32_t((along * 8 * Tile::kBlocks + lane % 8) * job.pixel_pitch + lane / 8 * 16);
  }

  __device__ __forceinline__ void load(Operands& to, std::int32_t step, std::uint32_t from) const {
    const std::uint32_t* const planes = weight + step * (kWindowChunk / 16 * kAcrossPlanes * kWindowPlane);
#pragma unroll
    for (int block = 0; block < Tile::kBlocks; ++block)
      load_matrices(to.pixels[block], from + std::uint32_t(8 * block * job.pixel_pitch));
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int row = 0; row < Tile::kRows; ++row)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to.weight[half][row][i] = planes[((2 * half + i / 2) * kAcrossPlanes + 2 * row + i % 2) * kWindowPlane];
  }
  static __device__ __forceinline__ void add(Sums& sums, const Operands& of) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block)
#pragma unroll
        for (int row = 0; row < Tile::kRows; ++row)
          TensorCore<Value>::add(sums[row][block], of.weight[half][row], of.pixels[block][2 * half],
                                 of.pixels[block][2 * half + 1]);
  }

  // Adds the products of its share of all taps, a chunk of channels at a time.
  __device__ __forceinline__ void multiply(Sums& sums) const {
    const std::int32_t steps = job.taps * job.chunks, last = (split + 1) * steps / Tile::kSplit;
    std::int32_t step = split * steps / Tile::kSplit;
    std::int32_t tap = std::int32_t(divide(job.chunks_of_tap, std::uint32_t(step))), chunk = step - tap * job.chunks;
    const auto next = [&] {
      const std::uint32_t at = pixels + std::uint32_t(job.shift[tap] * job.pixel_pitch + chunk * kWindowChunk);
      if (++chunk == job.chunks) chunk = 0, ++tap;
      return at;
    };
#pragma unroll 1
    for (; step < last; ++step) {
      Operands operands;
      load(operands, step, next());
      add(sums, operands);
    }
  }

  // Leaves its sums for the warps of all shares, [share][warp][eight channels of a product][eight positions][lane].
  __device__ __forceinline__ void leave(const Sums& sums, unsigned char* memory) const {
    float2* const own = reinterpret_cast<float2*>(memory) + std::int32_t(threadIdx.x) / 32 * (Tile::kPairs * 32);
#pragma unroll
    for (int i = 0; i < Tile::kPairs; ++i) {
      const float* const pair = &sums[i / Tile::kBlocks / 2][i % Tile::kBlocks][i / Tile::kBlocks % 2 * 2];
      own[i * 32 + std::int32_t(threadIdx.x) % 32] = {pair[0], pair[1]};
    }
  }

  // Adds those of all shares in order, and the bias, applies the activation, rounds, and leaves results in rows of channels: each
  // share does so for some of the channels and positions.
  static constexpr int kEights = 2 * Tile::kRows, kSharesOfEights = Tile::kSplit < kEights ? Tile::kSplit : kEights;
  static constexpr int kSharesOfBlocks = Tile::kSplit / kSharesOfEights;
  __device__ __forceinline__ void join(const unsigned char* memory, unsigned char* results, const Value* bias,
                                       std::int32_t channels) const {
    constexpr int kApart = Tile::kAcross * Tile::kAlong * Tile::kPairs * 32;
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, first = split % kSharesOfEights, block = split / kSharesOfEights;
    const std::int32_t warp = across + along * Tile::kAcross;
    const float2* own =
        reinterpret_cast<const float2*>(memory) + (warp * Tile::kPairs + first * Tile::kBlocks + block) * 32 + lane;
    std::int32_t channel = (across * kEights + first) * 8 + lane / 4;
    unsigned char* to =
        results + channel * Tile::kResultPitch + ((along * Tile::kBlocks + block) * 8 + lane % 4 * 2) * Tile::kSize;
#pragma unroll
    for (int eight = 0; eight < kEights; eight += kSharesOfEights) {
      const float added = bias != nullptr && channel < channels ? widen(bias[channel]) : 0.0f;
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; i += kSharesOfBlocks) {
        if (kSharesOfBlocks > 1 && block + i >= Tile::kBlocks) break;
        float2 sum = own[i * 32];
#pragma unroll
        for (int share = 1; share < Tile::kSplit; ++share) {
          const float2 other = own[share * kApart + i * 32];
          sum.x += other.x, sum.y += other.y;
        }
        sum.x += added, sum.y += added;
        if (job.activation != Activation::kNone)
          sum.x = finish(job.activation, job.slope, sum.x), sum.y = finish(job.activation, job.slope, sum.y);
        store_neighbours(reinterpret_cast<Value*>(to + i * 8 * Tile::kSize), sum.x, sum.y);
      }
      own += kSharesOfEights * Tile::kBlocks * 32, channel += kSharesOfEights * 8;
      to += kSharesOfEights * 8 * Tile::kResultPitch;
    }
  }
};

// Stores the results of a tile's channels, kBytes of neighbouring positions at a time.
template <typename Tile, int kBytes>
__device__ __forceinline__ void store_window(const WindowJob& job, const unsigned char* results, const std::int32_t* places,
                                             typename Tile::Value* to, std::int32_t channels) {
  constexpr int kTogether = kBytes / Tile::kSize, kOfChannel = Tile::kPositions / kTogether;
#pragma unroll 1
  for (std::int32_t i = std::int32_t(threadIdx.x); i < channels * kOfChannel; i += Tile::kThreads) {
    const std::int32_t channel = i / kOfChannel, vector = i % kOfChannel, place = places[vector * kTogether];
    if (place < 0) continue;
    constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
    std::uint32_t words[kWords];
    const unsigned char* const from = results + channel * Tile::kResultPitch + vector * kBytes;
    if constexpr (kBytes == 2) {
      words[0] = *reinterpret_cast<const std::uint16_t*>(from);
    } else {
#pragma unroll
      for (int word = 0; word < kWords; ++word) words[word] = reinterpret_cast<const std::uint32_t*>(from)[word];
    }
    store_words<kBytes>(to + channel * job.result_c + place, words);
  }
}

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_window_kernel(const __grid_constant__ WindowJob job, const typename Tile::Value* __restrict__ source,
                        const typename Tile::Value* __restrict__ w, const typename Tile::Value* __restrict__ bias,
                        typename Tile::Value* __restrict__ result) {
#if __CUDA_ARCH__ >= 800
  using Value = typename Tile::Value;
  extern __shared__ uint4 shared[];
  unsigned char* const memory = reinterpret_cast<unsigned char*>(shared);
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, rest)) * Tile::kChannels;
  const std::int32_t group = std::int32_t(take(job.groups, rest)), first = std::int32_t(rest) * Tile::kPositions;
  const std::int32_t channels = min(Tile::kChannels, job.m - first_channel);
  std::int32_t* const places = reinterpret_cast<std::int32_t*>(memory + job.places_at);
  clear_patch<Tile>(job, memory);
#pragma unroll 1
  for (std::int32_t i = std::int32_t(threadIdx.x); i < Tile::kPositions; i += Tile::kThreads)
    places[i] = window_place(job, std::uint32_t(first + i));
  __syncthreads();  // the patch is clear
  take_turn();
  const WindowWeight<Tile> weight{job, memory, channels};
  const std::int32_t row = job.by_source ? group * job.k : group * job.m + first_channel;
  weight.copy(w + row * job.w_row + (job.by_source ? first_channel * job.taps : 0));
  const Value* const from = source + std::int64_t(group) * job.k * job.source_c;
  if (job.load == 16) {
    WindowPatch<Tile, 16>(job, from, memory, first).fill();
  } else if (job.load == 8) {
    WindowPatch<Tile, 8>(job, from, memory, first).fill();
  } else {
    WindowPatch<Tile, Tile::kSize>(job, from, memory, first).fill();
  }
  copy_async_wait_all();
  __syncwarp();  // the warp's rows of the raw weight are there
  weight.lay_out();
  __syncthreads();  // the weight and the patch are there
  const WindowWarp<Tile> own(job, memory);
  typename WindowWarp<Tile>::Sums sums = {};
  own.multiply(sums);
  __syncthreads();  // nobody reads patch and weight any more
  own.leave(sums, memory + job.raw_at);
  __syncthreads();  // all sums are there
  const std::int32_t first_result = group * job.m + first_channel;
  own.join(memory + job.raw_at, memory, bias == nullptr ? nullptr : bias + first_result, channels);
  __syncthreads();  // all results are there
  Value* const to = result + std::int64_t(first_result) * job.result_c;
  if (job.joined == 16) {
    store_window<Tile, 16>(job, memory, places, to, channels);
  } else if (job.joined == 8) {
    store_window<Tile, 8>(job, memory, places, to, channels);
  } else {
    store_window<Tile, Tile::kSize>(job, memory, places, to, channels);
  }
#endif
}

// A tile's index, and its kAcross, kAlong and kSplit.
#define UPFOLD_WINDOW_TILES(DO, Value) DO(0, Value, 1, 4, 4) DO(1, Value, 1, 2, 8) DO(2, Value, 2, 2, 4)

}  // namespace upfold::cuda
