// The end of tiles of the fused method by boxes of channels to results in planes: they are turned on their way through shared
// memory, and the copy engine stores runs of a row, in some of the tile's channels at a time (fused_last_loose.cuh: lanes do,
// where rows are no whole vectors).
//   staging  [warpgroup][buffers][run of positions][channel][results of the run]   swizzled where those are 64 or 128 bytes
#pragma once

#include "fused_last_boxes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct LastPlanesValues : LastStaged<Value, Tile> {
  using Base = LastStaged<Value, Tile>;
  using Base::job, Base::place, Base::lane;
  using typename Base::Sums;
  static constexpr int kRowPhases = Tile::kRowPhases, kPhaseRows = Tile::kPhases / kRowPhases;  // of a row; rows of phases
  static constexpr int kPixelBytes = kRowPhases * int(sizeof(Value));                           // of a position in a row
  static constexpr int kWords = (kPixelBytes + 3) / 4;
  static constexpr bool kPairs = kPixelBytes == 2;  // a word has two positions
  static constexpr int kParts = last_planes_parts(int(sizeof(Value))), kEights = Tile::kSub8 / kParts;
  static constexpr int kColumns = 8 * kEights;  // of a part
  static constexpr int kBuffers = last_planes_buffers(Tile::kColumns, int(sizeof(Value)));
  static_assert(kEights > 0 && kParts % kBuffers == 0, "channels of a part");
  // Of planes of floats a lane's two rows of a product are neighbouring pixels, from this one on.
  static constexpr bool kNeighbours = Tile::kFromPlanes && sizeof(Value) == 4;
  static __device__ __forceinline__ std::int32_t own_pixel() { return std::int32_t(threadIdx.x) / 32 % 4 * 16 + lane() / 4 * 2; }

  // Of the phases from `phase` on.
  template <bool kRelu>
  static __device__ __forceinline__ void words_of(const Sums& sums, int m, int phase, int eight, int of,
                                                  std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      if constexpr (kPairs) {
        // Of two lanes with neighbouring positions one takes the first channel of both, the other the second.
        const std::uint32_t own = Pair<Value>::narrow(Base::template end<kRelu>(sums[m][phase][eight][of]),
                                                      Base::template end<kRelu>(sums[m][phase][eight][of + 1]));
        const std::uint32_t other = __shfl_xor_sync(~0u, own, 4);
        words[word] = lane() & 4 ? __byte_perm(other, own, 0x7632) : __byte_perm(own, other, 0x5410);
      } else if constexpr (sizeof(Value) == 2) {
        static_assert(kRowPhases % 2 == 0, "two phases of a word");
        words[word] = Pair<Value>::narrow(Base::template end<kRelu>(sums[m][phase + 2 * word][eight][of]),
                                          Base::template end<kRelu>(sums[m][phase + 2 * word + 1][eight][of]));
      } else {
        float v = Base::template end<kRelu>(sums[m][phase + word][eight][of]);
        pin(v);  // else the compiler stores sums while it takes others of them for unfinished, and lets no products overlap
        words[word] = __float_as_uint(v);
      }
    }
  }
  static __device__ __forceinline__ void put(unsigned char* to, const std::uint32_t (&words)[kWords]) {
    if constexpr (kRowPhases == 3) {
      static_assert(sizeof(Value) == 4, "others write two pixels together");
#pragma unroll
      for (int phase = 0; phase < 3; ++phase) *reinterpret_cast<std::uint32_t*>(to + 4 * phase) = words[phase];
    } else if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    } else if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = words[0];
    }
  }

  // Two neighbouring pixels, in the phases of a row; swizzled ones of 16 bytes change places within 32.
  template <bool kRelu, bool kSwizzled>
  static __device__ __forceinline__ void put_two(unsigned char* to, const Sums& sums, int m, int eight, int odd) {
    std::uint32_t first[kWords], second[kWords];
    words_of<kRelu>(sums, m, 0, eight, odd, first);
    words_of<kRelu>(sums, m, 0, eight, 2 + odd, second);
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint4*>(to) = {first[0], first[1], second[0], second[1]};
    } else {
      put(to, first);
      put(kSwizzled ? reinterpret_cast<unsigned char*>(reinterpret_cast<std::uintptr_t>(to) ^ 16) : to + 16, second);
    }
  }

  // Where the tile's position `number` is; whether there is one. Where the source lies in planes, `number` counts what is kept.
  __device__ __forceinline__ bool find(std::int32_t number, std::int32_t (&at)[3], std::int32_t& n) const {
    n = place.n;
    if constexpr (Tile::kFromPlanes) {
      std::uint32_t rest = std::uint32_t(place.first[2] + number);
      at[2] = std::int32_t(take(job.plane_row, rest)), at[1] = std::int32_t(take(job.plane_rows, rest));
      at[0] = std::int32_t(rest);
      return true;
    } else {
      std::uint32_t rest = std::uint32_t(number);
#pragma unroll
      for (int i = 2; i >= 0; --i) at[i] = place.first[i] + std::int32_t(take(job.axis[i].tile, rest));
      n += std::int32_t(rest);
      return rest < job.tile_n.value;
    }
  }
};

template <typename Value, typename Tile>
struct LastPlanesStore : LastPlanesValues<Value, Tile> {
  using Base = LastPlanesValues<Value, Tile>;
  using Base::job, Base::place, Base::result, Base::staging, Base::lane, Base::meet_warpgroup, Base::kPixelBytes, Base::kWords,
      Base::kPairs, Base::kParts, Base::kEights, Base::kColumns, Base::kRowPhases;
  using typename Base::Sums;
  static constexpr int kPartBytes = last_planes_part_bytes(Tile::kRows, Tile::kColumns, kPixelBytes, int(sizeof(Value)), false);
  static constexpr int kStaged = Base::kBuffers * kPartBytes;

