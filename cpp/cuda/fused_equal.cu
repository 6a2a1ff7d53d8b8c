// The launch of the fused method's product for equal kernel and stride.
#include "fused_equal.cuh"

namespace upfold::cuda {

// The tiles: kWarpsM, kWarpsN, kM16, kN8, kBlocks.
#define UPFOLD_EQUAL_TILES(DO, Value, kRun) \
  DO(0, Value, kRun, 2, 4, 4, 4, 2)         \
  DO(1, Value, kRun, 2, 4, 2, 4, 3)         \
  DO(2, Value, kRun, 2, 2, 2, 4, 4)         \
  DO(3, Value, kRun, 2, 2, 4, 8, 2)
#define UPFOLD_EQUAL_RUNS(DO, Value) \
  UPFOLD_EQUAL_TILES(DO, Value, 1)   \
  UPFOLD_EQUAL_TILES(DO, Value, 2)   \
  UPFOLD_EQUAL_TILES(DO, Value, 4)

#define UPFOLD_INSTANTIATE(index, Value, kRun, ...)                                                                            \
  template __global__ void fused_equal_kernel<Value, EqualTile<__VA_ARGS__>, kRun>(const EqualJob, const Value*, const Value*, \
                                                                                   const Value*, Value*);
UPFOLD_EQUAL_RUNS(UPFOLD_INSTANTIATE, float)
UPFOLD_EQUAL_RUNS(UPFOLD_INSTANTIATE, __half)
UPFOLD_EQUAL_RUNS(UPFOLD_INSTANTIATE, __nv_bfloat16)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "fused_equal.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;
constexpr int kReservedBytes = 1 << 10;  // of shared memory, by the system for each block

template <typename Tile>
constexpr EqualTileSize size_of() {
  return {Tile::kRows, Tile::kUnits, Tile::kBlocks, Tile::kThreads};
}
constexpr EqualTileSize kTiles[] = {
#define UPFOLD_TILE(index, Value, kRun, ...) size_of<EqualTile<__VA_ARGS__>>(),
    UPFOLD_EQUAL_TILES(UPFOLD_TILE, , )
#undef UPFOLD_TILE
};
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

// An axis as an equal one: a single input has as many outputs as taps, whatever its stride is.
bool is_equal(Axis& a) {
  if (a.in == 1 && a.pad == 0 && a.dilation == 1) a.stride = a.kernel;
  return a.kernel == a.stride && (a.dilation == 1 || a.kernel == 1) && a.pad == 0 && a.out == a.in * a.stride;
}

// Whether an axis of `size` elements is stepped by `stride`; one of size 1 never is.
bool steps(std::int64_t size, std::int64_t stride, std::int64_t wanted) { return size == 1 || stride == wanted; }

bool is_dense(const Problem& p) {
  const std::int64_t kernel_plane = p.kernel_h * p.kernel_w;
  return steps(p.in_w, p.x.w, 1) && steps(p.in_h, p.x.h, p.in_w) && steps(p.in_d, p.x.d, p.in_h * p.in_w) &&
         steps(p.out_w, p.y.w, 1) && steps(p.out_h, p.y.h, p.out_w) && steps(p.out_d, p.y.d, p.out_h * p.out_w) &&
         steps(p.kernel_w, p.w.w, 1) && steps(p.kernel_h, p.w.h, p.kernel_w) && steps(p.kernel_d, p.w.d, kernel_plane) &&
         steps(out_channels_per_group(p), p.w.c, kernel_plane * p.kernel_d);
}

// Bytes of the widest copy, of at most 16, that the neighbours of every row allow.
int grain_of(const void* pointer, int element, std::initializer_list<std::int64_t> steps) {
  std::int64_t all = std::int64_t(reinterpret_cast<std::uintptr_t>(pointer)) / element;
  for (const std::int64_t step : steps) all |= step;
  const std::int64_t bytes = (all | 16 / element) & -(all | 16 / element);
  const int grain = int(bytes) * element;
  return grain == 8 && element == 4 ? 4 : grain;
}

struct EqualPlan {
  bool possible;
  EqualJob job;
  int run;
};

EqualPlan plan_equal(const Problem& p, const EqualTileSize& tile) {
  EqualPlan plan = {};
  EqualJob& job = plan.job;
  Axis d = axis_d(p), h = axis_h(p), w = axis_w(p);
  if (!is_equal(d) || !is_equal(h) || !is_equal(w) || !is_dense(p)) return plan;
  // Axes that the stride leaves alone are one with the next.
  const auto merge = [](Axis& outer, Axis& inner) {
    if (outer.stride != 1) return;
    inner.in *= outer.in, inner.out *= outer.out;
    outer.in = outer.out = 1;
  };
  merge(h, w);
  if (h.in == 1 && h.stride == 1)
    merge(d, w);
  else
    merge(d, h);
  const std::int64_t taps = d.stride * h.stride * w.stride, pixels = d.in * h.in * w.in;
  const std::int64_t units = p.batch * pixels, rows = out_channels_per_group(p) * taps;
  if (std::max({units, rows, d.out * h.out * w.out}) > kMost - 4096) return plan;
  plan.run = w.stride % 4 == 0 ? 4 : w.stride % 2 == 0 ? 2 : 1;
  job.pixels = make_divisor(pixels), job.width = make_divisor(w.in), job.height = make_divisor(h.in);
  job.runs = make_divisor(w.stride / plan.run), job.strides_h = make_divisor(h.stride), job.strides_d = make_divisor(d.stride);
  job.taps = make_divisor(taps);
  const std::int64_t row_tiles = ceil_div(rows, tile.rows), tiles = p.groups * row_tiles * ceil_div(units, tile.units);
  if (tiles > kMost) return plan;
  job.row_tiles = make_divisor(row_tiles), job.all_row_tiles = make_divisor(p.groups * row_tiles);
  job.tiles = std::int32_t(tiles), job.units = std::int32_t(units), job.rows = std::int32_t(rows);
  job.ic = std::int32_t(in_channels_per_group(p));
  job.chunks = std::int32_t(ceil_div(job.ic, 64 / element_bytes(p.dtype)));
  job.stride_w = std::int32_t(w.stride);
  job.x_n = p.x.n, job.x_c = p.x.c, job.w_ic = p.w.n, job.y_n = p.y.n, job.y_c = p.y.c;
  job.y_h = w.out, job.y_d = w.out * h.out, job.step_h = h.stride * job.y_h, job.step_d = d.stride * job.y_d;
  job.activation = p.activation, job.slope = p.activation_slope;
  plan.possible = true;
  return plan;
}

// Shared memory of all stages of a panel.
int streamed_bytes(Dtype dtype, int columns) {
  const bool half = element_bytes(dtype) == 2;
  return kEqualStages * (half ? kEqualChunk<__half> * (columns * 2 + 16) : kEqualChunk<float> * (columns * 4 + 32));
}

template <typename Value, typename Tile, int kRun>
void run(const Launch& launch, EqualJob job, const FusedOperands& operands) {
  constexpr int kSize = int(sizeof(Value)), kVector = EqualStore<Value, kRun>::kVector;
  const auto x = static_cast<const Value*>(operands.x), w = static_cast<const Value*>(operands.w);
  const auto bias = static_cast<const Value*>(operands.bias);
  const auto y = static_cast<Value*>(operands.y);
  const std::int64_t width = job.width.value;
  job.x_grain = grain_of(x, kSize, {job.x_n, job.x_c, job.pixels.value});
  job.w_grain = grain_of(w, kSize, {job.w_ic, job.rows});
  const int aligned = grain_of(y, kSize, {job.y_n, job.y_c, job.y_h}) / kSize;  // elements
  const bool whole = job.stride_w == kRun && width % EqualStore<Value, kRun>::kGroup == 0;
  job.store = whole && aligned % kVector == 0 ? 2 : aligned % kRun == 0 ? 1 : 0;

  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, launch.device), "cudaDeviceGetAttribute");
  const SharedMemory shared = shared_memory(launch.device);
  constexpr int kChunk = kEqualChunk<Value>;
  constexpr int kInputs = kEqualStages * kChunk * kPanelPitch<Value, Tile::kUnits>,
                kPanel = kChunk * kPanelPitch<Value, Tile::kRows>;
  const std::int64_t slots = std::int64_t(multiprocessors) * Tile::kBlocks, row_tiles = job.all_row_tiles.value;
  const std::int64_t whole_weight = std::int64_t(job.chunks) * kPanel;
  job.resident = row_tiles <= slots && job.tiles > row_tiles &&
                 kInputs + whole_weight <= std::min(shared.of_block, shared.of_multiprocessor / Tile::kBlocks - kReservedBytes);
  const int bytes = kInputs + (job.resident ? int(whole_weight) : kEqualStages * kPanel);
  std::int64_t blocks = std::min<std::int64_t>(job.tiles, slots);
  if (job.resident) blocks = blocks / row_tiles * row_tiles;
  launch_grid("fused", fused_equal_kernel<Value, Tile, kRun>, launch, Grid{unsigned(blocks), Tile::kThreads, bytes}, job, x, w,
              bias, y);
}

