// The sums of the gradient of the input by taps that are laid out: added up by the blocks of a cluster where each has a part of
// the reduction, rounded, and stored.
#pragma once

#include "cluster_sums.cuh"
#include "fused_laid.cuh"
#include "lanes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// kVector: neighbouring pixels that a lane stores at a time. A lane has pixels 2 * (lane % 4) and the next of each eight, and
// rows lane / 4 and the eighth behind it.
template <typename Tile, int kVector>
struct LaidStore {
  using Value = typename Tile::Value;
  using Sums = float[Tile::kM][Tile::kN8][4];
  using Group = float[4][4];  // four eights of pixels, of a product

  const LaidJob& job;
  const LaidPlace& place;
  Value* x;

  // Eights `eight` and the three behind it, of product `product` of the tile. All lanes of a warp at once.
  __device__ __forceinline__ void store(std::int32_t product, std::int32_t eight, const Group& v) const {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::int32_t row = place.row + product * 64 + std::int32_t(threadIdx.x / 32 % 4 * 16 + lane / 4);
    constexpr int kWords = kVector < 4 || sizeof(Value) == 4 ? 1 : kVector / 2;
#pragma unroll
    for (int first = 0; first < 4; first += kWords) {
      const std::uint32_t own = lane % kWords;
      const std::int32_t in_eight = kWords == 4 ? 0 : kWords == 2 ? std::int32_t(lane % 4 / 2 * 4) : std::int32_t(lane % 4 * 2);
      const std::int32_t pixel = place.pixel + 8 * (eight + first + std::int32_t(own)) + in_eight;
      const bool exists = pixel < place.end, both = pixel + 1 < place.end;
      const std::int64_t at = laid_result(job, exists ? pixel : 0),
                         next = kVector > 1 ? 0 : laid_result(job, both ? pixel + 1 : 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Value* const to = x + (row + 8 * half) * job.x_c;
        const bool stores = exists && row + 8 * half < job.rows;
        const float low = v[first][2 * half], high = v[first][2 * half + 1];
        if constexpr (kWords > 1) {
          std::uint32_t words[kWords];
#pragma unroll
          for (int k = 0; k < kWords; ++k) words[k] = pair_of<Value>(v[first + k][2 * half], v[first + k][2 * half + 1]);
          gather_words(own, words);
          if (!stores) continue;
          if constexpr (kWords == 4) *reinterpret_cast<uint4*>(to + at) = {words[0], words[1], words[2], words[3]};
          if constexpr (kWords == 2) *reinterpret_cast<uint2*>(to + at) = {words[0], words[1]};
        } else if constexpr (kVector > 1) {
          if (stores) store_neighbours(to + at, low, high);
        } else {
          if (stores) to[at] = Narrow<Value>::from(low);
          if (stores && both) to[next] = Narrow<Value>::from(high);
        }
      }
    }
  }

  // A warp's 16 rows of a product and some of the pixels, on their way to x: so many bytes from row to row that what lanes write
  // at a time lies in different banks.
  static constexpr int kSize = int(sizeof(Value)), kPasses = kSize / Tile::kM, kEights = Tile::kN8 / kPasses;
  static constexpr int kPixels = 8 * kEights, kPitch = kPixels * kSize + 8 * kSize, kWarpBytes = 16 * kPitch;
  static_assert(8 * kWarpBytes + Tile::kPixels * 8 <= Tile::kStageBytes, "what a stage holds, with the pixels' places");

  // Where the pixels of the tile lie in a channel of x, -1 behind the last one; behind what the warps stage.
  static __device__ __forceinline__ std::int64_t* places_of(unsigned char* staging) {
    return reinterpret_cast<std::int64_t*>(staging + 8 * kWarpBytes);
  }
  __device__ __forceinline__ void place_pixels(unsigned char* staging) const {
    const std::int32_t pixel = place.pixel + std::int32_t(threadIdx.x);
    if (threadIdx.x < std::uint32_t(Tile::kPixels))
      places_of(staging)[threadIdx.x] = pixel < place.end ? laid_result(job, pixel) : -1;
  }

