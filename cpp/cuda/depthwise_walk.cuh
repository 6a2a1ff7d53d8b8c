// What the depthwise kernels that walk down the rows of a plane share. A thread owns a run of neighbours and reads a row at a
// time: one vector of up to 16 bytes, and one by one the few neighbours on both sides that its taps reach. The row after is
// under way while a row is used.
#pragma once

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

#include "depthwise.cuh"
#include "lanes.cuh"

namespace upfold::cuda {

// Neighbours in a vector of 16 bytes.
template <typename Value>
constexpr int kVector = 16 / int(sizeof(Value));

// Blocks that a multiprocessor is to hold of a gradient's walk, by its kernel and stride: as many as registers allow.
template <int kTaps, int kS>
constexpr int kWalkBlocks = kTaps > 16 ? 2
                            : kS == 1  ? 3
                                       : 4;

// An element as it lies in memory, in the low bits of a word.
template <typename Value>
UPFOLD_DEVICE std::uint32_t load_bits(const Value* from) {
  if constexpr (sizeof(Value) == 2) return *reinterpret_cast<const std::uint16_t*>(from);
  if constexpr (sizeof(Value) == 4) return *reinterpret_cast<const std::uint32_t*>(from);
}

// The elements of a word, or of its low half alone.
template <typename Value>
struct Bits;
template <>
struct Bits<float> {
  static __device__ __forceinline__ float widen(std::uint32_t bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ void widen_word(std::uint32_t word, float* to) { to[0] = widen(word); }
};
template <>
struct Bits<__half> {
  static __device__ __forceinline__ float widen(std::uint32_t bits) {
    return __half2float(__ushort_as_half(std::uint16_t(bits)));
  }
  static __device__ __forceinline__ void widen_word(std::uint32_t word, float* to) {
    to[0] = widen(word), to[1] = widen(word >> 16);
  }
};
template <>
struct Bits<__nv_bfloat16> {  // the upper half of a float32
  static __device__ __forceinline__ float widen(std::uint32_t bits) { return __uint_as_float(bits << 16); }
  static __device__ __forceinline__ void widen_word(std::uint32_t word, float* to) {
    to[0] = widen(word), to[1] = __uint_as_float(word & 0xffff0000u);
  }
};

// What of a run is inside a row.
template <int kLead, int kTail>
struct RunEdges {
  bool lead[kLead > 0 ? kLead : 1], middle, tail[kTail > 0 ? kTail : 1];
};

// kLead neighbours, a vector of kMiddle (or none), and kTail neighbours, as they lie in memory.
template <typename Value, int kLead, int kMiddle, int kTail>
struct RunRow {
  using Edges = RunEdges<kLead, kTail>;
  static constexpr int kCount = kLead + kMiddle + kTail, kWords = kMiddle * int(sizeof(Value)) / 4;
  std::uint32_t lead[kLead > 0 ? kLead : 1], middle[kWords > 0 ? kWords : 1], tail[kTail > 0 ? kTail : 1];

  // `middle` is the position of the vector; vectors never lie on an edge.
  static __device__ __forceinline__ Edges edges(std::int32_t middle, std::int32_t size) {
    Edges found{};
#pragma unroll
    for (int i = 0; i < kLead; ++i) found.lead[i] = inside(middle - kLead + i, size);
    found.middle = inside(middle, size);
#pragma unroll
    for (int i = 0; i < kTail; ++i) found.tail[i] = inside(middle + kMiddle + i, size);
    return found;
  }

  // `from` is the vector. What is outside, and all of a row that is not there, is 0.
  __device__ __forceinline__ void load(const Value* __restrict__ from, bool there, const Edges& edges) {
#pragma unroll
    for (int i = 0; i < kLead; ++i) lead[i] = there && edges.lead[i] ? load_bits(from - kLead + i) : 0;
    if constexpr (kWords == 4) {
      const uint4 words = there && edges.middle ? *reinterpret_cast<const uint4*>(from) : uint4{};
      middle[0] = words.x, middle[1] = words.y, middle[2] = words.z, middle[3] = words.w;
    } else if constexpr (kWords == 2) {
      const uint2 words = there && edges.middle ? *reinterpret_cast<const uint2*>(from) : uint2{};
      middle[0] = words.x, middle[1] = words.y;
    }
#pragma unroll
    for (int i = 0; i < kTail; ++i) tail[i] = there && edges.tail[i] ? load_bits(from + kMiddle + i) : 0;
  }

  __device__ __forceinline__ void widen(float (&row)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kLead; ++i) row[i] = Bits<Value>::widen(lead[i]);
#pragma unroll
    for (int i = 0; i < kWords; ++i) Bits<Value>::widen_word(middle[i], row + kLead + i * (4 / int(sizeof(Value))));
#pragma unroll
    for (int i = 0; i < kTail; ++i) row[kLead + kMiddle + i] = Bits<Value>::widen(tail[i]);
  }
};

// The one rounding, and a store of the whole run, which is aligned to its size. It is the first to leave the second-level cache:
// k16 s8 on 8 x 64 planes of 32 x 32 took 25 us in bfloat16 without that, and 20 with it (H200).
template <typename Value, int kCount>
UPFOLD_DEVICE void store_results(Value* to, const float (&results)[kCount]) {
  constexpr int kWords = kCount * int(sizeof(Value)) / 4;
  std::uint32_t words[kWords];
  pack_results<Value>(results, words);
  if constexpr (kWords == 4) __stcs(reinterpret_cast<uint4*>(to), uint4{words[0], words[1], words[2], words[3]});
  if constexpr (kWords == 2) __stcs(reinterpret_cast<uint2*>(to), uint2{words[0], words[1]});
  if constexpr (kWords == 1) __stcs(reinterpret_cast<std::uint32_t*>(to), words[0]);
}

#ifndef __CUDACC_RTC__
constexpr std::int64_t kWalkThreads = 132 * 1024;  // which an H200 holds at once
constexpr std::int64_t kFewestSteps = 4;           // of a walk, which begins with its taps and the rows before its own

// Whether kernels are of so many strides, and every run of y begins at the phase of a run; or where `halves` a stride is a run,
// and they begin half a run later.
inline bool is_wide(const Problem& p, std::int64_t run, std::int64_t kernel_h, std::int64_t kernel, bool halves) {
  return p.kernel_h == kernel_h * p.stride_h && p.kernel_w == kernel * p.stride_w &&
         (halves ? p.stride_w == run : p.stride_w % run == 0) && p.pad_w % run == (halves ? run / 2 : 0);
}

// Walks that share out `rows`, each as long as the others or shorter: how many, and the steps of one.
struct Walks {
  std::int64_t count, steps;
};
// `waves`: how often the walks of all `columns` are to fill the device, as far as they are long enough.
inline Walks walks_of(std::int64_t rows, std::int64_t columns, std::int64_t waves) {
  const std::int64_t wanted = std::max<std::int64_t>(1, waves * kWalkThreads / columns);
  const std::int64_t steps = std::max(ceil_div(rows, wanted), std::min(rows, kFewestSteps));
  return {ceil_div(rows, steps), steps};
}
#endif

}  // namespace upfold::cuda
