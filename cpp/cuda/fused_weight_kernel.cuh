// The kernel of the fused gradient of the weight (fused_weight.cuh says how it is laid out). A block owns the sums of its units
// and input channels over the steps of one part; a warp owns a unit, of all input channels of the block. Its rows are read from
// shared memory into registers, where float32 is rounded to TF32; x is the other operand, in shared memory as [vector of
// pixels][channel][16 bytes], which its threads have rounded in place. Warpgroups multiply where there are any, else warps.
#pragma once

#include "fused_weight_reads.cuh"

namespace upfold::cuda {

// Where the sums of a lane begin, of those of all [row: unit, tap, output channel][input channel]: `row` rows behind its unit's
// first, in partial sums number `part`. Null: nobody's unit.
template <typename Tile>
UPFOLD_DEVICE float* own_sums(const FusedWeightJob& job, const FusedWeightPlace& place, std::uint32_t part, std::int32_t row,
                              float* __restrict__ partial) {
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), unit = place.first_unit + std::int32_t(threadIdx.x / 32);
  if (unit >= job.units) return nullptr;
  const std::int64_t group = std::int64_t(part) * job.groups.value + place.group;
  const std::int64_t first_row = (group * job.units + unit) * (Tile::kTaps * kPlaneChannels) + row;
  return partial + first_row * job.sum_pitch + place.first_channel + lane % 4 * 2;
}
// The sums of tap i and column tile j; those of a lane's second row are `below` rows further on.
UPFOLD_DEVICE void store_sums_of(const FusedWeightJob& job, const FusedWeightPlace& place, int i, int j, float* own,
                                 std::int32_t below, const float4& v) {
  if (place.first_channel + j * 8 >= job.in_channels) return;
  float* const to = own + std::int64_t(i * kPlaneChannels) * job.sum_pitch + j * 8;
  *reinterpret_cast<float2*>(to) = {v.x, v.y};
  *reinterpret_cast<float2*>(to + std::int64_t(below) * job.sum_pitch) = {v.z, v.w};
}
template <typename Tile>
UPFOLD_DEVICE void store_sums(const FusedWeightJob& job, const FusedWeightPlace& place, const FusedWeightSums<Tile>& sums,
                              std::int32_t row, float* __restrict__ partial, std::int32_t below = 8) {
  float* const own = own_sums<Tile>(job, place, place.part, row, partial);
  if (own == nullptr) return;
#pragma unroll
  for (int i = 0; i < Tile::kTaps; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kColumns8; ++j) {
      const float(&v)[4] = sums[i * Tile::kColumns8 + j];
      store_sums_of(job, place, i, j, own, below, {v[0], v[1], v[2], v[3]});
    }
  }
}

#if UPFOLD_WARPGROUPS
// A stage, and the parity of the phase of its barriers.
struct FusedWeightRing {
  std::int32_t at, parity;
  __device__ __forceinline__ void next(std::int32_t stages) {
    if (++at == stages) at = 0, parity ^= 1;
  }
};
UPFOLD_DEVICE void arrive(const std::uint64_t& barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barrier));
}

// Products of all taps, which add to their sums; x is described by `b`.
template <typename Value, typename Tile, int kTap = 0>
UPFOLD_DEVICE void add_taps(FusedWeightSums<Tile>& sums, const FusedWeightRows<Tile>& rows, std::uint64_t b) {
  WarpgroupRows<Value, Tile::kColumns8, kTap * Tile::kColumns8>::add(sums, rows[kTap], b);
  if constexpr (kTap + 1 < Tile::kTaps) add_taps<Value, Tile, kTap + 1>(sums, rows, b);
}
template <typename Value, typename Tile>
UPFOLD_DEVICE void multiply_taps(FusedWeightSums<Tile>& sums, const FusedWeightRows<Tile>& rows, std::uint64_t b) {
  warpgroup_begin();
  add_taps<Value, Tile>(sums, rows, b);
  warpgroup_commit();
}
// Their registers are not another's before the products that read them have ended.
template <typename Tile>
UPFOLD_DEVICE void keep_rows(const FusedWeightRows<Tile>& rows) {
#pragma unroll
  for (int i = 0; i < 4 * Tile::kTaps; ++i) keep(rows[i / 4][i % 4]);
}
template <typename Tile>
UPFOLD_DEVICE void pin_sums(FusedWeightSums<Tile>& sums) {
#pragma unroll
  for (int i = 0; i < Tile::kTaps * Tile::kColumns8 * 4; ++i) pin(sums[i / 4][i % 4]);
}
#endif

template <typename Value, typename Tile, int kReads>
struct FusedWeightBlock {
  using Sums = FusedWeightSums<Tile>;
  using Rows = FusedWeightRows<Tile>;
  const FusedWeightJob& job;
  const FusedWeightPlace& place;
  const FusedWeightCopies<Value, Tile>& copies;
  unsigned char* memory;
#if UPFOLD_WARPGROUPS
  FusedWeightBarriers& barriers;
#endif
  std::int32_t own;  // bytes from a stage to the lane's first column: its unit, its row, its pixel

