// [sample][pixel][channel] to [sample][channel][pixel]. A block takes a run of pixels and some channels, all where they are few:
// its threads read neighbouring elements, whole vectors of 16 bytes where pixels follow one another, turn them round in shared
// memory, and write runs of each channel's pixels, 8 bytes at a time where rows allow it.
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256, kAtATime = 8, kVectorsAtATime = 2;  // loads of a thread that are in flight

struct ToPlanesJob {
  Divisor pixel_tiles, channel_tiles;  // of a sample
  Divisor tile_channels, tile_writes;  // writes of a channel's pixels in a tile
  std::int32_t tile_pixels, pitch;     // elements between the channels of a tile, in shared memory
  std::int32_t channels, pixels;
  std::int64_t sample, step;
};

// Of 4 bytes or more: complex numbers are aligned as their parts are.
template <int kWords>
struct Words {
  std::uint32_t v[kWords];
};

// What a block of few channels reads, whose pixels follow one another: vectors, and elements behind the last one.
template <typename Element>
UPFOLD_DEVICE void read_vectors(const ToPlanesJob& job, const Element* from, std::int32_t own, Element* tile) {
  constexpr std::int32_t kEach = 16 / std::int32_t(sizeof(Element));
  const std::int32_t count = own * job.channels, vectors = count / kEach;
  const auto put = [&](std::uint32_t first, const Element* values, std::int32_t some) {
    std::uint32_t pixel = first;
    std::int32_t c = std::int32_t(take(job.tile_channels, pixel));
#pragma unroll
    for (std::int32_t i = 0; i < kEach; ++i) {
      if (i < some) tile[c * job.pitch + std::int32_t(pixel)] = values[i];
      if (++c == job.channels) c = 0, ++pixel;
    }
  };
  for (std::int32_t begin = std::int32_t(threadIdx.x); begin < vectors; begin += kThreads * kVectorsAtATime) {
    uint4 read[kVectorsAtATime];
#pragma unroll
    for (int i = 0; i < kVectorsAtATime; ++i)
      if (begin + i * kThreads < vectors) read[i] = reinterpret_cast<const uint4*>(from)[begin + i * kThreads];
#pragma unroll
    for (int i = 0; i < kVectorsAtATime; ++i)
      if (begin + i * kThreads < vectors)
        put(std::uint32_t(begin + i * kThreads) * kEach, reinterpret_cast<const Element*>(&read[i]), kEach);
  }
  const std::int32_t left = vectors * kEach + std::int32_t(threadIdx.x);
  if (left < count) put(std::uint32_t(left), from + left, 1);
}

