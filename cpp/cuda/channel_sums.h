// The sum of every channel over samples and pixels: the gradient of a bias.
#pragma once

#include "api.h"

namespace upfold::cuda {

// How (samples, channels, depth, height, width) lie. `dtype` is float32, float16 or bfloat16; `alignment` the largest power of
// two, of at most 16 bytes, that divides the address.
struct ChannelSumsTensor {
  Dtype dtype;
  std::int64_t samples, channels, size[3];
  Strides strides;  // at least 0; 0 where an element repeats, and on axes of size 1
  std::int64_t alignment;
};

struct ChannelSumsPlan;
// sums[c] = the sum of channel c in float32, in a fixed order, rounded once to the tensor's type. Planned once, then the same for
// any tensor that lies so. The tensor has elements.
class ChannelSumsCall {
 public:
  ChannelSumsCall(int device, const ChannelSumsTensor& tensor);
  // Scratch of a call, aligned to 16 bytes, or -1 where no kernel reads tensors that lie so: pixels of a plane, or channels of
  // all pixels, must follow one another.
  std::int64_t workspace_bytes() const;
  void run(const void* tensor, void* sums, void* workspace, std::uintptr_t stream) const;

 private:
  int device_;
  std::shared_ptr<const ChannelSumsPlan> plan_;  // null: no kernel
};

}  // namespace upfold::cuda
