// Large pages for large outputs.
#pragma once

#include "../problem.h"

namespace upfold::cpu {

// Asks the system for large pages under the tensor that `data`, its sizes and strides span, where that is worth a system call. A
// fresh output of 100 MB costs 25,000 page faults in pages of 4 KiB, which took longer than all else in a depthwise layer.
// Contents and results are untouched; without support for the request nothing happens.
void advise_large_pages(const void* data, const Strides& sizes, const Strides& strides, Dtype dtype);

}  // namespace upfold::cpu
