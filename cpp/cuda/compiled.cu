namespace upfold::cuda {

__global__ void compiled_kernel() {}

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>
#include <atomic>

#include "launch.cuh"

namespace upfold::cuda {

int code_capability(int device) {
  constexpr int kMostDevices = 64;
  static std::atomic<int> answers[kMostDevices];  // 0: not known
  require(device >= 0 && device < kMostDevices, "device = ", device, "; at most ", kMostDevices, " are supported");
  int answer = answers[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    const DeviceScope scope(device);
    int major = 0, minor = 0;
    cudaFuncAttributes attributes;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(compiled_kernel)), "cudaFuncGetAttributes");
    answer = std::min(major * 10 + minor, attributes.ptxVersion);
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer;
}

}  // namespace upfold::cuda
#endif
