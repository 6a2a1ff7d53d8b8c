// How the fused method whose rows are units cuts a problem into blocks.
#pragma once

#include "fused_api.h"
#include "fused_units.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct UnitsPlan {
  bool possible = false;
  UnitsJob job = {};
  int shared_bytes = 0;
  FusedUnitsWork work = {};
  double cycles = 0;  // predicted
};

}  // namespace upfold::cuda
