// The fused method for heads: its kernels for bfloat16.
#include "fused_heads_launch.cuh"

namespace upfold::cuda {

UPFOLD_HEADS_NARROW(UPFOLD_INSTANTIATE_HEADS_KERNEL, __nv_bfloat16)
UPFOLD_HEADS_WIDE(UPFOLD_INSTANTIATE_HEADS_KERNEL, __nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_heads<__nv_bfloat16>(const Launch&, const HeadsPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
