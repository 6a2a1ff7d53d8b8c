// How the fused method for heads cuts a problem into runs.
#pragma once

#include "boxes.h"
#include "fused_api.h"
#include "fused_heads.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct HeadsPlan {
  bool possible = false;
  bool odd = false;  // the padding of the width
  HeadsJob job = {};
  BoxTensor x = {};
  int warps = 0, blocks = 0, shared_bytes = 0;
  std::int64_t turns = 0;  // runs of a warp
};

}  // namespace upfold::cuda
