// Copies of planes: side by side, or with the channels to the front.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Element i of channel c of sample n lies at n * sample + c * channel + i; nothing is 0 but distances, which are in elements.
struct Planes {
  std::int64_t samples, channels, pixels;
  std::int64_t sample, channel;
};

// to[c * row + n * pixels + i] = from(n, c, i). False, and nothing done, where there are too many. The device is current.
bool copy_planes(const Launch& launch, Dtype dtype, const Planes& planes, std::int64_t row, const void* from, void* to);

// to[(n * pixels + i) * channels + c] = from(n, c, i) for float32, under the same conditions.
bool transpose_planes(const Launch& launch, const Planes& planes, const float* from, float* to);

}  // namespace upfold::cuda
