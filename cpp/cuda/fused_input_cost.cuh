// What the planner of the fused gradient of the input aims at, and what reading costs; host code.
#pragma once

#include <algorithm>
#include <vector>

#include "fused_input_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostInputCount = std::int64_t(1) << 30;  // of what the kernels keep in 32 bits
constexpr std::int64_t kInputRawBytes = 20 << 10;                // aim for a chunk of y
constexpr std::int64_t kInputStageBytes = 16 << 10;              // and at most for a buffer of weights that stream
constexpr std::int64_t kInputKeptBytes = 32 << 10;               // and of those that stay
constexpr std::int64_t kInputWeightBytes = 80 << 10;             // and for all that stream
constexpr std::int64_t kInputFixedBytes = 2 << 10;               // of barriers
constexpr std::int64_t kInputAimBlocks = 132;                    // where the reduction can be split
constexpr std::int64_t kLeastInputSteps = 16;                    // of a part of the reduction
constexpr std::uint32_t kLeastLaterTiles = 264;                  // where results are stored later: two of a block (H100)
constexpr double kRunsCost = 25;             // of a tile whose copies are runs, as cost_of has those of grains
constexpr std::int64_t kMostSplitWaves = 8;  // of tiles, of which the last one is worth a split

// Wavefronts in which a warp reads one entry: lanes read `width` words, those of each remainder of 4 from `from` on, of pixels
// that are `step` words apart.
inline int read_conflicts(const std::int64_t (&from)[4], double step, int width) {
  int most = 0;
  const int together = 32 / width;
  for (int first = 0; first < 32; first += together) {
    std::vector<std::int64_t> seen[32];
    for (int lane = first; lane < first + together; ++lane) {
      for (int word = 0; word < width; ++word) {
        const std::int64_t at = std::int64_t(lane / 4 * step) + from[lane % 4] + word;
        std::vector<std::int64_t>& bank = seen[at % 32];
        if (std::find(bank.begin(), bank.end(), at) == bank.end()) bank.push_back(at);
        most = std::max(most, int(bank.size()));
      }
    }
  }
  return most;
}

}  // namespace
}  // namespace upfold::cuda
