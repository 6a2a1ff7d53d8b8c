// The row kernel of the direct method for float16.
#include "direct_rows_kernel.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_PLAIN_ROWS(__half)
UPFOLD_INSTANTIATE_NARROW_ROWS(__half)
#ifndef __CUDACC_RTC__
template void run_rows<__half>(const Launch&, const Problem&, const DirectOperands&, const RowsPlan&, const RowsJob&);
#endif

}  // namespace upfold::cuda
