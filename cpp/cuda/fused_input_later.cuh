// How whole tiles of the fused gradient of the input store their results: at once, or later. Then a warpgroup puts them into
// shared memory, and stores some at a time between the products of its next tile. That pays for floats of many channels and
// several tiles of each block (H100: 4 to 17 %), as no product runs while results are stored at once. Of 16-bit values, and where
// a turn of products is short, what it takes of shared memory and of each turn is more.
#pragma once

#include "fused_input_store.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct InputAtOnce {
  static constexpr int kBytes = sizeof(Value) == 4 && Tile::kStages ? kInputStagingBytes : 0;
  const InputJob& job;
  unsigned char* memory;
  Value* x;

  __device__ __forceinline__ void store_some() const {}
  __device__ __forceinline__ void store_rest() const {}
  __device__ __forceinline__ void put(const InputPlace& place, const float (&sums)[Tile::kM][Tile::kN8][4]) const {
    if constexpr (kBytes > 0) {
      store_staged<Tile>(job, place, x, reinterpret_cast<float*>(memory), sums);
    } else {
#pragma unroll
      for (int i = 0; i < Tile::kM; ++i) store_input<Value, Tile>(job, place, x, i, 0, sums[i]);
    }
  }
};

// Where the results of a thread go: elements of x to its first piece, and channels from there on (0: it has no pixel).
struct alignas(16) InputSlot {
  std::int64_t offset;
  std::int32_t left;
};

// A piece is some neighbouring pixels of a channel (job.together). A thread has always the same pixels, and every so manieth
// channel of them. Shared memory holds [warpgroup][channel][pixel], of a part of a tile's channels at a time.
template <typename Value, typename Tile>
struct InputLater {
  using Sums = float[Tile::kM][Tile::kN8][4];
  static constexpr int kSize = int(sizeof(Value)), kParts = Tile::kLaterParts;
  static constexpr int kPixels = 64 * Tile::kM, kColumns8 = Tile::kN8 / kParts, kChannels = 8 * kColumns8;
  static constexpr int kPitch = kPixels * kSize + kInputSkew, kSlots = 2 * kChannels * kPitch;
  static constexpr int kBytes = kSlots + Tile::kThreads * int(sizeof(InputSlot));
  static_assert(kSize == 4 && kBytes == Tile::kLaterBytes, "as planned");

  const InputJob& job;
  unsigned char* memory;
  Value* x;
  std::int32_t done = kChannels;  // pieces of this thread that are stored: as many as there are at most

  __device__ __forceinline__ unsigned char* own() const { return memory + threadIdx.x / 128 * (kChannels * kPitch); }
  __device__ __forceinline__ InputSlot& slot() const { return reinterpret_cast<InputSlot*>(memory + kSlots)[threadIdx.x]; }

  template <int kTogether>
  struct Pieces {
    using Piece = Word<kTogether * kSize>;
    // Of a channel; channels that the threads of a warpgroup have at a time; of a thread.
    static constexpr int kAcross = kPixels / kTogether, kChannelsAtOnce = 128 / kAcross, kCount = kChannels / kChannelsAtOnce;
    static_assert(kCount <= kChannels, "`done` begins where nothing is left");
  };

  template <int kTogether>
  __device__ __forceinline__ void store_pieces(std::int32_t count) {
    using Own = Pieces<kTogether>;
    const std::int32_t end = done + count < Own::kCount ? done + count : Own::kCount;
    if (done >= end) return;
    const std::int32_t thread = std::int32_t(threadIdx.x) % 128;
    const InputSlot to = slot();
    const unsigned char* const from = own() + thread / Own::kAcross * kPitch + thread % Own::kAcross * (kTogether * kSize);
#pragma unroll 1
    for (; done < end; ++done) {
      const std::int32_t channel = done * Own::kChannelsAtOnce;
      const auto piece = *reinterpret_cast<const typename Own::Piece*>(from + channel * kPitch);
      if (channel < to.left) *reinterpret_cast<typename Own::Piece*>(x + (to.offset + channel * job.x_c)) = piece;
    }
  }
  // So many pieces of the thread, or what is left.
  __device__ __forceinline__ void store(std::int32_t count) {
    if (job.together == 16 / kSize) {
      store_pieces<16 / kSize>(count);
    } else if (job.together == 2) {
      store_pieces<2>(count);
    } else {
      store_pieces<1>(count);
    }
  }

  __device__ __forceinline__ void store_some() { store(job.later); }
  __device__ __forceinline__ void store_rest() { store(kChannels); }

  // The results of a tile, of which the last part is stored later.
  __device__ __forceinline__ void put(const InputPlace& place, const Sums& sums) {
    const std::int32_t warpgroup = std::int32_t(threadIdx.x) / 128, thread = std::int32_t(threadIdx.x) % 128, lane = thread % 32;
    const std::int32_t across = kPixels / job.together, first = thread / across;
    const std::int64_t offset = input_offset(job, place, warpgroup * kPixels + thread % across * job.together);
    const std::int32_t channel = place.channel_tile * Tile::kChannels + first;
    unsigned char* const to = own() + lane % 4 * 2 * kPitch + (thread / 32 * 16 + lane / 4 * 2) * kSize;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store_rest();
      meet<128>(warpgroup + 1);  // nobody reads the results before
#pragma unroll
      for (int i = 0; i < Tile::kM; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns8; ++j) {
          const float(&v)[4] = sums[i][part * kColumns8 + j];
          unsigned char* const at = to + i * 64 * kSize + j * 8 * kPitch;
          store_neighbours(reinterpret_cast<Value*>(at), v[0], v[2]);
          store_neighbours(reinterpret_cast<Value*>(at + kPitch), v[1], v[3]);
        }
      }
      const std::int32_t own_channel = channel + part * kChannels;
      slot() = {(std::int64_t(place.group) * job.ic + own_channel) * job.x_c + offset, offset < 0 ? 0 : job.ic - own_channel};
      done = 0;
      meet<128>(warpgroup + 1);  // the results are there
    }
  }
};
#endif

}  // namespace upfold::cuda
