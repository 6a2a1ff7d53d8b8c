// What the host sides of the column kernels share.
#pragma once

#include "../columns.h"
#include "../error.h"
#include "../problem.h"
#include "api.h"

namespace upfold::cuda {

inline void require_range(const Range& r, std::int64_t size, const char* name) {
  require(0 <= r.begin && r.begin <= r.end && r.end <= size, name, " = [", r.begin, ", ", r.end, "); must lie in [0, ", size,
          ")");
}

// Refuses a block that lies outside the problem or whose rows overlap.
inline void require_block(const Problem& p, const ColumnBlock& block) {
  require_range(block.n, p.batch, "block.n");
  require_range(block.oc, p.out_channels, "block.oc");
  require_range(block.in_d, p.in_d, "block.in_d");
  require_range(block.in_h, p.in_h, "block.in_h");
  require_range(block.in_w, p.in_w, "block.in_w");
  const std::int64_t pixels = length(block.in_d) * length(block.in_h) * length(block.in_w);
  require(block.row_stride >= pixels, "row_stride = ", block.row_stride, "; must hold the block's ", pixels, " pixels");
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    require(a.stride >= 1 && a.dilation >= 1 && a.kernel >= 1 && a.pad >= 0, "kernel ", a.kernel, ", stride ", a.stride,
            ", padding ", a.pad, ", dilation ", a.dilation, "; out of range");
    require(a.stride < std::int64_t(1) << 31, "stride = ", a.stride, "; the CUDA kernels take strides below 2^31");
  }
}

// Refuses rows of columns that overlap. A stride that is never stepped may have any value.
inline void require_strides(const Problem& p, const ColumnBlock& block, const ColumnStrides& strides) {
  const std::int64_t pixels = length(block.in_d) * length(block.in_h) * length(block.in_w);
  const auto fits = [pixels](std::int64_t count, std::int64_t stride) { return count <= 1 || stride >= pixels; };
  require(fits(length(block.oc), strides.channel) && fits(p.kernel_d, strides.tap_d) && fits(p.kernel_h, strides.tap_h) &&
              fits(p.kernel_w, strides.tap_w),
          "column strides (", strides.channel, ", ", strides.tap_d, ", ", strides.tap_h, ", ", strides.tap_w,
          "); each must hold the block's ", pixels, " pixels");
}

inline void require_outputs(const Problem& p, const ColumnBlock& block) {
  require_range(block.out_d, p.out_d, "block.out_d");
  require_range(block.out_h, p.out_h, "block.out_h");
  require_range(block.out_w, p.out_w, "block.out_w");
}

[[noreturn]] inline void refuse_types(const Problem& p, Dtype column_dtype) {
  throw InvalidArgument(concat("dtype ", int(p.dtype), " with columns of dtype ", int(column_dtype),
                               "; columns have the dtype of the problem, or float32 for a 16-bit problem"));
}

// A pair of types, of y and of the columns, as values to dispatch on.
template <typename V, typename C>
struct TypePair {
  using Value = V;
  using Column = C;
};

}  // namespace upfold::cuda
