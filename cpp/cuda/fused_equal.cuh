// The fused method where kernel and stride are equal and nothing is padded: one matrix product with a shuffled store.
//
// An input pixel (a *unit*, counted through all samples) yields the outputs of all taps. Rows of the product are the pairs
// (output channel, tap) in torch's own order of the weight, the tap fastest; columns are units. Both operands are read as they
// lie in memory, [input channel][row] and [input channel][unit], into panels of shared memory, a few chunks of the reduction
// ahead and across tiles. A block stays on its rows where their whole weight fits shared memory.
#pragma once

#include "fused_equal_store.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kEqualStages = 4;

template <typename Value>
constexpr int kEqualChunk = 64 / int(sizeof(Value));  // input channels of one panel
// Bytes from one input channel to the next in a panel: eight rows of 16 bytes, or four of float32, then lie in different banks.
template <typename Value, int kColumns>
constexpr int kPanelPitch = kColumns * int(sizeof(Value)) + (sizeof(Value) == 2 ? 16 : 32);

// A thread's share of the copies into one panel of kRows rows.
template <int kRows, int kThreads>
struct PanelCopy {
  std::int32_t across, row, column;  // copies of a row; this thread's first row, and its place among them

  template <typename Value, int kColumns, int kGrain>
  __device__ __forceinline__ void run_by(unsigned char* panel, const Value* from, std::int64_t pitch, std::int32_t rows,
                                         bool live) const {
    constexpr int kAcross = kColumns * int(sizeof(Value)) / kGrain, kStep = kThreads / kAcross;
    unsigned char* const to = panel + row * kPanelPitch<Value, kColumns> + column * kGrain;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep) {
      const bool exists = live && row + i < rows;
      unsigned char* const at = to + i * kPanelPitch<Value, kColumns>;
      if constexpr (kGrain >= 4) {
        copy_async<kGrain>(shared_address(at), from + i * pitch, exists);
      } else {
        *reinterpret_cast<Value*>(at) = exists ? from[i * pitch] : Narrow<Value>::from(0.0f);
      }
    }
  }

  // `from` is this thread's first element; `rows` rows of the panel exist, the others become 0.
  template <typename Value, int kColumns>
  __device__ __forceinline__ void run(std::int32_t grain, unsigned char* panel, const Value* from, std::int64_t pitch,
                                      std::int32_t rows, bool live) const {
    if (grain == 16) return run_by<Value, kColumns, 16>(panel, from, pitch, rows, live);
    if (grain == 4) return run_by<Value, kColumns, 4>(panel, from, pitch, rows, live);
    if constexpr (sizeof(Value) == 2) {
      if (grain == 8) return run_by<Value, kColumns, 8>(panel, from, pitch, rows, live);
      run_by<Value, kColumns, 2>(panel, from, pitch, rows, live);
    }
  }
};

template <int kRows, int kThreads>
UPFOLD_DEVICE PanelCopy<kRows, kThreads> panel_copy(std::int32_t row_bytes, std::int32_t grain) {
  const std::int32_t across = row_bytes / grain, tid = std::int32_t(threadIdx.x);
  return {across, tid / across, tid % across};
}

