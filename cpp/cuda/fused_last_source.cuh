// The source of the fused method whose channels are innermost, where it lies otherwise: packed[sample][depth][height][width]
// [channel], channels filled up to whole vectors of 16 bytes, and behind each row some pixels of zeros (`gap`).
//
// Or, of 16-bit values, in *squares* of two by two pixels, of which the first begins one row and one column ahead of the plane,
// where zeros are: packed[sample][depth][square along h][along w][16 channels each][row][column][channel].
#pragma once

#include "divide.cuh"
#include "exact.cuh"
#include "values.cuh"
#ifndef __CUDACC_RTC__
#include "../error.h"
#endif

namespace upfold::cuda {

struct LastSourceJob {
  Divisor channel_tiles;
  Divisor sample, width, height;  // sample: its pixels
  std::uint32_t pixels, gap;      // pixels: of all samples, which follow one another; gap: behind a row
  std::int32_t channels, vectors;
  bool paired;             // of 16-bit values: two pixels are one aligned word
  bool lines;              // pixels follow one another in every channel, whole aligned vectors of 16 bytes
  bool narrow = false;     // a pixel is one vector, of one thread
  bool parts = false;      // of floats: of each 16 channels the large parts of TF32, and behind them the small ones
  bool squares = false;    // channels are a multiple of 16, width and height are even
  std::int32_t steps = 1;  // of kSourcePixels, of a block: at most kSourceSteps
  std::int64_t n, c, d, h, w;
};

// A block turns some times kSourcePixels of as many channels as are 128 bytes: it reads rows of pixels and writes rows of
// channels.
constexpr int kSourceThreads = 256, kSourcePixels = 64, kSourceSteps = 2, kSourcePitch = 33;  // words of 4 bytes
constexpr int kSourceVectors = kSourceSteps * kSourcePixels * 8;                              // shared memory of a block

#ifndef __CUDACC_RTC__
constexpr std::int64_t kSourceBusyBlocks = 8 * 132;  // eight for each multiprocessor of a large device

// A sample of `pixels` pixels, rows of `width` and planes of `height` rows, to rows of `vectors` vectors: one step of a block.
inline LastSourceJob source_job(const Strides& s, std::int64_t channels, std::int64_t vectors, std::int64_t pixels,
                                std::int64_t width, std::int64_t height) {
  LastSourceJob job = {};
  job.channel_tiles = make_divisor(ceil_div(vectors, std::int64_t(8)));
  job.sample = make_divisor(pixels), job.width = make_divisor(width), job.height = make_divisor(height);
  job.pixels = std::uint32_t(pixels), job.gap = 0, job.channels = std::int32_t(channels), job.vectors = std::int32_t(vectors);
  job.n = s.n, job.c = s.c, job.d = s.d, job.h = s.h, job.w = s.w;
  job.paired = s.w == 1 && ((s.n | s.c | s.d | s.h | width) & 1) == 0;
  return job;
}

// Of a block, where single steps would make so many blocks: more where that leaves each multiprocessor some.
inline std::int32_t source_steps(std::int64_t blocks) { return blocks > kSourceSteps * kSourceBusyBlocks ? kSourceSteps : 1; }

// For launches over some of `samples` samples of elements of `size` bytes: whole lines where they can be read.
inline void quicken_source(LastSourceJob& job, const Strides& s, std::int64_t samples, std::int64_t size) {
  const std::int64_t pixels = job.sample.value, whole = 16 / size, width = job.width.value, height = job.height.value;
  const std::int64_t blocks = job.channel_tiles.value * ceil_div(samples * pixels, std::int64_t(kSourcePixels));
  const std::int64_t depth = pixels / (width * height);
  job.steps = source_steps(blocks);
  const bool flat = (s.w == 1 || width == 1) && (s.h == width || height == 1) && (s.d == width * height || depth == 1);
  job.lines = flat && (s.n | s.c | pixels) % whole == 0;
  job.narrow = job.vectors == 1;
}

// Of floats in two parts: a pixel has twice as many vectors.
inline void split_source(LastSourceJob& job) {
  job.parts = true, job.channel_tiles = make_divisor(ceil_div(std::int64_t(job.vectors), std::int64_t(2 * 8)));
}

// As a launch reads some samples from an address, and its blocks.
inline LastSourceJob source_at(LastSourceJob job, const void* from, std::int64_t samples) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(from);
  const std::int64_t pixels = samples * job.sample.value;
  require(pixels < std::int64_t(1) << 31, "pixels = ", pixels, "; a launch packs fewer than 2^31; lower the workspace cap");
  job.paired = job.paired && address % 4 == 0, job.lines = job.lines && address % 16 == 0;
  job.pixels = std::uint32_t(pixels);
  return job;
}
inline std::int64_t source_blocks(const LastSourceJob& job) {
  const std::int64_t of_block = job.narrow ? kSourceThreads : job.steps * kSourcePixels;
  return job.channel_tiles.value * ceil_div(std::int64_t(job.pixels), of_block);
}
#endif

