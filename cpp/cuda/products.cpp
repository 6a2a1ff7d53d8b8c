#include "products.h"

#include <algorithm>

#include "../error.h"
#include "chosen_products.h"
#include "cublas.h"

namespace upfold::cuda {
namespace {

// Values of cuBLAS's and the runtime's enumerations.
constexpr int kOpN = 0, kOpT = 1;
constexpr int kCompute32F = 68, kComputeTf32 = 77, kCompute64F = 70;
constexpr int kDefaultAlgorithm = -1;
constexpr std::int64_t kMostBatch = 32768;  // older libraries put the batch on a grid axis of 65535
constexpr std::int64_t kMostInt = (std::int64_t(1) << 31) - 1;

bool is_wide(Dtype dtype) { return dtype == Dtype::kFloat64 || dtype == Dtype::kComplex128; }

// Calls `visit` with the parts of a product.
template <typename Visit>
void for_each_part(const Product& product, const Visit& visit) {
  const Sizes& s = product.sizes;
  const bool over_samples = s.samples >= s.groups;
  const std::int64_t batch = over_samples ? s.samples : s.groups, loops = over_samples ? s.groups : s.samples;
  const auto stride = [&](const Matrix& m) { return over_samples ? m.sample : m.group; };
  const auto other = [&](const Matrix& m) { return over_samples ? m.group : m.sample; };
  for (std::int64_t loop = 0; loop < loops; ++loop) {
    for (std::int64_t first = 0; first < batch; first += kMostBatch) {
      const auto at = [&](const Matrix& m) { return (loop * other(m) + first * stride(m)) * element_bytes(m.dtype); };
      Product part = product;
      part.a.data = static_cast<const char*>(product.a.data) + at(product.a);
      part.b.data = static_cast<const char*>(product.b.data) + at(product.b);
      part.to = static_cast<char*>(product.to) + at(product.c);
      for (Matrix* m : {&part.a, &part.b, &part.c}) m->sample = stride(*m);
      part.sizes.samples = std::min(kMostBatch, batch - first);
      visit(part);
    }
  }
}

}  // namespace

void check_cublas(int status, const char* what) {
  if (status != 0) throw std::runtime_error(concat(what, " failed: cuBLAS status ", status));
}

int cublas_type(Dtype dtype) {
  constexpr int kTypes[] = {0, 1, 2, 14, 4, 5};  // in the order of Dtype: R_32F, R_64F, R_16F, R_16BF, C_32F, C_64F
  return kTypes[int(dtype)];
}

int Products::compute_type() const {
  if (is_wide(dtype_)) return kCompute64F;
  return allow_tf32_ && dtype_ == Dtype::kFloat32 ? kComputeTf32 : kCompute32F;
}

void Products::multiply(const Product& product) const {
  for_each_part(product, [this](const Product& part) { call(part); });
}

void Products::choose(const Product& product, ChosenProducts& chosen) const {
  const int scale_type = cublas_type(element_bytes(dtype_) == 2 ? Dtype::kFloat32 : dtype_);
  for_each_part(product, [&](const Product& part) { chosen.add(handle_, part, compute_type(), scale_type); });
}

void Products::call(const Product& part) const {
  const Sizes& s = part.sizes;
  const Matrix &a = part.a, &b = part.b, &c = part.c;
  const std::int64_t largest = std::max({s.m, s.n, s.k, a.ld, b.ld, c.ld});
  require(largest <= kMostInt, "a matrix product of ", s.m, " x ", s.n, " x ", s.k, " with distances up to ", largest,
          "; cuBLAS takes sizes below 2^31");
  const bool wide = is_wide(dtype_), accumulate = part.accumulate;
  const double wide_factors[2][2] = {{1.0, 0.0}, {accumulate ? 1.0 : 0.0, 0.0}};  // complex: real and imaginary part
  const float factors[2][2] = {{1.0f, 0.0f}, {accumulate ? 1.0f : 0.0f, 0.0f}};
  const void* const alpha = wide ? static_cast<const void*>(wide_factors[0]) : factors[0];
  const void* const beta = wide ? static_cast<const void*>(wide_factors[1]) : factors[1];
  if (chosen_ != nullptr && chosen_->run(handle_, part, alpha, beta, workspace_, stream_)) return;
  const int status = cublas().gemm_strided_batched_ex(
      handle_, a.transposed ? kOpT : kOpN, b.transposed ? kOpT : kOpN, int(s.m), int(s.n), int(s.k), alpha, a.data,
      cublas_type(a.dtype), int(a.ld), a.sample, b.data, cublas_type(b.dtype), int(b.ld), b.sample, beta, part.to,
      cublas_type(c.dtype), int(c.ld), c.sample, int(s.samples), compute_type(), kDefaultAlgorithm);
  if (status != 0) check_cublas(status, concat("matrix product of ", s.m, " x ", s.n, " x ", s.k).c_str());
}

}  // namespace upfold::cuda
