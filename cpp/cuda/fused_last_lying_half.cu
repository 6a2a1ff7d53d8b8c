// The fused method by boxes of channels with weights that are copied as they lie: its kernels for float16.
#include "fused_last_lying_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_LYING(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_lying<__half>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