// Elements that are written at a time make a word or two, or are one.
template <typename Element, int kTogether, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    to_planes_kernel(const ToPlanesJob job, const Element* __restrict__ from, Element* __restrict__ to) {
  let_next_begin();
  extern __shared__ uint4 memory[];
  Element* const tile = reinterpret_cast<Element*>(memory);
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first = std::int32_t(take(job.pixel_tiles, rest)) * job.tile_pixels;
  const std::int32_t channel = std::int32_t(take(job.channel_tiles, rest) * job.tile_channels.value);
  const std::int32_t pixels = job.pixels - first, channels = job.channels - channel;  // from here on
  const std::int32_t own = pixels < job.tile_pixels ? pixels : job.tile_pixels;
  from += std::int64_t(rest) * job.sample + first * job.step + channel;
  if constexpr (kVectors) {
    read_vectors(job, from, own, tile);
  } else {
    const std::uint32_t count = std::uint32_t(own) * job.tile_channels.value;
    for (std::uint32_t begin = threadIdx.x; begin < count; begin += kThreads * kAtATime) {
      Element values[kAtATime];
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        std::uint32_t pixel = begin + std::uint32_t(i) * kThreads;
        const bool inside = pixel < count;
        const std::int32_t c = std::int32_t(take(job.tile_channels, pixel));
        if (inside && c < channels) values[i] = from[std::int64_t(pixel) * job.step + c];
      }
#pragma unroll
      for (int i = 0; i < kAtATime; ++i) {
        std::uint32_t pixel = begin + std::uint32_t(i) * kThreads;
        const bool inside = pixel < count;
        const std::int32_t c = std::int32_t(take(job.tile_channels, pixel));
        if (inside && c < channels) tile[c * job.pitch + std::int32_t(pixel)] = values[i];
      }
    }
  }
  __syncthreads();  // the tile is complete
  to += (std::int64_t(rest) * job.channels + channel) * job.pixels + first;
  const std::int32_t mine = channels < std::int32_t(job.tile_channels.value) ? channels : std::int32_t(job.tile_channels.value);
  for (std::uint32_t i = threadIdx.x; i < std::uint32_t(mine) * job.tile_writes.value; i += kThreads) {
    std::uint32_t c = i;
    const std::int32_t pixel = std::int32_t(take(job.tile_writes, c)) * kTogether;
    if (pixel >= own) continue;
    const Element* const source = tile + std::int32_t(c) * job.pitch + pixel;
    Element* const target = to + std::int64_t(c) * job.pixels + pixel;
    constexpr int kBytes = kTogether * int(sizeof(Element));
    if constexpr (kTogether == 1) {
      *target = *source;
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<std::uint32_t*>(target) = *reinterpret_cast<const std::uint32_t*>(source);
    } else {  // rows of the tile begin at words
      const auto words = reinterpret_cast<const std::uint32_t*>(source);
      *reinterpret_cast<uint2*>(target) = {words[0], words[1]};
    }
  }
  await_previous();  // a copy that runs beside this one: what follows waits for this one alone
}

#define UPFOLD_PLANES_BY_ELEMENT(DO) DO(std::uint16_t, 1) DO(std::uint16_t, 2) DO(Words<1>, 1) DO(Words<2>, 1) DO(Words<4>, 1)
#define UPFOLD_PLANES_BY_VECTOR(DO) DO(std::uint16_t, 1) DO(std::uint16_t, 2) DO(std::uint16_t, 4) DO(Words<1>, 1) DO(Words<1>, 2)
#define UPFOLD_INSTANTIATE(Element, kTogether) \
  template __global__ void to_planes_kernel<Element, kTogether, false>(const ToPlanesJob, const Element*, Element*);
UPFOLD_PLANES_BY_ELEMENT(UPFOLD_INSTANTIATE)
#undef UPFOLD_INSTANTIATE
#define UPFOLD_INSTANTIATE(Element, kTogether) \
  template __global__ void to_planes_kernel<Element, kTogether, true>(const ToPlanesJob, const Element*, Element*);
