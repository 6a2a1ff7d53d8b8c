// How the columns of the gradient of the input are laid out: copies of w and of rows of y', and what each pixel takes of these.
#pragma once

#include "fused_laid.cuh"
#include "laid_pairs.cuh"

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

// What a lane knows of two neighbouring pixels: where its two rows of the kernel have the vector that both meet, of the first of
// the warp's channels, and what lies beside it.
struct LaidPair {
  std::uint32_t row[2], left_mask, right_mask;
  bool reads_end;
};

template <typename Tile>
struct LaidColumns {
  using Value = typename Tile::Value;
  using Pixel = LaidPixel<Tile::kKernel, Tile::kMasks>;
  using Words = std::uint32_t[4];
  static constexpr int kHalf = 4;                              // vectors of half a chunk
  static constexpr bool kMore = Tile::kPixels > Tile::kLanes;  // whether two lanes share a pixel beside their own
  // Of each half of a chunk a warp lays out one of two channels, of floats the only one, of so many times sixteen pairs of
  // pixels.
  static constexpr bool kFloats = sizeof(Value) == 4;
  static constexpr int kSixteens = Tile::kPixels / (2 * kPairsOfWarp), kPairs = kSixteens / (kFloats ? 4 : 2);

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
  static __device__ __forceinline__ std::int32_t own_number() { return std::int32_t(threadIdx.x) - Tile::kWorkers; }

