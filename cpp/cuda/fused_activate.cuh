// Activations of sums that a warpgroup's thread holds in registers, where it stores them without staging. All sums are unrolled,
// so the code of each is short: of every thread's 128 sums, a formula that takes a dozen instructions costs as much as their
// stores.
#pragma once

#include "activation.cuh"

namespace upfold::cuda {

// (weighted ? v : scale) / (1 + exp2(-v * (linear + cubic * v^2))) + shift: SiLU, the sigmoid itself, tanh(v) = 2 sigmoid(2 v) -
// 1, and GELU by tanh, whose (1 + tanh(u)) / 2 is sigmoid(2 u). Off by about 2^-22 of 1, far below what the products round.
struct SigmoidForm {
  float linear, cubic, scale, shift;
  bool weighted;
};

UPFOLD_DEVICE SigmoidForm sigmoid_form(Activation activation) {
  constexpr float kLog2E = 1.44269504088896340736f, kInner = 2.0f * 0.79788456080286535588f;
  if (activation == Activation::kTanh) return {2.0f * kLog2E, 0.0f, 2.0f, -1.0f, false};
  if (activation == Activation::kGeluTanh) return {kInner * kLog2E, kInner * 0.044715f * kLog2E, 0.0f, 0.0f, true};
  return {kLog2E, 0.0f, 1.0f, 0.0f, activation == Activation::kSilu};
}

UPFOLD_DEVICE float by_sigmoid(const SigmoidForm& form, float v) {
  constexpr float kFar = 1e4f;  // beyond it the sigmoid is 0 or 1, and an infinity would meet a zero
  const float near = v < -kFar ? -kFar : v > kFar ? kFar : v;
  const float sigmoid = __fdividef(1.0f, 1.0f + exp2f(-near * (form.linear + form.cubic * near * near)));
  return fmaf(form.weighted ? v : form.scale, sigmoid, form.shift);
}

// GELU by the error function, of formula 7.1.26 of Abramowitz and Stegun, which is off by 1.5e-7 at most.
UPFOLD_DEVICE float by_error_function(float v) {
  const float x = fabsf(v) * 0.70710678118654752440f, t = __fdividef(1.0f, fmaf(0.3275911f, x, 1.0f));
  const float poly = fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
  const float tail = 0.5f * poly * t * exp2f(-x * x * 1.44269504088896340736f);  // of the normal distribution, beyond |v|
  return v * (v > 0.0f ? 1.0f - tail : tail);
}

// Every activation but ReLU, which costs nothing where values are stored.
UPFOLD_DEVICE bool is_activated_before(Activation activation) {
  return activation != Activation::kNone && activation != Activation::kRelu;
}

// Calls visit(f) for the function of an activation, which visit applies to all sums: the question is asked once for all of them.
template <typename Visit>
UPFOLD_DEVICE void with_activation(Activation activation, float slope, const Visit& visit) {
  if (activation == Activation::kLeakyRelu) return visit([slope](float v) { return v > 0.0f ? v : v * slope; });
  if (activation == Activation::kGelu) return visit([](float v) { return by_error_function(v); });
  const SigmoidForm form = sigmoid_form(activation);
  visit([form](float v) { return by_sigmoid(form, v); });
}

}  // namespace upfold::cuda
