// Compute capability 9.0: the copy engine, the barriers that it shares with threads, and how blocks of a cluster and warps of a
// block meet. Inline PTX, as in mma.cuh.
#pragma once

#include "box_map.h"
#include "values.cuh"

namespace upfold::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
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
#endif

}  // namespace upfold::cuda
