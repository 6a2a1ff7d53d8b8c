// The row kernel of the direct method and its launch, for one type of values; each type is compiled in a source of its own.
//
// The direct method for few channels in a group: a thread owns kU units and, of each, kSh x kSw neighbouring results of kC
// channels (phases of the H and W axes whose dilation is 1; where none are merged, one result), and sums in registers what it
// reads from the source through the first-level cache. The weight lies in shared memory as (tap, source channel, channel, phase
// h, phase w), read straight from its tensor, a piece at a time. Neighbouring lanes own neighbouring units of the W axis, so that
// loads and stores of a warp are dense. Where units are few, a block's warps share the source channels out between them.
#pragma once

#include "direct_rows.cuh"

namespace upfold::cuda {

constexpr int kPieceBytes = 16384;  // of the weight in shared memory
constexpr int kRowTaps = 128;       // in the table at a time

template <typename Value, int kSh, int kSw, int kC, int kU, int kM>
struct RowsMemory {
  using Total = Sum<Value>;
  static constexpr int kEntry = kC * kSh * kSw * (kM == 0 ? 1 : kM * kM);
  static constexpr std::uint32_t kEntries = kPieceBytes / sizeof(Total) / kEntry;
  alignas(16) Total piece[kEntries * kEntry];
  Total exchange[kDirectThreads];
  Value staged[kDirectThreads / 32][32 * kSw];
  RowTap taps[kRowTaps];
  PhaseAxisTaps axes[3];
};

// Blocks that share a multiprocessor, by the sums of a thread.
template <typename Value, int kSums>
constexpr int kRowBlocks = sizeof(Sum<Value>) > 4 ? 1
                           : kSums <= 16          ? 3
                                                  : 2;

// Entries [first, last), which lie in shared memory; a part takes every parts-th channel, kAhead of them at a time.
template <typename Value, int kSh, int kSw, int kC, int kU, int kM, bool kHalf>
UPFOLD_DEVICE void add_piece(const RowsJob& job, const RowsMemory<Value, kSh, kSw, kC, kU, kM>& memory, std::uint32_t first,
                             std::uint32_t last, std::int32_t phase_w, std::int32_t part,
                             const RowReader<Value, kU, kM, kHalf>& reader, RowSums<Value, kSh, kSw, kC, kU, kM, kHalf>& sums) {
  using Reader = RowReader<Value, kU, kM, kHalf>;
  constexpr int kEntry = RowsMemory<Value, kSh, kSw, kC, kU, kM>::kEntry, kAhead = kM > 0 ? 1 : kU == 1 ? 4 : 2;
  const CorrelateJob& p = job.problem;
  const std::uint32_t parts = std::uint32_t(job.parts);
  std::uint32_t tap = first, channel = take(p.depth, tap);
  for (std::uint32_t entry = first; entry < last; ++tap, channel = 0) {
    const std::uint32_t left = p.depth.value - channel, run = left < last - entry ? left : last - entry;
    const std::uint32_t mask = reader.inside(p, memory.taps[tap]);
    const std::int32_t phases = job.kernel[2] - memory.taps[tap].k[2] - phase_w;  // that have the tap
    const std::int64_t offset = memory.taps[tap].offset + channel * p.source_c;
    const Sum<Value>* const weights = memory.piece + (entry - first) * kEntry;
    for (std::uint32_t i = std::uint32_t(part); i < run; i += kAhead * parts) {
      Value window[kAhead][Reader::kRows][Reader::kColumns];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (a == 0 || i + a * parts < run) reader.load(offset + (i + a * parts) * p.source_c, mask, window[a]);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (a > 0 && i + a * parts >= run) continue;
        if (kM > 0 || kSw == 1 || phases >= kSw) {
          sums.add_window(window[a], weights + (i + a * parts) * kEntry);
        } else {
          sums.add_some(window[a], weights + (i + a * parts) * kEntry, phases);
        }
      }
    }
    entry += run;
  }
}

