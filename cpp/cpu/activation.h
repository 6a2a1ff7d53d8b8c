// Bias and activation, applied to a row of sums before they are rounded to the element type.
#pragma once

#include "elementary.h"
#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

template <Activation kind, typename R>
UPFOLD_INLINE R activate(R v, R slope) {
  if constexpr (kind == Activation::kRelu) return v < R(0) ? R(0) : v;  // keeps NaN
  if constexpr (kind == Activation::kSilu) return v / (R(1) + exp_of(-v));
  if constexpr (kind == Activation::kGelu) return R(0.5) * v * (R(1) + erf_of(v * R(0.70710678118654752440)));
  if constexpr (kind == Activation::kGeluTanh) {
    const R inner = R(0.79788456080286535588) * (v + R(0.044715) * v * v * v);
    return R(0.5) * v * (R(1) + tanh_of(inner));
  }
  if constexpr (kind == Activation::kTanh) return tanh_of(v);
  if constexpr (kind == Activation::kSigmoid) return R(1) / (R(1) + exp_of(-v));
  if constexpr (kind == Activation::kLeakyRelu) return v < R(0) ? v * slope : v;
  return v;
}

// What happens to the sums of one channel on their way into y.
template <typename Sum>
struct Epilogue {
  Sum bias;
  Activation kind;
  float slope;
};

template <Activation kind, typename T, typename R>
static void finish_row_as(const Epilogue<R>& epilogue, const R* sums, std::int64_t count, T* out) {
  const R bias = epilogue.bias;
  const R slope = static_cast<R>(epilogue.slope);
  for (std::int64_t i = 0; i < count; ++i) narrow(activate<kind>(sums[i] + bias, slope), out[i]);
}

// out[i] = activation(sums[i] + bias).
template <typename T, typename R>
static void finish_row(const Epilogue<R>& epilogue, const R* sums, std::int64_t count, T* out) {
  switch (epilogue.kind) {
    case Activation::kNone:
      return finish_row_as<Activation::kNone>(epilogue, sums, count, out);
    case Activation::kRelu:
      return finish_row_as<Activation::kRelu>(epilogue, sums, count, out);
    case Activation::kSilu:
      return finish_row_as<Activation::kSilu>(epilogue, sums, count, out);
    case Activation::kGelu:
      return finish_row_as<Activation::kGelu>(epilogue, sums, count, out);
    case Activation::kGeluTanh:
      return finish_row_as<Activation::kGeluTanh>(epilogue, sums, count, out);
    case Activation::kTanh:
      return finish_row_as<Activation::kTanh>(epilogue, sums, count, out);
    case Activation::kSigmoid:
      return finish_row_as<Activation::kSigmoid>(epilogue, sums, count, out);
    case Activation::kLeakyRelu:
      return finish_row_as<Activation::kLeakyRelu>(epilogue, sums, count, out);
  }
}

template <typename R>
static void finish_row(const Epilogue<Complex<R>>& epilogue, const Complex<R>* sums, std::int64_t count, Complex<R>* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = sums[i] + epilogue.bias;
}

}  // namespace upfold::cpu::UPFOLD_ISA
