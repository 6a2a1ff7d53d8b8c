// Copies of planes as pixels whose channels are innermost.
#pragma once

#include "api.h"

namespace upfold::cuda {

// (samples, channels, depth, height, width) as they lie, of elements of 2 or 4 bytes.
struct PlanesTensor {
  Dtype dtype;
  std::int64_t samples, channels, size[3];
  Strides strides;  // at least 0
};

struct ToPixelsPlan;
// to[n][d][h][w][c] = from(n, c, d, h, w), dense; `to` is aligned to 16 bytes, where every pixel's channels begin. Planned once,
// then the same for any tensor that lies so.
class ToPixelsCall {
 public:
  ToPixelsCall(int device, const PlanesTensor& tensor);
  // Whether channels are whole vectors of 16 bytes, and few enough elements to be counted.
  bool fits() const { return plan_ != nullptr; }
  void run(const void* from, void* to, std::uintptr_t stream) const;

 private:
  int device_;
  std::shared_ptr<const ToPixelsPlan> plan_;  // null: it does not fit
};

}  // namespace upfold::cuda