  // Of rows of kRow bytes; 0: of others, in order. A lane holds positions lane / 4 and the eighth behind it, channels 2 * (lane %
  // 4) and the next of each eight.
  template <int kRow, bool kRelu, int kPart>
  __device__ __forceinline__ void write_apart(const Sums& sums, unsigned char* to) const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32 % 4, run = kRow > 0 ? kRow / kPixelBytes : job.run;
    const std::int32_t row = kRow > 0 ? kRow : job.run * kPixelBytes, runs = kRow > 0 ? 64 / run : job.kept / run;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t pixel = warp * 16 + half * 8 + (kPairs ? lane() / 8 * 2 : lane() / 4), byte = pixel % run * kPixelBytes;
      if (kRow == 0 && !kPairs && pixel >= job.kept) continue;
#pragma unroll
      for (int odd = 0; odd < (kPairs ? 1 : 2); ++odd) {
        const std::int32_t channel = lane() % 4 * 2 + (kPairs ? lane() / 4 % 2 : odd);
        const std::int32_t swizzle = kRow == 128 ? channel % 8 : kRow == 64 ? channel / 2 % 4 : 0;
        unsigned char* const own = to + pixel / run * (row * kColumns) + channel * row + (byte / 16 ^ swizzle) * 16 + byte % 16;
#pragma unroll
        for (int i = 0; i < Tile::kM * kEights; ++i) {
          const int m = i / kEights, eight = i % kEights;
          std::uint32_t words[kWords];
          Base::template words_of<kRelu>(sums, m, 0, kPart * kEights + eight, half * 2 + odd, words);
          Base::put(own + m * runs * (row * kColumns) + eight * 8 * row, words);
        }
      }
    }
  }

  // The same of neighbouring pixels.
  template <int kRow, bool kRelu, int kPart>
  __device__ __forceinline__ void write_neighbours(const Sums& sums, unsigned char* to) const {
    const std::int32_t pixel = Base::own_pixel(), run = kRow > 0 ? kRow / kPixelBytes : job.run;
    const std::int32_t row = kRow > 0 ? kRow : job.run * kPixelBytes, runs = kRow > 0 ? 64 / run : job.kept / run;
    const std::int32_t byte = pixel % run * kPixelBytes;
    if (kRow == 0 && pixel >= job.kept) return;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const std::int32_t channel = lane() % 4 * 2 + odd;
      const std::int32_t swizzle = kRow == 128 ? channel % 8 : kRow == 64 ? channel / 2 % 4 : 0;
      unsigned char* const own = to + pixel / run * (row * kColumns) + channel * row + (byte / 16 ^ swizzle) * 16;
#pragma unroll
      for (int i = 0; i < Tile::kM * kEights; ++i) {
        const int m = i / kEights, eight = i % kEights;
        Base::template put_two<kRelu, true>(own + m * runs * (row * kColumns) + eight * 8 * row, sums, m, kPart * kEights + eight,
                                            odd);
      }
    }
  }
  template <int kRow, bool kRelu, int kPart>
  __device__ __forceinline__ void write(const Sums& sums, unsigned char* to) const {
    if constexpr (Base::kNeighbours) {
      write_neighbours<kRow, kRelu, kPart>(sums, to);
    } else {
      write_apart<kRow, kRelu, kPart>(sums, to);
    }
  }

  // Lanes have a run each, of warps in turn: those of one warp begin their stores one after another.
  __device__ __forceinline__ void begin_stores(const unsigned char* from, int part) const {
    const LastPhase phase = job.phases[place.set * Tile::kPhases];
    const std::int32_t column = place.column_tile * Tile::kColumns + part * kColumns;
    const std::int32_t channel = place.group * std::int32_t(job.channels.value) + column;
    if (column >= job.columns) return;  // of another group, or of none
    const std::int32_t first = lane() * 4 + std::int32_t(threadIdx.x) / 32 % 4;
#pragma unroll 1
    for (std::int32_t run = first * job.run; run < Tile::kM * job.kept; run += 128 * job.run) {
      std::int32_t at[3], n;
      if (!this->find(run, at, n)) return;  // the tile has fewer
      store_box(result, shared_address(from) + std::uint32_t(run * kPixelBytes * kColumns),
                {at[2] * kRowPhases, at[1] * job.axis[1].result_step + phase.at[1], at[0] * job.axis[0].result_step + phase.at[0],
                 channel, n});
    }
  }

  // All parts that were begun have been read.
  static __device__ __forceinline__ void await_part() {
    await_box_reads<0>();
    meet_warpgroup();
  }
  template <bool kRelu, int kPart>
  __device__ __forceinline__ void store_parts(const Sums& sums) const {
    if constexpr (kPart < kParts) {
      unsigned char* const to = staging + kPart % Base::kBuffers * kPartBytes;
      if (Base::kBuffers == 1) await_part();
      const std::int32_t row = job.run * kPixelBytes;
      if (row == 128) {
        write<128, kRelu, kPart>(sums, to);
      } else if (row == 64) {
        write<64, kRelu, kPart>(sums, to);
      } else {
        write<0, kRelu, kPart>(sums, to);
      }
      publish_to_products();
      Base::kBuffers == 1 ? meet_warpgroup() : await_part();  // the part is written, and of two buffers the other one read
      begin_stores(to, kPart);
      store_parts<kRelu, kPart + 1>(sums);
    }
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    this->finish(sums);
    job.activation == Activation::kRelu ? store_parts<true, 0>(sums) : store_parts<false, 0>(sums);
  }
};
#endif

}  // namespace upfold::cuda
