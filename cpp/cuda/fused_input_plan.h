// How the fused gradient of the input cuts a problem into blocks.
#pragma once

#include "api.h"
#include "boxes.h"
#include "fused_input.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct InputTileSize {
  int pixels, channels, turn;
  InputReads reads;
  bool of_words;    // whether it takes the weight as it lies
  bool stages;      // whether floats go through shared memory on their way to x
  int later_bytes;  // of shared memory, where they can do so later; else 0
};

struct InputPlan {
  bool possible = false;
  InputJob job = {};
  unsigned blocks = 0, pack_blocks = 0;  // tiles, each of a part of the reduction; blocks that pack the weight
  int shared_bytes = 0, pack_bytes = 0;
  std::int32_t pack_pitch = 0;
  std::int64_t combinations = 1;  // of groups, channel tiles and parts of the reduction
  std::int64_t packed_bytes = 0, workspace_bytes = 0;
  BoxTensor weight = {};  // of words
};

}  // namespace upfold::cuda
