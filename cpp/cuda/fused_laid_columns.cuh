// How the columns of the gradient of the input are laid out: copies of w and of rows of y', and what each pixel takes of these.
#pragma once

#include "fused_laid.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// Rows of a plane that the tile's pixels in it meet: where they begin in y', how many bytes of a channel, and where
// these lie among those of a buffer. Lane i has slot i.
struct LaidSlot {
  std::int64_t from;
  std::uint32_t begin, bytes, at;  // begin: bytes from the plane's first value on
};
// What a lane knows of a pixel: where its segment of each row of the kernel lies in a channel's part of a buffer, and what of a
// segment meets the plane, in words.
template <int kKernel, int kMasks>
struct LaidPixel {
  std::uint32_t row[kKernel], mask[kMasks];
};

// What a lane knows of two neighbouring pixels: where the words lie that two rows of the kernel meet, from the first one that
// both pixels have on, and what of the first and of the last pair of values meets the plane.
struct LaidPair {
  std::uint32_t row[2], first_mask, last_mask;
};

template <typename Tile>
struct LaidColumns {
  using Value = typename Tile::Value;
  using Pixel = LaidPixel<Tile::kKernel, Tile::kMasks>;
  using Words = std::uint32_t[4];
  static constexpr int kHalf = 4;                              // vectors of half a chunk
  static constexpr bool kMore = Tile::kPixels > Tile::kLanes;  // whether two lanes share a pixel beside their own
  static constexpr int kPairs = Tile::kPixels / 64;            // of pixels, of a lane

  const LaidJob& job;
  LaidBarriers& barriers;
  unsigned char* memory;
  SharedAddress of_barriers, of_memory;

