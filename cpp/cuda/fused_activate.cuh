// Activations of sums that a warpgroup's thread holds in registers, where it stores them without staging. All sums are unrolled,
// so the code of each is short: of every thread's 128 sums, a formula that takes a dozen instructions costs as much as their
// stores.
#pragma once

#include "activation.cuh"

namespace upfold::cuda {

// (weighted ? v : scale) / (1 + exp2(-u)) + shift with u = v * (linear + cubic * v^2 + quintic * v^4), v within +-far: SiLU, the
// sigmoid itself, tanh(v) = 2 sigmoid(2 v) - 1, GELU by tanh, whose (1 + tanh(u)) / 2 is sigmoid(2 u), and GELU, whose normal
// distribution is the sigmoid of a polynomial up to 2.5e-5 / v: fitted to least error of the product, a twentieth of what TF32
// and float16 round. Below -6, where the polynomial ends, GELU is v * 2e-9, and minus infinity stays one.
struct SigmoidForm {
  float linear, cubic, quintic, scale, shift, far;
  bool weighted;
};

UPFOLD_DEVICE SigmoidForm sigmoid_form(Activation activation) {
  constexpr float kLog2E = 1.44269504088896340736f, kInner = 2.0f * 0.79788456080286535588f;
  constexpr float kFar = 1e4f;  // beyond it the sigmoid is 0 or 1, and an infinity would meet a zero
  if (activation == Activation::kTanh) return {2.0f * kLog2E, 0.0f, 0.0f, 2.0f, -1.0f, kFar, false};
  if (activation == Activation::kGelu)
    return {1.59501577f * kLog2E, 7.40112927e-2f * kLog2E, -7.03033674e-4f * kLog2E, 0.0f, 0.0f, 6.0f, true};
  if (activation == Activation::kGeluTanh) return {kInner * kLog2E, kInner * 0.044715f * kLog2E, 0.0f, 0.0f, 0.0f, kFar, true};
  return {kLog2E, 0.0f, 0.0f, 1.0f, 0.0f, kFar, activation == Activation::kSilu};
}

UPFOLD_DEVICE float by_sigmoid(const SigmoidForm& form, float v) {
  const float near = v < -form.far ? -form.far : v > form.far ? form.far : v, square = near * near;
  const float exponent = -near * fmaf(fmaf(form.quintic, square, form.cubic), square, form.linear);
  const float sigmoid = __fdividef(1.0f, 1.0f + exp2f(exponent));
  return fmaf(form.weighted ? v : form.scale, sigmoid, form.shift);
}

// Every activation but ReLU, which costs nothing where values are stored.
UPFOLD_DEVICE bool is_activated_before(Activation activation) {
  return activation != Activation::kNone && activation != Activation::kRelu;
}

// Calls visit(f) for the function of an activation, which visit applies to all sums: the question is asked once for all of them.
template <typename Visit>
UPFOLD_DEVICE void with_activation(Activation activation, float slope, const Visit& visit) {
  if (activation == Activation::kLeakyRelu) return visit([slope](float v) { return v > 0.0f ? v : v * slope; });
  const SigmoidForm form = sigmoid_form(activation);
  visit([form](float v) { return by_sigmoid(form, v); });
}

struct ActivateOne {
  float& sum;
  template <typename Function>
  __device__ __forceinline__ void operator()(const Function& function) const {
    sum = function(sum);
  }
};
// One sum by itself, as `finish` does, by the same formulas.
UPFOLD_DEVICE float finish_quickly(Activation activation, float slope, float v) {
  if (activation == Activation::kRelu) return v < 0.0f ? 0.0f : v;
  if (is_activated_before(activation)) with_activation(activation, slope, ActivateOne{v});
  return v;
}

}  // namespace upfold::cuda
