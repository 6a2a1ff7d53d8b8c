// The fused gradient of the weight whose channels are innermost (compute capability 9.0): its reduction runs over pixels, which
// are rows of channels of x and of y (the gradient of the output), and both operands of a product are read turned, as the copy
// engine lays them into shared memory.
//
// gw[ic, oc, tap] = sum over samples and input pixels i of x[n, ic, i] * y[n, oc, i * stride - pad + tap * dilation]. With
// tap * dilation - pad = shift * stride + residue, a tap reads of y the pixels of its residue, moved by its shift. A *tile of
// positions* is a box of x. A *patch* is the box of y that the same positions read for some taps of one residue, with all their
// shifts, in `width` channels: a tap is that patch some rows on. An *atom* is a tap in `width` output channels: columns of a
// product, whose rows are 64 input channels. Where every patch has one tap, its rows are the positions alone (kernel and stride
// equal, and others).
//
// Of a kernel of four with a stride of two and a padding of one (16-bit values), y may be packed in *squares*
// (fused_last_source.cuh): that is a kernel of two with a stride of one, whose output channels are those of 16 channels in each
// pixel of a square, four times as many. So the columns of a block are all taps of its output channels, neighbours in w, and it
// stores whole sectors.
//
// Where x is contiguous and its rows are long, it is read as it lies (16-bit values, `planes`): boxes of 64 pixels of a row, in
// 64 channels, whose products read it as rows of channels. Only y is packed then.
//
// A block owns the sums of some groups of 64 input channels and of the atoms of a *set*, over the tiles of positions of one part.
// The atoms are cut into *units*; a group of channels and a unit are a warpgroup's (16-bit values), or a warp's (float32 rounded
// to TF32, whose products by warpgroups cannot read turned operands). One thread begins all copies.
#pragma once

#include "divide.cuh"
#include "mma.cuh"
#include "ring.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kMostWeightSets = 32, kMostWeightSlots = 128, kMostWeightPatches = 96, kMostWeightMaps = 10, kMostWeightSteps = 32;
constexpr int kMostWeightCluster = 2;   // blocks
constexpr int kMostWeightAtoms = 88;    // of all sets, where blocks store w
constexpr int kWeightPlanePixels = 64;  // of a row of x, in 128 bytes
constexpr int kSquareColumns8 = 32;     // groups of 8 columns: all taps of 16 output channels
constexpr int kWeightLastStages = 8, kWeightLastAlignment = 1024;

struct WeightLastPatch {
  std::int16_t at[3];    // of y (w, h, d), from the tile's first position
  std::uint16_t map;     // of its residue
  std::int32_t channel;  // from the first of the group and of the block's channels
};

// Columns of a set, for the order in which a block stores them: atoms whose channels are the same follow one another.
struct WeightLastAtom {
  std::uint32_t offset;       // of its tap and first channel in w, from those of the channel set
  std::uint8_t first, count;  // atoms that are stored with it, channel by channel: where they begin, and how many; 0: no atom
  std::uint8_t atom, chunk;   // its columns among the set's, and its channels', in `width`
};

