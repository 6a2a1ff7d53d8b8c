// Which GPU's code runs on a device.
#pragma once

namespace upfold::cuda {

// The compute capability, times ten, of the code that the device runs: its own, or an older one's that the driver translates.
// Asked once for each device; all kernels are compiled alike.
int code_capability(int device);

}  // namespace upfold::cuda
