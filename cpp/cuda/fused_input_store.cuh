// Around the products of the fused gradient of the input: the weight laid out as blocks read it, sums stored, and the sum of a
// split reduction.
#pragma once

#include "fused_input.cuh"
#include "mma.cuh"
#include "part_sums.cuh"

namespace upfold::cuda {

// Offset of pixel `number` of a box in x, without the channel, or -1.
UPFOLD_DEVICE std::int64_t input_offset(const InputJob& job, const InputPlace& place, std::int32_t number) {
  const InputPixel pixel = input_pixel(job, number);
  const std::int32_t n = place.n + pixel.n;
  bool live = std::uint32_t(pixel.n) < job.tile_n.value && n < job.batch;
  if (job.numbered) {
    const std::int32_t number_of_row = place.first[1] + pixel.at[1];
    live = live && number_of_row < job.axis[1].in;
    const InputRow row = input_row(job, std::uint32_t(number_of_row));
    return live ? row.n * job.x_n + row.d * job.x_axis[0] + row.h * job.x_axis[1] + pixel.at[2] * job.x_axis[2] : -1;
  }
  std::int64_t offset = n * job.x_n;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::int32_t at = place.first[i] + pixel.at[i];
    live = live && at < job.axis[i].in;
    offset += at * job.x_axis[i];
  }
  return live ? offset : -1;
}

// A thread's sums of product i, from column tile kFirst on: columns 2 * (lane % 4) and the next one of two neighbouring pixels.
template <typename Value, typename Shape, int kCount>
UPFOLD_DEVICE void store_input(const InputJob& job, const InputPlace& place, Value* x, int i, int first_column,
                               const float (&sums)[kCount][4]) {
  const std::int32_t thread = std::int32_t(threadIdx.x), number = input_pixel_of<Shape>(thread, i);
  const std::int32_t channel = place.channel_tile * Shape::kChannels + first_column * 8 + thread % 4 * 2;
  const std::int32_t left = job.ic - channel;
  Value* const base = x + (std::int64_t(place.group) * job.ic + channel) * job.x_c;
  if (job.wide) {
    const std::int64_t offset = input_offset(job, place, number);
    if (offset < 0) return;
    Value* at = base + offset;
#pragma unroll
    for (int j = 0; j < kCount; ++j, at += 8 * job.x_c) {
      if (8 * j < left) store_neighbours(at, sums[j][0], sums[j][2]);
      if (8 * j + 1 < left) store_neighbours(at + job.x_c, sums[j][1], sums[j][3]);
    }
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t offset = input_offset(job, place, number + half);
    if (offset < 0) continue;
    Value* at = base + offset;
#pragma unroll
    for (int j = 0; j < kCount; ++j, at += 8 * job.x_c) {
      if (8 * j < left) *at = Narrow<Value>::from(sums[j][2 * half]);
      if (8 * j + 1 < left) at[job.x_c] = Narrow<Value>::from(sums[j][2 * half + 1]);
    }
  }
}

#if UPFOLD_WARPGROUPS
// The results of some channels and the 64 pixels of a product; what lanes write and read at a time lies in different banks.
struct InputStaging {
  static constexpr int kChannels = 16, kPitch = 64 + 4, kFloats = kChannels * kPitch;
  static_assert(4 * 4 * kFloats <= kInputStagingBytes, "two for each of two warpgroups");
};

