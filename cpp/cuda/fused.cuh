// The fused method's plan of a transposed convolution: phases, shifts, slots and tiles, shared by the kernel that multiplies and
// the one that packs the weight.
//
// On each axis unit q owns the outputs q * stride .. q * stride + stride - 1, one for each phase. A phase's tap reads input
// q + displacement, so all units of a tile read one patch of the input, shifted by the displacement. A *shift* is one
// displacement on all three axes, in the box [low, low + extent) of each; a *slot* is one (shift, phase) pair that has a tap.
// A *set* is the phases that one block owns: kPhasesH of the height's times kPhasesW of the width's, of one phase of the depth.
#pragma once

#include "divide.cuh"
#include "taps.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kMostShifts = 128;    // in the box of displacements
constexpr int kMostPhases = 4;      // of one set
constexpr int kWordBytes = 16;      // of one such vector
constexpr int kSwizzleBytes = 512;  // what the patches of warpgroups are aligned to
// Buffers that the barriers of a block are made for: of patches of packed x; of raw x and of weights, where rows are pixels.
constexpr int kMostPatches = 4, kMostRawBuffers = 8, kMostWeightBuffers = 32;

constexpr int kPackThreads = 256;  // of the launch that packs
// Pixels and chunks of packed x that a warp lays out, by the bytes of a value: a sector's worth of pixels, and as many loads at
// a time as hide their latency.
template <int kElement>
constexpr int kPackedPixels = 32 / kElement;
template <int kElement>
constexpr int kPackedChunks = kElement;

struct FusedAxis {
  AxisTaps<std::int32_t> taps;
  std::int32_t in, out, low, extent;
  std::int32_t tile_log, tile;  // units of a tile, a power of two
  Divisor units, tiles, patch;  // units of the axis; tiles along it; inputs of a tile's patch
  Divisor padded;               // inputs of the patches of all tiles, where x is packed
};

// How x comes into shared memory, in *columns*: runs of `grain` bytes of one row of the patch, for each input channel of a chunk;
// or, where `dense`, 16 bytes of channels of one pixel, for each such vector. Rows are aligned outwards by `skew` elements.
struct FusedRaw {
  bool dense;
  std::int32_t grain, columns, skew;
  std::int32_t span;    // elements from one row of the patch to the next
  std::int32_t pitch;   // bytes from one channel (or vector) to the next
  Divisor row_columns;  // columns of one row
  Divisor row_groups;   // turned together: groups of 8 elements of a row, of 16-bit values; elements of a row, of float32
  std::int32_t groups;  // of the whole patch
};

// How blocks whose rows are pixels read raw x, in bytes: from a pixel to the next, from a word of 32 bits of channels to the
// next, to the fourth behind it, and to the next 8 words; and to the first pixel of a row.
struct PixelReads {
  // Words as they lie; 8 x 8 matrices, which are turned when they are read; words of two 16-bit halves that lie apart; words of
  // two neighbouring pixels at a time, by lanes whose rows these are, and as they lie by others.
  enum Kind : std::int32_t { kWords, kMatrices, kHalves, kPairs };
  Kind kind;
  std::int32_t pixel, word, half, step, skew;
};

// The slots of a set as blocks of warpgroups read them, from the launch's arguments: each with its phase in the lowest bits, or,
// where rows are pixels, one entry for each shift with the set of its phases there; whether it is the last of a group of shifts
// or of the set; and the offset of its shift in patch pixels. The first one of a set without taps is kNoSlot.
using SlotEntry = std::uint32_t;
constexpr int kMostSlotEntries = 512, kSlotOffsetShift = 8;
constexpr SlotEntry kSlotPhases = 15, kSlotEndsGroup = 16, kSlotEndsSet = 32, kNoSlot = ~0u;
constexpr std::uint16_t kNoTap = 0xffff;  // and behind the last slot of a set

struct FusedJob {
  FusedAxis axis[3];  // d, h, w
  FusedRaw raw;
  PixelReads reads;
  Divisor oc_tiles, sets_w, sets_h, sets_d;
  Divisor pixel_tiles;  // of all samples
  std::int32_t patch_pixels, patch_pitch, tile_n, batch;
  std::int32_t live_columns;            // of packed x that some unit reads; those behind are neither written nor copied
  std::int32_t raw_bytes, raw_buffers;  // of one chunk of raw x; chunks that warpgroups copy ahead, raw or packed
  std::int32_t weight_buffers;          // stages of weights, of warpgroups
  bool direct, joined;                  // outputs of a unit in all width phases, or of two, are one aligned vector of y
  bool resident;                        // the buffers hold all of the weights, and a block keeps its channels and phases
  std::int32_t group_pitch;             // pixels of the patch from 8 units of a warpgroup product to the next
  bool flat;                            // one shift at most: a tile is a run of units of all samples, its patch is its units
  bool dense_y;                         // 16 bytes of channels of y are one aligned vector
  bool wide;                            // outputs of neighbouring units in all width phases of a set are one aligned vector
  std::int64_t units;                   // of all samples
  std::int32_t ic, oc;                  // channels of a group
  std::uint32_t groups;
  std::int32_t chunks;  // of the reduction
  Divisor splits;       // of the reduction, each of split_chunks chunks in a block of its own
  std::int32_t split_chunks;
  std::int32_t most_slots;    // of a set
  std::int32_t group_shifts;  // shifts whose weights lie in shared memory together
  std::int32_t stage_slots;   // most slots of such a group
  std::int64_t x_n, x_c, x_axis[3], y_n, y_c, y_axis[3], w_ic, w_oc, w_axis[3];
  Activation activation;
  float slope;
  SlotEntry slots[kMostSlotEntries];     // [set][most_slots], of warpgroups
  std::uint16_t taps[kMostSlotEntries];  // the same: numbers in the kernel; in all no more than it has
};
static_assert(sizeof(FusedJob) <= 4000, "with the pointers it is the arguments of a launch");

