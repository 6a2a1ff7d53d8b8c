// The results of a box of the fused method's phase tiles: staged in the order of y, then stored in runs.
#pragma once

#include "fused_phases_load.cuh"

namespace upfold::cuda {

template <typename Value_, bool kExact, typename Tile_>
struct PhaseResults : PhaseInputs<Value_, kExact, Tile_> {
  using Base = PhaseInputs<Value_, kExact, Tile_>;
  using typename Base::Box;
  using typename Base::Tile;
  using typename Base::Value;
  using Sums = float[Tile_::kM16][Tile_::kN8][4];
  using Base::Base, Base::exists, Base::job, Base::kSize, Base::kSkews, Base::kVector, Base::runs, Base::staged, Base::tables;

  // The sums of a box as results, in the order of y: as many elements behind a multiple of 16 bytes as in y.
  __device__ __forceinline__ void put(const Sums& sums, std::int32_t warp_m, std::int32_t warp_n) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    const PhaseTables<Tile>& own = tables();
    unsigned char* const bytes = reinterpret_cast<unsigned char*>(staged());
    PhaseColumn columns[Tile::kN8][2];
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) columns[j][e] = own.columns[(warp_n * Tile::kN8 + j) * 8 + lane % 4 * 2 + e];
    }
#pragma unroll
    for (int m = 0; m < Tile::kM16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PhaseRow row = own.rows[(warp_m * Tile::kM16 + m) * 16 + half * 8 + lane / 4];
        if (row.to < 0) continue;
        const std::uint32_t row_skew = row.skew * std::uint32_t(kSize);
        const auto at = [&](const PhaseColumn& column) {
          const std::uint32_t skew = (row_skew + std::uint32_t(column.skew)) & (kSkews * std::uint32_t(kSize));
          return reinterpret_cast<Value*>(bytes + row.to + column.to + skew);
        };
        if (job.activation == Activation::kNone) {
#pragma unroll
          for (int j = 0; j < Tile::kN8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (columns[j][e].to >= 0) *at(columns[j][e]) = Narrow<Value>::from(sums[m][j][half * 2 + e] + row.bias);
            }
          }
          continue;
        }
