// Columns of groups that have one input channel.
#pragma once

#include "api.h"

namespace upfold::cuda {

// columns[n][c * rows + r][pixel] = x[n][c][pixel] * w[c][r], pixels dense; distances in elements.
struct OuterBlock {
  std::int64_t samples, channels, rows, pixels;
  std::int64_t x_sample, x_channel, w_channel;
  std::int64_t sample_stride, row_stride;
};

// For real numbers; columns have the type of sums (float32 for 16-bit x and w). Nothing in the block is 0.
void outer_columns(const Launch& launch, Dtype dtype, const OuterBlock& block, const void* x, const void* w, void* columns);

}  // namespace upfold::cuda
