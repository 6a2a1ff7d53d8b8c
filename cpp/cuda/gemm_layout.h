// How operands of `gemm` lie: questions that a problem's strides answer alone.
#pragma once

#include "../problem.h"

namespace upfold::cuda {

// A tensor of samples as matrices of channels and pixels: element (n, c, pixel) lies at n * sample + c * channel + pixel * step,
// and one of channel and step is 1.
struct PixelMatrix {
  std::int64_t sample, channel, step;
  bool channels_fastest;  // channel == 1: the leading dimension is `step`, else it is `channel`
  bool regular;           // false: the pixels do not lie evenly, or neither is dense; nothing else holds then
};
inline PixelMatrix pixel_matrix(const Strides& s, std::int64_t channels, std::int64_t d, std::int64_t h, std::int64_t w) {
  std::int64_t step = 0, covered = 1;
  bool even = true;
  const std::int64_t sizes[3] = {w, h, d}, strides[3] = {s.w, s.h, s.d};
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 1) continue;
    if (step == 0) step = strides[i];
    even = even && step > 0 && strides[i] == step * covered;
    covered *= sizes[i];
  }
  if (channels > 1 && s.c != 1 && s.c < covered) even = false;
  // One pixel: each sample is a row of channels, and samples are the pixels of the joined matrix.
  if (covered == 1) return {s.n, 1, s.n, true, channels == 1 || s.c == 1};
  const bool channels_fastest = channels > 1 && s.c == 1 && step >= channels;
  return {s.n, channels_fastest ? 1 : s.c, step, channels_fastest, even && (channels_fastest || step == 1)};
}

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
