#include "gemm_window.h"

#include <algorithm>
#include <cmath>

namespace upfold::cuda {
namespace {

// What decides whether windows pay, measured on an H200; per second.
constexpr double kLaunch = 2.5e-6, kCopyBytes = 2.6e12, kColumnBytes = 3.4e12;
// Of the products: one whose operands have the summed index in front is quicker in TF32, and slower in IEEE float32.
constexpr double kTf32 = 180e12, kDeepTf32 = 300e12, kNarrow = 550e12, kIeee = 45e12, kDeepIeee = 33e12;
constexpr double kAnother = 8e-6;  // seconds lost where a product is cut in two

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // of every count that the copies divide
constexpr std::int64_t kMostPhases = 32;               // of the reduced problem, above which col2im is slow

// Seconds of a product that reads `operands` and writes `columns` bytes, and of the col2im behind it.
double seconds(double flops, double rate, double operands, double columns, double result) {
  return std::max(flops / rate, (operands + columns) / kColumnBytes) + (columns + result) / kColumnBytes;
}

// What a problem moves, in bytes, and its products.
struct Work {
  double x, w, y, columns, flops;
};
Work work_of(const Problem& p) {
  const double size = double(element_bytes(p.dtype)), pixels = double(p.batch * in_pixels(p));
  const double rows = double(p.out_channels * kernel_taps(p));
  return {size * pixels * double(p.in_channels), size * double(p.in_channels) * rows,
          size * double(p.batch * p.out_channels * out_pixels(p)), double(sum_bytes(p.dtype)) * pixels * rows,
          2.0 * pixels * rows * double(p.in_channels)};
}

bool is_narrow(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16; }

double plain_seconds(const Problem& p, bool tf32) {
  const Work work = work_of(p);
  const double rate = is_narrow(p.dtype) ? kNarrow : tf32 ? kTf32 : kIeee;
  return seconds(work.flops, rate, work.x + work.w, work.columns, work.y);
}

double window_seconds(const Problem& p, const Window& window, bool tf32) {
  const Work work = work_of(p);
  const double stretch = double(window.pitch) / double(p.in_w), wider = stretch * double(window.channels) / double(p.in_channels);
  const double columns = work.columns * stretch * double(p.stride_w) / double(p.kernel_w);
  const double x = work.x * wider * double(window.residues == 1 ? window.taps : 1);
  const double rate = is_narrow(p.dtype) ? kNarrow : tf32 ? kDeepTf32 : kDeepIeee;
  const double parts = overlapping_batch(p) ? 0.0 : double(window.residues - 1);
  return 2.0 * kLaunch + parts * kAnother + (work.x + x + 2.0 * work.w) / kCopyBytes +
         seconds(work.flops * wider, rate, x + work.w, columns, work.y);
}

// Windows for a number of residues; none where a size is too large.
Window lay_out(const Problem& p, std::int64_t residues) {
  Window window;
  window.taps = ceil_div(p.kernel_w, p.stride_w), window.residues = residues == 1 ? 1 : window.taps;
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
  return window;
}

}  // namespace

bool overlapping_batch(const Problem& p) { return is_narrow(p.dtype); }

Window window_of(const Problem& p, const GemmOptions& options) {
  if (p.op != Operator::kConvTranspose || options.atomic || options.form == GemmForm::kColumns) return {};
  if (p.groups != 1 || p.dilation_w != 1 || p.kernel_w <= p.stride_w || p.batch == 0) return {};
  const bool tf32 = options.allow_tf32 && p.dtype == Dtype::kFloat32;
  const Window apart = lay_out(p, 1), residues = lay_out(p, 2);
  if (options.form == GemmForm::kWindows) return apart;
  if (options.form == GemmForm::kResidues) return residues;
  const auto time = [&](const Window& window) { return window.taps > 0 ? window_seconds(p, window, tf32) : HUGE_VAL; };
  const Window& best = time(apart) < time(residues) ? apart : residues;
  return time(best) < plain_seconds(p, tf32) ? best : Window{};
}

}  // namespace upfold::cuda
