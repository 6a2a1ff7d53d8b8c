// The tiles of the direct method: a block owns kTileC rows (result channels and merged W phases) of one group and kTileP units of
// one phase, units of all samples counted through; a thread owns kC rows times kP units, in groups of four neighbours of shared
// memory. Slices of kDepth steps of the reduction, taps slowest, pass through two buffers: source[step][unit] gathered from the
// planes, weight[step][row] from a packed copy (group, tap, channel of the source, row), in the type of the sums and padded to
// whole tiles. Where tiles are few, blocks share the source channels out between them, write their sums to the workspace, and a
// second kernel adds them in order.
#include "direct_tile.cuh"

namespace upfold::cuda {

// Multiplies one slice: four neighbours of shared memory in one load.
template <typename Total, int kK, int kTileC, int kTileP, int kC, int kP>
UPFOLD_DEVICE void multiply(const Total (&weights)[kK][kTileC], const Total (&sources)[kK][kTileP], std::int32_t row,
                            std::int32_t column, Total (&sums)[kC][kP]) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    Quad<Total> a[kC / 4], b[kP / 4];
#pragma unroll
    for (int i = 0; i < kC / 4; ++i) a[i] = *reinterpret_cast<const Quad<Total>*>(&weights[k][row + i * 16]);
#pragma unroll
    for (int j = 0; j < kP / 4; ++j) b[j] = *reinterpret_cast<const Quad<Total>*>(&sources[k][column + j * 32]);
#pragma unroll
    for (int i = 0; i < kC; ++i)
#pragma unroll
      for (int j = 0; j < kP; ++j) add_product(sums[i][j], a[i / 4].v[i % 4], b[j / 4].v[j % 4]);
  }
}

template <typename Value>
struct TileResult {
  const Value* bias;
  Value* result;
  Sum<Value>* partial;  // where the blocks of several parts leave their sums, else null
};

// What a pass stores: rows row0 + slot / 16 * stride + slot % 16 of units unit0 + slot / 32 * stride + slot % 32 of the block.
struct StagePass {
  std::uint32_t row0;
  std::int32_t unit0;
};

// Neighbouring threads store neighbouring units and, of each, 2^shift neighbouring phases; a thread keeps its unit and phase.
template <typename Value, int kTileC, int kTileP, int kC, int kP>
UPFOLD_DEVICE void store_along_units(const TileJob& job, const TileBlock& block, const TileResult<Value>& to,
                                     const ResultUnit (&units)[kTileP], const Stage<Value, kTileC, kTileP, kC, kP>& stage,
                                     const StagePass& pass) {
  using Staged = Stage<Value, kTileC, kTileP, kC, kP>;
  const CorrelateJob& p = job.problem;
  const int shift = to.partial != nullptr ? 0 : job.run_shift;
  const std::int32_t line = Staged::kColumnSlots << shift;
  for (std::int32_t start = std::int32_t(threadIdx.x); start < (line < kDirectThreads ? kDirectThreads : line);
       start += kDirectThreads) {
    const std::int32_t phase = start & ((1 << shift) - 1), slot = (start & (line - 1)) >> shift;
    const std::int32_t unit = pass.unit0 + slot / 32 * (8 * kP) + slot % 32, column = column_of_unit(slot);
    const std::uint32_t pixel = block.pixel0 + std::uint32_t(unit);
    const ResultUnit place = units[unit];
    if (to.partial != nullptr ? pixel >= p.pixels : !place.exists) continue;
    const std::int32_t step = line < kDirectThreads ? kDirectThreads / line << shift : 1 << shift;
#pragma unroll 1
    for (std::int32_t row = (line < kDirectThreads ? start / line << shift : 0) + phase; row < Staged::kRowSlots; row += step) {
      const std::uint32_t global = pass.row0 + std::uint32_t(row / 16 * (4 * kC) + row % 16);
      const Sum<Value> sum = stage.sums[row][column];
      if (to.partial == nullptr) {
        store_row(p, place, block.group, global, to.bias, to.result, sum);
      } else if (global < p.rows) {
        to.partial[(block.plane + global) * p.pixels + pixel] = sum;
      }
    }
  }
}

