// x with the planes of its samples side by side.
#pragma once

#include "api.h"

namespace upfold::cuda {

// to[c * row + n * pixels + i] = x[n * x_sample + c * x_channel + i], distances in elements; nothing is 0 but distances.
struct PlanesBlock {
  std::int64_t samples, channels, pixels;
  std::int64_t x_sample, x_channel, row;
};

// False, and nothing done, where there are too many accesses. The device is current.
bool copy_planes(const Launch& launch, Dtype dtype, const PlanesBlock& block, const void* x, void* to);

}  // namespace upfold::cuda
