// The kernel of the fused method for heads.
#pragma once

#include "fused_heads_store.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct HeadsWarp {
  using Value = typename Tile::Value;
  using Sums = typename HeadsResults<Tile>::Sums;
  static constexpr int kBlocks = Tile::kBlocks;

  const HeadsJob& job;
  std::uint64_t* full;       // own barriers
  std::uint32_t memory;      // own slots
  std::int32_t first, step;  // own runs

  __device__ __forceinline__ HeadsWarp(const HeadsJob& of, HeadsBarriers& barriers, std::uint32_t slots, std::int32_t warp,
                                       std::int32_t warps)
      : job(of),
        full(barriers.full[warp]),
        memory(slots + std::uint32_t(warp * of.slots * of.slot_bytes)),
        // Neighbouring runs are of other blocks: they share a row of x at about the same time.
        first(warp * std::int32_t(gridDim.x) + std::int32_t(blockIdx.x)),
        step(warps * std::int32_t(gridDim.x)) {}

  __device__ __forceinline__ HeadsRun run_at(std::int32_t number) const {
    std::uint32_t sample = std::uint32_t(number);
    const std::int32_t part = std::int32_t(take(job.parts, sample));
    return heads_run(job, std::int32_t(sample), part);
  }
  static __device__ __forceinline__ std::int32_t lane() { return std::int32_t(threadIdx.x) % 32; }
  __device__ __forceinline__ std::uint32_t slot(const Ring& ring) const {
    return memory + ring.at * std::uint32_t(job.slot_bytes);
  }

  // The rows of all runs in order: the next one.
  struct Copies {
    std::int32_t number, row;
    HeadsRun run;
    Ring ring;
  };
  __device__ __forceinline__ Copies copies() const {
    const HeadsRun run = run_at(first);
    return {first, run.first_row, run, Ring(job.slots)};
  }
  // Copies it, if there is one, to the next slot, which nobody reads any more.
  __device__ __forceinline__ void copy(const BoxMap& x, Copies& next) const {
    if (next.number >= job.runs) return;
    if (lane() == 0) {
      const std::uint32_t barrier = shared_address(full + next.ring.at);
      barrier_arrive_expecting(barrier, std::uint32_t(job.slot_bytes));
      copy_box(slot(next.ring), x, {0, 0, next.row, next.run.n, 0}, barrier);
    }
    next.ring.next();
    if (++next.row < next.run.end_row) return;
    next.number += step;
    if (next.number < job.runs) next.run = run_at(next.number), next.row = next.run.first_row;
  }

  // Where a lane reads a row of x: in 16 bits one of 16 channels and the blocks of pixels of a pair of its half of the lanes;
  // else one of its two channels, neighbours so that its words and those of other lanes meet in no bank, and a pixel.
  static constexpr int kReads = Tile::kSize == 2 ? kBlocks / 2 : 2 * kBlocks;
  using Places = std::uint32_t[kReads];
  static __device__ __forceinline__ void find_places(Places& places) {
    const std::uint32_t own = std::uint32_t(lane());
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      if constexpr (Tile::kSize == 2) {
        const std::uint32_t channel = own % 16, key = Tile::kRow == 64 ? channel / 2 % 4 : channel % 8;
        places[i] = channel * Tile::kRow + ((2 * i + own / 16) ^ key) * 16;
      } else {
        const std::uint32_t channel = own % 4 * 2 + i % 2, g = own / 4;
        places[i] = channel * Tile::kRow + ((i / 2 * 2 + g / 4) ^ channel) * 16 + g % 4 * 4;
      }
    }
  }

  // What a step multiplies: both tiles of the weight, and both words of each two blocks of pixels.
  struct Operands {
    std::uint32_t rows[2][4], pixels[kBlocks / 2][4];
  };
  __device__ __forceinline__ void load(Operands& to, const Places& places, std::uint32_t slot, const uint4* a) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 v = a[32 * m];
      to.rows[m][0] = v.x, to.rows[m][1] = v.y, to.rows[m][2] = v.z, to.rows[m][3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      if constexpr (Tile::kSize == 2) {
        load_turned_matrices(to.pixels[i], slot + places[i]);
      } else {
#pragma unroll
        for (int word = 0; word < 4; ++word) to.pixels[i][word] = load_shared_word(slot + places[4 * i + word]);
      }
    }
  }
  static __device__ __forceinline__ void add(Sums& sums, const Operands& of) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
        TensorCore<Value>::add(sums[m][i], of.rows[m], of.pixels[i / 2][i % 2 * 2], of.pixels[i / 2][i % 2 * 2 + 1]);
    }
  }
  // Adds the products of a row of x and a pair of taps of the height.
  __device__ __forceinline__ void multiply(Sums& sums, const Places& places, std::uint32_t slot, const uint4* a) const {
#pragma unroll 4
    for (std::int32_t i = 0; i < job.steps; ++i, slot += Tile::kStep * Tile::kRow, a += 64) {
      Operands operands;
      load(operands, places, slot, a);
      add(sums, operands);
    }
  }

  // All units of this warp's runs in order. A row serves the unit of its number, and then the next one.
  __device__ __forceinline__ void work(const BoxMap& x, Copies& next, const uint4* weights,
                                       const HeadsResults<Tile>& results) const {
    Places places;
    find_places(places);
    const uint4* const taps = weights + lane();
    Ring ring(job.slots);
    for (std::int32_t number = first; number < job.runs; number += step) {
      const HeadsRun run = run_at(number);
      for (std::int32_t unit = run.first; unit < run.end; ++unit) {
        Sums sums = {};
        if (unit > 0) {
          if (unit == run.first) wait(ring);
          multiply(sums, places, slot(ring), taps + job.steps * 64);
          leave(x, ring, next);
        }
        if (unit < job.in_h) {
          wait(ring);
          multiply(sums, places, slot(ring), taps);
        }
        results.finish(sums, run.n, unit);
      }
      if (run.end <= job.in_h) leave(x, ring, next);
    }
  }
  __device__ __forceinline__ void wait(const Ring& ring) const { barrier_wait(shared_address(full + ring.at), ring.parity); }
  __device__ __forceinline__ void leave(const BoxMap& x, Ring& ring, Copies& next) const {
    __syncwarp();  // all lanes have read the row
    ring.next();
    copy(x, next);
  }
};