// Neighbouring threads store neighbouring rows, where channels are neighbours in memory; a thread keeps its row.
template <typename Value, int kTileC, int kTileP, int kC, int kP>
UPFOLD_DEVICE void store_along_rows(const TileJob& job, const TileBlock& block, const TileResult<Value>& to,
                                    const ResultUnit (&units)[kTileP], const Stage<Value, kTileC, kTileP, kC, kP>& stage,
                                    const StagePass& pass) {
  using Staged = Stage<Value, kTileC, kTileP, kC, kP>;
  const std::int32_t row = std::int32_t(threadIdx.x) % Staged::kRowSlots;
  const std::uint32_t global = pass.row0 + std::uint32_t(row / 16 * (4 * kC) + row % 16);
#pragma unroll 1
  for (std::int32_t slot = std::int32_t(threadIdx.x) / Staged::kRowSlots; slot < Staged::kColumnSlots;
       slot += kDirectThreads / Staged::kRowSlots) {
    const ResultUnit place = units[pass.unit0 + slot / 32 * (8 * kP) + slot % 32];
    if (!place.exists) continue;
    store_row(job.problem, place, block.group, global, to.bias, to.result, stage.sums[row][column_of_unit(slot)]);
  }
}

template <typename Value, int kTileC, int kTileP, int kC, int kP>
UPFOLD_DEVICE void store_tile(const TileJob& job, const TileBlock& block, const TileResult<Value>& to,
                              ResultUnit (&units)[kTileP], Stage<Value, kTileC, kTileP, kC, kP>& stage,
                              const Sum<Value> (&sums)[kC][kP]) {
  using Staged = Stage<Value, kTileC, kTileP, kC, kP>;
  const CorrelateJob& p = job.problem;
  if (threadIdx.x < kTileP) units[threadIdx.x] = result_unit(p, block.pixel0 + threadIdx.x, block.residue);
  const std::int32_t own = std::int32_t(threadIdx.x) / 32 / Staged::kWarpsC;
#pragma unroll
  for (int pass = 0; pass < kC / 4 * (kP / 4); ++pass) {
    const int group_c = pass / (kP / 4), group_p = pass % (kP / 4);
    for (std::int32_t first = 0; first < Staged::kWarpsP; first += Staged::kTakes) {
      __syncthreads();  // everyone has left the pass before
      if (own >= first && own < first + Staged::kTakes) stage.put(sums, group_c, group_p, own - first);
      __syncthreads();  // the pass and the units are complete
      const StagePass at{block.row0 + std::uint32_t(group_c * 16), first * (8 * kP) + group_p * 32};
      if (p.result_c == 1 && to.partial == nullptr) {
        store_along_rows<Value, kTileC, kTileP, kC, kP>(job, block, to, units, stage, at);
      } else {
        store_along_units<Value, kTileC, kTileP, kC, kP>(job, block, to, units, stage, at);
      }
    }
  }
}

template <typename Value, int kTileC, int kTileP, int kC, int kP, bool kMixed>
__global__ void __launch_bounds__(kDirectThreads, kC* kP * sizeof(Sum<Value>) <= 256 ? 2 : 1)
    tile_kernel(const TileJob job, const Value* __restrict__ source, const Sum<Value>* __restrict__ packed,
                const Value* __restrict__ bias, Value* __restrict__ result, Sum<Value>* __restrict__ partial) {
  using Total = Sum<Value>;
  constexpr int kK = kDepth<Value>, kWarpsC = kTileC / (4 * kC);
  static_assert(kWarpsC * (kTileP / (8 * kP)) * 32 == kDirectThreads, "a tile is shared out to the threads of a block");
  struct Slices {
    Total sources[2][kK][kTileP], weights[2][kK][kTileC];
  };
  using Staged = Stage<Value, kTileC, kTileP, kC, kP>;
  constexpr int kBytes = sizeof(Slices) > sizeof(Staged) ? sizeof(Slices) : sizeof(Staged);
  alignas(16) __shared__ unsigned char memory[kBytes];
  __shared__ PhaseTable table;
  __shared__ ResultUnit units[kTileP];
  Slices& slices = *reinterpret_cast<Slices*>(memory);
  const CorrelateJob& p = job.problem;
  const TileBlock block = tile_block<kTileC, kTileP>(job);
  if (threadIdx.x < 3) {
    const std::int32_t residue = threadIdx.x == 0 ? block.residue[0] : threadIdx.x == 1 ? block.residue[1] : block.residue[2];
    table.axis[threadIdx.x] = phase_axis_taps(p.axis[threadIdx.x], p.transposed, residue);
  }
  __syncthreads();  // the axes of the table are complete
  SliceReader<Value, kTileC, kTileP, kMixed> reader(job, table, block, source, packed);

  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  const std::int32_t own_row = warp % kWarpsC * 4 * kC + lane / 8 * 4, own_column = warp / kWarpsC * 8 * kP + lane % 8 * 4;
  Total sums[kC][kP] = {};
  const std::int32_t phase_taps = table.axis[0].count * table.axis[1].count * table.axis[2].count;
  for (std::int32_t first = 0; first < phase_taps; first += kTableTaps) {
    fill_table(job, reader.unit, first, table);
    const std::int32_t count = reader.slices();
    reader.begin();
    if (count > 0) {
      reader.fetch();
      reader.put(slices.sources[0], slices.weights[0]);
    }
    __syncthreads();  // the first slice is complete
    for (std::int32_t slice = 0; slice < count; ++slice) {
      const std::int32_t buffer = slice & 1;
      const bool more = slice + 1 < count;
      if (more) reader.fetch();
      multiply(slices.weights[buffer], slices.sources[buffer], own_row, own_column, sums);
      if (more) reader.put(slices.sources[buffer ^ 1], slices.weights[buffer ^ 1]);
      __syncthreads();  // the next slice is complete, and everyone has left this one
    }
  }
  store_tile(job, block, TileResult<Value>{bias, result, partial}, units, *reinterpret_cast<Staged*>(memory), sums);
}

