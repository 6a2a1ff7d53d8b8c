// The fused gradient of the weight: its kernels for float16.
#include "fused_weight_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT(__half, UPFOLD_WEIGHT_HALF_READS)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_fused_weight<__half>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
