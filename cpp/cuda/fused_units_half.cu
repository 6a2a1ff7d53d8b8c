// The fused method whose rows are units and whose columns are channels and phases: its kernels for float16.
#include "fused_units_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_UNITS(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_units<__half>(const Launch&, const UnitsPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
