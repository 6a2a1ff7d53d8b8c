// The register tiles of the direct method. They work on packed planes of float or double: x[channel][pixel], with the pixels of a
// plane in one flat row (pack.h), so that a tap is nothing but an offset.
#pragma once

#include "rows.h"

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace upfold::cpu::UPFOLD_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

template <typename R>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(R));

#if defined(__GNUC__)
template <typename R>
struct VectorType;
template <>
struct VectorType<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorType<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
};
template <typename R>
using Vector = typename VectorType<R>::type;
#else
template <typename R>
struct Vector {
  R lane[kLanes<R>];
};
template <typename R>
UPFOLD_INLINE Vector<R> operator+(Vector<R> a, Vector<R> b) {
  for (int i = 0; i < kLanes<R>; ++i) a.lane[i] += b.lane[i];
  return a;
}
template <typename R>
UPFOLD_INLINE Vector<R> operator*(Vector<R> a, Vector<R> b) {
  for (int i = 0; i < kLanes<R>; ++i) a.lane[i] *= b.lane[i];
  return a;
}
template <typename R>
UPFOLD_INLINE Vector<R> operator*(Vector<R> a, R b) {
  for (int i = 0; i < kLanes<R>; ++i) a.lane[i] *= b;
  return a;
}
#endif

template <typename R>
UPFOLD_INLINE Vector<R> load(const R* from) {
  Vector<R> v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
template <typename R>
UPFOLD_INLINE void store(const Vector<R>& v, R* to) {
  std::memcpy(to, &v, sizeof(v));
}

// sum + x * w, rounded once where the instruction set can. Left to the compiler, tiles of different widths were contracted
// differently, and the bits of a result depended on how the work was cut.
#if defined(__AVX512F__)
UPFOLD_INLINE Vector<float> multiply_add(Vector<float> x, float w, Vector<float> sum) {
  return Vector<float>(_mm512_fmadd_ps(__m512(x), _mm512_set1_ps(w), __m512(sum)));
}
UPFOLD_INLINE Vector<double> multiply_add(Vector<double> x, double w, Vector<double> sum) {
  return Vector<double>(_mm512_fmadd_pd(__m512d(x), _mm512_set1_pd(w), __m512d(sum)));
}
#elif defined(__FMA__)
UPFOLD_INLINE Vector<float> multiply_add(Vector<float> x, float w, Vector<float> sum) {
  return Vector<float>(_mm256_fmadd_ps(__m256(x), _mm256_set1_ps(w), __m256(sum)));
}
UPFOLD_INLINE Vector<double> multiply_add(Vector<double> x, double w, Vector<double> sum) {
  return Vector<double>(_mm256_fmadd_pd(__m256d(x), _mm256_set1_pd(w), __m256d(sum)));
}
#elif defined(__aarch64__) && defined(__GNUC__)
UPFOLD_INLINE Vector<float> multiply_add(Vector<float> x, float w, Vector<float> sum) {
  return Vector<float>(vfmaq_n_f32(float32x4_t(sum), float32x4_t(x), w));
}
UPFOLD_INLINE Vector<double> multiply_add(Vector<double> x, double w, Vector<double> sum) {
  return Vector<double>(vfmaq_n_f64(float64x2_t(sum), float64x2_t(x), w));
}
#else
template <typename R>
UPFOLD_INLINE Vector<R> multiply_add(Vector<R> x, R w, Vector<R> sum) {
  return sum + x * w;
}
#endif

// The same with a weight for each lane.
template <typename R>
UPFOLD_INLINE Vector<R> multiply_add_lanes(const Vector<R>& x, const Vector<R>& w, const Vector<R>& sum) {
  constexpr bool is_float = std::is_same_v<R, float>;
#if defined(__AVX512F__)
  if constexpr (is_float) return Vector<R>(_mm512_fmadd_ps(__m512(x), __m512(w), __m512(sum)));
  if constexpr (!is_float) return Vector<R>(_mm512_fmadd_pd(__m512d(x), __m512d(w), __m512d(sum)));
#elif defined(__FMA__)
  if constexpr (is_float) return Vector<R>(_mm256_fmadd_ps(__m256(x), __m256(w), __m256(sum)));
  if constexpr (!is_float) return Vector<R>(_mm256_fmadd_pd(__m256d(x), __m256d(w), __m256d(sum)));
#elif defined(__aarch64__) && defined(__GNUC__)
  if constexpr (is_float) return Vector<R>(vfmaq_f32(float32x4_t(sum), float32x4_t(x), float32x4_t(w)));
  if constexpr (!is_float) return Vector<R>(vfmaq_f64(float64x2_t(sum), float64x2_t(x), float64x2_t(w)));
#else
  static_cast<void>(is_float);
  return sum + x * w;
#endif
}

// One tap of a phase: where its pixels start relative to the output pixel, and its index in the packed weights.
struct TapOffset {
  std::int64_t pixel, tap;
};

// What one call of correlate() sums: sums[m][f] (+)= weights[tap][channel][m] * x[channel][f + tap.pixel] for f in [begin, end),
// over `taps` and the channels [channel_begin, channel_end).
template <typename R>
struct CorrelateArgs {
  const TapOffset* taps;
  std::int64_t tap_count;
  const R* weights;
  std::int64_t channels, channel_begin, channel_end;  // `channels` is the distance of taps in the packed weights, over M
  const R* x;
  std::int64_t x_pitch;
  R* sums;
  std::int64_t sums_pitch;
  std::int64_t begin, end;
  bool accumulate;  // otherwise the sums are set
};

template <typename R, int M, int V>
UPFOLD_INLINE void correlate_tile(const CorrelateArgs<R>& a, std::int64_t f) {
  Vector<R> sum[M][V];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) sum[m][v] = Vector<R>{};
  }
  for (std::int64_t t = 0; t < a.tap_count; ++t) {
    const R* x = a.x + a.channel_begin * a.x_pitch + f + a.taps[t].pixel;
    const R* w = a.weights + (a.taps[t].tap * a.channels + a.channel_begin) * M;
    for (std::int64_t c = a.channel_begin; c < a.channel_end; ++c, x += a.x_pitch, w += M) {
      Vector<R> pixels[V];
      for (int v = 0; v < V; ++v) pixels[v] = load(x + v * kLanes<R>);
      for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) sum[m][v] = multiply_add(pixels[v], w[m], sum[m][v]);
      }
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) {
      R* to = a.sums + m * a.sums_pitch + f + v * kLanes<R>;
      store(a.accumulate ? load(to) + sum[m][v] : sum[m][v], to);
    }
  }
}