  __device__ __forceinline__ LaidSlot find_slot(const LaidPlace& place) const {
    const std::int32_t last = place.end - 1, pixels = std::int32_t(job.plane.value);
    const std::int32_t plane = std::int32_t(divide(job.plane, std::uint32_t(place.pixel)) + lane());
    const std::int32_t low = max(place.pixel - plane * pixels, 0), high = min(last - plane * pixels, pixels - 1);
    LaidSlot slot{0, 0, 0, 0};
    if (job.box_bytes > 0) return {0, 0, 0, lane() * std::uint32_t(job.slot_bytes)};
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
    std::uint32_t plane = std::uint32_t(min(place.pixel + number, place.end - 1)), at = take(job.plane, plane);
    const std::uint32_t slot = plane - divide(job.plane, std::uint32_t(place.pixel));
    const std::uint32_t begin = __shfl_sync(~0u, slots.begin, slot), first = __shfl_sync(~0u, slots.at, slot);
    const std::int32_t iw = std::int32_t(take(job.row, at)), w = iw * job.stride_w - job.pad_w;
    const std::int32_t h = std::int32_t(at) * job.stride_h - job.pad_h;
    Pixel pixel;
#pragma unroll
    for (int k = 0; k < Tile::kKernel; ++k) {
      const std::uint32_t own = first + std::uint32_t((h + k) * job.row_bytes + w * std::int32_t(sizeof(Value))) - begin;
      pixel.row[k] = Tile::kBeside && std::uint32_t(h + k) >= std::uint32_t(job.out_h) ? 0 : std::uint32_t(job.margin) + own;
    }
#pragma unroll
    for (int i = 0; i < Tile::kMasks; ++i) pixel.mask[i] = std::uint32_t(w + i) < std::uint32_t(job.out_w) ? ~0u : 0u;
    return pixel;
  }
  // The same of the lane's pair of number `sixteen` of the warp's; there are an even number of pixels.
  __device__ __forceinline__ LaidPair find_pair(const LaidPlace& place, const LaidSlot& slots, const LaidPairLane& in_warp,
                                                int sixteen) const {
    const std::int32_t number = first_of_pair(in_warp, sixteen);
    std::uint32_t plane = std::uint32_t(min(place.pixel + number, place.end - 2)), at = take(job.plane, plane);
    const std::uint32_t slot = plane - divide(job.plane, std::uint32_t(place.pixel));
    const std::uint32_t begin = __shfl_sync(~0u, slots.begin, slot), first = __shfl_sync(~0u, slots.at, slot);
    const std::int32_t w = std::int32_t(take(job.row, at)) * 2;  // of the vector that both have
    const std::int32_t h = std::int32_t(at) * job.stride_h - job.pad_h;
    const std::uint32_t channel = kFloats ? 0 : warp() % 2 * std::uint32_t(job.pitch);
    LaidPair pair;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const std::int32_t row = h + std::int32_t(kFloats ? 2 * k + in_warp.half : 2 * in_warp.half + k);
      const std::uint32_t own = first + std::uint32_t(row * job.row_bytes + w * std::int32_t(sizeof(Value))) - begin;
      const bool beside = std::uint32_t(row) >= std::uint32_t(job.out_h);
      pair.row[k] = channel + (beside ? kLaidZeros : std::uint32_t(job.margin) + own);
    }
    const bool has_left = w > 0, has_right = w + 4 < job.out_w;
    pair.left_mask = has_left ? ~0u : 0, pair.right_mask = has_right ? ~0u : 0;
    pair.reads_end = (in_warp.is_first && has_left) || (in_warp.is_last && has_right);
    return pair;
  }
  static __device__ __forceinline__ std::int32_t first_of_pair(const LaidPairLane& in_warp, int sixteen) {
    const std::uint32_t first = kFloats ? warp() : warp() / 2;
    return std::int32_t((first * kPairs + std::uint32_t(sixteen)) * kPairsOfWarp + in_warp.pair) * 2;
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
      if constexpr (!Tile::kBeside) {
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
    // Of a box `from` is its first plane.
    Ring ring;
  };
  __device__ __forceinline__ void begin_tile(const unsigned char* y, Cursor& at) const {
    if (at.tile >= job.tiles) return;
    const LaidPlace place = laid_place(job, at.tile, Tile::kRows);
    at.half = 2 * place.first, at.end = 2 * (place.first + place.chunks);
    if (job.box_bytes > 0) {
      at.from = divide(job.plane, std::uint32_t(place.pixel));
      return;
    }
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
    at.base = y + first + std::int64_t(at.half) * job.channels * job.y_c;
  }
  __device__ __forceinline__ void copy_next(const BoxMap& planes, const unsigned char* y, Cursor& at) const {
    if (at.tile >= job.tiles) return;
    const std::uint32_t full = address(barriers.raw_full[at.ring.at]), to = of_memory.first + buffer(at.ring.at);
    if (job.box_bytes > 0) {
      // Halves are brought by the two warpgroups in turn.
      if (threadIdx.x == std::uint32_t(at.half % 2) * (Tile::kWorkers / 2)) {
        barrier_arrive_expecting(full, std::uint32_t(job.box_bytes));
        copy_box(to + std::uint32_t(job.margin), planes, {0, at.half * job.channels, std::int32_t(at.from), 0, 0}, full);
      }
    } else {
      if (lane() == 0) barrier_arrive_expecting(full, at.of_warp);
      if (at.bytes > 0) copy_bulk(to + at.to, at.base + at.from, at.bytes, full);
      at.base += job.channels * job.y_c;
    }
    at.ring.next();
    if (++at.half < at.end) return;
    at.tile += gridDim.x;
    begin_tile(y, at);
  }

  // The columns of half a chunk. Of the pixels behind those that a lane has alone two lanes have every other vector each. All
  // words are on their way before the first is asked for.
  struct PixelHalf {
    Words words[kHalf + (kMore ? 2 : 0)];
  };
  struct Pixels {
    Pixel own, shared;
    using Half = PixelHalf;
  };
  __device__ __forceinline__ void find(const LaidPlace& place, const LaidSlot& slots, Pixels& pixels) const {
    pixels.shared = pixels.own = find_pixel(place, slots, own_number());
    if constexpr (kMore) pixels.shared = find_shared(place, slots, own_number());
  }
  __device__ __forceinline__ void read(const unsigned char* raw, const Pixels& pixels, PixelHalf& half) const {
#pragma unroll
    for (int v = 0; v < kHalf; ++v) read(raw, pixels.own, v * Tile::kSegments, half.words[v]);
    if constexpr (kMore) {
#pragma unroll
      for (int i = 0; i < 2; ++i) read(raw, pixels.shared, 2 * i * Tile::kSegments, half.words[kHalf + i]);
    }
  }
  static __device__ __forceinline__ void write(unsigned char* columns, const Pixels&, const PixelHalf& half,
                                               std::uint32_t first) {
#pragma unroll
    for (int v = 0; v < kHalf; ++v) write(columns, own_number(), first + v, half.words[v]);
    if constexpr (kMore) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        write(columns, shared_number(own_number()), first + 2 * i + std::uint32_t(shared_half(own_number())),
              half.words[kHalf + i]);
    }
  }

  // The same of pairs of pixels, whose segments begin at odd values.
  struct PairHalf {
    std::conditional_t<kFloats, LaidPairFloats, LaidPairValues> values[kPairs];
  };
  struct Pairs {
    LaidPairLane in_warp;
    LaidPair pairs[kPairs];
    using Half = PairHalf;
  };
  __device__ __forceinline__ void find(const LaidPlace& place, const LaidSlot& slots, Pairs& own) const {
    own.in_warp = laid_pair_lane(lane());
#pragma unroll
    for (int p = 0; p < kPairs; ++p) own.pairs[p] = find_pair(place, slots, own.in_warp, p);
  }
  static __device__ __forceinline__ void read(const unsigned char* raw, const Pairs& own, PairHalf& half) {
    const int beside = own.in_warp.is_first ? -int(sizeof(Value)) : 4 * int(sizeof(Value));
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      auto& values = half.values[p];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const unsigned char *const from = raw + own.pairs[p].row[k], *const end = from + beside;
        if constexpr (kFloats) {
          const float4 v = *reinterpret_cast<const float4*>(from);
          values.own[k] = {to_tf32(v.x), to_tf32(v.y), to_tf32(v.z), to_tf32(v.w)};
          values.end[k] = own.pairs[p].reads_end ? to_tf32(*reinterpret_cast<const float*>(end)) : 0;
        } else {
          values.own[k] = *reinterpret_cast<const uint2*>(from);
          if (k == 0) values.end = 0;
          if (own.pairs[p].reads_end) values.end |= std::uint32_t(*reinterpret_cast<const std::uint16_t*>(end)) << (16 * k);
        }
      }
    }
  }
  static __device__ __forceinline__ void write(unsigned char* columns, const Pairs& own, const PairHalf& half,
                                               std::uint32_t first) {
    const std::uint32_t vector = first + (kFloats ? 0 : warp() % 2 * 2) + own.in_warp.half;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const std::int32_t number = first_of_pair(own.in_warp, p);
      const LaidPair& pair = own.pairs[p];
      Words before, after;  // of the two pixels
      if constexpr (kFloats) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          lay_pair_row(own.in_warp, half.values[p], k, pair.left_mask, pair.right_mask, before, after);
          write(columns, number, vector + 2 * std::uint32_t(k), before);
          write(columns, number + 1, vector + 2 * std::uint32_t(k), after);
        }
      } else {
        lay_pair(own.in_warp, half.values[p], pair.left_mask, pair.right_mask, before, after);
        write(columns, number, vector, before);
        write(columns, number + 1, vector, after);
      }
    }
  }

  // Ahead of each channel of a buffer, or of all slots of a box, there are zeros, which copies leave alone.
  __device__ __forceinline__ void clear_margins() const {
    const std::int32_t vectors = job.margin / 16;
    for (std::int32_t i = std::int32_t(threadIdx.x); i < vectors * job.margins * job.buffers; i += Tile::kThreads) {
      const std::int32_t number = i / vectors, at = number % job.margins * job.pitch + i % vectors * 16;
      *reinterpret_cast<uint4*>(memory + buffer(std::uint32_t(number / job.margins)) + at) = {0, 0, 0, 0};
    }
  }

  // The warps beside those that multiply: the columns of all tiles of the block in their order.
  __device__ __forceinline__ void produce(const BoxMap& w) const {
    using Own = std::conditional_t<Tile::kPaired, Pairs, Pixels>;
    constexpr int kHalves = Tile::kWhole ? 2 : 1;  // that are read before the first is written
    Ring ring(job.stages), raw(job.buffers);
    for (std::uint32_t tile = blockIdx.x; tile < job.tiles; tile += gridDim.x) {
      const LaidPlace place = laid_place(job, tile, Tile::kRows);
      Own own;
      find(place, find_slot(place), own);
#pragma unroll 1
      for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk, ring.next()) {
        const std::uint32_t full = address(barriers.full[ring.at]), to = stage(ring.at);
        barrier_wait(address(barriers.empty[ring.at]), ring.parity ^ 1);
        if (own_number() == 0) {
          barrier_arrive_expecting(full, Tile::kWeightBytes);
          copy_box(to, w, {(place.first + chunk) * Tile::kChunk, place.row, 0, 0, 0}, full);
        }
        unsigned char* const columns = memory + (to - of_memory.first) + Tile::kWeightBytes;
#pragma unroll
        for (int first = 0; first < 2; first += kHalves) {
          typename Own::Half halves[kHalves];
#pragma unroll
          for (int half = 0; half < kHalves; ++half, raw.next()) {
            barrier_wait(address(barriers.raw_full[raw.at]), raw.parity);
            read(memory + buffer(raw.at), own, halves[half]);
          }
#pragma unroll
          for (int half = 0; half < kHalves; ++half) write(columns, own, halves[half], std::uint32_t(first + half) * kHalf);
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
