// cuBLAS is taken at run time from the process, never linked: its SONAME and symbol versions differ between CUDA 11, 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace upfold::cuda {

struct CublasFound {
  std::string path;     // the library's file, or empty
  std::string version;  // "major.minor.patch"
  std::string reason;   // why none was found, or empty
};

// The library that torch has already loaded, else the first that the loader finds by name. Loaded once, never closed.
CublasFound find_cublas();

// The C functions in use, unchanged since CUDA 11, with enumerations as the integers that they are there.
struct Cublas {
  int (*create)(void** handle);
  int (*set_stream)(void* handle, void* stream);
  int (*set_workspace)(void* handle, void* workspace, std::size_t bytes);
  int (*set_math_mode)(void* handle, int mode);
  int (*gemm_strided_batched_ex)(void* handle, int a_op, int b_op, int m, int n, int k, const void* alpha, const void* a,
                                 int a_type, int lda, long long a_stride, const void* b, int b_type, int ldb, long long b_stride,
                                 const void* beta, void* c, int c_type, int ldc, long long c_stride, int count, int compute_type,
                                 int algorithm);
};

// The functions of the library that find_cublas() names; throws where there is none or one of them is missing.
const Cublas& cublas();

// Those of cublasLt, which says how it would run a product and runs it so; a handle of cuBLAS is one of its own.
struct CublasLt {
  int (*create_product)(void** product, int compute_type, int scale_type);
  int (*set_product)(void* product, int attribute, const void* value, std::size_t bytes);
  int (*destroy_product)(void* product);
  int (*create_layout)(void** layout, int type, std::uint64_t rows, std::uint64_t columns, std::int64_t ld);
  int (*set_layout)(void* layout, int attribute, const void* value, std::size_t bytes);
  int (*destroy_layout)(void* layout);
  int (*create_preference)(void** preference);
  int (*set_preference)(void* preference, int attribute, const void* value, std::size_t bytes);
  int (*destroy_preference)(void* preference);
  int (*heuristic)(void* handle, void* product, void* a, void* b, void* c, void* d, void* preference, int most, void* results,
                   int* found);
  int (*matmul)(void* handle, void* product, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const void* algorithm, void* workspace,
                std::size_t bytes, void* stream);
};

// The library that cuBLAS itself works with; null where there is none or one of them is missing.
const CublasLt* cublas_lt();

// The calling thread's handle on a device, which is current: made at its first use, given on when the thread ends.
void* cublas_handle(int device);

}  // namespace upfold::cuda
