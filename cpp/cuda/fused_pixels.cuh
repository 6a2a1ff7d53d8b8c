// The fused method on Hopper's warpgroups with pixels as the rows of a product: x is multiplied from registers, so that it needs
// no turning in shared memory, and the weight lies there once for all pixels of a block, where it fits.
//
// Two warpgroups multiply: each owns 64 * kM units in every phase of a set, and all kChannels output channels of the tile. Three
// warps copy x as it lies, one copies packed weights; they run ahead, into the next tiles too. What is handed over:
//   raw      [raw_buffers][channel][row of the patch][input], or [vector][input][16 bytes] where x is channels-last
//   weight   [weight_buffers][slot][group of 8 channels][vector][channel][16 bytes]
// A shift is another place that the lanes read x from. The slots of a shift lie side by side: where every phase has a tap there,
// one product takes them all.
#pragma once

#include "fused_pack.cuh"
#include "fused_pixels_store.cuh"
#include "fused_warpgroup.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct PixelShared {
  std::uint64_t raw_full[kMostRawBuffers], raw_empty[kMostRawBuffers];
  std::uint64_t weight_full[kMostWeightBuffers], weight_empty[kMostWeightBuffers];
  float4 staging[Tile::kWarps][kPixelStagedVectors<Tile>];
};

template <typename Value, typename Tile>
struct PixelBlock {
  static constexpr int kChunk = Tile::kVectors * kVectorOf<Value>;
  static constexpr std::int32_t kSlotWords = Tile::kVectors * Tile::kChannels;
  static constexpr int kSteps = Tile::kVectors / 2;  // products in the reduction of a chunk
  using Sums = float[Tile::kM][Tile::kColumns8][4];
  using Rows = std::uint32_t[kSteps][Tile::kM][4];

