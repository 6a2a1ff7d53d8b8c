// Compute capability 9.0: products of warpgroups. Inline PTX, as in mma.cuh, which describes the layouts and includes this at its
// end.
#pragma once

#include "copy_engine.cuh"
#include "values.cuh"

namespace upfold::cuda {

// Of warpgroups: products that read both operands from shared memory, whose layout above is, without a swizzle, what they want.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define UPFOLD_WARPGROUPS 1

// What an address in shared memory is in a descriptor: above its lower bits is the block's number in its cluster, which would end
// up in the distance of vectors.
UPFOLD_DEVICE std::uint32_t in_descriptor(std::uint32_t address) { return (address & 0x3ffff) / 16; }
// The descriptor of an operand, all in units of 16 bytes: its address, the distance of the vectors of the reduction, and that of
// groups of eight rows.
UPFOLD_DEVICE std::uint64_t matrix_descriptor(std::uint32_t at, std::uint32_t vector_pitch, std::uint32_t group_pitch) {
  return std::uint64_t(group_pitch) << 32 | (vector_pitch << 16 | at);
}
// The same of rows of four vectors, which follow one another: of row r, counted from a multiple of 512 bytes, vector v lies at
// v ^ (r / 2 % 4). An operand may begin at any row.
UPFOLD_DEVICE std::uint64_t swizzled_descriptor(std::uint32_t at, std::uint32_t group_pitch) {
  constexpr std::uint64_t kSwizzle64 = std::uint64_t(2) << 62;
  return kSwizzle64 | matrix_descriptor(at, 1, group_pitch);
}

// The same of rows of 128 bytes: of row r, counted from a multiple of 1024 bytes, vector v lies at v ^ (r % 8).
UPFOLD_DEVICE std::uint64_t long_row_descriptor(std::uint32_t at, std::uint32_t group_pitch) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t(1) << 62;
  return kSwizzle128 | matrix_descriptor(at, 1, group_pitch);
}

// The same of rows of 128 bytes that hold 64 rows of a `Turned` operand each, eight rows every 1024 bytes.
UPFOLD_DEVICE std::uint64_t turned_descriptor(std::uint32_t at) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t(1) << 62;
  return kSwizzle128 | matrix_descriptor(at, 64, 64);
}

// The same of `TurnedColumns`, whose groups of kColumns columns have group_rows rows of the reduction each.
template <int kColumns>
UPFOLD_DEVICE std::uint64_t turned_columns_descriptor(std::uint32_t at, std::uint32_t group_rows) {
  static_assert(kColumns == 64 || kColumns == 32, "a row that is swizzled");
  constexpr std::uint64_t kSwizzle = std::uint64_t(kColumns == 64 ? 1 : 2) << 62;
  return kSwizzle | matrix_descriptor(at, group_rows * kColumns / 8, kColumns);
}

// Between ordinary accesses to the sums and the first product that adds to them.
UPFOLD_DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
UPFOLD_DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending committed groups of products are unfinished.
template <int kPending>
UPFOLD_DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to a sum across.
UPFOLD_DEVICE void pin(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }

// Keeps the compiler from finding out what this is: it would compute it anew wherever it is used.
UPFOLD_DEVICE void hide(std::uint32_t& word) { asm volatile("" : "+r"(word)); }
UPFOLD_DEVICE void hide(std::uint64_t& words) { asm volatile("" : "+l"(words)); }

// Where parts of what begins at `base` lie in shared memory. That address is known by a register alone: the compiler would else
// find it wherever it is asked for, from the block's number in its cluster (the gradient of the input up to 8 % longer in all,
// H200).
struct SharedAddress {
  const unsigned char* base;
  std::uint32_t first;

  explicit __device__ __forceinline__ SharedAddress(const void* from)
      : base(static_cast<const unsigned char*>(from)), first(shared_address(from)) {
    hide(first);
  }
  __device__ __forceinline__ std::uint32_t of(const void* part) const {
    return first + std::uint32_t(static_cast<const unsigned char*>(part) - base);
  }
};

// Keeps a register that a product reads from being another's up to here.
UPFOLD_DEVICE void keep(const std::uint32_t& word) { asm volatile("" ::"r"(word) : "memory"); }

// Of 16-bit values whose a lies as [reduction][64 rows], 128 bytes each, in order of `long_row_descriptor`.
template <typename Value>
struct Turned;
// Of those whose b lies so: [columns in groups of a row][reduction][a row of 64 or 32 columns].
template <typename Value>
struct TurnedColumns;
// And of those of which both do.
template <typename Value>
struct TurnedBoth;

