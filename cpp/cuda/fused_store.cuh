// How the fused method's blocks are cut out of a problem, and how they store their sums.
#pragma once

#include "activation.cuh"
#include "fused.cuh"
#include "lanes.cuh"
#include "mma.cuh"

namespace upfold::cuda {

template <int kOc16_, int kPhasesH_, int kPhasesW_, int kWarpsM_, int kWarpsN_, int kN8_, int kVectors_, int kBlocks_>
struct FusedTile {
  static constexpr int kOc16 = kOc16_, kPhasesH = kPhasesH_, kPhasesW = kPhasesW_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kN8 = kN8_, kPhases = kPhasesH * kPhasesW, kWarps = kWarpsM * kWarpsN, kThreads = 32 * kWarps;
  static constexpr int kChannels = 16 * kOc16 * kWarpsM, kUnits = 8 * kN8 * kWarpsN, kVectors = kVectors_, kBlocks = kBlocks_;
  static constexpr int kLoaders = kThreads, kFirstLoader = 0;
  static constexpr bool kSwizzled = false, kGrouped = false, kPackedInputs = false, kListed = false;
};

// What a block works on.
struct FusedPlace {
  std::uint32_t oc_tile, group;
  FusedSet set;
  std::int32_t split;
  std::uint32_t tile;              // number of the pixel tile
  std::int32_t first_n, first[3];  // its first sample and units; in flat mode `tile` says all
};

template <typename Tile>
UPFOLD_DEVICE FusedPlace place_of_block(const FusedJob& job, std::uint32_t rest) {
  FusedPlace place;
  place.split = std::int32_t(take(job.splits, rest));
  place.oc_tile = take(job.oc_tiles, rest);
  place.set.w = std::int32_t(take(job.sets_w, rest)) * Tile::kPhasesW;
  place.set.h = std::int32_t(take(job.sets_h, rest)) * Tile::kPhasesH;
  place.set.d = std::int32_t(take(job.sets_d, rest));
  place.tile = take(job.pixel_tiles, rest);
  place.group = rest;
  std::uint32_t tile = place.tile;
#pragma unroll
  for (int i = 2; i >= 0; --i) place.first[i] = std::int32_t(take(job.axis[i].tiles, tile)) * job.axis[i].tile;
  place.first_n = std::int32_t(tile) * job.tile_n;
  return place;
}

struct UnitAt {
  std::int32_t n, at[3];
  bool live;
};

// Unit number `unit` of the block's tile.
template <typename Tile>
UPFOLD_DEVICE UnitAt unit_at(const FusedJob& job, const FusedPlace& place, std::int32_t unit) {
  UnitAt found;
  if (job.flat) {
    const std::int64_t number = std::int64_t(place.tile) * Tile::kUnits + unit;
    found.live = number < job.units;
    std::uint32_t rest = found.live ? std::uint32_t(number) : 0;
#pragma unroll
    for (int i = 2; i >= 0; --i) found.at[i] = std::int32_t(take(job.axis[i].units, rest));
    found.n = std::int32_t(rest);
    return found;
  }
  found.live = true;
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    found.at[i] = place.first[i] + (unit & (job.axis[i].tile - 1));
    found.live = found.live && found.at[i] < std::int32_t(job.axis[i].units.value);
    unit >>= job.axis[i].tile_log;
  }
  found.n = place.first_n + unit;
  found.live = found.live && found.n < job.batch;
  return found;
}

// Where the outputs of one unit lie: the offset in y, without the channel, of the set's first phases on each axis.
struct UnitTarget {
  std::int64_t offset;
  std::int32_t oh, ow;
  bool live;
};

