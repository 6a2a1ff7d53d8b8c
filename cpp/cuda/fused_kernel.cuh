// The fused method: a transposed convolution in one pass on tensor cores, without columns.
//
// A block owns kChannels output channels of one group, one set of phases (fused.cuh) and one tile of kUnits units, and is the
// only writer of these outputs. Rows of the products are output channels, one 16-row tile for each phase; columns are units. A
// warp owns kOc16 * 16 channels in every phase of the set and kN8 * 8 units, so that a thread holds neighbouring outputs: the
// width's phases of two neighbouring units.
//   raw      [channel][row of the patch][element]         a chunk of x as it lies in memory, or [vector][pixel][16 bytes]
//   patch    [vector][pixel][16 bytes]                    the same, turned so that 16 bytes hold the channels of one pixel
//   weight   [2][slot][vector][channel][16 bytes]         by chunk and group of shifts, as the pack kernel laid it out
// Raw inputs and packed weights are copied asynchronously one step ahead. Sums are taken in one fixed order.
#pragma once

#include "fused_store.cuh"

namespace upfold::cuda {

template <typename Value>
constexpr int kVectorOf = kWordBytes / int(sizeof(Value));  // channels in 16 bytes

// The pixel of the patch where unit number `unit` has displacement (low, low, low).
UPFOLD_DEVICE std::int32_t patch_pixel(const FusedJob& job, std::int32_t unit) {
  if (job.flat) return unit;
  std::int32_t at[3];
#pragma unroll
  for (int i = 2; i >= 0; --i) at[i] = unit & (job.axis[i].tile - 1), unit >>= job.axis[i].tile_log;
  std::int32_t pixel = unit;
#pragma unroll
  for (int i = 0; i < 3; ++i) pixel = pixel * std::int32_t(job.axis[i].patch.value) + at[i];
  return pixel;
}

UPFOLD_DEVICE std::uint32_t word_of(const __half* v) {
  return std::uint32_t(__half_as_ushort(v[0])) | std::uint32_t(__half_as_ushort(v[1])) << 16;
}
UPFOLD_DEVICE std::uint32_t word_of(const __nv_bfloat16* v) {
#if __CUDA_ARCH__ >= 800
  return std::uint32_t(__bfloat16_as_ushort(v[0])) | std::uint32_t(__bfloat16_as_ushort(v[1])) << 16;
#else  // older toolkits name the conversion for these devices only, and no other device runs this kernel
  (void)v;
  return 0;
#endif
}
UPFOLD_DEVICE std::uint32_t word_of(const float* v) { return to_tf32(*v); }

template <typename Value>
UPFOLD_DEVICE uint4 pack_vector(const Value (&v)[kVectorOf<Value>]) {
  constexpr int kStep = 4 / int(sizeof(Value));
  return {word_of(v), word_of(v + kStep), word_of(v + 2 * kStep), word_of(v + 3 * kStep)};
}

template <typename Tile>
UPFOLD_DEVICE RawColumn raw_column(const FusedJob& job, const FusedPlace& place, std::int32_t column, std::int32_t size) {
  std::int32_t n, at[3];
  bool inside = true;
  RawColumn found;
  if (job.flat) {
    const UnitAt unit = unit_at<Tile>(job, place, column);
    inside = unit.live;
    n = unit.n;
#pragma unroll
    for (int i = 0; i < 3; ++i) at[i] = unit.at[i] + job.axis[i].low;
    found.to = column * (job.raw.dense ? kWordBytes : size);
  } else {
    std::uint32_t rest = std::uint32_t(column);
    const std::int32_t w = std::int32_t(take(job.raw.row_columns, rest)) * (job.raw.dense ? 1 : job.raw.grain / size);
    found.to = job.raw.dense ? column * kWordBytes : (std::int32_t(rest) * job.raw.span + w) * size;
    at[2] = place.first[2] + job.axis[2].low - job.raw.skew + w;
#pragma unroll
    for (int i = 1; i >= 0; --i) at[i] = place.first[i] + job.axis[i].low + std::int32_t(take(job.axis[i].patch, rest));
    n = place.first_n + std::int32_t(rest);
    inside = n < job.batch;
  }
  found.from = n * job.x_n;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    inside = inside && std::uint32_t(at[i]) < std::uint32_t(job.axis[i].in);
    found.from += at[i] * job.x_axis[i];
  }
  if (!inside) found.from = -1;
  return found;
}