  __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) const { return of_barriers.of(&barrier); }
  __device__ __forceinline__ std::uint32_t stage(std::uint32_t number) const {
    return of_memory.first + number * Tile::kStageBytes;
  }
  __device__ __forceinline__ std::uint32_t buffer(std::uint32_t number) const {  // from the memory's first byte on
    return std::uint32_t(job.stages * Tile::kStageBytes) + number * std::uint32_t(job.buffer_bytes);
  }
  static __device__ __forceinline__ std::uint32_t lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ std::uint32_t warp() { return (threadIdx.x - Tile::kWorkers) / 32; }

  __device__ __forceinline__ LaidSlot find_slot(const LaidPlace& place) const {
    const std::int32_t last = min(place.pixel + Tile::kPixels, job.pixels) - 1, pixels = std::int32_t(job.plane.value);
    const std::int32_t plane = std::int32_t(divide(job.plane, std::uint32_t(place.pixel)) + lane());
    const std::int32_t low = max(place.pixel - plane * pixels, 0), high = min(last - plane * pixels, pixels - 1);
    LaidSlot slot{0, 0, 0, 0};
    if (high >= 0) {
      const std::int32_t top = std::int32_t(divide(job.row, std::uint32_t(low))) * job.stride_h - job.pad_h;
      const std::int32_t end = std::int32_t(divide(job.row, std::uint32_t(high))) * job.stride_h - job.pad_h + job.kernel_h;
      std::uint32_t d = std::uint32_t(plane);
      const std::uint32_t in_sample = take(job.depth, d);
      slot.begin = std::uint32_t(max(top, 0) * job.row_bytes) / 16 * 16;
      slot.bytes = std::uint32_t(max(min(end, job.out_h), 0) * job.row_bytes + 15) / 16 * 16;
      slot.bytes = slot.bytes > slot.begin ? slot.bytes - slot.begin : 0;
      slot.from = d * job.y_n + in_sample * job.y_d + slot.begin;
    }
    std::uint32_t end = slot.bytes;  // of all slots up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0u, end, step);
      if (lane() >= std::uint32_t(step)) end += other;
    }
    slot.at = end - slot.bytes;
    return slot;
  }

  // All lanes of a warp at once, each of a pixel of the tile.
  __device__ __forceinline__ Pixel find_pixel(const LaidPlace& place, const LaidSlot& slots, std::int32_t number) const {
    std::uint32_t plane = std::uint32_t(min(place.pixel + number, job.pixels - 1)), at = take(job.plane, plane);
    const std::uint32_t slot = plane - divide(job.plane, std::uint32_t(place.pixel));
    const std::uint32_t begin = __shfl_sync(~0u, slots.begin, slot), first = __shfl_sync(~0u, slots.at, slot);
    const std::int32_t iw = std::int32_t(take(job.row, at)), w = iw * job.stride_w - job.pad_w;
    const std::int32_t h = std::int32_t(at) * job.stride_h - job.pad_h;
    Pixel pixel;
#pragma unroll
    for (int k = 0; k < Tile::kKernel; ++k) {
      const std::uint32_t own = first + std::uint32_t((h + k) * job.row_bytes + w * std::int32_t(sizeof(Value))) - begin;
      pixel.row[k] = Tile::kEdges && std::uint32_t(h + k) >= std::uint32_t(job.out_h) ? 0 : kLaidMargin + own;
    }
#pragma unroll
    for (int i = 0; i < Tile::kMasks; ++i) pixel.mask[i] = std::uint32_t(w + i) < std::uint32_t(job.out_w) ? ~0u : 0u;
    return pixel;
  }
  // The same of pixel `number`, an even one, and the next one; two rows of the kernel by the warp, of one of two channels.
  __device__ __forceinline__ LaidPair find_pair(const LaidPlace& place, const LaidSlot& slots, std::int32_t number) const {
    std::uint32_t plane = std::uint32_t(min(place.pixel + number, job.pixels - 2)), at = take(job.plane, plane);
    const std::uint32_t slot = plane - divide(job.plane, std::uint32_t(place.pixel));
    const std::uint32_t begin = __shfl_sync(~0u, slots.begin, slot), first = __shfl_sync(~0u, slots.at, slot);
    const std::int32_t w = std::int32_t(take(job.row, at)) * 2;  // of the first word that both have
    const std::int32_t h = std::int32_t(at) * job.stride_h - job.pad_h + std::int32_t(warp() % 2 * 2);
    LaidPair pair;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const std::uint32_t own = first + std::uint32_t((h + k) * job.row_bytes + w * 2) - begin;
      const bool beside = std::uint32_t(h + k) >= std::uint32_t(job.out_h);
      pair.row[k] = warp() / 2 * std::uint32_t(job.pitch) + (beside ? kLaidMargin / 4 : kLaidMargin + own);
    }
    pair.first_mask = w > 0 ? ~0u : 0xffff0000u, pair.last_mask = w + 4 < job.out_w ? ~0u : 0xffffu;
    return pair;
  }
  // Behind the pixels that lanes have alone, every eight lanes and the next ones share eight: the latter have every vector behind
  // those of the former.
  static __device__ __forceinline__ std::int32_t shared_number(std::int32_t number) {
    return Tile::kLanes + number / 16 * 8 + number % 8;
  }
  static __device__ __forceinline__ std::int32_t shared_half(std::int32_t number) { return number / 8 % 2; }
  __device__ __forceinline__ Pixel find_shared(const LaidPlace& place, const LaidSlot& slots, std::int32_t number) const {
    Pixel pixel = find_pixel(place, slots, shared_number(number));
    if (shared_half(number) == 0) return pixel;
#pragma unroll
    for (int k = 0; k < Tile::kKernel; ++k) {
      if constexpr (Tile::kSegments < Tile::kKernel) {
        if (k + Tile::kSegments < Tile::kKernel) pixel.row[k] = pixel.row[k + Tile::kSegments];
      } else {
        pixel.row[k] += std::uint32_t(Tile::kSegments / Tile::kKernel * job.pitch);
      }
    }
    return pixel;
  }

  // The words of a vector of a pixel: segments are the rows of a channel, then those of the next one.
  __device__ __forceinline__ void read(const unsigned char* raw, const Pixel& pixel, int segment, Words& words) const {
#pragma unroll
    for (int s = 0; s < Tile::kSegments; ++s) {
      const int channel = (segment + s) / Tile::kKernel, row = (segment + s) % Tile::kKernel;
      const unsigned char* const from = raw + channel * job.pitch + pixel.row[row];
      if constexpr (!Tile::kEdges) {
        using Segment = Word<Tile::kSegmentBytes>;
        *reinterpret_cast<Segment*>(words + s * Tile::kMasks) = *reinterpret_cast<const Segment*>(from);
      } else {
#pragma unroll
        for (int i = 0; i < Tile::kMasks; ++i)
          words[s * Tile::kMasks + i] = *reinterpret_cast<const std::uint32_t*>(from + 4 * i) & pixel.mask[i];
      }
    }
    if constexpr (sizeof(Value) == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = to_tf32(__uint_as_float(words[i]));
    }
  }
  // Vector `vector` of a chunk, of a pixel's columns.
  static __device__ __forceinline__ void write(unsigned char* columns, std::int32_t number, std::uint32_t vector,
                                               const Words& words) {
    *reinterpret_cast<uint4*>(columns + number * 128 + (vector ^ number % 8) * 16) = {words[0], words[1], words[2], words[3]};
  }

  // What a lane of those that multiply has the copy engine bring next: of half a chunk a channel's rows of one slot, if there are
  // any for it. That is laid out `buffers` halves behind what is multiplied: then it has been read, so that nobody has to wait
  // for room.
  struct Cursor {
    std::uint32_t tile;
    std::int32_t half, end;                  // of the reduction
    const unsigned char* base;               // the half's first channel, where the tile's first plane begins to be copied
    std::uint32_t from, to, bytes, of_warp;  // from there on, and from a buffer's first byte; of all lanes of the warp
    Ring ring;
  };
  __device__ __forceinline__ void begin_tile(const unsigned char* y, Cursor& at) const {
    if (at.tile >= job.tiles) return;
    const LaidPlace place = laid_place(job, at.tile, Tile::kRows, Tile::kPixels);
    const LaidSlot slot = find_slot(place);
    const std::uint32_t slots = 32 - __clz(__ballot_sync(~0u, slot.bytes > 0) | 1), runs = slots * std::uint32_t(job.channels);
    const std::uint32_t run = threadIdx.x / 32 + threadIdx.x % 32 * (Tile::kWorkers / 32);  // of all warps alike
    const std::uint32_t channel = run < runs ? run / slots : 0, own = run < runs ? run % slots : 0;
    const auto begins = [&](std::uint32_t number) {
      return std::int64_t(__shfl_sync(~0u, static_cast<long long>(slot.from), number));
    };
    const std::int64_t first = begins(0);
    const std::uint32_t bytes = __shfl_sync(~0u, slot.bytes, own);
    at.from = std::uint32_t(begins(own) - first + channel * job.y_c);
    at.to = kLaidMargin + channel * std::uint32_t(job.pitch) + __shfl_sync(~0u, slot.at, own);
    at.bytes = run < runs ? bytes : 0, at.of_warp = __reduce_add_sync(~0u, at.bytes);
    at.half = 2 * place.first, at.end = 2 * (place.first + place.chunks);
    at.base = y + first + std::int64_t(at.half) * job.channels * job.y_c;
  }
  __device__ __forceinline__ void copy_next(const unsigned char* y, Cursor& at) const {
    if (at.tile >= job.tiles) return;
    const std::uint32_t full = address(barriers.raw_full[at.ring.at]);
    if (lane() == 0) barrier_arrive_expecting(full, at.of_warp);
    if (at.bytes > 0) copy_bulk(of_memory.first + buffer(at.ring.at) + at.to, at.base + at.from, at.bytes, full);
    at.ring.next();
    at.base += job.channels * job.y_c;
    if (++at.half < at.end) return;
    at.tile += gridDim.x;
    begin_tile(y, at);
  }

  // The columns of half a chunk. Of the pixels behind those that a lane has alone two lanes have every other vector each. All
  // words are on their way before the first is asked for.
  __device__ __forceinline__ void lay_out(const unsigned char* raw, unsigned char* columns, const Pixel& own, const Pixel& shared,
                                          std::uint32_t first) const {
    const std::int32_t number = std::int32_t(threadIdx.x) - Tile::kWorkers;
    Words words[kHalf + (kMore ? 2 : 0)];
#pragma unroll
    for (int v = 0; v < kHalf; ++v) read(raw, own, v * Tile::kSegments, words[v]);
    if constexpr (kMore) {
#pragma unroll
      for (int i = 0; i < 2; ++i) read(raw, shared, 2 * i * Tile::kSegments, words[kHalf + i]);
    }
#pragma unroll
    for (int v = 0; v < kHalf; ++v) write(columns, number, first + v, words[v]);
    if constexpr (kMore) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        write(columns, shared_number(number), first + 2 * i + std::uint32_t(shared_half(number)), words[kHalf + i]);
    }
  }

  // The same of pairs of pixels, whose segments begin at odd values: a warp has a vector of each pixel, two rows of the kernel.
  __device__ __forceinline__ void lay_out_pairs(const unsigned char* raw, unsigned char* columns, const LaidPair (&pairs)[kPairs],
                                                std::uint32_t first) const {
    Words before[kPairs], after[kPairs];  // of the two pixels
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const unsigned char* const from = raw + pairs[p].row[k];
        const std::uint32_t left = *reinterpret_cast<const std::uint32_t*>(from - 4);
        const uint2 both = *reinterpret_cast<const uint2*>(from);
        const std::uint32_t right = *reinterpret_cast<const std::uint32_t*>(from + 8);
        before[p][2 * k] = __byte_perm(left, both.x, 0x5432) & pairs[p].first_mask;
        before[p][2 * k + 1] = after[p][2 * k] = __byte_perm(both.x, both.y, 0x5432);
        after[p][2 * k + 1] = __byte_perm(both.y, right, 0x5432) & pairs[p].last_mask;
      }
    }
    const bool turned = lane() / 4 % 2 != 0;  // lanes that would meet in a bank begin with the second pixel
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const std::int32_t number = 64 * p + 2 * std::int32_t(lane());
      Words one, other;
