#include "gemm_moves.h"

#include "gemm_weight.h"

namespace upfold::cuda {
namespace {

// One tap without padding: columns are pixels.
Problem one_tap(const Problem& p) {
  Problem q = p;
  q.activation = Activation::kNone, q.groups = 1;
  q.kernel_d = q.kernel_h = q.kernel_w = q.stride_d = q.stride_h = q.stride_w = 1;
  q.pad_d = q.pad_h = q.pad_w = 0;
  q.dilation_d = q.dilation_h = q.dilation_w = 1;
  return q;
}

Problem x_problem(const Problem& p) {
  Problem q = one_tap(p);
  q.out_channels = p.in_channels, q.y = p.x;
  q.out_d = p.in_d, q.out_h = p.in_h, q.out_w = p.in_w;
  return q;
}

ColumnBlock x_block(const GemmBlock& block, const Range& channels) {
  const ColumnBlock& c = block.columns;
  return {c.n, channels, c.in_d, c.in_h, c.in_w, c.in_d, c.in_h, c.in_w, block.pixels, c.row_stride};
}

// w: samples are input channels, pixels are taps.
Problem weight_problem(const Problem& p) {
  Problem q = one_tap(p);
  q.batch = p.in_channels, q.in_channels = q.out_channels = out_channels_per_group(p), q.y = p.w;
  q.in_d = q.out_d = p.kernel_d, q.in_h = q.out_h = p.kernel_h, q.in_w = q.out_w = p.kernel_w;
  return q;
}

ColumnBlock weight_block(const Problem& p, const Range& in_channels, const Range& channels) {
  const Range d{0, p.kernel_d}, h{0, p.kernel_h}, w{0, p.kernel_w};
  return {in_channels, channels, d, h, w, d, h, w, length(channels) * kernel_taps(p), kernel_taps(p)};
}

}  // namespace

void GemmMoves::transpose(const Planes& planes, const void* from, void* to) const {
  if (transpose_planes(launch_, planes, static_cast<const float*>(from), static_cast<float*>(to))) return;
  Problem q = one_tap(p_);
  q.batch = planes.samples, q.in_channels = q.out_channels = planes.channels;
  q.in_d = q.in_h = q.out_d = q.out_h = 1, q.in_w = q.out_w = planes.pixels;
  q.y = {planes.pixels * planes.channels, 1, 0, 0, planes.channels};
  const Range one{0, 1}, pixels{0, planes.pixels};
  const ColumnBlock block{{0, planes.samples}, {0, planes.channels}, one, one, pixels, one, one, pixels,
                          planes.sample,       planes.channel};
  col2im(launch_, q, block, p_.dtype, from, nullptr, to);
}

void GemmMoves::copy_x(const GemmBlock& block) const {
  if (block.pixels == 0) return;
  const ColumnBlock& c = block.columns;
  const PixelMatrix x = pixel_matrix(p_.x, p_.in_channels, p_.in_d, p_.in_h, p_.in_w);
  const std::int64_t at = c.n.begin * p_.x.n + c.in_d.begin * p_.x.d + c.in_h.begin * p_.x.h + c.in_w.begin * p_.x.w;
  const void* const from = static_cast<const char*>(operands_.x) + at * element_bytes(p_.dtype);
  void* const to = workspace(plan_.x_at);
  const Planes planes{block.samples, p_.in_channels, block.pixels, p_.x.n, p_.x.c};
  if (plan_.deep_x) return transpose(planes, from, to);
  const bool planar = x.regular && !x.channels_fastest && x.step == 1;
  if (planar && copy_planes(launch_, p_.dtype, planes, c.row_stride, from, to)) return;
  im2col(launch_, x_problem(p_), x_block(block, {0, p_.in_channels}), p_.dtype, operands_.x, to);
}

void GemmMoves::copy_weight() const {
  if (plan_.repack_weight) {
    if (turn_weight(launch_, p_, operands_.w, workspace(plan_.weight_at))) return;
    im2col(launch_, weight_problem(p_), weight_block(p_, {0, p_.in_channels}, {0, out_channels_per_group(p_)}), p_.dtype,
           operands_.w, workspace(plan_.weight_at));
  } else if (plan_.deep_weight) {
    const std::int64_t depth = in_channels_per_group(p_), rows = out_channels_per_group(p_) * kernel_taps(p_);
    transpose({p_.groups, depth, rows, depth * p_.w.n, p_.w.n}, operands_.w, workspace(plan_.weight_at));
  }
}

void GemmMoves::unstage_x(const GemmBlock& block) const {
  const std::int64_t per_group = in_channels_per_group(p_), first = block.first_group * per_group;
  col2im(launch_, x_problem(p_), x_block(block, {first, first + block.groups * per_group}), plan_.stage_dtype,
         workspace(plan_.stage_at), nullptr, operands_.x);
}

void GemmMoves::unstage_weight(const GemmBlock& block) const {
  const std::int64_t per_group = in_channels_per_group(p_), first = block.first_group * per_group, taps = kernel_taps(p_);
  const Range channels{block.first_row / taps, (block.first_row + block.rows) / taps};
  col2im(launch_, weight_problem(p_), weight_block(p_, {first, first + block.groups * per_group}, channels), plan_.stage_dtype,
         workspace(plan_.stage_at), nullptr, operands_.w);
}

void GemmMoves::sum_windows(const GemmBlock& block) const {
  const ColumnBlock& c = block.columns;
  Problem q = x_problem(p_);
  q.in_w = plan_.window.pitch, q.kernel_w = plan_.window.taps, q.pad_w = plan_.window.taps - 1;
  const ColumnBlock taps{c.n,    {0, p_.in_channels}, c.in_d,       c.in_h,      {0, q.in_w}, c.in_d,
                         c.in_h, {0, p_.in_w},        block.pixels, c.row_stride};
  col2im(launch_, q, taps, sum_dtype(p_.dtype), workspace(plan_.stage_at), nullptr, operands_.x);
}

}  // namespace upfold::cuda
