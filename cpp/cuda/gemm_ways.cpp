// Which way a call of `gemm` goes before its blocks are cut: by rows of channels, or over windows or taps, from y as it lies or
// from planes of it.
#include <algorithm>

#include "gemm_plan.h"
#include "im2row.h"

namespace upfold::cuda {
namespace {

GemmPlan plan_as_it_lies(const Problem& p, const GemmOptions& options, std::int64_t cublas_bytes) {
  const Window window = window_of(p, options);
  if (window.taps > 0) {
    GemmPlan plan = plan_blocks(p, window, options, cublas_bytes);
    if (plan.possible) return plan;  // else the cap is too small for them
  }
  return plan_blocks(p, {}, options, cublas_bytes);
}

// The pixels of a y that a gradient reads better as planes.
Pixels pixels_of(const Problem& p) {
  return p.op == Operator::kConvTranspose ? Pixels{} : innermost_pixels(p.y, p.batch, p.out_channels, p.out_d, p.out_h, p.out_w);
}

// Whether samples follow one another as pixels do, channels innermost, and none lies on another.
bool is_one_matrix(const PixelMatrix& m, std::int64_t channels, std::int64_t samples, std::int64_t pixels) {
  const bool follow = (samples == 1 || m.sample == pixels * m.step) && (samples * pixels == 1 || m.step >= channels);
  return m.regular && m.channels_fastest && follow;
}

// One tap of stride 1 without padding, whose rows are the pixels of y.
bool y_is_rows(const Problem& p) {
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    if (a.kernel != 1 || a.stride != 1 || a.pad != 0 || a.out != a.in) return false;
  }
  const PixelMatrix y = pixel_matrix(p.y, p.out_channels, p.out_d, p.out_h, p.out_w);
  return is_one_matrix(y, p.out_channels, p.batch, out_pixels(p));
}

// Rows of channels, with the weight and x as they lie: not possible where any of them lies otherwise.
GemmPlan plan_rows(const Problem& p, const GemmOptions& options, std::int64_t cublas_bytes) {
  GemmPlan plan{};
  const PixelMatrix x = pixel_matrix(p.x, p.in_channels, p.in_d, p.in_h, p.in_w);
  const bool innermost = weight_is_tap_matrix(p) && fits_im2row(p) && is_one_matrix(x, p.in_channels, p.batch, in_pixels(p));
  const bool adds = options.atomic || options.has_bias || p.activation != Activation::kNone || options.given_columns;
  if (!innermost || adds || (p.op == Operator::kConvTranspose && !y_is_rows(p))) return plan;
  plan.by_rows = true, plan.columns_are_y = y_is_rows(p), plan.column_dtype = p.dtype;
  plan.cublas_bytes = plan.columns_at = aligned(std::min(cublas_bytes, options.workspace_cap / 4));
  const std::int64_t rows = plan.columns_are_y ? 0 : p.batch * in_pixels(p) * kernel_taps(p) * p.out_channels;
  plan.total_bytes = plan.columns_at + aligned(rows * element_bytes(p.dtype));
  plan.possible = plan.total_bytes <= options.workspace_cap;
  return plan;
}

// Whether they are taken first: not where another form or smaller blocks are asked for, and where cuBLAS's tensor cores would
// have rows of x and of columns that begin anywhere, which took it 15 ms instead of 0.07 (FCN-32s, 21 channels in 16 bits).
bool prefers_rows(const Problem& p, const GemmOptions& options) {
  const bool asked = options.chunk_bytes == 0 && options.form == GemmForm::kBest;
  const PixelMatrix x = pixel_matrix(p.x, p.in_channels, p.in_d, p.in_h, p.in_w);
  const std::int64_t size = element_bytes(p.dtype), row = p.out_channels * kernel_taps(p);
  return asked && (p.dtype == Dtype::kFloat64 || (x.step * size % 8 == 0 && row * size % 8 == 0));
}

GemmPlan plan_columns(const Problem& p, const GemmOptions& options, std::int64_t cublas_bytes) {
  const Pixels pixels = pixels_of(p);
  const std::int64_t bytes = planes_bytes(pixels, p.dtype);
  if (bytes > 0 && bytes < options.workspace_cap) {
    Problem planes = p;
    planes.y = plane_strides(pixels, p.out_h, p.out_w);
    GemmOptions left = options;
    left.workspace_cap -= bytes;
    GemmPlan plan = plan_as_it_lies(planes, left, cublas_bytes);
    plan.to_planes = true, plan.pixels = pixels, plan.y = planes.y;
    plan.planes_at = plan.total_bytes, plan.total_bytes += bytes;
    if (plan.possible) return plan;
  }
  return plan_as_it_lies(p, options, cublas_bytes);
}

}  // namespace

GemmPlan plan_gemm(const Problem& p, const GemmOptions& options, std::int64_t cublas_bytes) {
  const GemmPlan rows = plan_rows(p, options, cublas_bytes);
  if (rows.possible && prefers_rows(p, options)) return rows;
  GemmPlan plan = plan_columns(p, options, cublas_bytes);
  return plan.possible || !rows.possible ? plan : rows;  // else the weight, or y, turned is beyond the cap
}

}  // namespace upfold::cuda
