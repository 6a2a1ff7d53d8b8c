// A block of the fused method by boxes of channels: what its shared memory holds, and the thread that has it filled.
//   patch    [buffers][row of the patch][16 bytes of channels]          swizzled
//            [buffers][products][channel][64 pixels]                    swizzled; of 16-bit planes
//            [buffers][products][2][channel][32 pixels]                 swizzled; of planes of floats
//   slice    [slices][depth, height][64 bytes of channels][pixels]      of planes that warps transpose to patches
//   weight   [stages][pair][column][16 bytes of source channels]        swizzled; if packed, columns by channel_of_column
//            [stages][pair][64 or 32 columns][source channel][channels of those columns]   swizzled; kByResult
#pragma once

#include "fused_last.cuh"

namespace upfold::cuda {

template <typename Tile>
constexpr std::int32_t kLastPairBytes = Tile::kColumns * Tile::kVectors * 16;
// Of a box of 16-bit weights that lie by the channels of the result.
template <typename Tile>
constexpr int kLastBoxColumns = Tile::kColumns < 64 ? Tile::kColumns : 64;

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile, LastWeights kWeights>
struct LastBlock {
  static constexpr std::uint32_t kRowUnits = Tile::kVectors;  // a row of a patch, of 16 bytes
  static constexpr int kChunk = Tile::kVectors * 16 / int(sizeof(Value));
  static constexpr bool kByResult = kWeights == LastWeights::kByResult;
  static constexpr int kBoxColumns = kLastBoxColumns<Tile>;  // where kByResult
  static constexpr int kPixels = 128 / int(sizeof(Value));   // of a plane in a row of shared memory

  const LastJob& job;
  LastBarriers& barriers;
  unsigned char* memory;
  std::uint32_t first_barrier, first_byte;  // their addresses, which the compiler would else find anew before each wait

  __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) const {
    return first_barrier + std::uint32_t(reinterpret_cast<const char*>(&barrier) - reinterpret_cast<const char*>(&barriers));
  }
  __device__ __forceinline__ std::uint32_t patch(std::uint32_t buffer) const {
    return first_byte + buffer * std::uint32_t(job.patch_bytes);
  }
  __device__ __forceinline__ std::uint32_t weight(std::uint32_t stage) const {
    return patch(std::uint32_t(job.patches)) + stage * std::uint32_t(job.stage_pairs * kLastPairBytes<Tile>);
  }

