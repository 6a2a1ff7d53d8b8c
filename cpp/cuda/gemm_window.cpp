#include <algorithm>
#include <cmath>

#include "gemm_plan.h"

namespace upfold::cuda {
namespace {

// What decides whether windows pay, measured on an H200; per second.
constexpr double kLaunch = 2.5e-6, kCopyBytes = 2.6e12, kColumnBytes = 3.4e12;
// Of the products: one whose operands have the summed index in front is quicker in TF32, and slower in IEEE float32.
constexpr double kTf32 = 140e12, kHalfDeepTf32 = 230e12, kDeepTf32 = 300e12, kNarrow = 550e12, kIeee = 45e12, kDeepIeee = 33e12;
constexpr double kAnother = 8e-6;  // seconds lost where a product is cut in two

constexpr double kLargeProduct = 8e9;  // operations

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // of every count that the copies divide
constexpr std::int64_t kMostPhases = 32;               // of the reduced problem, above which col2im is slow

// What a problem moves, in bytes, and its products.
struct Work {
  double x, w, y, columns, flops;
};
Work work_of(const Problem& p) {
  const double size = double(element_bytes(p.dtype)), pixels = double(p.batch * in_pixels(p));
  const double rows = double(p.out_channels * kernel_taps(p)),
               column = double(p.op == Operator::kConvTranspose ? sum_bytes(p.dtype) : element_bytes(p.dtype));
  return {size * pixels * double(p.in_channels), size * double(p.in_channels) * rows,
          size * double(p.batch * p.out_channels * out_pixels(p)), column * pixels * rows,
          2.0 * pixels * rows * double(p.in_channels)};
}

// Seconds of a product that moves `operands` beside the columns, and of the pass between columns and y.
double seconds(const Work& work, double rate, double operands) {
  return std::max(work.flops / rate, (operands + work.columns) / kColumnBytes) + (work.columns + work.y) / kColumnBytes;
}

double plain_seconds(const Problem& p, bool tf32) {
  const Work work = work_of(p);
  if (p.op != Operator::kConvTranspose || !tf32)
    return seconds(work, is_narrow(p.dtype) ? kNarrow : tf32 ? kDeepTf32 : kIeee, work.x + work.w);
  // The plan lays x out where maps are small, or the weight where the product is deep and large.
  const bool small = in_pixels(p) < kSmallMap && p.batch > 1, deep = p.in_channels >= kDeepProduct && work.flops > kLargeProduct;
  const double copy = small || deep ? kLaunch + 2.0 * (small ? work.x : work.w) / kCopyBytes : 0.0;
  return copy + seconds(work, small || deep ? kHalfDeepTf32 : kTf32, work.x + work.w);
}

double window_seconds(const Problem& p, const Window& window, bool tf32) {
  Work work = work_of(p);
  const double stretch = double(window.pitch) / double(p.in_w), wider = stretch * double(window.channels) / double(p.in_channels);
  work.columns *= stretch * double(p.stride_w) / double(p.kernel_w), work.flops *= wider;
  double x = work.x * wider * double(window.residues == 1 ? window.taps : 1);
  if (p.op == Operator::kConv) x *= double(sum_bytes(p.dtype)) / double(element_bytes(p.dtype));
  const double rate = is_narrow(p.dtype) ? kNarrow : tf32 ? kDeepTf32 : kDeepIeee;
  const double again = overlapping_batch(p) ? 0.0 : double(window.residues - 1) * kAnother;
  return 2.0 * kLaunch + again + (work.x + x + 2.0 * work.w) / kCopyBytes + seconds(work, rate, x + work.w);
}

// Windows laid out apart or as residues; none where a size is too large.
Window lay_out(const Problem& p, bool apart) {
  Window window;
  window.taps = ceil_div(p.kernel_w, p.stride_w), window.residues = apart ? 1 : window.taps;
  window.full = p.kernel_w - (window.taps - 1) * p.stride_w;
  const std::int64_t multiple = std::max<std::int64_t>(16 / element_bytes(p.dtype), 1);
  window.channels = ceil_div(p.in_channels, multiple) * multiple;
  const std::int64_t width = ceil_div(p.in_w + window.taps - 1, window.residues);
  window.pitch = width * window.residues;
  window.reduced = p;
  window.reduced.in_w = width;
  window.reduced.kernel_w = window.reduced.stride_w = p.stride_w * window.residues;
  const std::int64_t lines = p.batch * p.in_d * p.in_h, rows = p.out_channels * p.kernel_d * p.kernel_h;
  if (window.reduced.stride_w > kMostPhases || lines >= kMost / (window.pitch * window.taps)) return {};
  if (p.in_channels >= kMost || rows >= kMost / (p.kernel_w + p.stride_w)) return {};
  if (window_weight_elements(window) >= kMost) return {};
  return window;
}

}  // namespace

bool overlapping_batch(const Problem& p) { return is_narrow(p.dtype); }

Window window_of(const Problem& p, const GemmOptions& options) {
  if (options.atomic || options.form == GemmForm::kColumns) return {};
  // A phase with fewer taps than others would be multiplied by zeros in the gradient of x, which are no taps.
  if (p.op == Operator::kConv && p.kernel_w % p.stride_w != 0) return {};
  if (p.groups != 1 || p.dilation_w != 1 || p.kernel_w <= p.stride_w || p.batch == 0) return {};
  const bool tf32 = options.allow_tf32 && p.dtype == Dtype::kFloat32;
  const Window apart = lay_out(p, true), residues = p.op == Operator::kConvTranspose ? lay_out(p, false) : apart;
  if (options.form == GemmForm::kWindows) return apart;
  if (options.form == GemmForm::kResidues) return residues;
  // A gradient's columns of few pixels in 16 bits are made sooner of all taps (H200, FCN-32s: input 50 us by windows and 41,
  // weight 52 and 38).
  if (p.op != Operator::kConvTranspose && is_narrow(p.dtype) && in_pixels(p) <= kSmallMap) return {};
  const auto time = [&](const Window& window) { return window.taps > 0 ? window_seconds(p, window, tf32) : HUGE_VAL; };
  const Window& best = time(apart) < time(residues) ? apart : residues;
  return time(best) < plain_seconds(p, tf32) ? best : Window{};
}

}  // namespace upfold::cuda
