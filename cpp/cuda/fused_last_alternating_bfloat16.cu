// The fused method by boxes of channels: its tiles whose warpgroups alternate, for bfloat16.
#include "fused_last_alternating_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_ALTERNATING(__nv_bfloat16)
UPFOLD_INSTANTIATE_LAST_PLANES(__nv_bfloat16)
UPFOLD_INSTANTIATE_LAST_TO_PLANES(__nv_bfloat16)
UPFOLD_INSTANTIATE_LAST_WHOLE(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_alternating<__nv_bfloat16>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
