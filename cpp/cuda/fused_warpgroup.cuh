// The fused method on Hopper's warpgroups: the same units, sets, shifts and slots (fused.cuh), multiplied from shared memory.
//
// Two warpgroups multiply, four warps apart: each owns 64 output channels in every phase of a set and kN8 * 8 units. They differ
// in their channels (kWarpsM = 8) or in their units (kWarpsM = 4). Seven warps load x and turn it, or one copies it where it was
// packed as patches have it; one copies packed weights. They run ahead, into the next tile too, since a block takes one tile
// after another. What is handed over:
//   patch    [buffers][pixel][vector][16 bytes]                   a chunk of x, swizzled
//   weight   [buffers][slot][vector][channel][16 bytes]           the slots of a group of shifts, of one chunk
// A product reads kInstN8 groups of 8 neighbouring units whose inputs lie at one distance from each other
// (FusedJob::group_pitch): rows of 8 * kInsts units, one below the other, or one long row. Product i takes units 8 * i to 8 * i +
// 7 of each row.
#pragma once

#include "fused_pack.cuh"
#include "fused_runs.cuh"
#include "ring.cuh"

namespace upfold::cuda {

template <int kPhasesH_, int kPhasesW_, int kWarpsM_, int kInsts_, int kInstN8_, bool kPackedInputs_>
struct WarpgroupTile : FusedTile<1, kPhasesH_, kPhasesW_, kWarpsM_, 8 / kWarpsM_, kInsts_ * kInstN8_, 4, 1> {
  static constexpr int kInsts = kInsts_, kInstN8 = kInstN8_;
  static constexpr bool kSwizzled = true, kPackedInputs = kPackedInputs_, kListed = true;
  static constexpr int kFirstLoader = 256, kLoaders = kPackedInputs ? 32 : 224, kBlockThreads = kPackedInputs ? 384 : 512;
  static constexpr int kLoadRegisters = kPackedInputs ? 72 : 56, kMultiplyRegisters = kPackedInputs ? 216 : 200;
};

#if UPFOLD_WARPGROUPS
struct WarpgroupShared {
  std::uint64_t patch_full[kMostPatches], patch_empty[kMostPatches], weight_full[8], weight_empty[8];
  float4 staging[8][kStagedVectors];
};

// What all warps of a block know of one of its tiles.
template <typename Tile>
struct TileWork {
  FusedPlace place;
  std::int32_t set_number, first_slot, first_chunk, chunks;

  __device__ __forceinline__ TileWork(const FusedJob& job, std::uint32_t tile) {
    place = place_of_block<Tile>(job, tile);
    set_number = number_of_set<Tile>(job, place.set), first_slot = set_number * job.most_slots;
    first_chunk = place.split * job.split_chunks;
    const std::int32_t left = job.chunks - first_chunk;
    chunks = job.slots[first_slot] == kNoSlot ? 0 : left < job.split_chunks ? left : job.split_chunks;
  }
};

template <typename Value, typename Tile>
struct WarpgroupBlock {
  static constexpr int kChunk = Tile::kVectors * kVectorOf<Value>;
  static constexpr std::int32_t kSlotWords = Tile::kVectors * Tile::kChannels;

  const FusedJob& job;
  WarpgroupShared& shared;
  uint4* memory;
  std::uint32_t tiles;

