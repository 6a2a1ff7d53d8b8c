// The tiles of rows of the weight of the fused method by boxes of channels, of one type, and their launches.
#pragma once

#include "fused_last_launch.cuh"

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template <typename Value>
void run_last_weight_rows(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                          const LastOperands& operands) {
#define UPFOLD_RUN(index, type, ...) \
  if (config == index)               \
    run_last_tile<Value, LastWeightRowsTile<__VA_ARGS__>, false, LastWeights::kByResult>(launch, plan, part, operands);
  UPFOLD_LAST_WEIGHT_ROWS_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

}  // namespace upfold::cuda
#endif
