// The fused method for p.op = kConvTransposeWeight: a product on tensor cores over the pixels of x and y as they lie, cut into
// parts whose float32 sums are added in a fixed order.
#pragma once

#include "api.h"

namespace upfold::cuda {

// A tile choice: neighbouring taps of a warp, warps that multiply, input channels of a block, blocks of a multiprocessor; threads
// that copy a stage, and all of a block; whether the copy engine brings its operands instead, in boxes, and whether there are
// kernels of which two blocks share y, that cut its rows, and whose clusters add parts up (fused_weight_boxes.cuh).
struct FusedWeightTileSize {
  int taps, warps, channels, blocks, copiers, threads;
  bool boxes, wide;
};
std::vector<FusedWeightTileSize> fused_weight_tiles();

// What a choice launches: blocks, of so many steps each; pairs of vectors of 16 bytes of pixels in a step; copies that a step
// takes, one of two bytes counted as four of more, or where they come in boxes the cycles that these take; bytes of x and y that
// are packed first, and that are copied as planes ahead of that; blocks that share y, one or two; whether maps are one row; parts
// that a cluster adds up.
struct FusedWeightWork {
  std::int64_t blocks, steps, products, copies, packed, planes, sharers;
  bool merged;
  std::int64_t together;
};
struct FusedWeightPlan;

// float16, bfloat16, or float32 rounded to TF32, with pixels contiguous along w, or else channels innermost, of which copies as
// planes are made first. Planned once, then the same for any operands and by any thread; bits do not depend on the device's size.
class FusedWeightCall {
 public:
  // `alignment` bytes, at most 16, divide the addresses of x and y; the partial sums stay below the cap.
  FusedWeightCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap);
  std::int64_t workspace_bytes() const;  // -1: the choice does not run this problem under this cap
  FusedWeightWork work() const;
  // Where not 0, a run that names a bias writes its gradient there too: the channels of y, which it reads once, are summed on the
  // way, in so many parts.
  std::int64_t sums() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Problem problem_;
  std::shared_ptr<const FusedWeightPlan> plan_;  // null: nothing to do
};

}  // namespace upfold::cuda
