// The tiles of the fused method by boxes of channels whose warpgroups alternate, of one type, and their launches.
#pragma once

#include "fused_last_launch.cuh"

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template <typename Value>
void run_last_alternating(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                          const LastOperands& operands) {
#define UPFOLD_RUN(index, type, ...) \
  if (config == index) run_last_tile<Value, LastAlternatingTile<__VA_ARGS__>, false>(launch, plan, part, operands);
  UPFOLD_LAST_ALTERNATING_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
#define UPFOLD_RUN(index, type, ...) \
  if (config == index) run_last_tile<Value, LastPlanesTile<__VA_ARGS__>, true>(launch, plan, part, operands);
  UPFOLD_LAST_PLANES_TILES(UPFOLD_RUN, Value)
  UPFOLD_LAST_PLANES_OF_THREE_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
#define UPFOLD_RUN(index, type, ...)                                                                                           \
  if (config == index && part.job.whole) run_last_tile<Value, LastWholeTile<__VA_ARGS__>, true>(launch, plan, part, operands); \
  if (config == index && !part.job.whole) run_last_tile<Value, LastToPlanesTile<__VA_ARGS__>, true>(launch, plan, part, operands);
  UPFOLD_LAST_TO_PLANES_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
#define UPFOLD_RUN(index, type, ...) \
  if (config == index) run_last_tile<Value, LastWholeTile<__VA_ARGS__>, true>(launch, plan, part, operands);
  UPFOLD_LAST_WHOLE_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
#define UPFOLD_RUN(index, type, ...) \
  if (config == index) run_last_tile<Value, LastWholeBoxesTile<__VA_ARGS__>, false>(launch, plan, part, operands);
  UPFOLD_LAST_WHOLE_BOXES_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

}  // namespace upfold::cuda
#endif
