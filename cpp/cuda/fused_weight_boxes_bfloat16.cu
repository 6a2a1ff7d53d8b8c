// The fused gradient of the weight whose operands the copy engine brings: its kernels for bfloat16.
#include "fused_weight_boxes_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_BOXES(__nv_bfloat16, UPFOLD_WEIGHT_BOX_HALF_READS)
UPFOLD_INSTANTIATE_WEIGHT_SUMS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_fused_weight_boxes<__nv_bfloat16>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
