// The kernels of the fused gradient of the input, for bfloat16.
#include "fused_input_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_INPUTS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_input<__nv_bfloat16>(const Launch&, const InputPlan&, const FusedInputOperands&, int);

}  // namespace upfold::cuda
#endif
