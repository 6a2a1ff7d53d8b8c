// Division by a number that is known on the host: one multiplication and one shift on the device.
#pragma once

#include "../problem.h"

namespace upfold::cuda {

// For numbers n below 2^31: n / value = (high(n * multiplier) + n) >> shift, and the sum stays below 2^32.
struct Divisor {
  std::uint32_t value, multiplier, shift;
};

static __device__ __forceinline__ std::uint32_t divide(const Divisor& by, std::uint32_t n) {
  return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// The remainder; `n` becomes the quotient.
static __device__ __forceinline__ std::uint32_t take(const Divisor& by, std::uint32_t& n) {
  const std::uint32_t quotient = divide(by, n), remainder = n - quotient * by.value;
  n = quotient;
  return remainder;
}

#ifndef __CUDACC_RTC__
// 1 <= value < 2^31.
inline Divisor make_divisor(std::int64_t value) {
  std::uint32_t shift = 0;
  while ((std::int64_t(1) << shift) < value) ++shift;
  const std::uint64_t scaled = std::uint64_t((std::int64_t(1) << shift) - value) << 32;
  return {std::uint32_t(value), std::uint32_t(scaled / std::uint64_t(value) + 1), shift};
}
#endif

}  // namespace upfold::cuda