// Where pixel number `pixel` lies in a channel.
UPFOLD_DEVICE std::int64_t source_pixel(const LastSourceJob& job, std::uint32_t pixel) {
  std::uint32_t rest = take(job.sample, pixel);
  const std::uint32_t w = take(job.width, rest), h = take(job.height, rest);
  return std::int64_t(pixel) * job.n + std::int64_t(rest) * job.d + h * job.h + w * job.w;
}

// Stores a vector of pixel number `pixel`. The last pixels of a row have as many of the zeros behind it.
UPFOLD_DEVICE void store_pixel(const LastSourceJob& job, uint4* packed, std::uint32_t pixel, std::int32_t vector,
                               const uint4& v) {
  std::uint32_t at = pixel;
  if (job.gap > 0) {
    std::uint32_t row = pixel;
    const std::uint32_t behind = job.width.value - 1 - take(job.width, row);  // pixels of the row
    at += row * job.gap;
    if (behind < job.gap) packed[std::int64_t(at + 2 * behind + 1) * job.vectors + vector] = {0, 0, 0, 0};
  }
  packed[std::int64_t(at) * job.vectors + vector] = v;
}

// The same in squares. Pixels at an edge have the zeros of their squares beyond it.
UPFOLD_DEVICE void store_in_square(const LastSourceJob& job, uint4* packed, std::uint32_t pixel, std::int32_t vector,
                                   const uint4& v) {
  std::uint32_t plane = pixel;
  const std::uint32_t w = take(job.width, plane) + 1, h = take(job.height, plane) + 1;
  const std::uint32_t width = job.width.value, height = job.height.value;
  const std::uint32_t square = (plane * (height / 2 + 1) + h / 2) * (width / 2 + 1) + w / 2;
  uint4* const to = packed + std::int64_t(square) * (4 * job.vectors) + vector / 2 * 8 + vector % 2;
  const std::uint32_t row = h % 2 * 4, column = w % 2 * 2;
  const bool at_row_edge = h == 1 || h == height, at_column_edge = w == 1 || w == width;
  to[row + column] = v;
  if (at_row_edge) to[(row ^ 4) + column] = {0, 0, 0, 0};
  if (at_column_edge) to[row + (column ^ 2)] = {0, 0, 0, 0};
  if (at_row_edge && at_column_edge) to[(row ^ 4) + (column ^ 2)] = {0, 0, 0, 0};
}

