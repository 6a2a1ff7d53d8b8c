// The sum of partial results, in a fixed order.
#pragma once

#include "api.h"

namespace upfold::cuda {

// to[i] = parts[0][i] + parts[1][i] + ..., added to what `to` holds where `accumulate`; `count` elements of a type that sums are
// kept in. The device is current.
void sum_parts(const Launch& launch, Dtype dtype, std::int64_t count, std::int64_t parts, const void* from, void* to,
               bool accumulate);

}  // namespace upfold::cuda
