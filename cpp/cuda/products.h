// Matrix products by cuBLAS, one batch for all samples or groups.
#pragma once

#include "api.h"

namespace upfold::cuda {

// An operand of a product, and how far apart it lies for the next sample and the next group.
struct Matrix {
  const void* data;
  Dtype dtype;
  bool transposed;  // with respect to what the product wants
  std::int64_t ld, sample, group;
};

struct Sizes {
  std::int64_t m, n, k, samples, groups;
};

// The products of one call, on a handle whose stream and workspace are set.
class Products {
 public:
  Products(void* handle, Dtype dtype, bool allow_tf32) : handle_(handle), dtype_(dtype), allow_tf32_(allow_tf32) {}

  // c = a * b, or c += a * b, for every sample and group; the longer of the two axes is the batch of one call.
  void multiply(const Sizes& s, const Matrix& a, const Matrix& b, const Matrix& c, void* to, bool accumulate) const;

 private:
  void product(const Sizes& s, const Matrix& a, const Matrix& b, const Matrix& c, void* to, bool accumulate) const;

  void* handle_;
  Dtype dtype_;
  bool allow_tf32_;
};

// Throws where cuBLAS refused.
void check_cublas(int status, const char* what);

}  // namespace upfold::cuda
