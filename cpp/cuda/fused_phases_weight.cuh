// What a block of the fused method's phase tiles knows of its rows and steps, and the weights that it lays out once.
#pragma once

#include "fused_phases.cuh"

namespace upfold::cuda {

// What the rounding to TF32 leaves, as TF32; nothing of what is not finite.
UPFOLD_DEVICE std::uint32_t tf32_rest(float v, std::uint32_t rounded) {
  const float rest = v - __uint_as_float(rounded);
  return to_tf32(fabsf(rest) <= fabsf(v) ? rest : 0.0f);
}

template <typename Value_, bool kExact, typename Tile_>
struct PhaseWeight : PhaseMemory<Value_, kExact, Tile_> {
  using Base = PhaseMemory<Value_, kExact, Tile_>;
  using Base::Base, Base::class_size, Base::first_line, Base::fragment_vectors, Base::group, Base::tile, Base::job,
      Base::kNowhere, Base::kSize, Base::kSlotChannels, Base::pattern, Base::set_d, Base::set_h;
  using Base::dense, Base::pixel, Base::pixels, Base::set_steps, Base::skews, Base::staged_pixel, Base::steps, Base::tables,
      Base::weight;
  using typename Base::Tile;
  using typename Base::Value;

  struct LineOf {
    std::int32_t channel, phase_d, phase_h;
    bool exists;
  };
  // The channel and the phases of depth and height of line i of this tile; behind its lines with products those without taps.
  __device__ __forceinline__ LineOf line_at(std::int32_t i) const {
    const PhaseAxis &d = job.axis[0], &h = job.axis[1];
    const bool empty = i >= job.lines;
    const std::int32_t pairs_h = class_size(h.first_phase, set_h);
    const std::int32_t pairs = empty ? job.empty_count : class_size(d.first_phase, set_d) * pairs_h;
    const std::int32_t line = empty ? tile * job.empty_lines + i - job.lines : first_line + i;
    if (line >= pairs * job.pair_channels) return {0, 0, 0, false};
    const std::int32_t pair = pixels() ? line / job.pair_channels : line % pairs;
    const std::int32_t channel = pixels() ? line % job.pair_channels : line / pairs;
    return {channel, empty ? job.empty_d[pair] : d.phases[d.first_phase[set_d] + pair / pairs_h],
            empty ? job.empty_h[pair] : h.phases[h.first_phase[set_h] + pair % pairs_h], channel < job.oc};
  }

  // The biases of the line and the row that this thread makes, on their way while others do.
  struct Biases {
    Value line, row;
  };
  __device__ __forceinline__ static std::int32_t own_row() { return Tile::kThreads - 1 - std::int32_t(threadIdx.x); }

