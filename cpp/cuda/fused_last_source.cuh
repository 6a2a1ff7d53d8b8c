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
  std::int64_t n, c, d, h, w;
};

// A block turns kSourcePixels of as many channels as are 128 bytes: it reads rows of pixels and writes rows of channels.
constexpr int kSourceThreads = 256, kSourcePixels = 64, kSourcePitch = 33;  // words of 4 bytes

template <typename Bits>
__global__ void __launch_bounds__(kSourceThreads)
    fused_last_source_kernel(const __grid_constant__ LastSourceJob job, const Bits* __restrict__ from, uint4* __restrict__ to) {
  constexpr int kChannels = 128 / int(sizeof(Bits)), kWarps = kSourceThreads / 32;
  __shared__ std::uint32_t words[kSourcePixels * kSourcePitch];
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, rest)) * kChannels;
  const std::uint32_t first_pixel = take(job.pixel_tiles, rest) * kSourcePixels;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  const Bits* const sample = from + std::int64_t(rest) * job.n + first_channel * job.c;
#pragma unroll
  for (int i = 0; i < kSourcePixels / 32; ++i) {
    const std::uint32_t pixel = first_pixel + i * 32 + lane;
    std::uint32_t d = pixel;
    const std::uint32_t w = take(job.width, d), h = take(job.height, d);
    const Bits* const at = sample + (d * job.d + h * job.h + w * job.w);
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

}  // namespace upfold::cuda
