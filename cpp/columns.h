// The column matrix that GEMM + col2im and fold/unfold share, and the block of it that one call works on.
#pragma once

#include "problem.h"

namespace upfold {

// A half-open range [begin, end) on one axis.
struct Range {
  std::int64_t begin, end;
};

UPFOLD_INLINE std::int64_t length(const Range& r) { return r.end - r.begin; }

// A block of the column matrix. Columns hold, for the samples `n`, the output channels `oc` (of all channels, not of a group) and
// the input positions `in_d x in_h x in_w`, one value for every tap:
//
//   columns[n - n.begin][(oc - oc.begin) * taps + tap][id - in_d.begin][ih - in_h.begin][iw - in_w.begin]
//
// with tap = (kd * kernel_h + kh) * kernel_w + kw; the pixels of one row are dense, rows and samples have free strides.
//
// col2im writes the outputs `out_d x out_h x out_w` of `n` and `oc` in full: every input position that reaches one of them
// through some tap must lie inside the input ranges (or outside the input). im2col fills the whole block from y.
struct ColumnBlock {
  Range n, oc;
  Range in_d, in_h, in_w;
  Range out_d, out_h, out_w;   // used by col2im only
  std::int64_t sample_stride;  // elements between columns of neighbouring samples
  std::int64_t row_stride;     // elements between neighbouring rows (oc, tap), >= the pixels of the block
};

}  // namespace upfold