template <typename Value, int kSh, int kSw, int kC, int kU, int kM, bool kHalf>
__global__ void __launch_bounds__(kDirectThreads, kRowBlocks<Value, kSh * kSw * kC * kU>)
    rows_kernel(const RowsJob job, const Value* __restrict__ source, const Value* __restrict__ w, const Value* __restrict__ bias,
                Value* __restrict__ result) {
  take_turn();
  using Memory = RowsMemory<Value, kSh, kSw, kC, kU, kM>;
  __shared__ Memory memory;
  const CorrelateJob& p = job.problem;
  const RowsBlock block = rows_block(job, kSw);
  const std::int32_t tid = std::int32_t(threadIdx.x), unit_threads = kDirectThreads / job.parts;
  const std::int32_t part = tid / unit_threads, thread = tid % unit_threads;
  if (tid < 3) {
    const std::int32_t residue = tid == 0 ? block.residue[0] : tid == 1 ? block.residue[1] : block.residue[2];
    memory.axes[tid] = phase_axis_taps(p.axis[tid], p.transposed, residue);
  }
  __syncthreads();  // the axes are complete
  const std::int32_t count = memory.axes[0].count * (kM == 0 ? memory.axes[1].count * memory.axes[2].count : 1);
  // A weight that fits stays for all tiles of the block.
  const bool stays = count <= kRowTaps && std::uint32_t(count) * p.depth.value <= Memory::kEntries;
  const std::uint32_t tile0 = block.tile_run * job.tiles_of_run;
  for (std::uint32_t tile = tile0; tile < tile0 + job.tiles_of_run && tile < job.tiles; ++tile) {
    const RowUnits units = row_units(job, tile * std::uint32_t(unit_threads) + std::uint32_t(thread), kU);
    const RowReader<Value, kU, kM, kHalf> reader(job, units, source + std::int64_t(block.group) * p.depth.value * p.source_c);
    RowSums<Value, kSh, kSw, kC, kU, kM, kHalf> sums = {};
    for (std::int32_t base = 0; base < count; base += kRowTaps) {
      const std::int32_t some = count - base < kRowTaps ? count - base : kRowTaps;
      const std::uint32_t entries = std::uint32_t(some) * p.depth.value;
      const bool fills = !stays || tile == tile0;
      if (fills) {
        __syncthreads();  // everyone has left the taps before
        if (tid < some) memory.taps[tid] = row_tap<kM>(job, memory.axes, base + tid);
        __syncthreads();  // the taps are complete
      }
      for (std::uint32_t first = 0; first < entries; first += Memory::kEntries) {
        const std::uint32_t last = entries - first < Memory::kEntries ? entries : first + Memory::kEntries;
        if (fills) {
          if (first > 0) __syncthreads();  // everyone has left the piece before
          fill_piece<Value, kSh, kSw, kC, kM, kHalf>(job, block, memory.taps, first, last, w, memory.piece);
          __syncthreads();  // the piece is complete
        }
        add_piece(job, memory, first, last, block.phase_w, part, reader, sums);
      }
    }
    sums.join(part, job.parts, thread, unit_threads, memory.exchange);
    if (part > 0) continue;
    sums.finish_all(p, block, bias);
    store_rows(job, block, units, result, memory.staged[tid / 32], sums);
  }
}

// The variants: kSh, kSw, kC, kU, kM, kHalf. The first serve every problem of every type, the others those of the narrow types.
#define UPFOLD_ROWS_PLAIN(DO, type) \
  DO(type, 1, 1, 1, 1, 0, false)    \
  DO(type, 1, 1, 4, 1, 0, false)
