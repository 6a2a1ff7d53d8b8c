// How warpgroups of the fused method store their sums: through shared memory, a few runs of outputs at a time, so that lanes
// store vectors of neighbouring outputs or channels, and the code that does it is short. (Unrolled over all sums of a thread it
// took 10,000 to 20,000 instructions, and waiting for them 15 us a tile on an H200.)
#pragma once

#include "fused_activate.cuh"
#include "fused_store.cuh"
#include "lanes.cuh"

namespace upfold::cuda {

constexpr int kRunOutputs = 16;  // of 8 * kInsts units in all width phases of a set
constexpr int kRunPitch = 20;    // floats from one channel to the next: 16 bytes aligned, and in different banks
constexpr int kRunFloats = 16 * kRunPitch;
constexpr int kStagedRuns = 2;
constexpr int kStagedVectors = kStagedRuns * kRunFloats / 4;  // of 16 bytes, of a warp

// One run in y: 16 outputs of 16 channels, staged as [channel][output].
template <typename Value, typename Tile>
struct RunStore {
  static constexpr int kHalf = 8;  // channels of a lane, where y is channels-last

  const FusedJob& job;
  const FusedPlace& place;
  Value* y;  // of the warp's first channel
  std::int32_t channels, lane;

  // Where output number `i` of a run lies in a channel; -1: nowhere. `unit` is the run's first unit.
  __device__ __forceinline__ std::int64_t place_of(std::int32_t i, std::int32_t unit, UnitTarget target,
                                                   std::int32_t phase_h) const {
    const std::int32_t phase = i % Tile::kPhasesW, stride = job.axis[2].taps.stride;
    std::int32_t u = i / Tile::kPhasesW;
    if (job.flat ? target.ow + u * stride >= job.axis[2].out : u >= job.axis[2].tile)
      target = target_of<Tile>(job, place, unit + u), u = 0;  // another row
    const bool inside = target.live && place.set.w + phase < stride && target.ow + u * stride + phase < job.axis[2].out &&
                        target.oh + phase_h < job.axis[1].out;
    return inside ? target.offset + phase_h * job.y_axis[1] + (u * stride + phase) * job.y_axis[2] : -1;
  }

  // Neighbouring lanes store neighbouring outputs: 16 bytes each where they are aligned, pairs of 16-bit values, or one output.
  __device__ __forceinline__ void store_line(const float* staged, std::int32_t unit, const UnitTarget& target,
                                             std::int32_t phase_h) const {
    const bool one_row = job.flat || job.axis[2].tile * Tile::kPhasesW >= kRunOutputs;
    const bool dense = one_row && job.y_axis[2] == 1 && job.axis[2].taps.stride == Tile::kPhasesW && target.live &&
                       target.oh + phase_h < job.axis[1].out && target.ow + kRunOutputs <= job.axis[2].out;
    Value* const run = y + target.offset + phase_h * job.y_axis[1];
    const std::uintptr_t steps = reinterpret_cast<std::uintptr_t>(run) | std::uintptr_t(job.y_c) * sizeof(Value);
    if (dense && steps % 16 == 0) {
      constexpr int kVector = kWordBytes / int(sizeof(Value)), kOfRun = kRunOutputs / kVector;
#pragma unroll
      for (int i = 0; i < 16 * kOfRun / 32; ++i) {
        const std::int32_t channel = i * (32 / kOfRun) + lane / kOfRun, first = lane % kOfRun * kVector;
        Value values[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) values[j] = Narrow<Value>::from(staged[channel * kRunPitch + first + j]);
        std::uint32_t words[4];
        memcpy(words, values, sizeof(words));
        if (channel < channels) store_words<16>(run + channel * job.y_c + first, words);
      }
      return;
    }
    if (sizeof(Value) == 2 && dense && steps % 4 == 0) {
      const std::int32_t first = lane % 8 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int32_t channel = i * 4 + lane / 8;
        const float2 v = *reinterpret_cast<const float2*>(staged + channel * kRunPitch + first);
        if constexpr (sizeof(Value) == 2) {
          const std::uint32_t word = pair_of<Value>(v.x, v.y);
          if (channel < channels) store_words<4>(run + channel * job.y_c + first, &word);
        }
      }
      return;
    }
    const std::int64_t at = place_of(lane % 16, unit, target, phase_h);
    if (at < 0) return;
    Value* const line = y + at;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::int32_t channel = i * 2 + lane / 16;
      if (channel < channels) line[channel * job.y_c] = Narrow<Value>::from(staged[channel * kRunPitch + lane % 16]);
    }
  }

  // Where y is channels-last.
  __device__ __forceinline__ void store_channels(const float* staged, std::int32_t unit, const UnitTarget& target,
                                                 std::int32_t phase_h) const {
    constexpr int kVector = kWordBytes / int(sizeof(Value));
    const std::int32_t output = lane % 16, first = lane / 16 * kHalf;
    const std::int64_t at = place_of(output, unit, target, phase_h);
    if (at < 0) return;
#pragma unroll
    for (int v = 0; v < kHalf; v += kVector) {
      if (first + v >= channels) return;
      Value values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] = Narrow<Value>::from(staged[(first + v + i) * kRunPitch + output]);
      std::uint32_t words[4];
      memcpy(words, values, sizeof(words));
      store_words<16>(y + at + first + v, words);
    }
  }
};

