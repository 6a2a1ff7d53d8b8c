// The gradients of the fused method for small layers whose kernel and stride are equal, two along the width, in one launch: what
// a lane wants of both operands of a product lies together in memory, so that it reads it from there, and nothing is packed or
// laid out first.
//
// A warp has 16 or 32 channels of x (rows of its products) and 32 columns: of the weight's gradient 16 rows of the kernel (an
// output channel and a tap along depth and height) with both taps of the width; of the input's 32 positions. The reduction,
// positions or rows of the kernel, is in steps of 32 bytes of the operand of channels, 8 of them a lane's, and is shared out to
// kSplit warps, whose sums are added up in order through shared memory. A step's terms may be in any order that both operands
// have. Where blocks fill the device several times, tiles that share what they read through shared memory are sooner.
//
// Weight: a lane's 8 bytes are neighbouring positions of a channel of x, and its 16 of a row of y these with both taps. Input:
// its 8 bytes are rows of the kernel with both taps of a channel, and its 16 a row of y at neighbouring positions, both taps
// each.
#pragma once

#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kSmallAhead = 3;  // steps that are on their way

struct SmallJob {
  Divisor chunks_w, in_h, in_d;  // chunks of 8 bytes of x along a row
  Divisor kernel_h, kernel_d;
  Divisor column_tiles;
  std::int32_t channels, rows, chunks;  // of x; of the kernel, with output channels; of all samples
  std::int32_t steps, steps_of_split;
  std::int32_t x_n, x_c, x_d, x_h, y_n, y_c, y_d, y_h, w_n, w_c, w_d, w_h, w_w;
  std::int32_t step_d, step_h;  // of y, from input to input
  bool paired;                  // both taps of a row of the kernel are stored together
};

// Of a warp kRows times 16 channels; kAcross warps have other channels, kAlong other columns, kSplit other steps.
template <int kRows_, int kAcross_, int kAlong_, int kSplit_>
struct SmallTile {
  static constexpr int kRows = kRows_, kAcross = kAcross_, kAlong = kAlong_, kSplit = kSplit_;
  static constexpr int kOfWarp = 16 * kRows, kChannels = kOfWarp * kAcross, kColumns = 32 * kAlong, kPitch = kColumns + 1;
  static constexpr int kThreads = 32 * kAcross * kAlong * kSplit, kBlocks = 512 / kThreads;
};

template <typename Value, int kRows, bool kInput>
struct SmallCore {
  static constexpr int kEach = 8 / int(sizeof(Value));  // positions of a chunk
  using Sums = float[kRows][4][4];                      // rows of 16 channels; columns of 8
  struct Terms {
    uint2 a[2 * kRows];  // of channels g, g + 8, ...
    uint4 b[2];
  };

  // Number of column `column` of product `eight` among a warp's.
  static __device__ __forceinline__ std::int32_t column_of(int eight, std::int32_t column) {
    if (!kInput) return (eight / 2 * 8 + column) * 2 + eight % 2;
    return sizeof(Value) == 2 ? column * 4 + eight : eight / 2 * 16 + column * 2 + eight % 2;
  }

  static __device__ __forceinline__ void multiply(Sums& sums, const Terms& terms) {
    std::uint32_t b[4][2];
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      if constexpr (sizeof(Value) == 2 && kInput) {
        b[eight][0] = (&terms.b[0].x)[eight], b[eight][1] = (&terms.b[1].x)[eight];
      } else if constexpr (sizeof(Value) == 2) {
        const uint4& v = terms.b[eight / 2];
        const std::uint32_t tap = eight % 2 == 0 ? 0x5410 : 0x7632;
        b[eight][0] = __byte_perm(v.x, v.y, tap), b[eight][1] = __byte_perm(v.z, v.w, tap);
      } else {
        const std::uint32_t* const v = &terms.b[eight / 2].x;
        constexpr int kStep = kInput ? 1 : 2, kNext = kInput ? 2 : 1;
        b[eight][0] = near_tf32(v[eight % 2 * kNext]), b[eight][1] = near_tf32(v[eight % 2 * kNext + kStep]);
      }
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      std::uint32_t a[4] = {terms.a[2 * m].x, terms.a[2 * m + 1].x, terms.a[2 * m].y, terms.a[2 * m + 1].y};
      if constexpr (sizeof(Value) == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = near_tf32(a[i]);
      }
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) TensorCore<Value>::add(sums[m][eight], a, b[eight][0], b[eight][1]);
    }
  }
};