#define UPFOLD_ROWS_OF_CHANNELS(DO, type, kC) \
  DO(type, 1, 2, kC, 1, 0, false)             \
  DO(type, 1, 3, kC, 1, 0, false)             \
  DO(type, 1, 4, kC, 1, 0, false)             \
  DO(type, 1, 8, kC, 1, 0, false)             \
  DO(type, 2, 2, kC, 1, 0, false)             \
  DO(type, 1, 1, kC, kManyUnits, 0, false)    \
  DO(type, 1, 2, kC, kManyUnits, 0, false)    \
  DO(type, 1, 3, kC, kManyUnits, 0, false)    \
  DO(type, 1, 4, kC, kManyUnits, 0, false)    \
  DO(type, 2, 2, kC, kManyUnits, 2, false)    \
  DO(type, 2, 2, kC, kManyUnits, 2, true)
#define UPFOLD_ROWS_NARROW(DO, type)      \
  UPFOLD_ROWS_OF_CHANNELS(DO, type, 1)    \
  UPFOLD_ROWS_OF_CHANNELS(DO, type, 3)    \
  UPFOLD_ROWS_OF_CHANNELS(DO, type, 4)    \
  DO(type, 1, 1, 3, 1, 0, false)          \
  DO(type, 1, 8, 1, kManyUnits, 2, false) \
  DO(type, 1, 8, 1, kManyUnits, 2, true)

#define UPFOLD_INSTANTIATE_ROWS(Value, kSh, kSw, kC, kU, kM, kHalf)                                                   \
  template __global__ void rows_kernel<Value, kSh, kSw, kC, kU, kM, kHalf>(const RowsJob, const Value*, const Value*, \
                                                                           const Value*, Value*);
// In namespace upfold::cuda, once for each type; the second beside it for the narrow ones.
#define UPFOLD_INSTANTIATE_PLAIN_ROWS(Value) UPFOLD_ROWS_PLAIN(UPFOLD_INSTANTIATE_ROWS, Value)
#define UPFOLD_INSTANTIATE_NARROW_ROWS(Value) UPFOLD_ROWS_NARROW(UPFOLD_INSTANTIATE_ROWS, Value)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {

// All that follows from a problem.
struct RowsPlan {
  int phases_h, phases_w, channels, units, window;  // kSh, kSw, kC, kU, kM
  bool half;                                        // kHalf
  std::int64_t merged_w, channel_chunks, phase_chunks, phases, unit_groups, parts, tiles, tiles_of_run, blocks, steps;
};

template <typename Value, int kSh, int kSw, int kC, int kU, int kM, bool kHalf>
bool launch_rows(const Launch& launch, const Problem& p, const DirectOperands& operands, const RowsPlan& plan,
                 const RowsJob& job) {
  if (plan.phases_h != kSh || plan.phases_w != kSw || plan.channels != kC || plan.units != kU) return false;
  if (plan.window != kM || plan.half != kHalf) return false;
  const bool transposed = transposes(p);
  launch_in_turn("direct", rows_kernel<Value, kSh, kSw, kC, kU, kM, kHalf>, launch, unsigned(plan.blocks), kDirectThreads, job,
                 static_cast<const Value*>(transposed ? operands.x : operands.y), static_cast<const Value*>(operands.w),
                 static_cast<const Value*>(transposed ? operands.bias : nullptr),
                 static_cast<Value*>(transposed ? operands.y : operands.x));
  return true;
}

template <typename Value>
void run_rows(const Launch& launch, const Problem& p, const DirectOperands& operands, const RowsPlan& plan, const RowsJob& rows) {
  bool launched = false;
#define UPFOLD_RUN(type, kSh, kSw, kC, kU, kM, kHalf) \
  launched = launched || launch_rows<type, kSh, kSw, kC, kU, kM, kHalf>(launch, p, operands, plan, rows);
  UPFOLD_ROWS_PLAIN(UPFOLD_RUN, Value)
  if constexpr (sizeof(Value) <= 4) {
    UPFOLD_ROWS_NARROW(UPFOLD_RUN, Value)
  }
#undef UPFOLD_RUN
  require(launched, "no row kernel has ", plan.phases_h, " x ", plan.phases_w, " phases of ", plan.channels, " channels");
}

}  // namespace upfold::cuda
#endif