// kCount neighbouring outputs of a channel.
template <int kCount, typename Value>
UPFOLD_DEVICE void store_vector(Value* to, const float* values) {
  constexpr int kBytes = kCount * int(sizeof(Value));
  Value narrow[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) narrow[i] = Narrow<Value>::from(values[i]);
  std::uint32_t words[(kBytes + 3) / 4];
  memcpy(words, narrow, kBytes);
  store_words<kBytes>(to, words);
}

// What outputs are raised to where the activation is ReLU; nothing where there is none.
UPFOLD_DEVICE float least_of(const FusedJob& job) {
  constexpr std::uint32_t kMinusInfinity = 0xff800000u;
  return job.activation == Activation::kRelu ? 0.0f : __uint_as_float(kMinusInfinity);
}

// What a thread of a warpgroup holds: two neighbouring units of two channels, number `row`, in each column tile.
template <typename Value, typename Tile>
struct DirectStore {
  static constexpr int kUnit = Tile::kPhasesW, kInsts = Tile::kInsts;
  using Sums = float[Tile::kPhases][1][Tile::kN8][4];

  const FusedJob& job;
  const FusedPlace& place;
  const Sums& sums;
  const float added[2];  // to its channels
  const float least = least_of(job);

  // `kCount` outputs of a channel, from unit `first` of the two on.
  template <int kCount>
  __device__ __forceinline__ void store_units(Value* to, int ph, int row, int j, int first) const {
    float values[kCount];
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const float sum = sums[ph * kUnit + v % kUnit][0][j][row * 2 + first + v / kUnit] + added[row];
      values[v] = larger(sum, least);
    }
    store_vector<kCount>(to, values);
  }

  // Where all units and all channels of a warp exist: nothing is asked of an output. Runs of kInsts column tiles lie one distance
  // apart (FusedJob::group_pitch is the same in the patch).
  template <bool kJoined>
  __device__ __forceinline__ void store_whole(Value* first, std::int64_t pitch) const {
    pin(first);
#pragma unroll
    for (int ph = 0; ph < Tile::kPhasesH; ++ph) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        Value* to = first + ph * job.y_axis[1] + row * 8 * job.y_c;
#pragma unroll
        for (int j = 0; j < Tile::kN8; ++j) {
          Value* const at = to + j % kInsts * 8 * kUnit;
          if constexpr (kJoined) {
            store_units<2 * kUnit>(at, ph, row, j, 0);
          } else {
            store_units<kUnit>(at, ph, row, j, 0);
            store_units<kUnit>(at + kUnit, ph, row, j, 1);
          }
          if (j % kInsts == kInsts - 1) to += pitch;
        }
      }
    }
  }

  // At the edges. A lane knows the place of the 8 units of column tile number `lane`, and how many of them and of the height
  // phases there are.
  __device__ __forceinline__ void store_edge(Value* first, const UnitTarget& own, std::int32_t own_state, std::int32_t second,
                                             std::int32_t channels) const {
    pin(first);
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
      const std::int64_t offset = __shfl_sync(~0u, own.offset, j);
      const std::int32_t state = __shfl_sync(~0u, own_state, j), units = (state >> 16) - second, rows = state & 0xffff;
#pragma unroll
      for (int ph = 0; ph < Tile::kPhasesH; ++ph) {
        if (place.set.h + ph >= job.axis[1].taps.stride || ph >= rows) continue;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          if (row * 8 >= channels) continue;
          Value* const to = first + offset + ph * job.y_axis[1] + row * 8 * job.y_c;
          if (units > 0) store_units<kUnit>(to, ph, row, j, 0);
          if (units > 1) store_units<kUnit>(to + kUnit, ph, row, j, 1);
        }
      }
    }
  }

  __device__ __forceinline__ void store(Value* y) const {
    const WarpPlace<Tile> at(place, 0);
    const std::int32_t channel = at.channel + at.lane / 4, second = at.lane % 4 * 2, channels = job.oc - channel;
    const UnitTarget own = target_of<Tile>(job, place, (at.unit_tile + at.lane % Tile::kN8) * 8);
    const std::int32_t left = own.live && own.ow < job.axis[2].out ? (job.axis[2].out - own.ow) / kUnit : 0;
    const std::int32_t below = job.axis[1].out > own.oh ? job.axis[1].out - own.oh : 0;
    const std::int32_t own_state = (left < 8 ? left : 8) << 16 | (below < Tile::kPhasesH ? below : Tile::kPhasesH);
    Value* const first = y + (std::int64_t(place.group) * job.oc + channel) * job.y_c + second * kUnit;
    const bool whole = own_state == (8 << 16 | Tile::kPhasesH) && at.channel + 16 <= job.oc &&
                       place.set.h + Tile::kPhasesH <= job.axis[1].taps.stride;
    if (!__all_sync(~0u, whole)) return store_edge(first, own, own_state, second, channels);
    const std::int64_t begin = __shfl_sync(~0u, own.offset, 0), pitch = __shfl_sync(~0u, own.offset, kInsts) - begin;
    job.joined ? store_whole<true>(first + begin, pitch) : store_whole<false>(first + begin, pitch);
  }
};

