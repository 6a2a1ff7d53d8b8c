// A tensor as copies of boxes of it need it described: what the driver encoded (boxes.h), read by `copy_box` (mma.cuh).
#pragma once

namespace upfold::cuda {

struct alignas(64) BoxMap {
  unsigned char bytes[128];
};

}  // namespace upfold::cuda
