// What brings the operands of a block of the fused gradient of the input into its shared memory; its layout is in
// fused_input.cuh.
#pragma once

#include "fused_input_later.cuh"
#include "fused_input_read.cuh"
#include "mma.cuh"
#include "ring.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
struct InputShared {
  std::uint64_t raw_full[kMostInputBuffers / 4], raw_empty[kMostInputBuffers / 4];
  std::uint64_t weight_full[kMostInputBuffers], weight_empty[kMostInputBuffers];
};

template <typename Value, typename Tile>
struct InputCopies {
  using Read = InputRead<Value, Tile::kReads>;
  static constexpr int kSize = Read::kSize, kEntries = 4 / kSize;  // kEntries: of a step
  using Results = std::conditional_t<Tile::kLater, InputLater<Value, Tile>, InputAtOnce<Value, Tile>>;

  const InputJob& job;
  InputShared& shared;
  uint4* memory;
  std::uint32_t tiles;
  SharedAddress of_barriers, of_memory;

  __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) const { return of_barriers.of(&barrier); }
  __device__ __forceinline__ uint4* weight(std::uint32_t buffer) const {
    return memory + Results::kBytes / 16 + buffer * std::uint32_t(job.stage_steps * Tile::kStepWords);
  }
  __device__ __forceinline__ unsigned char* raw(std::uint32_t buffer) const {
    return reinterpret_cast<unsigned char*>(weight(std::uint32_t(job.weight_buffers))) + buffer * std::uint32_t(job.raw_bytes);
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.raw_buffers; ++i) {
        barrier_make(address(shared.raw_full[i]), Tile::kLoaders);
        barrier_make(address(shared.raw_empty[i]), Tile::kThreads / 32);
      }
      for (int i = 0; i < job.weight_buffers; ++i) {
        barrier_make(address(shared.weight_full[i]), 1);
        barrier_make(address(shared.weight_empty[i]), Tile::kThreads / 32);
      }
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  // Boxes of the weight as it lies: of rows of the next group, or behind the last one, no sums are stored.
  __device__ __forceinline__ void copy_boxes_of_weights() const {
    Ring stage(job.weight_buffers);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const InputPlace place = input_place(job, tile);
      const std::int32_t row = place.group * job.ic + place.channel_tile * Tile::kChannels;
      constexpr std::int32_t kColumns = 128 / kSize;
      std::int32_t column = place.first_chunk * (job.steps / kInputBoxSteps) * kColumns;
      for (std::int32_t i = place.chunks * (job.steps / kInputBoxSteps); i > 0; --i, stage.next(), column += kColumns) {
        const std::uint32_t full = address(shared.weight_full[stage.at]);
        barrier_wait(address(shared.weight_empty[stage.at]), stage.parity ^ 1);
        barrier_arrive_expecting(full, kInputBoxSteps * Tile::kStepWords * 16);
        copy_box(of_memory.of(weight(stage.at)), job.weight, {column, row, 0, 0, 0}, full);
      }
      if (job.resident) return;
    }
  }
  // One thread copies the weights of all tiles; where they all fit, those of the first tile.
  __device__ __forceinline__ void copy_weights(const uint4* packed) const {
    if constexpr (Tile::kOfWords) return copy_boxes_of_weights();
    take_turn();  // who stores results waits for the weights
    Ring stage(job.weight_buffers);
    const std::uint32_t bytes = std::uint32_t(job.stage_steps * Tile::kStepWords * 16);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const InputPlace place = input_place(job, tile);
      const std::int64_t first = (std::int64_t(place.group) * job.channel_tiles.value + place.channel_tile) * job.chunks;
      const uint4* from = packed + (first + place.first_chunk) * job.steps * Tile::kStepWords;
      for (std::int32_t i = place.chunks * (job.steps / job.stage_steps); i > 0; --i, stage.next()) {
        const std::uint32_t full = address(shared.weight_full[stage.at]);
        barrier_wait(address(shared.weight_empty[stage.at]), stage.parity ^ 1);  // a new barrier counts as passed
        barrier_arrive_expecting(full, bytes);
        copy_bulk(of_memory.of(weight(stage.at)), from, bytes, full);
        from += job.stage_steps * Tile::kStepWords;
      }
      if (job.resident) return;
    }
  }

  // Where a run of `grain` bytes of the patch comes from (-1: zeros), without the channel, and where in a channel it goes.
  struct Column {
    std::int64_t from;
    std::uint32_t to;
  };
  __device__ __forceinline__ Column column_of(const InputPlace& place, std::int32_t number) const {
    const std::int32_t elements = job.grain / kSize;
    std::uint32_t rest = std::uint32_t(number);
    const std::int32_t w = std::int32_t(take(job.row_columns, rest)) * elements;
    Column column;
    column.to = (rest * std::uint32_t(job.span) + std::uint32_t(w)) * kSize;
    std::int32_t at[3];
    at[2] = place.first[2] * job.axis[2].stride + job.axis[2].low - job.skew + w;
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      at[i] = place.first[i] * job.axis[i].stride + job.axis[i].low + std::int32_t(take(job.axis[i].extent, rest));
    }
    const std::int32_t n = place.n + std::int32_t(rest);
    bool inside = number < job.columns && n < job.batch;
    std::int64_t from = n * job.y_n;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      inside = inside && std::uint32_t(at[i]) < std::uint32_t(job.axis[i].out);
      from += at[i] * job.y_axis[i];
    }
    column.from = inside ? from : -1;
    return column;
  }

  // Three warps copy y, a chunk into each buffer: a thread keeps kOwn columns, and takes every `together`-th channel of them.
  template <int kGrain, int kOwn>
  __device__ __forceinline__ void copy_patches(const Value* y) const {
    const std::int32_t loader = std::int32_t(threadIdx.x) - Tile::kThreads;
    const std::int32_t lanes = job.columns < Tile::kLoaders ? job.columns : Tile::kLoaders, together = Tile::kLoaders / lanes;
    const std::int32_t first = loader / lanes, lane = loader % lanes;
    const std::int32_t channels = first < together ? job.chunk_channels : 0;
    const std::int64_t from_step = together * job.y_c;
    const std::uint32_t to_step = std::uint32_t(together * job.pitch);
    Ring buffer(job.raw_buffers);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const InputPlace place = input_place(job, tile);
      std::int32_t left = job.oc - place.first_chunk * job.chunk_channels;
      const Value* from[kOwn];
      std::uint32_t to[kOwn], live = 0;  // a bit of each column
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const Column own = column_of(place, lane + j * Tile::kLoaders);
        if (own.from >= 0) live |= 1u << j;
        from[j] = y + (std::int64_t(place.group) * job.oc + job.oc - left + first) * job.y_c + (own.from < 0 ? 0 : own.from);
        to[j] = own.to + std::uint32_t(first * job.pitch);
      }
      for (std::int32_t i = 0; i < place.chunks; ++i, buffer.next(), left -= job.chunk_channels) {
        barrier_wait(address(shared.raw_empty[buffer.at]), buffer.parity ^ 1);
        const std::uint32_t patch = of_memory.of(raw(buffer.at));
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          if (kOwn > 1 && lane + j * Tile::kLoaders >= job.columns) continue;
          const Value* at = from[j];
          std::uint32_t own_to = patch + to[j];
          if (left >= job.chunk_channels) {
#pragma unroll 4
            for (std::int32_t c = first; c < channels; c += together, at += from_step, own_to += to_step)
              copy_async<kGrain>(own_to, at, live >> j & 1);
          } else {
            for (std::int32_t c = first; c < channels; c += together, at += from_step, own_to += to_step)
              copy_async<kGrain>(own_to, c < left ? at : y, c < left && (live >> j & 1));
          }
          from[j] += job.chunk_channels * job.y_c;
        }
        barrier_arrive_copied(address(shared.raw_full[buffer.at]));
      }
    }
    copy_async_wait_all();
  }
  template <int kGrain>
  __device__ __forceinline__ void copy_patches_of(const Value* y) const {
    if (job.columns <= Tile::kLoaders) return copy_patches<kGrain, 1>(y);
    if (job.columns <= 2 * Tile::kLoaders) return copy_patches<kGrain, 2>(y);
    if (job.columns <= 3 * Tile::kLoaders) return copy_patches<kGrain, 3>(y);
    copy_patches<kGrain, kMostInputColumns / Tile::kLoaders>(y);
  }

  // A run of y: where it begins in its chunk of the tensor, its bytes (0: none), and where it goes in the chunk's buffer.
  struct Run {
    std::int64_t from;
    std::uint32_t to, bytes;
  };
  // Runs are numbered by channels, taps of the depth, and planes that a tile has rows of.
  __device__ __forceinline__ Run run_of(const InputPlace& place, std::int32_t number) const {
    const std::int32_t height = std::int32_t(job.rows_h.value), row_bytes = job.axis[1].stride * job.span * kSize;
    const std::int32_t first = place.first[1], tile_rows = std::int32_t(job.axis[1].tile.value), left = job.axis[1].in - first;
    const std::int32_t rows = left < tile_rows ? left : tile_rows;
    const std::int32_t above = input_row(job, std::uint32_t(first)).h;  // rows of the first plane in front of the tile
    const std::int32_t planes = (above + rows - 1) / height + 1, runs = planes * std::int32_t(job.axis[0].extent.value);
    if (number >= job.chunk_channels * runs) return {0, 0, 0};
    const std::int32_t channel = number / runs, tap = number % runs / planes, plane = number % runs % planes;
    const std::int32_t begin = plane == 0 ? 0 : plane * height - above, next = (plane + 1) * height - above;
    const InputRow row = input_row(job, std::uint32_t(first + begin));
    const std::int64_t from = channel * job.y_c + row.n * job.y_n + (row.d * job.axis[0].stride + tap) * job.y_axis[0] +
                              row.h * job.axis[1].stride * job.y_axis[1];
    return {from, std::uint32_t(channel * job.pitch + (tap * tile_rows + begin) * row_bytes),
            std::uint32_t(((next < rows ? next : rows) - begin) * row_bytes)};
  }

  // Where rows of pixels are numbered over samples: the rows of one plane that a tile reaches in a channel, at one tap of the
  // depth, are one run, which the copy engine brings. Rows behind the last one keep what they were: no sum of theirs is stored.
  __device__ __forceinline__ void copy_runs(const Value* y) const {
    constexpr std::int32_t kWarps = Tile::kLoaders / 32;
    // Lanes of a warp issue copies one by one: the warps share those that there are.
    const std::int32_t loader = std::int32_t(threadIdx.x) - Tile::kThreads, own = loader % 32 * kWarps + loader / 32;
    Ring buffer(job.raw_buffers);
    for (std::uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const InputPlace place = input_place(job, tile);
      const Run first = run_of(place, own);
      const Value* chunk = y + (std::int64_t(place.group) * job.oc + place.first_chunk * job.chunk_channels) * job.y_c;
      for (std::int32_t i = 0; i < place.chunks; ++i, buffer.next(), chunk += job.chunk_channels * job.y_c) {
        barrier_wait(address(shared.raw_empty[buffer.at]), buffer.parity ^ 1);
        const std::uint32_t full = address(shared.raw_full[buffer.at]), patch = of_memory.of(raw(buffer.at));
        std::uint32_t bytes = 0, number = std::uint32_t(own);
        for (Run run = first; run.bytes > 0; number += Tile::kLoaders, run = run_of(place, std::int32_t(number))) {
          copy_bulk(patch + run.to, chunk + run.from, run.bytes, full);
          bytes += run.bytes;
        }
        barrier_arrive_expecting(full, bytes);
      }
    }
  }
  __device__ __forceinline__ void copy_all_patches(const Value* y) const {
    if (job.numbered) return copy_runs(y);
    if (job.grain == 16) return copy_patches_of<16>(y);
    if (job.grain == 8) return copy_patches_of<8>(y);
    copy_patches_of<4>(y);
  }
};
#endif

}  // namespace upfold::cuda
