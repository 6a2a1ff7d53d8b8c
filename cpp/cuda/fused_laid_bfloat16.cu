// The gradient of the input by taps that are laid out in shared memory: its kernels for bfloat16.
#include "fused_laid_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAID(__nv_bfloat16, UPFOLD_LAID_HALF_TILES)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_laid<__nv_bfloat16>(const Launch&, const LaidPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
