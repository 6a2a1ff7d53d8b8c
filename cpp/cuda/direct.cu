// The direct method for a transposed convolution and its adjoint in x: no column matrix, every output summed where it lies.
//
// Both are correlations: the result at unit q of a phase sums source(q * advance + displacement of tap) * weight over the taps of
// that phase and the channels of the group; the transposed convolution has stride_d * stride_h * stride_w phases and advance 1,
// its adjoint one phase and advance `stride`. A block owns kTileC result channels of one group and kTileP units of one phase,
// units of all samples counted through; a thread owns kC channels times kP units, kTileP / kP apart, so that its stores coalesce.
// Slices of kDepth steps of the reduction, taps slowest, pass through two buffers of shared memory: source[step][unit] gathered
// from the planes, weight[step][channel] from a packed copy (group, tap, channel of the source, channel of the result).
#include "activation.cuh"
#include "direct.cuh"

namespace upfold::cuda {

template <typename Value, int kTileC, int kTileP, int kC, int kP>
__global__ void __launch_bounds__(kDirectThreads, sizeof(Sum<Value>) == 4 ? 2 : 1)
    correlate_kernel(const CorrelateJob job, const Value* __restrict__ source, const Value* __restrict__ packed,
                     const Value* __restrict__ bias, Value* __restrict__ result) {
  using Total = Sum<Value>;
  constexpr int kK = kDepth<Value>, kUnitThreads = kTileP / kP;
  constexpr int kRows = kK * kTileP / kDirectThreads, kWeights = (kK * kTileC + kDirectThreads - 1) / kDirectThreads;
  static_assert(kTileC / kC * kUnitThreads == kDirectThreads && kRows >= 1, "a tile is shared out to the threads of a block");
  alignas(16) __shared__ Total sources[2][kK][kTileP];
  alignas(16) __shared__ Total weights[2][kK][kTileC];
  __shared__ PhaseTable table;
  const std::int32_t tid = std::int32_t(threadIdx.x);
  std::uint32_t rest = blockIdx.x;
  const std::uint32_t channel0 = take(job.channel_tiles, rest) * kTileC;
  const std::int32_t residue_w = std::int32_t(take(job.axis[2].phases, rest));
  const std::int32_t residue_h = std::int32_t(take(job.axis[1].phases, rest));
  const std::int32_t residue[3] = {std::int32_t(take(job.axis[0].phases, rest)), residue_h, residue_w};
  const std::uint32_t pixel0 = take(job.pixel_tiles, rest) * kTileP, group = rest;
  if (tid < 3) {
    const std::int32_t own = tid == 0 ? residue[0] : tid == 1 ? residue[1] : residue[2];
    table.axis[tid] = phase_axis_taps(job.axis[tid], job.transposed, own);
  }
  __syncthreads();  // the axes of the table are complete
  const std::int32_t phase_taps = table.axis[0].count * table.axis[1].count * table.axis[2].count;
  if (tid < phase_taps && tid < kTableTaps) table.taps[tid] = tap_of(job, table.axis, tid);
  __syncthreads();  // the table is complete
  const std::int32_t depth = phase_taps * std::int32_t(job.depth.value);

  const SourceUnit unit = source_unit(job, pixel0 + std::uint32_t(tid % kTileP));
  const Value* const planes = source + std::int64_t(group) * job.depth.value * job.source_c;
  const Value* const matrices = packed + std::int64_t(group) * job.taps * job.depth.value * job.channels;
  const std::int32_t row0 = tid / kTileP * kRows;
  Total next_sources[kRows], next_weights[kWeights];
  const auto fetch = [&](std::int32_t begin) {
    std::int32_t known = -1;
    std::int64_t offset = -1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next_sources[i] = Total{};
      std::uint32_t tap = std::uint32_t(begin + row0 + i);
      if (std::int32_t(tap) >= depth) continue;
      const std::uint32_t channel = take(job.depth, tap);
      if (std::int32_t(tap) != known) known = std::int32_t(tap), offset = source_offset(job, unit, look_up(job, table, known));
      if (offset >= 0) next_sources[i] = widen(planes[offset + channel * job.source_c]);
    }
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      next_weights[i] = Total{};
      const std::int32_t at = tid + i * kDirectThreads;
      const std::uint32_t channel = channel0 + std::uint32_t(at % kTileC);
      std::uint32_t tap = std::uint32_t(begin + at / kTileC);
      if (at >= kK * kTileC || std::int32_t(tap) >= depth || channel >= job.channels) continue;
      const std::uint32_t row = take(job.depth, tap);
      const std::int32_t number = look_up(job, table, std::int32_t(tap)).number;
      next_weights[i] = widen(matrices[(std::int64_t(number) * job.depth.value + row) * job.channels + channel]);
    }
  };
  const auto put = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) sources[buffer][row0 + i][tid % kTileP] = next_sources[i];
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const std::int32_t at = tid + i * kDirectThreads;
      if (at < kK * kTileC) weights[buffer][at / kTileC][at % kTileC] = next_weights[i];
    }
  };

  const std::int32_t own_unit = tid % kUnitThreads, own_channel = tid / kUnitThreads * kC;
  Total sums[kC][kP] = {};
  if (depth > 0) {
    fetch(0);
    put(0);
  }
  __syncthreads();  // the first slice is complete
  for (std::int32_t begin = 0, buffer = 0; begin < depth; begin += kK, buffer ^= 1) {
    const bool more = begin + kK < depth;
    if (more) fetch(begin + kK);
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      Total a[kC], b[kP];
#pragma unroll
      for (int i = 0; i < kC; ++i) a[i] = weights[buffer][k][own_channel + i];
#pragma unroll
      for (int j = 0; j < kP; ++j) b[j] = sources[buffer][k][own_unit + j * kUnitThreads];
#pragma unroll
      for (int i = 0; i < kC; ++i)
#pragma unroll
        for (int j = 0; j < kP; ++j) add_product(sums[i][j], a[i], b[j]);
    }
    if (more) put(buffer ^ 1);
    __syncthreads();  // the next slice is complete, and everyone has left this one
  }

