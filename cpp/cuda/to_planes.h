// Copies of pixels whose channels are innermost, as planes.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Channel c of pixel i of sample n lies at n * sample + i * step + c; distances are in elements.
struct Pixels {
  std::int64_t samples, channels, pixels;
  std::int64_t sample, step;
};

// Those of a tensor whose channels are innermost, at even distances, as many as can be counted; else, and of one pixel, none.
Pixels innermost_pixels(const Strides& strides, std::int64_t samples, std::int64_t channels, std::int64_t d, std::int64_t h,
                        std::int64_t w);

// What a copy of them as planes takes, a multiple of 256, and how it lies, its planes `h` rows of `w` pixels each.
std::int64_t planes_bytes(const Pixels& pixels, Dtype dtype);
Strides plane_strides(const Pixels& pixels, std::int64_t h, std::int64_t w);

// to[(n * channels + c) * pixels + i] = from(n, i, c). `to` is aligned to 16 bytes. The device is current. `beside`: the launch
// before is another such copy, neither of which writes what the other one reads or writes, and both may run at a time.
void to_planes(const Launch& launch, Dtype dtype, const Pixels& pixels, const void* from, void* to, bool beside = false);

}  // namespace upfold::cuda
