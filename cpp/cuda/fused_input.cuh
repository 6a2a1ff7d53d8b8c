// The gradient of the input in one pass on Hopper's warpgroups: x[n, ic, i] = sum over oc and taps of w[ic, oc, tap] * y[n, oc,
// i * stride - pad + tap * dilation], with no columns. y is read as it lies and x is written once.
//
// The rows of a product are positions of x (pixels), its columns input channels, its reduction output channels times taps. A
// tile is a box of pixels, at most 128 * kM, times 8 * kN8 input channels of a group. A *chunk* is some output channels of the
// reduction: their rows of y that the box reaches (the patch) lie in shared memory. A *step* is what one product takes: four
// channels times two taps of TF32, or times four taps of 16 bits; lane % 4 is the channel, so that all lanes read at one offset
// from their own pixel and channel. Which taps belong to which step is a list among the launch's arguments. Or a step
// is 32 bytes of a row of the weight as it lies, which then is not packed (InputTile::kOfWords): a lane has its own taps.
//
// Two warpgroups multiply: each owns 64 * kM pixels and all channels of the tile. Three warps copy y, one copies packed weights;
// they run ahead, into the next tiles too. A reduction that is split has its parts added in memory, by another launch, or, if
// they are two of all tiles, by the blocks of a cluster: each adds some sums of both, in their order. What is handed over:
//   raw      [raw_buffers][channel][row of the patch][position]
//   staging  [warpgroup][2][some channels][64 pixels], of results; or those that are stored later (fused_input_later.cuh)
//   weight   [weight_buffers][step][group of 8 channels][2 vectors][channel][16 bytes]
//            [weight_buffers][channel][128 bytes of its row], swizzled; of a weight that is not packed
#pragma once

#include "box_map.h"
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kMostInputEntries = 320;        // of a chunk
constexpr int kMostInputBuffers = 32;         // of weights; a quarter of it of raw y
constexpr int kMostInputColumns = 576;        // runs of a patch that are copied at a time
constexpr int kInputStagingBytes = 18 << 10;  // of results on their way to x, where they are staged
constexpr int kInputSkew = 16;                // bytes between the pixels of two channels of results that are stored later
constexpr int kInputBoxSteps = 4;             // of a box of the weight, whose rows have 128 bytes
constexpr int kInputBoxAlignment = 1024;      // bytes; of such boxes, whose rows are swizzled in groups of eight

struct InputAxis {
  std::int32_t in, out, stride, low;  // low: of pixel 0's first tap
  Divisor tile, tiles, extent;        // pixels of a tile, tiles of the axis, positions of y that a tile reaches
};

// Two taps, of four channels each, that one lane reads together; positions in a chunk, or numbers in the weight.
struct InputEntry {
  std::uint16_t a, b;
};

struct InputJob {
  InputAxis axis[3];  // d, h, w
  Divisor tile_n, tiles_n, channel_tiles, splits, groups;
  Divisor row_columns;  // runs of `grain` bytes in a row of the patch
  Divisor taps, kernel_h, kernel_w;
  Divisor rows_h, rows_d;      // where rows of pixels are numbered over samples, the heights and depths that they count
  std::int32_t batch, ic, oc;  // channels of a group
  std::int32_t chunks, split_chunks, chunk_channels;
  std::uint32_t whole;              // tiles whose reduction is not split
  std::int32_t steps, stage_steps;  // of a chunk; of one buffer of weights, which divide them
  std::int32_t pack_chunks;         // that one block packs
  Divisor pack_blocks, pack_steps;  // blocks that pack all chunks of the same channels; steps of a chunk
  std::int32_t grain, columns, skew;
  std::int32_t span, pitch;  // elements from row to row of the patch, bytes from channel to channel
  std::int32_t raw_bytes, raw_buffers, weight_buffers;
  // Of words, in bytes: where the lanes of each remainder of 4 read the first word of a step, how far from there the other one
  // lies, the next step's first one, and that of the step behind it.
  std::int32_t word_from[4], word_second, word_step, word_steps;
  bool resident;   // the buffers hold all weights of a tile, and a block keeps its channels
  bool clustered;  // the blocks of a tile's parts are a cluster, which adds them
  bool run;        // the output channels and taps of an input channel lie in w as they are numbered, one after another
  bool numbered;   // rows of pixels are numbered over samples, as axis[1], and what they reach in a channel is copied as one run
  // Neighbouring pixels of x that are one aligned vector and all exist: two (wide), or as many as are stored later at a time; and
  // such pieces that a thread stores in one turn of products, 0 where all results are stored at once.
  bool wide;
  std::int32_t together, later;
  std::int64_t x_n, x_c, x_axis[3], y_n, y_c, y_axis[3], w_ic, w_oc, w_axis[3];
  alignas(16) InputEntry offsets[kMostInputEntries];  // elements from a lane's own one in a chunk
  union {
    InputEntry sources[kMostInputEntries];  // group of four channels * taps + tap
    BoxMap weight;                          // of words, which are of no list
  };
};
static_assert(sizeof(InputJob) <= 4000, "with the pointers it is the arguments of a launch");

