// Warps that transpose boxes of planes to patches whose channels are innermost, beside the thread that has both copied: of 16-bit
// values as matrices, of floats by words, vector v of row r of a patch where its products want it (fused_last_block.cuh). Boxes
// begin at whole vectors of pixels, up to one before the patch, and their rows have an odd number of them, so that the vectors of
// neighbouring channels do not meet in a bank.
#pragma once

#include "fused_last_block.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile, LastWeights kWeights>
struct LastTransposer : LastBlock<Value, Tile, kWeights> {
  using Base = LastBlock<Value, Tile, kWeights>;
  using Base::job, Base::barriers, Base::address, Base::patch, Base::weight, Base::slice, Base::kChunk;
  static constexpr std::int32_t kEach = 16 / int(sizeof(Value));  // values of a vector
  static constexpr int kWarps = Tile::kWriters, kRowBytes = 16 * Tile::kVectors;
  static constexpr int kAtOnce = 4;  // units of matrices that a warp reads before it writes

  // One thread: slices of all patches, and their weights, each as soon as there is room for it.
  __device__ __forceinline__ void copy(const BoxMap& source, const unsigned char* packed) const {
    LastCursor from, of;
    from.start(job, blockIdx.x), of.start(job, blockIdx.x);
    Ring ring(job.slices), stage(job.stages);
    std::int32_t vector = 0, pair = of.has_ended(job) ? 0 : job.patch[of.patch - 1].end;
    const std::uint32_t first = of.tile;
    bool is_weight_left = !of.has_ended(job);
    while (is_weight_left || !from.has_ended(job)) {
      if (!from.has_ended(job) && barrier_passed(address(barriers.slice_empty[ring.at]), ring.parity ^ 1)) {
        copy_slice(source, from, vector, ring.at);
        ring.next(), vector += kLastSliceVectors;
        if (vector == Tile::kVectors) vector = 0, from.next(job);
      }
      if (is_weight_left && barrier_passed(address(barriers.empty[stage.at]), stage.parity ^ 1)) {
        const std::int32_t end = job.patch[of.patch].end, pairs = end - pair < job.stage_pairs ? end - pair : job.stage_pairs;
        copy_weight(packed, of, pair, pairs, stage.at);
        stage.next(), pair += pairs;
        if (pair == end) {
          of.next(job);
          is_weight_left = job.resident ? of.tile == first : !of.has_ended(job);
          if (is_weight_left) pair = job.patch[of.patch - 1].end;
        }
      }
    }
  }
  // Some channels of a patch as they lie, from whole vectors of pixels on.
  __device__ __forceinline__ void copy_slice(const BoxMap& source, const LastCursor& at, std::int32_t vector,
                                             std::uint32_t buffer) const {
    const LastPatch& from = job.patch[at.patch];
    const LastPlace& place = at.place;
    const std::uint32_t full = address(barriers.slice_full[buffer]);
    barrier_arrive_expecting(full, std::uint32_t(job.slice_bytes));
    copy_box(
        slice(buffer), source,
        {place.first[2] + (from.at[2] & ~(kEach - 1)), place.group * job.source_channels + at.chunk * kChunk + vector * kEach,
         place.first[1] + from.at[1], place.first[0] + from.at[0], place.n},
        full);
  }
  __device__ __forceinline__ void copy_weight(const unsigned char* packed, const LastCursor& at, std::int32_t pair,
                                              std::int32_t pairs, std::uint32_t buffer) const {
    const std::int64_t own = std::int64_t(at.place.group) * job.column_tiles.value + at.place.column_tile;
    const std::uint32_t full = address(barriers.full[buffer]), bytes = std::uint32_t(pairs * kLastPairBytes<Tile>);
    barrier_arrive_expecting(full, bytes);
    copy_bulk(weight(buffer), packed + ((own * job.chunks + at.chunk) * job.pairs + pair) * kLastPairBytes<Tile>, bytes, full);
  }

  // Where vector `vector` of a row of a patch lies, from the patch on.
  static __device__ __forceinline__ std::uint32_t place_of(std::uint32_t row, std::uint32_t vector) {
    const std::uint32_t moved = Tile::kVectors == 8 ? row % 8 : row / 2 % 4;
    return row * kRowBytes + (vector ^ moved) * 16;
  }

