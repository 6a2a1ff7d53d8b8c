// The taps that reach one output position, in closed form, so that a thread never searches for them.
//
// On an axis with g = gcd(stride, dilation), tap k reaches output o when k * dilation = o + pad (mod stride). That needs g to
// divide the phase (o + pad) mod stride, and then k = (phase / g) * inverse (mod stride / g), with inverse = (dilation / g)^-1.
#pragma once

#include "../columns.h"
#include "../problem.h"

namespace upfold::cuda {

// An axis and the ranges of a ColumnBlock on it.
template <typename Index>
struct AxisTaps {
  Index in_begin, in_end, out_begin, out_count;
  Index kernel, stride, pad, dilation;
  Index gcd, tap_step, in_step, inverse;
};

// Taps first_tap, first_tap + tap_step, ... below `kernel`; tap number j reads input first_in - j * in_step.
template <typename Index>
struct TapRun {
  Index first_tap, first_in;
};

template <typename Index>
static __device__ __forceinline__ TapRun<Index> taps_of_output(const AxisTaps<Index>& a, Index o) {
  const Index shifted = o + a.pad;
  const Index phase = shifted % a.stride;
  if (phase % a.gcd != 0) return {a.kernel, 0};
  const Index tap = phase / a.gcd * a.inverse % a.tap_step;
  if (tap >= a.kernel) return {a.kernel, 0};
  return {tap, (shifted - tap * a.dilation) / a.stride};
}

#ifndef __CUDACC_RTC__
// The inverse of a modulo m by Euclid's algorithm, for a and m without a common divisor; 0 when m is 1.
inline std::int64_t inverse_modulo(std::int64_t a, std::int64_t m) {
  std::int64_t r0 = m, r1 = a % m, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const std::int64_t q = r0 / r1;
    const std::int64_t r2 = r0 - q * r1, t2 = t0 - q * t1;
    r0 = r1, r1 = r2, t0 = t1, t1 = t2;
  }
  return m == 1 ? 0 : (t0 < 0 ? t0 + m : t0);
}

template <typename Index>
AxisTaps<Index> axis_taps(const Axis& a, const Range& in, const Range& out) {
  const std::int64_t gcd = greatest_common_divisor(a.stride, a.dilation);
  const std::int64_t tap_step = a.stride / gcd, in_step = a.dilation / gcd;
  const std::int64_t inverse = inverse_modulo(in_step, tap_step);
  return {Index(in.begin), Index(in.end),     Index(out.begin), Index(length(out)), Index(a.kernel), Index(a.stride),
          Index(a.pad),    Index(a.dilation), Index(gcd),       Index(tap_step),    Index(in_step),  Index(inverse)};
}
// The same of the whole axis, for one that fits below.
inline AxisTaps<std::int32_t> axis_taps(const Axis& a) { return axis_taps<std::int32_t>(a, {0, a.in}, {0, a.out}); }

// Whether every intermediate value of an axis is at most `most`, which is below 2^31: positions, taps, and the product of two
// residues.
inline bool axis_fits(const Axis& a, std::int64_t most) {
  for (const std::int64_t size : {a.in, a.out, a.kernel, a.pad, a.dilation}) {
    if (size > most) return false;
  }
  return a.stride <= 46340 && a.in * a.stride + a.kernel * a.dilation + a.pad + a.out <= most;
}
#endif

}  // namespace upfold::cuda
