// The fused method of whole maps: its kernels for bfloat16.
#include "fused_maps_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_MAPS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_maps<__nv_bfloat16>(const Launch&, const MapsPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
