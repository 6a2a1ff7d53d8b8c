// exp, tanh and erf of a float without branches, so that loops over them are vectorised; double goes to the C library. The
// relative errors of exp and tanh and the absolute error of erf stay below 2e-7. The polynomials are minimax fits made for this
// file.
#pragma once

#include <math.h>

#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

template <int N>
UPFOLD_INLINE float polynomial(const float (&c)[N], float x) {
  float sum = c[N - 1];
  for (int i = N - 2; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}

// 2^n for n in [-252, 254], as two factors: the first alone would overflow or lose the subnormals.
UPFOLD_INLINE float scale_by_power(float value, std::uint32_t n) {
  const std::uint32_t half = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) >> 1);
  return value * float_of((half + 127u) << 23) * float_of((n - half + 127u) << 23);
}

UPFOLD_INLINE float exp_of(float v) {
  constexpr float kTail[] = {5.000000000e-01f, 1.666651368e-01f, 4.166619107e-02f, 8.369530551e-03f, 1.395156258e-03f};
  float x = v > 89.0f ? 89.0f : v;  // exp(89) overflows, exp(-105) is 0; NaN passes through both
  x = x < -105.0f ? -105.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.442695041f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log 2 in two parts, the first with few bits
  const float fraction = 1.0f + (r + r * r * polynomial(kTail, r));
  return scale_by_power(fraction, bits_of(shifted) - bits_of(kRound));
}
UPFOLD_INLINE double exp_of(double v) { return exp(v); }

UPFOLD_INLINE float tanh_of(float v) {
  constexpr float kNear[] = {-3.333333135e-01f, 1.333293319e-01f, -5.387631804e-02f, 2.112145908e-02f, -6.283672061e-03f};
  const float a = v < 0.0f ? -v : v;
  const float square = v * v;
  const float near = v + v * square * polynomial(kNear, square);
  const float far = 1.0f - 2.0f / (exp_of(2.0f * a) + 1.0f);
  return a < 0.6f ? near : v < 0.0f ? -far : far;
}
UPFOLD_INLINE double tanh_of(double v) { return tanh(v); }

UPFOLD_INLINE float erf_of(float v) {
  constexpr float kNear[] = {1.128379107e+00f, -3.761262596e-01f, 1.128360033e-01f, -2.685444430e-02f,
                             5.189535208e-03f, -8.020841051e-04f, 7.889119297e-05f};
  // log(erfc) on [0.95, 4]; beyond 4, erf rounds to 1.
  constexpr float kFar[] = {-2.564366441e-04f, -1.127426147e+00f, -6.375999451e-01f, -1.035669520e-01f,
                            2.205202915e-02f,  -2.999549033e-03f, 1.915050379e-04f};
  const float a = v < 0.0f ? -v : v;
  const float clamped = a > 4.0f ? 4.0f : a;
  const float near = v * polynomial(kNear, v * v);
  const float far = 1.0f - exp_of(polynomial(kFar, clamped));
  return a < 1.0f ? near : v < 0.0f ? -far : far;
}
UPFOLD_INLINE double erf_of(double v) { return erf(v); }

}  // namespace upfold::cpu::UPFOLD_ISA
