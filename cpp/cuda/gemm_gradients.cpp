// Both gradients from one matrix of columns: the adjoint in x makes them, and that in w has its workspace where the first one's
// sums were, and cuBLAS's where the first one's and its weight were, if it fits before the columns.
#include "gemm_gradients.h"

#include <algorithm>

#include "../error.h"
#include "gemm_plan.h"

namespace upfold::cuda {
namespace {

GemmOptions options_of(std::int64_t workspace_cap, bool allow_tf32, bool given_columns) {
  return {workspace_cap, 0, allow_tf32, false, false, GemmForm::kColumns, given_columns};
}

bool same(const Range& a, const Range& b) { return a.begin == b.begin && a.end == b.end; }

bool same_columns(const GemmBlock& a, const GemmBlock& b) {
  const ColumnBlock &c = a.columns, &d = b.columns;
  return same(c.n, d.n) && same(c.oc, d.oc) && same(c.in_d, d.in_d) && same(c.in_h, d.in_h) && same(c.in_w, d.in_w) &&
         c.sample_stride == d.sample_stride && c.row_stride == d.row_stride && a.rows == b.rows && a.groups == b.groups;
}

// Whether a plan reads whole columns of y.
bool is_plain(const GemmPlan* plan) {
  return plan != nullptr && plan->possible && plan->blocks.size() == 1 && !plan->to_planes && plan->window.taps == 0 &&
         !plan->columns_are_y;
}

bool fits_before_columns(const GemmPlan& conv, const GemmPlan& weight) { return weight.cublas_bytes <= conv.columns_at; }

bool can_share(const GemmPlan* conv, const GemmPlan* weight) {
  return is_plain(conv) && is_plain(weight) && conv->column_dtype == weight->column_dtype &&
         same_columns(conv->blocks[0], weight->blocks[0]);
}

}  // namespace

GemmGradientsCall::GemmGradientsCall(int device, const Problem& conv, const Problem& weight, std::int64_t workspace_cap,
                                     bool allow_tf32)
    : conv_(device, conv, options_of(workspace_cap, allow_tf32, false)),
      weight_(device, weight, options_of(workspace_cap, allow_tf32, true)),
      shares_(can_share(conv_.plan(), weight_.plan()) && workspace_bytes() <= workspace_cap) {}

std::int64_t GemmGradientsCall::workspace_bytes() const {
  if (conv_.plan() == nullptr || weight_.plan() == nullptr) return 0;
  const GemmPlan &conv = *conv_.plan(), &weight = *weight_.plan();
  const std::int64_t before = fits_before_columns(conv, weight) ? weight.cublas_bytes : 0;
  return std::max(conv.total_bytes, conv.stage_at + weight.total_bytes - before);
}

void GemmGradientsCall::run(const GemmGradients& operands, std::uintptr_t stream) const {
  require(shares_, "the gradients do not read the same columns");
  char* const workspace = static_cast<char*>(operands.workspace);
  const GemmPlan &conv = *conv_.plan(), &weight = *weight_.plan();
  void *const x = const_cast<void*>(operands.x), *const w = const_cast<void*>(operands.w),
              *const y = const_cast<void*>(operands.y);
  conv_.run({operands.x_gradient, w, nullptr, y, workspace}, stream);
  // Its parts begin behind what it has for cuBLAS, which nobody writes where that is elsewhere: they are behind the columns.
  const bool before = fits_before_columns(conv, weight);
  char* const behind_columns = workspace + conv.stage_at - (before ? weight.cublas_bytes : 0);
  void* const products = before ? workspace : behind_columns;
  weight_.run({x, operands.w_gradient, nullptr, y, behind_columns, workspace + conv.columns_at, products}, stream);
}

}  // namespace upfold::cuda