// What the sums of a block are of.
template <int kM_, int kN8_>
struct InputShape {
  static constexpr int kM = kM_, kN8 = kN8_, kPixels = 128 * kM, kChannels = 8 * kN8, kThreads = 256;
  // Of floats that are stored later: parts of the channels that shared memory holds at a time; its bytes, with those that say
  // where they go.
  static constexpr int kLaterParts = kM * kN8 > 16 ? 2 : 1;
  static constexpr int kLaterBytes = 2 * (kChannels / kLaterParts) * (64 * kM * 4 + kInputSkew) + kThreads * 16;
};

// How lanes read taps, of two neighbouring pixels: where their stride is 2, as four elements from a multiple of four on, which
// are two taps of both; as rows of four taps, or of three, of which the first lies one element in front of such a multiple; and
// for any stride the two taps of an entry as one aligned vector of each pixel, or one by one, or the four of two entries as one.
// As words of four bytes, a tap or two of 16 bits, in the order of the weight, which is not packed.
enum class InputReads : std::int32_t { kFours, kRows, kThrees, kPairs, kSingles, kQuads, kWords };

template <int kM_, int kN8_, int kTurn_, InputReads kReads_>
struct InputTile : InputShape<kM_, kN8_> {
  static constexpr int kTurn = kTurn_;  // steps whose pixels are read at a time
  static constexpr InputReads kReads = kReads_;
  // Whether floats go through shared memory on their way to x. Measured on an H200: where a pixel's taps are read together and
  // kernel and stride are equal it gains up to a tenth; 16-bit values lose a quarter and more, and so do rows of four taps where
  // output channels are few.
  static constexpr bool kStages = kReads == InputReads::kFours || kReads == InputReads::kPairs || kReads == InputReads::kQuads ||
                                  kReads == InputReads::kWords;
  static constexpr bool kLater = false;
  static constexpr bool kOfWords = kReads == InputReads::kWords;
  static constexpr int kLoaders = 96, kBlockThreads = 384;
  static constexpr int kStepWords = 16 * kN8_;  // of 16 bytes, of weights
  // From one step's weights to the next one's, in the same; of a box the rows hold several.
  static constexpr int kStepPitch = kOfWords ? 2 : kStepWords;
  static_assert(!kOfWords || kInputBoxSteps % kTurn == 0, "turns end with boxes");
  // Warpgroups share the registers that the launch gave them, multiples of 8 a thread; asking for more waits forever.
  static constexpr int kLaunchRegisters = 65536 / kBlockThreads / 8 * 8;
  static constexpr int kLoadRegisters = 88, kMultiplyRegisters = 208;
  static_assert(2 * kMultiplyRegisters + kLoadRegisters <= 3 * kLaunchRegisters, "registers of three warpgroups");
};

// The same, of floats, which stores its results later: tiles of many sums, whose taps are read together.
template <typename Tile>
struct InputLaterTile : Tile {
  static constexpr bool kLater = true;
};
template <typename Tile>
constexpr bool kInputHasLater = Tile::kStages && Tile::kM * Tile::kN8 >= 32;

// The box, channels and part of the reduction of one tile.
struct InputPlace {
  std::int32_t n, first[3], group, channel_tile, first_chunk, chunks;
};

// Tiles are numbered by channels, then groups and boxes. Those from job.whole on are cut into parts of the reduction, which are
// tiles of their own, side by side.
UPFOLD_DEVICE InputPlace input_place(const InputJob& job, std::uint32_t tile) {
  InputPlace place;
  std::uint32_t rest = tile;
  place.first_chunk = 0, place.chunks = job.chunks;
  if (tile >= job.whole) {
    rest = tile - job.whole;
    place.first_chunk = std::int32_t(take(job.splits, rest)) * job.split_chunks;
    const std::int32_t left = job.chunks - place.first_chunk;
    place.chunks = left < job.split_chunks ? left : job.split_chunks;
    rest += job.whole;
  }
  place.channel_tile = std::int32_t(take(job.channel_tiles, rest)), place.group = std::int32_t(take(job.groups, rest));
#pragma unroll
  for (int i = 2; i >= 0; --i) place.first[i] = std::int32_t(take(job.axis[i].tiles, rest) * job.axis[i].tile.value);
  place.n = std::int32_t(rest * job.tile_n.value);
  return place;
}

// A pixel of a box, from the box's first one.
struct InputPixel {
  std::int32_t n, at[3];
};

UPFOLD_DEVICE InputPixel input_pixel(const InputJob& job, std::int32_t number) {
  InputPixel pixel;
  std::uint32_t rest = std::uint32_t(number);
#pragma unroll
  for (int i = 2; i >= 0; --i) pixel.at[i] = std::int32_t(take(job.axis[i].tile, rest));
  pixel.n = std::int32_t(rest);
  return pixel;
}

// Where a row of pixels lies whose number counts samples, depths and heights.
struct InputRow {
  std::int32_t n, d, h;
};

UPFOLD_DEVICE InputRow input_row(const InputJob& job, std::uint32_t number) {
  InputRow row;
  row.h = std::int32_t(take(job.rows_h, number)), row.d = std::int32_t(take(job.rows_d, number));
  row.n = std::int32_t(number);
  return row;
}

// The first of the two neighbouring pixels that thread `thread` owns in product i: rows lane / 4 and the eighth behind it.
template <typename Shape>
UPFOLD_DEVICE std::int32_t input_pixel_of(std::int32_t thread, int i) {
  return thread / 128 * 64 * Shape::kM + i * 64 + thread / 32 % 4 * 16 + thread % 32 / 4 * 2;
}

}  // namespace upfold::cuda
