// The fused gradients of layers with few channels in a group: at most 16 input and 16 output channels, by products of warps
// (16-bit types, and float32 as TF32; compute capability 8.0 and newer).
//
// Both read y around a tile of inputs: the rows and columns that its taps reach (the patch) lie in shared memory as *vectors*, 16
// bytes of the channels of a position. The columns are parted by their residue modulo the stride of the width, so that the
// positions that one tap reaches from neighbouring inputs follow one another, and a tap is a distance:
//   patch    [vector of channels][row][residue][position][16 bytes]
// A *segment* is 16 neighbouring inputs of a row.
//   input    x[16 inputs][8 or 16 channels] += y[16 inputs][16 channels] * w, a product for each tap; fragments of w lie in
//   shared
//            memory too. The rows of a product are inputs in an order in which a lane gets two neighbours.
//   weight   w[16 output channels][8 or 16 input channels] += y * x over the inputs of a segment, for each tap; the columns are
//            read turned, and x as fragments from where it lies. Warps take segments, and sets of taps where there are many; the
//            sums of a block's warps are added, and then those of all blocks, in fixed orders.
#pragma once

#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kGroupsChannels = 16;  // output channels of a product
constexpr int kSegment = 16, kGroupsWarps = 8, kGroupsThreads = 32 * kGroupsWarps;
constexpr int kMostGroupsTaps = 128;
constexpr int kSegmentsOfWarp = 4;  // that the gradient of the input multiplies together

// kBlocks: of eight input channels.
template <typename Value_, int kBlocks_>
struct GroupsTile {
  using Value = Value_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kSize = int(sizeof(Value)), kEach = 16 / kSize;             // channels of a vector
  static constexpr int kVectors = kGroupsChannels / kEach, kSteps = kVectors / 2;  // steps: products of one tap
  static constexpr int kTaps = 16 / kBlocks;                                       // whose sums a warp holds
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

struct GroupsJob {
  GroupsAxis d, h, w;
  Divisor tiles_w, tiles_h, in_d, groups;  // tiles are numbered by these, samples last
  std::int32_t tiles;                      // of a group: for the weight, of all samples
  std::int32_t ic, oc, taps;               // of a group
  std::int32_t tile_h, segments;           // rows of inputs of a tile, and segments of one
  // Rows of the patch: of each plane of the depth; from one to the next in y, and from an input row to the next one in the patch.
  Divisor plane_rows, patch_rows;
  std::int32_t row_step, row_advance;
  // Columns: read at a time, how many such reads of a row; those ahead of the first tap; positions of a residue.
  GroupsReads reads;
  Divisor row_reads, stride_w;
  std::int32_t lead, residue_vectors;
  std::int32_t row_vectors, vector_stride;  // from row to row, from vector to vector, in vectors
  std::int32_t weight_bytes;                // of fragments, in front of the patch
  bool pairs;                               // x of two neighbouring inputs is one aligned word, and both exist
  std::int64_t x_n, y_n;
  std::int32_t x_c, x_d, x_h, x_w, y_c, y_d, y_h, y_w, w_ic, w_oc;
  // Of the gradient of the weight: blocks of a group, sets of taps.
  std::int32_t parts, sets;
  GroupsTap tap[kMostGroupsTaps];
};
static_assert(sizeof(GroupsJob) <= 4000, "with the pointers it is the arguments of a launch");

// The first input of a tile.
struct GroupsPlace {
  std::int32_t n, group, id, ih, iw;
};
// Tile `number` of all samples of a group, or of all groups.
template <bool kOfGroup>
UPFOLD_DEVICE GroupsPlace groups_place(const GroupsJob& job, std::uint32_t number, std::int32_t group) {
  GroupsPlace place;
  place.iw = std::int32_t(take(job.tiles_w, number)) * job.segments * kSegment;
  place.ih = std::int32_t(take(job.tiles_h, number)) * job.tile_h;
  place.id = std::int32_t(take(job.in_d, number));
  place.group = kOfGroup ? group : std::int32_t(take(job.groups, number));
  place.n = std::int32_t(number);
  return place;
}

UPFOLD_DEVICE std::uint32_t round_word(float v) { return near_tf32(__float_as_uint(v)); }

}  // namespace upfold::cuda
