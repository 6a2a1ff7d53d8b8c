// What a block of the fused method for windows loads, and how it turns it.
#pragma once

#include "fused_window.cuh"

namespace upfold::cuda {

// The patch: warps take a few neighbouring vectors of kBytes of some words of channels at a time.
template <typename Tile, int kBytes>
struct WindowPatch {
  using Value = typename Tile::Value;
  static constexpr int kEach = kBytes / Tile::kSize;           // pixels of a load
  static constexpr int kBeside = kEach > 1 ? 32 / kBytes : 8;  // neighbouring vectors, of neighbouring lanes
  static constexpr int kWords = 32 / kBeside;                  // of channels
  // Loads of words that a lane has on their way: of 16-bit patches a warp has one or two.
  static constexpr int kDeep = Tile::kSize == 4 ? 4 : Tile::kAlong < 4 ? 2 : 1;
  static constexpr bool kSwaps = Tile::kSize == 2 && kEach > 1;  // lanes that would meet in a bank begin with the second half
  struct alignas(kEach * sizeof(Value)) Vector {
    Value v[kEach];
  };
  struct Piece {
    Vector of[Tile::kOfWord];
    std::int32_t pixel, word;  // pixel: all of them ahead of the patch where there is nothing
  };

  const WindowJob& job;
  const Value* source;  // the first channel of the group
  unsigned char* patch;
  std::int32_t first;  // position
  std::int32_t lane, first_vector, vectors, tasks;

  __device__ __forceinline__ WindowPatch(const WindowJob& job_, const Value* source_, unsigned char* patch_, std::int32_t first_)
      : job(job_), source(source_), patch(patch_), first(first_), lane(std::int32_t(threadIdx.x) % 32) {
    first_vector = vector_at(first, 0);
    vectors = vector_at(first + job.pixels - 1, kEach) - first_vector;
    tasks = (vectors + kBeside - 1) / kBeside * std::int32_t(job.channel_sets.value);
  }
  // The vector of a pixel, or the first one behind it where there is none; behind the pixel's own with `more`.
  __device__ __forceinline__ std::int32_t vector_at(std::int32_t pixel, std::int32_t more) const {
    const std::int32_t row = std::int32_t(divide(job.axis[2].period, std::uint32_t(pixel)));
    const std::int32_t column = pixel - row * std::int32_t(job.axis[2].period.value) - job.axis[2].lead + more;
    const std::int32_t of_row = std::int32_t(job.vectors.value);
    return row * of_row + min(max(column, 0) / kEach, of_row);
  }

  __device__ __forceinline__ void load(Piece& piece, std::int32_t task) const {
    std::uint32_t rest = std::uint32_t(task);
    const std::int32_t set = std::int32_t(take(job.channel_sets, rest));
    const std::int32_t number = std::int32_t(rest) * kBeside + lane % kBeside;
    piece.word = set * kWords + lane / kBeside;
    std::uint32_t row = std::uint32_t(first_vector + number);
    const std::int32_t column = std::int32_t(take(job.vectors, row)) * kEach;
    piece.pixel = std::int32_t(row * job.axis[2].period.value) + job.axis[2].lead + column - first;
    bool exists = number < vectors;
    std::int32_t offset = column * job.axis[2].source_step;
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      const std::int32_t at = std::int32_t(take(job.axis[i].period, row)) - job.axis[i].lead;
      exists = exists && at >= 0 && at < job.axis[i].source;
      offset += at * job.axis[i].source_step;
    }
    exists = exists && std::int32_t(row) < job.batch;
    offset += std::int32_t(row) * job.source_n;
#pragma unroll
    for (int c = 0; c < Tile::kOfWord; ++c) {
      const std::int32_t channel = piece.word * Tile::kOfWord + c;
      piece.of[c] = {};
      if (exists && channel < job.k) piece.of[c] = *reinterpret_cast<const Vector*>(source + channel * job.source_c + offset);
    }
    if (!exists || piece.word * Tile::kOfWord >= job.k) piece.pixel = -kEach;
  }

  __device__ __forceinline__ void store(const Piece& piece) const {
    const bool swaps = kSwaps && lane % kBeside * 2 >= kBeside;
    unsigned char* const to = patch + piece.word * 4;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const std::int32_t pixel = piece.pixel + (kSwaps ? i ^ (swaps ? kEach / 2 : 0) : i);
      std::uint32_t word;
      if constexpr (Tile::kSize == 4) {
        word = near_tf32(__float_as_uint(piece.of[0].v[i]));
      } else if constexpr (kSwaps) {
        const auto pair = [&](int c) {
          const auto words = reinterpret_cast<const std::uint32_t*>(piece.of[c].v);
          return swaps ? words[i / 2 ^ kEach / 4] : words[i / 2];
        };
        word = __byte_perm(pair(0), pair(1), i % 2 != 0 ? 0x7632 : 0x5410);
      } else {
        const auto half = [&](int c) { return std::uint32_t(*reinterpret_cast<const std::uint16_t*>(piece.of[c].v)); };
        word = half(0) | half(1) << 16;
      }
      if (std::uint32_t(pixel) < std::uint32_t(job.pixels))
        *reinterpret_cast<std::uint32_t*>(to + pixel * job.pixel_pitch) = word;
    }
  }

  __device__ __forceinline__ void fill() const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32;