// Where a chunk of positions lies in x and in y, from their first channels on.
struct SmallChunk {
  std::int32_t x, y;
};
template <int kEach>
UPFOLD_DEVICE SmallChunk small_chunk(const SmallJob& job, std::uint32_t number) {
  const std::int32_t w = std::int32_t(take(job.chunks_w, number)) * kEach, h = std::int32_t(take(job.in_h, number)),
                     d = std::int32_t(take(job.in_d, number)), n = std::int32_t(number);
  return {n * job.x_n + d * job.x_d + h * job.x_h + w, n * job.y_n + d * job.step_d + h * job.step_h + 2 * w};
}
// And a row of the kernel in y, at no position, and in w.
struct SmallRow {
  std::int32_t y, w;
};
UPFOLD_DEVICE SmallRow small_row(const SmallJob& job, std::uint32_t number) {
  const std::int32_t h = std::int32_t(take(job.kernel_h, number)), d = std::int32_t(take(job.kernel_d, number)),
                     c = std::int32_t(number);
  return {c * job.y_c + d * job.y_d + h * job.y_h, c * job.w_c + d * job.w_d + h * job.w_h};
}

// What a lane reads: `first` is the operand of channels, x for the weight's gradient and w for the input's. Channels and columns
// behind the last one are the last one's, and not stored.
template <typename Value, int kRows, bool kInput>
struct SmallReader {
  using Core = SmallCore<Value, kRows, kInput>;
  static constexpr int kEach = Core::kEach;
  const SmallJob& job;
  const Value *first, *y;
  std::int32_t channel[2 * kRows], column[2];  // offsets of a lane's channels and columns

  // From a warp's first channel and its first column, a row of the kernel or a chunk, on.
  __device__ __forceinline__ SmallReader(const SmallJob& job_, const Value* first_, const Value* y_, std::int32_t first_channel,
                                         std::int32_t first_column)
      : job(job_), first(first_), y(y_) {
    const std::int32_t own = std::int32_t(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i)
      channel[i] = min(first_channel + own + 8 * i, job.channels - 1) * (kInput ? job.w_n : job.x_c);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (kInput) {
        const std::int32_t chunk = first_column + own + (sizeof(Value) == 4 ? 8 * j : 0);
        column[j] = small_chunk<kEach>(job, std::uint32_t(min(chunk, job.chunks - 1))).y;
      } else {
        column[j] = small_row(job, std::uint32_t(min(first_column + own + 8 * j, job.rows - 1))).y;
      }
    }
  }

  __device__ __forceinline__ void read(typename Core::Terms& terms, std::int32_t step) const {
    const std::int32_t chunk = step * 4 + std::int32_t(threadIdx.x) % 4;
    std::int32_t from, of[2];
    bool exists;
    if constexpr (kInput) {
      constexpr int kOfLane = kEach / 2;  // rows of the kernel
      exists = chunk * kOfLane < job.rows;
      from = chunk * kEach, of[0] = of[1] = small_row(job, std::uint32_t(chunk * kOfLane)).y;
      if constexpr (kOfLane == 2) of[1] = small_row(job, std::uint32_t(chunk * kOfLane + 1)).y;
    } else {
      exists = chunk < job.chunks;
      const SmallChunk at = small_chunk<kEach>(job, std::uint32_t(chunk));
      from = at.x, of[0] = of[1] = at.y;
    }
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i)
      terms.a[i] = exists ? __ldg(reinterpret_cast<const uint2*>(first + channel[i] + from)) : uint2{0, 0};
#pragma unroll
    for (int j = 0; j < 2; ++j)
      terms.b[j] = exists ? __ldg(reinterpret_cast<const uint4*>(y + column[j] + of[j])) : uint4{0, 0, 0, 0};
  }
};

template <typename Value>
struct alignas(2 * sizeof(Value)) SmallPair {
  Value v[2];
};

