// The row kernel of the direct method for bfloat16.
#include "direct_rows_kernel.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_PLAIN_ROWS(__nv_bfloat16)
UPFOLD_INSTANTIATE_NARROW_ROWS(__nv_bfloat16)
#ifndef __CUDACC_RTC__
template void run_rows<__nv_bfloat16>(const Launch&, const Problem&, const DirectOperands&, const RowsPlan&, const RowsJob&);
#endif

}  // namespace upfold::cuda
