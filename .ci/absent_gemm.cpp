// What the gradients by matrix products launch, computed on the host in place of a GPU that is not there: linked by
// check_plans.py beside absent_device.cpp, so that the way of their operands through the workspace is checked where no GPU is.
// Elements are float32 or float64; each product fills cuBLAS's workspace with NaN before it reads and after it has written.
#include <algorithm>
#include <cmath>

#include "../cpp/cuda/api.h"
#include "../cpp/cuda/copy_planes.h"
#include "../cpp/cuda/cublas.h"
#include "../cpp/cuda/gemm_weight.h"
#include "../cpp/cuda/im2row.h"
#include "../cpp/cuda/sum_parts.h"

namespace upfold::cuda {
namespace {

using Index = std::int64_t;

// visit(its place among the columns, whether its tap falls into y, its place there), for every column of a block.
template <typename Visit>
void each_column(const Problem& p, const ColumnBlock& b, const Visit& visit) {
  const Index taps = kernel_taps(p);
  for (Index n = b.n.begin; n < b.n.end; ++n) {
    for (Index row = 0; row < length(b.oc) * taps; ++row) {
      const Index oc = b.oc.begin + row / taps, tap = row % taps;
      const Index kw = tap % p.kernel_w, kh = tap / p.kernel_w % p.kernel_h, kd = tap / p.kernel_w / p.kernel_h;
      Index at = (n - b.n.begin) * b.sample_stride + row * b.row_stride;
      for (Index id = b.in_d.begin; id < b.in_d.end; ++id) {
        for (Index ih = b.in_h.begin; ih < b.in_h.end; ++ih) {
          for (Index iw = b.in_w.begin; iw < b.in_w.end; ++iw, ++at) {
            const Index od = id * p.stride_d - p.pad_d + kd * p.dilation_d, oh = ih * p.stride_h - p.pad_h + kh * p.dilation_h,
                        ow = iw * p.stride_w - p.pad_w + kw * p.dilation_w;
            const bool inside = od >= 0 && od < p.out_d && oh >= 0 && oh < p.out_h && ow >= 0 && ow < p.out_w;
            visit(at, inside, n * p.y.n + oc * p.y.c + od * p.y.d + oh * p.y.h + ow * p.y.w);
          }
        }
      }
    }
  }
}

template <typename T>
void read_columns(const Problem& p, const ColumnBlock& block, const T* y, T* columns) {
  each_column(p, block, [&](Index at, bool inside, Index from) { columns[at] = inside ? y[from] : T(0); });
}
template <typename T>
void read_rows(const Problem& p, const T* y, T* rows) {
  const Index width = kernel_taps(p) * p.out_channels, pixels = in_pixels(p);
  ColumnBlock all{};
  all.n = {0, p.batch}, all.oc = {0, p.out_channels}, all.sample_stride = width * pixels, all.row_stride = pixels;
  all.in_d = {0, p.in_d}, all.in_h = {0, p.in_h}, all.in_w = {0, p.in_w};
  each_column(p, all, [&](Index at, bool inside, Index from) {
    const Index pixel = at / (width * pixels) * pixels + at % pixels, row = at / pixels % width, taps = kernel_taps(p);
    rows[pixel * width + row % taps * p.out_channels + row / taps] = inside ? y[from] : T(0);
  });
}
template <typename T>
void sum_columns(const Problem& p, const ColumnBlock& block, const T* columns, T* y) {
  each_column(p, block, [&](Index, bool inside, Index to) { inside ? void(y[to] = 0) : void(); });
  each_column(p, block, [&](Index at, bool inside, Index to) { inside ? void(y[to] += columns[at]) : void(); });
}
template <typename T>
void add_parts(Index count, Index parts, const T* from, T* to, bool accumulate) {
  for (Index i = 0; i < count; ++i) {
    T sum = accumulate ? to[i] : T(0);
    for (Index part = 0; part < parts; ++part) sum += from[part * count + i];
    to[i] = sum;
  }
}

float* workspace = nullptr;
std::size_t workspace_floats = 0;

// Of column-major matrices, as cuBLAS names them.
template <typename T>
void multiply(int a_op, int b_op, int m, int n, int k, const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc) {
  for (Index j = 0; j < n; ++j) {
    for (Index i = 0; i < m; ++i) {
      double sum = 0;
      for (Index l = 0; l < k; ++l)
        sum += double(a[a_op ? i * lda + l : l * lda + i]) * double(b[b_op ? l * ldb + j : j * ldb + l]);
      c[j * ldc + i] = T(sum) + (beta != 0 ? beta * c[j * ldc + i] : T(0));
    }
  }
}
template <typename T>
void multiply_batch(int a_op, int b_op, int m, int n, int k, const void* a, int lda, long long a_stride, const void* b, int ldb,
                    long long b_stride, const void* beta, void* c, int ldc, long long c_stride, int count) {
  for (int i = 0; i < count; ++i) {
    multiply(a_op, b_op, m, n, k, static_cast<const T*>(a) + i * a_stride, lda, static_cast<const T*>(b) + i * b_stride, ldb,
             *static_cast<const T*>(beta), static_cast<T*>(c) + i * c_stride, ldc);
  }
}

int create(void**) { return 0; }
int set_stream(void*, void*) { return 0; }
int set_math_mode(void*, int) { return 0; }
int set_workspace(void*, void* address, std::size_t bytes) {
  return workspace = static_cast<float*>(address), workspace_floats = bytes / sizeof(float), 0;
}
int gemm_strided_batched_ex(void*, int a_op, int b_op, int m, int n, int k, const void*, const void* a, int type, int lda,
                            long long a_stride, const void* b, int, int ldb, long long b_stride, const void* beta, void* c, int,
                            int ldc, long long c_stride, int count, int, int) {
  constexpr int kFloat64 = 1;
  const auto run = type == kFloat64 ? multiply_batch<double> : multiply_batch<float>;
  std::fill_n(workspace, workspace_floats, NAN);
  run(a_op, b_op, m, n, k, a, lda, a_stride, b, ldb, b_stride, beta, c, ldc, c_stride, count);
  std::fill_n(workspace, workspace_floats, NAN);
  return 0;
}

}  // namespace

const Cublas& cublas() {
  static const Cublas functions{create, set_stream, set_workspace, set_math_mode, gemm_strided_batched_ex};
  return functions;
}

void im2col(const Launch&, const Problem& p, const ColumnBlock& block, Dtype dtype, const void* y, void* columns) {
  if (dtype == Dtype::kFloat64) return read_columns(p, block, static_cast<const double*>(y), static_cast<double*>(columns));
  read_columns(p, block, static_cast<const float*>(y), static_cast<float*>(columns));
}
void im2row(const Launch&, const Problem& p, const void* y, void* rows) {
  if (p.dtype == Dtype::kFloat64) return read_rows(p, static_cast<const double*>(y), static_cast<double*>(rows));
  read_rows(p, static_cast<const float*>(y), static_cast<float*>(rows));
}
void col2im(const Launch&, const Problem& p, const ColumnBlock& block, Dtype dtype, const void* columns, const void*, void* y) {
  if (dtype == Dtype::kFloat64) return sum_columns(p, block, static_cast<const double*>(columns), static_cast<double*>(y));
  sum_columns(p, block, static_cast<const float*>(columns), static_cast<float*>(y));
}
void sum_parts(const Launch&, Dtype dtype, Index count, Index parts, const void* from, void* to, bool accumulate) {
  if (dtype == Dtype::kFloat64) {
    return add_parts(count, parts, static_cast<const double*>(from), static_cast<double*>(to), accumulate);
  }
  add_parts(count, parts, static_cast<const float*>(from), static_cast<float*>(to), accumulate);
}
// What these would do the column kernels above do.
bool copy_planes(const Launch&, Dtype, const Planes&, Index, const void*, void*) { return false; }
bool transpose_planes(const Launch&, const Planes&, const float*, float*) { return false; }
bool turn_weight(const Launch&, const Problem&, const void*, void*) { return false; }

}  // namespace upfold::cuda
