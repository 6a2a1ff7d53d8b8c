// A float32 as two values of TF32, for products in full: v = large + small, but for what float32 itself would round.
#pragma once

#include "mma.cuh"

namespace upfold::cuda {

// Rounded to the nearest; what would so become infinite is cut instead. Of an infinity it is one, and the small part is infinite:
// small parts do not meet, so that it is not multiplied by that of the other operand, which may be zero or of the other sign.
UPFOLD_DEVICE float large_part(float v) {
  if (isinf(v)) return copysignf(1.0f, v);
  const float nearest = __uint_as_float(to_tf32(v));
  return isinf(nearest) ? __uint_as_float(__float_as_uint(v) & 0xffffe000u) : nearest;
}
UPFOLD_DEVICE float small_part(float v) { return isnan(v) ? 0.0f : __uint_as_float(to_tf32(v - large_part(v))); }

}  // namespace upfold::cuda