// The same of four floats, whose parts lie four vectors apart: `vector` counts those of whole values.
UPFOLD_DEVICE void store_parts(const LastSourceJob& job, uint4* packed, std::uint32_t pixel, std::int32_t vector,
                               const uint4& v) {
  const float floats[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
  std::uint32_t large[4], small[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    large[i] = __float_as_uint(large_part(floats[i])), small[i] = __float_as_uint(small_part(floats[i]));
  const std::int32_t to = vector / 4 * 8 + vector % 4;
  store_pixel(job, packed, pixel, to, {large[0], large[1], large[2], large[3]});
  store_pixel(job, packed, pixel, to + 4, {small[0], small[1], small[2], small[3]});
}
template <typename Bits, bool kSquares>
UPFOLD_DEVICE void store_values(const LastSourceJob& job, uint4* packed, std::uint32_t pixel, std::int32_t vector,
                                const uint4& v) {
  if constexpr (kSquares) return store_in_square(job, packed, pixel, vector, v);
  if (sizeof(Bits) == 4 && job.parts) return store_parts(job, packed, pixel, vector, v);
  store_pixel(job, packed, pixel, vector, v);
}

// A lane has one pixel in some channels, several times.
template <typename Bits>
UPFOLD_DEVICE void read_pixels(const LastSourceJob& job, const Bits* all, std::int32_t first_channel, std::uint32_t first_pixel,
                               std::uint32_t* words) {
  constexpr int kChannels = 128 / int(sizeof(Bits)), kWarps = kSourceThreads / 32;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
#pragma unroll
  for (int i = 0; i < kSourcePixels / 32; ++i) {
    const std::uint32_t pixel = first_pixel + i * 32 + lane;
    const Bits* const at = all + source_pixel(job, pixel);
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
UPFOLD_DEVICE void read_pairs(const LastSourceJob& job, const Bits* all, std::int32_t first_channel, std::uint32_t first_pixel,
                              std::uint32_t* words) {
  constexpr int kPairs = 32, kWarps = kSourceThreads / 32;
  static_assert(kSourcePixels == 64, "two for a lane");
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  const std::uint32_t pixel = first_pixel + 2 * lane;
  const Bits* const at = all + source_pixel(job, pixel);
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

// A lane has 16 bytes of pixels of one channel, or of two of 16-bit values, in all steps. Rows of 128 bytes of channels, vector v
// of those of lane p % 8 at v ^ p: neither their words nor their vectors meet in a bank.
template <typename Bits>
UPFOLD_DEVICE void read_lines(const LastSourceJob& job, const Bits* all, std::int32_t first_channel, std::uint32_t first_pixel,
                              std::uint32_t* words) {
  constexpr int kEach = 16 / int(sizeof(Bits)), kChannels = 4 / int(sizeof(Bits)), kPasses = kSourcePixels / (8 * kEach);
  static_assert(kChannels * kPasses == 2, "vectors of a lane in a step");
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, p = std::int32_t(threadIdx.x) % 8;
  const std::int32_t word = std::int32_t(threadIdx.x) % 32 / 8, channel = first_channel + (warp * 4 + word) * kChannels;
  uint4 values[kSourceSteps * 2];
  std::uint32_t n = first_pixel + p * kEach, in_sample = take(job.sample, n);
#pragma unroll
  for (int i = 0; i < kSourceSteps * 2; ++i) {
    const std::uint32_t pixel = first_pixel + i / kChannels * 8 * kEach + p * kEach;
    const std::int32_t from = channel + i % kChannels - first_channel;
    const bool exists = i / 2 < job.steps && pixel < job.pixels && first_channel + from < job.channels;
    if (i > 0 && i % kChannels == 0) {
      in_sample += 8 * kEach;
      if (in_sample >= job.sample.value) {  // another sample, mostly not asked for
        std::uint32_t further = in_sample;
        in_sample = take(job.sample, further), n += further;
      }
    }
    values[i] = exists ? *reinterpret_cast<const uint4*>(all + n * job.n + from * job.c + in_sample) : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int i = 0; i < kSourceSteps * 2; i += kChannels) {
    std::uint32_t* const rows = words + (i / kChannels * 8 + p) * kEach * 32 + (warp ^ p) * 4 + word;
    const std::uint32_t first[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
    if constexpr (kChannels == 1) {
#pragma unroll
      for (int e = 0; e < 4; ++e) rows[e * 32] = first[e];
    } else {
      const uint4& next = values[i + 1];
      const std::uint32_t second[4] = {next.x, next.y, next.z, next.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) rows[e * 32] = __byte_perm(first[e / 2], second[e / 2], e % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
}

// A thread has all channels of a pixel, as many as a vector holds or fewer: of three in 16 bits, innermost, blocks of 64 pixels
// had a value for each lane, and the gradient of the weight that packs 524,288 pixels so took 100 us instead of 76 (H200).
template <typename Bits>
UPFOLD_DEVICE void pack_narrow(const LastSourceJob& job, const Bits* all, std::uint32_t pixel, uint4* to) {
  constexpr int kEach = 16 / int(sizeof(Bits)), kInWord = 4 / int(sizeof(Bits));
  if (pixel >= job.pixels) return;
  const Bits* const at = all + source_pixel(job, pixel);
  std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i < job.channels) words[i / kInWord] |= std::uint32_t(at[i * job.c]) << (i % kInWord * 16);
  }
  store_pixel(job, to, pixel, 0, {words[0], words[1], words[2], words[3]});
}

// One block of as many as there are tiles of channels and of the pixels of all samples. `memory` is shared: kSourceVectors.
// kSquares: it packs squares.
template <typename Bits, bool kSquares = false>
UPFOLD_DEVICE void pack_source(const LastSourceJob& job, std::uint32_t block, const Bits* from, uint4* to, uint4* memory) {
  constexpr int kChannels = 128 / int(sizeof(Bits)), kEach = 16 / int(sizeof(Bits));
  // Vectors of a thread in a step; one at a time where each has divisions of its own, for which half as many blocks would run.
  constexpr int kStored = kSourcePixels * 8 / kSourceThreads, kTogether = kSquares ? 1 : kSourceSteps * kStored;
  std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(memory);
  static_assert(kSourcePixels * kSourcePitch <= kSourceVectors * 4, "rows of one step, wider ones");
  std::uint32_t rest = block;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, rest)) * kChannels;
  const std::uint32_t tile = rest, first_pixel = tile * std::uint32_t(job.steps * kSourcePixels);
  const Bits* const all = from + first_channel * job.c;
  const std::int32_t vector = std::int32_t(threadIdx.x) % 8, first_vector = first_channel / kChannels * (job.parts ? 16 : 8);
  uint4* const own = to + first_vector * (kSquares ? 4 : 1);
  const bool has_vector = first_vector + (job.parts ? vector / 4 * 8 : vector) < job.vectors;
  if (job.narrow) return pack_narrow(job, all, tile * kSourceThreads + threadIdx.x, own);
  if (job.lines) {
    read_lines(job, all, first_channel, first_pixel, words);
    __syncthreads();  // rows are complete
#pragma unroll(kTogether)
    for (int i = 0; i < kSourceSteps * kStored; ++i) {
      const std::int32_t pixel = (i * kSourceThreads + std::int32_t(threadIdx.x)) / 8;
      if (pixel >= job.steps * kSourcePixels || first_pixel + pixel >= job.pixels || !has_vector) continue;
      store_values<Bits, kSquares>(job, own, first_pixel + pixel, vector,
                                   *reinterpret_cast<const uint4*>(words + pixel * 32 + (vector ^ pixel / kEach % 8) * 4));
    }
    return;
  }
  for (std::int32_t step = 0; step < job.steps; ++step) {
    const std::uint32_t first = first_pixel + step * kSourcePixels;
    if (step > 0) __syncthreads();  // the rows before are written
    if (sizeof(Bits) == 2 && job.paired) {
      read_pairs(job, all, first_channel, first, words);
    } else {
      read_pixels(job, all, first_channel, first, words);
    }
    __syncthreads();  // rows are complete
#pragma unroll(kTogether)
    for (int i = 0; i < kStored; ++i) {
      const std::int32_t pixel = (i * kSourceThreads + std::int32_t(threadIdx.x)) / 8;
      if (first + pixel >= job.pixels || !has_vector) continue;
      const std::uint32_t* const v = words + pixel * kSourcePitch + vector * 4;
      store_values<Bits, kSquares>(job, own, first + pixel, vector, {v[0], v[1], v[2], v[3]});
    }
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kSourceThreads)
    fused_last_source_kernel(const __grid_constant__ LastSourceJob job, const Bits* __restrict__ from, uint4* __restrict__ to) {
  __shared__ uint4 memory[kSourceVectors];
  take_turn();
  pack_source(job, blockIdx.x, from, to, memory);
}

}  // namespace upfold::cuda