// sums += a b of 64 rows, 8 * kN8 columns and two vectors of the reduction; column tile j adds to sums[j * kStep + kFirst], of a
// warp's 16 rows as above. Where `adds` is 0, the sums begin with the product, whatever they held.
template <typename Value, int kN8, int kStep, int kFirst>
struct WarpgroupCore;

#define UPFOLD_SUMS_1(j)                                                                                \
  "+f"(s[(j) * kStep + kFirst][0]), "+f"(s[(j) * kStep + kFirst][1]), "+f"(s[(j) * kStep + kFirst][2]), \
      "+f"(s[(j) * kStep + kFirst][3])
#define UPFOLD_SUMS_2(j) UPFOLD_SUMS_1(j), UPFOLD_SUMS_1(j + 1)
#define UPFOLD_SUMS_4(j) UPFOLD_SUMS_2(j), UPFOLD_SUMS_2(j + 2)
#define UPFOLD_SUMS_8(j) UPFOLD_SUMS_4(j), UPFOLD_SUMS_4(j + 4)
#define UPFOLD_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define UPFOLD_NAMES_16 UPFOLD_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define UPFOLD_NAMES_24 UPFOLD_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define UPFOLD_NAMES_32                                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define UPFOLD_NAMES_64                                                                                              \
  UPFOLD_NAMES_32                                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define UPFOLD_NAMES_80 UPFOLD_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define UPFOLD_NAMES_96                                                                                              \
  UPFOLD_NAMES_64                                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define UPFOLD_NAMES_128                                                                                             \
  UPFOLD_NAMES_96                                                                                                    \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define UPFOLD_WARPGROUP_CORE(Value, kN8_, shape_and_types, names, descriptors, flag, turns, ...)                       \
  template <int kStep, int kFirst>                                                                                      \
  struct WarpgroupCore<Value, kN8_, kStep, kFirst> {                                                                    \
    static __device__ __forceinline__ void add(float (&s)[kN8_ * kStep][4], std::uint64_t a, std::uint64_t b,           \
                                               std::uint32_t adds = 1) {                                                \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.u32 adds, " flag ", 0;\nwgmma.mma_async.sync.aligned." shape_and_types \
                   " {" names "}, " descriptors ", adds, 1, 1" turns ";\n}"                                             \
                   : __VA_ARGS__                                                                                        \
                   : "l"(a), "l"(b), "r"(adds));                                                                        \
    }                                                                                                                   \
  };
#define UPFOLD_WARPGROUP_CORES(Value, depth, types, turns)                                                                     \
  UPFOLD_WARPGROUP_CORE(Value, 2, "m64n16" depth "." types, UPFOLD_NAMES_8, "%8, %9", "%10", turns, UPFOLD_SUMS_2(0))          \
  UPFOLD_WARPGROUP_CORE(Value, 6, "m64n48" depth "." types, UPFOLD_NAMES_24, "%24, %25", "%26", turns, UPFOLD_SUMS_4(0),       \
                        UPFOLD_SUMS_2(4))                                                                                      \
  UPFOLD_WARPGROUP_CORE(Value, 4, "m64n32" depth "." types, UPFOLD_NAMES_16, "%16, %17", "%18", turns, UPFOLD_SUMS_4(0))       \
  UPFOLD_WARPGROUP_CORE(Value, 8, "m64n64" depth "." types, UPFOLD_NAMES_32, "%32, %33", "%34", turns, UPFOLD_SUMS_8(0))       \
  UPFOLD_WARPGROUP_CORE(Value, 16, "m64n128" depth "." types, UPFOLD_NAMES_64, "%64, %65", "%66", turns, UPFOLD_SUMS_8(0),     \
                        UPFOLD_SUMS_8(8))                                                                                      \
  UPFOLD_WARPGROUP_CORE(Value, 20, "m64n160" depth "." types, UPFOLD_NAMES_80, "%80, %81", "%82", turns, UPFOLD_SUMS_8(0),     \
                        UPFOLD_SUMS_8(8), UPFOLD_SUMS_4(16))                                                                   \
  UPFOLD_WARPGROUP_CORE(Value, 24, "m64n192" depth "." types, UPFOLD_NAMES_96, "%96, %97", "%98", turns, UPFOLD_SUMS_8(0),     \
                        UPFOLD_SUMS_8(8), UPFOLD_SUMS_8(16))                                                                   \
  UPFOLD_WARPGROUP_CORE(Value, 32, "m64n256" depth "." types, UPFOLD_NAMES_128, "%128, %129", "%130", turns, UPFOLD_SUMS_8(0), \
                        UPFOLD_SUMS_8(8), UPFOLD_SUMS_8(16), UPFOLD_SUMS_8(24))
UPFOLD_WARPGROUP_CORES(__half, "k16", "f32.f16.f16", ", 0, 0")
UPFOLD_WARPGROUP_CORES(__nv_bfloat16, "k16", "f32.bf16.bf16", ", 0, 0")
UPFOLD_WARPGROUP_CORES(float, "k8", "f32.tf32.tf32", "")
UPFOLD_WARPGROUP_CORES(Turned<__half>, "k16", "f32.f16.f16", ", 1, 0")
UPFOLD_WARPGROUP_CORES(Turned<__nv_bfloat16>, "k16", "f32.bf16.bf16", ", 1, 0")
UPFOLD_WARPGROUP_CORES(TurnedColumns<__half>, "k16", "f32.f16.f16", ", 0, 1")
UPFOLD_WARPGROUP_CORES(TurnedColumns<__nv_bfloat16>, "k16", "f32.bf16.bf16", ", 0, 1")
UPFOLD_WARPGROUP_CORES(TurnedBoth<__half>, "k16", "f32.f16.f16", ", 1, 1")
UPFOLD_WARPGROUP_CORES(TurnedBoth<__nv_bfloat16>, "k16", "f32.bf16.bf16", ", 1, 1")
#undef UPFOLD_WARPGROUP_CORES
#undef UPFOLD_WARPGROUP_CORE

// The same with a from registers, as a warp's 16 rows of `TensorCore` above; it adds to the column tiles from kFirst on.
template <typename Value, int kN8, int kFirst>
struct WarpgroupRows;

#define UPFOLD_ROWS(j) "+f"(s[kFirst + (j)][0]), "+f"(s[kFirst + (j)][1]), "+f"(s[kFirst + (j)][2]), "+f"(s[kFirst + (j)][3])
#define UPFOLD_ROWS_2(j) UPFOLD_ROWS(j), UPFOLD_ROWS(j + 1)
#define UPFOLD_ROWS_4(j) UPFOLD_ROWS_2(j), UPFOLD_ROWS_2(j + 2)
#define UPFOLD_ROWS_16(j) UPFOLD_ROWS_4(j), UPFOLD_ROWS_4(j + 4), UPFOLD_ROWS_4(j + 8), UPFOLD_ROWS_4(j + 12)
#define UPFOLD_WARPGROUP_ROWS(Value, kN8_, shape_and_types, names, operands, turn, ...)                                     \
  template <int kFirst>                                                                                                     \
  struct WarpgroupRows<Value, kN8_, kFirst> {                                                                               \
    template <int kCount>                                                                                                   \
    static __device__ __forceinline__ void add(float (&s)[kCount][4], const std::uint32_t (&a)[4], std::uint64_t b) {       \
      static_assert(kFirst + kN8_ <= kCount, "column tiles");                                                               \
      asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\nwgmma.mma_async.sync.aligned." shape_and_types " {" names \
                   "}, " operands ", adds, 1, 1" turn ";\n}"                                                                \
                   : __VA_ARGS__                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                   \
    }                                                                                                                       \
  };
#define UPFOLD_WARPGROUP_ROWS_OF(Value, depth, types, turn)                                                                    \
  UPFOLD_WARPGROUP_ROWS(Value, 2, "m64n16" depth "." types, UPFOLD_NAMES_8, "{%8, %9, %10, %11}, %12", turn, UPFOLD_ROWS_2(0)) \
  UPFOLD_WARPGROUP_ROWS(Value, 6, "m64n48" depth "." types, UPFOLD_NAMES_24, "{%24, %25, %26, %27}, %28", turn,                \
                        UPFOLD_ROWS_4(0), UPFOLD_ROWS_2(4))                                                                    \
  UPFOLD_WARPGROUP_ROWS(Value, 4, "m64n32" depth "." types, UPFOLD_NAMES_16, "{%16, %17, %18, %19}, %20", turn,                \
                        UPFOLD_ROWS_4(0))                                                                                      \
  UPFOLD_WARPGROUP_ROWS(Value, 8, "m64n64" depth "." types, UPFOLD_NAMES_32, "{%32, %33, %34, %35}, %36", turn,                \
                        UPFOLD_ROWS_4(0), UPFOLD_ROWS_4(4))                                                                    \
  UPFOLD_WARPGROUP_ROWS(Value, 16, "m64n128" depth "." types, UPFOLD_NAMES_64, "{%64, %65, %66, %67}, %68", turn,              \
                        UPFOLD_ROWS_16(0))                                                                                     \
  UPFOLD_WARPGROUP_ROWS(Value, 32, "m64n256" depth "." types, UPFOLD_NAMES_128, "{%128, %129, %130, %131}, %132", turn,        \
                        UPFOLD_ROWS_16(0), UPFOLD_ROWS_16(16))
UPFOLD_WARPGROUP_ROWS_OF(__half, "k16", "f32.f16.f16", ", 0")
UPFOLD_WARPGROUP_ROWS_OF(__nv_bfloat16, "k16", "f32.bf16.bf16", ", 0")
UPFOLD_WARPGROUP_ROWS_OF(float, "k8", "f32.tf32.tf32", "")
#undef UPFOLD_WARPGROUP_ROWS_OF
#undef UPFOLD_WARPGROUP_ROWS

// The same of 16-bit values, of which both operands lie turned: swizzled rows along the reduction. Eight rows follow one another,
// groups of eight at group_pitch; vector_pitch is the distance of columns beyond a row's.
template <typename Value, int kN8, int kFirst>
struct WarpgroupTurned;

#define UPFOLD_WARPGROUP_TURNED(Value, kN8_, shape_and_types, names, descriptors, ...)                                      \
  template <int kFirst>                                                                                                     \
  struct WarpgroupTurned<Value, kN8_, kFirst> {                                                                             \
    template <int kCount>                                                                                                   \
    static __device__ __forceinline__ void add(float (&s)[kCount][4], std::uint64_t a, std::uint64_t b) {                   \
      static_assert(kFirst + kN8_ <= kCount, "column tiles");                                                               \
      asm volatile("{\n.reg .pred adds;\nsetp.eq.u32 adds, 0, 0;\nwgmma.mma_async.sync.aligned." shape_and_types " {" names \
                   "}, " descriptors ", adds, 1, 1, 1, 1;\n}"                                                               \
                   : __VA_ARGS__                                                                                            \
                   : "l"(a), "l"(b));                                                                                       \
    }                                                                                                                       \
  };
#define UPFOLD_WARPGROUP_TURNED_OF(Value, types)                                                                             \
  UPFOLD_WARPGROUP_TURNED(Value, 8, "m64n64k16." types, UPFOLD_NAMES_32, "%32, %33", UPFOLD_ROWS_4(0), UPFOLD_ROWS_4(4))     \
  UPFOLD_WARPGROUP_TURNED(Value, 16, "m64n128k16." types, UPFOLD_NAMES_64, "%64, %65", UPFOLD_ROWS_16(0))                    \
  UPFOLD_WARPGROUP_TURNED(Value, 24, "m64n192k16." types, UPFOLD_NAMES_96, "%96, %97", UPFOLD_ROWS_16(0), UPFOLD_ROWS_4(16), \
                          UPFOLD_ROWS_4(20))                                                                                 \
  UPFOLD_WARPGROUP_TURNED(Value, 32, "m64n256k16." types, UPFOLD_NAMES_128, "%128, %129", UPFOLD_ROWS_16(0), UPFOLD_ROWS_16(16))
UPFOLD_WARPGROUP_TURNED_OF(__half, "f32.f16.f16")
UPFOLD_WARPGROUP_TURNED_OF(__nv_bfloat16, "f32.bf16.bf16")
#undef UPFOLD_WARPGROUP_TURNED_OF
#undef UPFOLD_WARPGROUP_TURNED
#undef UPFOLD_NAMES_128
#undef UPFOLD_NAMES_96
#undef UPFOLD_NAMES_80
#undef UPFOLD_NAMES_64
#undef UPFOLD_NAMES_32
#undef UPFOLD_NAMES_24
#undef UPFOLD_NAMES_16
#undef UPFOLD_NAMES_8
#undef UPFOLD_ROWS_16
#undef UPFOLD_ROWS_4
#undef UPFOLD_ROWS_2
#undef UPFOLD_ROWS
#undef UPFOLD_SUMS_8
#undef UPFOLD_SUMS_4
#undef UPFOLD_SUMS_2
#undef UPFOLD_SUMS_1

// Four matrices of 8 x 8 halves as `load_matrices` gives them (mma.cuh) to shared memory: lane i names row i % 8 of matrix i / 8.
UPFOLD_DEVICE void store_matrices(std::uint32_t row, const std::uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Registers of a thread, from here on, of all of a warpgroup.
template <int kRegisters>
UPFOLD_DEVICE void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
UPFOLD_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif

}  // namespace upfold::cuda
