// What a block of the fused gradient of the input does with its operands; its layout is in fused_input.cuh.
#pragma once

#include "fused_input_copy.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct InputBlock : InputCopies<Value, Tile> {
  using Copies = InputCopies<Value, Tile>;
  using Copies::address, Copies::job, Copies::kEntries, Copies::kSize, Copies::memory, Copies::raw, Copies::shared, Copies::tiles,
      Copies::weight;
  using typename Copies::Read;
  using typename Copies::Results;
  using Sums = float[Tile::kM][Tile::kN8][4];
  using Rows = InputStep[Tile::kTurn][Tile::kM];

  using Entries = InputEntry[Tile::kTurn * kEntries];
  // Those of a turn, as vectors of the launch's arguments.
  __device__ __forceinline__ void entries_of(Entries& to, std::int32_t step) const {
    constexpr int kTogether = Tile::kTurn * kEntries % 4 == 0 ? 4 : Tile::kTurn * kEntries % 2 == 0 ? 2 : 1;
    const InputEntry* const from = job.offsets + step * kEntries;
#pragma unroll
    for (int i = 0; i < Tile::kTurn * kEntries; i += kTogether) {
      if constexpr (kTogether == 4) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
      if constexpr (kTogether == 2) *reinterpret_cast<uint2*>(to + i) = *reinterpret_cast<const uint2*>(from + i);
      if constexpr (kTogether == 1) to[i] = from[i];
    }
  }

  // Words of one turn, which lie alike in every second step: `from` is where the turn begins.
  __device__ __forceinline__ void load_words(Rows& rows, const unsigned char* from,
                                             const std::int32_t (&own)[Tile::kM][2]) const {
#pragma unroll
    for (int k = 0; k < Tile::kTurn; ++k) {
#pragma unroll
      for (int i = 0; i < Tile::kM; ++i) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const unsigned char* const at = from + (k / 2 * job.word_steps + k % 2 * job.word_step + v * job.word_second);
          rows[k][i][2 * v] = Read::own_word(at + own[i][0]), rows[k][i][2 * v + 1] = Read::own_word(at + own[i][1]);
        }
      }
    }
  }

  // A lane's rows of one turn: `from` is where the chunk begins, `own` what the lane adds.
  __device__ __forceinline__ void load_rows(Rows& rows, const unsigned char* from, const std::int32_t (&own)[Tile::kM][2],
                                            std::int32_t step) const {
    if constexpr (Tile::kOfWords) return load_words(rows, from + step / 2 * job.word_steps, own);  // an even one
    alignas(16) Entries entries;
    entries_of(entries, step);
#pragma unroll
    for (int i = 0; i < Tile::kM; ++i) {
      const unsigned char *const pixel = from + own[i][0], *const next = from + own[i][1];
#pragma unroll
      for (int e = 0; e < Tile::kTurn * kEntries; ++e) {
        const std::uint32_t a = entries[e].a * std::uint32_t(kSize), b = entries[e].b * std::uint32_t(kSize);
        InputStep& to = rows[e / kEntries][i];
        if constexpr (Tile::kReads == InputReads::kFours) {
          Read::four(to, e % kEntries, pixel + a);
        } else if constexpr (Tile::kReads == InputReads::kRows) {
          if (e % 2 == 0) Read::row(to, rows[(e + 1) / kEntries][i], pixel + a);
        } else if constexpr (Tile::kReads == InputReads::kQuads) {
          if (e % 2 != 0) continue;
          Read::quad(to, rows[(e + 1) / kEntries][i], 0, pixel + a);
          Read::quad(to, rows[(e + 1) / kEntries][i], 1, next + a);
        } else if constexpr (Tile::kReads == InputReads::kThrees) {
          if (e % 3 != 0) continue;
          InputStep* const three[] = {&to, &rows[(e + 1) / kEntries][i], &rows[(e + 2) / kEntries][i]};
          const int halves[] = {e % kEntries, (e + 1) % kEntries, (e + 2) % kEntries};
          Read::threes(three, halves, pixel + a, pixel + entries[e + 1].b * std::uint32_t(kSize));
        } else {
          Read::pixel(to, e % kEntries, 0, pixel + a, pixel + b);
          Read::pixel(to, e % kEntries, 1, next + a, next + b);
        }
      }
    }
  }

  // What a lane adds to where a chunk begins, in bytes: its two pixels of each product, and its channel or its taps.
  __device__ __forceinline__ void place_rows(std::int32_t (&own)[Tile::kM][2]) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 4, first = Tile::kOfWords ? job.word_from[lane] : lane * job.pitch;
    const std::int32_t pixels =
        std::int32_t(job.axis[0].tile.value * job.axis[1].tile.value * job.axis[2].tile.value * job.tile_n.value);
