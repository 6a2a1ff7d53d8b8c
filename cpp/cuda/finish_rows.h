// What ends a forward whose columns lie as its results do: bias, activation and rounding, in one pass.
#pragma once

#include "api.h"

namespace upfold::cuda {

// The matrix (rows x columns) of sums, dense, and the result, whose rows lie `y_row` elements apart. A column's channel is its
// number divided by `run`, or its remainder where channels are `innermost`. At most 2^31 - 1 elements.
struct FinishedRows {
  std::int64_t rows, columns, y_row, run;
  bool innermost;
};

// y = activation(sums + bias), for real types; sums have the type that these are kept in. The device is current.
void finish_rows(const Launch& launch, const Problem& p, const FinishedRows& shape, const void* sums, const void* bias, void* y);

}  // namespace upfold::cuda
