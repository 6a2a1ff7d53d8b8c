// conv_transpose_weight over packed planes: w[ic, oc, tap] = sum over samples and pixels of x[ic] * y[oc] at the tap's offset.
#pragma once

#include "api.h"
#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

template <typename T>
std::int64_t correlate_weight_workspace_bytes(const Problem& p);

template <typename T>
void correlate_weight(const Problem& p, const Operands& operands, int threads);

}  // namespace upfold::cpu::UPFOLD_ISA
