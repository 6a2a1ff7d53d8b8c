// How the fused method whose channels are innermost cuts a problem into blocks.
#pragma once

#include "api.h"
#include "boxes.h"
#include "fused_last_kernel.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct LastTileSize {
  int m, columns, phases, blocks, vectors, threads;
};

struct LastPlan {
  bool possible = false;
  LastJob job = {};
  LastPackJob pack = {};
  BoxTensor source = {};
  int shared_bytes = 0;
  std::int64_t packed_bytes = 0;
  std::int64_t patches = 0;  // of all sets
};

}  // namespace upfold::cuda
