// How the fused method of whole maps cuts a problem into tiles.
#pragma once

#include "boxes.h"
#include "fused_api.h"
#include "fused_maps.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct MapsPlan {
  bool possible = false;
  int each = 0;  // taps of an output
  bool by_lanes = false;
  MapsJob job = {};
  BoxTensor x = {}, w = {};
  int shared_bytes = 0;
};

}  // namespace upfold::cuda
