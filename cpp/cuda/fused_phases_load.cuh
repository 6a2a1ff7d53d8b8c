// The inputs of a box of the fused method's phase tiles, copied as they lie.
#pragma once

#include "fused_phases_weight.cuh"

namespace upfold::cuda {

template <typename Value_, bool kExact, typename Tile_>
struct PhaseInputs : PhaseWeight<Value_, kExact, Tile_> {
  using Base = PhaseWeight<Value_, kExact, Tile_>;
  using Base::Base, Base::box_at, Base::dense, Base::group, Base::job, Base::kSize;
  using typename Base::Box;
  using typename Base::Tile;
  using typename Base::Value;

  // Threads take places of x (of one channel, or, where it is channels-last, of one vector of them), and then channels: where a
  // place comes from behind the first of its box, whether it is inside of x (otherwise zeros), and where it goes.
  struct Place {
    std::int32_t from, to;
    bool live;
  };
  __device__ __forceinline__ Place place_at(std::int32_t number, const Box& box) const {
    std::uint32_t line = std::uint32_t(number);
    const std::int32_t input = std::int32_t(take(job.in_row, line)) * (dense() ? 1 : job.grain / kSize);
    const std::int32_t to = std::int32_t(line) * job.line_step + input * job.input_step;
    const std::int32_t h = std::int32_t(take(job.in_h, line)), d = std::int32_t(take(job.in_d, line)), n = std::int32_t(line);
    const auto inside = [&](int axis, std::int32_t at) {
      return std::uint32_t(at + box.unit[axis] - job.axis[axis].most_shift) < std::uint32_t(job.axis[axis].in);
    };
    const bool live = n + box.n < job.batch && inside(0, d) && inside(1, h) && inside(2, input - job.skew);
    return {n * std::int32_t(job.x_n) + d * std::int32_t(job.x_axis[0]) + h * std::int32_t(job.x_axis[1]) +
                input * std::int32_t(job.x_axis[2]),
            to, live};
  }
  // The first place of a box: it may be outside of x.
  __device__ __forceinline__ std::int64_t first_input(const Box& box) const {
    std::int64_t at = box.n * job.x_n - job.skew * job.x_axis[2];
#pragma unroll
    for (int i = 0; i < 3; ++i) at += (box.unit[i] - job.axis[i].most_shift) * job.x_axis[i];
    return at;
  }

  // What a thread copies: its first place, and its first channel of it; the next channel is `step` behind that. Where channels
  // are neighbours, lanes share a place.
  struct Share {
    std::int32_t number, begin, step;
  };
  __device__ __forceinline__ Share share() const {
    const std::int32_t tid = std::int32_t(threadIdx.x), places = job.place_count;
    if (dense()) {
      const std::int32_t each = job.grain / kSize, lanes = job.place_lanes;
      return {tid / lanes, tid % lanes * each, lanes * each};
    }
    const std::int32_t lanes = Tile::kThreads / places, lane = tid / places;
    if (lanes <= 1) return {tid, 0, 1};
    return {lane < lanes ? tid - lane * places : places, lane, lanes};
  }

  // What a thread copies of a box first, and where the first of its channels begins there. Chunks of one box share it.
  struct Start {
    Place place;
    const Value* first;
  };
  __device__ __forceinline__ Start start_of(const Value* x, const Box& box, const Share& own, std::int32_t first_place) const {
    return {place_at(first_place, box), x + ((std::int64_t(group) * job.ic + own.begin) * job.x_c + first_input(box))};
  }
  // The inputs of one chunk of channels; zeros where there are none.
  template <int kBytes>
  __device__ __forceinline__ void copy_grains(std::uint32_t number_of_box, const Share& own, const Start& start,
                                              std::int32_t chunk, unsigned char* to) const {
    const std::int32_t left = min(job.ic - chunk * job.chunk_channels, job.chunk_channels);
    const Value* const first = start.first + std::int64_t(chunk * job.chunk_channels) * job.x_c;
    const std::int64_t from_step = own.step * job.x_c;
    const std::uint32_t to_step = std::uint32_t(own.step * job.channel_step);
    Place place = start.place;
    for (std::int32_t number = own.number; number < job.place_count;) {
      const Value* from = first + place.from;
      std::uint32_t own_to = shared_address(to) + std::uint32_t(place.to + own.begin * job.channel_step);
      const std::int32_t live = place.live ? left : 0;
#pragma unroll 4
      for (std::int32_t c = own.begin; c < job.chunk_channels; c += own.step, from += from_step, own_to += to_step) {
        if constexpr (kBytes > 2) copy_async<kBytes>(own_to, from, c < live);
        if constexpr (kBytes == 2)
          store_half(own_to, c < live ? *reinterpret_cast<const std::uint16_t*>(from) : std::uint16_t(0));
      }
      number += Tile::kLast ? job.place_step : Tile::kThreads;
      if (number < job.place_count) place = place_at(number, box_at(number_of_box));
    }
  }
  __device__ __forceinline__ void copy_inputs(std::uint32_t box, const Share& own, const Start& start, std::int32_t chunk,
                                              unsigned char* to) const {
    if (job.grain == 16) return copy_grains<16>(box, own, start, chunk, to);
    if (job.grain == 8) return copy_grains<8>(box, own, start, chunk, to);
    if (kSize == 4 || job.grain == 4) return copy_grains<4>(box, own, start, chunk, to);
    if constexpr (kSize == 2) copy_grains<2>(box, own, start, chunk, to);
  }
};

}  // namespace upfold::cuda
