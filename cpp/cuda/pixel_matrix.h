// How the pixels and channels of a tensor lie, by its strides alone.
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

}  // namespace upfold::cuda
