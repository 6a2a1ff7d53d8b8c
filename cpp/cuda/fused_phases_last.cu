// The fused method with pairs of a channel and a phase as rows: its kernels where x or y is channels-last.
#include "fused_phases_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_ALL_PHASES(true)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_phases<true>(const Launch&, Dtype, const PhasePlan&, bool, const FusedOperands&, int);

}  // namespace upfold::cuda
#endif
