// How the fused method stores sums whose rows are pixels: through shared memory, some runs of outputs at a time (fused_runs.cuh).
#pragma once

#include "fused_runs.cuh"

namespace upfold::cuda {

// A block of two warpgroups that multiply, each 64 * kM units, kPhasesH * kPhasesW phases and 8 * kOc8 output channels.
template <bool kWhole_, int kPhasesH_, int kPhasesW_, int kOc8_, int kM_, int kVectors_>
struct PixelTile {
  static constexpr bool kWhole = kWhole_;  // every shift has a tap in every phase, and one product takes all
  static constexpr int kPhasesH = kPhasesH_, kPhasesW = kPhasesW_, kPhases = kPhasesH * kPhasesW, kOc8 = kOc8_, kM = kM_;
  static constexpr int kChannels = 8 * kOc8, kUnits = 128 * kM, kVectors = kVectors_, kBlocks = 1;
  static constexpr int kColumns8 = kPhases * kOc8;  // column tiles of a product that takes all phases
  static constexpr int kWarps = 8, kThreads = 256, kFirstLoader = 256, kLoaders = 96, kBlockThreads = 384;
  static constexpr bool kGrouped = true, kPackedInputs = false, kListed = true;  // packed by groups of 8 channels
  static_assert(kM * kColumns8 <= 32 && kOc8 % 2 == 0, "128 sums of a thread, in pairs of column tiles");
  static_assert(kPhasesW <= 4, "a vector of 16 bytes");
};

// Of 16 bytes, of a warp: the runs of its 16 units in all width phases of a set.
template <typename Tile>
constexpr int kPixelStagedVectors = Tile::kPhasesW * kRunFloats / 4;

// A lane's two rows of 16 are neighbouring units where it can load them as one word of 64 bits, and stores them as one vector; or
// eight units apart, as matrices that are turned when they are read have them.
template <typename Value, typename Tile>
constexpr bool kPaired = Tile::kWhole && sizeof(Value) == 4 && Tile::kPhasesW == 2;
template <typename Value, typename Tile>
UPFOLD_DEVICE std::int32_t unit_of_row(std::int32_t row, std::int32_t half) {
  return kPaired<Value, Tile> ? 2 * row + half : 8 * half + row;
}

// The bias of a tile's channels (zeros where there is none), for lanes that store what they hold (FusedJob::direct): a warp loads
// it before the products, and puts it behind them where a lane finds that of its channels: in the staging, which then serves no
// other store.
template <typename Value, typename Tile>
struct TileBias {
  static constexpr int kOwn = (Tile::kChannels + 31) / 32;
  float own[kOwn];

  __device__ __forceinline__ TileBias(const FusedJob& job, const FusedPlace& place, const Value* bias) {
    const std::int32_t first = std::int32_t(place.oc_tile) * Tile::kChannels + std::int32_t(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool exists = bias != nullptr && first + i * 32 < job.oc;
      own[i] = exists ? widen(bias[std::int64_t(place.group) * job.oc + first + i * 32]) : 0.0f;
    }
  }

  __device__ __forceinline__ void put(float* staging) const {
    __syncwarp();  // everyone has left the staging
#pragma unroll
    for (int i = 0; i < kOwn; ++i) staging[i * 32 + std::int32_t(threadIdx.x) % 32] = own[i];
    __syncwarp();  // the bias is there
  }
};

// Adds bias and activation, and stores a warp's sums of kI times 16 units and 8 * kJ8 channels, from unit `first_unit` and
// channel `first_channel` of the tile on; `staging` is its own, of kPixelStagedVectors.
template <typename Value, typename Tile, int kI, int kJ8>
struct PixelStore {
  static constexpr int kRuns = Tile::kPhasesW, kRunUnits = kRunOutputs / Tile::kPhasesW;
  using Sums = float[kI][Tile::kPhases * kJ8][4];

  const FusedJob& job;
  const FusedPlace& place;
  const Value* bias;
  Value* y;
  float* staging;
  std::int32_t first_unit, first_channel;  // of the tile, where this warp's begin
  float least = least_of(job);

