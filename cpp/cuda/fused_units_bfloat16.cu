// The fused method whose rows are units and whose columns are channels and phases: its kernels for bfloat16.
#include "fused_units_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_UNITS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_units<__nv_bfloat16>(const Launch&, const UnitsPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
