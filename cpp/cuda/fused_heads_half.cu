// The fused method for heads: its kernels for float16.
#include "fused_heads_launch.cuh"

namespace upfold::cuda {

UPFOLD_HEADS_NARROW(UPFOLD_INSTANTIATE_HEADS_KERNEL, __half)
UPFOLD_HEADS_WIDE(UPFOLD_INSTANTIATE_HEADS_KERNEL, __half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_heads<__half>(const Launch&, const HeadsPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
