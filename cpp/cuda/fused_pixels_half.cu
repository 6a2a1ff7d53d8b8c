// The fused method's kernels whose rows are pixels, for float16.
#include "fused_pixels_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_PIXELS(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_pixels<__half>(const Launch&, const FusedPlan&, const FusedOperands&, int);

}  // namespace upfold::cuda
#endif