// Both x and sums may be touched fewer than kTileSlack elements past `end`.
constexpr std::int64_t kTileSlack = 16;

template <typename R, int M>
static void correlate_rows(const CorrelateArgs<R>& a) {
  // Registers: M * V sums, V pixels and one weight.
  constexpr int kWide = kVectorRegisters == 32 ? (M == 8 ? 3 : M == 4 ? 6 : 8) : (M == 4 ? 2 : M == 2 ? 4 : 8);
  static_assert(kLanes<R> <= kTileSlack, "the last vector must not reach past the slack");
  std::int64_t f = a.begin;
  for (; f + (kWide - 1) * kLanes<R> < a.end; f += kWide * kLanes<R>) correlate_tile<R, M, kWide>(a, f);
  if constexpr (kWide > 4) {
    if (f + 3 * kLanes<R> < a.end) {
      correlate_tile<R, M, 4>(a, f);
      f += 4 * kLanes<R>;
    }
  }
  if constexpr (kWide > 2) {
    if (f + kLanes<R> < a.end) {
      correlate_tile<R, M, 2>(a, f);
      f += 2 * kLanes<R>;
    }
  }
  for (; f < a.end; f += kLanes<R>) correlate_tile<R, M, 1>(a, f);
}

// Output channels are packed in blocks of kTileChannels; what remains, in blocks of 4, 2 and 1.
constexpr std::int64_t kTileChannels = kVectorRegisters == 32 ? 8 : 4;

UPFOLD_INLINE std::int64_t tile_channels(std::int64_t left) {
  return left >= kTileChannels ? kTileChannels : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

template <typename R>
static void correlate(std::int64_t m, const CorrelateArgs<R>& a) {
  switch (m) {
    case 1:
      return correlate_rows<R, 1>(a);
    case 2:
      return correlate_rows<R, 2>(a);
    case 4:
      return correlate_rows<R, 4>(a);
    default:
      return correlate_rows<R, static_cast<int>(kTileChannels)>(a);
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
