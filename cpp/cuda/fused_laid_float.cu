// The gradient of the input by taps that are laid out in shared memory: its kernels for float32.
#include "fused_laid_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAID(float, UPFOLD_LAID_FLOAT_TILES)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_laid<float>(const Launch&, const LaidPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