// Adds the bias to all sums of a thread and applies a function to them.
template <typename Tile>
struct ActivateRuns {
  float (&sums)[Tile::kPhases][1][Tile::kN8][4];
  const float (&added)[2];
  template <typename Function>
  __device__ __forceinline__ void operator()(const Function& function) const {
#pragma unroll
    for (int i = 0; i < Tile::kPhases * Tile::kN8 * 4; ++i) {
      float& sum = sums[i / 4 / Tile::kN8][0][i / 4 % Tile::kN8][i % 4];
      sum = function(sum + added[i % 4 / 2]);
    }
  }
};

// Adds bias and activation, and stores a warp's sums; `staging` is its own, of kStagedVectors. The sums are used up.
template <typename Value, typename Tile>
UPFOLD_DEVICE void store_runs(const FusedJob& job, const FusedPlace& place, const Value* bias, Value* y, float* staging,
                              float (&sums)[Tile::kPhases][1][Tile::kN8][4]) {
  static_assert(8 * Tile::kInsts * Tile::kPhasesW == kRunOutputs, "a run");
  constexpr int kRuns = Tile::kN8 / Tile::kInsts, kLines = kRuns * Tile::kPhasesH;
  const WarpPlace<Tile> at(place, 0);
  const std::int64_t first_channel = std::int64_t(place.group) * job.oc + at.channel;
  float added[2];  // to the rows of this lane
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const std::int32_t channel = row * 8 + at.lane / 4;
    added[row] = bias != nullptr && at.channel + channel < job.oc ? widen(bias[first_channel + channel]) : 0.0f;
  }
  if (job.direct && !job.flat) {
    if (is_activated_before(job.activation)) {
      with_activation(job.activation, job.slope, ActivateRuns<Tile>{sums, added});
      added[0] = added[1] = 0.0f;
    }
    return DirectStore<Value, Tile>{job, place, sums, {added[0], added[1]}}.store(y);
  }
  const RunStore<Value, Tile> store{job, place, y + first_channel * job.y_c, job.oc - at.channel, at.lane};
  const std::int32_t first_unit = at.unit_tile * 8;
  // A lane finds the place of one run.
  const UnitTarget own = target_of<Tile>(job, place, first_unit + at.lane % kRuns * 8 * Tile::kInsts);
#pragma unroll
  for (int first = 0; first < kLines; first += kStagedRuns) {
    __syncwarp();  // everyone has left what was staged before
#pragma unroll
    for (int l = 0; l < kStagedRuns; ++l) {
      const int run = (first + l) / Tile::kPhasesH, p = (first + l) % Tile::kPhasesH * Tile::kPhasesW;
#pragma unroll
      for (int i = 0; i < 2 * Tile::kInsts; ++i) {
        const int j = run * Tile::kInsts + i / 2, row = i % 2;
        const float(&s)[4] = sums[p][0][j];
        const float a = added[row];
        float* const to = staging + l * kRunFloats + (row * 8 + at.lane / 4) * kRunPitch;
        if constexpr (Tile::kPhasesW == 2) {
          const float(&t)[4] = sums[p + 1][0][j];
          reinterpret_cast<float4*>(to)[at.lane % 4] = {s[row * 2] + a, t[row * 2] + a, s[row * 2 + 1] + a, t[row * 2 + 1] + a};
        } else {
          reinterpret_cast<float2*>(to)[i / 2 * 4 + at.lane % 4] = {s[row * 2] + a, s[row * 2 + 1] + a};
        }
      }
    }
    __syncwarp();  // runs are staged
    if (job.activation != Activation::kNone) {
#pragma unroll 1
      for (std::int32_t i = at.lane; i < kStagedRuns * kRunFloats; i += 32) {
        if (i % kRunPitch < kRunOutputs) staging[i] = finish(job.activation, job.slope, staging[i]);
      }
      __syncwarp();  // and finished
    }
#pragma unroll
    for (int l = 0; l < kStagedRuns; ++l) {
      const std::int32_t run = (first + l) / Tile::kPhasesH, phase_h = (first + l) % Tile::kPhasesH;
      UnitTarget target;
      target.offset = __shfl_sync(~0u, own.offset, run), target.oh = __shfl_sync(~0u, own.oh, run);
      target.ow = __shfl_sync(~0u, own.ow, run), target.live = __shfl_sync(~0u, int(own.live), run) != 0;
      if (place.set.h + phase_h >= job.axis[1].taps.stride) continue;
      const std::int32_t unit = first_unit + run * 8 * Tile::kInsts;
      if (job.dense_y) {
        store.store_channels(staging + l * kRunFloats, unit, target, phase_h);
      } else {
        store.store_line(staging + l * kRunFloats, unit, target, phase_h);
      }
    }
  }
}

}  // namespace upfold::cuda
