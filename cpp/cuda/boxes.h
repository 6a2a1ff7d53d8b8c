// Descriptions of tensors for copies of boxes into shared memory, which one thread begins (compute capability 9.0).
#pragma once

#include "../problem.h"
#include "box_map.h"

namespace upfold::cuda {

// Five axes, innermost first; the first is dense. What a box has outside the tensor is zero, and is not stored.
struct BoxTensor {
  Dtype dtype;  // float32, float16 or bfloat16
  std::int64_t sizes[5];
  std::int64_t strides[4];  // of the axes behind the first, in bytes: multiples of 16 below 2^40
  std::int32_t box[5];      // at most 256 of each axis; the first is a multiple of 16 bytes
  std::int32_t swizzle;     // bytes of the rows whose vectors change places (mma.cuh): 32, 64 or 128, those of the box; else 16
  std::int32_t burst;       // bytes that the second-level cache reads at a time: 128 or 256
  std::int32_t steps[5] = {1, 1, 1, 1,
                           1};  // a box of n has every such element, from its first on: at most 8; 1 of the first axis
  bool rounds = true;           // float32 to TF32, to nearest, on the way
};

// Whether this build and the driver know such copies.
bool can_copy_boxes();

// `address` is a multiple of 16. Throws where the driver refuses.
BoxMap describe_boxes(const BoxTensor& tensor, const void* address);

}  // namespace upfold::cuda
