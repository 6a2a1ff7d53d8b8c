// Host side of a launch: the checked call, the device for the time of a call, and the typed kernel launch.
#pragma once

#include <cuda_runtime.h>

#include "../error.h"
#include "api.h"
#include "compiled.h"

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

// Bytes of shared memory that a kernel may count on, at most for one block and for one multiprocessor: what the device has, but
// no more than the one whose code it runs (compiled.h).
struct SharedMemory {
  std::int64_t of_block, of_multiprocessor;
};
inline SharedMemory shared_memory(int device) {
  int block = 0, multiprocessor = 0;
  check(cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), "cudaDeviceGetAttribute");
  const int capability = code_capability(device);
  std::int64_t most = multiprocessor;  // of a multiprocessor; all but one KiB of it for one block, from 8.0 on
  if (capability < 80) {
    most = 64 << 10;
  } else if (capability == 80 || capability == 87) {
    most = 164 << 10;
  } else if (capability < 90) {
    most = 100 << 10;
  }
  const std::int64_t of_block = capability < 80 ? most : most - (1 << 10);
  return {block < of_block ? block : of_block, multiprocessor < most ? multiprocessor : most};
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
  unsigned cluster = 1;   // blocks that run together and see each other's shared memory: at most 8, of code of capability 9.0
};

// Whether an overlapping launch is one: code of capability 9.0 (older code that the driver translates does not wait), and a
// driver whose graphs hold such launches.
inline bool can_overlap(int device) {
#if CUDART_VERSION >= 12030
  constexpr int kOldestDriver = 12030;
  static const int driver = [] {
    int version = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return version;
  }();
  return driver >= kOldestDriver && code_capability(device) >= 90;
#else
  return (void)device, false;
#endif
}

inline cudaError_t start_grid(const void* kernel, const Launch& launch, const Grid& grid, void** arguments) {
  const auto stream = reinterpret_cast<cudaStream_t>(launch.stream);
#if CUDART_VERSION >= 11080
  const bool overlaps = grid.overlaps && can_overlap(launch.device);
  if (overlaps || grid.cluster > 1) {
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (overlaps) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count].val.clusterDim.x = grid.cluster;
      attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
      ++count;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid.blocks), config.blockDim = dim3(grid.threads), config.stream = stream;
    config.dynamicSmemBytes = std::size_t(grid.shared_bytes), config.attrs = attributes, config.numAttrs = count;
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

// The same for a kernel that takes its turn (values.cuh).
template <typename... Parameters>
void launch_in_turn(const char* name, void (*kernel)(Parameters...), const Launch& launch, unsigned blocks, unsigned threads,
                    typename Exactly<Parameters>::Type... arguments) {
  launch_grid(name, kernel, launch, Grid{blocks, threads, 0, true}, arguments...);
}

template <typename... Parameters>
void launch_kernel(const char* name, void (*kernel)(Parameters...), const Launch& launch, unsigned blocks, unsigned threads,
                   typename Exactly<Parameters>::Type... arguments) {
  launch_grid(name, kernel, launch, Grid{blocks, threads, 0}, arguments...);
}

}  // namespace upfold::cuda
