// The end of tiles of the fused method by boxes of channels whose columns are a row of the weight as it lies: channels of the
// result and, innermost, their taps, which are the phases of kernels as long as their stride. Two neighbouring columns of a lane
// are neighbours in y. Where kernels are two pixels wide and have two or four rows of taps, the copy engine stores runs of a row:
//   staging  [warpgroup][run of pixels][row of taps][channel][results of the run, 64 or 128 bytes]   swizzled
// in other tiles lanes do, from registers.
#pragma once

#include "fused_last_boxes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct LastWeightRowsStore : LastStaged<Value, Tile> {
  using Base = LastStaged<Value, Tile>;
  using Base::job, Base::place, Base::lane, Base::result, Base::staging;
  using typename Base::Sums;
  using Added = typename Base::Added;
  static constexpr int kRows = 2 * Tile::kM;  // pixels of a lane
  static_assert(sizeof(Value) == 2 && Tile::kPhases == 1, "a word of two columns");

  Value* y;

  // A lane's first column of an eight of the tile, and what it is.
  static __device__ __forceinline__ std::int32_t column_of(const LastPlace& place, int eight) {
    return place.column_tile * Tile::kColumns + eight * 8 + lane() % 4 * 2;
  }
  struct Tap {
    std::int32_t d, h, w, channel;
  };
  static __device__ __forceinline__ Tap tap_of(const LastJob& job, std::int32_t column) {
    std::uint32_t rest = std::uint32_t(column);
    const std::int32_t w = std::int32_t(take(job.kernel_w, rest)), h = std::int32_t(take(job.kernel_h, rest));
    const std::int32_t d = std::int32_t(take(job.run_results, rest));
    return {d, h, w, std::int32_t(rest)};
  }

  static __device__ __forceinline__ void read_bias(const LastJob& job, const LastPlace& place, const Value* bias, Added& added) {
    if (bias == nullptr) return;
    const std::int32_t channels = std::int32_t(job.channels.value), bits = __ffs(job.columns / channels) - 1;
    const Value* const own = bias + place.group * channels;
#pragma unroll
    for (int e = 0; e < Tile::kSub8; ++e) {
      std::int32_t channel = column_of(place, e) >> bits;  // of boxes taps are four or eight
      if constexpr (!Tile::kRowBoxes) channel = tap_of(job, column_of(place, e)).channel;
      const float v = widen(own[min(channel, channels - 1)]);
      added[e] = Pair<Value>::narrow(v, v);
    }
  }

  // Of boxes: two or four rows of taps of some channels.
  static constexpr int kStaged = Tile::kRows * Tile::kColumns * int(sizeof(Value));
  __device__ __forceinline__ std::int32_t count_rows() const { return std::int32_t(job.kernel_h.value * job.run_results.value); }

  // Of runs of kRow bytes, four of each pixel, and kTapRows rows of taps: the eights of a lane are channels apart that no bit of
  // its own channel is in, so that they change what is swizzled by what is known here.
  template <int kRow, int kTapRows>
  __device__ __forceinline__ void write(const Sums& sums) const {
    constexpr std::int32_t kChannels = Tile::kColumns / 2 / kTapRows, kRun = kRow / 4;
    const std::int32_t t = lane() % 4, own = t / kTapRows;  // its channel of an eight
    const std::int32_t of_lane = t % kTapRows * kChannels + own, swizzle = kRow == 128 ? own : own / 2;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int32_t pixel = std::int32_t(threadIdx.x) / 32 % 4 * 16 + i % 2 * 8 + lane() / 4, byte = pixel % kRun * 4;
      const std::int32_t run = i / 2 * (64 / kRun) + pixel / kRun;
      const std::int32_t at = (run * kTapRows * kChannels + of_lane) * kRow + (byte / 16 ^ swizzle) * 16 + byte % 16;
#pragma unroll
      for (int e = 0; e < Tile::kSub8; ++e) {
        constexpr int kPairs = 4;  // of columns of an eight
        const std::int32_t channel = e * kPairs / kTapRows, moved = kRow == 128 ? channel % 8 : channel / 2 % 4;
        *reinterpret_cast<std::uint32_t*>(staging + (at ^ moved * 16) + channel * kRow) =
            Pair<Value>::narrow(sums[i / 2][0][e][i % 2 * 2], sums[i / 2][0][e][i % 2 * 2 + 1]);
      }
    }
  }
  // Lanes have a box each, of warps in turn.
  __device__ __forceinline__ void begin_stores() const {
    const std::int32_t rows = count_rows(), channels = Tile::kColumns / 2 / rows, box = job.run * 4 * channels;
    const std::int32_t channel = place.column_tile * channels, boxes = Tile::kM * job.kept / job.run * rows;
    if (channel >= std::int32_t(job.channels.value)) return;
#pragma unroll 1
    for (std::int32_t i = lane() * 4 + std::int32_t(threadIdx.x) / 32 % 4; i < boxes; i += 128) {
      std::uint32_t pixel = std::uint32_t(place.first[2] + i / rows * job.run), d = std::uint32_t(i % rows);
      const std::int32_t h = std::int32_t(take(job.kernel_h, d)), w = std::int32_t(take(job.plane_row, pixel)) * 2;
      const std::int32_t row = std::int32_t(take(job.plane_rows, pixel));
      store_box(result, shared_address(staging) + std::uint32_t(i * box),
                {w, row * job.axis[1].result_step + h, std::int32_t(pixel) * job.axis[0].result_step + std::int32_t(d),
                 place.group * std::int32_t(job.channels.value) + channel, place.n});
    }
  }
  __device__ __forceinline__ void store_boxes(const Sums& sums) const {
    await_box_reads<0>();
    Base::meet_warpgroup();  // what was stored before has been read
    if (count_rows() == 2) {
      job.run == 32 ? write<128, 2>(sums) : write<64, 2>(sums);
    } else {
      job.run == 32 ? write<128, 4>(sums) : write<64, 4>(sums);
    }
    publish_to_products();
    Base::meet_warpgroup();
    begin_stores();
  }

  // kWords: two neighbouring results are a word of y.
  template <bool kWords>
  __device__ __forceinline__ void store(const Sums& sums) const {
    const std::int32_t pixel = std::int32_t(threadIdx.x) / 32 % 4 * 16 + lane() / 4;
    const std::int64_t group = std::int64_t(place.group) * job.channels.value * job.y_c;
    std::uint64_t rows[kRows];
    bool has_row[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      std::uint32_t rest = std::uint32_t(place.first[2] + i / 2 * 64 + i % 2 * 8 + pixel);
      const std::int32_t w = std::int32_t(take(job.plane_row, rest)) * job.axis[2].result_step;
      const std::int32_t h = std::int32_t(take(job.plane_rows, rest)) * job.axis[1].result_step;
      const std::int32_t d = std::int32_t(rest) * job.axis[0].result_step;
      has_row[i] = d < job.axis[0].size;
      const std::int64_t at = place.n * job.y_n + group + d * job.y_axis[0] + h * job.y_axis[1] + w;
      rows[i] = reinterpret_cast<std::uint64_t>(y) + std::uint64_t(at * std::int64_t(sizeof(Value)));
      hide(rows[i]);  // else the compiler makes an address of each sum
    }
#pragma unroll
    for (int e = 0; e < Tile::kSub8; ++e) {
      const std::int32_t column = column_of(place, e);
      const Tap tap = tap_of(job, column);
      const std::int64_t at = tap.channel * job.y_c + tap.d * job.y_axis[0] + tap.h * job.y_axis[1] + tap.w;
      const std::uint64_t bytes = std::uint64_t(at * std::int64_t(sizeof(Value)));
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float(&v)[4] = sums[i / 2][0][e];
        const std::uint32_t two = Pair<Value>::narrow(v[i % 2 * 2], v[i % 2 * 2 + 1]);
        const bool exists = has_row[i] && column < job.columns;
        if constexpr (kWords) {
          store_global_if(exists, rows[i] + bytes, two);
        } else {
          store_global_if(exists, rows[i] + bytes, std::uint16_t(two));
          store_global_if(exists, rows[i] + bytes + sizeof(Value), std::uint16_t(two >> 16));
        }
      }
    }
  }

  __device__ __forceinline__ void run(Sums& sums) const {
    this->finish_all(sums);
    if constexpr (Tile::kRowBoxes) {
      store_boxes(sums);
    } else {
      job.paired ? store<true>(sums) : store<false>(sums);
    }
  }
};
#endif

}  // namespace upfold::cuda
