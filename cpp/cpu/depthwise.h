// conv_transpose with one input channel per group: no sum runs over channels, so the phases of an output row are summed in
// registers, interleaved there and stored once.
#pragma once

#include "api.h"
#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

// Whether depthwise_direct takes the problem; the others are left to correlate_direct, which needs the same workspace.
template <typename T>
bool is_depthwise(const Problem& p);

// Returns false, with nothing written, where a weight is Inf or NaN, as correlate_direct does. The sums are those of
// correlate_direct bit for bit.
template <typename T>
bool depthwise_direct(const Problem& p, const Operands& operands, int threads);

}  // namespace upfold::cpu::UPFOLD_ISA
