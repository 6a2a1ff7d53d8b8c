// The kernels of the fused gradient of the input, for float16.
#include "fused_input_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_INPUTS(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_input<__half>(const Launch&, const InputPlan&, const FusedInputOperands&, int);

}  // namespace upfold::cuda
#endif