struct WeightLastJob {
  Divisor tiles;                              // of sums: blocks are parts times tiles
  Divisor sets, channel_sets, channel_tiles;  // of a group: tile = ((group * channel_tiles + ...) * channel_sets + ...) * sets
  Divisor along[3];                           // tiles of positions (w, h, d)
  std::int32_t box[4];                        // positions of one (w, h, d, n)
  std::uint32_t count, length;                // tiles of positions; of a part
  std::int32_t in_channels, out_channels;     // of a group
  std::int32_t block_channels, row_channels;  // of x in a block, in a box
  std::int32_t set_channels, width;           // of y in a channel set, in a row of a patch
  std::int32_t x_boxes, x_box, y_box;         // of a block; bytes of copies
  std::int32_t x_pitch, y_pitch, y_at;        // bytes from one to the next in a stage, of x in it
  std::int32_t stage_bytes, stages;
  std::int32_t steps;             // products of 16 rows of a tile of positions
  std::int32_t tail, rows;        // rows of a tile of positions, and up to whole steps: these are zeros
  std::uint32_t x_high, y_high;   // of descriptors
  std::uint32_t x_step, y_apart;  // 16 bytes from step to step; from eight rows of y to the next eight of a step
  std::uint16_t first_patch[kMostWeightSets + 1];
  std::uint16_t y_step[kMostWeightSteps];
  std::uint32_t slot[kMostWeightSlots];  // [set][unit][instruction]: from the stage's first patch on, in 16 bytes, the first
                                         // atom, and from bit 16 on the distance of the next
  WeightLastPatch patch[kMostWeightPatches];
  // How w is stored (fused_weight_last_store.cuh), if blocks do that.
  Divisor cluster;             // parts of a tile, whose blocks are a cluster
  Divisor fold;                // output channels of w, of those that hold taps along w too
  std::int32_t atom_log;       // groups of 8 columns of an atom, the logarithm
  bool whole, paired;          // blocks store w; two neighbours at a time
  bool is_followed;            // by the launch that adds parts up
  bool squares;                // of y: a block has all taps of its output channels
  bool adds;                   // to partial sums that are there
  std::int64_t w_n, w_c, w_w;  // elements of w
  WeightLastAtom atom[kMostWeightAtoms];
};
struct WeightLastMaps {
  BoxMap x, y[kMostWeightMaps - 1];
};
static_assert(sizeof(WeightLastJob) + sizeof(WeightLastMaps) <= 4080, "with two pointers these are the arguments of a launch");

struct WeightLastBarriers {
  std::uint64_t full[kWeightLastStages], empty[kWeightLastStages];
};

#if UPFOLD_WARPGROUPS
// Of a block: its set, first channels and their number, and tiles of positions.
struct WeightLastPlace {
  std::int32_t set, x_channel, y_channel, x_boxes;
  std::int32_t rows, channel;  // input channels from the first on; the first output channel, of the group's
  std::uint32_t begin, end;

  __device__ __forceinline__ explicit WeightLastPlace(const WeightLastJob& job) {
    std::uint32_t part = blockIdx.x, of_cluster = take(job.cluster, part), rest = take(job.tiles, part);
    part = part * job.cluster.value + of_cluster;
    set = std::int32_t(take(job.sets, rest));
    const std::int32_t channel_set = std::int32_t(take(job.channel_sets, rest));
    const std::int32_t first_row = std::int32_t(take(job.channel_tiles, rest)) * job.block_channels, group = std::int32_t(rest);
    rows = job.in_channels - first_row, channel = channel_set * job.set_channels;
    const std::int32_t left = (rows + job.row_channels - 1) / job.row_channels;
    x_channel = group * job.in_channels + first_row, x_boxes = left < job.x_boxes ? left : job.x_boxes;
    y_channel = group * job.out_channels + channel;
    begin = part * job.length, end = begin + job.length < job.count ? begin + job.length : job.count;
  }
};

// Of a channel set in w.
UPFOLD_DEVICE std::int64_t weight_set_offset(const WeightLastJob& job, const WeightLastPlace& place) {
  if (job.squares) return place.channel / 4 * job.w_c;
  std::uint32_t tap = std::uint32_t(place.channel);
  const std::int64_t channel = take(job.fold, tap);
  return channel * job.w_c + tap * job.w_w;
}

UPFOLD_DEVICE std::uint32_t weight_stage(const WeightLastJob& job, const SharedAddress& of_memory, std::uint32_t number) {
  return of_memory.first + number * std::uint32_t(job.stage_bytes);
}

// Rows behind those that are copied are zeros, of x and of y: what is there otherwise may be a NaN. Of the stages that are used;
// a warp has every so manieth box of them.
UPFOLD_DEVICE void clear_weight_tails(const WeightLastJob& job, const WeightLastPlace& place, unsigned char* memory,
                                      std::int32_t warps) {
  if (job.tail == job.rows) return;
  const std::int32_t boxes = job.x_boxes + (job.stage_bytes - job.y_at) / job.y_pitch, left = job.rows - job.tail;
  const std::int32_t x_row = job.x_box / job.tail, y_row = job.y_box / job.tail, tiles = std::int32_t(place.end - place.begin);
  const std::int32_t stages = place.begin >= place.end ? 0 : tiles < job.stages ? tiles : job.stages;
  for (std::int32_t box = std::int32_t(threadIdx.x) / 32; box < stages * boxes; box += warps) {
    const std::int32_t stage = box / boxes, of_stage = box - stage * boxes;
    const bool is_x = of_stage < job.x_boxes;
    const std::int32_t row = is_x ? x_row : y_row;
    unsigned char* const at = memory + stage * job.stage_bytes + job.tail * row +
                              (is_x ? of_stage * job.x_pitch : job.y_at + (of_stage - job.x_boxes) * job.y_pitch);
    for (std::int32_t i = std::int32_t(threadIdx.x) % 32; i < left * row / 16; i += 32)
      reinterpret_cast<uint4*>(at)[i] = {0, 0, 0, 0};
  }
  publish_to_products();
}

