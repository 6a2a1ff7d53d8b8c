// A weight in channels_last as the matrix of `gemm`.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Copies a weight whose output channels are innermost, [input channel][tap][output channel of a group], to [input channel][output
// channel][tap]. False where it lies otherwise, or its elements are not of 2 or 4 bytes.
bool turn_weight(const Launch& launch, const Problem& p, const void* from, void* to);

}  // namespace upfold::cuda
