// The register tile of conv_transpose_weight: dot products of rows of x with shifted rows of y.
#pragma once

#include "tile.h"

namespace upfold::cpu::UPFOLD_ISA {

constexpr int kDotX = 4;
constexpr int kDotY = kVectorRegisters == 32 ? 4 : 2;

template <typename R>
UPFOLD_INLINE double lane_sum(const Vector<R>& v) {
  R lane[kLanes<R>];
  store(v, lane);
  for (int half = kLanes<R> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return static_cast<double>(lane[0]);
}

// totals[a * totals_pitch + b] += sum over f in [0, count) of x[a * x_pitch + f] * y[offsets[b] + f]. Vectors reach past `count`: x
// must be 0 there.
template <typename R, int A, int B>
static void dot_tile(const R* x, std::int64_t x_pitch, const R* y, const std::int64_t* offsets, std::int64_t count, double* totals,
                     std::int64_t totals_pitch) {
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
  for (int a = 0; a < A; ++a) {
    for (int b = 0; b < B; ++b) totals[a * totals_pitch + b] += lane_sum<R>(sum[a][b]);
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
