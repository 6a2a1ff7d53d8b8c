// What the kernels of the fused gradient of the weight are made of: how its reduction is cut into steps, and the way of a step
// from global to shared memory.
//
// gw[ic, oc, tap] = sum over samples and input pixels i of x[n, ic, i] * y[n, oc, i * stride - pad + tap * dilation], where y is
// the gradient of the output. As a product its rows are output channels times taps, its columns are input channels, and its
// reduction runs over pixels, which are contiguous in both operands: they are copied as they lie. A plane is 16 output channels
// and one tap of depth and height: 16 rows of y for each row of pixels. A unit, the rows of one warp, is kTaps neighbouring taps
// along w of one plane. All taps of a plane read the same columns of y, by shifts.
#pragma once

#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kStepVectors = 12;    // of 16 bytes of pixels of one channel, at most in one step
constexpr int kPlaneChannels = 16;  // of the output
constexpr int kVectorLog = 4;       // of the bytes of a vector
constexpr int kWeightMostStages = 4;

// Taps of a unit, input channels of a block; warpgroups of it that multiply, one unit a warp, and, behind them, that copy, a
// quarter of them for each stage; blocks of a multiprocessor.
template <int kTaps_, int kChannels_, int kWarpgroups_, int kCopyGroups_, int kBlocks_>
struct FusedWeightTile {
  static constexpr int kTaps = kTaps_, kChannels = kChannels_, kBlocks = kBlocks_;
  static constexpr int kColumns8 = kChannels / 8, kWarps = 4 * kWarpgroups_;
  static constexpr int kCopiers = 128 * kCopyGroups_ / kWeightMostStages;  // of a stage
  static constexpr int kThreads = 32 * kWarps + 128 * kCopyGroups_;
  // Without warpgroups all threads copy and multiply.
#if UPFOLD_WARPGROUPS || !defined(__CUDA_ARCH__)
  static constexpr int kCopiersHere = kCopiers, kThreadsHere = kThreads;
#else
  static constexpr int kCopiersHere = 32 * kWarps, kThreadsHere = 32 * kWarps;
#endif
  // Of a thread that multiplies and of one that copies: what a launch may give to all of them, shared out anew.
  static constexpr int kRegisters = 65536 / kBlocks / kThreads / 8 * 8;
  static constexpr int kCopyRegisters = kRegisters < 100 ? 48 : 56;
  static constexpr int kMultiplyRegisters = kRegisters + (kRegisters - kCopyRegisters) * kCopyGroups_ * 4 / kWarps;
  static constexpr int kVectorPitch = 16 * kChannels + 16;  // bytes; neighbouring vectors of a row lie in different banks
};

// How a unit's words are read. Two taps of a pixel are one aligned word, of 16-bit values with those of the next pixel behind
// them: kPairs (stride 2). Of 16-bit values, taps next to one another: kUnitStride, kShiftedPairs (stride 2) and kWords (any
// stride). Any taps: kAny. Four 16-bit taps of a pixel are two aligned words: kFours (strides that are multiples of four); two
// units of a plane have eight of its output channels each, and four taps, the second two in place of the other channels.
enum FusedWeightReads { kAny, kPairs, kUnitStride, kShiftedPairs, kWords, kFours };

struct FusedWeightJob {
  // A step is `rows` rows of x, `row_vectors` vectors of each, from pixel chunk * row_vectors on; products take two vectors.
  Divisor chunks, in_h, in_d, rows, row_vectors;
  std::uint32_t total_rows, steps, length;  // of all samples; of all parts; of one
  std::int32_t step_vectors, products;
  // Blocks: tiles of input channels, of units, groups, parts. Output channels of a group are cut into planes.
  Divisor channel_tiles, unit_tiles, groups, tap_units, row_taps, kernel_h;
  Divisor together;  // parts that a cluster of blocks adds up before it stores their sums
  std::int32_t units, block_planes, in_channels, out_channels;  // of a group
  std::int32_t in_w, out_d, out_h, out_w;
  std::int32_t stride[3], pad[3], dilation[3];
  std::int64_t x_n, x_c, x_d, x_h, y_n, y_c, y_d, y_h;
  // Copies are pieces of 1 << grain bytes: of one channel of x in a step, of one channel and row of y. 1 << lanes neighbouring
  // threads copy the pieces of one channel.
  std::int32_t x_grain, y_grain, x_pieces, y_pieces, x_lanes, y_lanes;
  // Of a stage in shared memory, in bytes: y behind x; in a row of y from the first column that is copied to that of pixel 0 and
  // tap 0; between rows; of all.
  std::int32_t y_at, shift, pitch, stage_bytes, stages;
  std::int32_t sum_pitch;  // elements between the rows of the sums
};