// The results from the sums of the parts, in order; one row of one unit a thread.
template <typename Value>
__global__ void __launch_bounds__(kDirectThreads)
    join_kernel(const TileJob job, const Divisor pixels, const Divisor rows, std::uint32_t elements,
                const Sum<Value>* __restrict__ partial, const Value* __restrict__ bias, Value* __restrict__ result) {
  const std::uint32_t i = blockIdx.x * kDirectThreads + threadIdx.x;
  if (i >= elements) return;
  Sum<Value> sum{};
  for (std::uint32_t part = 0; part < job.parts.value; ++part) add(sum, partial[std::int64_t(part) * elements + i]);
  std::uint32_t rest = i;
  const std::uint32_t pixel = take(pixels, rest), row = take(rows, rest);
  std::int32_t residue[3];
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) residue[axis] = std::int32_t(take(job.problem.axis[axis].phases, rest));
  const ResultUnit unit = result_unit(job.problem, pixel, residue);
  if (unit.exists) store_row(job.problem, unit, rest, row, bias, result, sum);
}

// The tiles: kTileC, kTileP, kC, kP. Sums of 16 bytes leave no registers for the large ones.
#define UPFOLD_LARGE_TILES(DO, type) \
  DO(0, type, 128, 128, 8, 8)        \
  DO(1, type, 64, 256, 8, 8)         \
  DO(2, type, 64, 64, 4, 4)          \
  DO(3, type, 32, 256, 4, 8)
#define UPFOLD_SMALL_TILES(DO, type) DO(4, type, 16, 256, 4, 4)

#define UPFOLD_INSTANTIATE_TILE(index, Value, kTileC, kTileP, kC, kP)                                                        \
  template __global__ void tile_kernel<Value, kTileC, kTileP, kC, kP, false>(const TileJob, const Value*, const Sum<Value>*, \
                                                                             const Value*, Value*, Sum<Value>*);             \
  template __global__ void tile_kernel<Value, kTileC, kTileP, kC, kP, true>(const TileJob, const Value*, const Sum<Value>*,  \
                                                                            const Value*, Value*, Sum<Value>*);
#define UPFOLD_INSTANTIATE(dtype, Value)                                                                                     \
  template __global__ void join_kernel<Value>(const TileJob, const Divisor, const Divisor, std::uint32_t, const Sum<Value>*, \
                                              const Value*, Value*);                                                         \
  UPFOLD_SMALL_TILES(UPFOLD_INSTANTIATE_TILE, Value)
