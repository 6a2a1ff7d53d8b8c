// The fused method by copies of boxes whose channels are innermost (compute capability 9.0): the forward, whose source is x and
// whose result is y, and the gradient of the input, whose source is y and whose result is x. A source that lies otherwise is
// packed first; the result is stored as it lies.
//
// Rows of a product are 64 positions of the result, its columns channels of the result, and its reduction runs over channels of
// the source. In *turned* tiles, for results whose width is innermost, rows are 64 channels and columns positions. A position
// q of an axis is the result at q * result_step + a phase's offset; a tap of that phase reads the source at (q + shift) *
// source_step + a constant. A *patch* is the source of all positions of a tile for the taps that share that
// constant, with all their shifts, for a chunk of channels: one box, which the copy engine brings, rows of channels swizzled. A
// *pair* is a tap and its phase: the same rows of the patch, moved by the tap's shift, times the weights of that tap. Where all
// phases have one tap and read the same position (kernel and stride equal), the pair is one and its columns are taps times
// channels (`flat`). In tiles of *runs* a pair is as many taps of a row as there are phases, and its columns are channels times
// phases.
//
// Weights are packed first, as a product reads them; those of 16 bits whose channels are innermost are copied as they *lie*,
// boxes of theirs, and so are rows of w, of channels of the result and their taps, where kernel and stride are equal. The
// reduction of few tiles is *split* among the blocks of a cluster, which add their sums up through each other's shared memory.
//
// Two warpgroups multiply, each kM times 64 positions, in all phases of a set; one thread begins all copies. In turned tiles each
// multiplies kM times 8 kSub8 positions: those of both in 64 channels each, or its own in the same 64. Warpgroups that
// *alternate* have tiles of their own: one multiplies while the others, of two or three, store, as their patches follow one
// another. For some of them warps beside the copying thread *transpose* boxes of planes to patches, in place of a launch ahead
// that packs the source. Where that launch writes rows as long as the result's, positions are *counted through* a plane.
#pragma once

#include "box_map.h"
#include "divide.cuh"
#include "fused_activate.cuh"
#include "mma.cuh"
#include "ring.cuh"