// The weight as fragments, which warps lay out, those of both tiles of a step and a pair of taps of the height at a time: words
// of rows g and g + 8 in a lane's channels, of each of which it reads the taps of the width together.
template <typename Tile>
struct HeadsWeight {
  using Value = typename Tile::Value;
  static constexpr int kEach = 4 / Tile::kSize, kChannels = 2 * kEach;  // values of a word; channels of a lane
  struct alignas(4 * sizeof(Value)) Taps {
    Value v[kHeadsTaps];
  };

  const HeadsJob& job;
  const Value* first;  // of the lane
  uint4* to;
  bool exists;

  __device__ __forceinline__ HeadsWeight(const HeadsJob& of, const Value* w, uint4* weights) : job(of) {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, oc = lane / 8;
    exists = oc < job.oc;
    first = w + (exists ? oc : 0) * job.w_oc + lane / 4 % 2 * job.w_h + lane % 4 * 2 * job.w_ic;
    to = weights + lane;
  }
  __device__ __forceinline__ Taps read(const Value* from) const {
    if (job.taps_together) return *reinterpret_cast<const Taps*>(from);
    Taps taps;
#pragma unroll
    for (int kw = 0; kw < kHeadsTaps; ++kw) taps.v[kw] = from[kw * job.w_w];
    return taps;
  }
  using AllTaps = Taps[kChannels];
  // Those of number `i`, if there are any.
  __device__ __forceinline__ void load(std::int32_t i, AllTaps& taps) const {
    if (i >= 2 * job.steps) return;
    const std::int32_t pair = i >= job.steps ? 1 : 0, step = i - pair * job.steps;
    const Value* const from = first + 2 * pair * job.w_h + step * Tile::kStep * job.w_ic;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) taps[c] = read(from + (c / 2 * 8 + c % 2) * job.w_ic);
  }
  __device__ __forceinline__ void put(std::int32_t number, const AllTaps& taps) const {
    if (number >= 2 * job.steps) return;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      union {
        Value v[4][kEach];
        uint4 words;
      } all;
#pragma unroll
      for (int i = 0; i < 4 * kEach; ++i) {
        const int word = i / kEach, neighbour = word % 2;
        const int kw = Tile::kOdd ? (m == 0 ? 1 + 2 * neighbour : 2 - 2 * neighbour) : m + 2 * neighbour;
        all.v[word][i % kEach] = taps[word / 2 * kEach + i % kEach].v[kw];
      }
      uint4 words = all.words;
      if constexpr (Tile::kSize == 4) words = {near_tf32(words.x), near_tf32(words.y), near_tf32(words.z), near_tf32(words.w)};
      to[number * 64 + m * 32] = exists ? words : make_uint4(0, 0, 0, 0);
    }
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Tile>
__global__ void __launch_bounds__(32 * kMostHeadsWarps, 1)
    fused_heads_kernel(const __grid_constant__ HeadsJob job, const __grid_constant__ BoxMap x,
                       const typename Tile::Value* __restrict__ w, const typename Tile::Value* __restrict__ bias,
                       typename Tile::Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ HeadsBarriers barriers;
  if (threadIdx.x == 0) expect_boxes(x);
  unsigned char* const slots = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kHeadsAlignment;
  const std::int32_t warp = __shfl_sync(~0u, std::int32_t(threadIdx.x) / 32, 0), warps = std::int32_t(blockDim.x) / 32;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
  if (lane < job.slots) {
    barrier_make(shared_address(barriers.full[warp] + lane), 1);
    barriers_made();
  }
  __syncwarp();  // own barriers are made
  const HeadsWarp<Tile> own(job, barriers, shared_address(slots), warp, warps);
  auto next = own.copies();
  uint4* const weights = reinterpret_cast<uint4*>(slots + warps * job.slots * job.slot_bytes);
  const HeadsWeight<Tile> weight(job, w, weights);
  take_turn();
  own.copy(x, next);
  const HeadsResults<Tile> results(job, bias, y);
  typename HeadsWeight<Tile>::AllTaps taps;
  weight.load(warp, taps);
  weight.put(warp, taps);
#pragma unroll 1
  for (std::int32_t i = warp + warps; i < 2 * job.steps; i += warps) weight.load(i, taps), weight.put(i, taps);
#pragma unroll 1
  for (std::int32_t i = 1; i < job.ahead; ++i) own.copy(x, next);
  __syncthreads();  // the weight is there
  own.work(x, next, weights, results);
#endif
}

}  // namespace upfold::cuda
