// Element types and their conversions to the type in which sums are taken.
#pragma once

#include <cstdint>
#include <cstring>

#include "../problem.h"

namespace upfold::cpu::UPFOLD_ISA {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
template <typename R>
struct Complex {
  R re, im;
};

UPFOLD_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
UPFOLD_INLINE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The conversions have no branches, so that loops over them are vectorised.
UPFOLD_INLINE float widen(Half value) {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  std::uint32_t normal = (magnitude << 13) + 0x38000000u;
  normal = magnitude >= 0x7c00u ? normal + 0x38000000u : normal;
  const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  return float_of(sign | (magnitude < 0x400u ? subnormal : normal));
}
UPFOLD_INLINE float widen(BFloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }
UPFOLD_INLINE float widen(float value) { return value; }
UPFOLD_INLINE double widen(double value) { return value; }
template <typename R>
UPFOLD_INLINE Complex<R> widen(Complex<R> value) {
  return value;
}

// Round to nearest, ties to even.
UPFOLD_INLINE void narrow(float value, Half& result) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // 0.5 has the spacing of the subnormals, 2^-24, so the addition itself rounds.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  std::uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  result.bits = static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
}
UPFOLD_INLINE void narrow(float value, BFloat16& result) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result.bits = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
UPFOLD_INLINE void narrow(float value, float& result) { result = value; }
UPFOLD_INLINE void narrow(double value, double& result) { result = value; }
template <typename R>
UPFOLD_INLINE void narrow(Complex<R> value, Complex<R>& result) {
  result = value;
}

// Sums are taken in Sum; Real is its component and kParts how many of them it has.
template <typename T>
struct Number;
template <>
struct Number<float> {
  using Sum = float;
  using Real = float;
  static constexpr int kParts = 1;
};
template <>
struct Number<double> {
  using Sum = double;
  using Real = double;
  static constexpr int kParts = 1;
};
template <>
struct Number<Half> : Number<float> {};
template <>
struct Number<BFloat16> : Number<float> {};
template <typename R>
struct Number<Complex<R>> {
  using Sum = Complex<R>;
  using Real = R;
  static constexpr int kParts = 2;
};

template <typename R>
UPFOLD_INLINE Complex<R> operator+(Complex<R> a, Complex<R> b) {
  return {a.re + b.re, a.im + b.im};
}

// Calls f with a null pointer of the element type that `dtype` names.
template <typename F>
UPFOLD_INLINE void with_element_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(static_cast<float*>(nullptr));
    case Dtype::kFloat64:
      return f(static_cast<double*>(nullptr));
    case Dtype::kFloat16:
      return f(static_cast<Half*>(nullptr));
    case Dtype::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case Dtype::kComplex64:
      return f(static_cast<Complex<float>*>(nullptr));
    case Dtype::kComplex128:
      return f(static_cast<Complex<double>*>(nullptr));
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
