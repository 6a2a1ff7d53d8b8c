// What the tile kernel of the direct method is made of: a block's place, its table of taps, the way of a slice from global to
// shared memory, and the way of a sum to its result.
#pragma once

#include "activation.cuh"
#include "direct.cuh"

namespace upfold::cuda {

struct TileJob {
  CorrelateJob problem;
  Divisor row_tiles, pixel_tiles, parts;
  std::uint32_t groups, padded_rows, padded_depth, part_depth;
  bool skips;     // taps that no unit of a block reads by are left out
  int run_shift;  // 2^run_shift neighbouring rows are neighbouring phases
};

// Shared memory keeps 32 units in an order in which a thread's four neighbours are units 8 apart: eight lanes then store eight
// neighbouring units, and a warp that fills a row of shared memory reads 32 neighbouring units.
UPFOLD_DEVICE std::uint32_t unit_in_column(std::uint32_t column) {
  return (column & ~31u) | ((column & 3u) << 3) | ((column >> 2) & 7u);
}

struct TileBlock {
  std::uint32_t row0, pixel0, part, group;
  std::int32_t residue[3];
  std::int64_t plane;  // of its first row in the sums of the parts
};

template <int kTileC, int kTileP>
UPFOLD_DEVICE TileBlock tile_block(const TileJob& job) {
  const CorrelateJob& p = job.problem;
  std::uint32_t rest = blockIdx.x;
  TileBlock block;
  block.row0 = take(job.row_tiles, rest) * kTileC;
#pragma unroll
  for (int i = 2; i >= 0; --i) block.residue[i] = std::int32_t(take(p.axis[i].phases, rest));
  block.part = take(job.parts, rest);
  block.pixel0 = take(job.pixel_tiles, rest) * kTileP;
  block.group = rest;
  block.plane = std::int64_t(block.part) * job.groups + block.group;
#pragma unroll
  for (int i = 0; i < 3; ++i) block.plane = block.plane * p.axis[i].phases.value + block.residue[i];
  block.plane *= p.rows;
  return block;
}

struct PhaseTable {
  PhaseAxisTaps axis[3];
  std::uint32_t live[kTableTaps / 32];
  std::int32_t count;
  Tap taps[kTableTaps];
};

// Taps `first`, ... of the block's phase, as many as the table holds; without those that no unit of the block reads by, where
// that is asked for.
UPFOLD_DEVICE void fill_table(const TileJob& job, const SourceUnit& unit, std::int32_t first, PhaseTable& table) {
  const std::int32_t tid = std::int32_t(threadIdx.x);
  const std::int32_t rest = table.axis[0].count * table.axis[1].count * table.axis[2].count - first;
  const std::int32_t count = rest < kTableTaps ? rest : kTableTaps;
  __syncthreads();  // everyone has left the taps before
  Tap own{};
  if (tid < count) table.taps[tid] = own = tap_of(job.problem, table.axis, first + tid);
  if (tid < kTableTaps / 32) table.live[tid] = 0;
  if (tid == 0) table.count = count;
  __syncthreads();  // the taps are complete
  if (!job.skips) return;
  for (std::int32_t t = 0; t < count; ++t) {
    const bool any = __any_sync(~0u, source_inside(job.problem, unit, table.taps[t]));
    if (any && tid % 32 == 0) atomicOr(&table.live[t / 32], 1u << (t % 32));
  }
  __syncthreads();  // it is known who lives
  std::int32_t before = 0, total = 0;
  for (std::int32_t word = 0; word < kTableTaps / 32; ++word) {
    const std::uint32_t below = word < tid / 32 ? ~0u : word == tid / 32 ? (1u << (tid % 32)) - 1u : 0u;
    before += __popc(table.live[word] & below);
    total += __popc(table.live[word]);
  }
  if (table.live[tid / 32] >> (tid % 32) & 1u) table.taps[before] = own;
  if (tid == 0) table.count = total;
  __syncthreads();  // the table is complete
}

// What a thread brings from global to shared memory: kRows elements of one column of the source, and quads of the weight. A slice
// belongs to one tap, its channels padded; where that would waste much (kMixed), taps follow one another without a gap.
template <typename Value, int kTileC, int kTileP, bool kMixed>
struct SliceReader {
  using Total = Sum<Value>;
  static constexpr int kK = kDepth<Value>, kRows = kK * kTileP / kDirectThreads;
  static constexpr int kRowQuads = kTileC / 4, kQuads = kK * kRowQuads;
  static constexpr int kWeights = (kQuads + kDirectThreads - 1) / kDirectThreads;
  static_assert(kTileP <= kDirectThreads && kRows >= 1, "a slice is shared out to the threads of a block");