  // The first is aligned for the swizzle, and every other with it.
  __device__ __forceinline__ uint4* patch(std::uint32_t buffer) const {
    return memory + buffer * std::uint32_t(Tile::kVectors * job.patch_pitch);
  }
  __device__ __forceinline__ uint4* weight(std::uint32_t stage) const {
    return patch(std::uint32_t(patches())) + stage * std::uint32_t(job.stage_slots * kSlotWords);
  }
  __device__ __forceinline__ std::int32_t patches() const { return Tile::kPackedInputs ? job.raw_buffers : 2; }
  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) { return shared_address(&barrier); }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < patches(); ++i) {
        barrier_make(address(shared.patch_full[i]), Tile::kPackedInputs ? 1 : Tile::kLoaders);
        barrier_make(address(shared.patch_empty[i]), Tile::kWarps);
      }
      for (int i = 0; i < job.weight_buffers; ++i) {
        barrier_make(address(shared.weight_full[i]), 1);
        barrier_make(address(shared.weight_empty[i]), Tile::kWarps);
      }
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  // One thread copies the weights of all tiles, a group of shifts at a time.
  __device__ __forceinline__ void copy_weights(const uint4* packed) const {
    take_turn();  // which packs them
    Ring stage(job.weight_buffers);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      const uint4* const own = packed + packed_at<Tile>(job, work.place, work.set_number);
      for (std::int32_t chunk = work.first_chunk; chunk < work.first_chunk + work.chunks; ++chunk) {
        std::int32_t begin = 0;
        bool ends = false;
        for (; !ends; stage.next()) {
          std::int32_t end = begin;
          while ((job.slots[work.first_slot + end++] & kSlotEndsGroup) == 0) continue;
          ends = job.slots[work.first_slot + end - 1] & kSlotEndsSet;
          const std::uint32_t full = address(shared.weight_full[stage.at]);
          const std::uint32_t bytes = std::uint32_t((end - begin) * kSlotWords * kWordBytes);
          barrier_wait(address(shared.weight_empty[stage.at]), stage.parity ^ 1);  // a new barrier counts as passed
          barrier_arrive_expecting(full, bytes);
          copy_bulk(shared_address(weight(stage.at)), own + (std::int64_t(chunk) * job.most_slots + begin) * kSlotWords, bytes,
                    full);
          begin = end;
        }
      }
    }
  }

  __device__ __forceinline__ RawColumn* columns() const {
    return reinterpret_cast<RawColumn*>(weight(std::uint32_t(job.weight_buffers)));
  }
  __device__ __forceinline__ unsigned char* raw(std::uint32_t buffer) const {
    return reinterpret_cast<unsigned char*>(columns() + job.raw.columns) + buffer * std::uint32_t(job.raw_bytes);
  }

  // The chunks of all tiles in order, as they are copied.
  struct Source {
    std::uint32_t tile;
    std::int32_t chunk, chunks;  // of the tile
    const Value* at;             // its next chunk; null behind the last tile
  };

  // The columns of the next tile that has chunks, from number `tile` on.
  __device__ __forceinline__ Source begin_tile(const Value* x, std::uint32_t tile) const {
    for (; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      if (work.chunks == 0) continue;
      meet<1, Tile::kLoaders>();  // everyone has left the columns of the tile before
      for (std::int32_t i = loader_of<Tile>(); i < job.raw.columns; i += Tile::kLoaders) {
        columns()[i] = raw_column<Tile>(job, work.place, i, std::int32_t(sizeof(Value)));
      }
      meet<1, Tile::kLoaders>();  // columns are complete
      const Value* const own = x + (std::int64_t(work.place.group) * job.ic + work.first_chunk * kChunk) * job.x_c;
      return {tile, work.first_chunk, work.first_chunk + work.chunks, own};
    }
    return {tile, 0, 0, nullptr};
  }

  // Copies the next chunk, if there is one; a group of copies is committed in any case.
  __device__ __forceinline__ void copy_next(const Value* x, Source& source, std::uint32_t buffer) const {
    if (source.at != nullptr) {
      copy_raw<Value, Tile>(job, columns(), source.at, job.ic - source.chunk * kChunk, raw(buffer));
      source.at += kChunk * job.x_c;
      if (++source.chunk == source.chunks) source = begin_tile(x, source.tile + gridDim.x);
    }
    copy_async_commit();
  }

  // Loaders copy x as many chunks ahead as there are buffers, and turn it.
  __device__ __forceinline__ void load(const Value* x) const {
    Source source = begin_tile(x, blockIdx.x);
    const bool two = job.raw_buffers == 2;
    copy_next(x, source, 0);
    if (two) copy_next(x, source, 1);
    Ring buffer(2);
    std::uint32_t from = 0;
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      for (std::int32_t i = 0; i < work.chunks; ++i, buffer.next()) {
        barrier_wait(address(shared.patch_empty[buffer.at]), buffer.parity ^ 1);
        two ? copy_async_wait<1>() : copy_async_wait<0>();
        meet<1, Tile::kLoaders>();  // raw inputs are complete
        turn<Value, Tile>(job, raw(from), patch(buffer.at));
        publish_to_products();
        barrier_arrive(address(shared.patch_full[buffer.at]));
        meet<1, Tile::kLoaders>();  // and may be overwritten
        copy_next(x, source, from);
        if (two) from ^= 1;
      }
    }
  }

  // One warp copies patches of packed x, a lane some of their rows.
  __device__ __forceinline__ void copy_patches(const uint4* inputs) const {
    await_previous();  // which packs them
    Ring buffer(patches());
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, width = std::int32_t(job.axis[2].patch.value);
    const std::uint32_t row_bytes = std::uint32_t(width * Tile::kVectors * kWordBytes);  // of the patch
    const std::int32_t rows_h = std::int32_t(job.axis[1].patch.value), rows_d = std::int32_t(job.axis[0].patch.value);
    const std::int64_t padded_w = job.axis[2].padded.value, padded_h = job.axis[1].padded.value;
    const std::int64_t plane = padded_w * padded_h * job.axis[0].padded.value * Tile::kVectors;
    const std::int32_t rows = rows_h * rows_d * job.tile_n;
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      const std::int32_t live = job.live_columns - work.place.first[2];
      const std::uint32_t live_bytes = std::uint32_t((live < width ? live : width) * Tile::kVectors * kWordBytes);
      for (std::int32_t chunk = work.first_chunk; chunk < work.first_chunk + work.chunks; ++chunk, buffer.next()) {
        const std::uint32_t full = address(shared.patch_full[buffer.at]), to = shared_address(patch(buffer.at));
        barrier_wait(address(shared.patch_empty[buffer.at]), buffer.parity ^ 1);
        if (lane == 0) barrier_arrive_expecting(full, std::uint32_t(rows) * live_bytes);
        __syncwarp();  // the bytes are expected before the first arrives
        for (std::int32_t row = lane; row < rows; row += 32) {
          std::uint32_t rest = std::uint32_t(row);
          const std::int64_t h = work.place.first[1] + std::int32_t(take(job.axis[1].patch, rest));
          const std::int64_t d = work.place.first[0] + std::int32_t(take(job.axis[0].patch, rest));
          std::int64_t n = work.place.first_n + std::int32_t(rest);
          if (n >= job.batch) n = job.batch - 1;  // units that nobody stores
          const std::int64_t of = (n * job.groups + work.place.group) * job.chunks + chunk;
          const std::int64_t pixel = (d * padded_h + h) * padded_w + work.place.first[2];
          copy_bulk(to + std::uint32_t(row) * row_bytes, inputs + of * plane + pixel * Tile::kVectors, live_bytes, full);
        }
      }
    }
  }

  template <int kPhase>
  __device__ __forceinline__ void add_slot(float (&sums)[Tile::kPhases][1][Tile::kN8][4], std::uint32_t phase, std::uint64_t a,
                                           std::uint64_t b) const {
    if constexpr (kPhase < Tile::kPhases) {
      if (Tile::kPhases > 1 && phase != kPhase) return add_slot<kPhase + 1>(sums, phase, a, b);
      warpgroup_begin();
#pragma unroll
      for (int k = 0; k < Tile::kVectors; k += 2) {
        const std::uint64_t a_k = a + std::uint32_t(k * Tile::kChannels), b_k = b + std::uint32_t(k);
        WarpgroupCore<Value, Tile::kInstN8, Tile::kInsts, 0>::add(sums[kPhase][0], a_k, b_k);
        if constexpr (Tile::kInsts > 1) {
          WarpgroupCore<Value, Tile::kInstN8, Tile::kInsts, 1>::add(sums[kPhase][0], a_k, b_k + 8 * Tile::kVectors);
        }
      }
      warpgroup_commit();
    }
  }

  // The products of a group of shifts, from slot number `slot` of the table on; returns the number behind them. Places in units
  // of 16 bytes. Each slot is a group of its own, committed where it is issued (a commit behind a branch would wait for all
  // before it), and one more may be unfinished; then `done_before` runs.
  template <typename Done>
  __device__ __forceinline__ std::int32_t multiply(std::int32_t slot, std::uint64_t a, std::uint64_t b,
                                                   float (&sums)[Tile::kPhases][1][Tile::kN8][4], const Done& done_before) const {
    std::uint32_t entry = 0;
#pragma unroll 1
    do {
      entry = job.slots[slot++];
      add_slot<0>(sums, entry & kSlotPhases, a, b + (entry >> kSlotOffsetShift) * Tile::kVectors);
      a += kSlotWords;
      warpgroup_wait<1>();
      done_before();
    } while ((entry & kSlotEndsGroup) == 0);
    return slot;
  }

  // Two warpgroups multiply and store.
  __device__ __forceinline__ void compute(const Value* bias, Value* y, float4* partial) const {
    static_assert(Tile::kInsts <= 2, "of one row");
    const std::int32_t tid = std::int32_t(threadIdx.x), lane = tid % 32;
    const std::int32_t warpgroup =
        __shfl_sync(~0u, tid / 128, 0);  // known to be one for a warp: descriptors stay in its registers
    const std::int32_t unit = Tile::kWarpsM == 8 ? 0 : warpgroup * Tile::kN8 * 8;
    const std::uint64_t a_first = matrix_descriptor(Tile::kWarpsM == 8 ? std::uint32_t(warpgroup) * 64 : 0, Tile::kChannels, 8);
    const std::uint64_t b_first = swizzled_descriptor(std::uint32_t(patch_pixel(job, unit) * Tile::kVectors),
                                                      std::uint32_t(job.group_pitch * Tile::kVectors));
    Ring stage(job.weight_buffers), buffer(patches());
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      float sums[Tile::kPhases][1][Tile::kN8][4] = {};
      std::uint32_t used_stage = 0, used_buffer = 0;  // barriers of what the stage before reads; 0: none, released
      const auto release = [&] {
        if (used_stage == 0) return;
        if (lane == 0) barrier_arrive(used_stage);
        if (lane == 0 && used_buffer != 0) barrier_arrive(used_buffer);
        used_stage = 0;
      };
      for (std::int32_t chunk = 0; chunk < work.chunks; ++chunk, buffer.next()) {
        barrier_wait(address(shared.patch_full[buffer.at]), buffer.parity);
        const std::uint64_t b = b_first + shared_address(patch(buffer.at)) / kWordBytes;
        std::int32_t slot = work.first_slot;
        for (bool last = false; !last; stage.next()) {
          barrier_wait(address(shared.weight_full[stage.at]), stage.parity);
          slot = multiply(slot, a_first + shared_address(weight(stage.at)) / kWordBytes, b, sums, release);
          last = job.slots[slot - 1] & kSlotEndsSet;
          used_stage = address(shared.weight_empty[stage.at]);
          used_buffer = last ? address(shared.patch_empty[buffer.at]) : 0;
        }
      }
      warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < Tile::kPhases * Tile::kN8 * 4; ++i) pin(sums[i / 4 / Tile::kN8][0][i / 4 % Tile::kN8][i % 4]);
      release();
      if (job.splits.value == 1) {
        store_runs<Value, Tile>(job, work.place, bias, y, reinterpret_cast<float*>(shared.staging[tid / 32]), sums);
        continue;
      }
      float4* const own = partial + std::int64_t(tile) * kPartialVectors<Tile> * Tile::kThreads + tid;