  // The sums of 16 units and 16 channels, of one height phase.
  template <int kAt, int kPair>
  __device__ __forceinline__ void stage(const Sums& sums, std::int32_t phase_h, const float (&added)[4]) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
#pragma unroll
    for (int ph = 0; ph < Tile::kPhasesH; ++ph) {
      if (ph != phase_h) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t unit = unit_of_row<Value, Tile>(lane / 4, half);
        float* const to = staging + unit / kRunUnits * kRunFloats + unit % kRunUnits * Tile::kPhasesW;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float values[Tile::kPhasesW];
#pragma unroll
          for (int p = 0; p < Tile::kPhasesW; ++p)
            values[p] = sums[kAt][(ph * Tile::kPhasesW + p) * kJ8 + kPair * 2 + c / 2][half * 2 + c % 2] + added[c];
          stage_words<4 * Tile::kPhasesW>(to + (c / 2 * 8 + lane % 4 * 2 + c % 2) * kRunPitch,
                                          reinterpret_cast<const std::uint32_t*>(values));
        }
      }
    }
  }

  template <int kPart>
  __device__ __forceinline__ void stage_part(const Sums& sums, std::int32_t part, std::int32_t phase_h,
                                             const float (&added)[4]) const {
    if constexpr (kPart < kI * kJ8 / 2) {
      if (part == kPart) return stage<kPart / (kJ8 / 2), kPart % (kJ8 / 2)>(sums, phase_h, added);
      stage_part<kPart + 1>(sums, part, phase_h, added);
    }
  }

  // Everything else: through shared memory, 16 channels at a time.
  __device__ __forceinline__ void store_staged(const Sums& sums) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    // A lane finds the place of one run.
    const UnitTarget own = target_of<Tile>(job, place, first_unit + lane % (kI * kRuns) * kRunUnits);
    const std::int32_t tile_channel = std::int32_t(place.oc_tile) * Tile::kChannels + first_channel;