  const TileJob& job;
  const PhaseTable& table;
  const SourceUnit unit;
  const Value* const planes;
  const Total* const matrices;  // of the group, from the first channel of the part and the first row of the tile on
  const std::int32_t span;      // channels of the part
  const std::int32_t row0;
  std::int32_t tap, channel, left;
  const Value* from;
  const Total* weights;
  Value next_sources[kRows];
  Quad<Total> next_weights[kWeights];

  UPFOLD_METHOD SliceReader(const TileJob& j, const PhaseTable& t, const TileBlock& block, const Value* source,
                            const Total* packed)
      : job(j),
        table(t),
        unit(source_unit(j.problem, block.pixel0 + unit_in_column(threadIdx.x % kTileP))),
        planes(source + (std::int64_t(block.group) * j.problem.depth.value + block.part * j.part_depth) * j.problem.source_c),
        matrices(packed +
                 (std::int64_t(block.group) * j.problem.taps * j.padded_depth + block.part * j.part_depth) * j.padded_rows +
                 block.row0),
        span(std::int32_t(j.problem.depth.value - block.part * j.part_depth < j.part_depth
                              ? j.problem.depth.value - block.part * j.part_depth
                              : j.part_depth)),
        row0(std::int32_t(threadIdx.x) / kTileP * kRows) {}

  UPFOLD_METHOD std::int32_t slices() const {
    return kMixed ? (table.count * span + kK - 1) / kK : table.count * ((span + kK - 1) / kK);
  }

  UPFOLD_METHOD void enter_tap() {
    const Tap t = table.taps[tap];
    from = planes + source_offset(job.problem, unit, t) + row0 * job.problem.source_c;
    left = source_inside(job.problem, unit, t) ? span - row0 : 0;
    const std::int32_t quad = std::int32_t(threadIdx.x);
    weights = matrices + (std::int64_t(t.number) * job.padded_depth + quad / kRowQuads) * job.padded_rows + quad % kRowQuads * 4;
  }

  UPFOLD_METHOD void begin() {
    tap = 0, channel = 0;
    if (!kMixed && table.count > 0) enter_tap();
  }

  // The next slice, into registers.
  UPFOLD_METHOD void fetch() {
    if constexpr (kMixed) {
      fetch_mixed();
    } else {
      fetch_of_tap();
    }
  }

  UPFOLD_METHOD void fetch_of_tap() {
    const Value* at = from;
#pragma unroll
    for (int i = 0; i < kRows; ++i, at += job.problem.source_c) next_sources[i] = i < left ? *at : Value{};
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      if (kQuads % kDirectThreads == 0 || std::int32_t(threadIdx.x) + i * kDirectThreads < kQuads)
        next_weights[i] = *reinterpret_cast<const Quad<Total>*>(weights + i * (kDirectThreads / kRowQuads) * job.padded_rows);
    }
    channel += kK;
    if (channel < span) {
      from += kK * job.problem.source_c, left -= kK, weights += kK * job.padded_rows;
    } else if (channel = 0, ++tap < table.count) {
      enter_tap();
    }
  }

