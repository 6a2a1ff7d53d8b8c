// The fused method for bfloat16.
#include "fused_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_FUSED(__nv_bfloat16)
#ifndef __CUDACC_RTC__
template void run_fused<__nv_bfloat16>(const Launch&, const FusedPlan&, const FusedOperands&, int);
#endif

}  // namespace upfold::cuda
