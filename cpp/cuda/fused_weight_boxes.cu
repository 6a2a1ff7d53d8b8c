// The fused gradient of the weight whose operands the copy engine brings: its kernels for float32 rounded to TF32.
#include "fused_weight_boxes_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_BOXES(float, UPFOLD_WEIGHT_FLOAT_READS)
UPFOLD_INSTANTIATE_WEIGHT_PACK(std::uint32_t)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_fused_weight_boxes<float>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
