// The fused gradient of the weight whose channels are innermost: its kernels for bfloat16.
#include "fused_weight_last_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_LAST(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_weight_last<__nv_bfloat16>(const Launch&, const WeightLastPlan&, std::int64_t, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
