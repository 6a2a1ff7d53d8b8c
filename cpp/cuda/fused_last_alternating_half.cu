// The fused method by boxes of channels: its tiles whose warpgroups alternate, for float16.
#include "fused_last_alternating_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_ALTERNATING(__half)
UPFOLD_INSTANTIATE_LAST_PLANES(__half)
UPFOLD_INSTANTIATE_LAST_TO_PLANES(__half)
UPFOLD_INSTANTIATE_LAST_WHOLE(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_alternating<__half>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
