// The only inline PTX, with warpgroup.cuh: tensor-core products, the loads that feed them, and asynchronous copies into shared
// memory.
//
// Operands lie in shared memory as vectors of 16 bytes along the reduction: `[vector of the reduction][row][16 bytes]`. Eight
// rows of one vector are one 8 x 8 matrix of 16-bit halves, or 8 x 4 of TF32; `ldmatrix` gives lane i the word i % 4 of row i /
// 4, which is what `mma` wants of both operands.
//   a (16 rows x 2 vectors): words {rows 0-7, vector 0}, {rows 8-15, vector 0}, {rows 0-7, vector 1}, {rows 8-15, vector 1}
//   b (8 columns x 2 vectors): words {vector 0}, {vector 1}
//   sums (16 x 8): lane i holds columns 2 * (i % 4) and the next one, of row i / 4 and then of row i / 4 + 8
#pragma once

#include "box_map.h"
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
// The same of 16-bit values with one vector of the reduction: the first two words of a, and the first of b.
template <typename Value>
struct HalfTensorCore;

#define UPFOLD_HALF_MMA(Value, shape_and_types)                                                                  \
  template <>                                                                                                    \
  struct HalfTensorCore<Value> {                                                                                 \
    static __device__ __forceinline__ void add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b) { \
      UPFOLD_HALF_MMA_BODY(shape_and_types)                                                                      \
    }                                                                                                            \
  };
#define UPFOLD_MMA(Value, shape_and_types)                                                                      \
  template <>                                                                                                   \
  struct TensorCore<Value> {                                                                                    \
    static __device__ __forceinline__ void add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, \
                                               std::uint32_t b1) {                                              \
      UPFOLD_MMA_BODY(shape_and_types)                                                                          \
    }                                                                                                           \
  };
// Of compute capability 7.5 on for float16, of 8.0 on for the others.
#define UPFOLD_HALF_MMA_BODY(shape_and_types)                                                             \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                               \
               : "r"(a[0]), "r"(a[1]), "r"(b));
#if __CUDA_ARCH__ >= 750
UPFOLD_HALF_MMA(__half, "m16n8k8.row.col.f32.f16.f16.f32")
#endif
#if __CUDA_ARCH__ >= 800
UPFOLD_HALF_MMA(__nv_bfloat16, "m16n8k8.row.col.f32.bf16.bf16.f32")
#define UPFOLD_MMA_BODY(shape_and_types)                                                                              \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
UPFOLD_MMA(__half, "m16n8k16.row.col.f32.f16.f16.f32")
#else
#undef UPFOLD_HALF_MMA_BODY
#define UPFOLD_HALF_MMA_BODY(shape_and_types)
#if __CUDA_ARCH__ < 750
UPFOLD_HALF_MMA(__half, )
#endif
UPFOLD_HALF_MMA(__nv_bfloat16, )
#define UPFOLD_MMA_BODY(shape_and_types)                     \
  HalfTensorCore<__half>::add(sums, {a[0], a[1], 0, 0}, b0); \
  HalfTensorCore<__half>::add(sums, {a[2], a[3], 0, 0}, b1);
UPFOLD_MMA(__half, )
#undef UPFOLD_MMA_BODY
#define UPFOLD_MMA_BODY(shape_and_types)
#endif
UPFOLD_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
UPFOLD_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef UPFOLD_MMA_BODY
#undef UPFOLD_MMA
#undef UPFOLD_HALF_MMA_BODY
#undef UPFOLD_HALF_MMA

// Whether the tensor cores of this architecture multiply such values. Where they do not, the host refuses these and their kernels
// are empty, which saves compiling, and a wheel their code.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <typename Value>
constexpr bool kMultiplied = false;
template <>
constexpr bool kMultiplied<__half> = __CUDA_ARCH__ >= 750;
#else
template <typename Value>
constexpr bool kMultiplied = true;
#endif

// Rounded to the nearest TF32, ties away from zero.
UPFOLD_DEVICE std::uint32_t to_tf32(float v) {
  std::uint32_t bits = 0;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
#endif
  return bits;
}

// A float32 rounded to the nearest TF32 by adding half a step of it, ties away from zero, with low bits that a product cuts off;
// NaN and infinity stay what they are. Two instructions, where the conversion above takes three, and the result may be in any
// register.
UPFOLD_DEVICE std::uint32_t near_tf32(std::uint32_t word) {
  return __float_as_uint(fmaf(__uint_as_float(word & 0xff800000u), 0x1p-11f, __uint_as_float(word)));
}
// The same by one instruction from compute capability 9.0 on, ties to even. The compiler leaves the result in the register of the
// value: where a product wants it elsewhere, it takes a move for each product.
UPFOLD_DEVICE std::uint32_t near_tf32_in_place(std::uint32_t word) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(__uint_as_float(word)));
  return bits;