#pragma unroll
      for (int i = 0; i < kPartialVectors<Tile>; ++i) {
        const float(&v)[4] = sums[i % Tile::kPhases][0][i / Tile::kPhases];
        own[i * Tile::kThreads] = {v[0], v[1], v[2], v[3]};
      }
    }
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, 1)
    fused_warpgroup_kernel(const __grid_constant__ FusedJob job, std::uint32_t tiles, const Value* __restrict__ x,
                           const uint4* __restrict__ packed, const Value* __restrict__ bias, Value* __restrict__ y,
                           float4* __restrict__ partial, const uint4* __restrict__ inputs) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ WarpgroupShared shared;
  const std::uint32_t beyond = shared_address(memory) % kSwizzleBytes;
  uint4* const aligned = memory + (beyond == 0 ? 0 : (kSwizzleBytes - beyond) / kWordBytes);
  const WarpgroupBlock<Value, Tile> block{job, shared, aligned, tiles};
  block.make_barriers();
  if (threadIdx.x >= Tile::kFirstLoader) {
    give_registers_back<Tile::kLoadRegisters>();
    if (threadIdx.x < Tile::kFirstLoader + Tile::kLoaders) {
      if constexpr (Tile::kPackedInputs) {
        block.copy_patches(inputs);
      } else {
        block.load(x);
      }
    } else if (threadIdx.x == Tile::kFirstLoader + Tile::kLoaders) {
      block.copy_weights(packed);
    }
  } else {
    take_registers<Tile::kMultiplyRegisters>();
    block.compute(bias, y, partial);
  }
#endif
}

}  // namespace upfold::cuda