  // What a warp has staged of rows from `row` on, to x: a lane some neighbouring pixels of a row at a time, of the same ones and
  // of every so manieth row.
  __device__ __forceinline__ void copy_rows(const unsigned char* own, const std::int64_t* places, std::int32_t row) const {
    constexpr std::int32_t kUnits = kPixels / kVector, kBytes = kVector * kSize;
    constexpr std::int32_t kStep = 32 / (kUnits % 32 == 0 ? 32 : kUnits % 16 == 0 ? 16 : kUnits % 8 == 0 ? 8 : 4);  // rows
    constexpr std::int32_t kOwn = kStep * kUnits / 32;
    static_assert(kOwn * 32 == kStep * kUnits && 16 % kStep == 0, "the same of all lanes");
    using Unit = Word<kBytes>;
    Value* to[kOwn];
    const unsigned char* from[kOwn];
    std::int32_t left[kOwn];  // rows
#pragma unroll
    for (std::int32_t k = 0; k < kOwn; ++k) {
      const std::int32_t i = std::int32_t(threadIdx.x) % 32 + 32 * k, in_rows = i / kUnits, unit = i % kUnits;
      const std::int64_t at = places[unit * kVector];
      to[k] = x + (row + in_rows) * job.x_c + at, from[k] = own + in_rows * kPitch + unit * kBytes;
      left[k] = at >= 0 ? job.rows - row - in_rows : 0;
    }
#pragma unroll 2
    for (std::int32_t i = 0; i < 16; i += kStep) {
#pragma unroll
      for (std::int32_t k = 0; k < kOwn; ++k) {
        const Unit value = *reinterpret_cast<const Unit*>(from[k] + i * kPitch);
        if (i < left[k]) *reinterpret_cast<Unit*>(to[k] + i * job.x_c) = value;
      }
    }
  }
  // The same where a row begins at any 16-bit value: pairs that are whole words where they lie, and what is left at their ends.
  __device__ __forceinline__ void copy_odd_rows(const unsigned char* own, const std::int64_t* places, std::int32_t row) const {
    constexpr std::int32_t kUnits = kPixels / 2 + 1;
    using Bits = Word<kSize>;
    Bits* const first = reinterpret_cast<Bits*>(x) + row * job.x_c;
    const std::uint32_t begins = std::uint32_t(reinterpret_cast<std::uintptr_t>(first) / 2 + std::uintptr_t(places[0]));
#pragma unroll 2
    for (std::int32_t i = std::int32_t(threadIdx.x) % 32; i < 16 * kUnits; i += 32) {
      const std::int32_t in_rows = i / kUnits, unit = i % kUnits;
      if (row + in_rows >= job.rows) continue;
      const std::int32_t low = 2 * unit - std::int32_t(begins + std::uint32_t(in_rows) * std::uint32_t(job.x_c) & 1);
      const std::int32_t high = low + 1;
      const Bits* const from = reinterpret_cast<const Bits*>(own + in_rows * kPitch);
      Bits* const to = first + in_rows * job.x_c;
      const std::int64_t a = low >= 0 && low < kPixels ? places[low] : -1, b = high < kPixels ? places[high] : -1;
      Bits* const at = to + a;
      if (a >= 0 && b == a + 1 && reinterpret_cast<std::uintptr_t>(at) % 4 == 0) {
        *reinterpret_cast<std::uint32_t*>(at) = std::uint32_t(from[low]) | std::uint32_t(from[high]) << 16;
        continue;
      }
      if (a >= 0) *at = from[low];
      if (b >= 0) to[b] = from[high];
    }
  }

