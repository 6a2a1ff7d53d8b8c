// The algorithms that cuBLASLt takes for the best ones of a plan's products, which run by them in what they need. cuBLAS takes
// other ones where it has less than 32 MiB, up to 3.7 times slower, though most of the best need next to none (H100, TF32).
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "cublas.h"
#include "products.h"

namespace upfold::cuda {

// A description of cuBLASLt's, null where it could not be made. It is only read once it is made.
using Description = std::unique_ptr<void, int (*)(void*)>;

class ChosenProducts {
 public:
  // `most`: bytes that a product may work in.
  ChosenProducts(const CublasLt& lt, std::int64_t most) : lt_(lt), most_(most) {}

  // Chooses for a part (products.h), unless it has for one like it: of any data, aligned at least as well up to 16 bytes.
  void add(void* handle, const Product& part, int compute_type, int scale_type);
  // What those that were chosen work in, and whether all were.
  std::int64_t bytes() const { return bytes_; }
  bool whole() const { return whole_; }
  // Runs a part in `workspace`, aligned to 256; false where none was chosen for it.
  bool run(void* handle, const Product& part, const void* alpha, const void* beta, void* workspace, std::uintptr_t stream) const;

 private:
  // What cuBLASLt is told of a part; but for addresses, all that a choice hangs on.
  struct Key {
    std::array<std::int64_t, 10> sizes;
    std::array<bool, 2> transposed;
    std::array<Dtype, 3> dtypes;
    std::array<std::int64_t, 3> alignments;
  };
  struct Choice {
    Key key;
    bool found;
    std::array<std::uint64_t, 8> algorithm;
    std::size_t bytes;
    Description product, a, b, c;
  };

  static Key key_of(const Product& part);
  const Choice* find(const Key& key) const;
  Choice choose(void* handle, const Product& part, int compute_type, int scale_type) const;

  const CublasLt& lt_;
  std::int64_t most_, bytes_ = 0;
  bool whole_ = true;
  std::vector<Choice> choices_;  // few: blocks are alike but for the last
};

}  // namespace upfold::cuda