template <typename Value, int kPitchRows, int kPitchUnits, int kRun, int kM16, int kN8>
UPFOLD_DEVICE void multiply_panels(const unsigned char* weight, const unsigned char* input, std::int32_t lane,
                                   float (&sums)[kM16][kN8][4]) {
  constexpr int kStep = 32 / int(sizeof(Value));  // input channels of one product
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    std::uint32_t a[kM16][4], b[kN8][2];
    const unsigned char* const a_at = weight + s * kStep * kPitchRows;
    const unsigned char* const b_at = input + s * kStep * kPitchUnits;
    if constexpr (sizeof(Value) == 2) {
      // Matrices of 8 channels by 8 columns: of b, channels 0 and 8 of one unit tile and then of the next; of a, rows 0 and 8 of
      // channel 0 and then of channel 8.
      const std::uint32_t b_row = shared_address(b_at + lane % 16 * kPitchUnits + lane / 16 * 16);
      const std::uint32_t a_row = shared_address(a_at + (lane / 16 * 8 + lane % 8) * kPitchRows + lane / 8 % 2 * 16);
#pragma unroll
      for (int j = 0; j < kN8; j += 2) {
        std::uint32_t words[4];
        load_turned_matrices(words, b_row + std::uint32_t(j * 16));
        b[j][0] = words[0], b[j][1] = words[1], b[j + 1][0] = words[2], b[j + 1][1] = words[3];
      }
#pragma unroll
      for (int m = 0; m < kM16; ++m) load_turned_matrices(a[m], a_row + std::uint32_t(m * 32));
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned char* const b_row = b_at + (lane % 4 + h * 4) * kPitchUnits + lane / 4 * 8;
        const unsigned char* const a_row = a_at + (lane % 4 + h * 4) * kPitchRows;
#pragma unroll
        for (int j = 0; j < kN8; j += 2) {
          const float2 v = *reinterpret_cast<const float2*>(b_row + j * 32);
          b[j][h] = to_tf32(v.x), b[j + 1][h] = to_tf32(v.y);
        }
        if constexpr (kRun == 4) {
#pragma unroll
          for (int m = 0; m < kM16; m += 2) {
            const float4 v = *reinterpret_cast<const float4*>(a_row + m * 64 + lane / 4 * 16);
            a[m][2 * h] = to_tf32(v.x), a[m][2 * h + 1] = to_tf32(v.y);
            a[m + 1][2 * h] = to_tf32(v.z), a[m + 1][2 * h + 1] = to_tf32(v.w);
          }
        } else {
#pragma unroll
          for (int m = 0; m < kM16; ++m) {
            const float2 v = *reinterpret_cast<const float2*>(a_row + m * 64 + lane / 4 * 8);
            a[m][2 * h] = to_tf32(v.x), a[m][2 * h + 1] = to_tf32(v.y);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
#pragma unroll
      for (int j = 0; j < kN8; ++j) TensorCore<Value>::add(sums[m][j], a[m], b[j][0], b[j][1]);
    }
  }
}

template <typename Value, typename Tile, int kRun>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_equal_kernel(const EqualJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                       const Value* __restrict__ bias, Value* __restrict__ y) {
  if constexpr (!kMultiplied<Value>) return;
  constexpr int kChunk = kEqualChunk<Value>, kRows = Tile::kRows, kUnits = Tile::kUnits, kThreads = Tile::kThreads;
  constexpr int kPitchRows = kPanelPitch<Value, kRows>, kPitchUnits = kPanelPitch<Value, kUnits>;
  extern __shared__ uint4 memory[];
  unsigned char* const inputs = reinterpret_cast<unsigned char*>(memory);
  unsigned char* const weights = inputs + kEqualStages * kChunk * kPitchUnits;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  const std::int32_t warp_row = warp % Tile::kWarpsM * Tile::kM16 * 16, warp_unit = warp / Tile::kWarpsM * Tile::kN8 * 8;
  const auto x_copy = panel_copy<kChunk, kThreads>(kUnits * int(sizeof(Value)), job.x_grain);
  const auto w_copy = panel_copy<kChunk, kThreads>(kRows * int(sizeof(Value)), job.w_grain);

  // The next chunk to be copied: its tile, and where this thread's elements of it lie.
  std::int32_t copy_tile = std::int32_t(blockIdx.x), copy_chunk = 0, copy_stage = 0;
  const Value *x_from = x, *w_from = w;
  bool x_live = false, w_live = false;
  const auto enter_tile = [&] {
    if (copy_tile >= job.tiles) return;
    std::uint32_t column_tile = std::uint32_t(copy_tile);
    std::uint32_t group = take(job.all_row_tiles, column_tile);
    const std::int32_t row =
        std::int32_t(take(job.row_tiles, group)) * kRows + w_copy.column * (job.w_grain / int(sizeof(Value)));
    const std::int32_t unit = std::int32_t(column_tile) * kUnits + x_copy.column * (job.x_grain / int(sizeof(Value)));
    x_live = unit < job.units, w_live = row < job.rows;
    std::uint32_t n = x_live ? std::uint32_t(unit) : 0;
    const std::uint32_t pixel = take(job.pixels, n);
    const std::int64_t channel = std::int64_t(group) * job.ic;
    x_from = x + n * job.x_n + (channel + x_copy.row) * job.x_c + pixel;
    w_from = w + (channel + w_copy.row) * job.w_ic + (w_live ? row : 0);
  };
  const auto copy_next = [&] {
    if (copy_tile < job.tiles) {
      const std::int32_t left = job.ic - copy_chunk * kChunk;
      x_copy.template run<Value, kUnits>(job.x_grain, inputs + copy_stage * kChunk * kPitchUnits, x_from, job.x_c, left, x_live);
      if (!job.resident || copy_tile == std::int32_t(blockIdx.x)) {
        w_copy.template run<Value, kRows>(job.w_grain, weights + (job.resident ? copy_chunk : copy_stage) * kChunk * kPitchRows,
                                          w_from, job.w_ic, left, w_live);
      }
      x_from += kChunk * job.x_c, w_from += kChunk * job.w_ic;
      if (++copy_chunk == job.chunks) copy_chunk = 0, copy_tile += std::int32_t(gridDim.x), enter_tile();
    }
    copy_async_commit();
    copy_stage = copy_stage + 1 == kEqualStages ? 0 : copy_stage + 1;
  };
  enter_tile();
#pragma unroll 1
  for (int i = 0; i < kEqualStages - 1; ++i) copy_next();

  EqualRows<Value, Tile, kRun> rows;
  std::uint32_t rows_of = ~0u;
  std::int32_t stage = 0;
  for (std::int32_t tile = std::int32_t(blockIdx.x); tile < job.tiles; tile += std::int32_t(gridDim.x)) {
    std::uint32_t column_tile = std::uint32_t(tile);
    const std::uint32_t all_row_tile = take(job.all_row_tiles, column_tile);
    if (all_row_tile != rows_of) rows.find(job, rows_of = all_row_tile, warp_row, lane, bias, y);
    float sums[Tile::kM16][Tile::kN8][4] = {};
    for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk) {
      copy_async_wait<kEqualStages - 2>();
      __syncthreads();  // this chunk is complete, and everyone has left the one before
      copy_next();
      multiply_panels<Value, kPitchRows, kPitchUnits, kRun>(
          weights + (job.resident ? chunk : stage) * kChunk * kPitchRows + warp_row * int(sizeof(Value)),
          inputs + stage * kChunk * kPitchUnits + warp_unit * int(sizeof(Value)), lane, sums);
      stage = stage + 1 == kEqualStages ? 0 : stage + 1;
    }
    store_sums<Value, Tile, kRun>(job, rows, std::int32_t(column_tile) * kUnits + warp_unit, lane, sums);
  }
}

}  // namespace upfold::cuda
