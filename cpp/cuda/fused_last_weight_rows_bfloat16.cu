// The fused method by boxes of channels: its tiles of rows of the weight, for bfloat16.
#include "fused_last_weight_rows_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_WEIGHT_ROWS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last_weight_rows<__nv_bfloat16>(const Launch&, const LastPlan&, int, const LastLaunch&, const LastOperands&);

}  // namespace upfold::cuda
#endif
