// The fused gradients of groups: their kernels for bfloat16.
#include "fused_groups_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_GROUPS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_groups<__nv_bfloat16>(const Launch&, const GroupsPlan&, bool, const FusedOperands&);

}  // namespace upfold::cuda
#endif