constexpr int kWeightMostPlanes = 8;
// Where a row of pixels begins, in bytes; output channels of its plane, or of x any number above 0. 0: outside.
struct alignas(16) FusedWeightBegin {
  std::int64_t at;
  std::int32_t channels;
};
struct FusedWeightShared {
  // Of a stage, those of y, by plane; those of x; one outside.
  FusedWeightBegin begins[kWeightMostStages][(kWeightMostPlanes + 1) * kStepVectors + 1];
  std::int32_t first_pixel[kWeightMostStages];
  std::int32_t windows[kStepVectors];  // bytes from a plane's first row to a vector's first column
};
struct FusedWeightBarriers {
  std::uint64_t full[kWeightMostStages], empty[kWeightMostStages];
};

// One copy of kBytes, or as many zeros.
template <int kBytes, typename Value>
UPFOLD_DEVICE void copy_piece(std::uint32_t to, const Value* from, bool live) {
  if constexpr (kBytes > 2) {
    copy_async<kBytes>(to, from, live);
  } else {
    std::uint16_t bits = 0;
    if (live) bits = *reinterpret_cast<const std::uint16_t*>(from);
    *static_cast<std::uint16_t*>(__cvta_shared_to_generic(to)) = bits;
  }
}

// Where a block works.
struct FusedWeightPlace {
  std::uint32_t part, group;
  std::int32_t first_channel, first_unit, first_plane;
  std::uint32_t begin, end;  // steps

  __device__ FusedWeightPlace(const FusedWeightJob& job, int tile_channels, int tile_units) {
    std::uint32_t rest = blockIdx.x;
    const std::uint32_t of_cluster = take(job.together, rest);
    first_channel = std::int32_t(take(job.channel_tiles, rest)) * tile_channels;
    first_unit = std::int32_t(take(job.unit_tiles, rest)) * tile_units;
    group = take(job.groups, rest);
    part = rest * job.together.value + of_cluster;
    first_plane = std::int32_t(divide(job.tap_units, std::uint32_t(first_unit)));
    begin = part * job.length;
    end = begin + job.length < job.steps ? begin + job.length : job.steps;
  }
};

// The copies of a block; x and y at its group, and x at its first input channel. Stages are counted in bytes from `base`.
template <typename Value, typename Tile>
struct FusedWeightCopies {
  static constexpr int kVector = 16 / sizeof(Value);
  const FusedWeightJob& job;
  const FusedWeightPlace& place;
  FusedWeightShared& shared;
  const Value *x, *y;
  std::uint32_t base, thread;  // of those that copy

  // What does not change from step to step.
  __device__ __forceinline__ void place_windows() const {
    const std::uint32_t i = thread;
    if (i >= kStepVectors) return;
    const std::uint32_t vector = i < std::uint32_t(job.step_vectors) ? i : 0, row = divide(job.row_vectors, vector);
    const std::uint32_t in_row = vector - row * job.row_vectors.value;
    shared.windows[i] = std::int32_t(row) * kPlaneChannels * job.pitch + job.shift + std::int32_t(in_row) * 16 * job.stride[2];
  }