// The taps of a set, found by the pack kernel.
struct alignas(16) ShiftList {
  std::int32_t shifts, slots;
  std::int32_t offset[kMostShifts];          // of the shift, in patch pixels
  std::int32_t first_slot[kMostShifts + 1];  // slots of a shift are numbered in the order of the phases
  std::uint8_t phases[kMostShifts];          // bit p: phase p has a tap here
};

// Where a column of raw x comes from, without the channel (-1: zeros), and where in a channel's bytes it goes.
struct alignas(16) RawColumn {
  std::int64_t from;
  std::int32_t to;
};

// The tap that carries displacement `shift` to phase `residue` of an axis, or -1.
UPFOLD_DEVICE std::int32_t tap_at(const AxisTaps<std::int32_t>& a, std::int32_t residue, std::int32_t shift) {
  if (residue >= a.stride) return -1;
  const TapRun<std::int32_t> run = taps_of_output(a, residue);
  const std::int32_t back = run.first_in - shift;
  if (run.first_tap >= a.kernel || back < 0 || back % a.in_step != 0) return -1;
  const std::int32_t tap = run.first_tap + back / a.in_step * a.tap_step;
  return tap < a.kernel ? tap : -1;
}

// First phases of a set on each axis.
struct FusedSet {
  std::int32_t d, h, w;
};

// All threads of a block find the list of a set and the tap of each slot (its number in the kernel).
template <int kPhasesH, int kPhasesW>
UPFOLD_DEVICE void build_list(const FusedJob& job, const FusedSet& set, ShiftList& list, std::int32_t* tap_of_slot) {
  constexpr int kPhases = kPhasesH * kPhasesW;
  __shared__ std::int32_t taps[kMostShifts][kPhases];  // or -1; by place in the box
  __shared__ std::int32_t counts[kMostShifts];
  const std::int32_t box_h = job.axis[1].extent, box_w = job.axis[2].extent, box = job.axis[0].extent * box_h * box_w;
  const std::int32_t patch_h = std::int32_t(job.axis[1].patch.value), patch_w = std::int32_t(job.axis[2].patch.value);
  const std::int32_t step = std::int32_t(blockDim.x);
  for (std::int32_t i = std::int32_t(threadIdx.x); i < box * kPhases; i += step) {
    const std::int32_t at = i / kPhases, p = i % kPhases;
    const std::int32_t tap_d = tap_at(job.axis[0].taps, set.d, at / box_w / box_h + job.axis[0].low);
    const std::int32_t tap_h = tap_at(job.axis[1].taps, set.h + p / kPhasesW, at / box_w % box_h + job.axis[1].low);
    const std::int32_t tap_w = tap_at(job.axis[2].taps, set.w + p % kPhasesW, at % box_w + job.axis[2].low);
    const bool exists = tap_d >= 0 && tap_h >= 0 && tap_w >= 0;
    taps[at][p] = exists ? (tap_d * job.axis[1].taps.kernel + tap_h) * job.axis[2].taps.kernel + tap_w : -1;
  }
  __syncthreads();  // the taps of every place in the box are known
  for (std::int32_t i = std::int32_t(threadIdx.x); i < box; i += step) {
    std::int32_t count = 0;
#pragma unroll
    for (int p = 0; p < kPhases; ++p) count += taps[i][p] >= 0;
    counts[i] = count;
  }
  __syncthreads();  // and their number
  for (std::int32_t i = std::int32_t(threadIdx.x); i <= box; i += step) {
    std::int32_t shifts = 0, slots = 0;  // before this place
    for (std::int32_t j = 0; j < i; ++j) shifts += counts[j] > 0, slots += counts[j];
    if (i == box) {
      list.shifts = shifts, list.slots = slots, list.first_slot[shifts] = slots;
      continue;
    }
    if (counts[i] == 0) continue;
    list.first_slot[shifts] = slots;
    list.offset[shifts] = job.flat ? 0 : (i / box_w / box_h * patch_h + i / box_w % box_h) * patch_w + i % box_w;
    std::uint32_t phases = 0;
#pragma unroll
    for (int p = 0; p < kPhases; ++p) {
      if (taps[i][p] >= 0) phases |= 1u << p, tap_of_slot[slots++] = taps[i][p];
    }
    list.phases[shifts] = std::uint8_t(phases);
  }
  __syncthreads();  // the list is complete
}

}  // namespace upfold::cuda
