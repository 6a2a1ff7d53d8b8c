// How operands of `gemm` lie: questions that a problem's strides answer alone.
#pragma once

#include "pixel_matrix.h"

namespace upfold::cuda {

// Whether w lies as (in_channels, out_channels / groups * taps), its rows dense; they may be apart.
inline bool weight_is_matrix(const Problem& p) {
  const std::int64_t taps = kernel_taps(p), channels = out_channels_per_group(p);
  const bool taps_dense = (p.kernel_w == 1 || p.w.w == 1) && (p.kernel_h == 1 || p.w.h == p.kernel_w) &&
                          (p.kernel_d == 1 || p.w.d == p.kernel_w * p.kernel_h);
  return taps_dense && (channels == 1 || p.w.c == taps) && (p.in_channels == 1 || p.w.n >= taps * channels);
}

// Whether a tensor of (channels, taps) has channels innermost and is dense.
inline bool is_tap_matrix(const Problem& p, const Strides& s, std::int64_t channels) {
  return (channels == 1 || s.c == 1) && (p.kernel_w == 1 || s.w == channels) &&
         (p.kernel_h == 1 || s.h == p.kernel_w * channels) && (p.kernel_d == 1 || s.d == p.kernel_h * p.kernel_w * channels);
}

// Whether w lies as (in_channels, taps * out_channels), as channels_last has it.
inline bool weight_is_tap_matrix(const Problem& p) {
  const bool apart = p.in_channels == 1 || p.w.n >= kernel_taps(p) * p.out_channels;
  return p.groups == 1 && apart && is_tap_matrix(p, p.w, p.out_channels);
}

}  // namespace upfold::cuda
