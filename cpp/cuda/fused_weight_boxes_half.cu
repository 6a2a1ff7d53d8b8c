// The fused gradient of the weight whose operands the copy engine brings: its kernels for float16.
#include "fused_weight_boxes_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_BOXES(__half, UPFOLD_WEIGHT_BOX_HALF_READS)
UPFOLD_INSTANTIATE_WEIGHT_SUMS(__half)
UPFOLD_INSTANTIATE_WEIGHT_PACK(std::uint16_t)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_fused_weight_boxes<__half>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