template <typename Tile>
UPFOLD_DEVICE UnitTarget target_of(const FusedJob& job, const FusedPlace& place, std::int32_t number) {
  const UnitAt unit = unit_at<Tile>(job, place, number);
  const std::int32_t od = unit.at[0] * job.axis[0].taps.stride + place.set.d;
  UnitTarget target;
  target.oh = unit.at[1] * job.axis[1].taps.stride + place.set.h;
  target.ow = unit.at[2] * job.axis[2].taps.stride + place.set.w;
  target.live = unit.live && od < job.axis[0].out;
  target.offset = unit.n * job.y_n + od * job.y_axis[0] + target.oh * job.y_axis[1] + target.ow * job.y_axis[2];
  return target;
}

// The targets of unit `number`, which is even, and the next one.
template <typename Tile>
UPFOLD_DEVICE void targets_of(const FusedJob& job, const FusedPlace& place, std::int32_t number, UnitTarget (&targets)[2]) {
  targets[0] = target_of<Tile>(job, place, number);
  if (job.flat || job.axis[2].tile == 1) {
    targets[1] = target_of<Tile>(job, place, number + 1);
    return;
  }
  const std::int32_t stride = job.axis[2].taps.stride;
  targets[1] = targets[0];
  targets[1].ow += stride, targets[1].offset += stride * job.y_axis[2];
  targets[1].live = targets[0].live && targets[1].ow < job.axis[2].out;
}

// Stores the width's phases of two units, in one phase of the height, to the line that starts at `line`.
template <typename Value, typename Tile>
UPFOLD_DEVICE void store_phases(const FusedJob& job, const FusedPlace& place, const UnitTarget (&targets)[2], bool wide,
                                Value* line, std::int32_t phase_h, const float (&v)[2 * Tile::kPhasesW]) {
  constexpr int kRun = 2 * Tile::kPhasesW, kWide = kRun * int(sizeof(Value)) <= 16 ? kRun : 16 / int(sizeof(Value));
  if constexpr ((kRun & (kRun - 1)) == 0) {
    if (wide) {
      if (targets[0].oh + phase_h >= job.axis[1].out) return;
#pragma unroll
      for (int i = 0; i < kRun; i += kWide) {
        struct alignas(kWide * sizeof(Value)) {
          Value v[kWide];
        } vector;
#pragma unroll
        for (int j = 0; j < kWide; ++j) vector.v[j] = Narrow<Value>::from(v[i + j]);
        *reinterpret_cast<decltype(vector)*>(line + targets[0].offset + i) = vector;
      }
      return;
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    if (!targets[u].live || targets[u].oh + phase_h >= job.axis[1].out) continue;
#pragma unroll
    for (int p = 0; p < Tile::kPhasesW; ++p) {
      if (place.set.w + p >= job.axis[2].taps.stride || targets[u].ow + p >= job.axis[2].out) continue;
      line[targets[u].offset + p * job.y_axis[2]] = Narrow<Value>::from(v[u * Tile::kPhasesW + p]);
    }
  }
}

template <typename Value>
struct StoreOperands {
  const Value* bias;
  Value* y;
  uint4* staging;      // shared memory of the block, or null
  std::int32_t first;  // unit tile of a warp that the sums begin with
};

// A warp's place in its block, and a lane's in the warp.
template <typename Tile>
struct WarpPlace {
  std::int32_t lane, warp, channel, unit_tile;  // first channel of the block's, first unit tile

  __device__ __forceinline__ WarpPlace(const FusedPlace& place, std::int32_t first) {
    lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
    channel = std::int32_t(place.oc_tile) * Tile::kChannels + warp % Tile::kWarpsM * 16 * Tile::kOc16;
    unit_tile = warp / Tile::kWarpsM * Tile::kN8 + first;
  }
};

// Whether both units lie in one row, side by side, in an aligned vector.
template <typename Tile>
UPFOLD_DEVICE bool are_wide(const FusedJob& job, const UnitTarget (&targets)[2]) {
  return job.wide && targets[0].ow % (2 * Tile::kPhasesW) == 0 && targets[0].live && targets[1].live &&
         targets[1].ow + Tile::kPhasesW <= job.axis[2].out && targets[1].offset == targets[0].offset + Tile::kPhasesW &&
         targets[0].oh == targets[1].oh;
}

// Where y is channels-last: sums pass through shared memory, so that a lane stores 16 bytes of channels.
template <typename Value, typename Tile, int kN8>
UPFOLD_DEVICE void store_channels(const FusedJob& job, const FusedPlace& place, const StoreOperands<Value>& operands,
                                  const float (&sums)[Tile::kPhases][Tile::kOc16][kN8][4]) {
  constexpr int kVector = kWordBytes / int(sizeof(Value)), kChannels = 16 * Tile::kOc16, kVectors = kChannels / kVector;
  constexpr int kPitch = kChannels + kVector, kRounds = 8 * kVectors > 32 ? 8 * kVectors / 32 : 1;
  const WarpPlace<Tile> at(place, operands.first);
  Value* const staging = reinterpret_cast<Value*>(operands.staging) + at.warp * 8 * kPitch;
  Value* const y = operands.y + std::int64_t(place.group) * job.oc + at.channel;
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
    UnitTarget targets[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const std::int32_t i = at.lane + r * 32;
      targets[r] = target_of<Tile>(job, place, (at.unit_tile + j) * 8 + i / kVectors % 8);
      targets[r].live = targets[r].live && i < 8 * kVectors && at.channel + i % kVectors * kVector < job.oc;
    }
#pragma unroll
    for (int p = 0; p < Tile::kPhases; ++p) {
      const std::int32_t ph = p / Tile::kPhasesW, pw = p % Tile::kPhasesW;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4 * Tile::kOc16; ++i) {
        const std::int32_t channel = i / 2 * 8 + at.lane / 4, unit = at.lane % 4 * 2 + i % 2;
        staging[unit * kPitch + channel] = Narrow<Value>::from(sums[p][i / 4][j][i % 4]);
      }
      __syncwarp();
      if (place.set.h + ph >= job.axis[1].taps.stride || place.set.w + pw >= job.axis[2].taps.stride) continue;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        if (!targets[r].live || targets[r].oh + ph >= job.axis[1].out || targets[r].ow + pw >= job.axis[2].out) continue;
        const std::int32_t i = at.lane + r * 32;
        const uint4 vector = *reinterpret_cast<const uint4*>(staging + i / kVectors % 8 * kPitch + i % kVectors * kVector);
        Value* const to = y + targets[r].offset + ph * job.y_axis[1] + pw * job.y_axis[2] + i % kVectors * kVector;
        *reinterpret_cast<uint4*>(to) = vector;
      }
    }
  }
}