#pragma unroll
  for (int j = 0; j < kP; ++j) {
    std::uint32_t pixel = pixel0 + std::uint32_t(own_unit + j * kUnitThreads);
    if (pixel >= job.pixels) continue;
    std::int64_t offset = 0;
    bool exists = true;
#pragma unroll
    for (int i = 2; i >= 0; --i) {
      const std::int32_t at = std::int32_t(take(job.axis[i].units, pixel)) * job.axis[i].result_step + residue[i];
      exists = exists && at < job.axis[i].result_size;
      offset += at * job.result_axis[i];
    }
    if (!exists) continue;
    offset += pixel * job.result_n;
#pragma unroll
    for (int i = 0; i < kC; ++i) {
      const std::uint32_t channel = channel0 + std::uint32_t(own_channel + i);
      if (channel >= job.channels) continue;
      const std::int64_t global = std::int64_t(group) * job.channels + channel;
      Total sum = sums[i][j];
      if (bias != nullptr) add(sum, widen(bias[global]));
      result[offset + global * job.result_c] = Narrow<Value>::from(finish(job.activation, job.slope, sum));
    }
  }
}

// packed[group][tap][source channel][result channel]; one element a thread.
struct PackJob {
  std::uint32_t elements;
  Divisor channels, depth, taps, kernel_h, kernel_w;
  std::int64_t channel_step, depth_step, group_step, w_d, w_h, w_w;
};

template <typename Value>
__global__ void __launch_bounds__(kDirectThreads) pack_kernel(const PackJob job, const Value* __restrict__ w, Value* packed) {
  const std::uint32_t i = blockIdx.x * kDirectThreads + threadIdx.x;
  if (i >= job.elements) return;
  std::uint32_t rest = i;
  const std::uint32_t channel = take(job.channels, rest), row = take(job.depth, rest);
  std::uint32_t tap = take(job.taps, rest);
  const std::uint32_t kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
  packed[i] =
      w[rest * job.group_step + channel * job.channel_step + row * job.depth_step + tap * job.w_d + kh * job.w_h + kw * job.w_w];
}

// The tiles, largest first: kTileC, kTileP, kC, kP. The last one wastes the least on groups of few channels. Sums of 16 bytes
// leave no registers for the large ones.
#define UPFOLD_LARGE_TILES(DO, type) \
  DO(0, type, 128, 128, 8, 8)        \
  DO(1, type, 64, 256, 8, 8)
#define UPFOLD_SMALL_TILES(DO, type) \
  DO(2, type, 16, 256, 4, 4)         \
  DO(3, type, 4, 256, 4, 1)          \
  DO(4, type, 1, 256, 1, 1)

