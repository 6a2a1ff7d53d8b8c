// How the columns of the gradient of the weight are laid out: copies of x and of rows of y', and what each pixel takes of these.
#pragma once

#include "fused_weight_laid.cuh"
#include "laid_pairs.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct WeightLaidColumns {
  using Value = typename Tile::Value;
  using Words = std::uint32_t[4];
  // Of the channels whose vectors a lane has, of pixels and their windows: sums of what four lanes have read.
  using ChannelSums = float[Tile::kChannels / Tile::kShares];
  static constexpr int kVectors = Tile::kN8;                        // of a pixel
  static constexpr std::uint32_t kGroup = kWeightLaidPixels * 128;  // bytes of 64 columns

  const WeightLaidJob& job;
  WeightLaidBarriers& barriers;
  WeightLaidPlaces* places;  // of each buffer
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

  // The pixels of a chunk, counted through all planes: the first one, and the last one that there is; and what they meet of the
  // first plane, in pieces from `begin` on, a multiple of 16 bytes from its first value.
  struct Chunk {
    std::int32_t first, last, plane, planes, begin, pieces;
  };
  // From a plane's first value to the first that the window of pixel `at` in it meets, and to behind the last.
  __device__ __forceinline__ std::int32_t begins(std::uint32_t at) const {
    const std::int32_t left = std::int32_t(take(job.row, at)) * job.stride_w - job.pad;
    return ((std::int32_t(at) * job.stride_h - job.pad) * job.row_bytes + left * 2) & ~15;
  }
  __device__ __forceinline__ std::int32_t ends(std::uint32_t at) const {
    const std::int32_t right = std::int32_t(take(job.row, at)) * job.stride_w - job.pad + job.kernel;
    return (std::int32_t(at) * job.stride_h - job.pad + job.kernel - 1) * job.row_bytes + right * 2;
  }
  __device__ __forceinline__ std::int32_t pieces_of(std::int32_t bytes) const {
    return std::int32_t(divide(job.piece, std::uint32_t(bytes) + job.piece.value - 1));
  }
  __device__ __forceinline__ Chunk find_chunk(std::int32_t number) const {
    std::uint32_t run = std::uint32_t(number);
    const std::int32_t in_run = std::int32_t(take(job.run_chunks, run)) * kWeightLaidPixels;
    const std::int32_t first = std::int32_t(run) * job.run_pixels + in_run;
    const std::int32_t last = first + min(kWeightLaidPixels, job.run_pixels - in_run) - 1;
    std::uint32_t plane = std::uint32_t(first), last_plane = std::uint32_t(last);
    const std::uint32_t at = take(job.plane, plane), last_at = take(job.plane, last_plane);
    const std::int32_t begin = begins(at), end = ends(plane == last_plane ? last_at : job.plane.value - 1);
    return {first, last, std::int32_t(plane), std::int32_t(last_plane - plane) + 1, begin, pieces_of(end - begin)};
  }
  __device__ __forceinline__ std::int32_t pixels_of(std::int32_t number) const {
    std::uint32_t run = std::uint32_t(number);
    return min(kWeightLaidPixels, job.run_pixels - std::int32_t(take(job.run_chunks, run)) * kWeightLaidPixels);
  }
  // Of plane number `slot` of a chunk the first piece, and where it begins.
  __device__ __forceinline__ std::int32_t piece_of(const Chunk& chunk, std::int32_t slot) const {
    return slot == 0 ? 0 : chunk.pieces + (slot - 1) * job.plane_pieces;
  }
  __device__ __forceinline__ std::int32_t begin_of(const Chunk& chunk, std::int32_t slot) const {
    return slot == 0 ? chunk.begin : job.plane_begin;
  }

  __device__ __forceinline__ std::int32_t last_pieces_of(const Chunk& chunk) const {
    std::uint32_t last = std::uint32_t(chunk.last);
    return chunk.planes == 1 ? chunk.pieces : pieces_of(ends(take(job.plane, last)) - job.plane_begin);
  }
  __device__ __forceinline__ std::int32_t pieces_of(const Chunk& chunk) const {
    return piece_of(chunk, chunk.planes - 1) + last_pieces_of(chunk);
  }
  // Calls use(where it begins) for each piece of a chunk, of the block's channels.
  template <typename Use>
  __device__ __forceinline__ void each_piece(const Chunk& chunk, const WeightLaidPlace& place, Use use) const {
#pragma unroll 1
    for (std::int32_t slot = 0; slot < chunk.planes; ++slot) {
      std::uint32_t sample = std::uint32_t(chunk.plane + slot);
      const std::int32_t d = std::int32_t(take(job.depth, sample)), begin = begin_of(chunk, slot) / 2;
      const std::int32_t pieces = slot + 1 == chunk.planes ? last_pieces_of(chunk) : slot == 0 ? chunk.pieces : job.plane_pieces;
#pragma unroll 1
      for (std::int32_t piece = 0; piece < pieces; ++piece)
        use({begin + piece * std::int32_t(job.piece.value) / 2, place.channel, d, std::int32_t(sample), 0});
    }
  }

  // Where row `row` of the window of a pixel lies, `beside` bytes from the first value that it meets, or that a pair does.
  __device__ __forceinline__ std::uint32_t find_place(const Chunk& chunk, std::int32_t number, std::int32_t row,
                                                      std::int32_t beside) const {
    constexpr std::int32_t kTogether = Tile::kPaired ? 2 : 1;
    std::uint32_t plane = std::uint32_t(min(chunk.first + number, chunk.last + 1 - kTogether)), at = take(job.plane, plane);
    const std::int32_t slot = std::int32_t(plane) - chunk.plane, w = std::int32_t(take(job.row, at)) * job.stride_w;
    std::uint32_t piece =
        std::uint32_t((std::int32_t(at) * job.stride_h - job.pad + row) * job.row_bytes + w * 2 + beside - begin_of(chunk, slot));
    const std::uint32_t in_piece = take(job.piece, piece);
    const std::uint32_t place = (piece + std::uint32_t(piece_of(chunk, slot))) * std::uint32_t(job.piece_bytes) + in_piece;
    if constexpr (!Tile::kPaired) return place;
    return place | (w > 0 ? 0 : kBegins) | (w + 4 < job.out_w ? 0 : kEnds);
  }
  // Thread `thread` notes a place for a chunk.
  __device__ __forceinline__ void note(const Chunk& chunk, std::uint32_t to, std::int32_t thread) const {
    constexpr std::int32_t kRows = Tile::kKernel, kUnits = Tile::kPaired ? kWeightLaidPixels / 2 : kWeightLaidPixels;
    constexpr std::int32_t kEnd = Tile::kPaired ? 4 * kRows : 0;  // beside the first pair of either half, and the last one
    if (thread >= kUnits * kRows + kEnd) return;
    const std::int32_t unit = thread / kRows, row = thread % kRows;
    const std::int32_t end = unit - kUnits, end_pair = (end + 1) / 2 * (kUnits / 2) - end % 2;
    const std::int32_t number = !Tile::kPaired ? unit : 2 * (end < 0 ? unit : end_pair);
    places[to][thread] = find_place(chunk, number, row, end < 0 ? 0 : end % 2 == 0 ? -2 : 8);
  }

  // The warps that multiply note where the pixels of a chunk find what they meet, and one of their threads has the copy engine
  // bring it. They do so `buffers` chunks ahead, behind a wait for the columns that were laid out from the same buffer.
  __device__ __forceinline__ void bring(const BoxMap& y, const WeightLaidPlace& place, std::int32_t number,
                                        std::uint32_t to) const {
    const Chunk chunk = find_chunk(number);
    const std::uint32_t full = address(barriers.raw_full[to]);
    note(chunk, to, std::int32_t(threadIdx.x));
    __syncwarp();  // all lanes have noted theirs
    if (lane() != 0) return;
    // One warp that notes little, of the second warpgroup.
    if (threadIdx.x != Tile::kWorkers - 32) return barrier_arrive(full);
    std::uint32_t at = of_memory.first + buffer(to);
    barrier_arrive_expecting(full, std::uint32_t(pieces_of(chunk) * job.piece_bytes));
    each_piece(chunk, place, [&](const std::int32_t(&from)[5]) {
      copy_box(at, y, from, full);
      at += std::uint32_t(job.piece_bytes);
    });
  }

  // Vector `vector` of the columns of a pixel.
  static __device__ __forceinline__ void write(unsigned char* columns, std::uint32_t number, std::uint32_t vector,
                                               const Words& words) {
    *reinterpret_cast<uint4*>(columns + vector / 8 * kGroup + number * 128 + (vector ^ number) % 8 * 16) = {words[0], words[1],
                                                                                                            words[2], words[3]};
  }

  // A lane has a share of the vectors of a pixel; segments of them are rows of a channel, then those of the next one. kTail: of
  // the chunk's pixels some there may be none of.
  template <bool kSums, bool kTail>
  __device__ __forceinline__ void lay_out(const unsigned char* raw, unsigned char* columns, const std::uint32_t* of_pixel,
                                          bool exists, ChannelSums& sums) const {
    constexpr int kOwn = kVectors / Tile::kShares, kBatch = Tile::kWide ? (kSums ? 2 : 6) : kOwn;
    constexpr int kSegments = 8 / Tile::kKernel;
    constexpr int kWords = Tile::kKernel / 2;
    using Segment = Word<4 * kWords>;
    const std::uint32_t thread = threadIdx.x - Tile::kWorkers, number = thread % kWeightLaidPixels;
    const std::uint32_t share = thread / kWeightLaidPixels;
    const unsigned char* from[Tile::kKernel];
    std::uint32_t row_places[Tile::kKernel];
    using Places = Word<4 * Tile::kKernel>;
    *reinterpret_cast<Places*>(row_places) = reinterpret_cast<const Places*>(of_pixel)[number];
#pragma unroll
    for (int k = 0; k < Tile::kKernel; ++k)
      from[k] = raw + share * std::uint32_t(Tile::kChannels / Tile::kShares) * job.piece.value + row_places[k];
    static_assert(kOwn % kBatch == 0 && Tile::kChannels % Tile::kShares == 0, "whole batches, whole channels");
#pragma unroll
    for (int first = 0; first < kOwn; first += kBatch) {
      Words words[kBatch];
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          const int segment = v * kSegments + s, row = segment % Tile::kKernel;
          *reinterpret_cast<Segment*>(words[v] + s * kWords) = *reinterpret_cast<const Segment*>(from[row]);
          from[row] += job.piece.value;
        }
        if constexpr (kTail) {
#pragma unroll
          for (int i = 0; i < 4; ++i) words[v][i] = exists ? words[v][i] : 0;
        }
      }
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        write(columns, number, share * kOwn + std::uint32_t(first + v), words[v]);
        if constexpr (kSums) add_vector(sums, first + v, words[v]);
      }
    }
  }

  // A vector has two channels, or half of one: the words of either are the first rows of a product with ones, or the last.
  static __device__ __forceinline__ void add_vector(ChannelSums& sums, int vector, const Words& words) {
    constexpr std::uint32_t kOnes = PairOfOnes<Value>::kBits;
    float product[4] = {};
    TensorCore<Value>::add(product, {words[0], words[2], words[1], words[3]}, kOnes, kOnes);
    if constexpr (Tile::kKernel == 2) {
      sums[2 * vector] += product[0], sums[2 * vector + 1] += product[2];
    } else {
      sums[vector / 2] += product[0] + product[2];
    }
  }

  // [part][half of a chunk's pixels][channel of all tiles]
  __device__ __forceinline__ void store_sums(const WeightLaidPlace& place, const ChannelSums& sums, float* to) const {
    constexpr std::int32_t kOwn = Tile::kChannels / Tile::kShares;
    const std::uint32_t warp = (threadIdx.x - Tile::kWorkers) / 32, row = std::uint32_t(place.part) * 2 + warp % 2;
    float own = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float sum = sums[i];
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
      if (lane() == std::uint32_t(i)) own = sum;
    }
    static_assert(kOwn <= 32, "a lane for each");
    if (lane() < std::uint32_t(kOwn))
      to[std::int64_t(row) * job.sum_pitch + place.channel + std::int32_t(warp / 2 * kOwn + lane())] = own;
  }

  // The same of pairs of pixels, whose segments begin at odd values. A warp has half of the pairs and every so many channels.
  // There are an even number of pixels.
  struct PairLane {
    LaidPairLane in_warp;
    bool exists, reads_end;
    std::uint32_t left_mask, right_mask;
    const unsigned char* from[2];
    const unsigned char* beside[2];
    std::uint32_t step;  // bytes to the warp's next channel
  };
  static constexpr int kPairWarps = Tile::kLanes / 32;
  static_assert(4 * kPairsOfWarp == kWeightLaidPixels, "half of the pairs");

  __device__ __forceinline__ PairLane pair_lane(const unsigned char* raw, const std::uint32_t* of_pairs,
                                                std::int32_t pixels) const {
    PairLane own;
    own.in_warp = laid_pair_lane(lane());
    const std::uint32_t warp = (threadIdx.x - Tile::kWorkers) / 32, pair = warp % 2 * kPairsOfWarp + own.in_warp.pair;
    const bool is_last = own.in_warp.is_last;
    own.exists = std::int32_t(2 * pair) < pixels;
    const uint2 places = reinterpret_cast<const uint2*>(of_pairs)[2 * pair + own.in_warp.half];
    const std::uint32_t end = kWeightLaidPixels / 2 + warp % 2 * 2 + is_last;
    const uint2 ends = reinterpret_cast<const uint2*>(of_pairs)[2 * end + own.in_warp.half];
    const bool has_left = (places.x & kBegins) == 0, has_right = (places.x & kEnds) == 0;
    own.reads_end = (own.in_warp.is_first && has_left) || (is_last && has_right);
    own.left_mask = has_left ? ~0u : 0, own.right_mask = has_right ? ~0u : 0;
    const unsigned char* const at = raw + warp / 2 * job.piece.value;
    own.from[0] = at + (places.x & kLaidPlace), own.from[1] = at + (places.y & kLaidPlace);
    own.beside[0] = at + (ends.x & kLaidPlace), own.beside[1] = at + (ends.y & kLaidPlace);
    own.step = kPairWarps / 2 * job.piece.value;
    return own;
  }

  static __device__ __forceinline__ LaidPairValues read_pair(PairLane& own) {
    LaidPairValues pair = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      pair.own[k] = *reinterpret_cast<const uint2*>(own.from[k]);
      if (own.reads_end) pair.end |= std::uint32_t(*reinterpret_cast<const std::uint16_t*>(own.beside[k])) << (16 * k);
      own.from[k] += own.step, own.beside[k] += own.step;
    }
    return pair;
  }

  template <bool kTail>
  static __device__ __forceinline__ void write_pair(unsigned char* columns, std::uint32_t number, std::uint32_t vector,
                                                    const PairLane& own, const LaidPairValues& pair) {
    Words before, after;  // of the two pixels
    lay_pair(own.in_warp, pair, own.left_mask, own.right_mask, before, after);
    if constexpr (kTail) {
#pragma unroll
      for (int i = 0; i < 4; ++i) before[i] = own.exists ? before[i] : 0, after[i] = own.exists ? after[i] : 0;
    }
    write(columns, number, vector, before);
    write(columns, number + 1, vector, after);
  }

  template <bool kTail>
  __device__ __forceinline__ void lay_out_pairs(const unsigned char* raw, unsigned char* columns, const std::uint32_t* of_pairs,
                                                std::int32_t pixels) const {
    constexpr int kOwn = Tile::kChannels / (kPairWarps / 2), kBatch = Tile::kWide ? 2 : kOwn, kBatches = kOwn / kBatch;
    static_assert(Tile::kChannels % (kPairWarps / 2) == 0 && kOwn % kBatch == 0, "whole batches");
    const std::uint32_t warp = (threadIdx.x - Tile::kWorkers) / 32;
    PairLane own = pair_lane(raw, of_pairs, pixels);
    const std::uint32_t number = 2 * (warp % 2 * kPairsOfWarp + own.in_warp.pair);
    LaidPairValues pairs[2][kBatch];  // those that are written, and those that are read meanwhile
#pragma unroll
    for (int v = 0; v < kBatch; ++v) pairs[0][v] = read_pair(own);
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      if (batch + 1 < kBatches) {
#pragma unroll
        for (int v = 0; v < kBatch; ++v) pairs[(batch + 1) % 2][v] = read_pair(own);
      }
#pragma unroll
      for (int v = 0; v < kBatch; ++v)
        write_pair<kTail>(columns, number, 2 * (warp / 2 + kPairWarps / 2 * std::uint32_t(batch * kBatch + v)) + own.in_warp.half,
                          own, pairs[batch % 2][v]);
    }
  }

  // The warps beside those that multiply: the columns of all chunks of the block in their order.
  template <bool kSums>
  __device__ __forceinline__ void produce(const BoxMap& x, const WeightLaidPlace& place, float* row_sums) const {
    Ring ring(job.stages), raw(job.buffers);
    const std::uint32_t thread = threadIdx.x - Tile::kWorkers;
    ChannelSums sums = {};
#pragma unroll 1
    for (std::int32_t chunk = place.first; chunk < place.first + place.chunks; ++chunk, ring.next(), raw.next()) {
      const std::uint32_t full = address(barriers.full[ring.at]), to = stage(ring.at);
      barrier_wait(address(barriers.empty[ring.at]), ring.parity ^ 1);
      if (thread == 0) {
        std::uint32_t plane = std::uint32_t(chunk);
        const std::int32_t pixel = std::int32_t(take(job.run_chunks, plane)) * kWeightLaidPixels;
        const std::int32_t d = std::int32_t(take(job.depth, plane));
        barrier_arrive_expecting(full, Tile::kXBytes);
        copy_box(to, x, {pixel, place.row, d, std::int32_t(plane), 0}, full);
      }
      unsigned char* const columns = memory + (to - of_memory.first) + Tile::kXBytes;
      barrier_wait(address(barriers.raw_full[raw.at]), raw.parity);
      const unsigned char* const rows = memory + buffer(raw.at);
      const std::int32_t pixels = pixels_of(chunk);
      if constexpr (Tile::kPaired) {
        if (pixels == kWeightLaidPixels) {
          lay_out_pairs<false>(rows, columns, places[raw.at], kWeightLaidPixels);
        } else {
          lay_out_pairs<true>(rows, columns, places[raw.at], pixels);
        }
      } else if (!kSums && pixels == kWeightLaidPixels) {
        lay_out<false, false>(rows, columns, places[raw.at], true, sums);
      } else {
        lay_out<kSums, true>(rows, columns, places[raw.at], std::int32_t(thread % kWeightLaidPixels) < pixels, sums);
      }
      publish_to_products();
      __syncwarp();  // all lanes have read and written
      if (lane() == 0) barrier_arrive(full);
    }
    if constexpr (kSums) store_sums(place, sums, row_sums);
  }
};
#endif

}  // namespace upfold::cuda
