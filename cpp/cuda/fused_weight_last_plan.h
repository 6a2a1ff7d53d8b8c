// How the fused gradient of the weight whose channels are innermost cuts a problem into blocks.
#pragma once

#include <vector>

#include "boxes.h"
#include "fused_last_source.cuh"
#include "fused_weight_last.cuh"
#include "fused_weight_last.h"
#include "fused_weight_last_sum.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct WeightLastTileSize {
  int row_groups, units, first8, second8;
  bool floats;  // of float32, else of 16-bit values
  int threads;
  int slots() const { return second8 > 0 ? 2 : 1; }
  int columns8() const { return first8 + second8; }  // of a unit
  int set_columns8() const { return units * columns8(); }
};

// An operand: how it is packed, if it is, and the boxes of it, of one launch.
struct WeightLastOperand {
  std::int64_t packed_bytes = 0;  // 0: it is read as it lies
  LastSourceJob pack = {};
  std::int64_t sample = 0;            // elements from sample to sample of the operand as it lies
  std::vector<BoxTensor> boxes = {};  // of x one; of y one for each residue, and
  std::vector<std::int64_t> at = {};  // bytes from the operand's address to it
  std::int64_t sample_size = 1;       // of the last axis of the boxes: of a sample
};

struct WeightLastPlan {
  bool possible = false;
  bool planes = false;  // x is read so
  WeightLastJob job = {};
  WeightLastSumJob sum = {};
  WeightLastOperand x, y;
  std::int64_t batch = 0, launches = 1;  // samples of one launch
  std::int64_t tiles = 0, parts = 0;     // of sums, of a launch; cut among blocks
  std::int64_t partial_bytes = 0;
  double store_cycles = 0;  // of a tile, where blocks store w
  double microseconds = 0;  // of what follows packing, as parts are weighed
  unsigned sum_blocks = 0, threads = 0;
  int shared_bytes = 0;
};

}  // namespace upfold::cuda
