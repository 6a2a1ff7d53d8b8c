#include "gemm_window.h"

#include <algorithm>

namespace upfold::cuda {
namespace {

// What decides whether windows pay, measured on an H200; a second.
constexpr double kLaunch = 2.5e-6, kCopyBytes = 2.6e12, kColumnBytes = 3.4e12;
// Of the products: one whose operands have the summed index in front is quicker in TF32.
constexpr double kTf32 = 180e12, kDeepTf32 = 300e12, kNarrow = 550e12, kPlain = 45e12;

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // of every count that the copies divide
constexpr std::int64_t kMostPhases = 32;               // of the reduced problem, above which col2im is slow

struct Rates {
  double plain, windowed;
};
Rates rates_of(Dtype dtype, bool tf32) {
  if (dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16) return {kNarrow, kNarrow};
  if (tf32) return {kTf32, kDeepTf32};
  return {kPlain, kPlain};
}

// Seconds of a product that reads `operands` and writes `columns` bytes, and of the col2im behind it.
double seconds(double flops, double rate, double operands, double columns, double result) {
  return std::max(flops / rate, (operands + columns) / kColumnBytes) + (columns + result) / kColumnBytes;
}

bool pays(const Problem& p, const Window& window, bool tf32) {
  const double size = double(element_bytes(p.dtype)), sum_size = double(sum_bytes(p.dtype));
  const double x = size * double(p.batch * p.in_channels * in_pixels(p)),
               y = size * double(p.batch * p.out_channels * out_pixels(p));
  const double w = size * double(p.in_channels * p.out_channels * kernel_taps(p));
  const double columns = double(p.batch * p.out_channels * kernel_taps(p) * in_pixels(p));
  const double stretch = double(window.pitch) / double(p.in_w);
  const double fewer = columns * stretch * double(p.stride_w) / double(p.kernel_w);
  const double wider = stretch * double(window.channels) / double(p.in_channels);
  const double flops = 2.0 * columns * double(p.in_channels);
  const Rates rates = rates_of(p.dtype, tf32);
  const double plain = seconds(flops, rates.plain, x + w, columns * sum_size, y);
  const double copies = 2.0 * kLaunch + (x + x * wider + 2.0 * w) / kCopyBytes;
  return copies + seconds(flops * wider, rates.windowed, x * wider + w, fewer * sum_size, y) < plain;
}

}  // namespace

Window window_of(const Problem& p, const GemmOptions& options) {
  if (p.op != Operator::kConvTranspose || options.atomic || options.form == GemmForm::kColumns) return {};
  if (p.groups != 1 || p.dilation_w != 1 || p.kernel_w <= p.stride_w || p.batch == 0) return {};
  Window window;
  window.taps = ceil_div(p.kernel_w, p.stride_w);
  window.full = p.kernel_w - (window.taps - 1) * p.stride_w;
  const std::int64_t multiple = std::max<std::int64_t>(16 / element_bytes(p.dtype), 1);
  window.channels = ceil_div(p.in_channels, multiple) * multiple;
  const std::int64_t width = ceil_div(p.in_w + window.taps - 1, window.taps);
  window.pitch = width * window.taps;
  window.reduced = p;
  window.reduced.in_w = width;
  window.reduced.kernel_w = window.reduced.stride_w = p.stride_w * window.taps;
  const std::int64_t lines = p.batch * p.in_d * p.in_h, rows = p.out_channels * p.kernel_d * p.kernel_h;
  if (window.reduced.stride_w > kMostPhases || lines >= kMost / window.pitch || p.in_channels >= kMost) return {};
  if (rows >= kMost / (p.kernel_w + p.stride_w)) return {};
  const bool tf32 = options.allow_tf32 && p.dtype == Dtype::kFloat32;
  return options.form == GemmForm::kWindows || pays(p, window, tf32) ? window : Window{};
}

}  // namespace upfold::cuda