  const FusedJob& job;
  PixelShared<Tile>& shared;
  uint4* memory;
  std::uint32_t tiles;

  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) { return shared_address(&barrier); }
  __device__ __forceinline__ uint4* weight(std::uint32_t buffer) const {
    return memory + buffer * std::uint32_t(job.stage_slots * kSlotWords);
  }
  __device__ __forceinline__ RawColumn* columns() const {
    return reinterpret_cast<RawColumn*>(weight(std::uint32_t(job.weight_buffers)));
  }
  __device__ __forceinline__ unsigned char* raw(std::uint32_t buffer) const {
    return reinterpret_cast<unsigned char*>(columns() + job.raw.columns) + buffer * std::uint32_t(job.raw_bytes);
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.raw_buffers; ++i) {
        barrier_make(address(shared.raw_full[i]), Tile::kLoaders);
        barrier_make(address(shared.raw_empty[i]), Tile::kWarps);
      }
      for (int i = 0; i < job.weight_buffers; ++i) {
        barrier_make(address(shared.weight_full[i]), 1);
        barrier_make(address(shared.weight_empty[i]), Tile::kWarps);
      }
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  // One thread copies the weights of all tiles, a group of shifts at a time; where they all fit, those of the first tile, which
  // are the same for every tile of the block.
  __device__ __forceinline__ void copy_weights(const uint4* packed) const {
    take_turn();  // which packs them
    Ring stage(job.weight_buffers);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      const uint4* const own = packed + packed_at<Tile>(job, work.place, work.set_number);
      for (std::int32_t chunk = work.first_chunk; chunk < work.first_chunk + work.chunks; ++chunk) {
        std::int32_t shift = work.first_slot, slot = 0;
        for (SlotEntry entry = 0; (entry & kSlotEndsSet) == 0; stage.next()) {
          std::int32_t slots = 0;
          do {
            entry = job.slots[shift++], slots += __popc(entry & kSlotPhases);
          } while ((entry & kSlotEndsGroup) == 0);
          const std::uint32_t full = address(shared.weight_full[stage.at]);
          const std::uint32_t bytes = std::uint32_t(slots * kSlotWords * kWordBytes);
          barrier_wait(address(shared.weight_empty[stage.at]), stage.parity ^ 1);  // a new barrier counts as passed
          barrier_arrive_expecting(full, bytes);
          copy_bulk(shared_address(weight(stage.at)), own + (std::int64_t(chunk) * job.most_slots + slot) * kSlotWords, bytes,
                    full);
          slot += slots;
        }
      }
      if (job.resident) return;
    }
  }

  // Three warps copy x, a chunk into each buffer.
  __device__ __forceinline__ void copy_inputs(const Value* x) const {
    Ring buffer(job.raw_buffers);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      if (work.chunks == 0) continue;
      meet<1, Tile::kLoaders>();  // everyone has left the columns of the tile before
      for (std::int32_t i = loader_of<Tile>(); i < job.raw.columns; i += Tile::kLoaders) {
        columns()[i] = raw_column<Tile>(job, work.place, i, std::int32_t(sizeof(Value)));
      }
      meet<1, Tile::kLoaders>();  // columns are complete
      const Value* from = x + (std::int64_t(work.place.group) * job.ic + work.first_chunk * kChunk) * job.x_c;
      std::int32_t left = job.ic - work.first_chunk * kChunk;
      for (std::int32_t i = 0; i < work.chunks; ++i, buffer.next(), from += kChunk * job.x_c, left -= kChunk) {
        barrier_wait(address(shared.raw_empty[buffer.at]), buffer.parity ^ 1);
        copy_raw<Value, Tile>(job, columns(), from, left, raw(buffer.at));
        const std::uint32_t full = address(shared.raw_full[buffer.at]);
        job.raw.grain >= 4 ? barrier_arrive_copied(full) : barrier_arrive(full);
      }
    }
    copy_async_wait_all();
  }

  // The same where a tile is a run of units that lie in order, 16 bytes at a time: a thread keeps its columns, and takes every
  // kTogether-th channel of them.
  __device__ __forceinline__ void copy_units(const Value* x) const {
    constexpr int kColumns = Tile::kUnits / kVectorOf<Value>, kLanes = kColumns < 32 ? kColumns : 32, kOwn = kColumns / kLanes;
    constexpr int kTogether = Tile::kLoaders / kLanes, kRounds = (kChunk + kTogether - 1) / kTogether;
    const std::int32_t first = loader_of<Tile>() / kLanes, lane = loader_of<Tile>() % kLanes;
    const std::int64_t from_step = kTogether * job.x_c;
    const std::uint32_t to_step = std::uint32_t(kTogether * job.raw.pitch);
    Ring buffer(job.raw_buffers);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      RawColumn own[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own[i] = raw_column<Tile>(job, work.place, lane + i * kLanes, std::int32_t(sizeof(Value)));
      const std::int32_t first_channel = work.first_chunk * kChunk + first;
      const Value* from = x + (std::int64_t(work.place.group) * job.ic + first_channel) * job.x_c;
      std::int32_t left = job.ic - first_channel;
      for (std::int32_t chunk = 0; chunk < work.chunks; ++chunk, buffer.next(), from += kChunk * job.x_c, left -= kChunk) {
        barrier_wait(address(shared.raw_empty[buffer.at]), buffer.parity ^ 1);
        const std::uint32_t to = shared_address(raw(buffer.at)) + std::uint32_t(first * job.raw.pitch);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const bool live = own[i].from >= 0;
          const Value* at = from + (live ? own[i].from : 0);
          std::uint32_t own_to = to + std::uint32_t(own[i].to);
#pragma unroll
          for (int r = 0; r < kRounds; ++r, at += from_step, own_to += to_step) {
            const bool exists = live && r * kTogether < left;
            if (r + 1 < kRounds || first + r * kTogether < kChunk) copy_async<kWordBytes>(own_to, exists ? at : x, exists);
          }
        }
        barrier_arrive_copied(address(shared.raw_full[buffer.at]));
      }
    }
    copy_async_wait_all();
  }

  // A lane's rows of one chunk of x, of 64 units in each i: row lane / 4 and the eighth behind it, words lane % 4 and the fourth
  // behind it, of two vectors in each step. `from` is where the chunk and the shift begin, `own[i]` what the lane adds.
  __device__ __forceinline__ void load_rows(Rows& rows, const unsigned char* from, const std::int32_t (&own)[Tile::kM][2]) const {
    const PixelReads& reads = job.reads;
    if constexpr (sizeof(Value) == 2) {
      if (reads.kind == PixelReads::kMatrices) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int i = 0; i < Tile::kM; ++i) load_turned_matrices(rows[k][i], shared_address(from + own[i][0] + k * reads.step));
        }
        return;
      }
      if (reads.kind == PixelReads::kHalves) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int i = 0; i < Tile::kM; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const unsigned char* const at = from + own[i][j % 2] + k * reads.step + j / 2 * reads.half;
              const std::uint32_t low = *reinterpret_cast<const std::uint16_t*>(at);
              rows[k][i][j] = low | std::uint32_t(*reinterpret_cast<const std::uint16_t*>(at + job.raw.pitch)) << 16;
            }
          }
        }
        return;
      }
    }
    if constexpr (kPaired<Value, Tile>) {
      if (reads.kind == PixelReads::kPairs) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int i = 0; i < Tile::kM; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const float2 v = *reinterpret_cast<const float2*>(from + own[i][0] + k * reads.step + j * reads.half);
              rows[k][i][2 * j] = to_tf32(v.x), rows[k][i][2 * j + 1] = to_tf32(v.y);
            }
          }
        }
        return;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < Tile::kM; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned char* const at = from + own[i][j % 2] + k * reads.step + j / 2 * reads.half;
          if constexpr (sizeof(Value) == 2) {
            rows[k][i][j] = *reinterpret_cast<const std::uint32_t*>(at);
          } else {
            rows[k][i][j] = to_tf32(*reinterpret_cast<const float*>(at));
          }
        }
      }
    }
  }

  // What a lane adds to where a chunk begins, in bytes: its rows in the patch, and its word.
  __device__ __forceinline__ void place_rows(std::int32_t (&own)[Tile::kM][2]) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, first = std::int32_t(threadIdx.x) / 32 * 16 * Tile::kM;
    const PixelReads& reads = job.reads;