  __device__ __forceinline__ Biases make_lines(const Value* bias) const {
    PhaseTables<Tile>& own = tables();
    const std::int32_t i = std::int32_t(threadIdx.x), row = own_row();
    Biases biases{Narrow<Value>::from(0.0f), Narrow<Value>::from(0.0f)};
    if (i < job.lines + job.empty_lines) {
      const LineOf of = line_at(i);
      const std::int32_t all = group * job.oc + of.channel, d = of.phase_d - job.axis[0].pad, h = of.phase_h - job.axis[1].pad;
      if (of.exists && bias != nullptr) biases.line = bias[all];
      own.lines[i] = {all * job.y_c + d * job.y_axis[0] + h * job.y_axis[1], d, of.exists ? h : kNoLine, 0.0f, of.channel};
    }
    if (row < Tile::kRows) {
      const PhaseAxis& w = job.axis[2];
      const std::int32_t c = job.group_class[row / 16], in_class = row - 16 * job.first_group[c];
      const std::int32_t count = c < w.classes ? class_size(w.first_phase, c) : 1;
      const std::int32_t line = job.by_phase ? in_class % job.lines : in_class / count;
      const std::int32_t in_phases = job.by_phase ? in_class / job.lines : in_class % count;
      const LineOf of = line_at(line);
      const bool exists = c < w.classes && line < job.lines && of.exists;
      const std::int32_t phase = w.phases[w.first_phase[c < w.classes ? c : 0] + in_phases];
      const std::int32_t run = line / pixel(), in_pixel = line - run * pixel();
      const std::int64_t y = of.channel * job.y_c + (of.phase_d - job.axis[0].pad) * job.y_axis[0] +
                             (of.phase_h - job.axis[1].pad) * job.y_axis[1] + std::int64_t(group) * job.oc * job.y_c - in_pixel;
      const std::int32_t to =
          run * job.staged_line + phase * staged_pixel() + in_pixel + std::int32_t(std::uint32_t(y) & skews());
      if (exists && bias != nullptr) biases.row = bias[group * job.oc + of.channel];
      own.rows[row] = {exists ? to * kSize : -1, 0.0f};
      const std::int32_t taps = tap_of_phase(0, of.phase_d) + tap_of_phase(1, of.phase_h) + tap_of_phase(2, phase);
      own.row_weight[row] = exists ? of.channel * std::int32_t(job.w_oc) + taps : kNowhere;
    }
    return biases;
  }
  __device__ __forceinline__ void put_biases(const Biases& biases) const {
    const std::int32_t i = std::int32_t(threadIdx.x), row = own_row();
    if (i < job.lines + job.empty_lines) tables().lines[i].bias = finish(job.activation, job.slope, widen(biases.line));
    if (row < Tile::kRows) tables().rows[row].bias = widen(biases.row);
  }
  // What outputs without a tap are, by channel of the group.
  __device__ __forceinline__ void make_pattern(const Value* bias) const {
    if (job.pattern_bytes == 0) return;
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.oc; i += Tile::kThreads) {
      const float own = bias == nullptr ? 0.0f : widen(bias[group * job.oc + i]);
      pattern()[i] = Narrow<Value>::from(finish(job.activation, job.slope, own));
    }
  }

  // Tap k of a phase has shift * stride + phase = k * dilation, so that k is this of the phase and that of the shift.
  __device__ __forceinline__ std::int32_t tap_of_phase(int axis, std::int32_t phase) const {
    const std::int32_t dilation = job.axis[axis].dilation;
    return (phase + dilation - 1) / dilation * std::int32_t(job.w_axis[axis]);
  }
  __device__ __forceinline__ std::int32_t tap_of_shift(int axis, std::int32_t shift) const {
    return shift * job.axis[axis].stride / job.axis[axis].dilation * std::int32_t(job.w_axis[axis]);
  }

  __device__ __forceinline__ void make_steps() const {
    const PhaseAxis &d = job.axis[0], &h = job.axis[1];
    const std::int32_t shifts_h = class_size(h.first_shift, set_h), parts = job.chunk_channels / job.step_channels;
    for (std::int32_t i = std::int32_t(threadIdx.x); i < set_steps(); i += Tile::kThreads) {
      const std::int32_t at = i / parts, at_d = at / shifts_h, at_h = at - at_d * shifts_h;
      const std::int32_t channel = (i - at * parts) * job.step_channels;
      const std::int32_t shift_d = d.shifts[d.first_shift[set_d] + at_d], shift_h = h.shifts[h.first_shift[set_h] + at_h];
      const std::int32_t line = (d.most_shift - shift_d) * std::int32_t(job.in_h.value) + h.most_shift - shift_h;
      steps()[i] = {channel * job.channel_step + line * job.line_step, tap_of_shift(0, shift_d) + tap_of_shift(1, shift_h),
                    channel};
    }
  }

  // Channels of a word; a lane's first channel of a step, and how far behind it that of the second slot is. Where channels are
  // neighbours in shared memory, a lane's of both slots are.
  static constexpr std::int32_t kWordChannels = kSize == 2 ? 2 : 1;
  __device__ __forceinline__ bool slots_join() const { return dense() && !job.folded; }
  __device__ __forceinline__ std::int32_t lane_channel() const {
    return std::int32_t(threadIdx.x) % 4 * (slots_join() ? 2 * kWordChannels : kWordChannels);
  }
  __device__ __forceinline__ std::int32_t slot_channels() const { return slots_join() ? kWordChannels : kSlotChannels; }

