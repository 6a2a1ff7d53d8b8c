// Both gradients of a transposed convolution by matrix products from one matrix of columns of y's gradient, which each of them
// would make for itself.
#pragma once

#include "api.h"

namespace upfold::cuda {

struct GemmGradients {
  const void *x, *w, *y;  // y: the gradient of the output
  void *x_gradient, *w_gradient;
  void* workspace;  // workspace_bytes() of the call, aligned to 256
};

// Planned once, then the same for any operands and by any thread; bits are those of the two calls apart.
class GemmGradientsCall {
 public:
  // The adjoints in x and in w, which read y as it lies. No more than `workspace_cap` bytes are taken.
  GemmGradientsCall(int device, const Problem& conv, const Problem& weight, std::int64_t workspace_cap, bool allow_tf32);
  // Whether both read the same columns whole; else it does not run.
  bool shares() const { return shares_; }
  std::int64_t workspace_bytes() const;
  void run(const GemmGradients& operands, std::uintptr_t stream) const;

 private:
  GemmCall conv_, weight_;
  bool shares_;
};

}  // namespace upfold::cuda