#else
  return near_tf32(word) & 0xffffe000u;
#endif
}

// An element of global memory, or zero: the condition is no branch, and loads stay where they are written, so that many are on
// their way together.
template <typename Value>
UPFOLD_DEVICE Value load_or_zero(const Value* from, bool exists) {
  const auto address = __cvta_generic_to_global(from);
  if constexpr (sizeof(Value) == 4) {
    std::uint32_t bits;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.b32 %0, [%1]; }"
                 : "=r"(bits)
                 : "l"(address), "r"(std::int32_t(exists)));
    return __uint_as_float(bits);
  } else {
    std::uint16_t bits;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.nc.b16 %0, [%1]; }"
                 : "=h"(bits)
                 : "l"(address), "r"(std::int32_t(exists)));
    return *reinterpret_cast<const Value*>(&bits);
  }
}
// kBytes (4, 8 or 16) from global to shared memory, past the registers from compute capability 8.0 on; zeros where `live` is
// false.
template <int kBytes>
UPFOLD_DEVICE void copy_async(std::uint32_t to, const void* from, bool live) {
#if __CUDA_ARCH__ >= 800
  const int bytes = live ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(bytes));
  }
#elif __CUDA_ARCH__ >= 750
  if constexpr (kBytes == 16) {
    const uint4 v = live ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  } else if constexpr (kBytes == 8) {
    const uint2 v = live ? *static_cast<const uint2*>(from) : uint2{0, 0};
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
  } else {
    const std::uint32_t v = live ? *static_cast<const std::uint32_t*>(from) : 0;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
  }
#endif
}
// 16 bits to shared memory.
UPFOLD_DEVICE void store_half(std::uint32_t to, std::uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory");
}
// 16 bytes from shared memory, where the compiler would split a load whose words go to registers that do not follow one another.
UPFOLD_DEVICE uint4 load_shared(std::uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
UPFOLD_DEVICE std::uint32_t load_shared_word(std::uint32_t from) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
// 16 and 8 bytes to global memory, where the compiler would split a store that it can join with narrower ones.
UPFOLD_DEVICE void store_global(void* to, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
UPFOLD_DEVICE void store_global(void* to, const uint2& v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
// 16 and 32 bits, a float and two, where they exist: a branch takes longer than the store. Sums of products stay floats: as words
// the compiler would have each product end before the next (C7517).
UPFOLD_DEVICE void store_global_if(bool exists, std::uint64_t to, std::uint16_t v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u16 [%1], %2;\n}" ::"r"(std::uint32_t(exists)), "l"(to),
               "h"(v)
               : "memory");
}
UPFOLD_DEVICE void store_global_if(bool exists, std::uint64_t to, std::uint32_t v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.u32 [%1], %2;\n}" ::"r"(std::uint32_t(exists)), "l"(to),
               "r"(v)
               : "memory");
}
UPFOLD_DEVICE void store_global_if(bool exists, std::uint64_t to, float v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.f32 [%1], %2;\n}" ::"r"(std::uint32_t(exists)), "l"(to),
               "f"(v)
               : "memory");
}
UPFOLD_DEVICE void store_global_if(bool exists, std::uint64_t to, float2 v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p st.global.v2.f32 [%1], {%2, %3};\n}" ::"r"(std::uint32_t(exists)),
               "l"(to), "f"(v.x), "f"(v.y)
               : "memory");
}
// Begins to fetch the description that the first copy of a box of it would wait for.
UPFOLD_DEVICE void expect_boxes(const BoxMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}
UPFOLD_DEVICE void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
UPFOLD_DEVICE void copy_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;");
#endif
}
template <int kPending>
UPFOLD_DEVICE void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
#endif
}

// What is computed from this address is computed behind this line: branches that share it would hold all of it in registers.
template <typename Value>
UPFOLD_DEVICE void pin(Value*& address) {
  asm volatile("" : "+l"(address));
}

// The larger one, or NaN where one is.
UPFOLD_DEVICE float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a < b || b != b ? b : a;
#endif
}

}  // namespace upfold::cuda

#include "warpgroup.cuh"