#pragma unroll
        for (int j = 0; j < Tile::kN8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float v = finish(job.activation, job.slope, sums[m][j][half * 2 + e] + row.bias);
            if (columns[j][e].to >= 0) *at(columns[j][e]) = Narrow<Value>::from(v);
          }
        }
      }
    }
  }

  // Where a line of units of a box begins in y beside its channel and phases, and its outputs of the axes of depth and height.
  struct BoxLine {
    std::int64_t y;
    std::int32_t d, h;
  };
  __device__ __forceinline__ BoxLine box_line(const Box& box, std::uint32_t number) const {
    const std::int32_t h = (std::int32_t(take(job.box_h, number)) + box.unit[1]) * job.axis[1].stride;
    const std::int32_t d = (std::int32_t(take(job.box_d, number)) + box.unit[0]) * job.axis[0].stride;
    const std::int32_t n = box.n + std::int32_t(number);
    const std::int64_t w = std::int64_t(box.unit[2] * job.axis[2].stride - job.axis[2].pad) * job.y_axis[2];
    return {n * job.y_n + d * job.y_axis[0] + h * job.y_axis[1] + w, d, n < job.batch ? h : kNoLine};
  }

  // What depends on the box: its runs, and where its units are staged. `address` is that of y, in elements.
  __device__ __forceinline__ void make_runs(const Box& box, std::uint32_t address) const {
    PhaseTables<Tile>& own = tables();
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.run_count; i += Tile::kThreads) {
      std::uint32_t number = std::uint32_t(i);
      const BoxLine in_box = box_line(box, take(job.box_lines, number));
      const PhaseLine line = own.lines[number];
      const bool inside = std::uint32_t(line.d + in_box.d) < std::uint32_t(job.axis[0].out) &&
                          std::uint32_t(line.h + in_box.h) < std::uint32_t(job.axis[1].out);
      const std::int32_t in_line = i - std::int32_t(number * job.box_lines.value);
      const bool staged = std::int32_t(number) < job.lines;
      runs()[i] = PhaseRun{inside ? line.y + in_box.y : kNoRun,
                           staged ? std::int32_t(number) * job.staged_line + in_line * job.staged_pitch : -1, line.bias};
    }
    for (std::int32_t i = std::int32_t(threadIdx.x); i < Tile::kUnits; i += Tile::kThreads) {
      std::uint32_t rest = std::uint32_t(i);
      const std::int32_t unit = std::int32_t(take(job.box_w, rest));
      const bool exists = rest < job.box_lines.value;
      const std::int32_t to = std::int32_t(rest) * job.staged_pitch + unit * job.axis[2].stride;
      const std::uint32_t skew = std::uint32_t(box_line(box, rest).y) + address;
      own.columns[i] = {exists ? to * kSize : -1, std::int32_t(skew & kSkews) * kSize};
    }
  }

  // Positions of phases without a tap hold the bias: everything does, before the results come.
  __device__ __forceinline__ void fill_staged() const {
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.lines * job.staged_line; i += Tile::kThreads)
      staged()[i] = Narrow<Value>::from(tables().lines[i / job.staged_line].bias);
  }

  // 16 bytes of a run, or as many of them as are between `low` and `high`.
  static __device__ __forceinline__ void store_vector(Value* to, const uint4& v, std::int32_t begin, std::int32_t low,
                                                      std::int32_t high) {
    if (begin >= low && begin + kVector <= high) return store_global(to, v);
    alignas(16) Value values[kVector];
    *reinterpret_cast<uint4*>(values) = v;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if (begin + e >= low && begin + e < high) to[e] = values[e];
    }
  }

  // Threads take the vectors of all runs; `kStaged` runs have results, the others are the bias.
  template <bool kStaged>
  __device__ __forceinline__ void store_runs(const Box& box, std::uint32_t address, Value* y) const {
    const PhaseAxis& w = job.axis[2];
    const std::int32_t first = box.unit[2] * w.stride - w.pad, length = w.box * w.stride;
    const std::int32_t low = first < 0 ? -first : 0, high = w.out - first < length ? w.out - first : length;
    const std::uint32_t staged_runs = std::uint32_t(job.lines) * job.box_lines.value;
    const PhaseRun* const own = kStaged ? runs() : runs() + staged_runs;
    const std::uint32_t count = (kStaged ? staged_runs : std::uint32_t(job.run_count) - staged_runs) * job.run_vectors.value;
#pragma unroll 2
    for (std::uint32_t i = threadIdx.x; i < count; i += Tile::kThreads) {
      std::uint32_t number = i;
      const std::int32_t vector = std::int32_t(take(job.run_vectors, number)) * kVector;
      const PhaseRun run = own[number];
      if (!exists(run)) continue;
      const std::int32_t begin = vector - std::int32_t((std::uint32_t(run.y) + address) & kSkews);
      uint4 v;
      if constexpr (kStaged) {
        v = *reinterpret_cast<const uint4*>(staged() + run.staged + vector);
      } else {
        const Value constant = Narrow<Value>::from(run.bias);
        std::uint32_t word = 0;
        if constexpr (kSize == 4) word = *reinterpret_cast<const std::uint32_t*>(&constant);
        if constexpr (kSize == 2) word = *reinterpret_cast<const std::uint16_t*>(&constant) * 0x10001u;
        v = make_uint4(word, word, word, word);
      }
      store_vector(y + (run.y + begin), v, begin, low, high);
    }
  }
  __device__ __forceinline__ void store(const Box& box, std::uint32_t address, Value* y) const {
    if (job.y_axis[2] != 1) return store_apart(box, address, y);
    store_runs<true>(box, address, y);
    if (job.empty_lines > 0) store_runs<false>(box, address, y);
  }

  // The same where neighbours of y are channels, or its outputs lie apart: lanes take lines.
  __device__ __forceinline__ void store_apart(const Box& box, std::uint32_t address, Value* y) const {
    const PhaseAxis& w = job.axis[2];
    const std::int32_t first = box.unit[2] * w.stride - w.pad, length = w.box * w.stride;
    const std::int32_t low = first < 0 ? -first : 0, high = w.out - first < length ? w.out - first : length;
    const std::int32_t box_lines = std::int32_t(job.box_lines.value), lines = job.lines + job.empty_lines;
    for (std::int32_t i = std::int32_t(threadIdx.x); i < lines * box_lines * length; i += Tile::kThreads) {
      const std::int32_t number = i % lines, in_box = i / lines % box_lines, output = i / lines / box_lines;
      const PhaseRun run = runs()[number * box_lines + in_box];
      if (output < low || output >= high || !exists(run)) continue;
      const std::int32_t skew = std::int32_t((std::uint32_t(run.y) + address) & kSkews);
      y[run.y + output * job.y_axis[2]] = run.staged >= 0 ? staged()[run.staged + skew + output] : Narrow<Value>::from(run.bias);
    }
  }
};

}  // namespace upfold::cuda
