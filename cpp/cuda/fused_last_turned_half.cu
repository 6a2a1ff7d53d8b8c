// The fused method by boxes of channels: its turned tiles for float16.
#include "fused_last_turned_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_TURNED(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_turned<__half>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
