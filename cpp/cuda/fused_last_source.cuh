// The source of the fused method whose channels are innermost, where it lies otherwise: packed[sample][depth][height][width]
// [channel], channels filled up to whole vectors of 16 bytes.
#pragma once

#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

struct LastSourceJob {
  Divisor channel_tiles, pixel_tiles;  // of a sample
  Divisor width, height;
  std::uint32_t pixels;  // of a sample
  std::int32_t channels, vectors;
  bool paired;  // of 16-bit values: two pixels are one aligned word
  std::int64_t n, c, d, h, w;
};

// A block turns kSourcePixels of as many channels as are 128 bytes: it reads rows of pixels and writes rows of channels.
constexpr int kSourceThreads = 256, kSourcePixels = 64, kSourcePitch = 33;  // words of 4 bytes

// Where pixel number `pixel` of a sample lies in a channel.
UPFOLD_DEVICE std::int64_t source_pixel(const LastSourceJob& job, std::uint32_t pixel) {
  const std::uint32_t w = take(job.width, pixel), h = take(job.height, pixel);
  return std::int64_t(pixel) * job.d + h * job.h + w * job.w;
}

// A lane has one pixel in some channels, several times.
template <typename Bits>
UPFOLD_DEVICE void read_pixels(const LastSourceJob& job, const Bits* sample, std::int32_t first_channel,
                               std::uint32_t first_pixel, std::uint32_t* words) {
  constexpr int kChannels = 128 / int(sizeof(Bits)), kWarps = kSourceThreads / 32;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < kSourcePixels / 32; ++i) {
    const std::uint32_t pixel = first_pixel + i * 32 + lane;
    const Bits* const at = sample + source_pixel(job, pixel);
    Bits values[kChannels / kWarps];
#pragma unroll
    for (int j = 0; j < kChannels / kWarps; ++j) {
      const std::int32_t channel = j * kWarps + warp;
      values[j] = pixel < job.pixels && first_channel + channel < job.channels ? at[channel * job.c] : Bits(0);
    }
    Bits* const row = reinterpret_cast<Bits*>(words + (i * 32 + lane) * kSourcePitch);
#pragma unroll
    for (int j = 0; j < kChannels / kWarps; ++j) row[j * kWarps + warp] = values[j];
  }
}

// A lane has two neighbouring pixels in some pairs of channels.
template <typename Bits>
UPFOLD_DEVICE void read_pairs(const LastSourceJob& job, const Bits* sample, std::int32_t first_channel, std::uint32_t first_pixel,
                              std::uint32_t* words) {
  constexpr int kPairs = 32, kWarps = kSourceThreads / 32;
  static_assert(kSourcePixels == 64, "two for a lane");
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  const std::uint32_t pixel = first_pixel + 2 * lane;
  const Bits* const at = sample + source_pixel(job, pixel);
  std::uint32_t values[2 * kPairs / kWarps];
#pragma unroll
  for (int j = 0; j < 2 * kPairs / kWarps; ++j) {
    const std::int32_t channel = 2 * (j / 2 * kWarps + warp) + j % 2;
    const bool exists = pixel < job.pixels && first_channel + channel < job.channels;
    values[j] = exists ? *reinterpret_cast<const std::uint32_t*>(at + channel * job.c) : 0;
  }
#pragma unroll
  for (int j = 0; j < 2 * kPairs / kWarps; j += 2) {
    std::uint32_t* const row = words + 2 * lane * kSourcePitch + j / 2 * kWarps + warp;
    row[0] = __byte_perm(values[j], values[j + 1], 0x5410), row[kSourcePitch] = __byte_perm(values[j], values[j + 1], 0x7632);
  }
}

// One block of as many as there are samples, tiles of channels and tiles of pixels.
template <typename Bits>
UPFOLD_DEVICE void pack_source(const LastSourceJob& job, std::uint32_t block, const Bits* from, uint4* to) {
  constexpr int kChannels = 128 / int(sizeof(Bits));
  __shared__ std::uint32_t words[kSourcePixels * kSourcePitch];
  std::uint32_t rest = block;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, rest)) * kChannels;
  const std::uint32_t first_pixel = take(job.pixel_tiles, rest) * kSourcePixels;
  const Bits* const sample = from + std::int64_t(rest) * job.n + first_channel * job.c;
  if (sizeof(Bits) == 2 && job.paired) {
    read_pairs(job, sample, first_channel, first_pixel, words);
  } else {
    read_pixels(job, sample, first_channel, first_pixel, words);
  }
  __syncthreads();  // rows are complete
  uint4* const own = to + (std::int64_t(rest) * job.pixels + first_pixel) * job.vectors + first_channel / kChannels * 8;
#pragma unroll
  for (int i = 0; i < kSourcePixels * 8 / kSourceThreads; ++i) {
    const std::int32_t number = i * kSourceThreads + std::int32_t(threadIdx.x), pixel = number / 8, vector = number % 8;
    if (first_pixel + pixel >= job.pixels || first_channel / kChannels * 8 + vector >= job.vectors) continue;
    const std::uint32_t* const v = words + pixel * kSourcePitch + vector * 4;
    own[std::int64_t(pixel) * job.vectors + vector] = {v[0], v[1], v[2], v[3]};
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kSourceThreads)
    fused_last_source_kernel(const __grid_constant__ LastSourceJob job, const Bits* __restrict__ from, uint4* __restrict__ to) {
  pack_source(job, blockIdx.x, from, to);
}

}  // namespace upfold::cuda