namespace upfold::cuda {

constexpr int kMostLastPairs = 352, kMostLastPatches = 128, kMostLastPhases = 64, kMostLastSets = 32;
constexpr int kMostLastBuffers = 8, kMostLastStages = 32, kMostLastSlices = 4, kMostLastWarpgroups = 4;
constexpr int kLastStagedBytes = 8 << 10;  // of the warps of a block: four channels of 16 positions in four phases
// Bytes from channel to channel of what turned tiles stage, and of 16 channels of each warp.
constexpr int kLastTurnedPitch = 144, kLastTurnedStaged = 8 * 16 * kLastTurnedPitch;
constexpr int kLastPieceRow = 128;  // bytes of a row of what alternating warpgroups store at a time, a piece
// Parts of the channels of a tile that are stored to planes one after another: of floats less room is left by weights that stay.
UPFOLD_INLINE constexpr int last_planes_parts(int element) { return element == 4 ? 4 : 1; }
// The buffers in which parts take turns: two leave less for patches and weights, of which tiles of many columns need more (H200,
// 222 on k2 s2 with 256 to 1024 channels: 4 to 9 % slower with two).
UPFOLD_INLINE constexpr int last_planes_buffers(int columns, int element) { return element == 4 && columns <= 64 ? 2 : 1; }
// Bytes that a part of a warpgroup's results takes on its way: of boxes, whose positions have so many bytes in one row of
// phases, or of lines of a channel, each 16 bytes longer than its results, so that lanes of neighbouring channels do not meet in
// a bank, and that a lane reads the vector behind its own.
UPFOLD_INLINE constexpr int last_planes_part_bytes(int rows, int columns, int pixel_bytes, int element, bool lines) {
  const int line = rows * pixel_bytes + (lines ? 16 : 0);
  return (columns / last_planes_parts(element) * line + 1023) / 1024 * 1024;
}
// The pieces that a warpgroup has room for, of rows of so many bytes in all phases: of floats, of which there are twice as many,
// one leaves room for weights that stay.
UPFOLD_INLINE constexpr int last_pieces_at_once(int row_bytes, int element) {
  return element == 4 || row_bytes / kLastPieceRow == 1 ? 1 : 2;
}
constexpr int kLastSliceVectors = 4;  // of channels of planes that warps of a block transpose at a time
constexpr int kLastAlignment = 1024;  // bytes: rows of 128 bytes change their vectors' places in groups of eight

// kSub8 groups of 8 columns of a product; phases of a set, each with sums of its own; blocks of a multiprocessor; vectors of 16
// bytes of channels in a chunk.
template <int kM_, int kSub8_, int kPhases_, int kBlocks_, int kVectors_, int kWarpgroups_ = 2>
struct LastTileBase {
  static constexpr int kM = kM_, kSub8 = kSub8_, kPhases = kPhases_, kBlocks = kBlocks_, kVectors = kVectors_;
  static constexpr int kRowPhases = kPhases;  // those of a row of the result, of which there are kPhases / kRowPhases
  static constexpr int kWarpgroups = kWarpgroups_, kWarps = 4 * kWarpgroups;
  static constexpr bool kSharesRegisters = kBlocks == 1;  // the copying warp gives its own back: only a warpgroup does that
  static constexpr int kThreads = 32 * kWarps + (kSharesRegisters ? 128 : 32);
  // Of a thread. All are those that a block begins with, of which each multiprocessor has 512 for each of 128 threads, in eights:
  // what the copying warpgroup gives back of them the others can take, and would wait for more without end.
  static constexpr int kAllRegisters = 512 / (kWarpgroups + 1) / 8 * 8 * (kWarpgroups + 1);
  // Of three warpgroups with half as many sums 32 would spill.
  static constexpr int kCopyRegisters = kWarpgroups == 2 || kM * kSub8 * kPhases <= 16 ? 40 : 32;
  static constexpr int kMultiplyRegisters = (kAllRegisters - kCopyRegisters) / kWarpgroups / 8 * 8;
  static constexpr bool kAlternates = false, kFromPlanes = false, kToPlanes = false, kTransposes = false, kWhole = false;
  static constexpr bool kInTurn = false, kExact = false, kShares = false, kRuns = false, kWeightRows = false, kRowBoxes = false;
  static constexpr int kReaders = kWarps, kWriters = 1;  // warps that read a patch; those, or threads, that bring it
  static_assert(kM * kSub8 * kPhases * kBlocks <= 64 && kM * kSub8 * kPhases <= 40, "registers of the sums");
  static_assert(kVectors == 4 || kVectors == 8, "the rows of a swizzle");
  static_assert(kWarpgroups <= kMostLastWarpgroups, "barriers of their turns");
};
// kRows positions of a tile: kProducts times kProduct; kColumns channels.
template <int kM, int kSub8, int kPhases, int kBlocks, int kVectors>
struct LastTile : LastTileBase<kM, kSub8, kPhases, kBlocks, kVectors> {
  static constexpr bool kTurned = false;
  static constexpr int kProduct = 64, kProducts = 2 * kM, kRows = kProduct * kProducts, kColumns = 8 * kSub8;
};
// Of warpgroups that alternate.
template <int kM, int kSub8, int kPhases, int kVectors, int kWarpgroups = 2>
struct LastAlternatingTile : LastTileBase<kM, kSub8, kPhases, 1, kVectors, kWarpgroups> {
  static constexpr bool kTurned = false, kAlternates = true;
  static constexpr int kProduct = 64, kProducts = kM, kRows = kProduct * kProducts, kColumns = 8 * kSub8, kReaders = 4;
};
// The same of values that lie in planes, where kernel and stride are equal: rows are pixels of a plane, counted through it, in
// boxes of some pixels of a chunk's channels; phases are those of the width, and their results lie beside one another.
template <int kM, int kSub8, int kPhases, int kWarpgroups = 2>
struct LastPlanesTile : LastAlternatingTile<kM, kSub8, kPhases, 8, kWarpgroups> {
  static constexpr bool kFromPlanes = true, kToPlanes = true;
  static_assert(kPhases == 2 || kPhases == 4, "words of a pixel's results");
};
// Of sources whose channels are innermost, or are packed so: columns are channels times phases of the width, so that what a
// position has in a channel is a run of the result (LastRuns).
template <int kM, int kSub8>
struct LastRunsTile : LastAlternatingTile<kM, kSub8, 1, 8> {
  static constexpr bool kRuns = true;
};
// Of 16-bit values in planes, where kernel and stride are equal: columns are a row of the weight as it lies, channels of the
// result and their taps, so that nothing is packed. kBoxes: the copy engine stores, else lanes do.
template <int kM, int kSub8, bool kBoxes>
struct LastWeightRowsTile : LastAlternatingTile<kM, kSub8, 1, 8> {
  static constexpr bool kFromPlanes = true, kWeightRows = true, kRowBoxes = kBoxes;
};
// And of sources whose channels are innermost, or are packed so, to results in planes.
template <int kM, int kSub8, int kPhases, int kVectors, int kRowPhases_ = kPhases, int kWarpgroups = 2>
struct LastToPlanesTile : LastAlternatingTile<kM, kSub8, kPhases, kVectors, kWarpgroups> {
  static constexpr bool kToPlanes = true;
  static constexpr int kRowPhases = kRowPhases_;
  static_assert(kPhases % kRowPhases == 0, "whole rows of phases");
};
// Of those the ones whose phases have a tap each, of one position (LastJob::whole).
template <int kM, int kSub8, int kPhases, int kVectors, int kRowPhases = kPhases, int kWarpgroups = 2>
struct LastWholeTile : LastToPlanesTile<kM, kSub8, kPhases, kVectors, kRowPhases, kWarpgroups> {
  static constexpr bool kWhole = true;
};
// The same of results whose channels are innermost.
template <int kM, int kSub8, int kPhases, int kVectors, int kWarpgroups>
struct LastWholeBoxesTile : LastAlternatingTile<kM, kSub8, kPhases, kVectors, kWarpgroups> {
  static constexpr bool kWhole = true;
};
// And of sources in planes whose boxes of some channels are transposed to patches by warps beside the one that copies.
template <int kM, int kSub8, int kPhases, int kVectors>
struct LastTransposingTile : LastToPlanesTile<kM, kSub8, kPhases, kVectors> {
  static constexpr bool kTransposes = true;
  static constexpr int kWriters = 3, kCopyRegisters = 56, kMultiplyRegisters = 224;
};
// kShared: both warpgroups take the same positions.
template <int kM, int kSub8, int kPhases, int kBlocks, int kVectors, bool kShared_>
struct LastTurnedTile : LastTileBase<kM, kSub8, kPhases, kBlocks, kVectors> {
  static constexpr bool kTurned = true, kShared = kShared_;
  static constexpr int kProduct = 8 * kSub8, kProducts = kShared ? kM : 2 * kM, kRows = kProduct * kProducts,
                       kColumns = kShared ? 128 : 64;
  static_assert(kM * kSub8 <= 32, "a lane finds the row of each eight positions");
};

// Of float32 in full: a value of the source or of the weights is two of TF32, and of their products all but that of the two small
// ones are added. A chunk is so many channels' large parts and then their small ones; the sums of its products begin anew, as
// warpgroups round what they add more coarsely than float32 does, and are added to those of the tile by themselves.
template <typename Tile>
struct LastExact : Tile {
  static constexpr bool kExact = true;
  static_assert(Tile::kVectors == 8, "of a chunk one half are large parts");
};
constexpr int kExactChannels = 16;  // of a chunk

// Tiles of two phases whose pairs are of one and the other in turn (LastJob::in_turn) have kernels of their own.
template <typename Tile>
struct LastInTurn : Tile {
  static constexpr bool kInTurn = true;
};
template <typename Tile>
constexpr bool kHasInTurn = (Tile::kTurned || Tile::kAlternates) && Tile::kPhases == 2 && Tile::kWarpgroups == 2 &&
                            !Tile::kFromPlanes && !Tile::kTransposes && !Tile::kWhole && !Tile::kInTurn && !Tile::kExact;
// So have those whose weights two blocks of a cluster share, as with both in one kernel what shares nothing takes up to 10 %
// longer: tiles whose sets are whole, and that shared weights make the fastest (LastJob::sharers).
template <typename Tile>
struct LastSharing : Tile {
  static constexpr bool kShares = true;
};
template <typename Tile>
constexpr bool kHasSharing =
    Tile::kAlternates && Tile::kWarpgroups == 2 && !Tile::kTransposes && !Tile::kInTurn && !Tile::kExact && !Tile::kShares &&
    (Tile::kFromPlanes ? Tile::kPhases == 2 && Tile::kM <= 2 : !Tile::kToPlanes && Tile::kPhases == 1 && Tile::kM == 2);

// How the weights lie that are multiplied: packed; or as they came, output channels innermost, which are those of the result (the
// forward) or those that are reduced (the gradient of the input).
enum class LastWeights { kPacked, kByResult, kByReduction };

struct LastAxis {
  Divisor tile, tiles;                          // positions of a tile, tiles of the axis
  std::int32_t source_step, result_step, size;  // size: of the result
};
struct LastPatch {
  std::int16_t at[3];    // of the source, from the tile's first position times source_step
  std::int16_t channel;  // where the source is folded: of so many pixels behind the first channel
  std::uint16_t end;     // pairs up to this number, from the end of the patch before
};
struct LastPhase {
  std::int16_t at[3];  // of the result
};

// How columns of a tile are channels and phases: of an even stride the phases of a channel follow one another, so that a lane has
// two of them and four lanes eight; of an odd one the phases of two channels do, both of which a lane has.
struct LastRuns {
  Divisor step;           // phases of a tile: those of a set, of which the stride has one or more; 0: columns are no runs
  std::int32_t channels;  // of a tile
  std::int32_t ahead;     // results of the first position that are cut
};
struct LastRunColumn {
  std::int32_t channel, phase;
};
UPFOLD_DEVICE LastRunColumn last_run_column(const LastRuns& runs, std::int32_t column) {
  const bool even = runs.step.value % 2 == 0;
  std::uint32_t channel = std::uint32_t(even ? column : column / 2);
  const std::int32_t phase = std::int32_t(take(runs.step, channel));
  return {std::int32_t(even ? channel : 2 * channel) + (even ? 0 : column % 2), phase};
}
// The opposite.
UPFOLD_DEVICE std::int32_t column_of_run(const LastRuns& runs, std::int32_t channel, std::int32_t phase) {
  const std::int32_t step = std::int32_t(runs.step.value);
  return step % 2 == 0 ? channel * step + phase : (channel / 2 * step + phase) * 2 + channel % 2;
}

struct alignas(64) LastJob {
  LastAxis axis[3];                                    // d, h, w
  Divisor tile_n, splits, column_tiles, sets, groups;  // splits: of the reduction, each of split_chunks chunks
  Divisor channels;                                    // of the result in a group: columns are taps times these where `flat`
  Divisor kernel_h, kernel_w;
  std::uint32_t tiles;
  std::int32_t batch, columns, chunks, split_chunks, pairs,
      source_channels;                           // columns: of a group; source_channels: in one of its groups
  std::int32_t folded;                           // channels of a pixel of the source, which has stride_w pixels in one; else 0
  std::int32_t patch_bytes, box_bytes, patches;  // of a buffer, of a copy; buffers
  std::int32_t stage_pairs, stages;
  bool in_turn;  // patches have as many pairs of each phase, which take turns, and stages of weights one of each
  bool whole;    // where warpgroups alternate: a set has one patch, all phases a tap at the same shift, in the order of phases
  // There: results in planes that are no boxes are stored by lanes, as aligned units of so many bytes, or, of 16-bit values
  // (`shifted`), as aligned vectors with what is left of a run at both ends. A run is of results that lie together in a line of a
  // channel and in y: of a row of a tile, or of all rows of its plane where these follow one another (`plane_runs`).
  bool loose, shifted, plane_runs;
  std::int8_t unit;
  Divisor run_results;
  std::int32_t run_positions;
  // Of planes that are transposed: bytes of a box, boxes at once, where they begin, pixels of their rows, and those that a row of
  // the patch has of them; its rows; and by what a lane's pixels are counted: those of a row of the patch, or, of 16 bits, eights
  // of a box's.
  std::int32_t slice_bytes, slices, first_slice, pixels, patch_width, patch_lines;
  Divisor slice_row;
  Divisor plane_row, plane_rows;  // where positions are pixels of a plane: pixels of a row, rows
  std::int32_t run, kept;         // positions that are stored as one row; those of 64 in whole runs, of lines those of a tile
  std::int32_t group_pitch;       // rows of a patch from 8 positions of a product to the next
  bool flat, wide, resident;      // wide: 16 bytes of channels are one aligned vector of the result; resident: weights stay
  std::int16_t rows[8];           // of a patch, where 64 positions begin
  // Where channels are not innermost: neighbouring phases whose results are one aligned vector, else 0; where they are none,
  // those that are staged together, or 0; and whether results of two neighbouring positions are an aligned vector.
  std::int32_t joined, staged;
  bool paired;
  // Of turned tiles: products that lie beside one another, 8 positions wide (2^beside); whether each 8 positions lie in a row;
  // neighbouring phases of the width whose results are neighbours; and how many such neighbours are an aligned vector.
  std::int8_t beside;
  bool eights;
  std::int8_t joins, vector;
  std::int8_t sharers;               // blocks of a cluster that share the weights of their tiles, of other positions: one or two
  bool follows_packing;              // a launch of the same call is right ahead, which has waited for what is ahead of that
  std::int64_t y_n, y_c, y_axis[3];  // of the result
  LastRuns runs;
  Activation activation;
  float slope;
  std::uint16_t first_patch[kMostLastSets + 1];
  std::uint16_t set_stages[kMostLastSets];  // of a chunk of the weights of a set
  LastPhase phases[kMostLastPhases];        // [set][kPhases]
  LastPatch patch[kMostLastPatches + 1];    // behind one that ends with no pairs
  std::uint32_t pair[kMostLastPairs];       // rows of the patch; from bit 16 on the phase in its set, from bit 20 on the tap
};
// Of tiles of rows of the weight, which have one pair, a third description lies behind it in the table: there is no room for one
// more among a launch's arguments. The copy engine reads it at a multiple of 64 bytes.
constexpr int kLastThird = (int(sizeof(LastJob)) - kMostLastPairs * 4) / 64 * 64 + 64;
UPFOLD_DEVICE const BoxMap& third_boxes(const LastJob& job) {
  return *reinterpret_cast<const BoxMap*>(reinterpret_cast<const char*>(&job) + kLastThird);
}
static_assert(kLastThird + int(sizeof(BoxMap)) <= int(sizeof(LastJob)), "a description in the table of pairs");
static_assert(sizeof(LastJob) <= 3776, "with the descriptions of source and weights and the pointers it is a launch's arguments");

// Of an entry of LastJob::pair.
UPFOLD_DEVICE std::uint32_t rows_of_pair(std::uint32_t entry) { return entry & 0xffff; }
UPFOLD_DEVICE std::uint32_t phase_of_pair(std::uint32_t entry) { return entry >> 16 & 0xf; }
UPFOLD_DEVICE std::uint32_t tap_of_pair(std::uint32_t entry) { return entry >> 20; }

struct LastPlace {
  std::int32_t n, first[3], group, column_tile, set, first_chunk, chunks;
  std::int32_t first_eight = 0;  // of a product, where some of its columns are stored
};
// What of a place the copying thread, which finds it anyway, leaves for those that store. It is ahead of them by as many tiles as
// there are buffers of patches, and each warpgroup may still be about to read one.
struct alignas(16) LastPosition {
  std::int32_t n, first[3];
};
constexpr int kLastPositions = 16;
static_assert(kMostLastBuffers + 2 * kMostLastWarpgroups <= kLastPositions, "none is overwritten that is still to be read");
// Tiles of the same positions follow one another, or, kShares, those of each two positions, where each second is of the latter.
template <bool kShares = false>
UPFOLD_DEVICE LastPlace last_place(const LastJob& job, std::uint32_t tile) {
  LastPlace place;
  std::uint32_t rest = tile;
  place.first_chunk = std::int32_t(take(job.splits, rest)) * job.split_chunks;
  const std::int32_t left = job.chunks - place.first_chunk;
  place.chunks = left < job.split_chunks ? left : job.split_chunks;
  const std::uint32_t sharer = kShares ? rest % 2 : 0;
  if constexpr (kShares) rest /= 2;
  place.column_tile = std::int32_t(take(job.column_tiles, rest)), place.set = std::int32_t(take(job.sets, rest));
  place.group = std::int32_t(take(job.groups, rest));
  if constexpr (kShares) rest = rest * 2 + sharer;
#pragma unroll
  for (int i = 2; i >= 0; --i) place.first[i] = std::int32_t(take(job.axis[i].tiles, rest) * job.axis[i].tile.value);
  place.n = std::int32_t(rest * job.tile_n.value);
  return place;
}
// Its columns alone, of a reduction that is not split.
template <bool kShares = false>
UPFOLD_DEVICE LastPlace last_columns(const LastJob& job, std::uint32_t tile) {
  LastPlace place = {};
  place.chunks = job.chunks;
  if constexpr (kShares) tile /= 2;
  place.column_tile = std::int32_t(take(job.column_tiles, tile)), place.set = std::int32_t(take(job.sets, tile));
  place.group = std::int32_t(take(job.groups, tile));
  return place;
}

// The patches of a block's tiles, in the order in which they are multiplied; no reduction is split.
struct LastCursor {
  LastPlace place;
  std::uint32_t tile;
  std::int32_t chunk, patch;  // patch: its number among those of the job

