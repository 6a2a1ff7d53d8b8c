// The kernel of the fused method whose channels are innermost, and the packing of its weights.
//   patch    [buffers][row of the patch][16 bytes of channels]          swizzled
//   weight   [stages][pair][column][16 bytes of source channels]        swizzled; columns in the order of channel_of_column
#pragma once

#include "fused_last_source.cuh"
#include "fused_last_store.cuh"
#include "fused_last_turned_store.cuh"

namespace upfold::cuda {

// Of 16 bytes, of a thread and of a tile of a split reduction; the threads that multiply and store.
template <typename Tile>
constexpr int kLastSums = Tile::kM * Tile::kPhases * Tile::kSub8;
constexpr int kLastStoring = 256;
template <typename Tile>
constexpr std::int64_t kLastPartialVectors = kLastSums<Tile> * kLastStoring;

template <typename Tile>
constexpr std::int32_t kLastPairBytes = Tile::kColumns * Tile::kVectors * 16;

// What stores a tile, and what stores a part of one: kEights of 8 columns of each product. The parts are a tile's kSub8 /
// kEights.
template <typename Value, typename Tile, bool kPlanes, bool kTurned = Tile::kTurned>
struct LastStores {
  static constexpr int kEights = 8 / int(sizeof(Value));
  using Whole = LastStore<Value, Tile, kPlanes>;
  using Part = LastStore<Value, LastTile<Tile::kM, kEights, Tile::kPhases, 1, Tile::kVectors>, kPlanes>;
  static constexpr int kStagedBytes = kPlanes ? kLastStagedBytes : 16;
  // A part has columns of its own.
  static __device__ __forceinline__ void take_part(LastPlace& place, std::int32_t part) {
    place.column_tile = place.column_tile * (Tile::kSub8 / kEights) + part;
  }
};
template <typename Value, typename Tile, bool kPlanes>
struct LastStores<Value, Tile, kPlanes, true> {
  static constexpr int kEights = 2;
  using Whole = LastTurnedStore<Value, Tile, Tile::kSub8>;
  using Part = LastTurnedStore<Value, Tile, kEights>;
  static constexpr int kStagedBytes = kLastTurnedStaged;
  static __device__ __forceinline__ void take_part(LastPlace& place, std::int32_t part) { place.first_eight = part * kEights; }
};

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile, bool kPlanes>
struct LastBlock {
  static constexpr std::uint32_t kRowUnits = Tile::kVectors;  // a row of a patch, of 16 bytes
  static constexpr int kChunk = Tile::kVectors * 16 / int(sizeof(Value));
  using Store = typename LastStores<Value, Tile, kPlanes>::Whole;
  using Sums = typename Store::Sums;

  const LastJob& job;
  LastBarriers& barriers;
  unsigned char* memory;

  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) { return shared_address(&barrier); }
  __device__ __forceinline__ std::uint32_t patch(std::uint32_t buffer) const {
    return shared_address(memory) + buffer * std::uint32_t(job.patch_bytes);
  }
  __device__ __forceinline__ std::uint32_t weight(std::uint32_t stage) const {
    return patch(std::uint32_t(job.patches)) + stage * std::uint32_t(job.stage_pairs * kLastPairBytes<Tile>);
  }