// All sums of a warpgroup: eight lanes hold 64 bytes of a channel, so that these are put together in shared memory and a warp
// stores 64 pixels of a channel at a time.
template <typename Tile>
__device__ __forceinline__ void store_staged(const InputJob& job, const InputPlace& place, float* x, float* staging,
                                             const float (&sums)[Tile::kM][Tile::kN8][4]) {
  using Staging = InputStaging;
  constexpr int kTurns = Tile::kChannels / Staging::kChannels;
  static_assert(Tile::kM * kTurns % 2 == 0, "the next tile begins with the first buffer");
  const std::int32_t group = std::int32_t(threadIdx.x) / 128, warp = std::int32_t(threadIdx.x) / 32 % 4;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, left = job.ic - place.channel_tile * Tile::kChannels;
  float* const own = staging + group * 2 * Staging::kFloats;
  const std::int32_t to = lane % 4 * 2 * Staging::kPitch + (warp * 8 + lane / 4) * 2, from = warp * Staging::kPitch + lane * 2;
#pragma unroll
  for (int i = 0; i < Tile::kM; ++i) {
    const std::int32_t number = group * 64 * Tile::kM + i * 64 + lane * 2;
    const std::int64_t first = input_offset(job, place, number), second = job.wide ? first : input_offset(job, place, number + 1);
    float* at = x + (std::int64_t(place.group) * job.ic + place.channel_tile * Tile::kChannels + warp) * job.x_c;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      float* const buffer = own + (i * kTurns + turn) % 2 * Staging::kFloats;
#pragma unroll
      for (int j = 0; j < Staging::kChannels / 8; ++j) {
        const float(&v)[4] = sums[i][turn * (Staging::kChannels / 8) + j];
        float* const piece = buffer + to + j * 8 * Staging::kPitch;
        store_neighbours(piece, v[0], v[2]);
        store_neighbours(piece + Staging::kPitch, v[1], v[3]);
      }
      meet<128>(group + 1);  // the pieces are there, and nobody reads the other buffer any more
#pragma unroll
      for (int c = 0; c < Staging::kChannels / 4; ++c, at += 4 * job.x_c) {
        if (turn * Staging::kChannels + 4 * c + warp >= left) continue;
        const float2 pair = *reinterpret_cast<const float2*>(buffer + from + 4 * c * Staging::kPitch);
        if (job.wide) {
          if (first >= 0) *reinterpret_cast<float2*>(at + first) = pair;
        } else {
          if (first >= 0) at[first] = pair.x;
          if (second >= 0) at[second] = pair.y;
        }
      }
    }
  }
}

// Of a split reduction, in the block's only tile: it puts its sums where y and the weights were, adds some of all blocks of its
// cluster up, in their order, and stores those.
template <typename Value, typename Tile>
__device__ __forceinline__ void add_together(const InputJob& job, const InputPlace& place, uint4* memory,
                                             const float (&sums)[Tile::kM][Tile::kN8][4], Value* x) {
  constexpr int kColumns = Tile::kM * Tile::kN8;
  const std::uint32_t parts = job.splits.value, rank = blockIdx.x % parts;
  meet<1, Tile::kThreads>();  // all products have read what the sums overwrite
  float4* const own = reinterpret_cast<float4*>(memory) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float(&v)[4] = sums[i / Tile::kN8][i % Tile::kN8];
    own[i * Tile::kThreads] = {v[0], v[1], v[2], v[3]};
  }
  meet_cluster();  // the sums of all are there
  const std::uint32_t first = shared_address(own);
#pragma unroll 4
  for (std::uint32_t column = rank; column < kColumns; column += parts) {
    float sum[1][4] = {};
    for (std::uint32_t block = 0; block < parts; ++block) {
      const float4 v = load_of_block(first + column * std::uint32_t(Tile::kThreads * 16), block);
      sum[0][0] += v.x, sum[0][1] += v.y, sum[0][2] += v.z, sum[0][3] += v.w;
    }
    store_input<Value, Tile>(job, place, x, int(column / Tile::kN8), int(column % Tile::kN8), sum);
  }
  leave_cluster();
  await_cluster();  // a block stays while others read its sums
}
#endif

// A block sums the parts of one column tile of one product of a tile, in their order, and stores it.
template <typename Value, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 3)
    fused_input_reduce_kernel(const __grid_constant__ InputJob job, const float4* __restrict__ partial, Value* __restrict__ x) {
  constexpr std::uint32_t kColumns = Shape::kM * Shape::kN8, kVectors = kColumns * Shape::kThreads;
  const std::uint32_t sum = blockIdx.x % kColumns, first = blockIdx.x / kColumns * job.splits.value;
  const InputPlace place = input_place(job, job.whole + first);
  const float4* from[1] = {partial + std::int64_t(first) * kVectors + sum * Shape::kThreads + threadIdx.x};
  float4 total[1] = {};
  take_turn();  // the sums of all parts
  add_parts(total, from, kVectors, std::int32_t(job.splits.value), true);
  const float sums[1][4] = {{total[0].x, total[0].y, total[0].z, total[0].w}};
  store_input<Value, Shape>(job, place, x, int(sum / Shape::kN8), int(sum % Shape::kN8), sums);
}

UPFOLD_DEVICE std::uint32_t input_word(float v, float) { return to_tf32(v); }
template <typename Value>
UPFOLD_DEVICE std::uint32_t input_word(Value low, Value high) {
  return *reinterpret_cast<const std::uint16_t*>(&low) | std::uint32_t(*reinterpret_cast<const std::uint16_t*>(&high)) << 16;
}