template <typename Value>
void run(const Launch& launch, const EqualPlan& plan, const FusedOperands& operands, int config) {
#define UPFOLD_RUN(index, Value, kRun, ...) \
  if (config == index && plan.run == kRun) return run<Value, EqualTile<__VA_ARGS__>, kRun>(launch, plan.job, operands);
  UPFOLD_EQUAL_RUNS(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

}  // namespace

std::vector<EqualTileSize> equal_tiles() { return {kTiles, kTiles + kTileCount}; }

bool equal_fits(int device, const Problem& p, int config) {
  if (config < 0 || config >= kTileCount || !plan_equal(p, kTiles[config]).possible) return false;
  const EqualTileSize& tile = kTiles[config];
  return streamed_bytes(p.dtype, tile.rows) + streamed_bytes(p.dtype, tile.units) <= shared_memory(device).of_block;
}

void fused_equal(const Launch& launch, const Problem& p, const FusedOperands& operands, int config) {
  const EqualPlan plan = plan_equal(p, kTiles[config]);
  if (p.dtype == Dtype::kFloat32) return run<float>(launch, plan, operands, config);
  if (p.dtype == Dtype::kFloat16) return run<__half>(launch, plan, operands, config);
  run<__nv_bfloat16>(launch, plan, operands, config);
}

}  // namespace upfold::cuda
#endif
