// What the plan of the fused gradient of the weight by boxes weighs (fused_weight_boxes_plan.cuh).
#pragma once

#include "fused_weight_planner.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kBoxStaticBytes = sizeof(FusedWeightBoxBarriers) + kBoxAlignment;

// In cycles: a product of 2048 sums, and times that where rows are cut; a row of a box, 16 bytes of it, as many zeros because
// they lie outside, a request to the second-level cache; what a step takes beside; a microsecond.
constexpr double kProductCycles = 256, kCuttingProducts = 1.1, kRowCycles = 1.3, kVectorCycles = 0.5, kOutsideCycles = 1.8,
                 kRequestCycles = 1.85, kStepCycles = 150, kMicrosecondCycles = 1755;
constexpr std::int64_t kLineBytes = 128, kSectorBytes = 32;  // of the second-level cache
// Requests more of a row of a box that begins within a sector.
constexpr double kPartsOfSectors = 0.9;
// How much longer all takes with two stages, or three, and what shared memory does, whose accesses also wait for one another.
constexpr double kTwoStages = 1.2, kThreeStages = 1.05, kSharedWaits = 1.3;
// How much longer rows that are joined must be expected to take than others, whose kernels ask less.
constexpr double kJoined = 1.35;
// Packing, beside what its bytes take; a byte.
constexpr double kPackMicroseconds = 1.5, kPackedByteMicroseconds = 6.7e-7;
constexpr std::int64_t kMostBoxes = 10, kMostPieces = 16, kMostCopies = 96;  // of a piece, of a step
constexpr std::int64_t kMostBox = 256;                                       // elements of an axis of a box
constexpr std::int64_t kMostTogether = 4;                                    // blocks of a cluster
constexpr std::int64_t kLeastSharedBytes = 5 << 18;                          // of y in a block, from which sharing it pays (H100)
constexpr std::int64_t kPlaneRows = kPlaneChannels, kPartRows = 32;          // channels of a box of x that is no whole tile

// A piece is some boxes of x next to one another, of so many vectors each, of the last one maybe not all; y has `pitch` bytes
// between rows, and its boxes begin at multiples of `align` bytes of their rows.
struct BoxCut : WeightCut {
  std::int64_t box_vectors, pitch, align;
  std::int64_t steps = 0;
  double cycles = 0;  // of a step
  std::int64_t boxes() const { return ceil_div(row_vectors, box_vectors); }
};
// What boxes take of the copy engine, whose time goes by rows and vectors, or of the second-level cache, where a request has what
// a row of a box has of a line, or of a sector that it has half of (H100, all multiprocessors: one every 1.85 cycles of each).
struct BoxCopies {
  double rows = 0, vectors = 0, outside = 0, requests = 0;
  void add(double count, std::int64_t row_vectors, std::int64_t align) {
    const std::int64_t bytes = 16 * row_vectors, known = std::max(align, kSectorBytes);
    double own = 0;
    for (std::int64_t at = 0; at < bytes; at += kLineBytes) {
      const std::int64_t chunk = std::min(kLineBytes, bytes - at);
      own += 1 + double(std::max<std::int64_t>(0, chunk - known)) / kLineBytes + (align < kSectorBytes ? kPartsOfSectors : 0);
    }
    rows += count, vectors += count * double(row_vectors), requests += count * own;
  }
  double cycles() const {
    return std::max(rows * kRowCycles + vectors * kVectorCycles, requests * kRequestCycles) + outside * kOutsideCycles;
  }
};

}  // namespace
}  // namespace upfold::cuda
