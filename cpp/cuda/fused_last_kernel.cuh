// The kernel of the fused method by boxes of channels: one thread has shared memory filled (fused_last_block.cuh), warpgroups
// multiply and store.
#pragma once

#include "fused_last_loose.cuh"
#include "fused_last_multiply.cuh"
#include "fused_last_runs_store.cuh"
#include "fused_last_transpose.cuh"
#include "fused_last_turned_store.cuh"
#include "fused_last_weight_rows_store.cuh"

namespace upfold::cuda {

// Of 16 bytes, of a thread; the threads that multiply and store.
template <typename Tile>
constexpr int kLastSums = Tile::kM * Tile::kPhases * Tile::kSub8;
constexpr int kLastStoring = 256;

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
template <typename Value, typename Tile, bool kPlanes, LastWeights kWeights>
struct LastWork : LastProducts<Value, Tile, kWeights> {
  using Base = LastProducts<Value, Tile, kWeights>;
  using Base::job, Base::barriers, Base::memory, Base::first_byte, Base::address, Base::staging;
  using typename Base::Reading;
  static constexpr bool kFromRows = Tile::kFromPlanes && sizeof(Value) == 4;
  using Boxes = std::conditional_t<Tile::kToPlanes, LastPlanesStore<Value, Tile>, LastBoxStore<Value, Tile>>;
  using Stores = LastStores<Value, Tile, kPlanes, kWeights != LastWeights::kPacked>;
  using Store = typename Stores::Whole;
  using Sums = typename Store::Sums;
  // The sums begin with a tile's first products, of which each phase has some. Zeros would be set when the turn has come,
  // whatever the order here, and take a sixteenth of a tile's time (H200). Of rows in registers the compiler would then end each
  // product before the next (C7515).
  static constexpr bool kBegins =
      (Tile::kFromPlanes || Tile::kWhole) && !kFromRows && (Tile::kWarpgroups == 2 || kLastSums<Tile> <= 16);
  // Sets have a patch of a tile each (LastJob::whole).
  static constexpr bool kPlaced = Tile::kAlternates && !Tile::kTransposes && (Tile::kFromPlanes || Tile::kWhole);
  using Staged = std::conditional_t<Tile::kWeightRows, LastWeightRowsStore<Value, Tile>,
                                    std::conditional_t<Tile::kRuns, LastRunsStore<Value, Tile>, LastStaged<Value, Tile>>>;
  using Added = typename Staged::Added;
  static constexpr bool kAdds = Tile::kAlternates && Staged::kAddsPairs;
  // The bias is read ahead of the products, which nothing then waits for, where registers are left for it beside the sums:
  // float32 of two warpgroups takes 3 % longer so (YOLO's and SAM's layers on an H100).
  static constexpr bool kAddsAhead = kAdds && (Tile::kRuns ? kLastSums<Tile> <= 32 : sizeof(Value) == 2 || Tile::kWarpgroups > 2);
  static constexpr bool kLines = Tile::kToPlanes && (Tile::kRowPhases == 3 || Tile::kRowPhases < Tile::kPhases);  // alone

  // next_turn: the barrier of the warpgroup that multiplies next, where they alternate.
  __device__ __forceinline__ void multiply(Sums& sums, const LastPlace& place, const std::uint32_t (&own)[2], Reading& at,
                                           std::uint32_t next_turn) const {
    if constexpr (kFromRows) {
      return this->multiply_rows(sums, place, own, at, next_turn);
    } else if constexpr (Tile::kFromPlanes || Tile::kWhole) {
      this->template multiply_whole<kBegins>(sums, place, at);
    } else if constexpr (Tile::kExact) {
      this->multiply_exact(sums, place, at);
    } else if constexpr (Tile::kInTurn) {
      this->multiply_in_turn(sums, place, at);
    } else {
      // With products of phases behind branches too, or as one of two ways, the compiler would let none run beside another.
      std::int32_t chunks = place.chunks;
      if constexpr (Tile::kAlternates && Tile::kPhases == 1 && !Tile::kToPlanes && !Tile::kRuns) {
        if (job.whole) this->template multiply_whole<false>(sums, place, at), chunks = 0;
      }
      this->multiply_pairs(sums, place, chunks, at);
    }
    if constexpr (Tile::kAlternates) {
      if (at.leads) barrier_arrive(next_turn);
    }
  }