#pragma unroll
    for (int i = 0; i < Tile::kM; ++i) {
      if (reads.kind == PixelReads::kMatrices) {  // lane i names row i % 8 of matrix i / 8: two of units, two of channels
        const std::int32_t channel = lane / 16 * 8 + lane % 8, unit = first + i * 16 + lane / 8 % 2 * 8;
        own[i][0] = own[i][1] = channel * job.raw.pitch + unit * 2;
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t unit = first + i * 16 + unit_of_row<Value, Tile>(lane / 4, half);
        const std::int32_t pixel = patch_pixel(job, unit) + reads.skew;
        own[i][half] = pixel * reads.pixel + lane % 4 * reads.word;
      }
    }
  }

  template <int kFirst, int kGroups>
  __device__ __forceinline__ void add_slots(Sums& sums, const Rows& rows, std::uint64_t& b) const {
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < Tile::kM; ++i) {
        WarpgroupRows<Value, kGroups * Tile::kOc8, kFirst * Tile::kOc8>::add(sums[i], rows[k][i], b + std::uint32_t(k * 16));
      }
    }
    warpgroup_commit();
    b += std::uint32_t(kGroups * kSlotWords);
  }

  // The products of one shift. Either one takes all phases or each takes one, and commits its own group behind its branch: with
  // both in one kernel the compiler finds no registers for the sums, and lets no two products run at a time.
  template <int kPhase>
  __device__ __forceinline__ void add_phases(Sums& sums, const Rows& rows, std::uint32_t phases, std::uint64_t& b) const {
    if (phases >> kPhase & 1) add_slots<kPhase, 1>(sums, rows, b);
    if constexpr (kPhase + 1 < Tile::kPhases) add_phases<kPhase + 1>(sums, rows, phases, b);
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Rows& rows, std::uint32_t phases, std::uint64_t& b) const {
    if constexpr (Tile::kWhole) {
      add_slots<0, Tile::kPhases>(sums, rows, b);
    } else {
      add_phases<0>(sums, rows, phases, b);
    }
  }

  // How far a warpgroup has come.
  struct Progress {
    Ring buffer, stage;
  };
  static __device__ __forceinline__ void arrive(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }

  // The sums of a tile: the rows of one step are read while those of the step before are multiplied.
  __device__ __forceinline__ void accumulate(const TileWork<Tile>& work, const std::int32_t (&own)[Tile::kM][2], Progress& at,
                                             Sums& sums) const {
    const std::uint64_t b_first = matrix_descriptor(0, 8, 8 * Tile::kVectors);
    std::uint32_t used = 0;  // barrier of the weights that the products before read; 0: none, released
    std::int32_t shift = work.first_slot, chunk = 0;
    SlotEntry entry = 0;
    std::uint64_t b = 0;
    bool group_begins = true;
    Rows rows[2];
    const auto load = [&](Rows& to) {  // of the step that `shift` and the buffer are at
      if (shift == work.first_slot) barrier_wait(address(shared.raw_full[at.buffer.at]), at.buffer.parity);
      entry = job.slots[shift];
      load_rows(to, raw(at.buffer.at) + std::int32_t(entry >> kSlotOffsetShift) * job.reads.pixel, own);
      if ((entry & kSlotEndsSet) == 0) return;
      __syncwarp();  // everyone has read the chunk
      arrive(address(shared.raw_empty[at.buffer.at]));
    };
    if (work.chunks > 0) load(rows[0]);
#pragma unroll 1
    while (chunk < work.chunks) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        if (odd == 1 && chunk == work.chunks) continue;
        if (group_begins) {
          barrier_wait(address(shared.weight_full[at.stage.at]), at.stage.parity);
          b = b_first + shared_address(weight(at.stage.at)) / kWordBytes;
        }
        const SlotEntry current = entry;
        multiply(sums, rows[odd], current & kSlotPhases, b);
        group_begins = current & kSlotEndsGroup, ++shift;
        if (current & kSlotEndsSet) ++chunk, shift = work.first_slot, at.buffer.next();
        if (chunk < work.chunks) {
          warpgroup_wait<1>();  // all products but those of the last slots: the other rows are free
          if (used != 0) arrive(used);
          used = 0;
          load(rows[odd ^ 1]);
        }
        if (group_begins) {
          if (used != 0) {
            warpgroup_wait<0>();
            arrive(used);
          }
          used = job.resident ? 0 : address(shared.weight_empty[at.stage.at]);
          at.stage.next();
        }
      }
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kColumns8 * 4; ++i) pin(sums[i / 4 / Tile::kColumns8][i / 4 % Tile::kColumns8][i % 4]);
    if (used != 0) arrive(used);
  }

  // Two warpgroups multiply and store.
  __device__ __forceinline__ void compute(const Value* bias, Value* y, float4* partial) const {
    std::int32_t own[Tile::kM][2];
    place_rows(own);
    Progress at{Ring(job.raw_buffers), Ring(job.weight_buffers)};
    float* const staging = reinterpret_cast<float*>(shared.staging[threadIdx.x / 32]);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const TileWork<Tile> work(job, tile);
      Sums sums = {};
      const TileBias<Value, Tile> tile_bias(job, work.place, bias);
      if (job.resident) at.stage = Ring(job.weight_buffers);
      accumulate(work, own, at, sums);
      if (job.splits.value == 1) {
        if (job.direct) tile_bias.put(staging);
        store_pixels<Value, Tile>(job, work.place, bias, y, staging, sums);
        continue;
      }
      float4* const parts = partial + std::int64_t(tile) * (Tile::kM * Tile::kColumns8) * Tile::kThreads + threadIdx.x;
#pragma unroll
      for (int i = 0; i < Tile::kM * Tile::kColumns8; ++i) {
        const float(&v)[4] = sums[i / Tile::kColumns8][i % Tile::kColumns8];
        parts[i * Tile::kThreads] = {v[0], v[1], v[2], v[3]};
      }
    }
  }
};
#endif

// Elsewhere an empty kernel.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, 1)
    fused_pixels_kernel(const __grid_constant__ FusedJob job, std::uint32_t tiles, const Value* __restrict__ x,
                        const uint4* __restrict__ packed, const Value* __restrict__ bias, Value* __restrict__ y,
                        float4* __restrict__ partial) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ PixelShared<Tile> shared;
  const PixelBlock<Value, Tile> block{job, shared, memory, tiles};
  block.make_barriers();
  if (threadIdx.x >= Tile::kFirstLoader) {
    give_registers_back<72>();
    if (threadIdx.x < Tile::kFirstLoader + Tile::kLoaders) {
      if (job.flat && !job.raw.dense && job.raw.grain == kWordBytes) {
        block.copy_units(x);
      } else {
        block.copy_inputs(x);
      }
    } else if (threadIdx.x == Tile::kFirstLoader + Tile::kLoaders) {
      block.copy_weights(packed);
    }
  } else {
    take_registers<216>();
    block.compute(bias, y, partial);
  }
#endif
}

}  // namespace upfold::cuda
