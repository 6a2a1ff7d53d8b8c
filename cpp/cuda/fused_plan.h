// How the fused method cuts a problem into blocks.
#pragma once

#include "api.h"
#include "fused.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct FusedPlan {
  bool possible;  // false: a count does not fit; nothing else holds then
  FusedJob job;
  unsigned blocks, pack_blocks, input_blocks;  // input_blocks pack x, where the tile wants it; no blocks: no such launch
  int shared_bytes;
  std::int64_t batch;         // samples of one launch
  std::int64_t combinations;  // of parts of the reduction, channel tiles and sets; of blocks whose rows are pixels
  // Of the lists of shifts; with the packed weight; with packed x; with the partial sums of a split reduction.
  std::int64_t list_bytes, weight_end, packed_end, workspace_bytes;
};

}  // namespace upfold::cuda