  // All sums of a tile, by way of a stage that nobody reads any more.
  __device__ __forceinline__ void store_all(unsigned char* staging, std::int32_t warpgroup, const Sums& sums) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
    meet<1, Tile::kWorkers>();  // all products have read what results overwrite
    place_pixels(staging);
    meet<1, Tile::kWorkers>();  // the places are there
    unsigned char* const own = staging + warp * kWarpBytes;
    unsigned char* const to = own + lane / 4 * kPitch + lane % 4 * 2 * kSize;
#pragma unroll
    for (int i = 0; i < Tile::kM; ++i) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (i + pass > 0) __syncwarp();  // all lanes have read what was staged before
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const float(&v)[4] = sums[i][pass * kEights + j];
          store_neighbours(reinterpret_cast<Value*>(to + j * 8 * kSize), v[0], v[1]);
          store_neighbours(reinterpret_cast<Value*>(to + 8 * kPitch + j * 8 * kSize), v[2], v[3]);
        }
        __syncwarp();  // the rows are there
        const std::int64_t* const places = places_of(staging) + pass * kPixels;
        const std::int32_t row = place.row + (warpgroup * Tile::kM + i) * 64 + warp % 4 * 16;
        if constexpr (kVector == 1 && kSize == 2) {
          copy_odd_rows(own, places, row);
        } else {
          copy_rows(own, places, row);
        }
      }
    }
  }

  // What `store` is given, by way of what the warp has behind the sums, where a row of x begins at any 16-bit value: half a warp
  // stores a row as whole words where they lie, of which the first pixel and the last may be none.
  __device__ __forceinline__ void store_odd(unsigned char* own, std::int32_t product, std::int32_t eight, const Group& v) const {
    using Bits = Word<kSize>;
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, unit = lane % 16, pixel = place.pixel + 8 * eight + lane;
    unsigned char* const to = own + lane / 4 * kLaidOddPitch + lane % 4 * 2 * kSize;
    __syncwarp();  // all lanes have read what was staged before
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      store_neighbours(reinterpret_cast<Value*>(to + k * 8 * kSize), v[k][0], v[k][1]);
      store_neighbours(reinterpret_cast<Value*>(to + 8 * kLaidOddPitch + k * 8 * kSize), v[k][2], v[k][3]);
    }
    const std::int64_t at = pixel < place.end ? laid_result(job, pixel) : -1, first = __shfl_sync(~0u, at, 0);
    const std::int32_t last = unit > 0 ? 2 * unit : 31, before = unit > 0 ? 2 * unit - 1 : 0;
    const std::int64_t even[] = {__shfl_sync(~0u, at, 2 * unit), __shfl_sync(~0u, at, 2 * unit + 1)};
    const std::int64_t odd[] = {__shfl_sync(~0u, at, before), __shfl_sync(~0u, at, last)};
    __syncwarp();  // the rows are there
    const std::int32_t row = place.row + product * 64 + std::int32_t(threadIdx.x) / 32 % 4 * 16;
    Bits* const base = reinterpret_cast<Bits*>(x) + row * job.x_c;
    const std::uint32_t begins = std::uint32_t(reinterpret_cast<std::uintptr_t>(base + first) / sizeof(Bits));
#pragma unroll 2
    for (std::int32_t i = lane / 16; i < 16; i += 2) {
      if (row + i >= job.rows) break;
      const bool is_odd = (begins + std::uint32_t(i) * std::uint32_t(job.x_c)) % 2 != 0;
      const std::int64_t a = is_odd ? odd[0] : even[0], b = is_odd ? odd[1] : even[1];
      const Bits* const from = reinterpret_cast<const Bits*>(own + i * kLaidOddPitch);
      const Bits low = from[is_odd ? before : 2 * unit], high = from[is_odd ? last : 2 * unit + 1];
      Bits* const own_row = base + i * job.x_c;
      if (a >= 0 && b == a + 1 && reinterpret_cast<std::uintptr_t>(own_row + a) % 4 == 0) {
        *reinterpret_cast<std::uint32_t*>(own_row + a) = std::uint32_t(low) | std::uint32_t(high) << 16;
        continue;
      }
      if (a >= 0) own_row[a] = low;
      if (b >= 0) own_row[b] = high;
    }
  }

  // In the block's only tile: it adds some of the sums of all blocks of its cluster up, and stores those.
  __device__ __forceinline__ void add_together(unsigned char* memory, std::int32_t warpgroup, const Sums& sums) const {
    unsigned char* const own = memory + Tile::kRows * Tile::kPixels * 4 + std::int32_t(threadIdx.x) / 32 * kLaidOddBytes;
    add_in_cluster<Tile::kWorkers>(memory, job.splits.value, warpgroup, sums,
                                   [&](std::int32_t product, std::int32_t eight, const Group& v) {
                                     if constexpr (kVector == 1 && kSize == 2) {
                                       store_odd(own, product, eight, v);
                                     } else {
                                       store(product, eight, v);
                                     }
                                   });
  }

  template <bool kTogether>
  __device__ __forceinline__ void run(unsigned char* memory, std::int32_t warpgroup, const Sums& sums) const {
    kTogether ? add_together(memory, warpgroup, sums) : store_all(memory, warpgroup, sums);
  }
};
#endif

}  // namespace upfold::cuda