  // Where the rows of a step lie, for its stage.
  __device__ __forceinline__ void place_rows(std::uint32_t step, std::int32_t slot) const {
    std::uint32_t first_row = step;
    const std::uint32_t chunk = take(job.chunks, first_row), rows = job.rows.value;
    if (thread == 0) shared.first_pixel[slot] = std::int32_t(chunk * job.row_vectors.value) * kVector;
    for (std::uint32_t i = thread; i <= std::uint32_t(job.block_planes + 1) * rows; i += Tile::kCopiersHere) {
      shared.begins[slot][i] = begin_of(step, first_row * rows, i);
    }
  }
  __device__ __forceinline__ FusedWeightBegin begin_of(std::uint32_t step, std::uint32_t row, std::uint32_t plane) const {
    row += take(job.rows, plane);
    FusedWeightBegin begin{0, 0};
    if (step < place.end && row < job.total_rows && plane <= std::uint32_t(job.block_planes)) {
      const std::int32_t ih = std::int32_t(take(job.in_h, row)), id = std::int32_t(take(job.in_d, row));
      if (plane == std::uint32_t(job.block_planes)) {
        begin.at = (row * job.x_n + id * job.x_d + ih * job.x_h) * std::int64_t(sizeof(Value)), begin.channels = 1;
      } else {
        std::uint32_t sixteen = std::uint32_t(place.first_plane) + plane;
        std::uint32_t kd = take(job.row_taps, sixteen);
        const std::int32_t kh = std::int32_t(take(job.kernel_h, kd));
        const std::int32_t od = id * job.stride[0] - job.pad[0] + std::int32_t(kd) * job.dilation[0];
        const std::int32_t oh = ih * job.stride[1] - job.pad[1] + kh * job.dilation[1];
        if (std::uint32_t(od) < std::uint32_t(job.out_d) && std::uint32_t(oh) < std::uint32_t(job.out_h)) {
          begin.at = row * job.y_n + od * job.y_d + oh * job.y_h + std::int64_t(sixteen * kPlaneChannels) * job.y_c;
          begin.at *= std::int64_t(sizeof(Value));
          begin.channels = job.out_channels - std::int32_t(sixteen) * kPlaneChannels;
        }
      }
    }
    return begin;
  }

  // Calls `use` with (piece number, first channel, channels of all threads) for each piece of x that a thread has.
  template <typename Use>
  __device__ __forceinline__ void each_piece(Use use) const {
    const std::int32_t lanes = 1 << job.x_lanes, channels = Tile::kCopiersHere >> job.x_lanes;
    for (std::int32_t piece = std::int32_t(thread) & (lanes - 1); piece < job.x_pieces; piece += lanes) {
      use(std::uint32_t(piece), std::int32_t(thread) >> job.x_lanes, channels);
    }
  }
  // Bytes from a stage to a piece of channel 0.
  __device__ __forceinline__ std::uint32_t piece_at(std::uint32_t piece) const {
    const std::uint32_t log = std::uint32_t(kVectorLog - job.x_grain), vector = piece >> log;
    return vector * Tile::kVectorPitch + ((piece - (vector << log)) << job.x_grain);
  }
  static __device__ __forceinline__ const Value* moved(const Value* from, std::int64_t bytes) {
    return reinterpret_cast<const Value*>(reinterpret_cast<const unsigned char*>(from) + bytes);
  }

  template <int kBytes>
  __device__ __forceinline__ void copy_x(std::int32_t slot, std::uint32_t stage) const {
    each_piece([&](std::uint32_t piece, std::int32_t channel, std::int32_t step_channels) {
      const std::uint32_t vector = piece >> (kVectorLog - job.x_grain), row = divide(job.row_vectors, vector);
      const FusedWeightBegin begin = shared.begins[slot][job.block_planes * job.rows.value + row];
      const std::int32_t pixel =
          shared.first_pixel[slot] + std::int32_t((piece << job.x_grain) / sizeof(Value) - row * job.row_vectors.value * kVector);
      const std::int32_t live = begin.channels > 0 && pixel < job.in_w ? job.in_channels - place.first_channel : 0;
      const Value* from = moved(x + (channel * job.x_c + pixel), begin.at);
      const std::int64_t pitch = step_channels * job.x_c;
      const std::uint32_t to_pitch = std::uint32_t(step_channels) * 16;
      std::uint32_t to = base + stage + piece_at(piece) + std::uint32_t(channel) * 16;
#pragma unroll 4
      for (; channel < Tile::kChannels; channel += step_channels, from += pitch, to += to_pitch) {
        copy_piece<kBytes>(to, from, channel < live);
      }
    });
  }

