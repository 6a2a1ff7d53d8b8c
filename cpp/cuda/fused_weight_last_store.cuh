// Of the fused gradient of the weight whose channels are innermost (fused_weight_last.cuh): w from the sums of a block, or of two
// that are a cluster and have a part of the reduction each, without another launch. The sums go to shared memory, where operands
// were: vectors of four as a warpgroup's product leaves them, [group of 64 input channels][8 columns][16 rows][lane], of rows
// lane / 4 and lane / 4 + 8 and of columns lane % 4 * 2 and one more. Of a cluster each block adds half of the rows up, in the
// order of the blocks, and stores them.
//
// A thread stores one column of many rows, so that where it lies is found once. Taps of an output channel are neighbours in w
// and atoms apart in shared memory, in the same bank: vectors, and halves of them, change places by their atom. Where y is in
// squares a thread reads all taps of two output channels, which are 64 bytes of w.
#pragma once

#include "fused_weight_last.cuh"
#include "lanes.cuh"

namespace upfold::cuda {

template <typename Value>
struct alignas(2 * sizeof(Value)) WeightPair {
  Value v[2];
};

#if UPFOLD_WARPGROUPS
constexpr int kWeightStoring = 256;  // threads that multiply, and then store

// Of a block: rows that its tile has in groups of 64, and columns in groups of 8.
template <typename Value, int kRowGroups, int kSetColumns8>
struct WeightLastFinish {
  static constexpr int kUnits = 4 * kRowGroups;  // of 16 rows
  static constexpr int kColumns = 8 * kSetColumns8;
  static constexpr bool kSquares = sizeof(Value) == 2 && kSetColumns8 == kSquareColumns8;

  const WeightLastJob& job;
  const WeightLastPlace& place;
  float* sums;  // in shared memory

  // How far vectors (bit 0) and halves of them (bit 1) of 8 columns have changed places.
  __device__ __forceinline__ std::uint32_t moved(std::int32_t column8) const {
    return std::uint32_t(column8) >> job.atom_log & 3;
  }
  // A vector of a row group, by columns and by the thread of a warpgroup that holds it; in vectors.
  static __device__ __forceinline__ std::int32_t vector_at(std::int32_t row_group, std::int32_t column8, std::int32_t thread) {
    return (row_group * kSetColumns8 + column8) * 128 + thread;
  }
  __device__ __forceinline__ void keep(std::int32_t row_group, std::int32_t column8, std::int32_t thread, const float4& v) const {
    const std::uint32_t own = job.squares ? 0 : moved(column8);
    const bool swaps = own & 2;
    reinterpret_cast<float4*>(sums)[vector_at(row_group, column8, thread ^ std::int32_t(own & 1) * 4)] =
        swaps ? float4{v.z, v.w, v.x, v.y} : v;
  }
  __device__ __forceinline__ void keep(std::int32_t row_group, std::int32_t column8, std::int32_t thread, std::int32_t half,
                                       const float2& v) const {
    const std::uint32_t own = moved(column8);
    const std::int32_t at = vector_at(row_group, column8, thread ^ std::int32_t(own & 1) * 4) * 2;
    reinterpret_cast<float2*>(sums)[at + (half ^ std::int32_t(own >> 1))] = v;
  }

  // After the sums of all threads are kept.
  __device__ __forceinline__ void run(Value* __restrict__ w) const {
    const std::uint32_t cluster = job.cluster.value, units = kUnits / cluster, first_unit = blockIdx.x % cluster * units;
    static_assert(kMostWeightCluster == 2, "whose sums are added");
    if (cluster > 1) meet_cluster();  // the sums of all are there
    if constexpr (kSquares) {
      if (job.squares) {
        meet<1, kWeightStoring>();  // the rows' sums are there
        store_squares(first_unit, units, w);
        if (cluster > 1) leave_cluster(), await_cluster();
        return;
      }
    }
    if (cluster > 1) {
      add_blocks(first_unit, units);
      leave_cluster();
    }
    meet<1, kWeightStoring>();  // the rows' sums are there
    job.paired ? store<true>(first_unit, units, w) : store<false>(first_unit, units, w);
    if (cluster > 1) await_cluster();  // a block stays while others read its sums
  }

 private:
  // Of both blocks, for some rows, which nobody else reads here.
  __device__ __forceinline__ void add_blocks(std::uint32_t first_unit, std::uint32_t units) const {
    const std::uint32_t first = shared_address(sums);
#pragma unroll 4
    for (std::uint32_t i = threadIdx.x / 32; i < units * kSetColumns8; i += kWeightStoring / 32) {
      const std::uint32_t unit = first_unit + i / kSetColumns8, thread = unit % 4 * 32 + threadIdx.x % 32;
      const std::int32_t at = vector_at(std::int32_t(unit / 4), std::int32_t(i % kSetColumns8), std::int32_t(thread));
      float4 sum = load_of_block(first + 16 * std::uint32_t(at), 0);
      const float4 second = load_of_block(first + 16 * std::uint32_t(at), 1);
      sum.x += second.x, sum.y += second.y, sum.z += second.z, sum.w += second.w;
      reinterpret_cast<float4*>(sums)[at] = sum;
    }
  }

