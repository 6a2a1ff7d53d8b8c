// The activation that ends a forward pass, applied to the float32 or float64 sum after the bias and before the rounding.
#pragma once

#include "values.cuh"

namespace upfold::cuda {

// The comparison is written so that a NaN stays a NaN, as in torch.
template <typename Real>
UPFOLD_DEVICE Real activate_real(Activation activation, Real slope, Real v) {
  switch (activation) {
    case Activation::kRelu:
      return v < Real(0) ? Real(0) : v;
    case Activation::kLeakyRelu:
      return v > Real(0) ? v : v * slope;
    case Activation::kSilu:
      return v / (Real(1) + exp(-v));
    case Activation::kSigmoid:
      return Real(1) / (Real(1) + exp(-v));
    case Activation::kTanh:
      return tanh(v);
    case Activation::kGelu:
      return Real(0.5) * v * (Real(1) + erf(v * Real(0.70710678118654752440)));
    case Activation::kGeluTanh: {
      const Real inner = Real(0.79788456080286535588) * (v + Real(0.044715) * v * v * v);
      return Real(0.5) * v * (Real(1) + tanh(inner));
    }
    default:
      return v;
  }
}

UPFOLD_DEVICE float activate(Activation activation, float slope, float v) { return activate_real<float>(activation, slope, v); }
UPFOLD_DEVICE double activate(Activation activation, float slope, double v) {
  return activate_real<double>(activation, slope, v);
}
// Out of line: a kernel that ends in several outputs a thread would hold the code of every activation several times.
static __device__ __noinline__ float activate_called(Activation activation, float slope, float v) {
  return activate_real<float>(activation, slope, v);
}
UPFOLD_DEVICE float finish(Activation activation, float slope, float v) {
  if (activation == Activation::kNone) return v;
  if (activation == Activation::kRelu) return v < 0.0f ? 0.0f : v;
  return activate_called(activation, slope, v);
}
static __device__ __noinline__ double activate_called(Activation activation, double slope, double v) {
  return activate_real<double>(activation, slope, v);
}
UPFOLD_DEVICE double finish(Activation activation, float slope, double v) {
  return activation == Activation::kNone ? v : activate_called(activation, double(slope), v);
}
// No activation is defined on complex numbers; the Python layer refuses one.
template <typename Real>
UPFOLD_DEVICE Complex<Real> activate(Activation, float, Complex<Real> v) {
  return v;
}

template <typename Real>
UPFOLD_DEVICE Complex<Real> finish(Activation, float, Complex<Real> v) {
  return v;
}

}  // namespace upfold::cuda
