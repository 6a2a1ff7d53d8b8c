// Matrix products by cuBLAS, one batch for all samples or groups.
#pragma once

#include "api.h"

namespace upfold::cuda {

class ChosenProducts;

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

// to = a * b, or to += a * b, for every sample and group; `c` is how `to` lies. The longer of the two axes is the batch of one
// call: the parts of a product have that for their samples, and one group.
struct Product {
  Sizes sizes;
  Matrix a, b, c;
  void* to;
  bool accumulate;
};

// The products of one call, on a handle whose stream and workspace are set, and are named again for those that were chosen.
class Products {
 public:
  Products(void* handle, Dtype dtype, bool allow_tf32, const ChosenProducts* chosen = nullptr, void* workspace = nullptr,
           std::uintptr_t stream = 0)
      : handle_(handle), dtype_(dtype), allow_tf32_(allow_tf32), chosen_(chosen), workspace_(workspace), stream_(stream) {}

  void multiply(const Product& product) const;
  // How a product will run, asked of cuBLASLt; the handle's device is current. Data are not looked at, but how they are aligned.
  void choose(const Product& product, ChosenProducts& chosen) const;

 private:
  void call(const Product& part) const;
  int compute_type() const;

  void* handle_;
  Dtype dtype_;
  bool allow_tf32_;
  const ChosenProducts* chosen_;  // null: all of them by cuBLAS
  void* workspace_;
  std::uintptr_t stream_;
};

// The integer that cuBLAS has for a type.
int cublas_type(Dtype dtype);

// Throws where cuBLAS refused.
void check_cublas(int status, const char* what);

}  // namespace upfold::cuda
