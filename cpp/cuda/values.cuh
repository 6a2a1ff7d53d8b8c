// Element types on the device: what a sum over them is kept in, how they widen to it, and the one rounding back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../problem.h"

#define UPFOLD_DEVICE static __device__ __forceinline__

namespace upfold::cuda {

// Natural alignment of the part, not of the pair: a complex tensor may start at any multiple of its real type.
template <typename Real>
struct Complex {
  Real re, im;
};

// A word of 2, 4, 8 or 16 bytes: values that are moved, not reckoned with.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = std::uint16_t;
};
template <>
struct WordOf<4> {
  using Type = std::uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};
template <int kBytes>
using Word = typename WordOf<kBytes>::Type;

// 16-bit types sum in float32, every other type in itself.
template <typename Value>
struct SumOf {
  using Type = Value;
};
template <>
struct SumOf<__half> {
  using Type = float;
};
template <>
struct SumOf<__nv_bfloat16> {
  using Type = float;
};
template <typename Value>
using Sum = typename SumOf<Value>::Type;

UPFOLD_DEVICE float widen(float v) { return v; }
UPFOLD_DEVICE double widen(double v) { return v; }
UPFOLD_DEVICE float widen(__half v) { return __half2float(v); }
UPFOLD_DEVICE float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename Real>
UPFOLD_DEVICE Complex<Real> widen(Complex<Real> v) {
  return v;
}

// Rounds to nearest, ties to even.
template <typename Value>
struct Narrow {
  template <typename From>
  static __device__ __forceinline__ Value from(From v) {
    return v;
  }
};
template <>
struct Narrow<__half> {
  static __device__ __forceinline__ __half from(float v) { return __float2half_rn(v); }
};
template <>
struct Narrow<__nv_bfloat16> {
  static __device__ __forceinline__ __nv_bfloat16 from(float v) { return __float2bfloat16_rn(v); }
};

// Two neighbours at once: `to` is a multiple of the size of both.
UPFOLD_DEVICE void store_neighbours(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = {a, b}; }
UPFOLD_DEVICE void store_neighbours(__half* to, float a, float b) { *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b); }
UPFOLD_DEVICE void store_neighbours(__nv_bfloat16* to, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}

// The value of the next lane; the last lane keeps its own. All 32 lanes take part.
UPFOLD_DEVICE float shuffle_down(float v) { return __shfl_down_sync(~0u, v, 1); }
UPFOLD_DEVICE double shuffle_down(double v) { return __shfl_down_sync(~0u, v, 1); }
template <typename Value>
UPFOLD_DEVICE Value shuffle_half_down(Value v) {
  const std::uint32_t bits = __shfl_down_sync(~0u, std::uint32_t(*reinterpret_cast<const std::uint16_t*>(&v)), 1);
  const std::uint16_t low = std::uint16_t(bits);
  return *reinterpret_cast<const Value*>(&low);
}
UPFOLD_DEVICE __half shuffle_down(__half v) { return shuffle_half_down(v); }
UPFOLD_DEVICE __nv_bfloat16 shuffle_down(__nv_bfloat16 v) { return shuffle_half_down(v); }
template <typename Real>
UPFOLD_DEVICE Complex<Real> shuffle_down(Complex<Real> v) {
  return {shuffle_down(v.re), shuffle_down(v.im)};
}

UPFOLD_DEVICE void add(float& sum, float v) { sum += v; }
UPFOLD_DEVICE void add(double& sum, double v) { sum += v; }
template <typename Real>
UPFOLD_DEVICE void add(Complex<Real>& sum, Complex<Real> v) {
  sum.re += v.re;
  sum.im += v.im;
}

UPFOLD_DEVICE void add_product(float& sum, float a, float b) { sum = fmaf(a, b, sum); }
UPFOLD_DEVICE void add_product(double& sum, double a, double b) { sum = fma(a, b, sum); }
template <typename Real>
UPFOLD_DEVICE void add_product(Complex<Real>& sum, Complex<Real> a, Complex<Real> b) {
  add_product(sum.re, a.re, b.re);
  add_product(sum.re, -a.im, b.im);
  add_product(sum.im, a.re, b.im);
  add_product(sum.im, a.im, b.re);
}

// Until the kernel before this one on the stream has ended and its writes are seen, by a thread of a kernel that may have begun
// early (Grid::overlaps); it returns at once where it did not.
UPFOLD_DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900 && CUDART_VERSION >= 12030
  cudaGridDependencySynchronize();
#endif
}
// From here on such a kernel behind this one may begin, when every block has come so far or has ended. A kernel that is itself
// begun early says so only when it has waited (take_turn), so that never more than one waits behind the one that works, and what
// the first of a call's launches waited for has ended before the second begins. Only copies beside one another (to_planes.cu)
// wait at their end: all of what follows them waits for them.
UPFOLD_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900 && CUDART_VERSION >= 12030
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
UPFOLD_DEVICE void take_turn() {
  await_previous();
  let_next_begin();
}

}  // namespace upfold::cuda
