// The kernel of the fused method by boxes of channels.
//   patch    [buffers][row of the patch][16 bytes of channels]          swizzled
//   weight   [stages][pair][column][16 bytes of source channels]        swizzled; if packed, columns by channel_of_column
//            [stages][pair][64 or 32 columns][source channel][channels of those columns]   swizzled; kByResult
#pragma once

#include "fused_last_planes.cuh"
#include "fused_last_turned_store.cuh"

namespace upfold::cuda {

// Of 16 bytes, of a thread; the threads that multiply and store.
template <typename Tile>
constexpr int kLastSums = Tile::kM * Tile::kPhases * Tile::kSub8;
constexpr int kLastStoring = 256;

template <typename Tile>
constexpr std::int32_t kLastPairBytes = Tile::kColumns * Tile::kVectors * 16;
// Of a box of 16-bit weights that lie by the channels of the result.
template <typename Tile>
constexpr int kLastBoxColumns = Tile::kColumns < 64 ? Tile::kColumns : 64;

// What stores a tile, and what stores a part of one: kEights of 8 columns of each product. The parts are a tile's kSub8 /
// kEights.
template <typename Value, typename Tile, bool kPlanes, bool kInOrder, bool kTurned = Tile::kTurned>
struct LastStores {
  static constexpr int kEights = 8 / int(sizeof(Value));
  using Whole = LastStore<Value, Tile, kPlanes, kInOrder>;
  using Part = LastStore<Value, LastTile<Tile::kM, kEights, Tile::kPhases, 1, Tile::kVectors>, kPlanes, kInOrder>;
  // A part has columns of its own.
  static __device__ __forceinline__ void take_part(LastPlace& place, std::int32_t part) {
    place.column_tile = place.column_tile * (Tile::kSub8 / kEights) + part;
  }
};
template <typename Value, typename Tile, bool kPlanes>
struct LastStores<Value, Tile, kPlanes, false, true> {
  static constexpr int kEights = 2;
  using Whole = LastTurnedStore<Value, Tile, Tile::kSub8>;
  using Part = LastTurnedStore<Value, Tile, kEights>;
  static __device__ __forceinline__ void take_part(LastPlace& place, std::int32_t part) { place.first_eight = part * kEights; }
};

#if UPFOLD_WARPGROUPS
// How products name their operands.
template <typename Value, bool kByResult, bool kFromPlanes>
struct LastOperandsOf {
  using Type = Value;
};
template <typename Value>
struct LastOperandsOf<Value, true, false> {
  using Type = TurnedColumns<Value>;
};
template <typename Value>
struct LastOperandsOf<Value, false, true> {
  using Type = Turned<Value>;
};
template <typename Value, typename Tile, bool kFromPlanes>
struct LastBoxesOf {
  using Type = LastBoxStore<Value, Tile>;
};
template <typename Value, typename Tile>
struct LastBoxesOf<Value, Tile, true> {
  using Type = LastPlanesStore<Value, Tile>;
};

template <typename Value, typename Tile, bool kPlanes, LastWeights kWeights>
struct LastBlock {
  static constexpr std::uint32_t kRowUnits = Tile::kVectors;  // a row of a patch, of 16 bytes
  static constexpr int kChunk = Tile::kVectors * 16 / int(sizeof(Value));
  static constexpr bool kByResult = kWeights == LastWeights::kByResult;
  static constexpr int kBoxColumns = kLastBoxColumns<Tile>;  // where kByResult
  static constexpr int kPlanesBytes = 64 * 64 * 2;           // of a box of pixels of planes
  using Boxes = typename LastBoxesOf<Value, Tile, Tile::kFromPlanes>::Type;
  using Stores = LastStores<Value, Tile, kPlanes, kWeights != LastWeights::kPacked>;
  using Store = typename Stores::Whole;
  using Sums = typename Store::Sums;
  using Operands = typename LastOperandsOf<Value, kByResult, Tile::kFromPlanes>::Type;

  const LastJob& job;
  LastBarriers& barriers;
  unsigned char* memory;
  std::uint32_t first_barrier, first_byte;  // their addresses, which the compiler would else find anew before each wait