// `result` is w for the weight's gradient, and x for the input's.
template <typename Value, typename Tile, bool kInput>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_small_kernel(const __grid_constant__ SmallJob job, const Value* __restrict__ first, const Value* __restrict__ y,
                       Value* __restrict__ result) {
#if __CUDA_ARCH__ >= 800
  using Core = SmallCore<Value, Tile::kRows, kInput>;
  constexpr int kEach = Core::kEach, kOfColumns = kInput ? kEach : 2;  // columns of a chunk, or of a row of the kernel
  __shared__ float parts[Tile::kSplit][Tile::kChannels * Tile::kPitch];
  std::uint32_t rest = blockIdx.x;
  const std::int32_t column_tile = std::int32_t(take(job.column_tiles, rest)) * (Tile::kColumns / kOfColumns);
  const std::int32_t channel_tile = std::int32_t(rest) * Tile::kChannels;
  const std::int32_t warp = std::int32_t(threadIdx.x) / 32, lane = std::int32_t(threadIdx.x) % 32;
  const std::int32_t along = warp % Tile::kAlong, across = warp / Tile::kAlong % Tile::kAcross,
                     split = warp / Tile::kAlong / Tile::kAcross;
  const SmallReader<Value, Tile::kRows, kInput> reader(job, first, y, channel_tile + across * Tile::kOfWarp,
                                                       column_tile + along * (32 / kOfColumns));
  take_turn();
  typename Core::Sums sums = {};
  typename Core::Terms terms[kSmallAhead + 1];
  std::int32_t step = split * job.steps_of_split;
  const std::int32_t last = min(step + job.steps_of_split, job.steps);
#pragma unroll
  for (int i = 0; i < kSmallAhead; ++i)
    if (step + i < last) reader.read(terms[i], step + i);
  while (step < last) {
#pragma unroll
    for (int i = 0; i <= kSmallAhead; ++i) {
      if (step + i >= last) break;
      if (step + i + kSmallAhead < last) reader.read(terms[(i + kSmallAhead) % (kSmallAhead + 1)], step + i + kSmallAhead);
      Core::multiply(sums, terms[i]);
    }
    step += kSmallAhead + 1;
  }
  float* const own = parts[split] + across * Tile::kOfWarp * Tile::kPitch + along * 32;
#pragma unroll
  for (int i = 0; i < Tile::kRows * 4 * 4; ++i) {
    const int m = i / 16, eight = i / 4 % 4, entry = i % 4;
    own[(m * 16 + entry / 2 * 8 + lane / 4) * Tile::kPitch + Core::column_of(eight, lane % 4 * 2 + entry % 2)] =
        sums[m][eight][entry];
  }
  __syncthreads();  // the sums of all warps are there
  constexpr int kPairs = Tile::kColumns / 2;
#pragma unroll 1
  for (std::int32_t i = std::int32_t(threadIdx.x); i < Tile::kChannels * kPairs; i += Tile::kThreads) {
    const std::int32_t channel = channel_tile + i / kPairs, pair = i % kPairs;
    float pairs[2] = {};
#pragma unroll
    for (int s = 0; s < Tile::kSplit; ++s)
#pragma unroll
      for (int e = 0; e < 2; ++e) pairs[e] += parts[s][i / kPairs * Tile::kPitch + pair * 2 + e];
    const std::int32_t column = column_tile + pair * 2 / kOfColumns;  // a row of the kernel, or a chunk
    if (channel >= job.channels || column >= (kInput ? job.chunks : job.rows)) continue;
    const SmallPair<Value> values{{Narrow<Value>::from(pairs[0]), Narrow<Value>::from(pairs[1])}};
    if constexpr (kInput) {
      Value* const to = result + channel * job.x_c + small_chunk<kEach>(job, std::uint32_t(column)).x + pair * 2 % kEach;
      *reinterpret_cast<SmallPair<Value>*>(to) = values;
    } else {
      Value* const to = result + channel * job.w_n + small_row(job, std::uint32_t(column)).w;
      if (job.paired) {
        *reinterpret_cast<SmallPair<Value>*>(to) = values;
      } else {
        to[0] = values.v[0], to[job.w_w] = values.v[1];
      }
    }
  }
#endif
}

// A tile's index, and its kRows, kAcross, kAlong and kSplit.
#define UPFOLD_SMALL_TILES(DO, Value, kInput) \
  DO(0, Value, kInput, 2, 2, 2, 2)            \
  DO(1, Value, kInput, 2, 2, 1, 4)            \
  DO(2, Value, kInput, 1, 1, 1, 16)

}  // namespace upfold::cuda
