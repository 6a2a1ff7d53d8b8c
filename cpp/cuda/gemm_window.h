// The product over windows of x: fewer columns where a kernel spans several strides.
//
// Along w, output b * stride_w + r - pad_w sums the taps r + j * stride_w, j = 0 .. taps - 1, at pixels b - j. With x laid out as
// [position][channel], the pixels b - taps + 1 .. b are one run of memory: a row of an operand whose summed index is (pixel of
// the window, channel). The sum over the taps of w then happens in the product: columns have stride_w rows for every (oc, kd, kh)
// instead of kernel_w. Windows of neighbouring positions overlap, but those `taps` apart do not: positions of one residue modulo
// `taps` make a matrix that cuBLAS takes as it is, so that x is laid out once (residues = taps). Or every window is laid out on
// its own, `taps` copies of x, for one large product instead of `taps` small ones (residues = 1). What is left for col2im is
// `reduced`, where kernel_w = stride_w = residues * stride_w of the problem.
#pragma once

#include "api.h"

namespace upfold::cuda {

struct Window {
  std::int64_t taps = 0;      // pixels of a window; 0: windows are not used
  std::int64_t channels = 0;  // of a position: those of x, padded to 16 bytes
  std::int64_t residues = 0;  // taps or 1, see above
  std::int64_t pitch = 0;     // positions of a row of x: its pixels, and zeros that it shares with the next row's windows
  std::int64_t full = 0;      // phases of w with `taps` taps; the others have one fewer
  Problem reduced{};
};

// The windows of an operator, or none where there cannot be any or they do not pay.
Window window_of(const Problem& p, const GemmOptions& options);

// Whether a batch over residues is as quick as its products are; in float32 cuBLAS then takes kernels of an older generation.
bool overlapping_batch(const Problem& p);

// Elements of the laid out x for `positions` of it, and of the laid out weight.
inline std::int64_t window_pixel_elements(const Window& window, std::int64_t positions) {
  return (window.residues == 1 ? positions * window.taps : positions + window.taps - 1) * window.channels;
}
inline std::int64_t window_weight_elements(const Window& window) {
  return window.reduced.out_channels * kernel_taps(window.reduced) / window.residues * window.taps * window.channels;
}

// Positions are counted through (n, d, h, w) of the block, w up to `pitch`, and hold zeros beyond the width of x. To
// [taps - 1 + position][channel], with zeros in front, or to [position][pixel of its window][channel]. The device is current.
void window_pixels(const Launch& launch, const Problem& p, const Window& window, const ColumnBlock& block, const void* x,
                   void* to);

// For the forward: to[phase][oc][kd][kh][j][channel] for the phases with all taps, j = 0 being the last of them, then the same
// for the others.
void window_weight(const Launch& launch, const Problem& p, const Window& window, const void* w, void* to);

// For the gradient of x: to[ic][j][oc][kd][kh][phase], every phase having all taps.
void window_weight_adjoint(const Launch& launch, const Problem& p, const Window& window, const void* w, void* to);

// The gradient of the weight, from[oc][kd][kh][phase][j][channel] in the type of the sums, into its place.
void window_weight_result(const Launch& launch, const Problem& p, const Window& window, const void* from, void* w);

}  // namespace upfold::cuda
