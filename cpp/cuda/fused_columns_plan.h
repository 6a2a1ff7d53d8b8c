// How the fused method whose columns stay in shared memory cuts a problem into walks.
#pragma once

#include "boxes.h"
#include "fused_api.h"
#include "fused_columns.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct ColumnsPlan {
  bool possible = false;
  bool last = false;  // channels are innermost in x
  int n8 = 0;         // groups of eight columns of a product
  ColumnsJob job = {};
  BoxTensor x = {};
  int shared_bytes = 0;
  FusedColumnsWork work = {};
  double cycles = 0;  // predicted
};

}  // namespace upfold::cuda
