// The fused method by boxes of channels: its tiles whose warpgroups alternate, for float32 rounded to TF32.
#include "fused_last_alternating_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_ALTERNATING(float)
UPFOLD_INSTANTIATE_LAST_PLANES(float)
UPFOLD_INSTANTIATE_LAST_TO_PLANES(float)
UPFOLD_INSTANTIATE_LAST_WHOLE(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_alternating<float>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