#define UPFOLD_INSTANTIATE_TILE(index, Value, kTileC, kTileP, kC, kP)                                                      \
  template __global__ void correlate_kernel<Value, kTileC, kTileP, kC, kP>(const CorrelateJob, const Value*, const Value*, \
                                                                           const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, Value)                                            \
  template __global__ void pack_kernel<Value>(const PackJob, const Value*, Value*); \
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
namespace {

struct Tile {
  int channels, pixels;
};
constexpr Tile kTiles[] = {
#define UPFOLD_TILE(index, type, kTileC, kTileP, kC, kP) {kTileC, kTileP},
    UPFOLD_LARGE_TILES(UPFOLD_TILE, ) UPFOLD_SMALL_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

constexpr int kLargeTiles = 2;  // the first ones; complex128 has them not

bool transposes(const Problem& p) { return p.op == Operator::kConvTranspose; }

bool axis_fits(const Axis& a) {
  if (a.stride > 46340 || std::max({a.in, a.out, a.kernel, a.pad, a.dilation}) > kDirectMost) return false;
  return a.in * a.stride + a.kernel * a.dilation + a.pad + a.out <= kDirectMost;
}

CorrelateAxis correlate_axis(const Axis& a, bool transposed) {
  const std::int64_t gcd = greatest_common_divisor(a.stride, a.dilation), tap_step = a.stride / gcd, in_step = a.dilation / gcd;
  CorrelateAxis axis{};
  axis.taps = {0,
               std::int32_t(a.in),
               0,
               std::int32_t(a.out),
               std::int32_t(a.kernel),
               std::int32_t(a.stride),
               std::int32_t(a.pad),
               std::int32_t(a.dilation),
               std::int32_t(gcd),
               std::int32_t(tap_step),
               std::int32_t(in_step),
               std::int32_t(inverse_modulo(in_step, tap_step))};
  axis.source_size = std::int32_t(transposed ? a.in : a.out), axis.result_size = std::int32_t(transposed ? a.out : a.in);
  axis.advance = std::int32_t(transposed ? 1 : a.stride), axis.result_step = std::int32_t(transposed ? a.stride : 1);
  axis.units = make_divisor(transposed ? ceil_div(a.out, a.stride) : a.in);
  axis.phases = make_divisor(transposed ? std::min(a.stride, a.out) : 1);
  return axis;
}

// How many blocks a launch takes, or 0 where a count does not fit 32 bits.
std::int64_t block_count(const Problem& p, const Tile& tile) {
  const bool transposed = transposes(p);
  std::int64_t pixels = p.batch, phases = 1;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    if (!axis_fits(a)) return 0;
    pixels *= transposed ? ceil_div(a.out, a.stride) : a.in;
    phases *= transposed ? std::min(a.stride, a.out) : 1;
    if (pixels > kDirectMost || phases > kDirectMost) return 0;
  }
  const std::int64_t channels = transposed ? out_channels_per_group(p) : in_channels_per_group(p);
  const std::int64_t depth = transposed ? in_channels_per_group(p) : out_channels_per_group(p);
  if (depth > kDirectMost / kernel_taps(p) || depth * kernel_taps(p) > kDirectMost / p.out_channels) return 0;
  const std::int64_t tiles = ceil_div(channels, tile.channels) * ceil_div(pixels, tile.pixels) * p.groups;
  return tiles > kDirectMost / phases ? 0 : tiles * phases;
}

CorrelateJob correlate_job(const Problem& p, const Tile& tile) {
  const bool transposed = transposes(p);
  CorrelateJob job{};
  job.transposed = transposed;
  std::int64_t pixels = p.batch;
  int i = 0;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    job.axis[i] = correlate_axis(a, transposed);
    pixels *= job.axis[i++].units.value;
  }
  const std::int64_t channels = transposed ? out_channels_per_group(p) : in_channels_per_group(p);
  job.depth = make_divisor(transposed ? in_channels_per_group(p) : out_channels_per_group(p));
  job.channel_tiles = make_divisor(ceil_div(channels, tile.channels));
  job.pixel_tiles = make_divisor(ceil_div(pixels, tile.pixels));
  job.pixels = std::uint32_t(pixels), job.channels = std::uint32_t(channels), job.taps = std::uint32_t(kernel_taps(p));
  const Strides& source = transposed ? p.x : p.y;
  const Strides& result = transposed ? p.y : p.x;
  job.source_n = source.n, job.source_c = source.c;
  job.source_axis[0] = source.d, job.source_axis[1] = source.h, job.source_axis[2] = source.w;
  job.result_n = result.n, job.result_c = result.c;
  job.result_axis[0] = result.d, job.result_axis[1] = result.h, job.result_axis[2] = result.w;
  job.activation = transposed ? p.activation : Activation::kNone, job.slope = p.activation_slope;
  return job;
}

