// The fused method's kernels of warpgroups for float32 rounded to TF32.
#include "fused_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WARPGROUPS(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_warpgroups<float>(const Launch&, const FusedPlan&, const FusedOperands&, int);
template bool has_warpgroups<float>();

}  // namespace upfold::cuda
#endif