  UPFOLD_METHOD void fetch_mixed() {
    std::int32_t known = -1;
    const Value* at = planes;
    bool inside = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next_sources[i] = Value{};
      std::uint32_t number = std::uint32_t(channel + row0 + i);
      const std::uint32_t row = take(job.problem.depth, number);
      if (std::int32_t(number) >= table.count) continue;
      if (std::int32_t(number) != known) {
        const Tap t = table.taps[known = std::int32_t(number)];
        at = planes + source_offset(job.problem, unit, t), inside = source_inside(job.problem, unit, t);
      }
      if (inside) next_sources[i] = at[row * job.problem.source_c];
    }
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const std::int32_t quad = std::int32_t(threadIdx.x) + i * kDirectThreads;
      next_weights[i] = Quad<Total>{};
      std::uint32_t number = std::uint32_t(channel + quad / kRowQuads);
      const std::uint32_t row = take(job.problem.depth, number);
      if (quad >= kQuads || std::int32_t(number) >= table.count) continue;
      const std::int64_t line = std::int64_t(table.taps[number].number) * job.padded_depth + row;
      next_weights[i] = *reinterpret_cast<const Quad<Total>*>(matrices + line * job.padded_rows + quad % kRowQuads * 4);
    }
    channel += kK;
  }

  UPFOLD_METHOD void put(Total (*sources)[kTileP], Total (*tile)[kTileC]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) sources[row0 + i][threadIdx.x % kTileP] = widen(next_sources[i]);
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const std::int32_t quad = std::int32_t(threadIdx.x) + i * kDirectThreads;
      if (kQuads % kDirectThreads == 0 || quad < kQuads)
        *reinterpret_cast<Quad<Total>*>(&tile[quad / kRowQuads][quad % kRowQuads * 4]) = next_weights[i];
    }
  }
};

// Where the results of one unit lie: the offset of its first row of a group, and its place on the W axis.
struct ResultUnit {
  std::int64_t offset;
  std::int32_t w;
  bool exists;
};

UPFOLD_DEVICE ResultUnit result_unit(const CorrelateJob& job, std::uint32_t pixel, const std::int32_t (&residue)[3]) {
  const Unit unit = unit_of(job, pixel);
  ResultUnit found{unit.sample * job.result_n, 0, pixel < job.pixels};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::int32_t at = unit.at[i] * job.axis[i].result_step + residue[i] + job.axis[i].result_shift;
    if (i == 2) found.w = at;
    if (i < 2) found.exists = found.exists && at < job.axis[i].result_size;
    found.offset += at * job.result_axis[i];
  }
  return found;
}

template <typename Value>
UPFOLD_DEVICE Value finished(const CorrelateJob& job, const Value* bias, std::int64_t channel, Sum<Value> sum) {
  if (bias != nullptr) add(sum, widen(bias[channel]));
  return Narrow<Value>::from(finish(job.activation, job.slope, sum));
}

template <typename Value>
UPFOLD_DEVICE void store_row(const CorrelateJob& job, const ResultUnit& unit, std::uint32_t group, std::uint32_t row,
                             const Value* bias, Value* result, Sum<Value> sum) {
  if (row >= job.rows) return;
  const std::int32_t w = std::int32_t(take(job.merged, row));
  if (std::uint32_t(unit.w + w) >= std::uint32_t(job.axis[2].result_size)) return;
  const std::int64_t channel = std::int64_t(group) * job.channels + row;
  result[unit.offset + w * job.result_axis[2] + channel * job.result_c] = finished(job, bias, channel, sum);
}

// The sums of a block on their way to the results, through shared memory: so that neighbouring threads store neighbouring
// results, whichever axis these lie on. A pass takes one group of four rows and four units of every thread that takes part.
template <typename Value, int kTileC, int kTileP, int kC, int kP>
struct Stage {
  using Total = Sum<Value>;
  static constexpr int kWarpsC = kTileC / (4 * kC), kWarpsP = kTileP / (8 * kP);
  static constexpr int kTakes = sizeof(Total) == 16 ? 2 : kWarpsP;  // of the warps side by side, so many in one pass
  static constexpr int kRowSlots = 16 * kWarpsC, kColumnSlots = 32 * kTakes;
  static constexpr int kPitch = kColumnSlots + 4;  // so that rows start in different banks, and aligned

  Total sums[kRowSlots][kPitch];

  UPFOLD_METHOD void put(const Total (&own)[kC][kP], int group_c, int group_p, int column_warp) {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
    const std::int32_t column = (column_warp * 8 + lane % 8) * 4, row = warp % kWarpsC * 16 + lane / 8 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Quad<Total> quad;
#pragma unroll
      for (int j = 0; j < 4; ++j) quad.v[j] = own[group_c * 4 + i][group_p * 4 + j];
      *reinterpret_cast<Quad<Total>*>(&sums[row + i][column]) = quad;
    }
  }
};

UPFOLD_DEVICE std::int32_t column_of_unit(std::int32_t unit) { return (unit & ~31) | (unit & 7) << 2 | (unit >> 3 & 3); }

}  // namespace upfold::cuda
