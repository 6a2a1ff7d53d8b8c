// Before and after the fused method's products: the weight laid out as its blocks read it, and the sum of a split reduction.
#pragma once

#include "fused_load.cuh"

namespace upfold::cuda {

// Of 16 bytes, of one thread's sums.
template <typename Tile>
constexpr int kPartialVectors = Tile::kPhases * Tile::kOc16 * Tile::kN8;

// The number of a set among all.
template <typename Tile>
UPFOLD_DEVICE std::int32_t number_of_set(const FusedJob& job, const FusedSet& set) {
  const std::int32_t row = set.d * std::int32_t(job.sets_h.value) + set.h / Tile::kPhasesH;
  return row * std::int32_t(job.sets_w.value) + set.w / Tile::kPhasesW;
}

// Where the weight of a block begins, in vectors of 16 bytes.
template <typename Tile>
UPFOLD_DEVICE std::int64_t packed_at(const FusedJob& job, const FusedPlace& place, std::int32_t set_number) {
  const std::int32_t sets = std::int32_t(job.sets_d.value * job.sets_h.value * job.sets_w.value);
  const std::int64_t tile = (std::int64_t(place.group) * sets + set_number) * job.oc_tiles.value + place.oc_tile;
  return tile * job.chunks * job.most_slots * (Tile::kVectors * Tile::kChannels);
}

// Adds the partial sums of a split reduction in the order of its parts; a block stores one unit tile of each of its warps.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) fused_reduce_kernel(const FusedJob job, const float4* __restrict__ partial,
                                                                      const Value* __restrict__ bias, Value* __restrict__ y) {
  const std::int32_t j = std::int32_t(blockIdx.x % Tile::kN8), splits = std::int32_t(job.splits.value);
  const std::uint32_t first_block = blockIdx.x / Tile::kN8 * std::uint32_t(splits);
  constexpr std::int64_t kBlockVectors = std::int64_t(kPartialVectors<Tile>) * Tile::kThreads;
  constexpr int kOwn = Tile::kPhases * Tile::kOc16;
  const float4* const own = partial + first_block * kBlockVectors + j * kOwn * Tile::kThreads + threadIdx.x;
  float sums[Tile::kPhases][Tile::kOc16][1][4] = {};
  for (std::int32_t split = 0; split < splits; ++split) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float4 v = own[split * kBlockVectors + i * Tile::kThreads];
      float(&sum)[4] = sums[i / Tile::kOc16][i % Tile::kOc16][0];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
  store_tile<Value, Tile, 1>(job, place_of_block<Tile>(job, first_block), {bias, y, nullptr, j}, sums);
}

// Where a vector of a channel lies in a slot: [vector][channel], or [group of 8 channels][vector][channel] where one product
// takes several slots, so that their groups of channels lie at one distance.
template <typename Tile>
UPFOLD_DEVICE std::int32_t place_in_slot(std::int32_t vector, std::int32_t channel) {
  if constexpr (Tile::kGrouped) return (channel / 8 * Tile::kVectors + vector) * 8 + channel % 8;
  return vector * Tile::kChannels + channel;
}

// inputs[sample][group][chunk][d][h][w][16 bytes of a vector], padded to the patches of all tiles and swizzled like them. A warp
// lays out kPackedPixels neighbouring pixels of kPackedChunks chunks: as many pixels as fill a sector of a channel's row when
// they are read, and lanes side by side that fill sectors when they are written.
template <typename Value, typename Tile>
UPFOLD_DEVICE void pack_inputs(const FusedJob& job, std::uint32_t number, const Value* __restrict__ x,
                               uint4* __restrict__ inputs) {
  constexpr int kVector = kVectorOf<Value>, kChannels = Tile::kVectors * kVector, kPixels = kPackedPixels<int(sizeof(Value))>;
  constexpr int kTogether = 32 / kPixels, kOwn = Tile::kVectors / kTogether, kChunks = kPackedChunks<int(sizeof(Value))>;
  static_assert(kOwn * kTogether == Tile::kVectors, "lanes share the vectors of a pixel");
  const std::uint32_t lane = threadIdx.x % 32,
                      plane = job.axis[0].padded.value * job.axis[1].padded.value * job.axis[2].padded.value;
  const std::uint32_t runs = (plane + kPixels - 1) / kPixels, parts = std::uint32_t(job.chunks + kChunks - 1) / kChunks;
  const std::uint32_t pixel = number % runs * kPixels + lane % kPixels;
  std::uint32_t rest = number / runs;
  const std::int32_t chunk = std::int32_t(rest % parts) * kChunks, vector = std::int32_t(lane) / kPixels;
  rest /= parts;
  const std::int32_t group = std::int32_t(rest % job.groups), n = std::int32_t(rest / job.groups);
  if (n >= job.batch || pixel >= plane) return;
  const std::int32_t ic = chunk * kChannels + vector * kVector;
  const Value* from = x + n * job.x_n + (std::int64_t(group) * job.ic + ic) * job.x_c;
  bool inside = true;
  std::uint32_t place = pixel, column = 0;
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    const std::uint32_t padded = take(job.axis[i].padded, place);
    if (i == 2) column = padded;
    const std::int32_t at = std::int32_t(padded) + job.axis[i].low;
    inside = inside && std::uint32_t(at) < std::uint32_t(job.axis[i].in);
    from += at * job.x_axis[i];
  }
  if (column >= std::uint32_t(job.live_columns)) return;
  Value values[kChunks][kOwn][kVector];
