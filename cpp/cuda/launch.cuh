// Host side of a launch: the checked call, the device for the time of a call, and the typed kernel launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

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

// What a launch takes beside the arguments.
struct Grid {
  unsigned blocks, threads;
  int shared_bytes;       // beside the kernel's own
  bool overlaps = false;  // may begin before the kernel ahead of it on the stream has ended, and awaits that itself
};

// Whether an overlapping launch is one: capability 9.0, code compiled for it (older code that the driver translates does not
// wait), and a driver whose graphs hold such launches. Asked once for each device; kernels are all compiled alike.
inline bool can_overlap(const void* kernel, int device) {
#if CUDART_VERSION >= 12030
  constexpr int kMostDevices = 64, kOldestDriver = 12030;
  static std::atomic<int> answers[kMostDevices];  // 0: not known, 1: no, 2: yes
  if (device < 0 || device >= kMostDevices) return false;
  int answer = answers[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    int major = 0, driver = 0;
    cudaFuncAttributes attributes;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    answer = major >= 9 && driver >= kOldestDriver && attributes.ptxVersion >= 90 ? 2 : 1;
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 2;
#else
  return (void)kernel, (void)device, false;
#endif
}

inline cudaError_t start_grid(const void* kernel, const Launch& launch, const Grid& grid, void** arguments) {
  const auto stream = reinterpret_cast<cudaStream_t>(launch.stream);
#if CUDART_VERSION >= 12030
  if (grid.overlaps && can_overlap(kernel, launch.device)) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.blocks), config.blockDim = dim3(grid.threads), config.stream = stream;
    config.dynamicSmemBytes = std::size_t(grid.shared_bytes), config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelExC(&config, kernel, arguments);
  }
#endif
  return cudaLaunchKernel(kernel, dim3(grid.blocks), dim3(grid.threads), arguments, std::size_t(grid.shared_bytes), stream);
}

// The status is of this launch alone: cudaGetLastError would also report, and swallow, an earlier failure of somebody else's.
template <typename... Parameters>
void launch_grid(const char* name, void (*kernel)(Parameters...), const Launch& launch, const Grid& grid,
                 typename Exactly<Parameters>::Type... arguments) {
  void* pointers[] = {static_cast<void*>(&arguments)...};
  const auto function = reinterpret_cast<const void*>(kernel);
  // Beyond 48 KiB together with the kernel's own, which stays below the rest, a launch is refused unless the kernel asked for it.
  constexpr int kAlwaysAllowed = 32 << 10;
  if (grid.shared_bytes > kAlwaysAllowed) {
    const cudaError_t status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes);
    if (status != cudaSuccess) check(status, concat("shared memory of ", name).c_str());
  }
  const cudaError_t status = start_grid(function, launch, grid, pointers);
  if (status == cudaSuccess) return;  // the text below takes longer than a launch
  check(status,
        concat("launch of ", name, " with ", grid.blocks, " blocks of ", grid.threads, " threads on device ", launch.device)
            .c_str());
}

template <typename... Parameters>
void launch_kernel(const char* name, void (*kernel)(Parameters...), const Launch& launch, unsigned blocks, unsigned threads,
                   typename Exactly<Parameters>::Type... arguments) {
  launch_grid(name, kernel, launch, Grid{blocks, threads, 0}, arguments...);
}

}  // namespace upfold::cuda
