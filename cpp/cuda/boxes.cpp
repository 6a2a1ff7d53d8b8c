#include "boxes.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <stdexcept>

#include "../error.h"

#if CUDART_VERSION >= 12000 && __has_include(<cuda.h>)
#include <cuda.h>
#endif

namespace upfold::cuda {

#if CUDART_VERSION >= 12000 && __has_include(<cuda.h>)
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver is not linked, so that the module loads without one.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

Encode encode() {
  static const Encode function = find_encode();
  return function;
}

CUtensorMapDataType type_of(const BoxTensor& tensor) {
  if (tensor.dtype == Dtype::kFloat16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (tensor.dtype == Dtype::kBFloat16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return tensor.rounds ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

CUtensorMapSwizzle swizzle_of(std::int32_t bytes) {
  return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
         : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                       : CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

bool can_copy_boxes() { return encode() != nullptr; }

BoxMap describe_boxes(const BoxTensor& tensor, const void* address) {
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], each[5];
  for (int i = 0; i < 5; ++i)
    sizes[i] = cuuint64_t(tensor.sizes[i]), box[i] = cuuint32_t(tensor.box[i]), each[i] = cuuint32_t(tensor.steps[i]);
  // The stride of an axis of one element may be any, but the driver wants multiples of 16 bytes.
  for (int i = 0; i < 4; ++i)
    strides[i] = tensor.sizes[i + 1] == 1 && tensor.strides[i] % 16 != 0 ? 16 : cuuint64_t(tensor.strides[i]);
  const CUtensorMapL2promotion burst =
      tensor.burst == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  CUtensorMap map;
  const CUresult status =
      encode()(&map, type_of(tensor), 5, const_cast<void*>(address), sizes, strides, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle_of(tensor.swizzle), burst, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(concat("cuTensorMapEncodeTiled failed with ", int(status), ": boxes of ", tensor.box[0], " x ",
                                    tensor.box[1], " in ", tensor.sizes[0], " x ", tensor.sizes[1], " of ", tensor.strides[0],
                                    " bytes each"));
  }
  BoxMap result;
  static_assert(sizeof(result) == sizeof(map), "what a kernel reads");
  std::memcpy(&result, &map, sizeof(result));
  return result;
}
#else
bool can_copy_boxes() { return false; }

BoxMap describe_boxes(const BoxTensor&, const void*) { throw std::runtime_error("copies of boxes need CUDA 12 or newer"); }
#endif

}  // namespace upfold::cuda
