// Host side of a launch: the checked call, the device for the time of a call, and the typed kernel launch.
#pragma once

#include <cuda_runtime.h>

#include "../error.h"
#include "api.h"

namespace upfold::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(concat(what, " failed: ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)));
}

// Makes `device` current until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check(cudaSetDevice(device), concat("cudaSetDevice(", device, ")").c_str());
    changed_ = device != previous_;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Bytes of shared memory that a device has, at most for one block and for one multiprocessor.
struct SharedMemory {
  std::int64_t of_block, of_multiprocessor;
};
inline SharedMemory shared_memory(int device) {
  int block = 0, multiprocessor = 0;
  check(cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), "cudaDeviceGetAttribute");
  return {block, multiprocessor};
}

template <typename T>
struct Exactly {
  using Type = T;
};

// A status of this launch alone: cudaGetLastError would also report, and swallow, an earlier failure of somebody else's.
template <typename... Parameters>
void launch_kernel(const char* name, void (*kernel)(Parameters...), const Launch& launch, unsigned blocks, unsigned threads,
                   typename Exactly<Parameters>::Type... arguments) {
  void* pointers[] = {static_cast<void*>(&arguments)...};
  const cudaError_t status = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), pointers, 0,
                                              reinterpret_cast<cudaStream_t>(launch.stream));
  if (status == cudaSuccess) return;  // the text below takes longer than a launch
  check(status,
        concat("launch of ", name, " with ", blocks, " blocks of ", threads, " threads on device ", launch.device).c_str());
}

// With shared memory of the size that the call gives.
struct Grid {
  unsigned blocks, threads;
  int shared_bytes;  // beside the kernel's own
};

template <typename... Parameters>
void launch_grid(const char* name, void (*kernel)(Parameters...), const Launch& launch, const Grid& grid,
                 typename Exactly<Parameters>::Type... arguments) {
  void* pointers[] = {static_cast<void*>(&arguments)...};
  const auto function = reinterpret_cast<const void*>(kernel);
  // Beyond 48 KiB together with the kernel's own, which stays below the rest, a launch is refused unless the kernel asked for it.
  constexpr int kAlwaysAllowed = 32 << 10;
  if (grid.shared_bytes > kAlwaysAllowed) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes),
          concat("shared memory of ", name).c_str());
  }
  check(cudaLaunchKernel(function, dim3(grid.blocks), dim3(grid.threads), pointers, std::size_t(grid.shared_bytes),
                         reinterpret_cast<cudaStream_t>(launch.stream)),
        concat("launch of ", name, " with ", grid.blocks, " blocks of ", grid.threads, " threads on device ", launch.device)
            .c_str());
}

}  // namespace upfold::cuda