UPFOLD_PLANES_BY_VECTOR(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "launch.cuh"
#include "pixel_matrix.h"
#include "to_planes.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;
constexpr std::int64_t kTileElements = 4096, kMostTileChannels = 64;

std::int64_t tile_channels_of(std::int64_t channels) { return ceil_div(channels, ceil_div(channels, kMostTileChannels)); }
std::int64_t tile_pixels_of(std::int64_t channels, std::int64_t element) {
  const std::int64_t elements = element > 4 ? kTileElements * 4 / element : kTileElements;
  return std::max<std::int64_t>(elements / tile_channels_of(channels) / 64, 1) * 64;
}
std::int64_t blocks_of(const Pixels& p, std::int64_t element) {
  return p.samples * ceil_div(p.pixels, tile_pixels_of(p.channels, element)) * ceil_div(p.channels, tile_channels_of(p.channels));
}

// Whether whole vectors can be read: all channels of a pixel are in a tile, and pixels follow one another.
bool reads_vectors(const Pixels& p, std::int64_t element, const void* from) {
  const bool dense = p.step == p.channels && p.channels <= kMostTileChannels && element <= 4;
  return dense && reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && (p.samples == 1 || p.sample * element % 16 == 0);
}

template <typename Element, int kTogether, bool kVectors>
void launch_planes(const Launch& launch, const Pixels& p, const void* from, void* to, bool beside) {
  constexpr int kSize = int(sizeof(Element));
  const std::int64_t channels = tile_channels_of(p.channels), pixels = tile_pixels_of(p.channels, kSize);
  ToPlanesJob job{};
  job.pixel_tiles = make_divisor(ceil_div(p.pixels, pixels)), job.channel_tiles = make_divisor(ceil_div(p.channels, channels));
  job.tile_channels = make_divisor(channels), job.tile_writes = make_divisor(pixels / kTogether);
  // Neighbouring channels lie in neighbouring banks: an odd number of words apart.
  job.tile_pixels = std::int32_t(pixels), job.pitch = std::int32_t(pixels + (kSize == 2 ? 2 : 1));
  job.channels = std::int32_t(p.channels), job.pixels = std::int32_t(p.pixels), job.sample = p.sample, job.step = p.step;
  const std::int64_t bytes = channels * job.pitch * kSize;
  launch_grid("to_planes", to_planes_kernel<Element, kTogether, kVectors>, launch,
              Grid{unsigned(blocks_of(p, kSize)), kThreads, int(bytes), beside}, job, static_cast<const Element*>(from),
              static_cast<Element*>(to));
}

}  // namespace

Pixels innermost_pixels(const Strides& strides, std::int64_t samples, std::int64_t channels, std::int64_t d, std::int64_t h,
                        std::int64_t w) {
  const PixelMatrix matrix = pixel_matrix(strides, channels, d, h, w);
  const Pixels p{samples, channels, d * h * w, matrix.sample, matrix.step};
  if (!matrix.regular || !matrix.channels_fastest || p.pixels <= 1) return {};
  if (p.channels >= kMost || p.pixels >= kMost || p.samples >= kMost) return {};
  return p.samples * p.pixels < kMost && blocks_of(p, 16) < kMost ? p : Pixels{};
}

std::int64_t planes_bytes(const Pixels& p, Dtype dtype) {
  return ceil_div(p.samples * p.channels * p.pixels * element_bytes(dtype), std::int64_t(256)) * 256;
}

Strides plane_strides(const Pixels& p, std::int64_t h, std::int64_t w) { return {p.channels * p.pixels, p.pixels, h * w, w, 1}; }

void to_planes(const Launch& launch, Dtype dtype, const Pixels& p, const void* from, void* to, bool beside) {
  if (p.samples * p.pixels * p.channels == 0) return;
  const std::int64_t element = element_bytes(dtype);
  const bool vectors = reads_vectors(p, element, from), two = p.pixels % 2 == 0;
  switch (element) {
    case 2:
      if (vectors && p.pixels % 4 == 0) return launch_planes<std::uint16_t, 4, true>(launch, p, from, to, beside);
      if (vectors && two) return launch_planes<std::uint16_t, 2, true>(launch, p, from, to, beside);
      if (vectors) return launch_planes<std::uint16_t, 1, true>(launch, p, from, to, beside);
      return two ? launch_planes<std::uint16_t, 2, false>(launch, p, from, to, beside)
                 : launch_planes<std::uint16_t, 1, false>(launch, p, from, to, beside);
    case 4:
      if (vectors && two) return launch_planes<Words<1>, 2, true>(launch, p, from, to, beside);
      return vectors ? launch_planes<Words<1>, 1, true>(launch, p, from, to, beside)
                     : launch_planes<Words<1>, 1, false>(launch, p, from, to, beside);
    case 8:
      return launch_planes<Words<2>, 1, false>(launch, p, from, to, beside);
    default:
      return launch_planes<Words<4>, 1, false>(launch, p, from, to, beside);
  }
}

}  // namespace upfold::cuda
#endif
