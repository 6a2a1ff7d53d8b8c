// The fused method by boxes of channels: its tiles for float32 in full, by three products of TF32 for each.
#include "fused_last_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST_EXACT(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

void run_last_exact(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                    const LastOperands& operands) {
#define UPFOLD_RUN(index, type, ...)                                                            \
  if (config == index && part.job.joined > 0)                                                   \
    run_last_tile<float, LastExact<LastTile<__VA_ARGS__>>, true>(launch, plan, part, operands); \
  if (config == index && part.job.joined == 0)                                                  \
    run_last_tile<float, LastExact<LastTile<__VA_ARGS__>>, false>(launch, plan, part, operands);
  UPFOLD_LAST_EXACT_TILES(UPFOLD_RUN, float)
#undef UPFOLD_RUN
#define UPFOLD_RUN(index, type, ...) \
  if (config == index) run_last_tile<float, LastExact<LastTurnedTile<__VA_ARGS__>>, true>(launch, plan, part, operands);
  UPFOLD_LAST_EXACT_TURNED_TILES(UPFOLD_RUN, float)
#undef UPFOLD_RUN
}

}  // namespace upfold::cuda
#endif
