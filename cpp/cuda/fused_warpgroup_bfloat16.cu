// The fused method's kernels of warpgroups for bfloat16.
#include "fused_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WARPGROUPS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_warpgroups<__nv_bfloat16>(const Launch&, const FusedPlan&, const FusedOperands&, int);

}  // namespace upfold::cuda
#endif