#pragma unroll
      for (int i = 0; i < 4; ++i) one[i] = turned ? after[p][i] : before[p][i], other[i] = turned ? before[p][i] : after[p][i];
      write(columns, number + turned, first + warp(), one);
      write(columns, number + !turned, first + warp(), other);
    }
  }

  // Ahead of each channel of a buffer there are zeros, which copies leave alone.
  __device__ __forceinline__ void clear_margins() const {
    for (std::int32_t i = std::int32_t(threadIdx.x); i < 2 * job.buffers * job.channels; i += Tile::kThreads)
      *reinterpret_cast<uint4*>(memory + buffer(0) + std::uint32_t(i / 2 * job.pitch + i % 2 * 16)) = {0, 0, 0, 0};
  }

  // The warps beside those that multiply: the columns of all tiles of the block in their order.
  __device__ __forceinline__ void produce(const BoxMap& w) const {
    Ring ring(job.stages), raw(job.buffers);
    const std::int32_t number = std::int32_t(threadIdx.x) - Tile::kWorkers;
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      const LaidPlace place = laid_place(job, tile, Tile::kRows, Tile::kPixels);
      const LaidSlot slots = find_slot(place);
      Pixel own, shared;
      LaidPair pairs[kPairs];
      if constexpr (Tile::kPaired) {
#pragma unroll
        for (int p = 0; p < kPairs; ++p) pairs[p] = find_pair(place, slots, 64 * p + 2 * std::int32_t(lane()));
      } else {
        shared = own = find_pixel(place, slots, number);
        if constexpr (kMore) shared = find_shared(place, slots, number);
      }
#pragma unroll 1
      for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk, ring.next()) {
        const std::uint32_t full = address(barriers.full[ring.at]), to = stage(ring.at);
        barrier_wait(address(barriers.empty[ring.at]), ring.parity ^ 1);
        if (number == 0) {
          barrier_arrive_expecting(full, Tile::kWeightBytes);
          copy_box(to, w, {(place.first + chunk) * Tile::kChunk, place.row, 0, 0, 0}, full);
        }
        unsigned char* const columns = memory + (to - of_memory.first) + Tile::kWeightBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half, raw.next()) {
          barrier_wait(address(barriers.raw_full[raw.at]), raw.parity);
          if constexpr (Tile::kPaired) {
            lay_out_pairs(memory + buffer(raw.at), columns, pairs, half * kHalf);
          } else {
            lay_out(memory + buffer(raw.at), columns, own, shared, half * kHalf);
          }
        }
        publish_to_products();
        __syncwarp();  // all lanes have read and written
        if (lane() == 0) barrier_arrive(full);
      }
    }
  }
};
#endif

}  // namespace upfold::cuda