#pragma unroll 1
    for (std::int32_t step = 0; step < kI * kJ8 / 2 * Tile::kPhasesH; ++step) {
      const std::int32_t phase_h = step % Tile::kPhasesH, part = step / Tile::kPhasesH;
      const std::int32_t channel = tile_channel + part % (kJ8 / 2) * 16;
      if (place.set.h + phase_h >= job.axis[1].taps.stride || channel >= job.oc) continue;
      const std::int64_t group_channel = std::int64_t(place.group) * job.oc + channel;
      float added[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const std::int32_t at = c / 2 * 8 + lane % 4 * 2 + c % 2;
        added[c] = bias != nullptr && channel + at < job.oc ? widen(bias[group_channel + at]) : 0.0f;
      }
      __syncwarp();  // everyone has left what was staged before
      stage_part<0>(sums, part, phase_h, added);
      __syncwarp();  // runs are staged
      if (job.activation != Activation::kNone) {
#pragma unroll 1
        for (std::int32_t i = lane; i < kRuns * kRunFloats; i += 32) {
          if (i % kRunPitch < kRunOutputs) staging[i] = finish(job.activation, job.slope, staging[i]);
        }
        __syncwarp();  // and finished
      }
      const RunStore<Value, Tile> store{job, place, y + group_channel * job.y_c, job.oc - channel, lane};
#pragma unroll 1
      for (std::int32_t l = 0; l < kRuns; ++l) {
        const std::int32_t run = part / (kJ8 / 2) * kRuns + l;
        UnitTarget target;
        target.offset = __shfl_sync(~0u, own.offset, run), target.oh = __shfl_sync(~0u, own.oh, run);
        target.ow = __shfl_sync(~0u, own.ow, run), target.live = __shfl_sync(~0u, int(own.live), run) != 0;
        const std::int32_t unit = first_unit + run * kRunUnits;
        if (job.dense_y) {
          store.store_channels(staging + l * kRunFloats, unit, target, phase_h);
        } else {
          store.store_line(staging + l * kRunFloats, unit, target, phase_h);
        }
      }
    }
  }

  // The outputs of a unit, or of two that are joined, in one height phase and one channel.
  template <int kAt, int kCount>
  __device__ __forceinline__ void gather(const Sums& sums, int ph, int j, int half, int c, float added,
                                         float (&values)[kCount]) const {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int column = (ph * Tile::kPhasesW + v % Tile::kPhasesW) * kJ8 + j;
      const float sum = sums[kAt][column][(half + v / Tile::kPhasesW) * 2 + c] + added;
      values[v] = larger(sum, least);
    }
  }

  // Where a warp's 16 units and all its channels exist: nothing is asked of an output. `kCount` outputs of a lane are one vector.
  template <int kAt, int kCount>
  __device__ __forceinline__ void store_whole(const Sums& sums, const UnitTarget (&targets)[2], Value* first,
                                              const float2 (&added)[kJ8]) const {
    pin(first);
#pragma unroll
    for (int ph = 0; ph < Tile::kPhasesH; ++ph) {
      constexpr int kParts = 2 * Tile::kPhasesW / kCount;  // vectors of a lane's two units, which are neighbouring sectors
      Value* to[kParts];
#pragma unroll
      for (int half = 0; half < kParts; ++half) to[half] = first + targets[half].offset + ph * job.y_axis[1];
#pragma unroll
      for (int j = 0; j < kJ8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
          for (int half = 0; half < kParts; ++half) {
            float values[kCount];
            gather<kAt, kCount>(sums, ph, j, half, c, c == 0 ? added[j].x : added[j].y, values);
            store_vector<kCount>(to[half] + c * job.y_c, values);
          }
        }
#pragma unroll
        for (int half = 0; half < kParts; ++half) to[half] += 8 * job.y_c;
      }
    }
  }

  // At the edges: each output is asked for.
  template <int kAt>
  __device__ __forceinline__ void store_edge(const Sums& sums, const UnitTarget (&targets)[2], Value* first,
                                             const float2 (&added)[kJ8], std::int32_t channels) const {
    pin(first);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int ph = 0; ph < Tile::kPhasesH; ++ph) {
        if (place.set.h + ph >= job.axis[1].taps.stride || !targets[half].live || targets[half].oh + ph >= job.axis[1].out)
          continue;
        Value* to = first + targets[half].offset + ph * job.y_axis[1];
#pragma unroll
        for (int j = 0; j < kJ8; ++j, to += 8 * job.y_c) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float values[Tile::kPhasesW];
            gather<kAt, Tile::kPhasesW>(sums, ph, j, half, c, c == 0 ? added[j].x : added[j].y, values);
            if (j * 8 + c < channels) store_vector<Tile::kPhasesW>(to + c * job.y_c, values);
          }
        }
      }
    }
  }

  template <int kAt>
  __device__ __forceinline__ void store_at(const Sums& sums, const float2 (&added)[kJ8]) const {
    if constexpr (kAt < kI) {
      const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
      const std::int32_t channel = std::int32_t(place.oc_tile) * Tile::kChannels + first_channel + lane % 4 * 2;
      Value* const first = y + (std::int64_t(place.group) * job.oc + channel) * job.y_c;
      UnitTarget targets[2];
      bool whole = place.set.h + Tile::kPhasesH <= job.axis[1].taps.stride && channel - lane % 4 * 2 + 8 * kJ8 <= job.oc;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        targets[half] = target_of<Tile>(job, place, first_unit + kAt * 16 + unit_of_row<Value, Tile>(lane / 4, half));
        whole = whole && targets[half].live && targets[half].oh + Tile::kPhasesH <= job.axis[1].out;
      }
      const bool joined = kPaired<Value, Tile> && job.joined && targets[0].ow % (2 * Tile::kPhasesW) == 0 &&
                          targets[1].offset == targets[0].offset + Tile::kPhasesW;
      constexpr int kMost = kPaired<Value, Tile> ? 2 * Tile::kPhasesW : Tile::kPhasesW;
      if (!__all_sync(~0u, whole)) {
        store_edge<kAt>(sums, targets, first, added, job.oc - channel);
      } else if (__all_sync(~0u, joined)) {
        store_whole<kAt, kMost>(sums, targets, first, added);
      } else {
        store_whole<kAt, Tile::kPhasesW>(sums, targets, first, added);
      }
      store_at<kAt + 1>(sums, added);
    }
  }

  // Adds the bias to all sums and applies a function to them. (A generic lambda would do, but NVRTC 11.7 takes it for host code.)
  struct Activate {
    Sums& sums;
    const float2 (&added)[kJ8];
    template <typename Function>
    __device__ __forceinline__ void operator()(const Function& function) const {
#pragma unroll
      for (int i = 0; i < kI * Tile::kPhases * kJ8 * 4; ++i) {
        float& sum = sums[i / (Tile::kPhases * kJ8 * 4)][i / 4 % (Tile::kPhases * kJ8)][i % 4];
        const float2& own = added[i / 4 % kJ8];
        sum = function(sum + (i % 2 == 0 ? own.x : own.y));
      }
    }
  };

  // Where the width phases of a unit are one aligned vector (FusedJob::direct): a lane stores what it holds.
  __device__ __forceinline__ void store_direct(Sums& sums) const {
    float2 added[kJ8];
#pragma unroll
    for (int j = 0; j < kJ8; ++j)
      added[j] = *reinterpret_cast<const float2*>(staging + first_channel + j * 8 + std::int32_t(threadIdx.x) % 4 * 2);
    if (is_activated_before(job.activation)) {
      with_activation(job.activation, job.slope, Activate{sums, added});
#pragma unroll
      for (int j = 0; j < kJ8; ++j) added[j] = {0.0f, 0.0f};
    }
    store_at<0>(sums, added);
  }

  // The sums are used up.
  __device__ __forceinline__ void store(Sums& sums) const {
    if constexpr (Tile::kPhasesW > 1) {
      if (job.direct) return store_direct(sums);
    }
    store_staged(sums);
  }
};

