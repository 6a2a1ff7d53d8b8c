// How the fused gradient of the input reads taps from a chunk of y in shared memory (InputReads).
#pragma once

#include "fused_input.cuh"
#include "mma.cuh"

namespace upfold::cuda {

// A lane's part of 16 rows of a step, which are two neighbouring pixels of it: two taps of float32, {tap 0 of both, tap 1 of
// both}; or four of 16 bits, {taps 0 and 1 of both, taps 2 and 3 of both}.
using InputStep = std::uint32_t[4];

// Addresses are of a tap of the first pixel; v is the entry in its step.
template <typename Value, InputReads kReads>
struct InputRead {
  static constexpr int kSize = int(sizeof(Value));

  static __device__ __forceinline__ std::uint32_t element(const unsigned char* at) {
    if constexpr (kSize == 4) return to_tf32(*reinterpret_cast<const float*>(at));
    return *reinterpret_cast<const std::uint16_t*>(at);
  }
  static __device__ __forceinline__ std::uint32_t word(const unsigned char* at) {
    return *reinterpret_cast<const std::uint32_t*>(at);
  }
  // A lane's own tap, or two of 16 bits.
  static __device__ __forceinline__ std::uint32_t own_word(const unsigned char* at) {
    return kSize == 4 ? element(at) : word(at);
  }
  static __device__ __forceinline__ uint2 words(const unsigned char* at) { return *reinterpret_cast<const uint2*>(at); }
  static __device__ __forceinline__ float4 elements(const unsigned char* at) { return *reinterpret_cast<const float4*>(at); }
  // Halves of two words: the high one of the first and the low one of the second; the high ones of both.
  static __device__ __forceinline__ std::uint32_t across(std::uint32_t a, std::uint32_t b) { return __funnelshift_r(a, b, 16); }
  static __device__ __forceinline__ std::uint32_t highs(std::uint32_t a, std::uint32_t b) {
    return (a >> 16) | (b & 0xffff0000u);
  }

  // Two taps, an aligned vector of both pixels.
  static __device__ __forceinline__ void four(InputStep& to, int v, const unsigned char* at) {
    if constexpr (kSize == 4) {
      const float4 both = elements(at);
      to[0] = to_tf32(both.x), to[2] = to_tf32(both.y), to[1] = to_tf32(both.z), to[3] = to_tf32(both.w);
    } else {
      const uint2 both = words(at);
      to[2 * v] = both.x, to[2 * v + 1] = both.y;
    }
  }

  // Four taps in a row, the first one at the end of an aligned vector: two steps of float32, or one.
  static __device__ __forceinline__ void row(InputStep& first, InputStep& second, const unsigned char* at) {
    if constexpr (kSize == 4) {
      const float4 v = elements(at + 4);
      first[0] = element(at), first[2] = to_tf32(v.x), first[1] = second[0] = to_tf32(v.y);
      first[3] = second[2] = to_tf32(v.z), second[1] = to_tf32(v.w), second[3] = element(at + 20);
    } else {
      const uint2 v = words(at + 2);
      first[0] = across(word(at - 2), v.x), first[1] = first[2] = across(v.x, v.y), first[3] = across(v.y, word(at + 10));
    }
  }

  // Three taps in a row and three in another, both as above: three entries.
  static __device__ __forceinline__ void threes(InputStep* const (&to)[3], const int (&v)[3], const unsigned char* at,
                                                const unsigned char* other) {
    if constexpr (kSize == 4) {
      const float4 a = elements(at + 4), b = elements(other + 4);
      const std::uint32_t shared_tap = to_tf32(a.y), other_tap = to_tf32(b.y);
      InputStep &first = *to[0], &second = *to[1], &third = *to[2];
      first[0] = element(at), first[2] = to_tf32(a.x), first[1] = shared_tap, first[3] = to_tf32(a.z);
      second[0] = shared_tap, second[2] = element(other), second[1] = to_tf32(a.w), second[3] = other_tap;
      third[0] = to_tf32(b.x), third[2] = other_tap, third[1] = to_tf32(b.z), third[3] = to_tf32(b.w);
    } else {
      const uint2 a = words(at + 2), b = words(other + 2);
      (*to[0])[2 * v[0]] = across(word(at - 2), a.x), (*to[0])[2 * v[0] + 1] = across(a.x, a.y);
      (*to[1])[2 * v[1]] = highs(a.x, word(other - 2)), (*to[1])[2 * v[1] + 1] = highs(a.y, b.x);
      (*to[2])[2 * v[2]] = b.x, (*to[2])[2 * v[2] + 1] = b.y;
    }
  }

  // Four taps of one pixel, an aligned vector: two steps of float32, or one.
  static __device__ __forceinline__ void quad(InputStep& first, InputStep& second, int half, const unsigned char* at) {
    if constexpr (kSize == 4) {
      const float4 v = elements(at);
      first[half] = to_tf32(v.x), first[half + 2] = to_tf32(v.y), second[half] = to_tf32(v.z), second[half + 2] = to_tf32(v.w);
    } else {
      const uint2 v = words(at);
      first[half] = v.x, first[half + 2] = v.y;
    }
  }

  // Two taps of one pixel, as one vector or apart.
  static __device__ __forceinline__ void pixel(InputStep& to, int v, int half, const unsigned char* a, const unsigned char* b) {
    if constexpr (kSize == 4 && kReads == InputReads::kPairs) {
      const float2 pair = *reinterpret_cast<const float2*>(a);
      to[half] = to_tf32(pair.x), to[half + 2] = to_tf32(pair.y);
    } else if constexpr (kSize == 4) {
      to[half] = element(a), to[half + 2] = element(b);
    } else {
      to[2 * v + half] = kReads == InputReads::kPairs ? word(a) : element(a) | element(b) << 16;
    }
  }
};

}  // namespace upfold::cuda
