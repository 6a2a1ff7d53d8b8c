// Which way a call of `gemm` goes before its blocks are cut: over windows or taps, from y as it lies or from planes of it.
#include "gemm_plan.h"

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

// The pixels of a y that a gradient reads better as planes: none where there is one pixel, or they are planes, or lie unevenly.
Pixels pixels_of(const Problem& p) {
  const PixelMatrix y = pixel_matrix(p.y, p.out_channels, p.out_d, p.out_h, p.out_w);
  const Pixels pixels{p.batch, p.out_channels, out_pixels(p), y.sample, y.step};
  const bool innermost = p.op != Operator::kConvTranspose && y.regular && y.channels_fastest && pixels.pixels > 1;
  return innermost && fits_planes(pixels) ? pixels : Pixels{};
}

}  // namespace

GemmPlan plan_gemm(const Problem& p, const GemmOptions& options, std::int64_t cublas_bytes) {
  const Pixels pixels = pixels_of(p);
  const std::int64_t bytes = aligned(pixels.samples * pixels.channels * pixels.pixels * element_bytes(p.dtype));
  if (bytes > 0 && bytes < options.workspace_cap) {
    Problem planes = p;
    planes.y = {pixels.channels * pixels.pixels, pixels.pixels, p.out_h * p.out_w, p.out_w, 1};
    GemmOptions left = options;
    left.workspace_cap -= bytes;
    GemmPlan plan = plan_as_it_lies(planes, left, cublas_bytes);
    plan.to_planes = true, plan.pixels = pixels, plan.y = planes.y;
    plan.planes_at = plan.total_bytes, plan.total_bytes += bytes;
    if (plan.possible) return plan;
  }
  return plan_as_it_lies(p, options, cublas_bytes);
}

}  // namespace upfold::cuda