  // One lane's share of the fragments of a step and a slice, of all groups of 16 rows: rows r and r + 8 in the first slot, and
  // the same in the second; two channels of 16-bit types are a word. `from` is the group's w at this lane's first channel of a
  // step.
  using Fragments = std::uint32_t[Tile::kGroups][4];
  __device__ __forceinline__ void read_fragments(Fragments& words, const Value* from, std::uint32_t number,
                                                 std::int32_t own_steps, std::uint32_t inverse) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, slice = std::int32_t(take(job.slices, number));
    // Both are fewer than 2^16: high(number * inverse) = number / own_steps.
    const std::int32_t chunk = std::int32_t(inverse == 0 ? number : __umulhi(number, inverse));
    const PhaseStep step = steps()[std::int32_t(number) - chunk * own_steps];
    const std::int32_t channel = chunk * job.chunk_channels + step.channel, channel_step = std::int32_t(job.w_ic);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const std::int32_t shift = job.folded ? 2 * slice + slot : slice,
                         behind = job.folded ? channel : channel + slot * slot_channels();
      const std::uint32_t groups = job.shift_groups[shift];
      const std::int32_t left = job.ic - behind - lane_channel();
      const std::int32_t taps = behind * channel_step + step.weight + job.shift_weight[shift];
#pragma unroll
      for (int i = 0; i < 2 * Tile::kGroups; ++i) {
        const std::int32_t row = tables().row_weight[i * 8 + lane / 4];
        const bool exists = row >= 0 && (groups >> (i / 2) & 1) != 0;
        words[i / 2][i % 2 + 2 * slot] = read_word(from + (taps + row), exists ? left : 0);
      }
    }
  }
  // As many channels of a word as there are.
  __device__ __forceinline__ std::uint32_t read_word(const Value* at, std::int32_t left) const {
    if constexpr (kSize == 4) {
      return left > 0 ? __float_as_uint(*at) : 0;
    } else {
      std::uint32_t word = left > 0 ? *reinterpret_cast<const std::uint16_t*>(at) : std::uint16_t(0);
      if (left > 1) word |= std::uint32_t(*reinterpret_cast<const std::uint16_t*>(at + job.w_ic)) << 16;
      return word;
    }
  }

  // The fragments of this tile's weights, of all chunks; a warp has several on their way.
  __device__ __forceinline__ void load_weight(const Value* w) const {
    constexpr std::int32_t kMost = kSize == 2 ? 4 : 8, kTogether = Tile::kGroups < kMost ? kMost / Tile::kGroups : 1;
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, own_steps = set_steps();
    const std::int32_t count = job.chunks * own_steps * std::int32_t(job.slices.value);
    const std::int32_t channel = group * job.ic + lane_channel();
    const Value* const from = w + channel * job.w_ic;
    const std::uint32_t inverse = own_steps > 1 ? ~0u / std::uint32_t(own_steps) + 1 : 0;
    for (std::int32_t first = std::int32_t(threadIdx.x) / 32; first < count; first += kTogether * Tile::kWarps) {
      Fragments words[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        read_fragments(words[u], from, std::uint32_t(min(first + u * Tile::kWarps, count - 1)), own_steps, inverse);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const std::int32_t number = first + u * Tile::kWarps;
        if (number >= count) break;
#pragma unroll
        for (int g = 0; g < Tile::kGroups; ++g)
          put_fragment(words[u][g], weight() + (number * Tile::kGroups + g) * fragment_vectors() + lane);
      }
    }
  }
  __device__ __forceinline__ void put_fragment(const std::uint32_t (&words)[4], uint4* to) const {
    if (kExact && job.weight_parts == 1) {
      *to = make_uint4(words[0], words[1], words[2], words[3]);
      return;
    }
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      high[e] = kSize == 4 ? to_tf32(__uint_as_float(words[e])) : words[e];
      if constexpr (kExact) low[e] = tf32_rest(__uint_as_float(words[e]), high[e]);
    }
    to[0] = make_uint4(high[0], high[1], high[2], high[3]);
    if constexpr (kExact) to[32] = make_uint4(low[0], low[1], low[2], low[3]);
  }
};

}  // namespace upfold::cuda
