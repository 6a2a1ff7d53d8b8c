// The fused method whose channels are innermost: its kernels for float16.
#include "fused_last_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST(__half, std::uint16_t)
UPFOLD_INSTANTIATE_LAST_SOURCE(std::uint16_t)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template void run_last<__half>(const Launch&, const LastPlan&, int, const LastOperands&);
template void pack_last<__half>(const Launch&, const LastPlan&, const void*, void*);

}  // namespace upfold::cuda
#endif
