// What a block of the fused method's phase tiles knows of its rows and steps, and the weights that it lays out once.
#pragma once

#include "fused_phases.cuh"

namespace upfold::cuda {

template <typename Value_, bool kExact, typename Tile_>
struct PhaseWeight : PhaseMemory<Value_, Tile_> {
  using Base = PhaseMemory<Value_, Tile_>;
  using Base::Base, Base::class_size, Base::first_line, Base::group, Base::tile, Base::job, Base::kSize, Base::kSkews,
      Base::set_d, Base::set_h;
  using Base::set_steps, Base::steps, Base::tables, Base::weight;
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
    if (line >= pairs * job.oc) return {0, 0, 0, false};
    const std::int32_t pair = job.channels_fastest ? line / job.oc : line % pairs;
    return {job.channels_fastest ? line % job.oc : line / pairs,
            empty ? job.empty_d[pair] : d.phases[d.first_phase[set_d] + pair / pairs_h],
            empty ? job.empty_h[pair] : h.phases[h.first_phase[set_h] + pair % pairs_h], true};
  }

  __device__ __forceinline__ void make_lines(const Value* bias) const {
    PhaseTables<Tile>& own = tables();
    const std::int32_t tid = std::int32_t(threadIdx.x);
    for (std::int32_t i = tid; i < job.lines + job.empty_lines; i += Tile::kThreads) {
      const LineOf of = line_at(i);
      const std::int32_t all = group * job.oc + of.channel, d = of.phase_d - job.axis[0].pad, h = of.phase_h - job.axis[1].pad;
      const float b = of.exists && bias != nullptr ? widen(bias[all]) : 0.0f;
      own.lines[i] = {all * job.y_c + d * job.y_axis[0] + h * job.y_axis[1], d, of.exists ? h : kNoLine,
                      finish(job.activation, job.slope, b)};
    }
    for (std::int32_t row = tid; row < Tile::kRows; row += Tile::kThreads) {
      const PhaseAxis& w = job.axis[2];
      const std::int32_t c = job.group_class[row / 16], own_row = row - 16 * job.first_group[c];
      const std::int32_t count = c < w.classes ? class_size(w.first_phase, c) : 1, line = own_row / count;
      const LineOf of = line_at(line);
      const bool exists = c < w.classes && line < job.lines && of.exists;
      const std::int32_t phase = w.phases[w.first_phase[c < w.classes ? c : 0] + own_row % count];
      const std::int64_t skew = of.channel * job.y_c + (of.phase_d - job.axis[0].pad) * job.y_axis[0] +
                                (of.phase_h - job.axis[1].pad) * job.y_axis[1] + std::int64_t(group) * job.oc * job.y_c;
      const std::int32_t to = line * job.staged_line + phase;
      PhaseRow& made = own.rows[row];
      made.to = exists ? to * kSize : -1, made.skew = std::uint8_t(std::uint32_t(skew) & kSkews);
      made.bias = exists && bias != nullptr ? widen(bias[group * job.oc + of.channel]) : 0.0f;
      made.channel = of.channel, made.phase_d = std::uint8_t(of.phase_d), made.phase_h = std::uint8_t(of.phase_h);
      made.phase_w = std::uint8_t(phase);
    }
  }

  __device__ __forceinline__ void make_steps() const {
    const PhaseAxis &d = job.axis[0], &h = job.axis[1];
    const std::int32_t shifts_h = class_size(h.first_shift, set_h), eights = job.chunk_channels / 8;
    for (std::int32_t i = std::int32_t(threadIdx.x); i < set_steps(); i += Tile::kThreads) {
      const std::int32_t at_w = i / eights % job.width_shifts, at_h = i / eights / job.width_shifts % shifts_h;
      const std::int32_t at_d = i / eights / job.width_shifts / shifts_h, shift_w = job.all_shifts[at_w];
      const std::int32_t shift_d = d.shifts[d.first_shift[set_d] + at_d], shift_h = h.shifts[h.first_shift[set_h] + at_h];
      const std::int32_t line = (d.most_shift - shift_d) * std::int32_t(job.in_h.value) + h.most_shift - shift_h;
      PhaseStep step;
      step.from = i % eights * 8 * job.channel_step + line * job.line_step + (job.axis[2].most_shift - shift_w) * job.input_step;
      step.groups = job.shift_groups[at_w];
      step.shift_d = std::uint16_t(shift_d), step.shift_h = std::uint16_t(shift_h), step.shift_w = std::uint16_t(shift_w);
      step.channel = std::uint16_t(i % eights * 8);
      steps()[i] = step;
    }
  }
  static __device__ __forceinline__ std::int64_t tap_offset(const PhaseAxis& a, std::int32_t phase, std::int32_t shift,
                                                            std::int64_t stride) {
    const std::int32_t far = shift * a.stride + phase;
    return (a.dilation == 1 ? far : far / a.dilation) * stride;
  }

  // The fragments of this tile's weights, of all chunks; a thread makes the four values of one lane, and has four such on their
  // way.
  __device__ __forceinline__ void load_weight(const Value* w) const {
    constexpr int kTogether = 4;
    const std::int32_t own_steps = set_steps(), count = job.chunks * own_steps * Tile::kGroups * 32;
    const Value* const from = w + std::int64_t(group) * job.ic * job.w_ic;
    for (std::int32_t first = std::int32_t(threadIdx.x); first < count; first += kTogether * Tile::kThreads) {
      Value values[kTogether][4];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const std::int32_t i = min(first + u * Tile::kThreads, count - 1);
        const std::int32_t lane = i % 32, g = i / 32 % Tile::kGroups, in_all = i / 32 / Tile::kGroups;
        const std::int32_t chunk = in_all < own_steps ? 0 : in_all / own_steps;
        const PhaseStep step = steps()[in_all - chunk * own_steps];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const PhaseRow row = tables().rows[g * 16 + lane / 4 + 8 * half];
          const std::int64_t at = row.channel * job.w_oc + tap_offset(job.axis[0], row.phase_d, step.shift_d, job.w_axis[0]) +
                                  tap_offset(job.axis[1], row.phase_h, step.shift_h, job.w_axis[1]) +
                                  tap_offset(job.axis[2], row.phase_w, step.shift_w, job.w_axis[2]);
          const bool exists = row.to >= 0 && (step.groups >> g & 1) != 0;
#pragma unroll
          for (int four = 0; four < 2; ++four) {
            const std::int32_t ic = chunk * job.chunk_channels + step.channel + lane % 4 + 4 * four;
            const bool read = exists && ic < job.ic;
            values[u][half + 2 * four] = read ? from[at + ic * job.w_ic] : Narrow<Value>::from(0.0f);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        float wide[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          wide[e] = widen(values[u][e]);
          if constexpr (!kExact && sizeof(Value) == 4) wide[e] = __uint_as_float(to_tf32(wide[e]));
        }
        if (first + u * Tile::kThreads < count)
          weight()[first + u * Tile::kThreads] = make_float4(wide[0], wide[1], wide[2], wide[3]);
      }
    }
  }
};

}  // namespace upfold::cuda
