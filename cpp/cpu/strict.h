// conv_transpose and conv by plain loops over exactly the taps that exist: nothing is ever multiplied by a padding zero. The
// blocked kernel falls back to them where a weight is Inf or NaN, which a padding zero would spread.
#pragma once

#include "api.h"
#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

template <typename T>
void strict_direct(const Problem& p, const Operands& operands, int threads);

}  // namespace upfold::cpu::UPFOLD_ISA
