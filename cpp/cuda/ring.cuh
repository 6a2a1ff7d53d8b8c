// Buffers of shared memory that are filled and read in turn.
#pragma once

#include <cstdint>

namespace upfold::cuda {

// The next of `count` buffers that take turns, and the parity of the phase of its barriers.
struct Ring {
  std::uint32_t count, at = 0, parity = 0;
  __device__ __forceinline__ explicit Ring(std::int32_t buffers) : count(std::uint32_t(buffers)) {}
  __device__ __forceinline__ void next() {
    if (++at == count) at = 0, parity ^= 1;
  }
  // As `next` so many times.
  __device__ __forceinline__ void skip(std::int32_t buffers) {
    const std::uint32_t passed = at + std::uint32_t(buffers);
    at = passed % count, parity ^= passed / count & 1;
  }
  // The same of a number of times that stays: divided once.
  struct Leap {
    std::uint32_t buffers, parity;
  };
  __device__ __forceinline__ Leap leap_of(std::int32_t buffers) const {
    return {std::uint32_t(buffers) % count, std::uint32_t(buffers) / count & 1};
  }
  __device__ __forceinline__ void skip(const Leap& leap) {
    at += leap.buffers, parity ^= leap.parity;
    if (at >= count) at -= count, parity ^= 1;
  }
};

}  // namespace upfold::cuda
