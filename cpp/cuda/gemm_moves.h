// Moves between the operands of `gemm` and its workspace: x and w seen as columns of one tap, so that the column kernels move
// them.
#pragma once

#include "copy_planes.h"
#include "gemm_plan.h"

namespace upfold::cuda {

class GemmMoves {
 public:
  GemmMoves(const Launch& launch, const Problem& p, const GemmPlan& plan, const GemmOperands& operands)
      : launch_(launch), p_(p), plan_(plan), operands_(operands) {}

  // The pixels of a block of x to the workspace, as the plan says.
  void copy_x(const GemmBlock& block) const;
  // The weight to the workspace, as the plan says.
  void copy_weight() const;
  // Rounds the staged part of x, whose channels are those of the block's groups, into its place.
  void unstage_x(const GemmBlock& block) const;
  void unstage_weight(const GemmBlock& block) const;
  // The staged gradients of the windows' pixels, summed for every pixel of x.
  void sum_windows(const GemmBlock& block) const;

 private:
  void* workspace(std::int64_t at) const { return static_cast<char*>(operands_.workspace) + at; }
  // float32 planes to [sample][pixel][channel].
  void transpose(const Planes& planes, const void* from, void* to) const;

  const Launch& launch_;
  const Problem& p_;
  const GemmPlan& plan_;
  const GemmOperands& operands_;
};

}  // namespace upfold::cuda
