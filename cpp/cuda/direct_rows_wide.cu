// The row kernel of the direct method for float64 and complex numbers.
#include "direct_rows_kernel.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_PLAIN_ROWS(double)
UPFOLD_INSTANTIATE_PLAIN_ROWS(Complex<float>)
UPFOLD_INSTANTIATE_PLAIN_ROWS(Complex<double>)
#ifndef __CUDACC_RTC__
template void run_rows<double>(const Launch&, const Problem&, const DirectOperands&, const RowsPlan&, const RowsJob&);
template void run_rows<Complex<float>>(const Launch&, const Problem&, const DirectOperands&, const RowsPlan&, const RowsJob&);
template void run_rows<Complex<double>>(const Launch&, const Problem&, const DirectOperands&, const RowsPlan&, const RowsJob&);
#endif

}  // namespace upfold::cuda
