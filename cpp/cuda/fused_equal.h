// The fused method where kernel and stride are equal and nothing is padded, with every tensor contiguous.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Rows (output channels times taps) and units (input pixels) of a block, blocks of a multiprocessor, threads.
struct EqualTileSize {
  int rows, units, blocks, threads;
};
std::vector<EqualTileSize> equal_tiles();
bool equal_fits(int device, const Problem& p, int config);
void fused_equal(const Launch& launch, const Problem& p, const FusedOperands& operands, int config);

}  // namespace upfold::cuda
