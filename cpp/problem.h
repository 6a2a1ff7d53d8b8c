// The description of one transposed convolution, shared by host and device code, and the tap arithmetic that every kernel uses.
//
// Sizes always name the transposed convolution y = conv_transpose(x, w): `in_*` belongs to x, `out_*` to y, whichever of the
// three operators (Operator) runs. Spatial axes are always (depth, height, width); 1-D and 2-D problems have leading axes of 1.
//
//   x: (batch, in_channels,  in_d,  in_h,  in_w)
//   w: (in_channels, out_channels / groups, kernel_d, kernel_h, kernel_w), not flipped
//   y: (batch, out_channels, out_d, out_h, out_w)
//
// A tap k carries input position i to output position o = i * stride - pad + k * dilation on every axis.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define UPFOLD_INLINE static __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define UPFOLD_INLINE static __forceinline
#else
// Never a plain `inline`: one source is compiled for several instruction sets, and the linker would keep any one copy.
#define UPFOLD_INLINE static inline __attribute__((always_inline, unused))
#endif

namespace upfold {

enum class Operator : std::int32_t {
  kConvTranspose = 0,        // reads x, w;  writes y
  kConv = 1,                 // reads y, w;  writes x   (the adjoint in x)
  kConvTransposeWeight = 2,  // reads x, y;  writes w   (the adjoint in w)
};

enum class Dtype : std::int32_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
  kComplex64 = 4,
  kComplex128 = 5,
};

enum class Activation : std::int32_t {
  kNone = 0,
  kRelu = 1,
  kSilu = 2,
  kGelu = 3,      // exact, by erf
  kGeluTanh = 4,  // the tanh approximation
  kTanh = 5,
  kSigmoid = 6,
  kLeakyRelu = 7,  // uses Problem::activation_slope
};

// Distances in elements between neighbours on each axis; 0 on an axis of size 1, which is never stepped. For a weight, n is the
// in_channels axis and c the out_channels one.
struct Strides {
  std::int64_t n, c, d, h, w;
};

struct Problem {
  Operator op;
  Dtype dtype;  // of x, w, bias and y alike
  Activation activation;
  float activation_slope;
  std::int64_t batch, in_channels, out_channels, groups;
  std::int64_t in_d, in_h, in_w;
  std::int64_t out_d, out_h, out_w;
  std::int64_t kernel_d, kernel_h, kernel_w;
  std::int64_t stride_d, stride_h, stride_w;
  std::int64_t pad_d, pad_h, pad_w;
  std::int64_t dilation_d, dilation_h, dilation_w;
  Strides x, w, y;
};

// One spatial axis of a Problem.
struct Axis {
  std::int64_t in, out, kernel, stride, pad, dilation;
};

UPFOLD_INLINE Axis axis_d(const Problem& p) { return {p.in_d, p.out_d, p.kernel_d, p.stride_d, p.pad_d, p.dilation_d}; }
UPFOLD_INLINE Axis axis_h(const Problem& p) { return {p.in_h, p.out_h, p.kernel_h, p.stride_h, p.pad_h, p.dilation_h}; }
UPFOLD_INLINE Axis axis_w(const Problem& p) { return {p.in_w, p.out_w, p.kernel_w, p.stride_w, p.pad_w, p.dilation_w}; }

UPFOLD_INLINE std::int64_t in_channels_per_group(const Problem& p) { return p.in_channels / p.groups; }
UPFOLD_INLINE std::int64_t out_channels_per_group(const Problem& p) { return p.out_channels / p.groups; }
UPFOLD_INLINE std::int64_t kernel_taps(const Problem& p) { return p.kernel_d * p.kernel_h * p.kernel_w; }
UPFOLD_INLINE std::int64_t in_pixels(const Problem& p) { return p.in_d * p.in_h * p.in_w; }
UPFOLD_INLINE std::int64_t out_pixels(const Problem& p) { return p.out_d * p.out_h * p.out_w; }

UPFOLD_INLINE std::int64_t greatest_common_divisor(std::int64_t a, std::int64_t b) {
  while (b != 0) {
    const std::int64_t r = a % b;
    a = b;
    b = r;
  }
  return a;
}

UPFOLD_INLINE std::int64_t floor_div(std::int64_t a, std::int64_t b) {  // b > 0
  return a / b - ((a % b != 0 && a < 0) ? 1 : 0);
}

UPFOLD_INLINE std::int64_t ceil_div(std::int64_t a, std::int64_t b) {  // b > 0
  return -floor_div(-a, b);
}

// The taps of one residue class: those that reach the outputs o with (o + pad) mod stride == phase.
// Tap number j is first + j * tap_step; for output o it reads input i = input_of(axis, o, first) - j * in_step.
struct PhaseTaps {
  std::int64_t first;     // smallest tap of the class, or `kernel` when the class is empty
  std::int64_t count;     // number of taps, 0 for an empty phase
  std::int64_t tap_step;  // stride / gcd(stride, dilation)
  std::int64_t in_step;   // dilation / gcd(stride, dilation)
};

// 0 <= phase < stride.
UPFOLD_INLINE PhaseTaps phase_taps(const Axis& a, std::int64_t phase) {
  const std::int64_t gcd = greatest_common_divisor(a.stride, a.dilation);
  const std::int64_t tap_step = a.stride / gcd;
  PhaseTaps taps{a.kernel, 0, tap_step, a.dilation / gcd};
  if (phase % gcd != 0) return taps;
  // k * dilation = phase (mod stride) has exactly one solution modulo tap_step; only those below `kernel` are taps.
  const std::int64_t last = tap_step < a.kernel ? tap_step : a.kernel;
  std::int64_t residue = 0;  // k * dilation mod stride
  const std::int64_t advance = a.dilation % a.stride;
  for (std::int64_t k = 0; k < last; ++k) {
    if (residue == phase) {
      taps.first = k;
      taps.count = (a.kernel - k + tap_step - 1) / tap_step;
      return taps;
    }
    residue += advance;
    if (residue >= a.stride) residue -= a.stride;
  }
  return taps;
}

UPFOLD_INLINE std::int64_t phase_of(const Axis& a, std::int64_t o) { return (o + a.pad) % a.stride; }

// The input position that tap k carries to output o. The division is exact for the taps of o's phase; the result may lie
// outside [0, in).
UPFOLD_INLINE std::int64_t input_of(const Axis& a, std::int64_t o, std::int64_t k) {
  return (o + a.pad - k * a.dilation) / a.stride;
}

UPFOLD_INLINE std::int64_t output_of(const Axis& a, std::int64_t i, std::int64_t k) {
  return i * a.stride - a.pad + k * a.dilation;
}

}  // namespace upfold
