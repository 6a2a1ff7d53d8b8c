// The matrix products of a plan, one list for when they run and for when it is asked how.
#pragma once

#include <functional>

#include "gemm_plan.h"
#include "products.h"

namespace upfold::cuda {

class GemmProducts {
 public:
  using Visit = std::function<void(const Product&)>;
  // Operands are not read where products are only looked at.
  GemmProducts(const Problem& p, const GemmOptions& options, const GemmPlan& plan, const GemmOperands& operands)
      : p_(p),
        options_(options),
        plan_(plan),
        operands_(operands),
        x_(pixel_matrix(p.x, p.in_channels, p.in_d, p.in_h, p.in_w)) {}

  Product to_result() const;                                  // where that is the plan
  Product by_rows() const;                                    // likewise
  void of_block(const GemmBlock& block, const Visit&) const;  // of every other plan
  void all(const Visit& visit) const;

  // The pixels of a block of x as (pixels x in_channels of a group), and the weight as (oc * taps x in_channels of a group).
  Matrix x_matrix(const GemmBlock& block) const;
  Matrix weight_matrix(const GemmBlock& block, bool transposed) const;

  char* workspace(std::int64_t at) const { return static_cast<char*>(operands_.workspace) + at; }
  void* columns() const;
  void* stage() const { return workspace(plan_.stage_at); }
  void* result_weight(const GemmBlock& block) const;  // where the sum over a block's pixels goes

 private:
  void conv_transpose(const GemmBlock& block, const Visit& visit) const;
  void conv(const GemmBlock& block, const Visit& visit) const;
  void conv_transpose_weight(const GemmBlock& block, const Visit& visit) const;
  void parts(const GemmBlock& block, const Visit& visit) const;
  void windows(const GemmBlock& block, const Visit& visit) const;
  void phases(std::int64_t row, const Visit& visit) const;
  Matrix columns_matrix(const GemmBlock& block, bool transposed) const;
  Matrix weight_result(const GemmBlock& block) const;
  std::int64_t pixels_of(const GemmBlock& block) const { return plan_.flat ? block.samples * block.pixels : block.pixels; }
  std::int64_t samples_of(const GemmBlock& block) const { return plan_.flat ? 1 : block.samples; }

  const Problem& p_;
  const GemmOptions& options_;
  const GemmPlan& plan_;
  const GemmOperands& operands_;
  const PixelMatrix x_;
};

}  // namespace upfold::cuda