  static __device__ __forceinline__ std::int32_t own_column(const FusedWeightJob& job, const FusedWeightPlace& place) {
    const std::int32_t lane = std::int32_t(threadIdx.x % 32), unit = place.first_unit + std::int32_t(threadIdx.x / 32);
    std::uint32_t plane = std::uint32_t(unit);
    std::int32_t tap = std::int32_t(take(job.tap_units, plane)) * Tile::kTaps;
    std::int32_t in_block = std::int32_t(plane) - place.first_plane;
    if (unit >= job.units) in_block = 0, tap = 0;  // nothing is kept of it
    return job.y_at + (in_block * std::int32_t(job.rows.value) * kPlaneChannels + lane / 4) * job.pitch +
           (lane % 4 * job.stride[2] * (sizeof(Value) == 2 ? 2 : 1) + tap * job.dilation[2]) * std::int32_t(sizeof(Value));
  }

  // A unit's words of product number `product` of a step.
  __device__ __forceinline__ void read(Rows& rows, const unsigned char* stage, std::int32_t product) const {
    const unsigned char* const at = stage + own;
    const unsigned char* const first = at + copies.shared.windows[2 * product];
    const unsigned char* const second = at + copies.shared.windows[2 * product + 1];
    const std::int32_t below = 8 * job.pitch;
    read_word<Value, Tile, kReads, 0>(job, first, rows);
    read_word<Value, Tile, kReads, 1>(job, first + below, rows);
    read_word<Value, Tile, kReads, 2>(job, second, rows);
    read_word<Value, Tile, kReads, 3>(job, second + below, rows);
  }
  static __device__ __forceinline__ void round_rows(Rows& rows) {
    if constexpr (sizeof(Value) == 4) {
#pragma unroll
      for (int i = 0; i < 4 * Tile::kTaps; ++i) rows[i / 4][i % 4] = to_tf32(__uint_as_float(rows[i / 4][i % 4]));
    }
  }

  __device__ __forceinline__ unsigned char* stage(std::int32_t number) const { return memory + number * job.stage_bytes; }
  // Of all copies of a thread but those of the last `stages - 2` steps that it began.
  __device__ __forceinline__ void await_copies() const {
    if (job.stages == 4) {
      copy_async_wait<2>();
    } else if (job.stages == 3) {
      copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
  }

#if UPFOLD_WARPGROUPS
  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) { return shared_address(&barrier); }
  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kWeightMostStages; ++i) {
        barrier_make(address(barriers.full[i]), Tile::kCopiers / 32);
        barrier_make(address(barriers.empty[i]), Tile::kWarps);
      }
      barriers_made();
    }
    __syncthreads();  // the barriers are there
  }

  // Some threads copy the steps of one stage: they round x and let the products have the stage, and await them.
  __device__ __forceinline__ void copy_steps() const {
    const std::int32_t own_stage = std::int32_t(threadIdx.x - 32 * Tile::kWarps) / Tile::kCopiers;
    if (own_stage >= job.stages) return;
    if (own_stage == 0) copies.place_windows();
    std::int32_t parity = 1;  // every stage is empty at first
    std::uint32_t step = place.begin + std::uint32_t(own_stage);
    if (step < place.end) copies.place_rows(step, own_stage);
    for (; step < place.end; step += std::uint32_t(job.stages), parity ^= 1) {
      meet<Tile::kCopiers>(own_stage + 1);  // where the step's rows lie is known
      barrier_wait(address(barriers.empty[own_stage]), std::uint32_t(parity));
      copies.copy(own_stage, std::uint32_t(own_stage * job.stage_bytes));
      copy_async_commit();
      meet<Tile::kCopiers>(own_stage + 1);  // everyone has read where they lie
      copies.place_rows(step + std::uint32_t(job.stages), own_stage);
      copy_async_wait_all();
      copies.round_own(stage(own_stage));
      publish_to_products();
      __syncwarp();  // everyone's
      arrive(barriers.full[own_stage]);
    }
  }

  static __device__ __forceinline__ void multiply(Sums& sums, const Rows& rows, const unsigned char* vectors) {
    multiply_taps<Value, Tile>(sums, rows, matrix_descriptor(shared_address(vectors) / 16, Tile::kVectorPitch / 16, 8));
  }

  // The rows of a product are read while those of the one before are multiplied.
  __device__ __forceinline__ void accumulate(Sums& sums) const {
    Rows rows[2] = {};
    FusedWeightRing ring{0, 0};
    std::int32_t product = 0, used = -1;  // used: the stage of the product before, where it was the last one
    std::uint32_t left = (place.end - place.begin) * std::uint32_t(job.products);
    barrier_wait(address(barriers.full[0]), 0);
    read(rows[0], stage(0), 0);
    round_rows(rows[0]);
#pragma unroll 1
    while (left > 0) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        if (odd == 1 && left == 0) continue;
        multiply(sums, rows[odd], stage(ring.at) + product * 2 * Tile::kVectorPitch);
        warpgroup_wait<1>();  // the product before: its rows are free
        keep_rows<Tile>(rows[odd ^ 1]);
        if (used >= 0) arrive(barriers.empty[used]);
        used = -1, --left;
        if (++product == job.products) {
          product = 0, used = ring.at, ring.next(job.stages);
          if (left > 0) barrier_wait(address(barriers.full[ring.at]), std::uint32_t(ring.parity));
        }
        if (left > 0) {
          read(rows[odd ^ 1], stage(ring.at), product);
          round_rows(rows[odd ^ 1]);
        }
      }
    }
    warpgroup_wait<0>();
    keep_rows<Tile>(rows[0]), keep_rows<Tile>(rows[1]);
    pin_sums<Tile>(sums);
  }

  __device__ __forceinline__ void run(float* __restrict__ partial) const {
    make_barriers();
    if (threadIdx.x >= 32 * Tile::kWarps) {
      give_registers_back<Tile::kCopyRegisters>();
      copy_steps();
    } else {
      take_registers<Tile::kMultiplyRegisters>();
      Sums sums = {};
      accumulate(sums);
      store_sums<Tile>(job, place, sums, own_row(), partial);
    }
  }