// Copies one chunk of raw x; warps take its channels (or vectors) in turn, lanes the columns.
template <typename Value, typename Tile, int kGrain>
UPFOLD_DEVICE void copy_raw_by(const FusedJob& job, const RawColumn* columns, const Value* x, std::int32_t left,
                               unsigned char* raw) {
  constexpr int kVector = kVectorOf<Value>;
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, lane = std::int32_t(threadIdx.x) % 32;
  const std::int32_t step = job.raw.dense ? kVector : 1, rows = job.raw.dense ? Tile::kVectors : Tile::kVectors * kVector;
  const std::int32_t together = rows < Tile::kWarps ? rows : Tile::kWarps;  // rows that warps copy at a time
  for (std::int32_t c = lane + 32 * (warp / together); c < job.raw.columns; c += 32 * (Tile::kWarps / together)) {
    const RawColumn column = columns[c];
    const Value* from = x + (column.from < 0 ? 0 : column.from) + (warp % together * step) * job.x_c;
    unsigned char* to = raw + warp % together * job.raw.pitch + column.to;
    for (std::int32_t row = warp % together; row < rows; row += together) {
      const bool live = column.from >= 0 && row * step < left;
      if constexpr (kGrain >= 4) {
        copy_async<kGrain>(shared_address(to), live ? from : x, live);
      } else {
        *reinterpret_cast<Value*>(to) = live ? *from : Narrow<Value>::from(0.0f);
      }
      from += together * step * job.x_c, to += together * job.raw.pitch;
    }
  }
}

template <typename Value, typename Tile>
UPFOLD_DEVICE void copy_raw(const FusedJob& job, const RawColumn* columns, const Value* x, std::int32_t left,
                            unsigned char* raw) {
  if (job.raw.grain == 16) return copy_raw_by<Value, Tile, 16>(job, columns, x, left, raw);
  if (job.raw.grain == 8) return copy_raw_by<Value, Tile, 8>(job, columns, x, left, raw);
  if (sizeof(Value) == 4 || job.raw.grain == 4) return copy_raw_by<Value, Tile, 4>(job, columns, x, left, raw);
  copy_raw_by<Value, Tile, 2>(job, columns, x, left, raw);
}

// Turns a chunk of raw x into the patch.
template <typename Value, typename Tile>
UPFOLD_DEVICE void turn(const FusedJob& job, const unsigned char* raw, uint4* patch) {
  constexpr int kVector = kVectorOf<Value>;
  const std::int32_t tid = std::int32_t(threadIdx.x), warp = tid / 32, lane = tid % 32;
  if (job.raw.dense) {
    for (std::int32_t i = tid; i < job.patch_pixels; i += Tile::kThreads) {
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        Value values[kVector];
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(raw + v * job.raw.pitch + i * kWordBytes);
        patch[v * job.patch_pitch + i] = pack_vector(values);
      }
    }
    return;
  }
  const std::int32_t patch_w = job.flat ? job.patch_pixels : std::int32_t(job.axis[2].patch.value);
  if constexpr (sizeof(Value) == 2) {
    std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(patch);
    constexpr int kTogether = 4 / Tile::kVectors, kChannels = 8 * Tile::kVectors;  // groups in four matrices; lanes of one
    for (std::int32_t i = warp * kTogether; i < job.raw.groups; i += Tile::kWarps * kTogether) {
      std::uint32_t rows[kTogether];
      std::int32_t firsts[kTogether], from = 0;
#pragma unroll
      for (int h = 0; h < kTogether; ++h) {
        rows[h] = std::uint32_t(i + h < job.raw.groups ? i + h : i);
        firsts[h] = std::int32_t(take(job.raw.row_groups, rows[h])) * 8;
        if (h == 0 || lane / kChannels == h) from = std::int32_t(rows[h]) * job.raw.span + firsts[h];
      }
      std::uint32_t pairs[4];
      load_turned_matrices(pairs, shared_address(raw + lane % kChannels * job.raw.pitch + from * 2));
#pragma unroll
      for (int h = 0; h < kTogether; ++h) {
        const std::int32_t w = firsts[h] + lane / 4 - job.raw.skew, pixel = std::int32_t(rows[h]) * patch_w + w;
        if (std::uint32_t(w) >= std::uint32_t(patch_w) || i + h >= job.raw.groups) continue;
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v)
          words[(v * job.patch_pitch + pixel) * 4 + lane % 4] = pairs[h * Tile::kVectors + v];
      }
    }
  } else {
    for (std::int32_t i = tid; i < job.raw.groups; i += Tile::kThreads) {
      std::uint32_t row = std::uint32_t(i);
      const std::int32_t at = std::int32_t(take(job.raw.row_groups, row)), w = at - job.raw.skew;
      if (std::uint32_t(w) >= std::uint32_t(patch_w)) continue;
      const unsigned char* const from = raw + (std::int32_t(row) * job.raw.span + at) * 4;
      const std::int32_t pixel = std::int32_t(row) * patch_w + w;
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        Value values[kVector];
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[e] = *reinterpret_cast<const Value*>(from + (v * kVector + e) * job.raw.pitch);
        patch[v * job.patch_pitch + pixel] = pack_vector(values);
      }
    }
  }
}

