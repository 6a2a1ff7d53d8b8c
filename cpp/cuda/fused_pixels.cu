// The fused method's kernels whose rows are pixels, for float32 rounded to TF32.
#include "fused_pixels_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_PIXELS(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_pixels<float>(const Launch&, const FusedPlan&, const FusedOperands&, int);

}  // namespace upfold::cuda
#endif
