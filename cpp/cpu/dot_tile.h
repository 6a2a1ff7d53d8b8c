// The register tile of conv_transpose_weight: dot products of rows of x with shifted rows of y.
#pragma once

#include <utility>

#include "tile.h"

namespace upfold::cpu::UPFOLD_ISA {

constexpr int kDotX = 4;
constexpr int kDotY = kVectorRegisters == 32 ? 4 : 2;

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define UPFOLD_SHUFFLE 1
#endif
#endif

#if defined(UPFOLD_SHUFFLE)
// The sums of neighbouring lanes: those of a, then those of b.
template <typename R, int... I>
UPFOLD_INLINE Vector<R> add_neighbours(const Vector<R>& a, const Vector<R>& b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// sums[i] = the sum of the lanes of v[i], for kLanes<R> vectors: a tree that folds pairs of vectors into one.
template <typename R>
UPFOLD_INLINE void lane_sums(Vector<R>* v, R* sums) {
  constexpr int L = kLanes<R>;
  for (int count = L; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) v[i] = add_neighbours<R>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, L>());
  }
  store(v[0], sums);
}
#else
template <typename R>
UPFOLD_INLINE void lane_sums(Vector<R>* v, R* sums) {
  for (int i = 0; i < kLanes<R>; ++i) {
    R lane[kLanes<R>];
    store(v[i], lane);
    for (int step = 1; step < kLanes<R>; step *= 2) {
      for (int j = 0; j < kLanes<R>; j += 2 * step) lane[j] += lane[j + step];
    }
    sums[i] = lane[0];
  }
}
#endif

// totals[a * totals_pitch + b] += sum over f in [0, count) of x[a * x_pitch + f] * y[offsets[b] + f]. Vectors reach past `count`:
// x must be 0 there.
template <typename R, int A, int B>
static void dot_tile(const R* x, std::int64_t x_pitch, const R* y, const std::int64_t* offsets, std::int64_t count,
                     double* totals, std::int64_t totals_pitch) {
  Vector<R> sum[A][B];
  for (int a = 0; a < A; ++a) {
    for (int b = 0; b < B; ++b) sum[a][b] = Vector<R>{};
  }
  for (std::int64_t f = 0; f < count; f += kLanes<R>) {
    Vector<R> left[A], right[B];
    for (int a = 0; a < A; ++a) left[a] = load(x + a * x_pitch + f);
    for (int b = 0; b < B; ++b) right[b] = load(y + offsets[b] + f);
    for (int a = 0; a < A; ++a) {
      for (int b = 0; b < B; ++b) sum[a][b] = sum[a][b] + left[a] * right[b];
    }
  }
  // Whole groups of kLanes vectors; the unused ones stay 0.
  constexpr int kGroup = kLanes<R>, kGroups = (A * B + kGroup - 1) / kGroup;
  R sums[kGroups * kGroup];
  for (int group = 0; group < kGroups; ++group) {
    Vector<R> v[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const int index = group * kGroup + i;
      v[i] = index < A * B ? sum[index / B][index % B] : Vector<R>{};
    }
    lane_sums<R>(v, sums + group * kGroup);
  }
  for (int a = 0; a < A; ++a) {
    for (int b = 0; b < B; ++b) totals[a * totals_pitch + b] += static_cast<double>(sums[a * B + b]);
  }
}

template <typename R, int A>
static void dot_row(const R* x, std::int64_t x_pitch, const R* y, const std::int64_t* offsets, std::int64_t offset_count,
                    std::int64_t count, double* totals, std::int64_t totals_pitch) {
  std::int64_t b = 0;
  for (; b + kDotY <= offset_count; b += kDotY) {
    dot_tile<R, A, kDotY>(x, x_pitch, y, offsets + b, count, totals + b, totals_pitch);
  }
  for (; b < offset_count; ++b) dot_tile<R, A, 1>(x, x_pitch, y, offsets + b, count, totals + b, totals_pitch);
}

// All products of `channels` rows of x with the rows of y at `offsets`.
template <typename R>
static void dot_products(const R* x, std::int64_t x_pitch, std::int64_t channels, const R* y, const std::int64_t* offsets,
                         std::int64_t offset_count, std::int64_t count, double* totals, std::int64_t totals_pitch) {
  std::int64_t a = 0;
  for (; a + kDotX <= channels; a += kDotX) {
    dot_row<R, kDotX>(x + a * x_pitch, x_pitch, y, offsets, offset_count, count, totals + a * totals_pitch, totals_pitch);
  }
  for (; a < channels; ++a) {
    dot_row<R, 1>(x + a * x_pitch, x_pitch, y, offsets, offset_count, count, totals + a * totals_pitch, totals_pitch);
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
