// conv_transpose and conv as sums over packed planes: the blocked kernel of the direct method.
#pragma once

#include "api.h"
#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

// Bytes of workspace for correlate_direct: the packed weights and one flag per block of them.
template <typename T>
std::int64_t correlate_workspace_bytes(const Problem& p);

// Runs kConvTranspose or kConv. Returns false, with nothing written, where a weight is Inf or NaN: the padding zeros of the
// packed planes are multiplied by weights, which is harmless only for finite ones.
template <typename T>
bool correlate_direct(const Problem& p, const Operands& operands, int threads);

}  // namespace upfold::cpu::UPFOLD_ISA
