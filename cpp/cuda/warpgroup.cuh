// Compute capability 9.0: products of warpgroups, the copy engine, and the barriers between them. Inline PTX, as in mma.cuh,
// which describes the layouts and includes this at its end.
#pragma once

#include "box_map.h"
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
  UPFOLD_WARPGROUP_CORE(Value, 8, "m64n64" depth "." types, UPFOLD_NAMES_32, "%32, %33", "%34", turns, UPFOLD_SUMS_4(0),       \
                        UPFOLD_SUMS_4(4))                                                                                      \
  UPFOLD_WARPGROUP_CORE(Value, 16, "m64n128" depth "." types, UPFOLD_NAMES_64, "%64, %65", "%66", turns, UPFOLD_SUMS_4(0),     \
                        UPFOLD_SUMS_4(4), UPFOLD_SUMS_4(8), UPFOLD_SUMS_4(12))                                                 \
  UPFOLD_WARPGROUP_CORE(Value, 20, "m64n160" depth "." types, UPFOLD_NAMES_80, "%80, %81", "%82", turns, UPFOLD_SUMS_4(0),     \
                        UPFOLD_SUMS_4(4), UPFOLD_SUMS_4(8), UPFOLD_SUMS_4(12), UPFOLD_SUMS_4(16))                              \
  UPFOLD_WARPGROUP_CORE(Value, 32, "m64n256" depth "." types, UPFOLD_NAMES_128, "%128, %129", "%130", turns, UPFOLD_SUMS_4(0), \
                        UPFOLD_SUMS_4(4), UPFOLD_SUMS_4(8), UPFOLD_SUMS_4(12), UPFOLD_SUMS_4(16), UPFOLD_SUMS_4(20),           \
                        UPFOLD_SUMS_4(24), UPFOLD_SUMS_4(28))
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
#undef UPFOLD_SUMS_4
#undef UPFOLD_SUMS_2
#undef UPFOLD_SUMS_1

// Barriers in shared memory: a phase ends when `count` threads have arrived and the bytes that they expect are there. A wait for
// the parity of a phase returns when that phase has ended.
UPFOLD_DEVICE void barrier_make(std::uint32_t barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes new barriers known to asynchronous copies, before the threads of the block meet.
UPFOLD_DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
UPFOLD_DEVICE void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier that lies so in another block of the cluster. It releases nothing beyond the block, which would take half a
// microsecond each time: what such a barrier guards is written by the copy engine alone, and read by products that have ended.
UPFOLD_DEVICE void barrier_arrive_at(std::uint32_t barrier, std::uint32_t block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(
          barrier),
      "r"(block)
      : "memory");
}
UPFOLD_DEVICE void barrier_arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
UPFOLD_DEVICE void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n.reg .pred ended;\nmbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\nselp.u32 %0, 1, 0, ended;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

// Whether it would not wait.
UPFOLD_DEVICE bool barrier_passed(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n.reg .pred ended;\nmbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\nselp.u32 %0, 1, 0, ended;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Arrives when all asynchronous copies that this thread has begun are done.
UPFOLD_DEVICE void barrier_arrive_copied(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Asks the second-level cache for a line, also before the kernels ahead, which may write it, have ended: all goes through it.
UPFOLD_DEVICE void ask_for(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// `bytes` of it, a multiple of 16.
UPFOLD_DEVICE void ask_for_bulk(const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}
// `bytes`, a multiple of 16, from global to shared memory; they count for the barrier.
UPFOLD_DEVICE void copy_bulk(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// The same to all blocks of the cluster whose bits are set, to where `to` lies in each; they count for the barrier of each.
UPFOLD_DEVICE void copy_bulk_to_blocks(std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t barrier,
                                       std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}
// The box of a tensor that begins `at` its five axes, innermost first and outside it or not, to shared memory; its bytes count
// for the barrier. It must begin at a multiple of 16 bytes of the first axis, else the instruction is illegal, and of 128 in
// shared memory. A swizzle of rows of 2^k vectors counts them from a multiple of 8 rows: vector v of row r lies at v ^ (r * 2^k /
// 8 % 2^k), as the products below want it.
UPFOLD_DEVICE void copy_box(std::uint32_t to, const BoxMap& map, const std::int32_t (&at)[5], std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(to),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier)
      : "memory");
}
// The same to all blocks of the cluster whose bits are set, to where `to` lies in each; it counts for the barrier of each.
UPFOLD_DEVICE void copy_box_to_blocks(std::uint32_t to, const BoxMap& map, const std::int32_t (&at)[5], std::uint32_t barrier,
                                      std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
      "l"(&map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier), "h"(blocks)
      : "memory");
}
// Four matrices of 8 x 8 halves as `load_matrices` gives them (mma.cuh) to shared memory: lane i names row i % 8 of matrix i / 8.
UPFOLD_DEVICE void store_matrices(std::uint32_t row, const std::uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// The box at its five axes from shared memory, which may be written again after `await_box_reads`: the same thread waits
// until at most kPending of the stores that it began are still reading. What lies outside the tensor is not stored.
UPFOLD_DEVICE void store_box(const BoxMap& map, std::uint32_t from, const std::int32_t (&at)[5]) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(from), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
      : "memory");
}
template <int kPending>
UPFOLD_DEVICE void await_box_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Between ordinary stores to shared memory and the products of others, or boxes, that read them.
UPFOLD_DEVICE void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Threads of the blocks of a cluster that have not ended meet: what they wrote to shared memory is known to all then. Warps are
// counted, so that one whose lanes come at different times would be counted twice.
UPFOLD_DEVICE void meet_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two steps: the first says that this warp has read what it wants of others, the second waits for theirs.
UPFOLD_DEVICE void leave_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
UPFOLD_DEVICE void await_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// 16 bytes of the shared memory of a block of the cluster, from where they lie in one's own.
UPFOLD_DEVICE float4 load_of_block(std::uint32_t at, std::uint32_t block) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\nld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(at), "r"(block));
  return v;
}

// Threads of some warps meet; number 0 is __syncthreads.
template <int kNumber, int kThreads>
UPFOLD_DEVICE void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}
template <int kThreads>
UPFOLD_DEVICE void arrive(std::int32_t number) {  // and does not wait for the others
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
}
template <int kThreads>
UPFOLD_DEVICE void meet(std::int32_t number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kThreads) : "memory");
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
