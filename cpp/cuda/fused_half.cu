// The fused method for float16.
#include "fused_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_FUSED(__half)
#ifndef __CUDACC_RTC__
template void run_fused<__half>(const Launch&, const FusedPlan&, const FusedOperands&, int);
#endif

}  // namespace upfold::cuda