  __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) const {
    return first_barrier + std::uint32_t(reinterpret_cast<const char*>(&barrier) - reinterpret_cast<const char*>(&barriers));
  }
  __device__ __forceinline__ std::uint32_t patch(std::uint32_t buffer) const {
    return first_byte + buffer * std::uint32_t(job.patch_bytes);
  }
  __device__ __forceinline__ std::uint32_t weight(std::uint32_t stage) const {
    return patch(std::uint32_t(job.patches)) + stage * std::uint32_t(job.stage_pairs * kLastPairBytes<Tile>);
  }

  __device__ __forceinline__ unsigned char* staging() const {
    return memory + job.patches * job.patch_bytes + job.stages * job.stage_pairs * kLastPairBytes<Tile>;
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      if constexpr (Tile::kAlternates) {
        for (int i = 0; i < 2; ++i) barrier_make(address(barriers.turn[i]), Tile::kReaders);
      }
      for (int i = 0; i < job.patches; ++i) barrier_make(address(barriers.patch_full[i]), 1);
      for (int i = 0; i < job.patches; ++i) barrier_make(address(barriers.patch_empty[i]), Tile::kReaders);
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.full[i]), 1);
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.empty[i]), Tile::kReaders);
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  // One thread: the patches of all tiles of the block in order, each with the weights of its pairs behind it.
  __device__ __forceinline__ void copy(const BoxMap& source, const BoxMap& lying, const unsigned char* packed) const {
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
          if constexpr (Tile::kFromPlanes) {
            copy_planes(source, place, chunk, patch(buffer.at), full);
          } else {
            copy_box(patch(buffer.at), source,
                     {place.group * job.source_channels + chunk * kChunk + from.channel * job.folded,
                      place.first[2] * job.axis[2].source_step + from.at[2],
                      place.first[1] * job.axis[1].source_step + from.at[1],
                      place.first[0] * job.axis[0].source_step + from.at[0], place.n},
                     full);
          }
          if (kept) continue;
          if constexpr (kWeights == LastWeights::kPacked) {
            copy_weights(weights, job.patch[q - 1].end, from.end, stage);
          } else {
            copy_lying(lying, place, chunk * kChunk, job.patch[q - 1].end, from.end, stage);
          }
        }
      }
      kept = job.resident;
    }
  }
  __device__ __forceinline__ void copy_planes(const BoxMap& source, const LastPlace& place, std::int32_t chunk, std::uint32_t to,
                                              std::uint32_t full) const {
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
      copy_box(to + m * kPlanesBytes, source,
               {place.first[2] + m * 64, place.group * job.source_channels + chunk * kChunk, place.n, 0, 0}, full);
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
  // The same of weights that lie, from channel `source` of the reduction on.
  __device__ __forceinline__ void copy_lying(const BoxMap& lying, const LastPlace& place, std::int32_t source, std::int32_t pair,
                                             std::int32_t end, Ring& stage) const {
    const std::int32_t first = place.column_tile * Tile::kColumns;
    for (; pair < end; stage.next()) {
      const std::int32_t until = end - pair < job.stage_pairs ? end : pair + job.stage_pairs;
      const std::uint32_t full = address(barriers.full[stage.at]);
      std::uint32_t to = weight(stage.at);
      barrier_wait(address(barriers.empty[stage.at]), stage.parity ^ 1);
      barrier_arrive_expecting(full, std::uint32_t((until - pair) * kLastPairBytes<Tile>));
      for (; pair < until; ++pair) {
        std::uint32_t tap = tap_of_pair(job.pair[pair]);
        const std::int32_t w = std::int32_t(take(job.kernel_w, tap)), h = std::int32_t(take(job.kernel_h, tap)),
                           d = std::int32_t(tap);
        if constexpr (kByResult) {
#pragma unroll
          for (int column = 0; column < Tile::kColumns; column += kBoxColumns, to += kBoxColumns * kChunk * int(sizeof(Value)))
            copy_box(to, lying, {first + column, w, h, d, place.group * job.source_channels + source}, full);
        } else {
          copy_box(to, lying, {source, w, h, d, place.group * std::int32_t(job.channels.value) + first}, full);
          to += kLastPairBytes<Tile>;
        }
      }
    }
  }

  // The products of a pair, whose phase is known where this is compiled.
  static __device__ __forceinline__ void add(Sums& sums, int phase, const std::uint64_t (&positions)[Tile::kM],
                                             std::uint32_t shift, std::uint64_t channels) {
    constexpr std::uint32_t kStep = Tile::kFromPlanes ? 64 : 1;  // from vector to vector; of planes: rows of eight channels
#pragma unroll
    for (std::uint32_t k = 0; k < Tile::kVectors; k += 2) {
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m) {
        const std::uint64_t at = positions[m] + (shift * kRowUnits + k * kStep), of = channels + k * (kByResult ? kBoxColumns : 1);
        WarpgroupCore<Operands, Tile::kSub8, 1, 0>::add(sums[m][phase], Tile::kTurned ? of : at, Tile::kTurned ? at : of);
      }
    }
  }

  template <int kPhase>
  __device__ __forceinline__ void add_pair(Sums& sums, std::uint32_t phase, const std::uint64_t (&positions)[Tile::kM],
                                           std::uint32_t shift, std::uint64_t channels) const {
    if constexpr (kPhase < Tile::kPhases) {
      if (Tile::kPhases > 1 && phase != kPhase) return add_pair<kPhase + 1>(sums, phase, positions, shift, channels);
      warpgroup_begin();
      add(sums, kPhase, positions, shift, channels);
      warpgroup_commit();
    }
  }

  // The products of a chunk in all phases.
  __device__ __forceinline__ void add_whole(Sums& sums, const std::uint64_t (&positions)[Tile::kM], std::uint32_t shift,
                                            std::uint64_t channels) const {
    warpgroup_begin();
#pragma unroll
    for (int phase = 0; phase < Tile::kPhases; ++phase)
      add(sums, phase, positions, shift, channels + std::uint32_t(phase * kLastPairBytes<Tile> / 16));
    warpgroup_commit();
  }

  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t at, std::uint32_t group_pitch) {
    return Tile::kVectors == 8 ? long_row_descriptor(at, group_pitch) : swizzled_descriptor(at, group_pitch);
  }

  static __device__ __forceinline__ std::uint64_t channels_descriptor(std::int32_t first) {
    if constexpr (kByResult) {
      return turned_columns_descriptor<kBoxColumns>(0, kChunk);
    } else {
      return descriptor(std::uint32_t(first) * kRowUnits, 8 * kRowUnits);
    }
  }

  // Of a warpgroup: its first product of the tile's positions, and its first channel.
  static __device__ __forceinline__ std::int32_t first_product(std::int32_t warpgroup) {
    return Tile::kProducts > Tile::kM ? warpgroup * Tile::kM : 0;
  }
  static __device__ __forceinline__ std::int32_t first_channel(std::int32_t warpgroup) {
    return Tile::kProducts > Tile::kM || Tile::kAlternates ? 0 : warpgroup * 64;
  }

  // Barriers of what the products before read; 0: none, or released.
  struct Used {
    std::uint32_t stage = 0, patch = 0;
    __device__ __forceinline__ void release() {
      if (threadIdx.x % 32 == 0 && stage != 0) barrier_arrive(stage);
      if (threadIdx.x % 32 == 0 && patch != 0) barrier_arrive(patch);
      stage = patch = 0;
    }
  };

  // The products of chunks that are one stage of weights each, a pair of each phase (LastJob::whole): what stands between them is
  // more than half of their time.
  __device__ __forceinline__ void multiply_whole(Sums& sums, const LastPlace& place,
                                                 const std::uint64_t (&positions_first)[Tile::kM], std::uint64_t channels_first,
                                                 Ring& buffer, Ring& stage, Used& used) const {
    const std::uint32_t shift = rows_of_pair(job.pair[job.patch[job.first_patch[place.set]].end]);
#pragma unroll 1
    for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk, buffer.next(), stage.next()) {
      barrier_wait(address(barriers.patch_full[buffer.at]), buffer.parity);
      barrier_wait(address(barriers.full[stage.at]), stage.parity);
      std::uint64_t positions[Tile::kM];
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m) positions[m] = positions_first[m] + in_descriptor(patch(buffer.at));
      add_whole(sums, positions, shift, channels_first + in_descriptor(weight(stage.at)));
      warpgroup_wait<1>();
      used.release();
      used = {job.resident ? 0 : address(barriers.empty[stage.at]), address(barriers.patch_empty[buffer.at])};
    }
  }

  // Each pair is a group of products of its own, committed where it is issued (a commit behind a branch would wait for all before
  // it), and one more may be unfinished.
  __device__ __forceinline__ void multiply_pairs(Sums& sums, const LastPlace& place, std::int32_t chunks,
                                                 const std::uint64_t (&positions_first)[Tile::kM], std::uint64_t channels_first,
                                                 Ring& buffer, Ring& stage, Used& used) const {
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
      for (std::int32_t q = job.first_patch[place.set] + 1; q <= job.first_patch[place.set + 1]; ++q, buffer.next()) {
        std::int32_t pair = job.patch[q - 1].end;
        const std::int32_t end = job.patch[q].end;
        barrier_wait(address(barriers.patch_full[buffer.at]), buffer.parity);
        std::uint64_t positions[Tile::kM];
#pragma unroll
        for (int m = 0; m < Tile::kM; ++m) positions[m] = positions_first[m] + in_descriptor(patch(buffer.at));
        for (; pair < end; stage.next()) {
          const std::int32_t until = end - pair < job.stage_pairs ? end : pair + job.stage_pairs;
          barrier_wait(address(barriers.full[stage.at]), stage.parity);
          std::uint64_t channels = channels_first + in_descriptor(weight(stage.at));
#pragma unroll 1
          do {
            const std::uint32_t entry = job.pair[pair];
            add_pair<0>(sums, phase_of_pair(entry), positions, rows_of_pair(entry), channels);
            channels += kLastPairBytes<Tile> / 16;
            warpgroup_wait<1>();
            used.release();
          } while (++pair < until);
          if (!job.resident) used.stage = address(barriers.empty[stage.at]);
          if (pair == end) used.patch = address(barriers.patch_empty[buffer.at]);
        }
      }
    }
  }

  // Two warpgroups multiply and store.
  __device__ __forceinline__ void compute(const BoxMap& other, const Value* bias, Value* y) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    const std::int32_t warpgroup = __shfl_sync(~0u, std::int32_t(threadIdx.x) / 128, 0);  // known to be one for a warp
    const std::uint64_t channels_first = channels_descriptor(first_channel(warpgroup));
    std::uint64_t positions_first[Tile::kM];
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
      const std::uint32_t row = std::uint32_t(job.rows[first_product(warpgroup) + m]);
      positions_first[m] = Tile::kFromPlanes ? turned_descriptor(std::uint32_t(m * kPlanesBytes / 16))
                                             : descriptor(row * kRowUnits, std::uint32_t(job.group_pitch) * kRowUnits);
    }
    Ring buffer(job.patches), stage(job.stages);
    const std::uint32_t first = Tile::kAlternates ? std::uint32_t(warpgroup) : 0, step = Tile::kAlternates ? 2 : 1;
    if (first > 0) buffer.skip(job.tile_patches), stage.skip(job.tile_stages);
    std::uint32_t turn = first ^ 1;  // the first warpgroup begins: a new barrier counts as passed
    for (std::uint32_t tile = blockIdx.x + first * gridDim.x; tile < job.tiles; tile += step * gridDim.x, turn ^= 1) {
      const LastPlace place = last_place(job, tile);
      // A wait for a buffer two fills ahead would take the fill before for its own.
      if constexpr (Tile::kAlternates) barrier_wait(address(barriers.turn[first]), turn);
      Sums sums = {};
      Used used;
      if (job.resident) stage = Ring(job.stages);
      // With products of phases behind branches too, or as one of two ways, the compiler would let none run beside another.
      std::int32_t chunks = place.chunks;
      if constexpr (Tile::kAlternates && (Tile::kPhases == 1 || Tile::kFromPlanes)) {
        if (Tile::kFromPlanes || job.whole) {
          multiply_whole(sums, place, positions_first, channels_first, buffer, stage, used);
          chunks = 0;
        }
      }
      if constexpr (!Tile::kFromPlanes) multiply_pairs(sums, place, chunks, positions_first, channels_first, buffer, stage, used);
      if constexpr (Tile::kAlternates) {
        if (lane == 0) barrier_arrive(address(barriers.turn[first ^ 1]));
      }
      warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < Tile::kM * Tile::kPhases * Tile::kSub8 * 4; ++i)
        pin(sums[i / 4 / Tile::kSub8 / Tile::kPhases][i / 4 / Tile::kSub8 % Tile::kPhases][i / 4 % Tile::kSub8][i % 4]);
      used.release();
      if constexpr (Tile::kAlternates) {
        Boxes{job, place, bias, other, staging() + first * std::uint32_t(Boxes::kStaged)}.run(sums);
        buffer.skip(job.tile_patches), stage.skip(job.tile_stages);
      } else if (job.splits.value == 1) {
        Store{job, place, bias, y, staging()}.run(sums);
      } else {
        store_together(sums, place, bias, y);
      }
    }
  }

  // Of a split reduction, in the block's only tile: it puts its sums where patches and weights were, adds some of all blocks of
  // its cluster up, in their order, and stores those.
  __device__ __forceinline__ void store_together(const Sums& sums, const LastPlace& place, const Value* bias, Value* y) const {
    constexpr int kEights = Stores::kEights, kParts = Tile::kSub8 / kEights;
    const std::uint32_t splits = job.splits.value, rank = blockIdx.x % splits;
    meet<1, kLastStoring>();  // all products have read what the sums overwrite
    float4* const own = reinterpret_cast<float4*>(memory) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kLastSums<Tile>; ++i) {
      const float(&v)[4] = sums[i / Tile::kSub8 / Tile::kPhases][i / Tile::kSub8 % Tile::kPhases][i % Tile::kSub8];
      own[i * kLastStoring] = {v[0], v[1], v[2], v[3]};
    }
    meet_cluster();  // the sums of all are there
    for (std::uint32_t part = rank; part < kParts; part += splits) {
      typename Stores::Part::Sums all = {};
      for (std::uint32_t block = 0; block < splits; ++block) {
#pragma unroll
        for (int i = 0; i < Tile::kM * Tile::kPhases * kEights; ++i) {
          const std::uint32_t number = std::uint32_t(i / kEights * Tile::kSub8 + i % kEights) + part * kEights;
          const float4 v = load_of_block(first_byte + (number * kLastStoring + threadIdx.x) * 16, block);
          float(&sum)[4] = all[i / kEights / Tile::kPhases][i / kEights % Tile::kPhases][i % kEights];
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
      }
      LastPlace own_part = place;
      Stores::take_part(own_part, std::int32_t(part));
      typename Stores::Part{job, own_part, bias, y, staging()}.run(all);
    }
    leave_cluster();
    await_cluster();  // a block stays while others read its sums
  }
};
#endif

