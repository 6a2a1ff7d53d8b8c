// The fused gradient of the weight whose channels are innermost, of 16-bit values (compute capability 9.0): its reduction runs
// over pixels, which are rows of channels of x and of y (the gradient of the output), and both operands of a product are read
// turned, as the copy engine lays them into shared memory.
//
// gw[ic, oc, tap] = sum over samples and input pixels i of x[n, ic, i] * y[n, oc, i * stride - pad + tap * dilation]. With
// tap * dilation - pad = shift * stride + residue, a tap reads of y the pixels of its residue, moved by its shift. A *tile of
// positions* is a box of x. A *patch* is the box of y that the same positions read for some taps of one residue, with all their
// shifts, in `width` channels: a tap is that patch some rows on. An *atom* is a tap in `width` output channels: columns of a
// product, whose rows are 64 input channels. Atoms at the same distance from one another are the columns of one instruction.
// Where every patch has one tap, its rows are the positions alone, and the distance is that of patches (`k = s` and others).
//
// A block owns the sums of some input channels and of the atoms of a *set*, over the tiles of positions of one part; its two
// warpgroups multiply other channels (kRowGroups = 2), or other atoms. One thread begins all copies.
#pragma once

#include "divide.cuh"
#include "mma.cuh"
#include "ring.cuh"

namespace upfold::cuda {

constexpr int kMostWeightSets = 32, kMostWeightSlots = 128, kMostWeightPatches = 96, kMostWeightMaps = 10, kMostWeightSteps = 32;
constexpr int kWeightLastStages = 8, kWeightLastAlignment = 1024;

// Warpgroups along the input channels; groups of 8 columns of the first instruction and of the second, 0 where there is none.
template <int kRowGroups_, int kFirst8_, int kSecond8_>
struct WeightLastTile {
  static constexpr int kRowGroups = kRowGroups_, kFirst8 = kFirst8_, kSecond8 = kSecond8_, kColumns8 = kFirst8 + kSecond8;
  static constexpr int kUnits = 2 / kRowGroups, kSlots = kSecond8 > 0 ? 2 : 1;  // of columns; instructions of a unit
  static constexpr int kWarps = 8, kThreads = 32 * kWarps + 128;
  static constexpr int kCopyRegisters = 40, kMultiplyRegisters = 232;
  static_assert(kColumns8 <= 48, "registers of the sums");
};

struct WeightLastPatch {
  std::int16_t at[3];    // of y (w, h, d), from the tile's first position
  std::uint16_t map;     // of its residue
  std::int32_t channel;  // from the first of the group and of the block's channels
};

struct WeightLastJob {
  Divisor tiles;                                    // of sums: blocks are parts times tiles
  Divisor sets, channel_sets, channel_tiles;        // of a group: tile = ((group * channel_tiles + ...) * channel_sets + ...) * sets
  Divisor along[3];                                 // tiles of positions (w, h, d)
  std::int32_t box[4];                              // positions of one (w, h, d, n)
  std::uint32_t count, length;                      // tiles of positions; of a part
  std::int32_t in_channels, out_channels;           // of a group
  std::int32_t row_channels, set_channels, width;   // of x in a box; of y in a channel set, in a row of a patch
  std::int32_t x_box, y_box, x_pitch, y_pitch, y_at;  // bytes: of copies; from one to the next in a stage; of x in it
  std::int32_t stage_bytes, stages;
  std::int32_t steps;       // products of 16 rows of a tile of positions
  std::int32_t tail, rows;  // rows of a tile of positions, and up to whole steps: these are zeros
  std::uint32_t x_low, x_high, y_high;  // of descriptors, without addresses
  std::uint32_t x_step;                 // 16 bytes from step to step
  std::uint16_t first_patch[kMostWeightSets + 1];
  std::uint16_t y_step[kMostWeightSteps];
  std::uint32_t slot[kMostWeightSlots];  // [set][unit][instruction]: the low half of y's descriptor, from the stage's first patch
  WeightLastPatch patch[kMostWeightPatches];
};
struct WeightLastMaps {
  BoxMap x, y[kMostWeightMaps - 1];
};
static_assert(sizeof(WeightLastJob) + sizeof(WeightLastMaps) <= 4000, "with the pointer these are the arguments of a launch");

struct WeightLastBarriers {
  std::uint64_t full[kWeightLastStages], empty[kWeightLastStages];
};

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct WeightLastBlock {
  using Sums = float[Tile::kColumns8][4];
  const WeightLastJob& job;
  const WeightLastMaps& maps;
  WeightLastBarriers& barriers;
  unsigned char* memory;
  // Of the block: its set, first channels, and tiles of positions.
  std::int32_t set, x_channel, y_channel, x_left;
  std::uint32_t begin, end;

  __device__ __forceinline__ WeightLastBlock(const WeightLastJob& j, const WeightLastMaps& m, WeightLastBarriers& b,
                                             unsigned char* first)
      : job(j), maps(m), barriers(b), memory(first) {
    std::uint32_t part = blockIdx.x, rest = take(job.tiles, part);
    set = std::int32_t(take(job.sets, rest));
    const std::int32_t channel_set = std::int32_t(take(job.channel_sets, rest));
    const std::int32_t channel_tile = std::int32_t(take(job.channel_tiles, rest)), group = std::int32_t(rest);
    const std::int32_t first_row = channel_tile * Tile::kRowGroups * job.row_channels;
    x_channel = group * job.in_channels + first_row, x_left = job.in_channels - first_row;
    y_channel = group * job.out_channels + channel_set * job.set_channels;
    begin = part * job.length, end = begin + job.length < job.count ? begin + job.length : job.count;
  }

  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) { return shared_address(&barrier); }
  __device__ __forceinline__ std::uint32_t stage_at(std::uint32_t number) const {
    return shared_address(memory) + number * std::uint32_t(job.stage_bytes);
  }

