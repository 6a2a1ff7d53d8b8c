// What the module finds on this machine.
#include <build_info.h>
#include <cuda_runtime_api.h>

#include "../error.h"
#include "api.h"

namespace upfold::cuda {
namespace {

// Oldest driver branch of each toolkit generation: minor versions are compatible within it.
std::string driver_floor(int compiled_version) {
  switch (compiled_version / 1000) {
    case 11:
      return "R450";
    case 12:
      return "R525";
    case 13:
      return "R580";
    default:
      return concat("that of CUDA ", compiled_version / 1000, ".0");
  }
}

}  // namespace

Info info() {
  Info found{};
  found.compiled_version = CUDART_VERSION;
  found.architectures = build_info()["cuda_architectures"];
  found.driver_floor = driver_floor(CUDART_VERSION);
  cudaRuntimeGetVersion(&found.runtime_version);
  if (cudaDriverGetVersion(&found.driver_version) != cudaSuccess) found.driver_version = 0;
  int count = 0;
  const cudaError_t status = found.driver_version == 0 ? cudaErrorInsufficientDriver : cudaGetDeviceCount(&count);
  if (found.driver_version == 0) {
    found.no_device_reason = "no NVIDIA driver is installed";
  } else if (status != cudaSuccess) {
    found.no_device_reason = concat(cudaGetErrorName(status), ": ", cudaGetErrorString(status),
                                    "; the module needs driver branch ", found.driver_floor, " or newer");
  } else if (count == 0) {
    found.no_device_reason = "the driver sees no GPU";
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    found.devices.push_back({properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                             static_cast<std::int64_t>(properties.totalGlobalMem)});
  }
  cudaGetLastError();  // a failed query must not be taken for a failure of the caller's next launch
  return found;
}

}  // namespace upfold::cuda
