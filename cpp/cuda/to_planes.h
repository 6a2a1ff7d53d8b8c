// Copies of pixels whose channels are innermost, as planes.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Channel c of pixel i of sample n lies at n * sample + i * step + c; distances are in elements.
struct Pixels {
  std::int64_t samples, channels, pixels;
  std::int64_t sample, step;
};

// Whether so many can be counted.
bool fits_planes(const Pixels& pixels);

// to[(n * channels + c) * pixels + i] = from(n, i, c), of pixels that fit. `to` is aligned to 16 bytes. The device is current.
void to_planes(const Launch& launch, Dtype dtype, const Pixels& pixels, const void* from, void* to);

}  // namespace upfold::cuda
