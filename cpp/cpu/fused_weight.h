// conv_transpose_weight by the fused method: products of packed pixels of x with those of y, no column matrix.
#pragma once

#include "api.h"
#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

// -1 where a tile would not fit a thread's scratch.
std::int64_t fused_weight_workspace_bytes(const Problem& p);

// No product is ever taken with the padding. Sums of at most a few hundred products are added in float32, those of a few
// thousand pixels in double.
template <typename T>
void fused_weight(const Problem& p, const Operands& operands, int threads);

}  // namespace upfold::cpu::UPFOLD_ISA