// Elements `first` + 0 to `count` - 1 of a row of w, numbered by output channels and taps, by the lanes of a warp, several at a
// time. Beyond the row's last, and where it does not exist, zeros are stored; addresses stay within a row that exists.
template <bool kRun, typename Value>
UPFOLD_DEVICE void read_input_weights(const InputJob& job, const Value* __restrict__ row, std::int32_t first, std::int32_t count,
                                      bool exists, Value* to) {
  constexpr int kBatch = kRun ? 8 : 4;
  const std::int32_t end = job.oc * std::int32_t(job.taps.value);
  for (std::int32_t i = std::int32_t(threadIdx.x) % 32; i < count; i += 32 * kBatch) {
    Value batch[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const std::int32_t last = (count < end - first ? count : end - first) - 1, in_count = i + 32 * j < last ? i + 32 * j : last;
      std::int64_t at = first + in_count;
      if constexpr (!kRun) {
        std::uint32_t oc = std::uint32_t(first + in_count), tap = take(job.taps, oc);
        at = oc * job.w_oc + take(job.kernel_w, tap) * job.w_axis[2];
        at += take(job.kernel_h, tap) * job.w_axis[1] + tap * job.w_axis[0];
      }
      batch[j] = row[at];
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const std::int32_t number = i + 32 * j;
      if (number < count) to[number] = exists && first + number < end ? batch[j] : Narrow<Value>::from(0.0f);
    }
  }
}

// packed[group][channel_tile][chunk][step][group of 8 channels][2 vectors][channel][16 bytes]: a block lays out some chunks of
// eight input channels, whose taps lie side by side in w, by way of shared memory, `pitch` elements for each.
template <typename Value>
__global__ void __launch_bounds__(256, 4)
    fused_input_pack_kernel(const __grid_constant__ InputJob job, std::int32_t groups_of_8, std::int32_t pitch,
                            const Value* __restrict__ w, uint4* __restrict__ packed) {
  take_turn();
  constexpr int kEntries = 4 / int(sizeof(Value));
  extern __shared__ uint4 memory[];
  Value* const values = reinterpret_cast<Value*>(memory);
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_chunk = std::int32_t(take(job.pack_blocks, rest)) * job.pack_chunks;
  const std::int32_t left = job.chunks - first_chunk, chunks = left < job.pack_chunks ? left : job.pack_chunks;
  const std::int32_t own = std::int32_t(rest) % groups_of_8;
  rest /= std::uint32_t(groups_of_8);
  const std::int32_t channel_tile = std::int32_t(rest % job.channel_tiles.value);
  const std::int32_t group = std::int32_t(rest / job.channel_tiles.value), first_channel = (channel_tile * groups_of_8 + own) * 8;
  const std::int32_t run = job.chunk_channels * std::int32_t(job.taps.value);
  {
    const std::int32_t row = std::int32_t(threadIdx.x) / 32, ic = first_channel + row;
    const bool exists = ic < job.ic;
    const Value* const from = w + (std::int64_t(group) * job.ic + (exists ? ic : 0)) * job.w_ic;
    if (job.run) {
      read_input_weights<true>(job, from, first_chunk * run, chunks * run, exists, values + row * pitch);
    } else {
      read_input_weights<false>(job, from, first_chunk * run, chunks * run, exists, values + row * pitch);
    }
  }
  __syncthreads();  // the taps are there
  uint4* const to = packed + ((std::int64_t(rest) * job.chunks + first_chunk) * job.steps * groups_of_8 + own) * 16;
  const std::int32_t taps = std::int32_t(job.taps.value);
  for (std::int32_t i = std::int32_t(threadIdx.x); i < chunks * job.steps * 16; i += 256) {
    std::uint32_t chunk = std::uint32_t(i) / 16;
    const std::int32_t row = i % 8, vector = i / 8 % 2, step = std::int32_t(take(job.pack_steps, chunk));
    const InputEntry entry = job.sources[step * kEntries + (kEntries == 2 ? vector : 0)];
    const Value* const from = values + row * pitch + std::int32_t(chunk) * run;
    const auto tap_of = [&](std::uint32_t source) {  // of the first of its four channels
      std::uint32_t quad = source;
      const std::uint32_t tap = take(job.taps, quad);
      return from + std::int32_t(quad) * 4 * taps + std::int32_t(tap);
    };
    const Value* const a = tap_of(kEntries == 2 || vector == 0 ? entry.a : entry.b);
    const Value* const b = kEntries == 2 ? tap_of(entry.b) : a;
    to[std::int64_t(i / 16) * (16 * groups_of_8) + i % 16] = {input_word(a[0], b[0]), input_word(a[taps], b[taps]),
                                                              input_word(a[2 * taps], b[2 * taps]),
                                                              input_word(a[3 * taps], b[3 * taps])};
  }
}

}  // namespace upfold::cuda
