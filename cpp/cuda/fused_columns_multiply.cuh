// The products of the fused method whose columns stay in shared memory: of a stage with the weights of its chunk, for each way in
// which x lies; and the way of their sums to the columns.
#pragma once

#include "fused_columns.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// A warpgroup multiplies two blocks of 64 pixels, in such an order that a warp's rows are its own line, or 16 pixels of each
// block:
//   float32, [channel][pixel]: a comes from registers. A lane reads four pixels 4 g ... of channels 2 t and 2 t + 1 (g its number
//     by 4, t what is left), a vector each, in eight different vectors of a row; these are rows g and g + 8 of both blocks.
//   16 bits, [channel][pixel]: a line is a block, turned.
//   [pixel][channel]: two lines are a block.
template <typename Tile>
struct ColumnsProducts {
  using Value = typename Tile::Value;
  using Sums = float[2][Tile::kN8][4];
  static constexpr bool kRegisters = Tile::kSize == 4 && !Tile::kLast, kTurned = Tile::kSize == 2 && !Tile::kLast;

  static constexpr int kAtATime = Tile::kN8 > 8 ? 1 : 2;  // of a chunk's products, whose operands are in registers

  static __device__ __forceinline__ std::uint64_t weights(std::uint32_t at) {
    return matrix_descriptor(at / 16, std::uint32_t(Tile::kN), 8);
  }

  static __device__ __forceinline__ void add(Sums& sums, std::uint32_t stage, std::uint32_t weight) {
    if constexpr (kRegisters) {
      add_registers(sums, stage, weights(weight));
    } else {
      add_shared(sums, stage, weights(weight));
    }
  }

  static __device__ __forceinline__ void add_registers(Sums& sums, std::uint32_t stage, std::uint64_t weight) {
    const std::uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const std::uint32_t line = stage + threadIdx.x / 32 * Tile::kLineBytes;
    const std::uint32_t even = line + 2 * t * Tile::kRow + (g ^ (2 * t)) * 16;
    const std::uint32_t odd = line + (2 * t + 1) * Tile::kRow + (g ^ (2 * t + 1)) * 16;
#pragma unroll
    for (int first = 0; first < Tile::kProducts; first += kAtATime) {
      std::uint32_t a[kAtATime][2][4];
#pragma unroll
      for (int k = 0; k < kAtATime; ++k) {
        const uint4 v = load_shared(even + (first + k) * 8 * Tile::kRow), u = load_shared(odd + (first + k) * 8 * Tile::kRow);
        a[k][0][0] = v.x, a[k][0][1] = v.y, a[k][0][2] = u.x, a[k][0][3] = u.y;
        a[k][1][0] = v.z, a[k][1][1] = v.w, a[k][1][2] = u.z, a[k][1][3] = u.w;
      }
      warpgroup_begin();
#pragma unroll
      for (int i = 0; i < 2 * kAtATime; ++i)
        WarpgroupRows<float, Tile::kN8, 0>::add(sums[i % 2], a[i / 2][i % 2], weight + (first + i / 2) * 2 * Tile::kN);
      warpgroup_commit();
      warpgroup_wait<0>();
#pragma unroll
      for (int i = 0; i < kAtATime * 8; ++i) keep(a[i / 8][i / 4 % 2][i % 4]);
    }
  }

  static __device__ __forceinline__ void add_shared(Sums& sums, std::uint32_t stage, std::uint64_t weight) {
    using Operand = std::conditional_t<kTurned, Turned<Value>, Value>;
    constexpr int kBlockBytes = 64 * Tile::kRow, kNext = kTurned ? 16 * Tile::kRow / 16 : 2;
    const std::uint32_t warpgroup = std::uint32_t(__shfl_sync(~0u, std::int32_t(threadIdx.x / 128), 0));
    std::uint64_t a[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const std::uint32_t at = (stage + (warpgroup * 2 + m) * kBlockBytes) / 16;
      a[m] = kTurned ? turned_descriptor(at) : long_row_descriptor(at, 64);
    }
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < Tile::kProducts; ++k) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
        WarpgroupCore<Operand, Tile::kN8, 1, 0>::add(sums[m], a[m] + k * kNext, weight + k * 2 * Tile::kN);
    }
    warpgroup_commit();
    warpgroup_wait<0>();
  }

  // The number in the ring of a line's first pixel.
  static __device__ __forceinline__ std::int32_t pixel_of(const ColumnsJob& job, std::uint32_t line) {
    std::uint32_t row = line * std::uint32_t(job.line_rows), part = 0;
    if (job.row_lines > 0) row = line, part = take(job.lines_of_row, row);
    return std::int32_t(take(job.ring, row)) * job.pitch + std::int32_t(part) * Tile::kLine;
  }

  // The sums of a step's lines, of which the first is number `first`, to the columns.
  static __device__ __forceinline__ void write(const ColumnsJob& job, const ColumnsWalk& walk, std::int32_t first, float* columns,
                                               const Sums& sums) {
    const std::int32_t lane = std::int32_t(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const std::int32_t warp = __shfl_sync(~0u, std::int32_t(threadIdx.x / 32), 0);
    float* const own = columns + 2 * t * kColumnPitch;
    if constexpr (kRegisters) {
      if (first + warp >= walk.lines) return;
      float* const at = own + pixel_of(job, std::uint32_t(first + warp)) / kColumnPixels * job.pixels_floats + 4 * g;
#pragma unroll
      for (int j = 0; j < Tile::kN8; ++j) {
        if (8 * j >= job.columns) break;
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<float4*>(at + (8 * j + e) * kColumnPitch) = {sums[0][j][e], sums[0][j][e + 2], sums[1][j][e],
                                                                         sums[1][j][e + 2]};
      }
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const std::int32_t in_step = (warp / 4 * 2 + m) * 64 + warp % 4 * 16, line = first + in_step / Tile::kLine;
        if (line >= walk.lines) continue;
        const std::int32_t pixel = pixel_of(job, std::uint32_t(line)) + in_step % Tile::kLine;
        float* const at = own + pixel / kColumnPixels * job.pixels_floats + pixel % kColumnPixels + g;
#pragma unroll
        for (int j = 0; j < Tile::kN8; ++j) {
          if (8 * j >= job.columns) break;
#pragma unroll
          for (int i = 0; i < 4; ++i) at[(8 * j + i % 2) * kColumnPitch + i / 2 * 8] = sums[m][j][i];
        }
      }
    }
  }
};
#endif

}  // namespace upfold::cuda
