// The fused method whose columns stay in shared memory: its kernels for bfloat16.
#include "fused_columns_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_COLUMNS(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_columns<__nv_bfloat16>(const Launch&, const ColumnsPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
