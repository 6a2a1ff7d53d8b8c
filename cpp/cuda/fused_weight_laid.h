// The fused method for p.op = kConvTransposeWeight by taps that are laid out in shared memory, of 16-bit values: a product on
// tensor cores over the pixels of x, cut into parts whose float32 sums are added in a fixed order.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Tile choices: input channels, and output channels times taps, of a block.
std::vector<std::pair<int, int>> fused_weight_laid_tiles();

struct WeightLaidPlan;
// What a choice launches: tiles, parts of each that a cluster adds up, clusters of parts, chunks of one, stages, bytes of a
// chunk's rows of y, whether two pixels are laid out together, bytes of x that are packed first, and of partial sums.
struct FusedWeightLaidWork {
  std::int64_t tiles, splits, clusters, chunks, stages, raw_bytes;
  bool paired;
  std::int64_t packed, partial;
};

// float16 and bfloat16, on compute capability 9.0, of one group: square kernels two or four wide, without padding and of strides
// as wide, or four wide with a stride of 2 and a padding of 1; rows of y that follow one another, and planes of both whose pixels
// do. Planned once, then the same for any operands and by any thread.
class FusedWeightLaidCall {
 public:
  // `alignment` bytes, at most 16, divide the addresses of x, w and y; what is packed and partial sums stay below the cap.
  FusedWeightLaidCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap);
  std::int64_t workspace_bytes() const;  // -1: the choice does not run this problem under this cap
  FusedWeightLaidWork work() const;
  // Where not 0, a run that names a bias writes its gradient there too: the channels of y, which it reads once, are summed on the
  // way, in so many parts.
  std::int64_t sums() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Dtype dtype_;
  std::shared_ptr<const WeightLaidPlan> plan_;  // null: it does not run
};

}  // namespace upfold::cuda