  // Rows behind those that are copied are zeros, of x and of y: what is there otherwise may be a NaN.
  __device__ __forceinline__ void clear_tails() const {
    if (job.tail == job.rows) return;
    const std::int32_t patches = (job.stage_bytes - job.y_at) / job.y_pitch, x_boxes = job.y_at / job.x_pitch;
    const std::int32_t x_row = job.x_box / job.tail, y_row = job.y_box / job.tail, left = job.rows - job.tail;
    for (std::int32_t stage = 0; stage < job.stages; ++stage) {
      for (std::int32_t box = 0; box < x_boxes + patches; ++box) {
        const bool is_x = box < x_boxes;
        const std::int32_t row = is_x ? x_row : y_row;
        unsigned char* const at = memory + stage * job.stage_bytes + job.tail * row +
                                  (is_x ? box * job.x_pitch : job.y_at + (box - x_boxes) * job.y_pitch);
        for (std::int32_t i = std::int32_t(threadIdx.x); i < left * row / 16; i += Tile::kThreads)
          reinterpret_cast<uint4*>(at)[i] = {0, 0, 0, 0};
      }
    }
    publish_to_products();
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.stages; ++i) {
        barrier_make(address(barriers.full[i]), 1);
        barrier_make(address(barriers.empty[i]), Tile::kWarps);
      }
      barriers_made();
    }
    __syncthreads();  // barriers are made, tails are zeros
  }

  // One thread: the boxes of all tiles of positions in order. Channels of x behind the group's are not copied where a whole box
  // of them is: what the stage held before is multiplied, for sums that nobody reads.
  __device__ __forceinline__ void copy() const {
    const std::int32_t first_patch = job.first_patch[set], patches = job.first_patch[set + 1] - first_patch;
    const std::int32_t x_boxes = Tile::kRowGroups == 2 && x_left > job.row_channels ? 2 : 1;
    const std::uint32_t bytes = std::uint32_t(x_boxes * job.x_box + patches * job.y_box);
    Ring ring(job.stages);
    for (std::uint32_t tile = begin; tile < end; ++tile, ring.next()) {
      std::uint32_t rest = tile;
      std::int32_t first[4];
#pragma unroll
      for (int i = 0; i < 3; ++i) first[i] = std::int32_t(take(job.along[i], rest)) * job.box[i];
      first[3] = std::int32_t(rest) * job.box[3];
      const std::uint32_t full = address(barriers.full[ring.at]), stage = stage_at(ring.at);
      barrier_wait(address(barriers.empty[ring.at]), ring.parity ^ 1);
      barrier_arrive_expecting(full, bytes);
      for (std::int32_t i = 0; i < x_boxes; ++i)
        copy_box(stage + i * job.x_pitch, maps.x, {x_channel + i * job.row_channels, first[0], first[1], first[2], first[3]},
                 full);
      for (std::int32_t i = 0; i < patches; ++i) {
        const WeightLastPatch& patch = job.patch[first_patch + i];
        copy_box(stage + job.y_at + i * job.y_pitch, maps.y[patch.map],
                 {y_channel + patch.channel, first[0] + patch.at[0], first[1] + patch.at[1], first[2] + patch.at[2], first[3]},
                 full);
      }
    }
  }

  // Each step is a group of products of its own, and one more may be unfinished.
  __device__ __forceinline__ void accumulate(Sums& sums) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    const std::int32_t warpgroup = __shfl_sync(~0u, std::int32_t(threadIdx.x) / 128, 0);  // known to be one for a warp
    const std::int32_t unit = Tile::kUnits == 2 ? warpgroup : 0, slot = (set * Tile::kUnits + unit) * Tile::kSlots;
    const std::uint32_t x_own = job.x_low + (Tile::kRowGroups == 2 ? warpgroup * job.x_pitch / 16 : 0);
    const std::uint32_t first = job.slot[slot], second = job.slot[slot + Tile::kSlots - 1];
    const std::uint64_t x_high = std::uint64_t(job.x_high) << 32, y_high = std::uint64_t(job.y_high) << 32;
    Ring ring(job.stages);
    std::uint32_t used = 0;  // the barrier of what the products before read; 0: none, released
    for (std::uint32_t tile = begin; tile < end; ++tile, ring.next()) {
      barrier_wait(address(barriers.full[ring.at]), ring.parity);
      const std::uint32_t stage = stage_at(ring.at) / 16, y_first = stage + std::uint32_t(job.y_at) / 16;
      std::uint32_t x_at = x_own + stage;
#pragma unroll 1
      for (std::int32_t step = 0; step < job.steps; ++step, x_at += job.x_step) {
        const std::uint32_t y_at = y_first + job.y_step[step];
        warpgroup_begin();
        WarpgroupTurned<Value, Tile::kFirst8, 0>::add(sums, x_high | x_at, y_high | (first + y_at));
        if constexpr (Tile::kSlots == 2)
          WarpgroupTurned<Value, Tile::kSecond8, Tile::kFirst8>::add(sums, x_high | x_at, y_high | (second + y_at));
        warpgroup_commit();
        warpgroup_wait<1>();
        if (lane == 0 && used != 0) barrier_arrive(used);
        used = 0;
      }
      used = address(barriers.empty[ring.at]);
    }
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kColumns8 * 4; ++i) pin(sums[i / 4][i % 4]);
  }

  __device__ __forceinline__ void store(const Sums& sums, float4* __restrict__ partial) const {
    const std::int32_t warpgroup = std::int32_t(threadIdx.x) / 128;
    float4* const own = partial + (std::int64_t(blockIdx.x) * 2 + warpgroup) * (Tile::kColumns8 * 128) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < Tile::kColumns8; ++i) own[i * 128] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
  }
};
#endif

// partial[part][tile][warpgroup][8 columns][thread of the warpgroup]: four sums each. Elsewhere an empty kernel, which has no
// shared memory of its own: by that the host knows.
template <typename Value, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    fused_weight_last_kernel(const __grid_constant__ WeightLastJob job, const __grid_constant__ WeightLastMaps maps,
                             float4* __restrict__ partial) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ WeightLastBarriers barriers;
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kWeightLastAlignment;
  const WeightLastBlock<Value, Tile> block(job, maps, barriers, first);
  block.clear_tails();
  block.make_barriers();
  if (threadIdx.x >= 32 * Tile::kWarps) {
    give_registers_back<Tile::kCopyRegisters>();
    if (threadIdx.x == 32 * Tile::kWarps) block.copy();
  } else {
    take_registers<Tile::kMultiplyRegisters>();
    typename WeightLastBlock<Value, Tile>::Sums sums = {};
    block.accumulate(sums);
    block.store(sums, partial);
  }
#endif
}

}  // namespace upfold::cuda