  // A unit is eight pixels of a row of pixels in 32 channels. Lane i reads channel i, and has then eight channels of pixel i % 8
  // written.
  __device__ __forceinline__ void transpose_matrices(std::uint32_t from, std::uint32_t to, std::int32_t skip,
                                                     std::uint32_t vector, std::uint32_t warp) const {
    const std::uint32_t lane = threadIdx.x % 32, pitch = std::uint32_t(job.pixels) * 2, pixels = job.slice_row.value * 8;
    const std::uint32_t width = std::uint32_t(job.patch_width), lines = std::uint32_t(job.patch_lines),
                        spare = address_of_spare(), own = from + lane * pitch, own_vector = vector + lane / 8;
    const std::uint32_t own_pixel = lane % 8 - std::uint32_t(skip);  // beyond all where it is negative
    std::uint32_t first = warp, line = take_line(first), step = kWarps;
    const std::uint32_t step_line = take_line(step);
    first *= 8, step *= 8;
    // Of a line of pixels to the next, beside the pixels that a step goes: rows of the patch, and bytes.
    const std::uint32_t line_rows = width - pixels, line_bytes = 32 * pitch - pixels * 2;
    std::uint32_t row = line * width + first + own_pixel, at = own + line * 32 * pitch + first * 2;
    while (line < lines) {
      std::uint32_t words[kAtOnce][4], to_row[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool exists = line < lines;
        to_row[i] = exists && first + own_pixel < width ? to + place_of(row, own_vector) : spare;
        load_turned_matrices(words[i], exists ? at : own);
        first += step, line += step_line, row += step_line * width + step, at += step_line * 32 * pitch + step * 2;
        if (first >= pixels) first -= pixels, ++line, row += line_rows, at += line_bytes;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) store_matrices(to_row[i], words[i]);
    }
  }
  // Of a number of units: whole rows; `unit` becomes what is left.
  __device__ __forceinline__ std::uint32_t take_line(std::uint32_t& unit) const {
    std::uint32_t line = unit;
    unit = take(job.slice_row, line);
    return line;
  }
  __device__ __forceinline__ std::uint32_t address_of_spare() const {
    return this->first_barrier +
           std::uint32_t(reinterpret_cast<const char*>(barriers.spare) - reinterpret_cast<const char*>(&barriers));
  }

  // A lane has a pixel of the patch.
  __device__ __forceinline__ void transpose_words(const unsigned char* from, unsigned char* to, std::int32_t skip,
                                                  std::uint32_t vector, std::uint32_t warp) const {
    const std::uint32_t pixels = std::uint32_t(job.patch_lines * job.patch_width), pitch = std::uint32_t(job.pixels) * 4;
#pragma unroll 1
    for (std::uint32_t pixel = warp * 32 + threadIdx.x % 32; pixel < pixels; pixel += kWarps * 32) {
      std::uint32_t line = pixel;
      const std::uint32_t w = take(job.slice_row, line) + std::uint32_t(skip);
      const unsigned char* const own = from + line * (kLastSliceVectors * 4) * pitch + w * 4;
      std::uint32_t words[kLastSliceVectors * 4];
#pragma unroll
      for (int i = 0; i < kLastSliceVectors * 4; ++i)
        words[i] = *reinterpret_cast<const std::uint32_t*>(own + std::uint32_t(i) * pitch);
#pragma unroll
      for (int i = 0; i < kLastSliceVectors; ++i)
        *reinterpret_cast<uint4*>(to + place_of(pixel, vector + i)) = {words[4 * i], words[4 * i + 1], words[4 * i + 2],
                                                                       words[4 * i + 3]};
    }
  }

  // The warps behind the one that copies: the patches of all tiles of the block in their order.
  __device__ __forceinline__ void transpose() const {
    const std::uint32_t warp = threadIdx.x / 32 - Tile::kWarps - 1, lane = threadIdx.x % 32;
    Ring buffer(job.patches), ring(job.slices);
    LastCursor at;
    for (at.start(job, blockIdx.x); !at.has_ended(job); at.next(job), buffer.next()) {
      const std::int32_t skip = job.patch[at.patch].at[2] & (kEach - 1);
      barrier_wait(address(barriers.patch_empty[buffer.at]), buffer.parity ^ 1);
#pragma unroll 1
      for (int vector = 0; vector < Tile::kVectors; vector += kLastSliceVectors, ring.next()) {
        barrier_wait(address(barriers.slice_full[ring.at]), ring.parity);
        if constexpr (sizeof(Value) == 2) {
          transpose_matrices(slice(ring.at), patch(buffer.at), skip, std::uint32_t(vector), warp);
        } else {
          transpose_words(this->memory + (slice(ring.at) - this->first_byte),
                          this->memory + (patch(buffer.at) - this->first_byte), skip, std::uint32_t(vector), warp);
        }
        __syncwarp();  // all lanes have read the slice
        if (lane == 0) barrier_arrive(address(barriers.slice_empty[ring.at]));
      }
      publish_to_products();
      __syncwarp();  // all have written
      if (lane == 0) barrier_arrive(address(barriers.patch_full[buffer.at]));
    }
  }
};
#endif

}  // namespace upfold::cuda