PackJob pack_job(const Problem& p) {
  const bool transposed = transposes(p);
  const std::int64_t in = in_channels_per_group(p), out = out_channels_per_group(p);
  PackJob job{};
  job.elements = std::uint32_t(p.in_channels * out * kernel_taps(p));
  job.channels = make_divisor(transposed ? out : in), job.depth = make_divisor(transposed ? in : out);
  job.taps = make_divisor(kernel_taps(p)), job.kernel_h = make_divisor(p.kernel_h), job.kernel_w = make_divisor(p.kernel_w);
  job.channel_step = transposed ? p.w.c : p.w.n, job.depth_step = transposed ? p.w.n : p.w.c, job.group_step = in * p.w.n;
  job.w_d = p.w.d, job.w_h = p.w.h, job.w_w = p.w.w;
  return job;
}

template <typename Value>
void correlate(const Launch& launch, const Problem& p, const DirectOperands& operands, int config) {
  const auto packed = static_cast<Value*>(operands.workspace);
  const PackJob pack = pack_job(p);
  const unsigned pack_blocks = unsigned(ceil_div(pack.elements, kDirectThreads));
  launch_kernel("direct", pack_kernel<Value>, launch, pack_blocks, kDirectThreads, pack, static_cast<const Value*>(operands.w),
                packed);
  const bool transposed = transposes(p);
  const auto source = static_cast<const Value*>(transposed ? operands.x : operands.y);
  const auto result = static_cast<Value*>(transposed ? operands.y : operands.x);
  const auto bias = static_cast<const Value*>(transposed ? operands.bias : nullptr);
  const CorrelateJob job = correlate_job(p, kTiles[config]);
  const unsigned blocks = unsigned(block_count(p, kTiles[config]));
#define UPFOLD_RUN(index, type, kTileC, kTileP, kC, kP)                                                                  \
  if (config == index) {                                                                                                 \
    launch_kernel("direct", correlate_kernel<type, kTileC, kTileP, kC, kP>, launch, blocks, kDirectThreads, job, source, \
                  static_cast<const type*>(packed), bias, result);                                                       \
  }
  UPFOLD_SMALL_TILES(UPFOLD_RUN, Value)
  if constexpr (sizeof(Value) < 16) {
    UPFOLD_LARGE_TILES(UPFOLD_RUN, Value)
  }
#undef UPFOLD_RUN
}

}  // namespace

std::vector<DirectTile> direct_tiles() {
  std::vector<DirectTile> tiles;
  for (const Tile& tile : kTiles) tiles.push_back({tile.channels, tile.pixels});
  return tiles;
}

bool direct_fits(const Problem& p, int config) {
  if (p.op == Operator::kConvTransposeWeight) return direct_weight_fits(p, config);
  if (config < kLargeTiles && p.dtype == Dtype::kComplex128) return false;
  return config >= 0 && config < kTileCount && (p.batch == 0 || block_count(p, kTiles[config]) > 0);
}

std::int64_t direct_workspace_bytes(const Problem& p, int config) {
  if (p.batch == 0) return 0;
  if (p.op == Operator::kConvTransposeWeight) return direct_weight_bytes(p, config);
  return p.in_channels * out_channels_per_group(p) * kernel_taps(p) * element_bytes(p.dtype);
}

void direct(const Launch& launch, const Problem& p, const DirectOperands& operands, int config) {
  if (p.batch == 0) return;
  require(direct_fits(p, config), "config = ", config, "; it does not fit this problem");
  const DeviceScope scope(launch.device);
  if (p.op == Operator::kConvTransposeWeight) return direct_weight(launch, p, operands, config);
  switch (p.dtype) {
#define UPFOLD_CASE(dtype, Value) \
  case Dtype::dtype:              \
    return correlate<Value>(launch, p, operands, config);
    UPFOLD_DIRECT_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  }
}

}  // namespace upfold::cuda
#endif