  __device__ __forceinline__ bool has_ended(const LastJob& job) const { return tile >= job.tiles; }
  __device__ __forceinline__ void start(const LastJob& job, std::uint32_t first) {
    for (tile = first; tile < job.tiles; tile += gridDim.x) {
      place = last_place(job, tile), chunk = 0, patch = job.first_patch[place.set] + 1;
      if (patch <= job.first_patch[place.set + 1]) return;  // else no tap reaches its results
    }
  }
  __device__ __forceinline__ void next(const LastJob& job) {
    if (++patch <= job.first_patch[place.set + 1]) return;
    patch = job.first_patch[place.set] + 1;
    if (++chunk == job.chunks) start(job, tile + gridDim.x);
  }
};

// The channel that column `column` of a product of packed weights holds, counted in a run of as many columns as four lanes own in
// 16 bytes each: so that what a lane holds of a row, two neighbouring columns of each 8, are neighbouring channels.
template <int kSize>
UPFOLD_DEVICE std::int32_t channel_of_column(std::int32_t column) {
  constexpr std::int32_t kRun = 64 / kSize, kOwn = 16 / kSize;
  const std::int32_t in_run = column % kRun, eight = in_run / 8, lane = in_run % 8 / 2;
  return column - in_run + lane * kOwn + eight * 2 + in_run % 2;
}

// What another warpgroup takes of patches and of stages for a tile.
struct LastTaken {
  std::int32_t patches, stages;
};
template <bool kShares = false>
UPFOLD_DEVICE LastTaken last_taken(const LastJob& job, std::uint32_t tile) {
  take(job.splits, tile);
  if constexpr (kShares) tile /= 2;
  take(job.column_tiles, tile);
  const std::uint32_t set = take(job.sets, tile);
  return {(job.first_patch[set + 1] - job.first_patch[set]) * job.chunks, job.set_stages[set] * job.chunks};
}

struct LastBarriers {
  std::uint64_t turn[kMostLastWarpgroups];                                  // of warpgroups that alternate
  std::uint64_t slice_full[kMostLastSlices], slice_empty[kMostLastSlices];  // of planes that are transposed
  alignas(16) std::uint32_t spare[4];                                       // there: of pixels that no patch has
  std::uint64_t patch_full[kMostLastBuffers], patch_empty[kMostLastBuffers], full[kMostLastStages], empty[kMostLastStages];
  std::uint64_t empty_there[kMostLastBuffers];  // in the other block that shares the weights
  LastPosition positions[kLastPositions];       // of the block's tiles in turn, where warpgroups alternate
};

}  // namespace upfold::cuda