  __device__ __forceinline__ std::int32_t staging_byte() const {
    return job.patches * job.patch_bytes + job.stages * job.stage_pairs * kLastPairBytes<Tile>;
  }
  __device__ __forceinline__ unsigned char* staging() const { return memory + staging_byte(); }
  __device__ __forceinline__ std::uint32_t slice(std::uint32_t buffer) const {
    return first_byte + std::uint32_t(job.first_slice) + buffer * std::uint32_t(job.slice_bytes);
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      if constexpr (Tile::kAlternates) {
        for (int i = 0; i < Tile::kWarpgroups; ++i) barrier_make(address(barriers.turn[i]), Tile::kReaders);
      }
      if constexpr (Tile::kTransposes) {
        for (int i = 0; i < job.slices; ++i) barrier_make(address(barriers.slice_full[i]), 1);
        for (int i = 0; i < job.slices; ++i) barrier_make(address(barriers.slice_empty[i]), Tile::kWriters);
      }
      for (int i = 0; i < job.patches; ++i) barrier_make(address(barriers.patch_full[i]), Tile::kWriters);
      for (int i = 0; i < job.patches; ++i) barrier_make(address(barriers.patch_empty[i]), Tile::kReaders);
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.full[i]), 1);
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.empty[i]), Tile::kReaders);
      if constexpr (Tile::kShares) {
        for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.empty_there[i]), 1);
      }
      barriers_made();
    }
    __syncthreads();                              // barriers are made
    if constexpr (Tile::kShares) meet_cluster();  // those of the other block too
  }

  // One thread: the patches of all tiles of the block in order, each with the weights of its pairs behind it; or one the patches
  // and another the weights.
  template <bool kPatches, bool kWeightsToo>
  __device__ __forceinline__ void copy(const BoxMap& source, const BoxMap& lying, const unsigned char* packed) const {
    if constexpr (Tile::kFromPlanes || Tile::kWhole) return copy_whole<kPatches, kWeightsToo>(source, lying, packed);
    Ring buffer(job.patches), stage(job.stages);
    bool kept = false;  // the weights are there, and stay
    std::uint32_t number = 0;
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x, ++number) {
      const LastPlace place = last_place<Tile::kShares>(job, tile);
      if constexpr (Tile::kAlternates && kPatches)
        barriers.positions[number % kLastPositions] = {place.n, {place.first[0], place.first[1], place.first[2]}};
      const std::int64_t own = std::int64_t(place.group) * job.column_tiles.value + place.column_tile;
      for (std::int32_t chunk = place.first_chunk; chunk < place.first_chunk + place.chunks; ++chunk) {
        const unsigned char* const weights = packed + (own * job.chunks + chunk) * job.pairs * kLastPairBytes<Tile>;
        for (std::int32_t q = job.first_patch[place.set] + 1; q <= job.first_patch[place.set + 1]; ++q, buffer.next()) {
          const LastPatch& from = job.patch[q];
          if constexpr (kPatches) copy_patch(source, place, chunk, from, buffer);
          if (!kWeightsToo || kept) continue;
          if constexpr (kWeights == LastWeights::kPacked) {
            copy_weights(weights, job.patch[q - 1].end, from.end, stage);
          } else {
            copy_lying(lying, place, chunk * kChunk, job.patch[q - 1].end, from.end, stage);
          }
        }
      }
      kept = job.resident;
    }
  }
  // The same where each set has one patch, of which a chunk has one stage of weights (LastJob::whole): what is the same for all
  // chunks of a tile is found once, as what this thread does for a chunk else takes longer than its products.
  template <bool kPatches, bool kWeightsToo>
  __device__ __forceinline__ void copy_whole(const BoxMap& source, const BoxMap& lying, const unsigned char* packed) const {
    Ring buffer(job.patches), stage(job.stages);
    bool kept = false;  // the weights are there, and stay
    std::uint32_t number = 0;
    const std::int32_t chunks = job.chunks;
    const std::uint32_t box_bytes = std::uint32_t(job.box_bytes), chunk_bytes = std::uint32_t(job.pairs * kLastPairBytes<Tile>);
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x, ++number) {
      const LastPlace place = last_place<Tile::kShares>(job, tile);
      if constexpr (kPatches)
        barriers.positions[number % kLastPositions] = {place.n, {place.first[0], place.first[1], place.first[2]}};
      const std::int32_t q = job.first_patch[place.set] + 1, pair = job.patch[q - 1].end, end = job.patch[q].end;
      std::int32_t at[5];
      place_patch(place, job.patch[q], at);
      const std::int64_t own = std::int64_t(place.group) * job.column_tiles.value + place.column_tile;
      const unsigned char* weights = packed + own * chunks * chunk_bytes + std::int64_t(pair) * kLastPairBytes<Tile>;
#pragma unroll 1
      for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
        if constexpr (kPatches) {
          const std::uint32_t full = address(barriers.patch_full[buffer.at]);
          barrier_wait(address(barriers.patch_empty[buffer.at]), buffer.parity ^ 1);
          barrier_arrive_expecting(full, box_bytes);
          copy_boxes(source, at, patch(buffer.at), full);
          at[kChannelAxis] += kChunk;
          buffer.next();
        }
        if (!kWeightsToo || kept) continue;
        if constexpr (kWeights == LastWeights::kPacked) {
          copy_weights(weights, 0, end - pair, stage);
          weights += chunk_bytes;
        } else {
          copy_lying(lying, place, chunk * kChunk, pair, end, stage);
        }
      }
      kept = job.resident;
    }
  }
  // Where the first box of a tile begins, of its first chunk, and the axis of channels.
  static constexpr int kChannelAxis = Tile::kFromPlanes ? 1 : 0;
  __device__ __forceinline__ void place_patch(const LastPlace& place, const LastPatch& from, std::int32_t (&at)[5]) const {
    const std::int32_t channel = place.group * job.source_channels;
    at[4] = at[3] = 0;
    if constexpr (Tile::kFromPlanes) {
      at[0] = place.first[2], at[1] = channel, at[2] = place.n;
    } else {
      at[0] = channel + from.channel * job.folded, at[4] = place.n;
#pragma unroll
      for (int i = 0; i < 3; ++i) at[3 - i] = place.first[i] * job.axis[i].source_step + from.at[i];
    }
  }
  __device__ __forceinline__ void copy_boxes(const BoxMap& source, const std::int32_t (&at)[5], std::uint32_t to,
                                             std::uint32_t full) const {
    if constexpr (Tile::kFromPlanes) {
#pragma unroll
      for (int i = 0; i < Tile::kM * 64 / kPixels; ++i) {
        const std::int32_t pixel = at[0] + i / (64 / kPixels) * job.kept + i % (64 / kPixels) * kPixels;
        copy_box(to + std::uint32_t(i * kChunk * 128), source, {pixel, at[1], at[2], 0, 0}, full);
      }
    } else {
      copy_box(to, source, at, full);
    }
  }
  __device__ __forceinline__ void copy_patch(const BoxMap& source, const LastPlace& place, std::int32_t chunk,
                                             const LastPatch& from, const Ring& buffer) const {
    const std::uint32_t full = address(barriers.patch_full[buffer.at]);
    barrier_wait(address(barriers.patch_empty[buffer.at]), buffer.parity ^ 1);
    barrier_arrive_expecting(full, std::uint32_t(job.box_bytes));
    copy_box(patch(buffer.at), source,
             {place.group * job.source_channels + chunk * kChunk + from.channel * job.folded,
              place.first[2] * job.axis[2].source_step + from.at[2], place.first[1] * job.axis[1].source_step + from.at[1],
              place.first[0] * job.axis[0].source_step + from.at[0], place.n},
             full);
  }
  __device__ __forceinline__ void copy_weights(const unsigned char* weights, std::int32_t pair, std::int32_t end,
                                               Ring& stage) const {
    for (; pair < end; pair += job.stage_pairs, stage.next()) {
      const std::int32_t pairs = end - pair < job.stage_pairs ? end - pair : job.stage_pairs;
      const std::uint32_t full = address(barriers.full[stage.at]), bytes = std::uint32_t(pairs * kLastPairBytes<Tile>);
      barrier_wait(address(barriers.empty[stage.at]), stage.parity ^ 1);
      barrier_arrive_expecting(full, bytes);
      const unsigned char* const from = weights + std::int64_t(pair) * kLastPairBytes<Tile>;
      if constexpr (Tile::kShares) {
        // Each block copies its half to both. Neither need wait for the other at the end: all that comes from there, copies and
        // arrivals, has been awaited.
        barrier_wait(address(barriers.empty_there[stage.at]), stage.parity);
        const std::uint32_t half = bytes / 2, first = blockIdx.x % 2 * half;
        copy_bulk_to_blocks(weight(stage.at) + first, from + first, half, full, 3);
      } else {
        copy_bulk(weight(stage.at), from, bytes, full);
      }
    }
  }
  // Another thread, where weights are shared: tells the other block of each stage that is empty here. The one that copies would
  // do so only when it comes to that stage.
  __device__ __forceinline__ void tell_empty() const {
    Ring stage(job.stages);
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      for (std::int32_t left = last_taken<Tile::kShares>(job, tile).stages; left > 0; --left, stage.next()) {
        barrier_wait(address(barriers.empty[stage.at]), stage.parity ^ 1);
        barrier_arrive_at(address(barriers.empty_there[stage.at]), blockIdx.x % 2 ^ 1);
      }
    }
  }
  // The same of weights that lie, from channel `source` of the reduction on.
  __device__ __forceinline__ void copy_lying(const BoxMap& lying, const LastPlace& place, std::int32_t source, std::int32_t pair,
                                             std::int32_t end, Ring& stage) const {
    const std::int32_t first = place.column_tile * Tile::kColumns;
    for (; pair < end; stage.next()) {
      const std::int32_t until = end - pair < job.stage_pairs ? end : pair + job.stage_pairs;
      const std::uint32_t full = address(barriers.full[stage.at]);
      std::uint32_t to = weight(stage.at);
      barrier_wait(address(barriers.empty[stage.at]), stage.parity ^ 1);
      barrier_arrive_expecting(full, std::uint32_t((until - pair) * kLastPairBytes<Tile>));
      for (; pair < until; ++pair) {
        std::uint32_t tap = tap_of_pair(job.pair[pair]);
        const std::int32_t w = std::int32_t(take(job.kernel_w, tap)), h = std::int32_t(take(job.kernel_h, tap)),
                           d = std::int32_t(tap);
        if constexpr (kByResult) {
#pragma unroll
          for (int column = 0; column < Tile::kColumns; column += kBoxColumns, to += kBoxColumns * kChunk * int(sizeof(Value)))
            copy_box(to, lying, {first + column, w, h, d, place.group * job.source_channels + source}, full);
        } else {
          copy_box(to, lying, {source, w, h, d, place.group * std::int32_t(job.channels.value) + first}, full);
          to += kLastPairBytes<Tile>;
        }
      }
    }
  }
};
#endif

}  // namespace upfold::cuda