UPFOLD_DEVICE void make_weight_barriers(const WeightLastJob& job, WeightLastBarriers& barriers, std::uint32_t warps) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < job.stages; ++i) {
      barrier_make(shared_address(&barriers.full[i]), 1);
      barrier_make(shared_address(&barriers.empty[i]), warps);
    }
    barriers_made();
  }
  __syncthreads();  // barriers are made, tails are zeros
}

// The boxes of x as planes, of a tile of positions that begins at `first`: [group of 64 channels][64 positions][channel].
UPFOLD_DEVICE void copy_weight_planes(const WeightLastJob& job, const BoxMap& x, const WeightLastPlace& place,
                                      std::uint32_t stage, const std::int32_t (&first)[4], std::uint32_t full) {
  for (std::int32_t i = 0; i < place.x_boxes; ++i) {
    std::uint32_t to = stage + i * job.x_pitch;
    for (std::int32_t h = 0; h < job.box[1]; ++h) {
      for (std::int32_t w = 0; w < job.box[0]; w += kWeightPlanePixels, to += kWeightPlanePixels * 128)
        copy_box(to, x, {first[0] + w, first[1] + h, first[2], place.x_channel + i * job.row_channels, first[3]}, full);
    }
  }
}

// One thread: the boxes of all tiles of positions in order. Boxes of x behind the group's channels are not copied: what the stage
// held before is multiplied, for sums that nobody reads.
template <bool kPlanes = false>
UPFOLD_DEVICE void copy_weight_boxes(const WeightLastJob& job, const WeightLastMaps& maps, const WeightLastPlace& place,
                                     WeightLastBarriers& barriers, unsigned char* memory) {
  const std::int32_t first_patch = job.first_patch[place.set], patches = job.first_patch[place.set + 1] - first_patch;
  const std::uint32_t bytes = std::uint32_t(place.x_boxes * job.x_box + patches * job.y_box);
  await_previous();                       // who stores sums waits for copies
  if (job.is_followed) let_next_begin();  // beside these a launch that packs would make them take longer
  const SharedAddress of_barriers(&barriers), of_memory(memory);
  Ring ring(job.stages);
  for (std::uint32_t tile = place.begin; tile < place.end; ++tile, ring.next()) {
    std::uint32_t rest = tile;
    std::int32_t first[4];
#pragma unroll
    for (int i = 0; i < 3; ++i) first[i] = std::int32_t(take(job.along[i], rest)) * job.box[i];
    first[3] = std::int32_t(rest) * job.box[3];
    const std::uint32_t full = of_barriers.of(&barriers.full[ring.at]), stage = weight_stage(job, of_memory, ring.at);
    barrier_wait(of_barriers.of(&barriers.empty[ring.at]), ring.parity ^ 1);
    barrier_arrive_expecting(full, bytes);
    if constexpr (kPlanes) {
      copy_weight_planes(job, maps.x, place, stage, first, full);
    } else {
      for (std::int32_t i = 0; i < place.x_boxes; ++i)
        copy_box(stage + i * job.x_pitch, maps.x,
                 {place.x_channel + i * job.row_channels, first[0], first[1], first[2], first[3]}, full);
    }
    for (std::int32_t i = 0; i < patches; ++i) {
      const WeightLastPatch& patch = job.patch[first_patch + i];
      copy_box(
          stage + job.y_at + i * job.y_pitch, maps.y[patch.map],
          {place.y_channel + patch.channel, first[0] + patch.at[0], first[1] + patch.at[1], first[2] + patch.at[2], first[3]},
          full);
    }
  }
}
#endif

}  // namespace upfold::cuda
