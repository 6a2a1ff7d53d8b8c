// The packing of weights through shared memory, where what lies together in w is not what packed rows hold: 128 bytes of channels
// of the source for each channel of the result and tap. Whole lines are read and written so, where threads that take a vector
// each write half sectors.
#pragma once

#include "fused_last_pack_job.cuh"

namespace upfold::cuda {

// Shared memory of a block: what lies together of 128 bytes of channels, or rows of w, and behind them where a row of each
// channel of the result and tap is packed, which is found once, not by each of the lanes that store it.
constexpr int kLastPackLines = 1152, kLastPackRows = 160, kLastPackVectors = kLastPackLines + kLastPackRows / 4;
static_assert(kLastPackLines / 8 <= kLastPackRows && kSourceSteps * kSourcePixels <= kLastPackRows &&
                  kLastPackRows <= kLastPackThreads,
              "a thread for each row");

// Of what lies together for each channel of the source, number `number`. Behind those of w are zeros of channels that no result
// has.
template <typename Value>
UPFOLD_DEVICE std::uint32_t row_of_result(const LastPackJob& job, std::uint32_t group, std::uint32_t number) {
  if (number >= std::uint32_t(job.lined)) return kNoRow;
  const std::uint32_t channels = job.channels.value, real = job.lines.pixels;
  const bool exists = number < real;
  std::uint32_t channel = exists ? number : number - real, tap;
  if (exists && job.w_result == 1) {
    tap = channel, channel = take(job.channels, tap);
  } else {
    tap = take(job.all_taps, channel), channel += exists ? 0 : channels;
  }
  if (job.runs.step.value > 0) {
    std::uint32_t in_row = tap;
    const std::uint32_t phase = take(job.kernel_w, in_row) % job.runs.step.value;
    const std::uint32_t tile = channel / std::uint32_t(job.runs.channels), own = channel % std::uint32_t(job.runs.channels);
    const std::int32_t column = column_of_run(job.runs, std::int32_t(own), std::int32_t(phase));
    return packed_row<Value>(job, group, tile * job.columns.value + std::uint32_t(column), job.pair_of[tap - phase]);
  }
  if (job.flat) return packed_row<Value>(job, group, exists ? tap * channels + channel : number, 0);
  const std::uint32_t pair = job.pair_of[tap];
  return pair == kNoPair ? kNoRow : packed_row<Value>(job, group, channel, pair);
}

// Channels of the result and taps lie together for each channel of the source: the forward. A block turns some of them.
template <typename Value>
UPFOLD_DEVICE void pack_by_result(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed, uint4* memory) {
  using Bits = Word<sizeof(Value)>;
  constexpr int kChannels = 128 / int(sizeof(Value)), kEach = 16 / int(sizeof(Value));
  std::uint32_t rest = block;
  const std::uint32_t channel_block = take(job.channel_blocks, rest), part = take(job.parts, rest), group = rest;
  const std::uint32_t first = part * std::uint32_t(job.lines.steps * kSourcePixels);
  const std::int32_t first_channel = std::int32_t(channel_block) * kChannels;
  const Bits* const from = reinterpret_cast<const Bits*>(w) + group * job.w_group + first_channel * job.w_source;
  std::uint32_t* const rows = reinterpret_cast<std::uint32_t*>(memory + kLastPackLines);
  const std::int32_t own = std::int32_t(threadIdx.x), entries = job.lines.steps * kSourcePixels;
  if (own < entries) rows[own] = row_of_result<Value>(job, group, first + std::uint32_t(own));
  read_lines(job.lines, from, first_channel, first, reinterpret_cast<std::uint32_t*>(memory));
  __syncthreads();  // rows are complete
  const std::uint32_t vector = threadIdx.x % 8;
  const LastPackedVector place = packed_vector(job, channel_block * 8 + vector);
#pragma unroll
  for (int i = 0; i < kSourceSteps * kSourcePixels * 8 / kLastPackThreads; ++i) {
    const std::int32_t entry = (i * kLastPackThreads + own) / 8;
    if (entry >= entries) break;
    const std::uint32_t to = rows[entry];
    if (to == kNoRow || !place.exists) continue;
    const uint4* const row = memory + entry * 8;
    const std::uint32_t swizzle = std::uint32_t(entry / kEach % 8);
    uint4 values;
    if (job.spread) {
      const uint4 even = row[(vector & ~1u) ^ swizzle], odd = row[(vector | 1u) ^ swizzle];
      values = vector % 2 == 0 ? uint4{even.x, even.z, odd.x, odd.z} : uint4{even.y, even.w, odd.y, odd.w};
    } else {
      values = row[vector ^ swizzle];
    }
    store_weights<Value>(job, to, place, values, packed);
  }
}

// Channels of the source and taps lie together for each channel of the result: the gradient of the input of a contiguous weight.
// A block has some rows, each of all taps of 128 bytes of channels; behind those of a vector's channels is one that nobody has,
// so that lanes of neighbouring vectors do not meet in a bank.
template <typename Value>
UPFOLD_DEVICE void pack_by_reduction(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed, uint4* memory) {
  constexpr int kChannels = 128 / int(sizeof(Value)), kEach = 16 / int(sizeof(Value));
  std::uint32_t rest = block;
  const std::uint32_t channel_block = take(job.channel_blocks, rest), part = take(job.parts, rest), group = rest;
  const std::int32_t taps = std::int32_t(job.all_taps.value), first_row = std::int32_t(part) * job.rows;
  const std::int32_t pitch = 8 * (taps + 1), first_channel = std::int32_t(channel_block) * kChannels;
  const std::int32_t left = (job.source_channels - first_channel) * taps;  // values of a row from here on
  const Value* const from = w + group * job.w_group + std::int64_t(first_channel) * job.w_source;
  const std::int32_t read = job.rows * 8 * taps;
#pragma unroll 4
  for (std::int32_t i = std::int32_t(threadIdx.x); i < read; i += kLastPackThreads) {
    std::uint32_t row = std::uint32_t(i);
    const std::int32_t vector = std::int32_t(take(job.row_vectors, row)), column = first_row + std::int32_t(row);
    const bool exists = column < job.result_channels && vector * kEach < left;
    memory[std::int32_t(row) * pitch + vector + std::int32_t(divide(job.all_taps, std::uint32_t(vector)))] =
        exists ? *reinterpret_cast<const uint4*>(from + column * job.w_result + vector * kEach) : uint4{0, 0, 0, 0};
  }
  std::uint32_t* const rows = reinterpret_cast<std::uint32_t*>(memory + kLastPackLines);
  const std::int32_t own = std::int32_t(threadIdx.x);
  if (own < job.rows * taps) {
    std::uint32_t row = std::uint32_t(own);
    const std::uint32_t pair = job.pair_of[take(job.all_taps, row)], column = std::uint32_t(first_row) + row;
    const bool exists = column < job.column_tiles.value * job.columns.value && pair != kNoPair;
    rows[own] = exists ? packed_row<Value>(job, group, column, pair) : kNoRow;
  }
  __syncthreads();  // rows are complete
  const std::int32_t vector = own % 8;
  const LastPackedVector place = packed_vector(job, channel_block * 8 + std::uint32_t(vector));
  if (!place.exists) return;
  for (std::int32_t i = own; i < read; i += kLastPackThreads) {
    std::uint32_t row = std::uint32_t(i) / 8;
    const std::uint32_t to = rows[row];
    if (to == kNoRow) continue;
    const std::uint32_t tap = take(job.all_taps, row);
    const Value* const from_row = reinterpret_cast<const Value*>(memory + std::int32_t(row) * pitch + vector * (taps + 1)) + tap;
    struct alignas(16) {
      Value v[kEach];
    } values;
#pragma unroll
    for (int e = 0; e < kEach; ++e) values.v[e] = from_row[e * taps];
    store_weights<Value>(job, to, place, *reinterpret_cast<const uint4*>(&values), packed);
  }
}

}  // namespace upfold::cuda
