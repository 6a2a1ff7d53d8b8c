// The only inline PTX: tensor-core products, the loads that feed them, and asynchronous copies into shared memory.
//
// Operands lie in shared memory as vectors of 16 bytes along the reduction: `[vector of the reduction][row][16 bytes]`. Eight
// rows of one vector are one 8 x 8 matrix of 16-bit halves, or 8 x 4 of TF32; `ldmatrix` gives lane i the word i % 4 of row i /
// 4, which is what `mma` wants of both operands.
//   a (16 rows x 2 vectors): words {rows 0-7, vector 0}, {rows 8-15, vector 0}, {rows 0-7, vector 1}, {rows 8-15, vector 1}
//   b (8 columns x 2 vectors): words {vector 0}, {vector 1}
//   sums (16 x 8): lane i holds columns 2 * (i % 4) and the next one, of row i / 4 and then of row i / 4 + 8
#pragma once

#include "values.cuh"

namespace upfold::cuda {

// Bytes from the start of shared memory, as the instructions below want it.
UPFOLD_DEVICE std::uint32_t shared_address(const void* pointer) { return std::uint32_t(__cvta_generic_to_shared(pointer)); }

// Four 8-row matrices; lane i names the row i % 8 of matrix i / 8. Sums 16 bytes aligned.
UPFOLD_DEVICE void load_matrices(std::uint32_t (&words)[4], std::uint32_t row) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row));
#endif
}

// The same four matrices, each turned: lane i gets the elements 2 * (i % 4) and the next one of the rows, in column i / 4.
UPFOLD_DEVICE void load_turned_matrices(std::uint32_t (&words)[4], std::uint32_t row) {
#if __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row));
#endif
}

template <typename Value>
struct TensorCore;

#define UPFOLD_MMA(Value, shape_and_types)                                                                      \
  template <>                                                                                                   \
  struct TensorCore<Value> {                                                                                    \
    static __device__ __forceinline__ void add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, \
                                               std::uint32_t b1) {                                              \
      UPFOLD_MMA_BODY(shape_and_types)                                                                          \
    }                                                                                                           \
  };
#if __CUDA_ARCH__ >= 800
#define UPFOLD_MMA_BODY(shape_and_types)                                                                              \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#define UPFOLD_MMA_BODY(shape_and_types)
#endif
UPFOLD_MMA(__half, "m16n8k16.row.col.f32.f16.f16.f32")
UPFOLD_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
UPFOLD_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef UPFOLD_MMA_BODY
#undef UPFOLD_MMA

// Rounded to the nearest TF32, ties away from zero.
UPFOLD_DEVICE std::uint32_t to_tf32(float v) {
  std::uint32_t bits = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#endif
  return bits;
}

// kBytes (4, 8 or 16) from global to shared memory, past the registers; zeros where `live` is false.
template <int kBytes>
UPFOLD_DEVICE void copy_async(std::uint32_t to, const void* from, bool live) {
#if __CUDA_ARCH__ >= 800
  const int bytes = live ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(bytes));
  }
#endif
}
UPFOLD_DEVICE void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int kPending>
UPFOLD_DEVICE void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
#endif
}

}  // namespace upfold::cuda
