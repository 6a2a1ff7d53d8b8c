#include "gemm_products.h"

#include <algorithm>

namespace upfold::cuda {

void* GemmProducts::columns() const {
  if (options_.given_columns) return operands_.columns;
  return plan_.columns_are_y ? operands_.y : workspace(plan_.columns_at);
}

void GemmProducts::all(const Visit& visit) const {
  if (plan_.to_result) return visit(to_result());
  if (plan_.by_rows) return visit(by_rows());
  for (const GemmBlock& block : plan_.blocks) of_block(block, visit);
}

void GemmProducts::of_block(const GemmBlock& block, const Visit& visit) const {
  if (plan_.window.taps > 0) return windows(block, visit);
  if (p_.op == Operator::kConvTranspose) return conv_transpose(block, visit);
  if (p_.op == Operator::kConv) return conv(block, visit);
  conv_transpose_weight(block, visit);
}

// Samples are the pixels of the one product, which is y as it lies, or what is finished to it.
Product GemmProducts::to_result() const {
  const std::int64_t rows = out_channels_per_group(p_) * kernel_taps(p_), depth = in_channels_per_group(p_);
  const std::int64_t columns = p_.out_channels * kernel_taps(p_);
  const std::int64_t w_ld = std::max(p_.w.n, rows), x_ld = std::max(p_.x.n, p_.in_channels);
  const Matrix w{operands_.w, p_.dtype, false, w_ld, 0, depth * w_ld}, x{operands_.x, p_.dtype, false, x_ld, 0, depth};
  const Sizes sizes{rows, p_.batch, depth, 1, p_.groups};
  if (plan_.finishes) return {sizes, w, x, {nullptr, sum_dtype(p_.dtype), false, columns, 0, rows}, this->columns(), false};
  return {sizes, w, x, {operands_.y, p_.dtype, false, std::max(p_.y.n, columns), 0, rows}, operands_.y, false};
}

// A pixel is a row of x, and of columns or y, whose order is the weight's.
Product GemmProducts::by_rows() const {
  const std::int64_t depth = p_.out_channels * kernel_taps(p_), pixels = p_.batch * in_pixels(p_), channels = p_.in_channels;
  const PixelMatrix y = pixel_matrix(p_.y, p_.out_channels, p_.out_d, p_.out_h, p_.out_w);
  const bool adjoint = p_.op == Operator::kConv, of_weight = p_.op == Operator::kConvTransposeWeight;
  const Matrix rows{columns(), p_.dtype, false, plan_.columns_are_y ? std::max(y.step, depth) : depth, 0, 0};
  const Matrix w{operands_.w, p_.dtype, adjoint, std::max(p_.w.n, depth), 0, 0};
  const Matrix x{operands_.x, p_.dtype, of_weight, std::max(x_.step, channels), 0, 0};
  if (adjoint) return {{channels, pixels, depth, 1, 1}, w, rows, x, operands_.x, false};
  if (of_weight) return {{depth, channels, pixels, 1, 1}, rows, x, w, operands_.w, false};
  return {{depth, pixels, channels, 1, 1}, w, x, rows, operands_.y, false};
}

void GemmProducts::conv_transpose(const GemmBlock& block, const Visit& visit) const {
  if (block.pixels == 0 || plan_.outer) return;
  // The padding behind a copied x is multiplied too: what comes of it is not read, and tensor cores want multiples of 8.
  const std::int64_t pixels = plan_.copy_x ? block.columns.row_stride : pixels_of(block);
  const Sizes sizes{pixels, block.rows, in_channels_per_group(p_), samples_of(block), block.groups};
  visit({sizes, x_matrix(block), weight_matrix(block, true), columns_matrix(block, false), columns(), false});
}

void GemmProducts::conv(const GemmBlock& block, const Visit& visit) const {
  const std::int64_t per_group = in_channels_per_group(p_);
  const Matrix columns = columns_matrix(block, false), w = weight_matrix(block, false);
  if (plan_.stage) {
    const std::int64_t row = block.columns.row_stride;
    const Matrix result{stage(), plan_.stage_dtype, false, row, 0, per_group * row};
    return visit({{pixels_of(block), per_group, block.rows, 1, block.groups}, columns, w, result, stage(), !block.first_of_sum});
  }
  const Matrix x = x_matrix(block);
  void* const to = const_cast<void*>(x.data);
  const Sizes sizes{pixels_of(block), per_group, block.rows, samples_of(block), block.groups};
  if (!x.transposed) return visit({sizes, columns, w, x, to, !block.first_of_sum});
  // channels-last: the product is turned round
  Matrix turned = w;
  turned.transposed = !w.transposed;
  visit({{sizes.n, sizes.m, sizes.k, sizes.samples, sizes.groups},
         turned,
         columns_matrix(block, true),
         x,
         to,
         !block.first_of_sum});
}

Matrix GemmProducts::weight_result(const GemmBlock& block) const {
  if (!plan_.stage) return weight_matrix(block, false);
  return {stage(), plan_.stage_dtype, false, block.rows, 0, in_channels_per_group(p_) * block.rows};
}

void* GemmProducts::result_weight(const GemmBlock& block) const { return const_cast<void*>(weight_result(block).data); }

void GemmProducts::conv_transpose_weight(const GemmBlock& block, const Visit& visit) const {
  if (plan_.parts > 0) return parts(block, visit);
  const Sizes sizes{block.rows, in_channels_per_group(p_), pixels_of(block), 1, block.groups};
  visit({sizes, columns_matrix(block, true), x_matrix(block), weight_result(block), result_weight(block), !block.first_of_sum});
}

// A sum over the pixels of every part of every sample: one batch for all samples, or for the parts of each.
void GemmProducts::parts(const GemmBlock& block, const Visit& visit) const {
  const Dtype dtype = sum_dtype(p_.dtype);
  const std::int64_t per_group = in_channels_per_group(p_), of_group = per_group * block.rows, of_part = block.groups * of_group;
  Matrix columns = columns_matrix(block, true), x = x_matrix(block);
  const std::int64_t column_sample = columns.sample, x_sample = x.sample, pixels = block.pixels / plan_.parts;
  const bool whole = plan_.parts == 1;
  if (!whole) columns.sample = pixels, x.sample = x.transposed ? pixels * x.ld : pixels;
  const Sizes sizes{block.rows, per_group, pixels, whole ? block.samples : plan_.parts, block.groups};
  char* to = workspace(plan_.parts_at);
  for (std::int64_t n = 0; n < (whole ? 1 : block.samples); ++n, to += plan_.parts * of_part * element_bytes(dtype)) {
    visit({sizes, columns, x, {nullptr, dtype, false, block.rows, of_part, of_group}, to, false});
    columns.data = static_cast<const char*>(columns.data) + column_sample * element_bytes(columns.dtype);
    x.data = static_cast<const char*>(x.data) + x_sample * element_bytes(x.dtype);
  }
}

void GemmProducts::windows(const GemmBlock& block, const Visit& visit) const {
  const std::int64_t row = block.columns.row_stride, taps = plan_.window.taps;
  if (p_.op == Operator::kConvTranspose) {
    if (block.pixels > 0) phases(row, visit);
  } else if (p_.op == Operator::kConv) {  // x = the sums over windows of what each gives to its pixels
    const std::int64_t rows = block.rows;
    const Matrix weight{workspace(plan_.weight_at), p_.dtype, false, rows, 0, 0};
    const Matrix result{nullptr, sum_dtype(p_.dtype), false, row, 0, 0};
    visit({{row, p_.in_channels * taps, rows, 1, 1}, columns_matrix(block, false), weight, result, stage(), false});
  } else {
    const std::int64_t depth = taps * plan_.window.channels, pixels = block.samples * block.pixels;
    const Matrix x{workspace(plan_.x_at), p_.dtype, false, depth, 0, 0}, result{nullptr, sum_dtype(p_.dtype), false, depth, 0, 0};
    visit({{depth, block.rows, pixels, 1, 1}, x, columns_matrix(block, false), result, stage(), !block.first_of_sum});
  }
}

// One product, or one batch over the residues, for the phases that have all taps, one for the others.
void GemmProducts::phases(std::int64_t row, const Visit& visit) const {
  const Window& window = plan_.window;
  const std::int64_t size = element_bytes(p_.dtype), column_size = element_bytes(plan_.column_dtype);
  const std::int64_t lines = p_.out_channels * p_.kernel_d * p_.kernel_h;
  const std::int64_t batch = overlapping_batch(p_) ? window.residues : 1, residue = p_.stride_w * lines * row;
  const std::int64_t phases[2] = {window.full, p_.stride_w - window.full};
  std::int64_t weights = 0, rows = 0;
  for (int fewer = 0; fewer < 2; ++fewer) {
    const std::int64_t depth = (window.taps - fewer) * window.channels, count = phases[fewer] * lines;
    if (count == 0) continue;
    const Matrix weight{workspace(plan_.weight_at + weights * size), p_.dtype, false, depth, 0, 0};
    for (std::int64_t r = 0; r < window.residues; r += batch) {
      const char* const from = workspace(plan_.x_at + (fewer + r) * window.channels * size);
      const Matrix x{from, p_.dtype, true, window.taps * window.channels, window.channels, 0};
      const Matrix result{nullptr, plan_.column_dtype, false, row, residue, 0};
      void* const to = workspace(plan_.columns_at + (rows * row + r * residue) * column_size);
      visit({{row, count, depth, batch, 1}, x, weight, result, to, false});
    }
    weights += count * depth, rows += count;
  }
}

Matrix GemmProducts::columns_matrix(const GemmBlock& block, bool transposed) const {
  const ColumnBlock& c = block.columns;
  if (plan_.columns_are_y) {  // of all channels and samples: without columns nothing is cut into blocks
    const std::int64_t row = std::max(p_.y.c, block.pixels);
    return {columns(), p_.dtype, transposed, row, p_.y.n, block.rows * row};
  }
  return {columns(), plan_.column_dtype, transposed, c.row_stride, plan_.flat ? 0 : c.sample_stride, block.rows * c.row_stride};
}

Matrix GemmProducts::weight_matrix(const GemmBlock& block, bool transposed) const {
  const std::int64_t size = element_bytes(p_.dtype), dense = out_channels_per_group(p_) * kernel_taps(p_);
  if (plan_.deep_weight) {
    const std::int64_t depth = in_channels_per_group(p_), first = (block.first_group * dense + block.first_row) * depth;
    return {workspace(plan_.weight_at + first * size), p_.dtype, !transposed, depth, 0, dense * depth};
  }
  const std::int64_t ld = plan_.repack_weight || p_.in_channels == 1 || p_.w.n == 0 ? dense : p_.w.n;
  const char* data = plan_.repack_weight ? workspace(plan_.weight_at) : static_cast<const char*>(operands_.w);
  data += (block.first_group * in_channels_per_group(p_) * ld + block.first_row) * size;
  return {data, p_.dtype, transposed, ld, 0, in_channels_per_group(p_) * ld};
}

Matrix GemmProducts::x_matrix(const GemmBlock& block) const {
  const std::int64_t size = element_bytes(p_.dtype), first = block.first_group * in_channels_per_group(p_);
  if (plan_.copy_x) {
    if (plan_.deep_x) {
      const std::int64_t depth = in_channels_per_group(p_);
      return {workspace(plan_.x_at + first * size), p_.dtype, true, p_.in_channels, 0, depth};
    }
    const std::int64_t row = block.columns.row_stride;
    return {workspace(plan_.x_at + first * row * size), p_.dtype, false, row, 0, in_channels_per_group(p_) * row};
  }
  const ColumnBlock& c = block.columns;
  const std::int64_t at =
      c.n.begin * p_.x.n + c.in_d.begin * p_.x.d + c.in_h.begin * p_.x.h + c.in_w.begin * p_.x.w + first * x_.channel;
  const std::int64_t ld = x_.channels_fastest ? std::max(x_.step, p_.in_channels) : std::max(x_.channel, pixels_of(block));
  return {static_cast<const char*>(operands_.x) + at * size,
          p_.dtype,
          x_.channels_fastest,
          ld,
          plan_.flat ? 0 : x_.sample,
          in_channels_per_group(p_) * x_.channel};
}

}  // namespace upfold::cuda