  // Of a unit's rows and eight output channels, which are all taps of these, a lane has two rows and two channels.
  __device__ __forceinline__ void store_squares(std::uint32_t first_unit, std::uint32_t units, Value* __restrict__ w) const {
    if (place.channel + place.set * (kColumns / 4) >= job.out_channels) return;  // nobody's columns
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    const WeightLastAtom* const atom_of = job.atom + place.set * 4;
    Value* const to_block = w + weight_set_offset(job, place) + std::int64_t(place.x_channel) * job.w_n;
    const bool upper = lane % 2 != 0;
#pragma unroll 1
    for (std::int32_t item = std::int32_t(threadIdx.x) / 32; item < std::int32_t(units) * 2; item += kWeightStoring / 32) {
      const std::int32_t half = item % 2, unit = std::int32_t(first_unit) + item / 2;
      float4 taps[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const std::int32_t atom = atom_of[i / 8 * 2 + i % 4 / 2].atom;
        const std::int32_t column8 = atom * 8 + (i / 4 % 2 * 2 + i % 2) * 2 + half;
        taps[i] = sum_of(vector_at(unit / 4, column8, unit % 4 * 32 + lane));
      }
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const std::int32_t row = unit * 16 + second * 8 + lane / 4;
        std::uint32_t channels[2][8];  // of two output channels, as they lie in w
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float4 &low = taps[2 * i], &high = taps[2 * i + 1];
          channels[0][i] = second == 0 ? pair_of<Value>(low.x, high.x) : pair_of<Value>(low.z, high.z);
          channels[1][i] = second == 0 ? pair_of<Value>(low.y, high.y) : pair_of<Value>(low.w, high.w);
        }
        // Of both channels of two lanes either has one half.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          std::uint32_t* const own = channels[i / 4];
          const std::uint32_t got = exchange(upper ? own[i % 4] : own[i % 4 + 4], 1);
          (upper ? own[i % 4] : own[i % 4 + 4]) = got;
        }
        if (row >= place.rows) continue;
        Value* const to = to_block + row * job.w_n + atom_of->offset + (half * 8 + lane % 4 / 2 * 4) * job.w_c + (upper ? 8 : 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          store_words<16>(to + i * 16, channels[i]);
          store_words<16>(to + (i + 2) * 16, channels[i] + 4);
        }
      }
    }
  }
  // A vector of sums, of all blocks.
  __device__ __forceinline__ float4 sum_of(std::int32_t at) const {
    if (job.cluster.value == 1) return reinterpret_cast<const float4*>(sums)[at];
    const std::uint32_t first = shared_address(sums) + 16 * std::uint32_t(at);
    float4 sum = load_of_block(first, 0);
    const float4 second = load_of_block(first, 1);
    sum.x += second.x, sum.y += second.y, sum.z += second.z, sum.w += second.w;
    return sum;
  }

  // kPairs: two output channels at a time, which are neighbours in w; their number is even then.
  template <bool kPairs>
  __device__ __forceinline__ void store(std::uint32_t first_unit, std::uint32_t units, Value* __restrict__ w) const {
    using Stored = std::conditional_t<kPairs, WeightPair<Value>, Value>;
    constexpr int kEach = kPairs ? 2 : 1, kOutputs = kColumns / kEach;
    constexpr int kLanes = kOutputs >= 256 ? 256 : kOutputs >= 128 ? 128 : 64, kTurns = kWeightStoring / kLanes;
    const std::int32_t width = job.width, own_turn = std::int32_t(threadIdx.x) / kLanes;
    const WeightLastAtom* const atom_of = job.atom + place.set * (kColumns / width);
    Value* const to_block = w + weight_set_offset(job, place) + std::int64_t(place.x_channel) * job.w_n;
    for (std::int32_t output = std::int32_t(threadIdx.x) % kLanes; output < kOutputs; output += kLanes) {
      const WeightLastAtom& leads = atom_of[output * kEach / width];
      if (leads.count == 0) continue;  // nobody's columns
      const std::int32_t local = output * kEach - leads.first * width;
      const std::int32_t channel = kPairs ? local : local / leads.count;  // of the atom
      const WeightLastAtom& own = atom_of[leads.first + (kPairs ? 0 : local % leads.count)];
      const std::int32_t channels = job.out_channels - place.channel - own.chunk * width;
      if (channel >= channels) continue;
      const std::int32_t column8 = own.atom * (width / 8) + channel / 8;
      const std::uint32_t swap = moved(column8);
      Value* const to = to_block + own.offset + channel * job.w_c;
      for (std::uint32_t unit = first_unit; unit < first_unit + units; ++unit) {
        const std::int32_t row = std::int32_t(unit) * 16, left = place.rows - row;  // input channels of the unit
        const float* const from =
            sums + 4 * vector_at(std::int32_t(unit / 4), column8, std::int32_t(unit % 4) * 32 + channel % 8 / 2) + channel % 2;
        // All are read before the first is stored, or each would wait for its own.
        Stored stored[16 / kTurns];
#pragma unroll
        for (int i = 0; i < 16 / kTurns; ++i) {
          const std::int32_t r = i * kTurns + own_turn;
          const float* const v = from + (r % 8 ^ std::int32_t(swap & 1)) * 16 + (r / 8 * 2 ^ std::int32_t(swap & 2));
          if constexpr (kPairs) {
            stored[i] = {{Narrow<Value>::from(v[0]), Narrow<Value>::from(v[1])}};
          } else {
            stored[i] = Narrow<Value>::from(v[0]);
          }
        }
        Value* at = to + (row + own_turn) * job.w_n;
        if (left >= 16) {
#pragma unroll
          for (int i = 0; i < 16 / kTurns; ++i, at += kTurns * job.w_n) *reinterpret_cast<Stored*>(at) = stored[i];
        } else {
#pragma unroll
          for (int i = 0; i < 16 / kTurns; ++i, at += kTurns * job.w_n)
            if (i * kTurns + own_turn < left) *reinterpret_cast<Stored*>(at) = stored[i];
        }
      }
    }
  }
};
#endif

}  // namespace upfold::cuda