  // A row is a row of pixels of all channels of a plane.
  template <int kBytes>
  __device__ __forceinline__ void copy_y(std::int32_t slot, std::uint32_t stage) const {
    constexpr std::int32_t kElements = kBytes / std::int32_t(sizeof(Value));
    const std::int32_t lanes = 1 << job.y_lanes, own = std::int32_t(thread) >> job.y_lanes, own_channel = own % kPlaneChannels;
    const std::int32_t together = Tile::kCopiersHere >> job.y_lanes, rows = job.block_planes * std::int32_t(job.rows.value);
    const std::int32_t step_rows = together > kPlaneChannels ? together / kPlaneChannels : 1;
    const std::int32_t first = shared.first_pixel[slot] * job.stride[2] - job.pad[2] - job.shift / std::int32_t(sizeof(Value));
    const std::int64_t from_pitch = together * job.y_c;
    const std::uint32_t to_pitch = std::uint32_t(together * job.pitch);
    for (std::int32_t piece = std::int32_t(thread) & (lanes - 1); piece < job.y_pieces; piece += lanes) {
      const std::int32_t column = first + piece * kElements;
      const bool inside = std::uint32_t(column) < std::uint32_t(job.out_w);
      const Value* const first_from = y + (own_channel * job.y_c + column);
      const std::uint32_t first_to = base + stage + std::uint32_t(job.y_at + own_channel * job.pitch + piece * kBytes);
#pragma unroll 1
      for (std::int32_t row = own / kPlaneChannels; row < rows; row += step_rows) {
        const FusedWeightBegin begin = shared.begins[slot][row];
        const std::int32_t channels = inside ? begin.channels : 0;
        const Value* from = moved(first_from, begin.at);
        std::uint32_t to = first_to + std::uint32_t(row * kPlaneChannels * job.pitch);
#pragma unroll 4
        for (std::int32_t channel = own_channel; channel < kPlaneChannels;
             channel += together, from += from_pitch, to += to_pitch) {
          copy_piece<kBytes>(to, from, channel < channels);
        }
      }
    }
  }

  __device__ __forceinline__ void copy(std::int32_t slot, std::uint32_t stage) const {
    constexpr int kLeast = int(sizeof(Value));
    if (job.x_grain == 4) {
      copy_x<16>(slot, stage);
    } else if (job.x_grain == 3) {
      copy_x<8>(slot, stage);
    } else if (kLeast == 4 || job.x_grain == 2) {
      copy_x<4>(slot, stage);
    } else {
      copy_x<kLeast>(slot, stage);
    }
    if (job.y_grain == 4) {
      copy_y<16>(slot, stage);
    } else if (job.y_grain == 3) {
      copy_y<8>(slot, stage);
    } else if (kLeast == 4 || job.y_grain == 2) {
      copy_y<4>(slot, stage);
    } else {
      copy_y<kLeast>(slot, stage);
    }
  }

  // A step has arrived: a thread rounds the pieces of x that it copied itself.
  __device__ __forceinline__ void round_own(unsigned char* stage) const {
    if constexpr (sizeof(Value) == 4) {
      each_piece([&](std::uint32_t piece, std::int32_t channel, std::int32_t step_channels) {
        unsigned char* at = stage + piece_at(piece) + channel * 16;
#pragma unroll 4
        for (; channel < Tile::kChannels; channel += step_channels, at += step_channels * 16) {
          if (job.x_grain == kVectorLog) {
            const float4 v = *reinterpret_cast<const float4*>(at);
            *reinterpret_cast<uint4*>(at) = {to_tf32(v.x), to_tf32(v.y), to_tf32(v.z), to_tf32(v.w)};
          } else {
            for (std::int32_t word = 0; word < 1 << job.x_grain; word += 4) {
              *reinterpret_cast<std::uint32_t*>(at + word) = to_tf32(*reinterpret_cast<const float*>(at + word));
            }
          }
        }
      });
    }
  }
};

}  // namespace upfold::cuda
