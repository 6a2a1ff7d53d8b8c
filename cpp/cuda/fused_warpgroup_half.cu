// The fused method's kernels of warpgroups for float16.
#include "fused_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WARPGROUPS(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_warpgroups<__half>(const Launch&, const FusedPlan&, const FusedOperands&, int);

}  // namespace upfold::cuda
#endif
