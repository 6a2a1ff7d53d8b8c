// The fused method by boxes of channels: its tiles of runs, for float16.
#include "fused_last_runs_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_RUNS(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_runs<__half>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
