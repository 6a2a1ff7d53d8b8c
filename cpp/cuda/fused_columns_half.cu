// The fused method whose columns stay in shared memory: its kernels for float16.
#include "fused_columns_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_COLUMNS(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_columns<__half>(const Launch&, const ColumnsPlan&, int, const FusedOperands&);

}  // namespace upfold::cuda
#endif
