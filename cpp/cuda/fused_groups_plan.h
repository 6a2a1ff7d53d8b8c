// How the fused gradients of groups cut a problem into tiles.
#pragma once

#include "fused_api.h"
#include "fused_groups.cuh"
#include "launch.cuh"

namespace upfold::cuda {

// What the planner knows of a tile; its type does not matter.
struct GroupsTileSize {
  int blocks, channels, resident, segments, taps, sums;
};

struct GroupsPlan {
  bool possible = false;
  bool x_in_vectors = false;  // its address has to be a multiple of 16
  GroupsJob job = {};
  GroupsTileSize tile = {};
  unsigned blocks = 0, sum_blocks = 0;
  int shared_bytes = 0;
  std::int64_t workspace_bytes = 0, loads = 0;  // loads: of the warps of a block, of a tile
};

}  // namespace upfold::cuda
