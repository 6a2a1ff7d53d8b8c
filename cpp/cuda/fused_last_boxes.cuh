// The end of tiles of the fused method by boxes of channels that are stored as boxes by the copy engine, which finds where rows
// lie and which of them exist: of a tile some columns of all rows at a time, a *piece*, through shared memory.
//   staging  [warpgroup][piece][row of the tile][128 bytes of channels]   swizzled
// Lanes hold 16-bit sums in the order of channels, two of each eight, and write them as matrices; of floats they hold 16 bytes of
// neighbouring channels (channel_of_column).
#pragma once

#include "fused_last_store.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// Two neighbouring values of the bias.
template <bool kHalves>
struct LastTwo {
  using Type = float2;
};
template <>
struct LastTwo<true> {
  using Type = std::uint32_t;
};

// What lanes do before they write: bias and activation.
template <typename Value, typename Tile>
struct LastStaged {
  static constexpr bool kHalves = sizeof(Value) == 2;
  using Values = LastStore<Value, Tile, false, kHalves>;
  using Sums = typename Values::Sums;

  // What a lane adds to two neighbouring channels of each eight (LastWork says when it is read).
  static constexpr bool kAddsPairs = kHalves || Tile::kToPlanes || Tile::kRuns;
  using Added = typename LastTwo<kHalves>::Type[Tile::kSub8];

  const LastJob& job;
  const LastPlace& place;
  const Value* bias;
  const Added& added;
  const BoxMap& result;
  unsigned char* staging;  // of the warpgroup

  static __device__ __forceinline__ std::int32_t lane() { return std::int32_t(threadIdx.x) % 32; }
  static __device__ __forceinline__ bool is_first() { return threadIdx.x % 128 == 0; }
  static __device__ __forceinline__ void meet_warpgroup() { meet<128>(2 + std::int32_t(threadIdx.x) / 128); }

  static __device__ __forceinline__ void read_two(const Value* v, bool together, std::uint32_t& two) {
    two = together ? __ldg(reinterpret_cast<const std::uint32_t*>(v)) : Pair<Value>::narrow(widen(v[0]), widen(v[1]));
  }
  static __device__ __forceinline__ void read_two(const Value* v, bool together, float2& two) {
    two = together ? __ldg(reinterpret_cast<const float2*>(v)) : float2{widen(v[0]), widen(v[1])};
  }
  static __device__ __forceinline__ float2 widened(std::uint32_t two) { return Pair<Value>::widen(two); }
  static __device__ __forceinline__ float2 widened(const float2& two) { return two; }
  static __device__ __forceinline__ void read_bias(const LastJob& job, const LastPlace& place, const Value* bias, Added& added) {
    if (bias == nullptr) return;
    const std::uintptr_t size = 2 * sizeof(Value);
    const bool together = (reinterpret_cast<std::uintptr_t>(bias) | job.channels.value * sizeof(Value)) % size == 0;
    together ? read_twos<true>(job, place, bias, added) : read_twos<false>(job, place, bias, added);
  }
  template <bool kTogether>
  static __device__ __forceinline__ void read_twos(const LastJob& job, const LastPlace& place, const Value* bias, Added& added) {
    const std::int32_t channels = std::int32_t(job.channels.value), first = place.column_tile * Tile::kColumns;
    const Value* own = bias + std::int64_t(place.group) * channels + lane() % 4 * 2;
    if constexpr (Tile::kToPlanes) {  // channels come in eights, and columns are no taps
      own += first;
#pragma unroll
      for (int eight = 0; eight < Tile::kSub8; ++eight) {
        read_two(own + (first + eight * 8 < job.columns ? eight * 8 : 0), kTogether, added[eight]);
      }
    } else {
      std::uint32_t tap = std::uint32_t(first);
      std::int32_t channel = job.flat ? std::int32_t(take(job.channels, tap)) : first;
#pragma unroll
      for (int eight = 0; eight < Tile::kSub8; ++eight, channel += 8) {
        if (job.flat && channel >= channels) channel -= channels;
        const std::int32_t at = first + eight * 8 < job.columns ? channel : 0;
        read_two(own + at, kTogether, added[eight]);
      }
    }
  }
  __device__ __forceinline__ void add_pairs(Sums& sums) const {
#pragma unroll
    for (int eight = 0; eight < Tile::kSub8; ++eight) {
      const float2 two = widened(added[eight]);
#pragma unroll
      for (int i = 0; i < Tile::kM * Tile::kPhases; ++i) {
        float(&sum)[4] = sums[i / Tile::kPhases][i % Tile::kPhases][eight];
        sum[0] += two.x, sum[1] += two.y, sum[2] += two.x, sum[3] += two.y;
      }
    }
  }
  __device__ __forceinline__ void add_bias(Sums& sums) const {
    if constexpr (kAddsPairs) {
      if (bias != nullptr) add_pairs(sums);
    } else {
      Values{job, place, bias, nullptr, nullptr}.add_bias(sums);
    }
  }

