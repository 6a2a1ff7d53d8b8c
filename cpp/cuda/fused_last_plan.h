// How the fused method whose channels are innermost cuts a problem into blocks.
#pragma once

#include "api.h"
#include "boxes.h"
#include "fused_last_kernel.cuh"
#include "fused_last_source.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct LastTileSize {
  int m, columns, phases, row_phases, blocks, vectors, threads, warpgroups;
  int product, products;                                   // positions of a product; products of other positions
  bool turned, alternates, planes, to_planes, transposes;  // planes: of the source, read as they lie
  bool in_turn;                                            // there are kernels for pairs whose phases take turns
  bool whole;                                              // of sets that are whole alone
  bool exact, shares, runs;
  bool weight_rows, row_boxes;  // row_boxes: of those, results that the copy engine stores
};
template <typename Tile>
constexpr LastTileSize last_size_of() {
  return {Tile::kM,          Tile::kColumns,    Tile::kPhases,     Tile::kRowPhases, Tile::kBlocks, Tile::kVectors,
          Tile::kThreads,    Tile::kWarpgroups, Tile::kProduct,    Tile::kProducts,  Tile::kTurned, Tile::kAlternates,
          Tile::kFromPlanes, Tile::kToPlanes,   Tile::kTransposes, kHasInTurn<Tile>, Tile::kWhole,  Tile::kExact,
          kHasSharing<Tile>, Tile::kRuns,       Tile::kWeightRows, Tile::kRowBoxes};
}

struct LastPlan {
  bool possible = false;
  LastJob job = {};
  LastPackJob pack = {};
  BoxTensor source = {};
  LastWeights weights = LastWeights::kPacked;
  BoxTensor lying = {};   // the weights where they are not packed
  BoxTensor result = {};  // where it is stored as boxes
  int shared_bytes = 0;
  LastSourceJob source_pack = {};
  // Of packed weights, and of the packed source of one launch; 0: they are read as they lie.
  std::int64_t packed_bytes = 0, source_bytes = 0;
  std::int64_t batch = 0;             // samples of one launch
  std::int64_t tiles_of_samples = 0;  // of as many samples as a tile has
  std::int64_t patches = 0;           // of all sets
  std::int64_t patch_copied = 0;      // bytes that are copied of the source for each
  bool mixes = false;                 // sets differ in what they multiply, and their weights do not stay with blocks
};

}  // namespace upfold::cuda