// Multiplies the slots of the shifts from `begin` to `end`; `b_rows` are this lane's rows of each pair of unit tiles.
template <typename Value, typename Tile>
UPFOLD_DEVICE void multiply_shifts(const ShiftList& list, std::int32_t begin, std::int32_t end, std::uint32_t a_at,
                                   const std::uint32_t (&b_rows)[Tile::kN8 / 2], std::uint32_t vector_pitch,
                                   float (&sums)[Tile::kPhases][Tile::kOc16][Tile::kN8][4]) {
  constexpr std::uint32_t kVectorBytes = Tile::kChannels * kWordBytes, kSlotBytes = Tile::kVectors * kVectorBytes;
  for (std::int32_t s = begin; s < end; ++s) {
    const std::uint32_t phases = list.phases[s];
    const std::uint32_t b_at = std::uint32_t(list.offset[s]) * kWordBytes;
#pragma unroll
    for (int k = 0; k < Tile::kVectors; k += 2) {
      std::uint32_t b[Tile::kN8 / 2][4];
#pragma unroll
      for (int j = 0; j < Tile::kN8 / 2; ++j) load_matrices(b[j], b_at + b_rows[j] + std::uint32_t(k) * vector_pitch);
      std::uint32_t a_slot = a_at + std::uint32_t(k) * kVectorBytes;
#pragma unroll
      for (int p = 0; p < Tile::kPhases; ++p) {
        if (Tile::kPhases > 1 && (phases >> p & 1) == 0) continue;
        std::uint32_t a[Tile::kOc16][4];
#pragma unroll
        for (int o = 0; o < Tile::kOc16; ++o) load_matrices(a[o], a_slot + std::uint32_t(o * 16 * kWordBytes));
#pragma unroll
        for (int o = 0; o < Tile::kOc16; ++o) {
#pragma unroll
          for (int j = 0; j < Tile::kN8; ++j) {
            TensorCore<Value>::add(sums[p][o][j], a[o], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
          }
        }
        a_slot += kSlotBytes;
      }
    }
    a_at += std::uint32_t(Tile::kPhases > 1 ? __popc(phases) : 1) * kSlotBytes;
  }
}

// Of 16 bytes, of one thread's sums.
template <typename Tile>
constexpr int kPartialVectors = Tile::kPhases * Tile::kOc16 * Tile::kN8;

template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_kernel(const FusedJob job, const Value* __restrict__ x, const ShiftList* __restrict__ lists,
                 const uint4* __restrict__ packed, const Value* __restrict__ bias, Value* __restrict__ y,
                 float4* __restrict__ partial) {
  constexpr int kChunk = Tile::kVectors * kVectorOf<Value>;
  extern __shared__ uint4 memory[];
  __shared__ ShiftList list;
  const std::int32_t tid = std::int32_t(threadIdx.x), lane = tid % 32, warp = tid / 32;
  const std::int32_t warp_m = warp % Tile::kWarpsM, warp_n = warp / Tile::kWarpsM;
  const FusedPlace place = place_of_block<Tile>(job, blockIdx.x);
  constexpr std::int32_t kSlotWords = Tile::kVectors * Tile::kChannels;
  const std::int32_t stage_words = job.stage_slots * kSlotWords;
  RawColumn* const columns = reinterpret_cast<RawColumn*>(memory);
  uint4* const patch = memory + job.raw.columns;
  const std::uint32_t weight_address = shared_address(patch + Tile::kVectors * job.patch_pitch);
  unsigned char* const raw = reinterpret_cast<unsigned char*>(patch + Tile::kVectors * job.patch_pitch + 2 * stage_words);

  const std::int32_t set_number =
      (place.set.d * std::int32_t(job.sets_h.value) + place.set.h / Tile::kPhasesH) * std::int32_t(job.sets_w.value) +
      place.set.w / Tile::kPhasesW;
  const std::int32_t sets = std::int32_t(job.sets_d.value * job.sets_h.value * job.sets_w.value);
  for (std::int32_t i = tid; i < job.raw.columns; i += Tile::kThreads) {
    columns[i] = raw_column<Tile>(job, place, i, std::int32_t(sizeof(Value)));
  }
  for (std::int32_t i = tid; i < std::int32_t(sizeof(ShiftList) / 16); i += Tile::kThreads) {
    reinterpret_cast<uint4*>(&list)[i] = reinterpret_cast<const uint4*>(lists + set_number)[i];
  }
  __syncthreads();  // columns and list are complete

  const uint4* const own_packed =
      packed + ((std::int64_t(place.group) * sets + set_number) * job.oc_tiles.value + place.oc_tile) * job.chunks *
                   job.most_slots * kSlotWords;
  const std::int32_t shifts = list.shifts, groups = (shifts + job.group_shifts - 1) / job.group_shifts;
  const auto copy_weights = [&](std::int32_t chunk, std::int32_t group, std::int32_t stage) {
    const std::int32_t begin = group * job.group_shifts, end = begin + job.group_shifts;
    const std::int32_t first = list.first_slot[begin],
                       words = (list.first_slot[end < shifts ? end : shifts] - first) * kSlotWords;
    const uint4* from = own_packed + (std::int64_t(chunk) * job.most_slots + first) * kSlotWords + tid;
    std::uint32_t to = weight_address + std::uint32_t(stage * stage_words + tid) * kWordBytes;
    for (std::int32_t i = tid; i < words; i += Tile::kThreads) {
      copy_async<kWordBytes>(to, from, true);
      from += Tile::kThreads, to += Tile::kThreads * kWordBytes;
    }
  };
  const Value* const own_x = x + std::int64_t(place.group) * job.ic * job.x_c;

  // Rows that this lane names to ldmatrix: of b, unit lane % 8 of tiles 2j and 2j + 1, vector lane / 8 % 2; of a, channel
  // lane % 16, vector lane / 16.
  std::uint32_t b_rows[Tile::kN8 / 2];
#pragma unroll
  for (int j = 0; j < Tile::kN8 / 2; ++j) {
    const std::int32_t unit = warp_n * Tile::kN8 * 8 + (2 * j + lane / 16) * 8 + lane % 8;
    b_rows[j] = shared_address(patch + patch_pixel(job, unit) + lane / 8 % 2 * job.patch_pitch);
  }
  const std::uint32_t a_row = std::uint32_t(lane / 16 * Tile::kChannels + warp_m * Tile::kOc16 * 16 + lane % 16) * kWordBytes;

  float sums[Tile::kPhases][Tile::kOc16][Tile::kN8][4] = {};
  std::int32_t group = 0, chunk = place.split * job.split_chunks;
  const std::int32_t left = job.chunks - chunk, own_chunks = left < job.split_chunks ? left : job.split_chunks;
  const std::int32_t end_chunk = chunk + own_chunks;
  if (groups > 0) {
    copy_raw<Value, Tile>(job, columns, own_x + chunk * kChunk * job.x_c, job.ic - chunk * kChunk, raw);
    copy_weights(chunk, 0, 0);
    copy_async_commit();
    for (std::int32_t step = 0; step < groups * own_chunks; ++step) {
      copy_async_wait<0>();
      __syncthreads();  // this step's weights and raw inputs are complete, and everyone has left the step before
      const std::int32_t next_group = group + 1 == groups ? 0 : group + 1, next_chunk = next_group == 0 ? chunk + 1 : chunk;
      if (next_chunk < end_chunk) copy_weights(next_chunk, next_group, (step + 1) % 2);
      if (group == 0) {
        turn<Value, Tile>(job, raw, patch);
        __syncthreads();  // the patch is complete, and raw inputs may be overwritten
        const std::int32_t first = (chunk + 1) * kChunk;
        if (chunk + 1 < end_chunk) copy_raw<Value, Tile>(job, columns, own_x + first * job.x_c, job.ic - first, raw);
      }
      copy_async_commit();
      const std::int32_t begin = group * job.group_shifts, end = begin + job.group_shifts;
      multiply_shifts<Value, Tile>(list, begin, end < shifts ? end : shifts,
                                   weight_address + std::uint32_t(step % 2 * stage_words) * kWordBytes + a_row, b_rows,
                                   std::uint32_t(job.patch_pitch) * kWordBytes, sums);
      group = next_group, chunk = next_chunk;
    }
  }
  if (job.splits.value == 1) {
    __syncthreads();  // everyone has left the last step: shared memory serves the stores
    store_tile<Value, Tile, Tile::kN8>(job, place, {bias, y, memory, 0}, sums);
    return;
  }
  float4* const own = partial + std::int64_t(blockIdx.x) * kPartialVectors<Tile> * Tile::kThreads + tid;
#pragma unroll
  for (int i = 0; i < kPartialVectors<Tile>; ++i) {
    const float(&v)[4] = sums[i / Tile::kOc16 % Tile::kPhases][i % Tile::kOc16][i / Tile::kOc16 / Tile::kPhases];
    own[i * Tile::kThreads] = {v[0], v[1], v[2], v[3]};
  }
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

// packed[group][set][oc_tile][chunk][slot][vector][channel][16 bytes]; a block lays out one vector of a chunk, of one set and
// oc_tile. The list of every set is written by its first block.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(256) fused_pack_kernel(const FusedJob job, const Value* __restrict__ w,
                                                         ShiftList* __restrict__ lists, uint4* __restrict__ packed) {
  constexpr int kVector = kVectorOf<Value>;
  __shared__ ShiftList list;
  __shared__ std::int32_t tap_of_slot[kMostShifts * Tile::kPhases];
  std::uint32_t rest = blockIdx.x / Tile::kVectors;
  const std::int32_t vector = std::int32_t(blockIdx.x) % Tile::kVectors;
  const std::int32_t chunk = std::int32_t(rest % std::uint32_t(job.chunks));
  uint4* const own = packed + (std::int64_t(rest) * job.most_slots * Tile::kVectors + vector) * Tile::kChannels;
  rest /= std::uint32_t(job.chunks);
  const std::int32_t oc_tile = std::int32_t(take(job.oc_tiles, rest)), set_and_group = std::int32_t(rest);
  FusedSet set;
  set.w = std::int32_t(take(job.sets_w, rest)) * Tile::kPhasesW, set.h = std::int32_t(take(job.sets_h, rest)) * Tile::kPhasesH;
  set.d = std::int32_t(take(job.sets_d, rest));
  build_list<Tile::kPhasesH, Tile::kPhasesW>(job, set, list, tap_of_slot);
  const std::int32_t tid = std::int32_t(threadIdx.x), threads = std::int32_t(blockDim.x);
  if (rest == 0 && chunk == 0 && oc_tile == 0 && vector == 0) {
    for (std::int32_t i = tid; i < std::int32_t(sizeof(ShiftList) / 16); i += threads) {
      reinterpret_cast<uint4*>(lists + set_and_group)[i] = reinterpret_cast<const uint4*>(&list)[i];
    }
  }
  const std::int32_t kernel_w = job.axis[2].taps.kernel, kernel_h = job.axis[1].taps.kernel, slots = list.slots;
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
    own[std::int64_t(slot) * Tile::kVectors * Tile::kChannels + channel] = pack_vector(values);
  }
}

}  // namespace upfold::cuda
