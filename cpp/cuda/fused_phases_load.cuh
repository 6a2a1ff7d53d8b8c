// The inputs of a box of the fused method's phase tiles, copied as they lie and rounded where they lie.
#pragma once

#include "fused_phases_weight.cuh"

namespace upfold::cuda {

template <typename Value_, bool kExact, typename Tile_>
struct PhaseInputs : PhaseWeight<Value_, kExact, Tile_> {
  using Base = PhaseWeight<Value_, kExact, Tile_>;
  using Base::Base, Base::group, Base::job, Base::kParts, Base::kSize;
  using typename Base::Box;
  using typename Base::Tile;
  using typename Base::Value;

  // Threads take places of x (of one channel, or, where it is channels-last, of one vector of them), and then channels: where a
  // place comes from, beside the channel (-1: zeros), and where it goes.
  struct Place {
    std::int64_t from;
    std::int32_t to;
  };
  __device__ __forceinline__ Place place_at(std::int32_t number, const Box& box) const {
    std::uint32_t line = std::uint32_t(number);
    const std::int32_t own_input = std::int32_t(take(job.in_row, line)) * (job.dense ? 1 : job.grain / kSize);
    const std::int32_t to = std::int32_t(line) * job.line_step + own_input * job.input_step;
    const std::int32_t h = std::int32_t(take(job.in_h, line)) + box.unit[1] - job.axis[1].most_shift;
    const std::int32_t d = std::int32_t(take(job.in_d, line)) + box.unit[0] - job.axis[0].most_shift;
    const std::int32_t n = std::int32_t(line) + box.n, input = own_input + box.unit[2] - job.axis[2].most_shift - job.skew;
    const bool live = n < job.batch && std::uint32_t(d) < std::uint32_t(job.axis[0].in) &&
                      std::uint32_t(h) < std::uint32_t(job.axis[1].in) && std::uint32_t(input) < std::uint32_t(job.axis[2].in);
    return {live ? n * job.x_n + d * job.x_axis[0] + h * job.x_axis[1] + input * job.x_axis[2] : -1, to};
  }

  // What a thread copies: its first place, and its first channel of it; the next channel is `step` behind that.
  struct Share {
    std::int32_t number, begin, step;
  };
  __device__ __forceinline__ Share share() const {
    const std::int32_t tid = std::int32_t(threadIdx.x), each = job.dense ? job.grain / kSize : 1, places = job.place_count;
    const std::int32_t lanes = Tile::kThreads / places, lane = tid / places;
    if (lanes <= 1) return {tid, 0, each};
    return {lane < lanes ? tid - lane * places : places, lane * each, lanes * each};
  }

  // The inputs of one chunk of channels; zeros where there are none. `place` is that of this thread's first copies.
  template <int kBytes>
  __device__ __forceinline__ void copy_grains(const Value* x, const Box& box, const Share& own, Place place, std::int32_t chunk,
                                              unsigned char* to) const {
    const std::int32_t left = min(job.ic - chunk * job.chunk_channels, job.chunk_channels);
    const Value* const first = x + (std::int64_t(group) * job.ic + chunk * job.chunk_channels + own.begin) * job.x_c;
    const std::int64_t from_step = own.step * job.x_c;
    const std::uint32_t to_step = std::uint32_t(own.step * job.channel_step);
    for (std::int32_t number = own.number; number < job.place_count;) {
      const Value* from = first + place.from;
      std::uint32_t own_to = shared_address(to) + std::uint32_t(place.to + own.begin * job.channel_step);
      std::int32_t c = own.begin;
      const std::int32_t live = place.from >= 0 ? left : 0;
#pragma unroll 4
      for (; c < live; c += own.step, from += from_step, own_to += to_step) {
        if constexpr (kBytes > 2) copy_async<kBytes>(own_to, from, true);
        if constexpr (kBytes == 2) store_half(own_to, *reinterpret_cast<const std::uint16_t*>(from));
      }
#pragma unroll 1
      for (; c < job.chunk_channels; c += own.step, own_to += to_step) {
        if constexpr (kBytes > 2) copy_async<kBytes>(own_to, x, false);
        if constexpr (kBytes == 2) store_half(own_to, 0);
      }
      number += Tile::kThreads;
      if (number < job.place_count) place = place_at(number, box);
    }
  }
  __device__ __forceinline__ void copy_inputs(const Value* x, const Box& box, const Share& own, const Place& place,
                                              std::int32_t chunk, unsigned char* to) const {
    if (job.grain == 16) return copy_grains<16>(x, box, own, place, chunk, to);
    if (job.grain == 8) return copy_grains<8>(x, box, own, place, chunk, to);
    if (kSize == 4 || job.grain == 4) return copy_grains<4>(x, box, own, place, chunk, to);
    if constexpr (kSize == 2) copy_grains<2>(x, box, own, place, chunk, to);
  }

  // Rounds to TF32 what this thread has copied, once for all shifts that read it. Where it lies does not depend on the box.
  template <typename Vector>
  __device__ __forceinline__ void round_grains(const Box& box, const Share& own, Place place, unsigned char* stage) const {
    const std::int32_t to_step = own.step * job.channel_step;
    for (std::int32_t number = own.number; number < job.place_count;) {
      unsigned char* at = stage + place.to + own.begin * job.channel_step;
#pragma unroll 2
      for (std::int32_t c = own.begin; c < job.chunk_channels; c += own.step, at += to_step) round_vector<Vector>(at);
      number += Tile::kThreads;
      if (number < job.place_count) place = place_at(number, box);
    }
  }
  template <typename Vector>
  __device__ __forceinline__ void round_vector(unsigned char* at) const {
    constexpr int kWords = int(sizeof(Vector) / sizeof(std::uint32_t));
    union Words {
      Vector vector;
      std::uint32_t word[kWords];
    };
    Words high, low;
    high.vector = *reinterpret_cast<const Vector*>(at);
#pragma unroll
    for (int e = 0; e < kWords; ++e) {
      const float v = __uint_as_float(high.word[e]);
      high.word[e] = to_tf32(v);
      if constexpr (kParts == 2) low.word[e] = tf32_rest(v, high.word[e]);
    }
    *reinterpret_cast<Vector*>(at) = high.vector;
    if constexpr (kParts == 2) *reinterpret_cast<Vector*>(at + job.rest_bytes) = low.vector;
  }
  __device__ __forceinline__ void round_inputs(const Box& box, const Share& own, const Place& place, unsigned char* stage) const {
    if constexpr (kSize == 4) {
      if (job.grain == 16) return round_grains<uint4>(box, own, place, stage);
      if (job.grain == 8) return round_grains<uint2>(box, own, place, stage);
      round_grains<std::uint32_t>(box, own, place, stage);
    }
  }
};

}  // namespace upfold::cuda
