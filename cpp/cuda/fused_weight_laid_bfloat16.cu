// The gradient of the weight by taps that are laid out in shared memory: its kernels for bfloat16.
#include "fused_weight_laid_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_LAID(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_weight_laid<__nv_bfloat16>(const Launch&, const WeightLaidPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