#pragma unroll
  for (int c = 0; c < kChunks * kOwn; ++c) {
    const std::int32_t first = c / kOwn * kChannels + c % kOwn * kTogether * kVector;  // behind the lane's first channel
    Value(&own)[kVector] = values[c / kOwn][c % kOwn];
    if (job.raw.dense && inside && ic + first < job.ic) {
      const uint4 vector_of_channels = *reinterpret_cast<const uint4*>(from + first);
#pragma unroll
      for (int e = 0; e < kVector; ++e) own[e] = reinterpret_cast<const Value*>(&vector_of_channels)[e];
      continue;
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const bool exists = inside && ic + first + e < job.ic;
      own[e] = exists ? from[(first + e) * job.x_c] : Narrow<Value>::from(0.0f);
    }
  }
  uint4* const to = inputs + ((std::int64_t(n) * job.groups + group) * job.chunks + chunk) * plane * Tile::kVectors +
                    std::int64_t(pixel) * Tile::kVectors;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (chunk + c >= job.chunks) break;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const std::uint32_t swizzled = std::uint32_t(vector + i * kTogether) ^ (column >> 1 & 3);
      to[std::int64_t(c) * plane * Tile::kVectors + swizzled] = pack_vector(values[c][i]);
    }
  }
}

// packed[group][set][oc_tile][chunk][slot][place_in_slot][16 bytes]; a block lays out one vector of a chunk, of one set and
// oc_tile. The list of every set that the job has no table of is written by its first block. Where x is packed too, the blocks
// behind `blocks` lay it out.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(kPackThreads)
    fused_pack_kernel(const __grid_constant__ FusedJob job, const Value* __restrict__ w, ShiftList* __restrict__ lists,
                      uint4* __restrict__ packed, const Value* __restrict__ x, uint4* __restrict__ inputs, std::uint32_t blocks) {
  take_turn();
  if constexpr (Tile::kPackedInputs) {
    if (blockIdx.x >= blocks) {
      return pack_inputs<Value, Tile>(job, ((blockIdx.x - blocks) * blockDim.x + threadIdx.x) / 32, x, inputs);
    }
  }
  constexpr int kVector = kVectorOf<Value>;
  __shared__ std::int32_t tap_of_slot[kMostShifts * Tile::kPhases];
  std::uint32_t rest = blockIdx.x / Tile::kVectors;
  const std::int32_t vector = std::int32_t(blockIdx.x) % Tile::kVectors;
  const std::int32_t chunk = std::int32_t(rest % std::uint32_t(job.chunks));
  uint4* const own = packed + std::int64_t(rest) * job.most_slots * (Tile::kVectors * Tile::kChannels);
  rest /= std::uint32_t(job.chunks);
  const std::int32_t oc_tile = std::int32_t(take(job.oc_tiles, rest)), set_and_group = std::int32_t(rest);
  const std::int32_t tid = std::int32_t(threadIdx.x), threads = std::int32_t(blockDim.x);
  FusedSet set;
  set.w = std::int32_t(take(job.sets_w, rest)) * Tile::kPhasesW, set.h = std::int32_t(take(job.sets_h, rest)) * Tile::kPhasesH;
  set.d = std::int32_t(take(job.sets_d, rest));
  std::int32_t slots = 0;
  if constexpr (Tile::kListed) {
    const std::uint16_t* const taps = job.taps + number_of_set<Tile>(job, set) * job.most_slots;
    for (std::int32_t first = 0; first < job.most_slots; first += threads) {
      const std::uint16_t tap = first + tid < job.most_slots ? taps[first + tid] : kNoTap;
      if (tap != kNoTap) tap_of_slot[first + tid] = tap;
      slots += __syncthreads_count(tap != kNoTap);  // and the taps are there
    }
  } else {
    __shared__ ShiftList list;
    build_list<Tile::kPhasesH, Tile::kPhasesW>(job, set, list, tap_of_slot);
    slots = list.slots;
    if (rest == 0 && chunk == 0 && oc_tile == 0 && vector == 0) {
      for (std::int32_t i = tid; i < std::int32_t(sizeof(ShiftList) / 16); i += threads)
        reinterpret_cast<uint4*>(lists + set_and_group)[i] = reinterpret_cast<const uint4*>(&list)[i];
    }
  }
  const std::int32_t kernel_w = job.axis[2].taps.kernel, kernel_h = job.axis[1].taps.kernel;
  const std::int32_t ic = (chunk * Tile::kVectors + vector) * kVector;
  const Value* const from = w + (std::int64_t(rest) * job.ic + ic) * job.w_ic;
  // Neighbouring threads read the taps of one channel, which lie together.
  for (std::int32_t i = tid; i < slots * Tile::kChannels; i += threads) {
    const std::int32_t channel = i / slots, slot = i - channel * slots, oc = oc_tile * Tile::kChannels + channel;
    const std::int32_t tap = tap_of_slot[slot];
    const Value* const at = from + oc * job.w_oc + tap / kernel_w / kernel_h * job.w_axis[0] +
                            tap / kernel_w % kernel_h * job.w_axis[1] + tap % kernel_w * job.w_axis[2];
    Value values[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) values[e] = oc < job.oc && ic + e < job.ic ? at[e * job.w_ic] : Narrow<Value>::from(0.0f);
    own[slot * (Tile::kVectors * Tile::kChannels) + place_in_slot<Tile>(vector, channel)] = pack_vector(values);
  }
}

}  // namespace upfold::cuda
