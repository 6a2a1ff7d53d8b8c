// The inputs of a box of the fused method's phase tiles, copied as they lie.
#pragma once

#include "fused_phases_weight.cuh"

namespace upfold::cuda {

template <typename Value_, bool kExact, typename Tile_>
struct PhaseInputs : PhaseWeight<Value_, kExact, Tile_> {
  using Base = PhaseWeight<Value_, kExact, Tile_>;
  using Base::Base, Base::box_at, Base::dense, Base::group, Base::job, Base::kSize, Base::places;
  using typename Base::Box;
  using typename Base::Tile;
  using typename Base::Value;

  // Whether threads find anew what they copy of each box. In full float32, whose products leave the least registers, reading it
  // takes 1 % longer (H200).
  static constexpr bool kFindsAnew = kExact;

  // What a thread copies: its first place, and its first channel of it; the next channel is `step` behind that. Where channels
  // are neighbours, lanes share a place.
  struct Share {
    std::int32_t number, begin, step;
  };
  __device__ __forceinline__ Share share() const {
    const std::int32_t tid = std::int32_t(threadIdx.x), places = std::int32_t(job.places.value), lanes = job.place_lanes;
    if (dense()) {
      const std::int32_t each = job.grain / kSize;
      return {tid / lanes, tid % lanes * each, lanes * each};
    }
    if (lanes == 1) return {tid, 0, 1};
    const std::int32_t lane = std::int32_t(divide(job.places, std::uint32_t(tid)));
    return {lane < lanes ? tid - lane * places : places, lane, lanes};
  }

  // Threads take places of x (of one channel, or, where it is channels-last, of one vector of them), and then channels.
  __device__ __forceinline__ PhasePlace place_at(std::int32_t number) const {
    std::uint32_t line = std::uint32_t(number);
    const std::int32_t input = std::int32_t(take(job.in_row, line)) * (dense() ? 1 : job.grain / kSize);
    const std::int32_t to = std::int32_t(line) * job.line_step + input * job.input_step;
    const std::int32_t h = std::int32_t(take(job.in_h, line)), d = std::int32_t(take(job.in_d, line)), n = std::int32_t(line);
    return {n * std::int32_t(job.x_n) + d * std::int32_t(job.x_axis[0]) + h * std::int32_t(job.x_axis[1]) +
                input * std::int32_t(job.x_axis[2]),
            to,
            std::int16_t(n),
            std::int16_t(d),
            std::int16_t(h),
            std::int16_t(input)};
  }
  // Whether a place is inside of x; otherwise zeros are there.
  __device__ __forceinline__ bool is_inside(const PhasePlace& place, const PhaseNext& box) const {
    const auto inside = [&](int axis, std::int32_t at) {
      return std::uint32_t(at + box.from[axis]) < std::uint32_t(job.axis[axis].in);
    };
    return place.n < box.left_n && inside(0, place.d) && inside(1, place.h) && inside(2, place.w);
  }
  __device__ __forceinline__ PhaseNext next_at(const Value* x, std::uint32_t number) const {
    const Box box = box_at(number);
    const std::int32_t from[3] = {box.unit[0] - job.axis[0].most_shift, box.unit[1] - job.axis[1].most_shift,
                                  box.unit[2] - job.axis[2].most_shift - job.skew};
    std::int64_t at = std::int64_t(group) * job.ic * job.x_c + box.n * job.x_n;
#pragma unroll
    for (int i = 0; i < 3; ++i) at += from[i] * job.x_axis[i];
    return {reinterpret_cast<std::uintptr_t>(x) + std::uint64_t(at * kSize), job.batch - box.n, {from[0], from[1], from[2]}};
  }

  // The inputs of one chunk of channels; zeros where there are none.
  template <int kBytes>
  __device__ __forceinline__ void copy_grains(const PhaseNext& box, const Share& own, const PhasePlace& first_place,
                                              std::int32_t chunk, unsigned char* to) const {
    const std::int32_t left = min(job.ic - chunk * job.chunk_channels, job.chunk_channels);
    const Value* const first =
        reinterpret_cast<const Value*>(box.first) + std::int64_t(chunk * job.chunk_channels + own.begin) * job.x_c;
    const std::int64_t from_step = own.step * job.x_c;
    const std::uint32_t to_step = std::uint32_t(own.step * job.channel_step);
    for (std::int32_t number = own.number; number < std::int32_t(job.places.value);
         number += Tile::kLast ? job.place_step : Tile::kThreads) {
      const PhasePlace place = number == own.number ? first_place : place_at(number);
      const Value* from = first + place.from;
      std::uint32_t own_to = shared_address(to) + std::uint32_t(place.to + own.begin * job.channel_step);
      const std::int32_t live = is_inside(place, box) ? left : 0;
#pragma unroll 4
      for (std::int32_t c = own.begin; c < job.chunk_channels; c += own.step, from += from_step, own_to += to_step) {
        if constexpr (kBytes > 2) copy_async<kBytes>(own_to, from, c < live);
        if constexpr (kBytes == 2)
          store_half(own_to, c < live ? *reinterpret_cast<const std::uint16_t*>(from) : std::uint16_t(0));
      }
    }
  }
  // `is_first`: nothing was copied before.
  __device__ __forceinline__ void copy_inputs(const PhaseNext& box, const Share& own, bool is_first, std::int32_t chunk,
                                              unsigned char* to) const {
    PhasePlace place = {};
    if (kFindsAnew || is_first || job.kept_places == 0) {
      place = place_at(own.number);
      if (!kFindsAnew && job.kept_places > 0) places()[threadIdx.x] = place;
    } else {
      place = places()[threadIdx.x];
    }
    if (job.grain == 16) return copy_grains<16>(box, own, place, chunk, to);
    if (job.grain == 8) return copy_grains<8>(box, own, place, chunk, to);
    if (kSize == 4 || job.grain == 4) return copy_grains<4>(box, own, place, chunk, to);
    if constexpr (kSize == 2) copy_grains<2>(box, own, place, chunk, to);
  }
};

}  // namespace upfold::cuda
