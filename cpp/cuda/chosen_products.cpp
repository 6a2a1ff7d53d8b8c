#include "chosen_products.h"

#include <algorithm>
#include <functional>
#include <string>

#include "../error.h"

namespace upfold::cuda {
namespace {

// Values of cuBLASLt's enumerations, and its answer.
constexpr int kProductOpA = 3, kProductOpB = 4, kLayoutBatch = 5, kLayoutStride = 6, kMostWorkspace = 1, kReductions = 3;
constexpr std::uint32_t kByComputeType = 2;  // partial sums of 16-bit products in float32, as cuBLAS is told too
constexpr int kAlignments[] = {5, 6, 7, 8};  // of a, b, c as it is read, and as it is written
struct Heuristic {
  std::array<std::uint64_t, 8> algorithm;
  std::size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

constexpr std::int64_t kMostAlignment = 16;  // that a kernel can gain by
constexpr std::size_t kMostChoices = 64;

// The largest power of two that divides an address, up to that.
std::int64_t alignment_of(const void* data) {
  const auto at = std::int64_t(reinterpret_cast<std::uintptr_t>(data)) | kMostAlignment;
  return at & -at;
}

// Of a matrix as it lies.
Description layout_of(const CublasLt& lt, const Matrix& m, std::int64_t rows, std::int64_t columns, std::int64_t samples) {
  void* layout = nullptr;
  const int status = lt.create_layout(&layout, cublas_type(m.dtype), std::uint64_t(rows), std::uint64_t(columns), m.ld);
  Description made(status == 0 ? layout : nullptr, lt.destroy_layout);
  const int batch = int(samples);
  if (made && batch > 1) {
    const bool set = lt.set_layout(layout, kLayoutBatch, &batch, sizeof(batch)) == 0 &&
                     lt.set_layout(layout, kLayoutStride, &m.sample, sizeof(m.sample)) == 0;
    if (!set) made.reset();
  }
  return made;
}

}  // namespace

ChosenProducts::Key ChosenProducts::key_of(const Product& part) {
  const Sizes& s = part.sizes;
  const Matrix &a = part.a, &b = part.b, &c = part.c;
  const auto stride = [&s](const Matrix& m) { return s.samples > 1 ? m.sample : 0; };
  return {{s.m, s.n, s.k, s.samples, a.ld, b.ld, c.ld, stride(a), stride(b), stride(c)},
          {a.transposed, b.transposed},
          {a.dtype, b.dtype, c.dtype},
          {alignment_of(a.data), alignment_of(b.data), alignment_of(part.to)}};
}

const ChosenProducts::Choice* ChosenProducts::find(const Key& key) const {
  for (const Choice& choice : choices_) {
    const Key& k = choice.key;
    const bool aligned = std::equal(k.alignments.begin(), k.alignments.end(), key.alignments.begin(), std::less_equal<>());
    if (aligned && k.sizes == key.sizes && k.transposed == key.transposed && k.dtypes == key.dtypes) return &choice;
  }
  return nullptr;
}

void ChosenProducts::add(void* handle, const Product& part, int compute_type, int scale_type) {
  if (find(key_of(part)) != nullptr) return;
  if (choices_.size() < kMostChoices) choices_.push_back(choose(handle, part, compute_type, scale_type));
  const Choice* const chosen = find(key_of(part));
  if (chosen != nullptr && chosen->found) {
    bytes_ = std::max(bytes_, std::int64_t(chosen->bytes));
  } else {
    whole_ = false;
  }
}

ChosenProducts::Choice ChosenProducts::choose(void* handle, const Product& part, int compute_type, int scale_type) const {
  const Sizes& s = part.sizes;
  const auto made = [](int status, void* description, int (*destroy)(void*)) {
    return Description(status == 0 ? description : nullptr, destroy);
  };
  void *product = nullptr, *preference = nullptr;
  const int of_product = lt_.create_product(&product, compute_type, scale_type);
  const int of_preference = lt_.create_preference(&preference);
  const Description asking = made(of_preference, preference, lt_.destroy_preference);
  Choice choice{key_of(part),
                false,
                {},
                0,
                made(of_product, product, lt_.destroy_product),
                part.a.transposed ? layout_of(lt_, part.a, s.k, s.m, s.samples) : layout_of(lt_, part.a, s.m, s.k, s.samples),
                part.b.transposed ? layout_of(lt_, part.b, s.n, s.k, s.samples) : layout_of(lt_, part.b, s.k, s.n, s.samples),
                layout_of(lt_, part.c, s.m, s.n, s.samples)};
  if (!asking || !choice.product || !choice.a || !choice.b || !choice.c) return choice;
  const int ops[] = {choice.key.transposed[0], choice.key.transposed[1]};  // N is 0, T is 1
  const std::uint64_t limit = std::uint64_t(most_);
  bool set = lt_.set_product(product, kProductOpA, &ops[0], sizeof(int)) == 0 &&
             lt_.set_product(product, kProductOpB, &ops[1], sizeof(int)) == 0 &&
             lt_.set_preference(preference, kMostWorkspace, &limit, sizeof(limit)) == 0;
  if (element_bytes(part.c.dtype) == 2) {
    set = set && lt_.set_preference(preference, kReductions, &kByComputeType, sizeof(kByComputeType)) == 0;
  }
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t alignment = std::uint32_t(choice.key.alignments[std::size_t(std::min(i, 2))]);
    set = set && lt_.set_preference(preference, kAlignments[i], &alignment, sizeof(alignment)) == 0;
  }
  if (!set) return choice;
  Heuristic best{};
  int count = 0;
  const int status = lt_.heuristic(handle, product, choice.a.get(), choice.b.get(), choice.c.get(), choice.c.get(), preference, 1,
                                   &best, &count);
  choice.found = status == 0 && count > 0 && best.state == 0 && best.workspace <= limit;
  choice.algorithm = best.algorithm, choice.bytes = best.workspace;
  return choice;
}

bool ChosenProducts::run(void* handle, const Product& part, const void* alpha, const void* beta, void* workspace,
                         std::uintptr_t stream) const {
  const Choice* const choice = find(key_of(part));
  if (choice == nullptr || !choice->found) return false;
  const int status = lt_.matmul(handle, choice->product.get(), alpha, part.a.data, choice->a.get(), part.b.data, choice->b.get(),
                                beta, part.to, choice->c.get(), part.to, choice->c.get(), choice->algorithm.data(), workspace,
                                choice->bytes, reinterpret_cast<void*>(stream));
  const Sizes& s = part.sizes;
  if (status != 0) check_cublas(status, concat("chosen matrix product of ", s.m, " x ", s.n, " x ", s.k).c_str());
  return true;
}

}  // namespace upfold::cuda