// `other` describes weights that lie, or the result that is stored as boxes. Elsewhere an empty kernel, which has no shared memory
// of its own: by that the host knows.
template <typename Value, typename Tile, bool kPlanes, LastWeights kWeights>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_last_kernel(const __grid_constant__ LastJob job, const __grid_constant__ BoxMap source,
                      const __grid_constant__ BoxMap other, const unsigned char* __restrict__ packed,
                      const Value* __restrict__ bias, Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ LastBarriers barriers;
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kLastAlignment;
  std::uint32_t first_barrier = shared_address(&barriers), first_byte = shared_address(first);
  hide(first_barrier), hide(first_byte);
  const LastBlock<Value, Tile, kPlanes, kWeights> block{job, barriers, first, first_barrier, first_byte};
  block.make_barriers();
  if (threadIdx.x >= 32 * Tile::kWarps) {
    if constexpr (Tile::kSharesRegisters) give_registers_back<Tile::kCopyRegisters>();
    if (threadIdx.x == 32 * Tile::kWarps) block.copy(source, other, packed);
  } else {
    if constexpr (Tile::kSharesRegisters) take_registers<Tile::kMultiplyRegisters>();
    block.compute(other, bias, y);
    // What the copy engine stores it reads from the block's shared memory.
    if constexpr (Tile::kAlternates) await_box_reads<0>();
  }
#endif
}

}  // namespace upfold::cuda
