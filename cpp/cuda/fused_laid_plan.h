// How the gradient of the input by taps that are laid out cuts a problem into tiles.
#pragma once

#include "boxes.h"
#include "fused_api.h"
#include "fused_laid.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct LaidPlan {
  bool possible = false;
  LaidEdges edges = kLaidInside;
  int kernel = 0;  // its rows, and values of each
  LaidJob job = {};
  BoxTensor w = {}, planes = {};  // planes: of y', where they come in boxes
  int shared_bytes = 0;
};

}  // namespace upfold::cuda
