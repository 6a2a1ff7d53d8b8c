// The fused gradients of layers with few channels in a group, by products of warps: at most 32 input and 32 output channels, or
// 64 input channels for the gradient of the weight (16-bit types, and float32 as TF32; compute capability 8.0 and newer).
//
// Both read y around a tile of inputs: the rows and columns that its taps reach (the patch) lie in shared memory as *vectors*, 16
// bytes of the channels of a position. The columns are parted by their residue modulo the stride of the width, so that the
// positions that one tap reaches from neighbouring inputs follow one another, and a tap is a distance:
//   patch    [vector of channels][row][residue][position][16 bytes]
// A *segment* is 16 neighbouring inputs of a row. One product:
//   input    x[16 inputs][8 channels] += y[16 inputs][16 channels] * w, for each tap; fragments of w lie ahead of the patch. Its
//            rows are inputs in an order in which a lane gets two neighbours.
//   weight   w[16 output channels][8 input channels] += y * x over the inputs of a segment, for each tap. y is read turned, x
//            where it lies, or of more than 16 channels from shared memory. Warps take segments, and sets of taps where there are
//            many; the sums of a block's warps are added, and then those of all blocks, in fixed orders.
// In float32 a product has half of these channels, or inputs. A block takes tiles in turn, each as a whole: a multiprocessor's
// other blocks multiply while one loads.
#pragma once

#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kSegment = 16;
constexpr int kGroupsWarps = 8, kGroupsThreads = 32 * kGroupsWarps;
constexpr int kMostGroupsTaps = 128;

// kBlocks: of eight input channels; kRows: of 16 output channels.
template <typename Value_, int kBlocks_, int kRows_>
struct GroupsTile {
  using Value = Value_;
  static constexpr int kBlocks = kBlocks_, kChannels = 16 * kRows_;
  static constexpr int kSize = int(sizeof(Value)), kEach = 16 / kSize;       // channels of a vector
  static constexpr int kVectors = kChannels / kEach, kSteps = kVectors / 2;  // steps: products of one tap
  // Blocks of a multiprocessor; segments that a warp multiplies together for the gradient of the input, and whether the operands
  // of a step are read ahead of the products of the one before.
  static constexpr int kResident = kBlocks > 2 ? 2 : 3, kSegments = kBlocks == 2 ? 2 : 4;
  static constexpr bool kAhead = kBlocks <= 2;
  // Of the gradient of the weight: taps whose sums a warp holds, and products of a segment.
  static constexpr int kRows = kRows_, kTaps = kBlocks > 2 ? 2 : 8 / kBlocks, kProducts = kSize / 2;
  static constexpr int kSums = kTaps * kRows * kBlocks;  // of 16 x 8
  static constexpr bool kShared = kBlocks > 2;           // whether x comes into shared memory
};

// How y is read: two neighbouring columns of a channel at a time (16-bit types), one element, or a vector of channels.
enum class GroupsReads : std::int32_t { kPairs, kElements, kVectors };

struct GroupsAxis {
  std::int32_t in, out, stride, pad, dilation;
};

// From the first vector of a segment's first input to that of a tap, in bytes, and from the first element of w, in elements.
struct GroupsTap {
  std::int32_t patch, weight;
};

// A row of the patch of one vector of channels: elements from the tile's first position to it in y, vectors to it in the patch,
// how far it lies from the tile's first position, and its channels that exist.
struct GroupsLine {
  std::int32_t from, to, d, h, channels, padding[3];
};

struct GroupsJob {
  GroupsAxis d, h, w;
  Divisor tiles_w, tiles_h, in_d, groups;  // tiles are numbered by these, samples last
  std::int32_t tiles;                      // of all groups, or where the gradient is the weight's of one
  std::int32_t ic, oc, taps;               // of a group
  std::int32_t tile_h;                     // rows of inputs of a tile
  Divisor segments;                        // of one
  // Rows of the patch: of each plane of the depth; from one to the next in y, and from an input row to the next one in the patch.
  Divisor plane_rows, patch_rows;
  std::int32_t row_step, row_advance;
  // Columns: read at a time, how many such reads of a row; those ahead of the first tap; positions of a residue.
  GroupsReads reads;
  std::int32_t row_reads;
  Divisor row_warps;  // that share a row
  Divisor stride_w;
  std::int32_t lead, residue_vectors;
  std::int32_t row_vectors, vector_stride;  // from row to row, from vector to vector, in vectors
  std::int32_t table_bytes;                 // of the lines, ahead of the rest of shared memory
  std::int32_t weight_bytes;                // of fragments of w, ahead of the patch
  bool pairs;                               // x of two neighbouring inputs is one aligned word, and both exist
  std::int64_t x_n, y_n;
  std::int32_t x_c, x_d, x_h, x_w, y_c, y_d, y_h, y_w, w_ic, w_oc;
  bool groups_first;                   // tiles are numbered by groups first: their channels lie side by side
  bool whole;                          // every vector of channels exists whole
  std::int32_t parts;                  // that the tiles are dealt to: blocks, or blocks of a group
  Divisor ic_tiles;                    // of 32 input channels of a group, of the gradient of the weight
  std::int32_t x_pitch, x_first;       // of x in shared memory: bytes from channel to channel, and ahead of it those of the patch
  std::int32_t sets;                   // of taps, of the gradient of the weight
  GroupsTap tap[kMostGroupsTaps + 2];  // and two of which nothing is stored
};
static_assert(sizeof(GroupsJob) <= 4000, "with the pointers it is the arguments of a launch");

// The first input of a tile.
struct GroupsPlace {
  std::int32_t n, group, id, ih, iw;
};
// Tile `number` of all samples, of this group, or of all groups where it is negative.
UPFOLD_DEVICE GroupsPlace groups_place(const GroupsJob& job, std::int32_t tile, std::int32_t group) {
  std::uint32_t number = std::uint32_t(tile);
  GroupsPlace place;
  place.group = group;
  if (group < 0 && job.groups_first) place.group = std::int32_t(take(job.groups, number));
  place.iw = std::int32_t(take(job.tiles_w, number)) * std::int32_t(job.segments.value) * kSegment;
  place.ih = std::int32_t(take(job.tiles_h, number)) * job.tile_h;
  place.id = std::int32_t(take(job.in_d, number));
  if (group < 0 && !job.groups_first) place.group = std::int32_t(take(job.groups, number));
  place.n = std::int32_t(number);
  return place;
}

// The tiles of a part: neighbours, of which each reads some rows of the one before; or those that many apart, so that parts which
// run side by side read what lies side by side.
struct GroupsRange {
  std::int32_t first, end, step;
};
UPFOLD_DEVICE GroupsRange groups_range(const GroupsJob& job, std::int32_t part) {
  if (job.groups_first) return {part, job.tiles, job.parts};
  return {std::int32_t(std::int64_t(job.tiles) * part / job.parts),
          std::int32_t(std::int64_t(job.tiles) * (part + 1) / job.parts), 1};
}

// The number of this warp, which the compiler then knows to be the same for all of its lanes.
UPFOLD_DEVICE std::int32_t own_warp() { return __shfl_sync(~0u, std::int32_t(threadIdx.x) / 32, 0); }

}  // namespace upfold::cuda
