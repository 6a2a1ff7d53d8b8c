// Interleaving of vectors in registers.
#pragma once

#include <cstddef>
#include <utility>

#include "tile.h"

namespace upfold::cpu::UPFOLD_ISA {

#if defined(__GNUC__) && !defined(__clang__)
template <std::size_t Bytes>
struct IndexType;
template <>
struct IndexType<4> {
  typedef std::int32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct IndexType<8> {
  typedef std::int64_t type __attribute__((vector_size(kVectorBytes)));
};
#endif

// Lanes first, first + 1, ... of a and b in turn, kLanes of them in all.
template <typename R, std::size_t first, std::size_t... I>
UPFOLD_INLINE Vector<R> zip_from(const Vector<R>& a, const Vector<R>& b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (first + I / 2 + I % 2 * sizeof...(I))...);
#elif defined(__GNUC__)
  using Index = typename IndexType<sizeof(R)>::type;
  return __builtin_shuffle(a, b, Index{(first + I / 2 + I % 2 * sizeof...(I))...});
#else
  return {{(I % 2 == 0 ? a : b).lane[first + I / 2]...}};
#endif
}

template <typename R>
UPFOLD_INLINE void zip(const Vector<R>& a, const Vector<R>& b, Vector<R>& low, Vector<R>& high) {
  using Lanes = std::make_index_sequence<static_cast<std::size_t>(kLanes<R>)>;
  const Vector<R> zipped = zip_from<R, 0>(a, b, Lanes{});
  high = zip_from<R, static_cast<std::size_t>(kLanes<R>) / 2>(a, b, Lanes{});
  low = zipped;
}

// v[0], v[1], ... v[S - 1] lane by lane, so that v read as one row becomes v[0][0], v[1][0], ...; S is a power of 2.
template <typename R, int S>
UPFOLD_INLINE void interleave_vectors(Vector<R> (&v)[S]) {
  if constexpr (S > 1) {
    Vector<R> even[S / 2], odd[S / 2];
    for (int i = 0; i < S / 2; ++i) {
      even[i] = v[2 * i];
      odd[i] = v[2 * i + 1];
    }
    interleave_vectors<R, S / 2>(even);
    interleave_vectors<R, S / 2>(odd);
    for (int i = 0; i < S / 2; ++i) zip<R>(even[i], odd[i], v[2 * i], v[2 * i + 1]);
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