#pragma unroll
    for (int i = 0; i < Tile::kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int32_t number = input_pixel_of<Tile>(std::int32_t(threadIdx.x), i) + half;
        const InputPixel pixel = input_pixel(job, number < pixels ? number : 0);  // behind the box: read, not stored
        std::int32_t row = pixel.n;
#pragma unroll
        for (int j = 0; j < 2; ++j) row = row * std::int32_t(job.axis[j].extent.value) + pixel.at[j] * job.axis[j].stride;
        own[i][half] = (row * job.span + pixel.at[2] * job.axis[2].stride) * kSize + first;
      }
    }
  }

  static __device__ __forceinline__ void arrive(std::uint32_t barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }
  // How far a warpgroup has come.
  struct Progress {
    Ring buffer, stage;
  };

  // The sums of a tile: the rows of one turn are read while those of the turn before are multiplied.
  __device__ __forceinline__ void accumulate(const InputPlace& place, const std::int32_t (&own)[Tile::kM][2], Progress& at,
                                             Sums& sums, Results& results) const {
    // What a descriptor has beside the address: long_row_descriptor(at, 64) or matrix_descriptor(at, 8, 16).
    constexpr std::uint64_t kHigh = Tile::kOfWords ? std::uint64_t(1) << 62 | std::uint64_t(64) << 32 : std::uint64_t(16) << 32;
    constexpr std::uint32_t kLow = (Tile::kOfWords ? 1 : 8) << 16;
    std::int32_t turns = place.chunks * (job.steps / Tile::kTurn), loaded = 0, multiplied = 0;
    std::uint32_t b = 0, used = 0;  // used: barrier of the weights that the products before read; 0: none, or released
    // That of the chunk whose last rows were asked for. Products begin when all of theirs have come: an arrival ahead of them
    // would not wait for reads that are under way.
    std::uint32_t asked = 0;
    Rows rows[2];
    const unsigned char* from = raw(at.buffer.at);
    const auto load = [&](Rows& to) {
      if (loaded == 0) barrier_wait(address(shared.raw_full[at.buffer.at]), at.buffer.parity);
      load_rows(to, from, own, loaded);
      loaded += Tile::kTurn;
      if (loaded < job.steps) return;
      asked = address(shared.raw_empty[at.buffer.at]);
      loaded = 0, at.buffer.next(), from = raw(at.buffer.at);
    };
    load(rows[0]);
#pragma unroll 1
    while (turns > 0) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        if (odd == 1 && turns == 0) continue;
        if (multiplied == 0) {
          barrier_wait(address(shared.weight_full[at.stage.at]), at.stage.parity);
          b = kLow + in_descriptor(this->of_memory.of(weight(at.stage.at)));
        }
        warpgroup_begin();
#pragma unroll
        for (int k = 0; k < Tile::kTurn; ++k) {
#pragma unroll
          for (int i = 0; i < Tile::kM; ++i)
            WarpgroupRows<Value, Tile::kN8, 0>::add(sums[i], rows[odd][k][i], kHigh | (b + std::uint32_t(k * Tile::kStepPitch)));
        }
        warpgroup_commit();
        if (asked != 0) arrive(asked);
        asked = 0;
        b += std::uint32_t(Tile::kTurn * Tile::kStepPitch), multiplied += Tile::kTurn, --turns;
        warpgroup_wait<1>();  // all products but those of this turn: the other rows are free
        if (used != 0) arrive(used);
        used = 0;
        if (multiplied == job.stage_steps) {
          used = job.resident ? 0 : address(shared.weight_empty[at.stage.at]);
          multiplied = 0, at.stage.next();
        }
        results.store_some();
        if (turns > 0) load(rows[odd ^ 1]);
      }
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kN8 * 4; ++i) pin(sums[i / 4 / Tile::kN8][i / 4 % Tile::kN8][i % 4]);
    if (used != 0) arrive(used);
  }

  // Two warpgroups multiply and store.
  __device__ __forceinline__ void compute(Value* x, float4* partial) const {
    std::int32_t own[Tile::kM][2];
    place_rows(own);
    Progress at{Ring(job.raw_buffers), Ring(job.weight_buffers)};
    Results results{job, reinterpret_cast<unsigned char*>(memory), x};
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const InputPlace place = input_place(job, tile);
      Sums sums = {};
      if (job.resident) at.stage = Ring(job.weight_buffers);
      accumulate(place, own, at, sums, results);
      if (job.clustered) return add_together<Value, Tile>(job, place, memory, sums, x);
      if (tile >= job.whole) {
        float4* const parts = partial + std::int64_t(tile - job.whole) * (Tile::kM * Tile::kN8) * Tile::kThreads + threadIdx.x;
#pragma unroll
        for (int i = 0; i < Tile::kM * Tile::kN8; ++i) {
          const float(&v)[4] = sums[i / Tile::kN8][i % Tile::kN8];
          parts[i * Tile::kThreads] = {v[0], v[1], v[2], v[3]};
        }
        continue;
      }
      results.put(place, sums);
    }
    results.store_rest();
  }
};
#endif

// Elsewhere an empty kernel.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kBlockThreads, 1)
    fused_input_kernel(const __grid_constant__ InputJob job, std::uint32_t tiles, const Value* __restrict__ y,
                       const uint4* __restrict__ packed, Value* __restrict__ x, float4* __restrict__ partial) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ InputShared shared;
  uint4* first = memory;
  if constexpr (Tile::kOfWords) first += (0 - shared_address(memory)) % kInputBoxAlignment / 16;
  const InputBlock<Value, Tile> block{{job, shared, first, tiles, SharedAddress(&shared), SharedAddress(first)}};
  block.make_barriers();
  if (threadIdx.x >= Tile::kThreads) {
    give_registers_back<Tile::kLoadRegisters>();
    if constexpr (Tile::kOfWords) take_turn();  // else what packs the weights has waited for y
    if (threadIdx.x < Tile::kThreads + Tile::kLoaders) {
      block.copy_all_patches(y);
    } else if (threadIdx.x == Tile::kThreads + Tile::kLoaders) {
      block.copy_weights(packed);
    }
  } else {
    take_registers<Tile::kMultiplyRegisters>();
    block.compute(x, partial);
  }
#endif
}

}  // namespace upfold::cuda