#pragma unroll 1
    for (std::int32_t task = warp; task < tasks; task += kDeep * Tile::kWarps) {
      Piece pieces[kDeep];
#pragma unroll
      for (int i = 0; i < kDeep; ++i)
        if (task + i * Tile::kWarps < tasks) load(pieces[i], task + i * Tile::kWarps);
#pragma unroll
      for (int i = 0; i < kDeep; ++i)
        if (task + i * Tile::kWarps < tasks) store(pieces[i]);
    }
  }
};

template <typename Tile>
__device__ __forceinline__ void clear_patch(const WindowJob& job, unsigned char* patch) {
  uint4* const vectors = reinterpret_cast<uint4*>(patch);
#pragma unroll 2
  for (std::int32_t i = std::int32_t(threadIdx.x); i < job.pixels * (job.pixel_pitch / 16); i += Tile::kThreads)
    vectors[i] = make_uint4(0, 0, 0, 0);
}

// The weight of a tile's channels.
template <typename Tile>
struct WindowWeight {
  using Value = typename Tile::Value;
  const WindowJob& job;
  unsigned char* memory;
  std::int32_t channels;  // of the result, that exist

  // Begins to copy the rows of the tile, whose first is at `w`: a warp those that it lays out. What is behind the reduction is
  // zeros.
  __device__ __forceinline__ void copy(const Value* w) const {
    if (job.unit == 16) return copy_rows<16>(w);
    job.unit == 4 ? copy_rows<4>(w) : copy_rows<Tile::kSize>(w);
  }
  template <int kUnit>
  __device__ __forceinline__ void copy_rows(const Value* w) const {
    const std::int32_t bytes = (job.by_source ? channels : job.k) * job.taps * Tile::kSize;
    const std::int32_t of_row = job.by_source ? bytes : job.raw_pitch, lane = std::int32_t(threadIdx.x) % 32;
    const std::int32_t outer = job.by_source ? job.chunks * (kWindowChunk / 4) : channels;
    const std::int32_t together = job.by_source ? Tile::kOfWord : 1;  // rows
    const auto first = reinterpret_cast<const unsigned char*>(w);
#pragma unroll 1
    for (std::int32_t i = std::int32_t(threadIdx.x) / 32; i < outer; i += Tile::kWarps) {
#pragma unroll 1
      for (std::int32_t row = i * together; row < (i + 1) * together; ++row) {
        const bool exists = !job.by_source || row < job.k;
        const unsigned char* const from = first + (exists ? row * job.w_row : 0) * Tile::kSize;
        const std::uint32_t to = shared_address(memory) + std::uint32_t(job.raw_at + row * job.raw_pitch);
#pragma unroll 1
        for (std::int32_t at = lane * kUnit; at < of_row; at += 32 * kUnit) {
          const bool live = exists && at < bytes;
          if constexpr (kUnit >= 4) {
            copy_async<kUnit>(to + std::uint32_t(at), from + (live ? at : 0), live);
          } else {
            store_half(to + std::uint32_t(at), live ? *reinterpret_cast<const std::uint16_t*>(from + at) : 0);
          }
        }
      }
    }
    copy_async_commit();
  }

  static constexpr int kAcrossPlanes = Tile::kChannels / 8;
  // Bytes in the laid out weight: of a channel of the result and a word, and from tap to tap.
  static __device__ __forceinline__ std::int32_t place(std::int32_t word, std::int32_t m) {
    return ((word / 4 * kAcrossPlanes + m / 8) * kWindowPlane + m % 8 * 4 + word % 4) * 4;
  }
  __device__ __forceinline__ std::int32_t tap_bytes() const {
    return job.chunks * (kWindowChunk / 16) * kAcrossPlanes * kWindowPlane * 4;
  }

  // Lays it out, when the warp's rows are there: lanes have neighbours of whichever channels lie closer together. Channels of the
  // result that do not exist are left as they are.
  __device__ __forceinline__ void lay_out() const {
    const std::int32_t warp = std::int32_t(threadIdx.x) / 32, lane = std::int32_t(threadIdx.x) % 32;
    const std::int32_t words = job.chunks * (kWindowChunk / 4);
    const std::int32_t inner = job.by_source ? Tile::kChannels : words, outer = job.by_source ? words : channels;
#pragma unroll 1
    for (std::int32_t i = warp; i < outer; i += Tile::kWarps)
#pragma unroll 1
      for (std::int32_t j = lane; j < inner; j += 32) job.by_source ? lay_out_word(i, j) : lay_out_word(j, i);
  }
  __device__ __forceinline__ void lay_out_word(std::int32_t word, std::int32_t m) const {
    if (m >= channels) return;
    using Bits = Word<Tile::kSize>;
    const Bits* from = reinterpret_cast<const Bits*>(memory + job.raw_at) + word * Tile::kOfWord * job.raw_k + m * job.raw_m;
    unsigned char* to = memory + job.weight_at + place(word, m);
    const std::int32_t step = tap_bytes(), apart = job.raw_k;
#pragma unroll 4
    for (std::int32_t tap = 0; tap < job.taps; ++tap, ++from, to += step) {
      std::uint32_t value = from[0];
      if constexpr (Tile::kSize == 2) {
        value = __byte_perm(value, from[apart], 0x5410);
      } else {
        value = near_tf32(value);
      }
      *reinterpret_cast<std::uint32_t*>(to) = value;
    }
  }
};

}  // namespace upfold::cuda
