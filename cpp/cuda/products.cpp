#include "products.h"

#include <algorithm>

#include "../error.h"
#include "cublas.h"

namespace upfold::cuda {
namespace {

// Values of cuBLAS's and the runtime's enumerations.
constexpr int kOpN = 0, kOpT = 1;
constexpr int kCompute32F = 68, kComputeTf32 = 77, kCompute64F = 70;
constexpr int kDefaultAlgorithm = -1;
constexpr std::int64_t kMostBatch = 32768;  // older libraries put the batch on a grid axis of 65535
constexpr std::int64_t kMostInt = (std::int64_t(1) << 31) - 1;

int data_type(Dtype dtype) {
  constexpr int kTypes[] = {0, 1, 2, 14, 4, 5};  // in the order of Dtype: R_32F, R_64F, R_16F, R_16BF, C_32F, C_64F
  return kTypes[int(dtype)];
}

}  // namespace

void check_cublas(int status, const char* what) {
  if (status != 0) throw std::runtime_error(concat(what, " failed: cuBLAS status ", status));
}

void Products::multiply(const Sizes& s, const Matrix& a, const Matrix& b, const Matrix& c, void* to, bool accumulate) const {
  const bool over_samples = s.samples >= s.groups;
  const std::int64_t batch = over_samples ? s.samples : s.groups, loops = over_samples ? s.groups : s.samples;
  const auto stride = [&](const Matrix& m) { return over_samples ? m.sample : m.group; };
  const auto other = [&](const Matrix& m) { return over_samples ? m.group : m.sample; };
  for (std::int64_t loop = 0; loop < loops; ++loop) {
    for (std::int64_t first = 0; first < batch; first += kMostBatch) {
      const auto at = [&](const Matrix& m) { return (loop * other(m) + first * stride(m)) * element_bytes(m.dtype); };
      Matrix a_part = a, b_part = b, c_part = c;
      a_part.data = static_cast<const char*>(a.data) + at(a), b_part.data = static_cast<const char*>(b.data) + at(b);
      a_part.sample = stride(a), b_part.sample = stride(b), c_part.sample = stride(c);
      Sizes part = s;
      part.samples = std::min(kMostBatch, batch - first);
      product(part, a_part, b_part, c_part, static_cast<char*>(to) + at(c), accumulate);
    }
  }
}

void Products::product(const Sizes& s, const Matrix& a, const Matrix& b, const Matrix& c, void* to, bool accumulate) const {
  const std::int64_t largest = std::max({s.m, s.n, s.k, a.ld, b.ld, c.ld});
  require(largest <= kMostInt, "a matrix product of ", s.m, " x ", s.n, " x ", s.k, " with distances up to ", largest,
          "; cuBLAS takes sizes below 2^31");
  const bool wide = dtype_ == Dtype::kFloat64 || dtype_ == Dtype::kComplex128;
  const double wide_factors[2][2] = {{1.0, 0.0}, {accumulate ? 1.0 : 0.0, 0.0}};  // complex: real and imaginary part
  const float factors[2][2] = {{1.0f, 0.0f}, {accumulate ? 1.0f : 0.0f, 0.0f}};
  const void* const alpha = wide ? static_cast<const void*>(wide_factors[0]) : factors[0];
  const void* const beta = wide ? static_cast<const void*>(wide_factors[1]) : factors[1];
  const bool tf32 = allow_tf32_ && dtype_ == Dtype::kFloat32;
  const int compute = wide ? kCompute64F : tf32 ? kComputeTf32 : kCompute32F;
  const int status = cublas().gemm_strided_batched_ex(
      handle_, a.transposed ? kOpT : kOpN, b.transposed ? kOpT : kOpN, int(s.m), int(s.n), int(s.k), alpha, a.data,
      data_type(a.dtype), int(a.ld), a.sample, b.data, data_type(b.dtype), int(b.ld), b.sample, beta, to, data_type(c.dtype),
      int(c.ld), c.sample, int(s.samples), compute, kDefaultAlgorithm);
  if (status != 0) check_cublas(status, concat("matrix product of ", s.m, " x ", s.n, " x ", s.k).c_str());
}

}  // namespace upfold::cuda
