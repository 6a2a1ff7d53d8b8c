// The fused method where the channels of a group are few, and for full float32: rows of a product are pairs of an output channel
// and a phase, so that few channels fill a tile of the tensor cores, and an output row is stored whole.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Pairs of channels and phases, and units, of a block; blocks of a multiprocessor; threads.
struct PhaseTileSize {
  int rows, units, blocks, threads;
};
struct PhasePlan;

std::vector<PhaseTileSize> phase_tiles();
// `exact`: float32 is multiplied as sums of two TF32, three products for each, instead of rounded to one.
std::shared_ptr<const PhasePlan> plan_phases(int device, const Problem& p, int config, std::int64_t alignment,
                                             bool exact);  // null: none fits
FusedWork phase_work(const PhasePlan& plan);
void fused_phases(const Launch& launch, const Problem& p, const PhasePlan& plan, bool exact, const FusedOperands& operands,
                  int config);

}  // namespace upfold::cuda