  template <bool kRelu>
  static __device__ __forceinline__ float end(float v) {
    return kRelu ? larger(v, 0.0f) : v;
  }

  __device__ __forceinline__ void finish(Sums& sums) const {
    add_bias(sums);
    Values{job, place, bias, nullptr, nullptr}.activate(sums);
  }
  // The same with ReLU, which other ends apply as they store.
  struct Relu {
    __device__ __forceinline__ float operator()(float v) const { return larger(v, 0.0f); }
  };
  __device__ __forceinline__ void finish_all(Sums& sums) const {
    finish(sums);
    if (job.activation == Activation::kRelu) ActivateLast<Tile::kM, Tile::kPhases, Tile::kSub8>{sums}(Relu{});
  }
};

template <typename Value, typename Tile>
struct LastBoxStore : LastStaged<Value, Tile> {
  using Base = LastStaged<Value, Tile>;
  using Base::job, Base::place, Base::result, Base::staging, Base::kHalves, Base::lane, Base::is_first, Base::meet_warpgroup;
  using typename Base::Sums;
  static constexpr int kColumns = kLastPieceRow / int(sizeof(Value)), kOfPhase = Tile::kColumns / kColumns;
  static constexpr int kPieces = Tile::kPhases * kOfPhase;
  static constexpr int kAtOnce = last_pieces_at_once(kPieces * kLastPieceRow, int(sizeof(Value)));
  static constexpr int kBytes = Tile::kRows * kLastPieceRow, kEights = kColumns / 8, kStaged = kAtOnce * kBytes;
  static_assert(kOfPhase > 0 && kPieces % kAtOnce == 0, "whole pieces");

  template <bool kRelu>
  static __device__ __forceinline__ float end(float v) {
    return Base::template end<kRelu>(v);
  }

