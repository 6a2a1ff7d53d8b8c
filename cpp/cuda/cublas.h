// cuBLAS is taken at run time from the process, never linked: its SONAME and symbol versions differ between CUDA 11, 12 and 13.
#pragma once

#include <cstddef>
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

// The calling thread's handle on a device, which is current: made at its first use, given on when the thread ends.
void* cublas_handle(int device);

}  // namespace upfold::cuda
