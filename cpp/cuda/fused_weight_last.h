// The fused method for p.op = kConvTransposeWeight with channels innermost, of 16-bit values: a product on tensor cores over the
// pixels of x and y, which are packed first where they lie otherwise, cut into parts whose float32 sums are added in a fixed
// order.
#pragma once

#include "api.h"

namespace upfold::cuda {

// A tile choice: input channels and columns (output channels of some taps) of a block.
struct FusedWeightLastTile {
  int channels, columns;
};
std::vector<FusedWeightLastTile> fused_weight_last_tiles();

struct WeightLastPlan;
// What a choice launches: blocks, of so many tiles of positions each, over all launches of a part of the samples; products of 16
// positions in one of these, bytes that it copies; bytes of x and y that are packed first, and of partial sums, 0 where blocks
// store w: cycles of such a store, and blocks that share it. squares: y is packed in squares (fused_last_source.cuh);
// planes: x is read as it lies.
struct FusedWeightLastWork {
  std::int64_t blocks, length, launches, steps, copied, packed, partial, stored, cluster;
  bool squares, planes;
};

// float16 and bfloat16, on compute capability 9.0. Planned once, then the same for any operands and by any thread; bits do not
// depend on the device's size.
class FusedWeightLastCall {
 public:
  // `alignment` bytes, at most 16, divide the addresses of x and y; packed operands and partial sums stay below the cap.
  FusedWeightLastCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap);
  std::int64_t workspace_bytes() const;  // -1: the choice does not run this problem under this cap
  FusedWeightLastWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Problem problem_;
  std::shared_ptr<const WeightLastPlan> plan_;  // null: it does not run
};

}  // namespace upfold::cuda