  // Matrices of both eights of rows of the warp's sixteen, in two eights of channels.
  template <bool kRelu, int kPiece>
  static __device__ __forceinline__ void write_matrices(const Sums& sums, unsigned char* to) {
    const std::int32_t row = std::int32_t(threadIdx.x) / 32 % 4 * 16 + lane() % 16, eight = lane() / 16;
    const std::uint32_t own = shared_address(to) + std::uint32_t(row * kLastPieceRow), swizzle = std::uint32_t(eight ^ row % 8);
#pragma unroll
    for (int e = 0; e < kEights; e += 2) {
      const std::uint32_t at = own + (std::uint32_t(e) ^ swizzle) * 16;
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&v)[4] = sums[m][kPiece / kOfPhase][kPiece % kOfPhase * kEights + e + i / 2];
          words[i] = Pair<Value>::narrow(end<kRelu>(v[i % 2 * 2]), end<kRelu>(v[i % 2 * 2 + 1]));
        }
        store_matrices(at + std::uint32_t(m * 64 * kLastPieceRow), words);
      }
    }
  }

  // Lanes of odd rows write the second half of a row first: those of two rows would meet in a bank.
  template <bool kRelu, int kPiece>
  static __device__ __forceinline__ void write_vectors(const Sums& sums, unsigned char* to) {
    const std::int32_t row = std::int32_t(threadIdx.x) / 32 % 4 * 16 + lane() / 4, odd = row % 2;
    unsigned char* const own = to + row * kLastPieceRow;
    const std::int32_t first = ((odd * 4 + lane() % 4) ^ row % 8) * 16;
#pragma unroll
    for (int half = 0; half < 2 * Tile::kM; ++half) {
      float4 v[2];
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const int eight = kPiece % kOfPhase * kEights + run * 2;
        const float(&low)[4] = sums[half / 2][kPiece / kOfPhase][eight];
        const float(&high)[4] = sums[half / 2][kPiece / kOfPhase][eight + 1];
        v[run] = {end<kRelu>(low[half % 2 * 2]), end<kRelu>(low[half % 2 * 2 + 1]), end<kRelu>(high[half % 2 * 2]),
                  end<kRelu>(high[half % 2 * 2 + 1])};
      }
      unsigned char* const at = own + (half / 2 * 64 + half % 2 * 8) * kLastPieceRow;
      *reinterpret_cast<float4*>(at + first) = odd ? v[1] : v[0];
      *reinterpret_cast<float4*>(at + (first ^ 64)) = odd ? v[0] : v[1];
    }
  }

  template <int kPiece>
  __device__ __forceinline__ void begin_store(const unsigned char* from) const {
    const std::int32_t column = place.column_tile * Tile::kColumns + kPiece % kOfPhase * kColumns;
    const LastPhase phase = job.phases[place.set * Tile::kPhases + kPiece / kOfPhase];
    std::int32_t d = phase.at[0], h = phase.at[1], w = phase.at[2], channel = column;
    if (column >= job.columns || d == INT16_MAX) return;
    if (job.flat) {
      std::uint32_t tap = std::uint32_t(column);
      channel = std::int32_t(take(job.channels, tap));
      w = std::int32_t(take(job.kernel_w, tap)), h = std::int32_t(take(job.kernel_h, tap)), d = std::int32_t(tap);
    }
    const std::int32_t in_row = w * std::int32_t(job.y_axis[2]) + place.group * std::int32_t(job.channels.value) + channel;
    const std::int32_t plane = place.n * job.axis[0].size + place.first[0] * job.axis[0].result_step + d;
    store_box(result, shared_address(from), {in_row, place.first[2], h, place.first[1], plane});
  }

  template <bool kRelu, int kPiece, int kEnd>
  __device__ __forceinline__ void write(const Sums& sums) const {
    if constexpr (kPiece < kEnd) {
      unsigned char* const to = staging + kPiece % kAtOnce * kBytes;
      if constexpr (kHalves) {
        write_matrices<kRelu, kPiece>(sums, to);
      } else {
        write_vectors<kRelu, kPiece>(sums, to);
      }
      write<kRelu, kPiece + 1, kEnd>(sums);
    }
  }
  template <int kPiece, int kEnd>
  __device__ __forceinline__ void begin_stores() const {
    if constexpr (kPiece < kEnd) {
      begin_store<kPiece>(staging + kPiece % kAtOnce * kBytes);
      begin_stores<kPiece + 1, kEnd>();
    }
  }
  template <bool kRelu, int kPiece>
  __device__ __forceinline__ void store_pieces(const Sums& sums) const {
    if constexpr (kPiece < kPieces) {
      if (is_first()) await_box_reads<0>();
      meet_warpgroup();  // pieces before have been read
      write<kRelu, kPiece, kPiece + kAtOnce>(sums);
      publish_to_products();
      meet_warpgroup();  // and these are written
      if (is_first()) begin_stores<kPiece, kPiece + kAtOnce>();
      store_pieces<kRelu, kPiece + kAtOnce>(sums);
    }
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    this->finish(sums);
    job.activation == Activation::kRelu ? store_pieces<true, 0>(sums) : store_pieces<false, 0>(sums);
  }
};
#endif

}  // namespace upfold::cuda
