// What the planner of the fused gradient of the input aims at, and what boxes, rounds of tiles and reading cost; host code.
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
// What a box costs, in cycles for each channel of the reduction: by the times of 78 layers in two types on an H200.
constexpr double kRunsCost = 25;       // of copies that are runs of rows
constexpr double kInputEndsCost = 32;  // of the beginning and the end of a tile
constexpr double kCutCost = 1.0 / 32;  // of a byte of results that are stored in parts of sectors
// In rounds of tiles: the second launch, and the parts of all blocks, where the last one is split; and what part of the cost
// counts rounds, the other one tiles, where there is one round, and where there are more.
constexpr double kSplitCost = 0.2, kPartsCost = 0.1, kOneRound = 0.7, kManyRounds = 0.85;
constexpr std::int64_t kMostSplitWaves = 8;  // of tiles, of which the last one is worth a split

// Into how many parts the reduction of each of so many tiles is cut, of which no block is to have more than one: one, where there
// is a tile for each block or more.
inline std::int64_t input_parts(std::int64_t tiles, std::int64_t most) {
  return std::max<std::int64_t>(1, std::min(kInputAimBlocks / tiles, most));
}
// Whether the last round of tiles is worth a split, of so many in all with so many steps each.
inline bool splits_last(std::int64_t tiles, std::int64_t steps) {
  return tiles > kInputAimBlocks && tiles < kMostSplitWaves * kInputAimBlocks && steps >= 4 * kLeastInputSteps;
}
// How often all multiprocessors have a tile. Most of that are rounds, of which the last one is split where it has few tiles. The
// rest is the number of tiles, as all read the same weights; and all of it where few tiles are split, one by one.
inline double input_rounds(std::int64_t tiles, std::int64_t steps) {
  constexpr std::int64_t kBlocks = kInputAimBlocks;
  const std::int64_t whole = tiles / kBlocks, last = tiles % kBlocks;
  const bool splits = last > 0 && (whole == 0 || splits_last(tiles, steps));
  const std::int64_t parts = splits ? input_parts(last, steps / kLeastInputSteps) : 1;
  const double all = double(tiles) / double(kBlocks);
  if (whole == 0) return parts > 1 ? all : kOneRound + (1 - kOneRound) * all;
  double rounds = double(whole + (last > 0 ? 1 : 0));
  if (parts > 1) rounds += 1.0 / double(parts) - 1 + kSplitCost + kPartsCost * double(last * parts) / double(kBlocks);
  return kManyRounds * rounds + (1 - kManyRounds) * all;
}

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
