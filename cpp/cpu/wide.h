// Vectors of the type in which sums are taken.
#pragma once

#include "number.h"
#include "tile.h"

namespace upfold::cpu::UPFOLD_ISA {

// A vector of float, or of double for doubles, from any of the real element types.
UPFOLD_INLINE Vector<float> load_wide(const float* from) { return load(from); }
UPFOLD_INLINE Vector<double> load_wide(const double* from) { return load(from); }
template <typename T>
UPFOLD_INLINE Vector<float> load_wide(const T* from) {
  float lane[kLanes<float>];
  for (int i = 0; i < kLanes<float>; ++i) lane[i] = widen(from[i]);
  return load(lane);
}
// The lanes of that loop went through memory one by one.
#if defined(__GNUC__)
UPFOLD_INLINE Vector<float> load_wide(const BFloat16* from) {
  typedef std::uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
  typedef std::uint32_t Wide __attribute__((vector_size(kVectorBytes)));
  Narrow bits;
  std::memcpy(&bits, from, sizeof(bits));
  return Vector<float>(__builtin_convertvector(bits, Wide) << 16);
}
#endif
#if defined(__AVX512F__)
UPFOLD_INLINE Vector<float> load_wide(const Half* from) {
  // gcc 12 warns of the unmasked one, whose unused source is undefined.
  return Vector<float>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
#elif defined(__F16C__)
UPFOLD_INLINE Vector<float> load_wide(const Half* from) {
  return Vector<float>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#endif

}  // namespace upfold::cpu::UPFOLD_ISA