  __device__ __forceinline__ unsigned char* staging() const {
    return memory + job.patches * job.patch_bytes + job.stages * job.stage_pairs * kLastPairBytes<Tile>;
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.patches; ++i) barrier_make(address(barriers.patch_full[i]), 1);
      for (int i = 0; i < job.patches; ++i) barrier_make(address(barriers.patch_empty[i]), Tile::kWarps);
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.full[i]), 1);
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.empty[i]), Tile::kWarps);
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  // One thread: the patches of all tiles of the block in order, each with the weights of its pairs behind it.
  __device__ __forceinline__ void copy(const BoxMap& source, const unsigned char* packed) const {
    await_previous();  // which packs the weights
    Ring buffer(job.patches), stage(job.stages);
    bool kept = false;  // the weights are there, and stay
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      const LastPlace place = last_place(job, tile);
      const std::int64_t own = std::int64_t(place.group) * job.column_tiles.value + place.column_tile;
      for (std::int32_t chunk = place.first_chunk; chunk < place.first_chunk + place.chunks; ++chunk) {
        const unsigned char* const weights = packed + (own * job.chunks + chunk) * job.pairs * kLastPairBytes<Tile>;
        for (std::int32_t q = job.first_patch[place.set] + 1; q <= job.first_patch[place.set + 1]; ++q, buffer.next()) {
          const LastPatch& from = job.patch[q];
          const std::uint32_t full = address(barriers.patch_full[buffer.at]);
          barrier_wait(address(barriers.patch_empty[buffer.at]), buffer.parity ^ 1);
          barrier_arrive_expecting(full, std::uint32_t(job.box_bytes));
          copy_box(patch(buffer.at), source,
                   {place.group * job.source_channels + chunk * kChunk + from.channel * job.folded,
                    place.first[2] * job.axis[2].source_step + from.at[2], place.first[1] * job.axis[1].source_step + from.at[1],
                    place.first[0] * job.axis[0].source_step + from.at[0], place.n},
                   full);
          if (!kept) copy_weights(weights, job.patch[q - 1].end, from.end, stage);
        }
      }
      kept = job.resident;
    }
  }
  __device__ __forceinline__ void copy_weights(const unsigned char* weights, std::int32_t pair, std::int32_t end,
                                               Ring& stage) const {
    for (; pair < end; pair += job.stage_pairs, stage.next()) {
      const std::int32_t pairs = end - pair < job.stage_pairs ? end - pair : job.stage_pairs;
      const std::uint32_t full = address(barriers.full[stage.at]), bytes = std::uint32_t(pairs * kLastPairBytes<Tile>);
      barrier_wait(address(barriers.empty[stage.at]), stage.parity ^ 1);
      barrier_arrive_expecting(full, bytes);
      copy_bulk(weight(stage.at), weights + std::int64_t(pair) * kLastPairBytes<Tile>, bytes, full);
    }
  }

  template <int kPhase>
  __device__ __forceinline__ void add_pair(Sums& sums, std::uint32_t phase, const std::uint64_t (&positions)[Tile::kM],
                                           std::uint32_t shift, std::uint64_t channels) const {
    if constexpr (kPhase < Tile::kPhases) {
      if (Tile::kPhases > 1 && phase != kPhase) return add_pair<kPhase + 1>(sums, phase, positions, shift, channels);
      warpgroup_begin();
#pragma unroll
      for (std::uint32_t k = 0; k < Tile::kVectors; k += 2) {
#pragma unroll
        for (int m = 0; m < Tile::kM; ++m) {
          const std::uint64_t at = positions[m] + (shift * kRowUnits + k), of = channels + k;
          WarpgroupCore<Value, Tile::kSub8, 1, 0>::add(sums[m][kPhase], Tile::kTurned ? of : at, Tile::kTurned ? at : of);
        }
      }
      warpgroup_commit();
    }
  }

  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t at, std::uint32_t group_pitch) {
    return Tile::kVectors == 8 ? long_row_descriptor(at, group_pitch) : swizzled_descriptor(at, group_pitch);
  }

  // Of a warpgroup: its first product of the tile's positions, and its first channel.
  static __device__ __forceinline__ std::int32_t first_product(std::int32_t warpgroup) {
    return Tile::kProducts > Tile::kM ? warpgroup * Tile::kM : 0;
  }
  static __device__ __forceinline__ std::int32_t first_channel(std::int32_t warpgroup) {
    return Tile::kProducts > Tile::kM ? 0 : warpgroup * 64;
  }

  // Two warpgroups multiply and store. Each pair is a group of products of its own, committed where it is issued (a commit behind
  // a branch would wait for all before it), and one more may be unfinished.
  __device__ __forceinline__ void compute(const Value* bias, Value* y, float4* partial) const {
    const std::int32_t tid = std::int32_t(threadIdx.x), lane = tid % 32;
    const std::int32_t warpgroup = __shfl_sync(~0u, tid / 128, 0);  // known to be one for a warp
    const std::uint64_t channels_first = descriptor(std::uint32_t(first_channel(warpgroup)) * kRowUnits, 8 * kRowUnits);
    std::uint64_t positions_first[Tile::kM];
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
      const std::uint32_t row = std::uint32_t(job.rows[first_product(warpgroup) + m]);
      positions_first[m] = descriptor(row * kRowUnits, std::uint32_t(job.group_pitch) * kRowUnits);
    }
    Ring buffer(job.patches), stage(job.stages);
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      const LastPlace place = last_place(job, tile);
      const Store store{job, place, bias, y, staging()};
      Sums sums = {};
      std::uint32_t used_stage = 0, used_buffer = 0;  // barriers of what the products before read; 0: none, released
      const auto release = [&] {
        if (lane == 0 && used_stage != 0) barrier_arrive(used_stage);
        if (lane == 0 && used_buffer != 0) barrier_arrive(used_buffer);
        used_stage = used_buffer = 0;
      };
      if (job.resident) stage = Ring(job.stages);
      for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk) {
        for (std::int32_t q = job.first_patch[place.set] + 1; q <= job.first_patch[place.set + 1]; ++q, buffer.next()) {
          std::int32_t pair = job.patch[q - 1].end;
          const std::int32_t end = job.patch[q].end;
          barrier_wait(address(barriers.patch_full[buffer.at]), buffer.parity);
          std::uint64_t positions[Tile::kM];
#pragma unroll
          for (int m = 0; m < Tile::kM; ++m) positions[m] = positions_first[m] + patch(buffer.at) / 16;
          for (; pair < end; stage.next()) {
            const std::int32_t until = end - pair < job.stage_pairs ? end : pair + job.stage_pairs;
            barrier_wait(address(barriers.full[stage.at]), stage.parity);
            std::uint64_t channels = channels_first + weight(stage.at) / 16;
#pragma unroll 1
            do {
              const std::uint32_t entry = job.pair[pair];
              add_pair<0>(sums, entry >> 16, positions, entry & 0xffff, channels);
              channels += kLastPairBytes<Tile> / 16;
              warpgroup_wait<1>();
              release();
            } while (++pair < until);
            if (!job.resident) used_stage = address(barriers.empty[stage.at]);
            if (pair == end) used_buffer = address(barriers.patch_empty[buffer.at]);
          }
        }
      }
      warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < Tile::kM * Tile::kPhases * Tile::kSub8 * 4; ++i)
        pin(sums[i / 4 / Tile::kSub8 / Tile::kPhases][i / 4 / Tile::kSub8 % Tile::kPhases][i / 4 % Tile::kSub8][i % 4]);
      release();
      if (job.splits.value == 1) {
        store.run(sums);
        continue;
      }
      float4* const own = partial + std::int64_t(tile) * kLastPartialVectors<Tile> + tid;
