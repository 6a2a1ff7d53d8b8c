// How the gradient of the weight by taps that are laid out cuts a problem into tiles and parts.
#pragma once

#include "boxes.h"
#include "fused_weight_laid.cuh"
#include "fused_weight_laid.h"
#include "fused_weight_pack_launch.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct WeightLaidPlan {
  bool possible = false;
  bool paired = false;
  int kernel = 0;  // its rows, and values of each
  WeightLaidJob job = {};
  WeightLaidPackJob pack = {};  // at most one of these
  FusedWeightPackJob pad = {};
  bool packs_fours = false;  // four pixels of x at a time
  WeightLaidSumJob sum = {};
  BoxTensor x = {}, y = {};
  std::int64_t tiles = 0, clusters = 1;
  std::int64_t partial_bytes = 0, row_sums_bytes = 0, packed_bytes = 0;  // one behind the other
  int shared_bytes = 0;
};

}  // namespace upfold::cuda