UPFOLD_DIRECT_TYPES(UPFOLD_INSTANTIATE)
UPFOLD_LARGE_TILES(UPFOLD_INSTANTIATE_TILE, float)
UPFOLD_LARGE_TILES(UPFOLD_INSTANTIATE_TILE, double)
UPFOLD_LARGE_TILES(UPFOLD_INSTANTIATE_TILE, __half)
UPFOLD_LARGE_TILES(UPFOLD_INSTANTIATE_TILE, __nv_bfloat16)
UPFOLD_LARGE_TILES(UPFOLD_INSTANTIATE_TILE, Complex<float>)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {

const TileShape kTileShapes[kTileCount] = {
#define UPFOLD_TILE(index, type, kTileC, kTileP, kC, kP) {kTileC, kTileP},
    UPFOLD_LARGE_TILES(UPFOLD_TILE, ) UPFOLD_SMALL_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};

namespace {

constexpr int kLargeTiles = 4;                             // the first ones; complex128 has them not
constexpr std::int64_t kLeastSteps = 64, kMostParts = 64;  // of the reduction, left to a part
constexpr std::int64_t kSmallMap = 4;                      // source positions of a sample

// W phases become rows where every phase has the same number of taps and the units, which then start at a multiple of the stride
// beyond the padding, are hardly more.
bool merges(const Problem& p) {
  if (!transposes(p) || p.dilation_w != 1 || p.stride_w == 1 || p.kernel_w % p.stride_w != 0) return false;
  const std::int64_t merged = ceil_div(p.out_w + p.pad_w % p.stride_w, p.stride_w);
  return merged * 10 <= ceil_div(p.out_w, p.stride_w) * 11;
}

// All that follows from a problem and a tile.
struct TilePlan {
  bool mixed;
  std::int64_t rows, padded_rows, padded_depth, taps;  // taps: of the packed weight, for each pair of channels
  std::int64_t phases, pixels, row_tiles, pixel_tiles, parts, part_depth;
  std::int64_t steps;  // of the reduction of a block
  std::int64_t packed_elements, partial_elements, blocks;
};

// Into how many parts the reduction is split: those of least predicted time on an H200, whatever the device, so that the same
// call gives the same bits everywhere. Times are in steps of one block's reduction.
std::int64_t best_parts(std::int64_t tiles, std::int64_t steps, std::int64_t most) {
  constexpr std::int64_t kMultiprocessors = 132, kStore = 24, kJoin = 72;
  std::int64_t best = 1, least = 0;
  for (std::int64_t parts = 1; parts <= most && steps / parts >= kLeastSteps / 2 && parts <= kMostParts; ++parts) {
    // In tenths: a block alone on its multiprocessor waits for memory, two hide each other's waits.
    const std::int64_t in_turn = std::max<std::int64_t>(14, ceil_div(tiles * parts, kMultiprocessors) * 10);
    const std::int64_t time = in_turn * (steps / parts + (parts > 1 ? kJoin : kStore));
    if (parts == 1 || time < least) best = parts, least = time;
  }
  return best;
}

TilePlan tile_plan(const Problem& p, const CorrelateJob& job, int config) {
  const TileShape& tile = kTileShapes[config];
  const std::int64_t depth = source_channels(p), slice = sum_bytes(p.dtype) == 4 ? 8 : sum_bytes(p.dtype) == 8 ? 4 : 2;
  TilePlan plan{};
  plan.mixed = round_up(depth, slice) * 4 > depth * 5;
  plan.rows = job.rows, plan.padded_rows = round_up(plan.rows, tile.channels);
  plan.padded_depth = plan.mixed ? depth : round_up(depth, slice);
  plan.taps = job.taps, plan.pixels = job.pixels, plan.phases = 1;
  std::int64_t phase_taps = 1;
  for (const CorrelateAxis& axis : job.axis) {
    plan.phases *= axis.phases.value;
    phase_taps *= job.transposed ? ceil_div(axis.taps.kernel, axis.taps.tap_step) : axis.taps.kernel;
  }
  if (job.samples_first) phase_taps = std::min(phase_taps, in_pixels(p));
  plan.row_tiles = ceil_div(plan.rows, tile.channels), plan.pixel_tiles = ceil_div(plan.pixels, tile.pixels);
  plan.packed_elements = p.groups * plan.taps * plan.padded_depth * plan.padded_rows;
  const std::int64_t tiles = plan.row_tiles * plan.pixel_tiles * p.groups * plan.phases;
  const std::int64_t results = p.groups * plan.phases * plan.rows * plan.pixels;
  const std::int64_t chunks = ceil_div(depth, slice);
  std::int64_t parts = 1;
  if (!plan.mixed && tiles > 0 && results < kDirectMost) {
    const std::int64_t affordable = kMostPartial / (results * sum_bytes(p.dtype));
    parts = best_parts(tiles, phase_taps * plan.padded_depth, std::min(chunks, affordable));
  }
  plan.part_depth = plan.mixed ? depth : ceil_div(chunks, parts) * slice;
  plan.parts = ceil_div(depth, plan.part_depth);
  plan.steps = phase_taps * std::min(plan.part_depth, plan.padded_depth);
  plan.partial_elements = plan.parts > 1 ? results * plan.parts : 0;
  plan.blocks = tiles * plan.parts;
  return plan;
}

CorrelateJob tile_correlation(const Problem& p) {
  CorrelateJob job = correlate_job(p, {false, merges(p)});
  job.samples_first = transposes(p) && in_pixels(p) <= kSmallMap && p.batch >= 32;
  return job;
}

std::int64_t packed_bytes(const Problem& p, const TilePlan& plan) {
  return round_up(plan.packed_elements * sum_bytes(p.dtype), 256);
}

TileJob tile_job(const Problem& p, const CorrelateJob& job, const TilePlan& plan) {
  TileJob tile{};
  tile.problem = job;
  tile.row_tiles = make_divisor(plan.row_tiles), tile.pixel_tiles = make_divisor(plan.pixel_tiles);
  tile.parts = make_divisor(plan.parts), tile.groups = std::uint32_t(p.groups);
  tile.padded_rows = std::uint32_t(plan.padded_rows), tile.padded_depth = std::uint32_t(plan.padded_depth);
  tile.part_depth = std::uint32_t(plan.part_depth), tile.skips = job.samples_first;
  while (tile.run_shift < 4 && job.merged.value % (2u << tile.run_shift) == 0) ++tile.run_shift;
  return tile;
}

template <typename Value>
void run(const Launch& launch, const Problem& p, const DirectOperands& operands, int config) {
  using Total = Sum<Value>;
  const CorrelateJob job = tile_correlation(p);
  const TilePlan plan = tile_plan(p, job, config);
  const TileJob tile = tile_job(p, job, plan);
  const auto packed = static_cast<Total*>(operands.workspace);
  const auto partial = plan.parts > 1 ? reinterpret_cast<Total*>(static_cast<char*>(operands.workspace) + packed_bytes(p, plan))
                                      : static_cast<Total*>(nullptr);
  pack_weight(launch, p, {job.taps, plan.padded_depth, plan.padded_rows, job.merged.value}, operands.w, packed);
  const bool transposed = transposes(p);
  const auto source = static_cast<const Value*>(transposed ? operands.x : operands.y);
  const auto result = static_cast<Value*>(transposed ? operands.y : operands.x);
  const auto bias = static_cast<const Value*>(transposed ? operands.bias : nullptr);
  const auto blocks = unsigned(plan.blocks);
#define UPFOLD_RUN(index, type, kTileC, kTileP, kC, kP)                                                                          \
  if (config == index) {                                                                                                         \
    launch_kernel(                                                                                                               \
        "direct",                                                                                                                \
        plan.mixed ? tile_kernel<type, kTileC, kTileP, kC, kP, true> : tile_kernel<type, kTileC, kTileP, kC, kP, false>, launch, \
        blocks, kDirectThreads, tile, source, static_cast<const Total*>(packed), bias, result, partial);                         \
  }
  UPFOLD_SMALL_TILES(UPFOLD_RUN, Value)
  if constexpr (sizeof(Value) < 16) {
    UPFOLD_LARGE_TILES(UPFOLD_RUN, Value)
  }
#undef UPFOLD_RUN
  if (partial == nullptr) return;
  const std::int64_t elements = plan.partial_elements / plan.parts;
  launch_kernel("direct", join_kernel<Value>, launch, unsigned(ceil_div(elements, kDirectThreads)), kDirectThreads, tile,
                make_divisor(plan.pixels), make_divisor(plan.rows), std::uint32_t(elements), static_cast<const Total*>(partial),
                bias, result);
}

}  // namespace

bool tile_fits(const Problem& p, int config) {
  if (config < kLargeTiles && p.dtype == Dtype::kComplex128) return false;
  const bool merge = merges(p);
  if (!correlate_fits(p, {false, merge})) return false;
  if (p.batch == 0) return true;
  const TileShape& tile = kTileShapes[config];
  const std::int64_t merged = merge ? p.stride_w : 1, rows = round_up(result_channels(p) * merged, tile.channels);
  const std::int64_t taps = p.kernel_d * p.kernel_h * ceil_div(p.kernel_w, merged);
  if (rows > kDirectMost / taps / (p.groups * (source_channels(p) + 8))) return false;
  const TilePlan plan = tile_plan(p, tile_correlation(p), config);
  return plan.blocks <= kDirectMost;
}

std::int64_t tile_bytes(const Problem& p, int config) {
  const TilePlan plan = tile_plan(p, tile_correlation(p), config);
  return packed_bytes(p, plan) + plan.partial_elements * sum_bytes(p.dtype);
}

DirectWork tile_work(const Problem& p, int config) {
  const TilePlan plan = tile_plan(p, tile_correlation(p), config);
  return {plan.blocks, plan.steps};
}

void tile_run(const Launch& launch, const Problem& p, const DirectOperands& operands, int config) {
  switch (p.dtype) {
#define UPFOLD_CASE(dtype, Value) \
  case Dtype::dtype:              \
    return run<Value>(launch, p, operands, config);
    UPFOLD_DIRECT_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  }
}

}  // namespace upfold::cuda
#endif
