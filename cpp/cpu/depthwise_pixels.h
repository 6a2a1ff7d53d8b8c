// conv_transpose and conv with as many groups as channels in channels_last: the channels of a pixel are the vectors.
#pragma once

#include "api.h"
#include "number.h"

namespace upfold::cpu::UPFOLD_ISA {

// Whether depthwise_pixels_direct takes the problem. Its workspace is not larger than that of correlate_direct.
template <typename T>
bool is_depthwise_pixels(const Problem& p);

// No product is ever taken with the padding, so any weight will do.
template <typename T>
void depthwise_pixels_direct(const Problem& p, const Operands& operands, int threads);

}  // namespace upfold::cpu::UPFOLD_ISA
