// What lanes of a warp exchange and store as whole words.
#pragma once

#ifndef __CUDACC_RTC__
#include <cstring>
#endif

#include "mma.cuh"
#include "values.cuh"

namespace upfold::cuda {

template <typename Value>
UPFOLD_DEVICE std::uint32_t pair_of(float low, float high) {
  const Value pair[2] = {Narrow<Value>::from(low), Narrow<Value>::from(high)};
  std::uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}

// A word of two ones.
template <typename Value>
struct PairOfOnes {
  static constexpr std::uint32_t kBits = 0x3c003c00;
};
template <>
struct PairOfOnes<__nv_bfloat16> {
  static constexpr std::uint32_t kBits = 0x3f803f80;
};

// Neighbours of a type of 2 or 4 bytes as words, after the one rounding.
template <typename Value, int kWords>
UPFOLD_DEVICE void pack_results(const float* results, std::uint32_t (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (sizeof(Value) == 4) words[i] = __float_as_uint(results[i]);
    if constexpr (sizeof(Value) == 2) words[i] = pair_of<Value>(results[2 * i], results[2 * i + 1]);
  }
}

UPFOLD_DEVICE std::uint32_t exchange(std::uint32_t word, int lanes) { return __shfl_xor_sync(0xffffffffu, word, lanes); }

// Some neighbouring lanes exchange as many words each, so that of what they have side by side lane `own` of them has that of all
// of word `own`, in their order.
template <int kWords>
UPFOLD_DEVICE void gather_words(std::uint32_t own, std::uint32_t (&words)[kWords]) {
#pragma unroll
  for (int apart = kWords / 2; apart > 0; apart /= 2) {
    const bool upper = own / apart % 2 != 0;
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (k / apart % 2 != 0) continue;
      const std::uint32_t got = exchange(upper ? words[k] : words[k + apart], apart);
      (upper ? words[k] : words[k + apart]) = got;
    }
  }
}

// Stores kBytes of `words`, aligned to them, to global memory. As plain assignments the wide stores would be merged with the
// narrow ones of other branches, and cut like them.
template <int kBytes>
UPFOLD_DEVICE void store_words(void* to, const std::uint32_t* words) {
  if constexpr (kBytes == 2) *static_cast<std::uint16_t*>(to) = std::uint16_t(*words);
  if constexpr (kBytes == 4) *static_cast<std::uint32_t*>(to) = *words;
  if constexpr (kBytes == 8) store_global(to, uint2{words[0], words[1]});
  if constexpr (kBytes == 16) store_global(to, uint4{words[0], words[1], words[2], words[3]});
}

// The same to shared memory.
template <int kBytes>
UPFOLD_DEVICE void stage_words(void* to, const std::uint32_t* words) {
  if constexpr (kBytes == 2) *static_cast<std::uint16_t*>(to) = std::uint16_t(*words);
  if constexpr (kBytes == 4) *static_cast<std::uint32_t*>(to) = *words;
  if constexpr (kBytes == 8) *static_cast<uint2*>(to) = {words[0], words[1]};
  if constexpr (kBytes == 16) *static_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}

}  // namespace upfold::cuda