#else
  static __device__ __forceinline__ void multiply(Sums& sums, const Rows& rows, const unsigned char* vectors) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t row = shared_address(vectors) + lane / 8 % 2 * Tile::kVectorPitch + (lane / 16 * 8 + lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < Tile::kColumns8; j += 2) {
      std::uint32_t b[4];
      load_matrices(b, row + j * 8 * 16);
#pragma unroll
      for (int i = 0; i < Tile::kTaps; ++i) {
        TensorCore<Value>::add(sums[i * Tile::kColumns8 + j], rows[i], b[0], b[1]);
        TensorCore<Value>::add(sums[i * Tile::kColumns8 + j + 1], rows[i], b[2], b[3]);
      }
    }
  }

  // Fills all stages but one; the first is complete behind it.
  __device__ __forceinline__ void begin() const {
    copies.place_windows();
#pragma unroll 1
    for (std::int32_t i = 0; i + 1 < job.stages; ++i) {
      const std::uint32_t step = place.begin + std::uint32_t(i);
      copies.place_rows(step, i);
      __syncthreads();  // where the rows of the step lie is known
      if (step < place.end) copies.copy(i, std::uint32_t(i * job.stage_bytes));
      copy_async_commit();
    }
    copies.place_rows(place.begin + std::uint32_t(job.stages - 1), job.stages - 1);
    await_copies();
    copies.round_own(stage(0));
    __syncthreads();  // the first step is complete
  }

  __device__ __forceinline__ void run(float* __restrict__ partial) const {
    begin();
    Sums sums = {};
    std::int32_t at = 0, freed = job.stages - 1, next = 1;
#pragma unroll 1
    for (std::uint32_t step = place.begin; step < place.end; ++step) {
      const std::uint32_t copied = step + std::uint32_t(job.stages) - 1;
      if (copied < place.end) copies.copy(freed, std::uint32_t(freed * job.stage_bytes));
      copy_async_commit();
      copies.place_rows(copied + 1, at);
#pragma unroll 1
      for (std::int32_t product = 0; product < job.products; ++product) {
        Rows rows;
        read(rows, stage(at), product);
        round_rows(rows);
        multiply(sums, rows, stage(at) + product * 2 * Tile::kVectorPitch);
      }
      await_copies();
      copies.round_own(stage(next));
      __syncthreads();  // the step is read by everyone, the next one complete
      freed = at, at = next, next = next + 1 == job.stages ? 0 : next + 1;
    }
    store_sums<Tile>(job, place, sums, own_row(), partial);
  }
#endif

  static __device__ __forceinline__ std::int32_t own_row() { return std::int32_t(threadIdx.x % 32 / 4); }
};

// Below compute capability 8.0 an empty kernel, as the host refuses it there.
template <typename Value, typename Tile, int kReads>
__global__ void __launch_bounds__(Tile::kThreadsHere, Tile::kBlocks)
    fused_weight_kernel(const __grid_constant__ FusedWeightJob job, const Value* __restrict__ x, const Value* __restrict__ y,
                        float* __restrict__ partial) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ uint4 memory[];
  __shared__ FusedWeightShared shared;
  take_turn();
  const FusedWeightPlace place(job, Tile::kChannels, Tile::kWarps);
  const std::int64_t in_channel = std::int64_t(place.group) * job.in_channels + place.first_channel;
  const std::int64_t out_channel = std::int64_t(place.group) * job.out_channels;
  const FusedWeightCopies<Value, Tile> copies{job,
                                              place,
                                              shared,
                                              x + in_channel * job.x_c,
                                              y + out_channel * job.y_c,
                                              shared_address(memory),
                                              threadIdx.x % Tile::kCopiersHere};
  using Block = FusedWeightBlock<Value, Tile, kReads>;
  const std::int32_t own = Block::own_column(job, place);
#if UPFOLD_WARPGROUPS
  __shared__ FusedWeightBarriers barriers;
  const Block block{job, place, copies, reinterpret_cast<unsigned char*>(memory), barriers, own};
#else
  const Block block{job, place, copies, reinterpret_cast<unsigned char*>(memory), own};
#endif
  block.run(partial);
#endif
}

}  // namespace upfold::cuda
