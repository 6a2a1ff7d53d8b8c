// The end of tiles of the fused method by boxes of channels whose positions are pixels of a plane: results are turned on their way
// through shared memory, and the copy engine stores runs of a row, in all of the tile's channels at a time.
//   staging  [warpgroup][run of pixels][channel of the tile][results of the run: 64 or 128 bytes]   swizzled
#pragma once

#include "fused_last_boxes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct LastPlanesStore : LastStaged<Value, Tile> {
  using Base = LastStaged<Value, Tile>;
  using Base::job, Base::place, Base::result, Base::staging, Base::lane, Base::is_first, Base::meet_warpgroup;
  using typename Base::Sums;
  static constexpr int kPixelBytes = Tile::kPhases * int(sizeof(Value)), kWords = kPixelBytes / 4;
  static constexpr int kStaged = Tile::kRows * Tile::kColumns * kPixelBytes;

  // Of rows of kRow bytes. A lane holds pixels lane / 4 and the eighth behind it, channels 2 * (lane % 4) and the next of each eight.
  template <int kRow, bool kRelu>
  __device__ __forceinline__ void write(const Sums& sums) const {
    constexpr int kRun = kRow / kPixelBytes, kRunBytes = kRow * Tile::kColumns;
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t pixel = warp * 16 + half * 8 + lane() / 4, byte = pixel % kRun * kPixelBytes;
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const std::int32_t channel = lane() % 4 * 2 + odd, swizzle = kRow == 128 ? channel % 8 : channel / 2 % 4;
        unsigned char* const own =
            staging + pixel / kRun * kRunBytes + channel * kRow + (byte / 16 ^ swizzle) * 16 + byte % 16;
#pragma unroll
        for (int i = 0; i < Tile::kM * Tile::kSub8; ++i) {
          const int m = i / Tile::kSub8, eight = i % Tile::kSub8;
          std::uint32_t words[kWords];
#pragma unroll
          for (int word = 0; word < kWords; ++word)
            words[word] = Pair<Value>::narrow(Base::template end<kRelu>(sums[m][2 * word][eight][half * 2 + odd]),
                                              Base::template end<kRelu>(sums[m][2 * word + 1][eight][half * 2 + odd]));
          unsigned char* const to = own + m * (64 / kRun) * kRunBytes + eight * 8 * kRow;
          if constexpr (kWords == 2) {
            *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
          } else {
            *reinterpret_cast<std::uint32_t*>(to) = words[0];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void begin_stores() const {
    const LastPhase phase = job.phases[place.set * Tile::kPhases];
    const std::int32_t channel = place.group * std::int32_t(job.channels.value) + place.column_tile * Tile::kColumns;
    std::uint32_t from = shared_address(staging);
#pragma unroll 1
    for (std::int32_t run = 0; run < Tile::kRows; run += job.run, from += std::uint32_t(job.run * kPixelBytes * Tile::kColumns)) {
      std::uint32_t rest = std::uint32_t(place.first[2] + run);
      const std::int32_t w = std::int32_t(take(job.plane_row, rest)), h = std::int32_t(take(job.plane_rows, rest));
      store_box(result, from,
                {w * Tile::kPhases, h * job.axis[1].result_step + phase.at[1],
                 std::int32_t(rest) * job.axis[0].result_step + phase.at[0], channel, place.n});
    }
  }

  template <bool kRelu>
  __device__ __forceinline__ void write_rows(const Sums& sums) const {
    job.run * kPixelBytes == 128 ? write<128, kRelu>(sums) : write<64, kRelu>(sums);
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    this->finish(sums);
    if (is_first()) await_box_reads<0>();
    meet_warpgroup();  // results before have been read
    job.activation == Activation::kRelu ? write_rows<true>(sums) : write_rows<false>(sums);
    publish_to_products();
    meet_warpgroup();  // and these are written
    if (is_first()) begin_stores();
  }
};
#endif

}  // namespace upfold::cuda
