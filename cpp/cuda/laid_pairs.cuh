// Pairs of neighbouring pixels laid out together, where a kernel of four has a stride of two and a padding of one: of a row of y'
// a pair meets an aligned vector of four values, the value ahead of it and the one behind. A warp has sixteen pairs side by side,
// and of four of them eight lanes have two neighbouring vectors of 16 bytes, of 16-bit values two rows of the kernel each, so
// that these write to all banks at once. The value beside a pair in a row the lane of the pair beside has, but for the first of
// the sixteen and the last one.
#pragma once

#include <cstdint>

#include "values.cuh"

namespace upfold::cuda {

constexpr int kPairsOfWarp = 16;

struct LaidPairLane {
  std::uint32_t pair, half;     // of the warp's pairs; of the two vectors
  std::uint32_t before, after;  // lanes that have the pairs beside
  bool is_first, is_last;
};
UPFOLD_DEVICE LaidPairLane laid_pair_lane(std::uint32_t lane) {
  LaidPairLane own;
  own.pair = lane % 4 + lane / 8 * 4, own.half = lane / 4 % 2;
  own.before = lane - (own.pair % 4 > 0 ? 1 : 5), own.after = lane + (own.pair % 4 < 3 ? 1 : 5);
  own.is_first = own.pair == 0, own.is_last = own.pair + 1 == kPairsOfWarp;
  return own;
}

// What a lane reads of a pair: two rows, and of both the value beside the first pair or the last one.
struct LaidPairValues {
  uint2 own[2];
  std::uint32_t end;
};

// The same of floats.
struct LaidPairFloats {
  uint4 own[2];
  std::uint32_t end[2];
};

// The vectors of a pair's two pixels, of both rows. Masks: whether there are values ahead of the pair, and behind it.
UPFOLD_DEVICE void lay_pair(const LaidPairLane& lane, const LaidPairValues& pair, std::uint32_t left_mask,
                            std::uint32_t right_mask, std::uint32_t (&before)[4], std::uint32_t (&after)[4]) {
  const std::uint32_t last = __byte_perm(pair.own[0].y, pair.own[1].y, 0x7632);
  const std::uint32_t first = __byte_perm(pair.own[0].x, pair.own[1].x, 0x5410);
  const std::uint32_t of_before = __shfl_sync(~0u, last, lane.before), of_after = __shfl_sync(~0u, first, lane.after);
  const std::uint32_t left = (lane.is_first ? pair.end : of_before) & left_mask;
  const std::uint32_t right = (lane.is_last ? pair.end : of_after) & right_mask;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint2 both = pair.own[k];
    before[2 * k] = __byte_perm(left, both.x, k == 0 ? 0x5410 : 0x5432);
    before[2 * k + 1] = after[2 * k] = __byte_perm(both.x, both.y, 0x5432);
    after[2 * k + 1] = __byte_perm(both.y, right, k == 0 ? 0x5432 : 0x7632);
  }
}

// The same of row `k` of floats, a vector by itself.
UPFOLD_DEVICE void lay_pair_row(const LaidPairLane& lane, const LaidPairFloats& pair, int k, std::uint32_t left_mask,
                                std::uint32_t right_mask, std::uint32_t (&before)[4], std::uint32_t (&after)[4]) {
  const uint4 both = pair.own[k];
  const std::uint32_t of_before = __shfl_sync(~0u, both.w, lane.before), of_after = __shfl_sync(~0u, both.x, lane.after);
  before[0] = (lane.is_first ? pair.end[k] : of_before) & left_mask,
  after[3] = (lane.is_last ? pair.end[k] : of_after) & right_mask;
  before[1] = both.x, before[2] = after[0] = both.y, before[3] = after[1] = both.z, after[2] = both.w;
}

}  // namespace upfold::cuda