// Sets of one phase, 16 bits: lanes of two neighbouring rows exchange halves of two unit tiles, so that eight lanes store a row's
// 32 bytes together.
template <typename Value, typename Tile, int kN8>
UPFOLD_DEVICE void store_row_pairs(const FusedJob& job, const FusedPlace& place, const StoreOperands<Value>& operands,
                                   const float (&sums)[Tile::kPhases][Tile::kOc16][kN8][4]) {
  const WarpPlace<Tile> at(place, operands.first);
  const bool odd = at.lane & 4;
#pragma unroll
  for (int j = 0; j < kN8; j += 2) {
    UnitTarget targets[2];
    targets_of<Tile>(job, place, (at.unit_tile + j + odd) * 8 + at.lane % 4 * 2, targets);
    const bool wide = are_wide<Tile>(job, targets);
#pragma unroll
    for (int row = 0; row < 2 * Tile::kOc16; ++row) {
      const float(&c)[4] = sums[0][row / 2][j];
      const float(&d)[4] = sums[0][row / 2][j + 1];
      const std::uint32_t first = pair_of<Value>(c[row % 2 * 2], c[row % 2 * 2 + 1]);
      const std::uint32_t second = pair_of<Value>(d[row % 2 * 2], d[row % 2 * 2 + 1]);
      const std::uint32_t own = odd ? second : first, got = exchange(odd ? first : second, 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // the even row, the odd row
        const std::int32_t oc = at.channel + row * 8 + at.lane / 8 * 2 + r;
        if (oc >= job.oc) continue;
        const std::uint32_t word = odd == (r == 1) ? own : got;
        Value* const line = operands.y + (std::int64_t(place.group) * job.oc + oc) * job.y_c;
        if (wide) {
          if (targets[0].oh < job.axis[1].out) *reinterpret_cast<std::uint32_t*>(line + targets[0].offset) = word;
          continue;
        }
        Value values[2];
        memcpy(values, &word, 4);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          if (targets[u].live && targets[u].oh < job.axis[1].out && targets[u].ow < job.axis[2].out)
            line[targets[u].offset] = values[u];
        }
      }
    }
  }
}