template <typename Value, typename Tile>
UPFOLD_DEVICE void store_pixels(const FusedJob& job, const FusedPlace& place, const Value* bias, Value* y, float* staging,
                                float (&sums)[Tile::kM][Tile::kColumns8][4]) {
  const std::int32_t first = std::int32_t(threadIdx.x) / 32 * 16 * Tile::kM;
  PixelStore<Value, Tile, Tile::kM, Tile::kOc8>{job, place, bias, y, staging, first, 0}.store(sums);
}

// Adds the partial sums of a split reduction in the order of its parts; a block stores 16 units and 16 channels of each warp.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) pixels_reduce_kernel(const FusedJob job, const float4* __restrict__ partial,
                                                                       const Value* __restrict__ bias, Value* __restrict__ y) {
  constexpr int kPairs = Tile::kOc8 / 2, kParts = Tile::kM * kPairs;
  constexpr std::int64_t kTileVectors = std::int64_t(Tile::kM) * Tile::kColumns8 * Tile::kThreads;
  __shared__ float4 staging[Tile::kWarps][kPixelStagedVectors<Tile>];
  const std::int32_t part = std::int32_t(blockIdx.x % kParts), splits = std::int32_t(job.splits.value);
  const std::int32_t i = part / kPairs, pair = part % kPairs, warp = std::int32_t(threadIdx.x) / 32;
  const std::uint32_t first_block = blockIdx.x / kParts * std::uint32_t(splits);
  const float4* const own =
      partial + first_block * kTileVectors + (i * Tile::kColumns8 + pair * 2) * Tile::kThreads + threadIdx.x;
  float sums[1][Tile::kPhases * 2][4] = {};
  for (std::int32_t split = 0; split < splits; ++split) {
#pragma unroll
    for (int c = 0; c < Tile::kPhases * 2; ++c) {
      const float4 v = own[split * kTileVectors + (c / 2 * Tile::kOc8 + c % 2) * Tile::kThreads];
      float(&sum)[4] = sums[0][c];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
  const FusedPlace place = place_of_block<Tile>(job, first_block);
  const std::int32_t unit = (warp * Tile::kM + i) * 16;
  float* const own_staging = reinterpret_cast<float*>(staging[warp]);
  if (job.direct) TileBias<Value, Tile>(job, place, bias).put(own_staging);
  PixelStore<Value, Tile, 1, 2>{job, place, bias, y, own_staging, unit, pair * 16}.store(sums);
}

}  // namespace upfold::cuda
