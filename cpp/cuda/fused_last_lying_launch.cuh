// The fused method by boxes of channels with weights of 16 bits that are copied as they lie, of one type, and its launches.
#pragma once

#include "fused_last_launch.cuh"

#ifndef __CUDACC_RTC__
namespace upfold::cuda {

template <typename Value>
void run_last_lying(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                    const LastOperands& operands) {
  const bool by_result = plan.weights == LastWeights::kByResult;
#define UPFOLD_RUN(index, type, ...)                                                                          \
  if (config == index && by_result)                                                                           \
    run_last_tile<Value, LastTile<__VA_ARGS__>, false, LastWeights::kByResult>(launch, plan, part, operands); \
  if (config == index && !by_result)                                                                          \
    run_last_tile<Value, LastTile<__VA_ARGS__>, false, LastWeights::kByReduction>(launch, plan, part, operands);
  UPFOLD_LAST_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

}  // namespace upfold::cuda
#endif