// A thread stores what it holds.
template <typename Value, typename Tile, int kN8>
UPFOLD_DEVICE void store_lines(const FusedJob& job, const FusedPlace& place, const StoreOperands<Value>& operands,
                               const float (&sums)[Tile::kPhases][Tile::kOc16][kN8][4]) {
  const WarpPlace<Tile> at(place, operands.first);
#pragma unroll
  for (int j = 0; j < kN8; ++j) {
    UnitTarget targets[2];
    targets_of<Tile>(job, place, (at.unit_tile + j) * 8 + at.lane % 4 * 2, targets);
    const bool wide = are_wide<Tile>(job, targets);
#pragma unroll
    for (int row = 0; row < 2 * Tile::kOc16; ++row) {
      const std::int32_t oc = at.channel + row * 8 + at.lane / 4;
      if (oc >= job.oc) continue;
      Value* const line = operands.y + (std::int64_t(place.group) * job.oc + oc) * job.y_c;
#pragma unroll
      for (int ph = 0; ph < Tile::kPhasesH; ++ph) {
        if (place.set.h + ph >= job.axis[1].taps.stride) continue;
        float values[2 * Tile::kPhasesW];
#pragma unroll
        for (int i = 0; i < 2 * Tile::kPhasesW; ++i) {
          values[i] = sums[ph * Tile::kPhasesW + i % Tile::kPhasesW][row / 2][j][row % 2 * 2 + i / Tile::kPhasesW];
        }
        store_phases<Value, Tile>(job, place, targets, wide, line + ph * job.y_axis[1], ph, values);
      }
    }
  }
}

// Adds bias and activation, and stores kN8 unit tiles of a warp's sums.
template <typename Value, typename Tile, int kN8>
UPFOLD_DEVICE void store_tile(const FusedJob& job, const FusedPlace& place, const StoreOperands<Value>& operands,
                              float (&sums)[Tile::kPhases][Tile::kOc16][kN8][4]) {
  const WarpPlace<Tile> at(place, operands.first);
#pragma unroll
  for (int row = 0; row < 2 * Tile::kOc16; ++row) {
    const std::int32_t oc = at.channel + row * 8 + at.lane / 4;
    const bool exists = operands.bias != nullptr && oc < job.oc;
    const float added = exists ? widen(operands.bias[std::int64_t(place.group) * job.oc + oc]) : 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kN8 * Tile::kPhases; ++i) {
      float& sum = sums[i / 2 / kN8][row / 2][i / 2 % kN8][row % 2 * 2 + i % 2];
      sum += added;
      if (job.activation != Activation::kNone) sum = finish(job.activation, job.slope, sum);
    }
  }
  if (job.dense_y && operands.staging != nullptr) return store_channels<Value, Tile, kN8>(job, place, operands, sums);
  if constexpr (sizeof(Value) == 2 && Tile::kPhases == 1 && kN8 % 2 == 0) {
    if (job.wide) return store_row_pairs<Value, Tile, kN8>(job, place, operands, sums);
  }
  store_lines<Value, Tile, kN8>(job, place, operands, sums);
}

}  // namespace upfold::cuda