  // Warpgroups multiply and store.
  __device__ __forceinline__ void compute(const BoxMap& other, const Value* bias, Value* y) const {
    const std::int32_t warpgroup = __shfl_sync(~0u, std::int32_t(threadIdx.x) / 128, 0);  // known to be one for a warp
    Reading at = this->begin(warpgroup);
    const std::uint32_t first = Tile::kAlternates ? std::uint32_t(warpgroup) : 0,
                        step = Tile::kAlternates ? Tile::kWarpgroups : 1;
    pass_over(at, blockIdx.x, first);
    const Ring::Leap leap = at.buffer.leap_of(job.chunks * std::int32_t(step - 1)),
                     stage_leap = at.stage.leap_of(job.chunks * std::int32_t(step - 1));  // where sets are whole
    std::uint32_t turn = first == 0 ? 1 : 0;  // the first warpgroup begins: a new barrier counts as passed
    std::uint32_t number = first;             // of the tile among the block's
    for (std::uint32_t tile = blockIdx.x + first * gridDim.x; tile < job.tiles;
         tile += step * gridDim.x, number += step, turn ^= 1) {
      const bool is_placed = kPlaced || (Tile::kAlternates && !Tile::kTransposes && job.whole);
      LastPlace place = is_placed ? last_columns<Tile::kShares>(job, tile) : last_place<Tile::kShares>(job, tile);
      Added added;
      if constexpr (kAddsAhead) Staged::read_bias(job, place, bias, added);
      Sums sums;
      if constexpr (!kBegins) clear(sums);
      std::uint32_t own[2] = {};
      if constexpr (kFromRows) this->place_rows(own);
      if (job.resident) at.stage = Ring(job.stages);
      if constexpr (Tile::kAlternates) {
        if (job.whole) at.shift = rows_of_pair(job.pair[job.patch[job.first_patch[place.set]].end]);
        hide(at.shift);
        if constexpr (!kBegins) pin_all(sums);  // zeros are there before the turn comes
        // A wait for a buffer two fills ahead would take the fill before for its own.
        barrier_wait(address(barriers.turn[first]), turn);
      }
      multiply(sums, place, own, at, address(barriers.turn[first + 1 < step ? first + 1 : 0]));
      warpgroup_wait<0>();
      pin_all(sums);
      at.release();
      at.resident = job.resident;
      if constexpr (Tile::kAlternates) {
        if constexpr (kAdds && !kAddsAhead) Staged::read_bias(job, place, bias, added);
        if (is_placed) take_position(place, number);
        store_boxes(sums, place, bias, added, other, y, warpgroup);
        if (is_placed) {
          at.buffer.skip(leap), at.stage.skip(stage_leap);
        } else {
          pass_over(at, tile + gridDim.x, step - 1);
        }
      } else if (job.splits.value == 1) {
        Store{job, place, bias, y, staging()}.run(sums);
      } else {
        store_together(sums, place, bias, y);
      }
    }
  }

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kPhases * Tile::kSub8 * 4; ++i)
      sums[i / 4 / Tile::kSub8 / Tile::kPhases][i / 4 / Tile::kSub8 % Tile::kPhases][i / 4 % Tile::kSub8][i % 4] = 0.0f;
  }
  static __device__ __forceinline__ void pin_all(Sums& sums) {
#pragma unroll
    for (int i = 0; i < Tile::kM * Tile::kPhases * Tile::kSub8 * 4; ++i)
      pin(sums[i / 4 / Tile::kSub8 / Tile::kPhases][i / 4 / Tile::kSub8 % Tile::kPhases][i / 4 % Tile::kSub8][i % 4]);
  }
  // Of a tile whose first patch has come: the thread that copied it has left it there.
  __device__ __forceinline__ void take_position(LastPlace& place, std::uint32_t number) const {
    const LastPosition position = barriers.positions[number % kLastPositions];
    place.n = position.n;
#pragma unroll
    for (int i = 0; i < 3; ++i) place.first[i] = position.first[i];
  }
  // What other warpgroups take for so many tiles.
  __device__ __forceinline__ void pass_over(Reading& at, std::uint32_t tile, std::uint32_t count) const {
    for (; count > 0; --count, tile += gridDim.x) {
      const LastTaken taken = last_taken<Tile::kShares>(job, tile);
      at.buffer.skip(taken.patches), at.stage.skip(taken.stages);
    }
  }
  __device__ __forceinline__ void store_boxes(Sums& sums, const LastPlace& place, const Value* bias, const Added& added,
                                              const BoxMap& result, Value* y, std::int32_t warpgroup) const {
    if constexpr (Tile::kRuns) {
      return LastRunsStore<Value, Tile>{{job, place, bias, added, result, nullptr}, y}.run(sums);
    }
    if constexpr (Tile::kWeightRows) {
      using Store = LastWeightRowsStore<Value, Tile>;
      return Store{{job, place, bias, added, result, staging() + warpgroup * Store::kStaged}, y}.run(sums);
    }
    if constexpr (Tile::kToPlanes) {
      using Loose = LastLooseStore<Value, Tile>;
      if (kLines || job.loose) {
        return Loose{{{job, place, bias, added, result, staging() + warpgroup * Loose::kStaged}}}.run(sums, y);
      }
    }
    if constexpr (!kLines && !Tile::kRuns && !Tile::kWeightRows)
      Boxes{job, place, bias, added, result, staging() + warpgroup * Boxes::kStaged}.run(sums);
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

// `other` describes weights that lie, or the result that is stored as boxes. Elsewhere an empty kernel, which has no shared
// memory of its own: by that the host knows.
template <typename Value, typename Tile, bool kPlanes, LastWeights kWeights>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_last_kernel(const __grid_constant__ LastJob job, const __grid_constant__ BoxMap source,
                      const __grid_constant__ BoxMap other, const unsigned char* __restrict__ packed,
                      const Value* __restrict__ bias, Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ LastBarriers barriers;
  if (threadIdx.x == 32 * Tile::kWarps) {
    expect_boxes(source);
    if constexpr (Tile::kWeightRows) {
      expect_boxes(third_boxes(job));
    } else if constexpr (kWeights != LastWeights::kPacked) {
      expect_boxes(other);
    }
  }
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kLastAlignment;
  std::uint32_t first_barrier = shared_address(&barriers), first_byte = shared_address(first);
  hide(first_barrier), hide(first_byte);
  const LastWork<Value, Tile, kPlanes, kWeights> block{{{job, barriers, first, first_barrier, first_byte}}};
  block.make_barriers();
  // Behind a launch that packs only those who copy wait for it: phases without taps are stored beside it.
  const bool copies = threadIdx.x >= 32 * Tile::kWarps;
  if (copies || !job.follows_packing) {
    // A launch that packs, begun beside warpgroups that alternate, makes these take longer (3 to 6 % of the dense seeds).
    if constexpr (Tile::kAlternates && kWeights == LastWeights::kPacked) {
      await_previous();
    } else {
      take_turn();
    }
  }
  if (copies) {
    if constexpr (Tile::kSharesRegisters) give_registers_back<Tile::kCopyRegisters>();
    if constexpr (Tile::kTransposes) {
      const LastTransposer<Value, Tile, kWeights> transposer{{job, barriers, first, first_barrier, first_byte}};
      if (threadIdx.x == 32 * Tile::kWarps) transposer.copy(source, packed);
      if (threadIdx.x >= 32 * Tile::kWarps + 32) transposer.transpose();
    } else {
      const std::uint32_t thread = threadIdx.x - 32 * Tile::kWarps;
      if constexpr (Tile::kShares) {
        if (thread == 0) block.template copy<true, false>(source, other, packed);
        if (thread == 32) block.template copy<false, true>(source, other, packed);
        if (thread == 64) block.tell_empty();
      } else {
        if (thread == 0) block.template copy<true, true>(source, Tile::kWeightRows ? third_boxes(job) : other, packed);
      }
    }
  } else {
    if constexpr (Tile::kSharesRegisters) take_registers<Tile::kMultiplyRegisters>();
    block.compute(other, bias, y);
    // What the copy engine stores it reads from the block's shared memory.
    if constexpr (Tile::kAlternates) await_box_reads<0>();
  }
#endif
}

}  // namespace upfold::cuda
