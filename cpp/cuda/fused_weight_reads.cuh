// How the lanes of the fused gradient of the weight read the rows of their products from shared memory, and what they sum.
#pragma once

#include "fused_weight.cuh"

namespace upfold::cuda {

template <typename Tile>
using FusedWeightSums = float[Tile::kTaps * Tile::kColumns8][4];
template <typename Tile>
using FusedWeightRows = std::uint32_t[Tile::kTaps][4];

UPFOLD_DEVICE std::uint32_t word_at(const unsigned char* at) { return *reinterpret_cast<const std::uint32_t*>(at); }

// The low halves of two words, the high ones, and the two halves between them.
UPFOLD_DEVICE std::uint32_t low_halves(std::uint32_t a, std::uint32_t b) { return __byte_perm(a, b, 0x5410); }
UPFOLD_DEVICE std::uint32_t high_halves(std::uint32_t a, std::uint32_t b) { return __byte_perm(a, b, 0x7632); }
UPFOLD_DEVICE std::uint32_t middle_halves(std::uint32_t a, std::uint32_t b) { return __byte_perm(a, b, 0x5432); }

// kCount words of neighbouring 16-bit values that begin at any.
template <int kCount>
UPFOLD_DEVICE void read_halves(const unsigned char* at, std::uint32_t (&words)[kCount]) {
  const std::uint32_t skew = std::uint32_t(reinterpret_cast<std::uintptr_t>(at) & 2) * 8;  // in bits
  const unsigned char* const first = at - skew / 8;
  std::uint32_t low = word_at(first);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const std::uint32_t high = word_at(first + 4 * i + 4);
    words[i] = __funnelshift_r(low, high, skew);
    low = high;
  }
}

// A lane's words of one row and one vector: of the pixels 2 * (lane % 4) and the next one where values have 16 bits, else of
// pixel lane % 4. `at` is where the first of them lies for the first tap; word kWord of every tap is set.
template <typename Tile, int kReads, int kWord>
UPFOLD_DEVICE void read_floats(const FusedWeightJob& job, const unsigned char* at, FusedWeightRows<Tile>& rows) {
#pragma unroll
  for (int i = 0; i < Tile::kTaps; ++i) {
    if constexpr (kReads == kPairs) {
      if (i % 2 == 1) continue;
      const uint2 both = *reinterpret_cast<const uint2*>(at + i * 4);
      rows[i][kWord] = both.x, rows[i + 1][kWord] = both.y;
    } else {
      rows[i][kWord] = word_at(at + i * job.dilation[2] * 4);
    }
  }
}
template <typename Tile, int kReads, int kWord>
UPFOLD_DEVICE void read_halves_of_taps(const FusedWeightJob& job, const unsigned char* at, FusedWeightRows<Tile>& rows) {
  constexpr int kTaps = Tile::kTaps, kPairs_ = (kTaps + 1) / 2;
  if constexpr (kReads == kAny) {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const unsigned char* const first = at + i * job.dilation[2] * 2;
      const std::uint32_t low = *reinterpret_cast<const std::uint16_t*>(first);
      const std::uint32_t high = *reinterpret_cast<const std::uint16_t*>(first + job.stride[2] * 2);
      rows[i][kWord] = high << 16 | low;
    }
    return;
  }
  std::uint32_t words[kPairs_ + 1], next[kPairs_];  // of the first pixel, two taps each; of the second
  if constexpr (kReads == kPairs) {
    static_assert(kTaps == 2, "a word of each pixel");
    const uint2 both = *reinterpret_cast<const uint2*>(at);
    words[0] = both.x, next[0] = both.y;
  } else if constexpr (kReads == kWords) {
    read_halves(at, reinterpret_cast<std::uint32_t(&)[kPairs_]>(words));
    read_halves(at + job.stride[2] * 2, next);
  } else {
    read_halves(at, words);
  }
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    if constexpr (kReads == kUnitStride) {  // the second pixel's first tap is the first one's second
      rows[i][kWord] = i % 2 == 0 ? words[i / 2] : middle_halves(words[i / 2], words[i / 2 + 1]);
    } else {
      const std::uint32_t second = kReads == kShiftedPairs ? words[i / 2 + 1] : next[i / 2];
      rows[i][kWord] = i % 2 == 0 ? low_halves(words[i / 2], second) : high_halves(words[i / 2], second);
    }
  }
}

// kFours: words kWord and kWord + 1 of every tap. Half a warp reads eight bytes a lane at a time: rows that would meet in a bank
// read the two pixels in turns.
template <typename Tile, int kWord>
UPFOLD_DEVICE void read_fours(const FusedWeightJob& job, const unsigned char* at, FusedWeightRows<Tile>& rows) {
  static_assert(Tile::kTaps == 2, "four taps of half of the channels");
  const bool turned = threadIdx.x & 8;
  const std::int32_t pixel = job.stride[2] * 2;
  const uint2 a = *reinterpret_cast<const uint2*>(at + (turned ? pixel : 0));
  const uint2 b = *reinterpret_cast<const uint2*>(at + (turned ? 0 : pixel));
  const std::uint32_t low = turned ? 0x1054 : 0x5410, high = turned ? 0x3276 : 0x7632;  // halves of the first pixel, the second
  rows[0][kWord] = __byte_perm(a.x, b.x, low), rows[1][kWord] = __byte_perm(a.x, b.x, high);
  rows[0][kWord + 1] = __byte_perm(a.y, b.y, low), rows[1][kWord + 1] = __byte_perm(a.y, b.y, high);
}

template <typename Value, typename Tile, int kReads, int kWord>
UPFOLD_DEVICE void read_word(const FusedWeightJob& job, const unsigned char* at, FusedWeightRows<Tile>& rows) {
  if constexpr (sizeof(Value) == 4) {
    read_floats<Tile, kReads, kWord>(job, at, rows);
  } else {
    read_halves_of_taps<Tile, kReads, kWord>(job, at, rows);
  }
}

}  // namespace upfold::cuda
