// What planning asks of CUDA's runtime, of the driver and of cuBLAS, answered for an H200 that is not there: linked ahead of all
// else by check_plans.py, so that every plan and prediction can be made where no GPU is. Nothing can be launched.
#include <cuda_runtime_api.h>

#include <cstring>

#include "../cpp/cuda/boxes.h"
#include "../cpp/cuda/cublas.h"

#define ABSENT extern "C" __attribute__((visibility("hidden"))) cudaError_t

ABSENT cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1 << 10; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 64 << 10; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrL2CacheSize: *value = 60 << 20; break;
    default: *value = 1;
  }
  return cudaSuccess;
}
ABSENT cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  std::memset(found, 0, sizeof(*found));
  // More than any kernel's, by which the host tells those that were compiled with warpgroups.
  found->sharedSizeBytes = 8 << 10, found->maxThreadsPerBlock = 1024, found->numRegs = 128;
  found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
ABSENT cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) { return *blocks = 2, cudaSuccess; }
ABSENT cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
ABSENT cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
ABSENT cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
ABSENT cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
ABSENT cudaSetDevice(int) { return cudaSuccess; }

namespace upfold::cuda {

bool can_copy_boxes() { return true; }
CublasFound find_cublas() { return {"absent", "13.0.0", ""}; }
void* cublas_handle(int) { return const_cast<char*>(""); }

}  // namespace upfold::cuda