#pragma unroll
      for (int i = 0; i < kLastSums<Tile>; ++i) {
        const float(&v)[4] = sums[i / Tile::kSub8 / Tile::kPhases][i / Tile::kSub8 % Tile::kPhases][i % Tile::kSub8];
        own[i * kLastStoring] = {v[0], v[1], v[2], v[3]};
      }
    }
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Value, typename Tile, bool kPlanes>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_last_kernel(const __grid_constant__ LastJob job, const __grid_constant__ BoxMap source,
                      const unsigned char* __restrict__ packed, const Value* __restrict__ bias, Value* __restrict__ y,
                      float4* __restrict__ partial) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ LastBarriers barriers;
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kLastAlignment;
  const LastBlock<Value, Tile, kPlanes> block{job, barriers, first};
  block.make_barriers();
  if (threadIdx.x >= 32 * Tile::kWarps) {
    if constexpr (Tile::kSharesRegisters) give_registers_back<Tile::kCopyRegisters>();
    if (threadIdx.x == 32 * Tile::kWarps) block.copy(source, packed);
  } else {
    if constexpr (Tile::kSharesRegisters) take_registers<Tile::kMultiplyRegisters>();
    block.compute(bias, y, partial);
  }
#endif
}

// Adds the partial sums of a split reduction in the order of its parts; a block stores a part of a tile.
template <typename Value, typename Tile, bool kPlanes>
__global__ void __launch_bounds__(kLastStoring)
    fused_last_reduce_kernel(const __grid_constant__ LastJob job, const float4* __restrict__ partial,
                             const Value* __restrict__ bias, Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  using Stores = LastStores<Value, Tile, kPlanes>;
  __shared__ alignas(16) unsigned char staging[Stores::kStagedBytes];
  constexpr int kEights = Stores::kEights, kParts = Tile::kSub8 / kEights;
  const std::int32_t part = std::int32_t(blockIdx.x % kParts), splits = std::int32_t(job.splits.value);
  const std::uint32_t first = blockIdx.x / kParts * std::uint32_t(splits);
  const float4* const own = partial + std::int64_t(first) * kLastPartialVectors<Tile> + threadIdx.x;
  using Store = typename Stores::Part;
  LastPlace place = last_place(job, first);
  Stores::take_part(place, part);
  const Store store{job, place, bias, y, staging};
  typename Store::Sums sums = {};
  await_previous();  // which writes the sums
  for (std::int32_t split = 0; split < splits; ++split) {
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kPhases * kEights; ++i) {
      const int number = i / kEights * Tile::kSub8 + part * kEights + i % kEights;
      const float4 v = own[split * kLastPartialVectors<Tile> + number * kLastStoring];
      float(&sum)[4] = sums[i / kEights / Tile::kPhases][i / kEights % Tile::kPhases][i % kEights];
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
  }
  store.run(sums);
#endif
}

