// The fused method by boxes of channels: its tiles of runs, for float32 rounded to TF32.
#include "fused_last_runs_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_RUNS(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_runs<float>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