// packed[group][column tile][chunk][pair][column][16 bytes], a thread for each vector; neighbouring threads read the taps of one
// channel, which mostly lie together.
struct LastPackJob {
  Divisor pairs, columns, vectors, chunks, column_tiles;
  Divisor channels, kernel_h, kernel_w;  // of the result in a group
  std::uint32_t count;                   // of vectors
  std::int32_t result_channels, source_channels, all_columns;
  bool flat, turned, by_channel;                        // by_channel: threads follow channels of the result, not taps
  std::int64_t w_source, w_result, w_group, w_axis[3];  // from group to group
  std::uint16_t taps[kMostLastPairs];
};
constexpr int kLastPackThreads = 256;

UPFOLD_DEVICE __half narrow_weight(__half v) { return v; }
UPFOLD_DEVICE __nv_bfloat16 narrow_weight(__nv_bfloat16 v) { return v; }
UPFOLD_DEVICE float narrow_weight(float v) { return __uint_as_float(to_tf32(v)); }

template <typename Value>
UPFOLD_DEVICE void pack_weight(const LastPackJob& job, std::uint32_t block, const Value* w, uint4* packed) {
  constexpr int kVector = 16 / int(sizeof(Value));
  const std::uint32_t number = block * kLastPackThreads + threadIdx.x;
  if (number >= job.count) return;
  std::uint32_t rest = number;
  // Neighbouring threads read what lies together in w: the taps of one channel, or of one tap the channels of the result.
  std::int32_t row = job.by_channel ? std::int32_t(take(job.columns, rest)) : 0;
  const std::int32_t pair = std::int32_t(take(job.pairs, rest)), vector = std::int32_t(take(job.vectors, rest));
  if (!job.by_channel) row = std::int32_t(take(job.columns, rest));
  const std::int32_t chunk = std::int32_t(take(job.chunks, rest));
  const std::uint32_t tile = rest;
  const std::int32_t column_tile = std::int32_t(take(job.column_tiles, rest)), vectors = std::int32_t(job.vectors.value);
  const std::int32_t in_tile = job.turned ? row : channel_of_column<int(sizeof(Value))>(row);
  const std::int32_t column = column_tile * std::int32_t(job.columns.value) + in_tile;
  std::uint32_t tap = job.taps[pair], channel = std::uint32_t(column);
  if (job.flat) {
    tap = channel;
    channel = take(job.channels, tap);
  }
  const std::int32_t kw = std::int32_t(take(job.kernel_w, tap)), kh = std::int32_t(take(job.kernel_h, tap));
  const std::int32_t source = (chunk * vectors + vector) * kVector;
  const Value* const from = w + std::int64_t(rest) * job.w_group + std::int64_t(channel) * job.w_result +
                            std::int64_t(source) * job.w_source + std::int32_t(tap) * job.w_axis[0] + kh * job.w_axis[1] +
                            kw * job.w_axis[2];
  struct alignas(16) {
    Value v[kVector];
  } values;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const bool exists = column < job.all_columns && source + e < job.source_channels;
    values.v[e] = exists ? narrow_weight(from[e * job.w_source]) : Narrow<Value>::from(0.0f);
  }
  const std::int32_t swizzled = vector ^ (vectors == 8 ? row % 8 : row / 2 % 4);
  const std::int64_t to = (std::int64_t(tile) * job.chunks.value + chunk) * job.pairs.value + pair;
  packed[(to * job.columns.value + row) * vectors + swizzled] = *reinterpret_cast<const uint4*>(&values);
}

template <typename Value>
__global__ void __launch_bounds__(kLastPackThreads)
    fused_last_pack_kernel(const __grid_constant__ LastPackJob job, const Value* __restrict__ w, uint4* __restrict__ packed) {
  let_next_begin();
  pack_weight(job, blockIdx.x, w, packed);
}

// Both packings in one launch: blocks from weight_blocks on pack the source, whose elements are as large as Bits.
template <typename Value, typename Bits>
__global__ void __launch_bounds__(kLastPackThreads)
    fused_last_pack_both_kernel(const __grid_constant__ LastPackJob job, const Value* __restrict__ w, uint4* __restrict__ packed,
                                std::uint32_t weight_blocks, const __grid_constant__ LastSourceJob source,
                                const Bits* __restrict__ from, uint4* __restrict__ to) {
  static_assert(kLastPackThreads == kSourceThreads, "of either block");
  let_next_begin();
  if (blockIdx.x < weight_blocks) {
    pack_weight(job, blockIdx.x, w, packed);
  } else {
    pack_source(source, blockIdx.x - weight_blocks, from, to);
  }
}

}  // namespace upfold::cuda
