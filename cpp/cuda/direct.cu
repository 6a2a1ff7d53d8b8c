// The direct method for a transposed convolution and its adjoint in x: no column matrix, every result summed where it lies. This
// file has the weight's packed copy and what `config` chooses between; the kernels that sum are in files of their own.
#include "direct.cuh"

namespace upfold::cuda {

// packed[group][tap][source channel][row], padded with zeros; one element a thread.
struct PackJob {
  std::uint32_t elements, used_rows, used_depth, used_w;
  Divisor rows, depth, taps, kernel_h, kernel_w, merged;  // kernel_w: taps of the W axis that are no rows
  std::int64_t channel_step, depth_step, group_step, w_d, w_h, w_w;
};

template <typename Value>
__global__ void __launch_bounds__(kDirectThreads)
    pack_kernel(const PackJob job, const Value* __restrict__ w, Sum<Value>* __restrict__ packed) {
  const std::uint32_t i = blockIdx.x * kDirectThreads + threadIdx.x;
  if (i >= job.elements) return;
  std::uint32_t rest = i;
  std::uint32_t channel = take(job.rows, rest);
  const bool used = channel < job.used_rows;
  const std::uint32_t phase = take(job.merged, channel), row = take(job.depth, rest);
  std::uint32_t tap = take(job.taps, rest);
  const std::uint32_t kw = take(job.kernel_w, tap) * job.merged.value + phase, kh = take(job.kernel_h, tap);
  Sum<Value> value{};
  if (used && row < job.used_depth && kw < job.used_w) {
    value = widen(w[rest * job.group_step + channel * job.channel_step + row * job.depth_step + tap * job.w_d + kh * job.w_h +
                    kw * job.w_w]);
  }
  packed[i] = value;
}

#define UPFOLD_INSTANTIATE(dtype, Value) template __global__ void pack_kernel<Value>(const PackJob, const Value*, Sum<Value>*);
UPFOLD_DIRECT_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

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

// The W axis when its phases are rows: units start at a multiple of the stride beyond the padding, their taps are those of a
// transposed convolution of stride 1.
CorrelateAxis merged_axis(const Axis& a) {
  const std::int64_t shift = a.pad % a.stride;
  CorrelateAxis axis = correlate_axis({a.in, a.out, ceil_div(a.kernel, a.stride), 1, a.pad / a.stride, 1}, true);
  axis.units = make_divisor(ceil_div(a.out + shift, a.stride));
  axis.result_step = std::int32_t(a.stride), axis.result_shift = -std::int32_t(shift);
  return axis;
}

PackJob pack_job(const Problem& p, const PackedShape& shape) {
  const bool transposed = transposes(p);
  PackJob pack{};
  pack.elements = std::uint32_t(p.groups * shape.taps * shape.depth * shape.rows);
  pack.used_rows = std::uint32_t(result_channels(p) * shape.merged), pack.used_depth = std::uint32_t(source_channels(p));
  pack.used_w = std::uint32_t(p.kernel_w);
  pack.rows = make_divisor(shape.rows), pack.depth = make_divisor(shape.depth), pack.taps = make_divisor(shape.taps);
  pack.kernel_h = make_divisor(p.kernel_h), pack.kernel_w = make_divisor(ceil_div(p.kernel_w, shape.merged));
  pack.merged = make_divisor(shape.merged);
  pack.channel_step = transposed ? p.w.c : p.w.n, pack.depth_step = transposed ? p.w.n : p.w.c;
  pack.group_step = in_channels_per_group(p) * p.w.n;
  pack.w_d = p.w.d, pack.w_h = p.w.h, pack.w_w = p.w.w;
  return pack;
}

template <typename Value>
void pack(const Launch& launch, const PackJob& job, const void* w, void* packed) {
  launch_kernel("direct", pack_kernel<Value>, launch, unsigned(ceil_div(job.elements, kDirectThreads)), kDirectThreads, job,
                static_cast<const Value*>(w), static_cast<Sum<Value>*>(packed));
}

}  // namespace

void pack_weight(const Launch& launch, const Problem& p, const PackedShape& shape, const void* w, void* packed) {
  const PackJob job = pack_job(p, shape);
  switch (p.dtype) {
#define UPFOLD_CASE(dtype, Value) \
  case Dtype::dtype:              \
    return pack<Value>(launch, job, w, packed);
    UPFOLD_DIRECT_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  }
}

bool correlate_fits(const Problem& p, const Merge& merge) {
  const bool transposed = transposes(p);
  std::int64_t pixels = p.batch, phases = 1;
  const Axis axes[] = {axis_d(p), axis_h(p), axis_w(p)};
  for (int i = 0; i < 3; ++i) {
    const Axis& a = axes[i];
    if (!axis_fits(a, kDirectMost)) return false;
    const bool merged = (merge.h && i == 1) || (merge.w && i == 2);
    pixels *= merged ? ceil_div(a.out + a.pad % a.stride, a.stride) : transposed ? ceil_div(a.out, a.stride) : a.in;
    phases *= transposed && !merged ? std::min(a.stride, a.out) : 1;
    if (pixels > kDirectMost || phases > kDirectMost) return false;
  }
  const std::int64_t depth = source_channels(p);
  return depth <= kDirectMost / kernel_taps(p) && depth * kernel_taps(p) <= kDirectMost / std::max(p.in_channels, p.out_channels);
}

CorrelateJob correlate_job(const Problem& p, const Merge& merge) {
  const bool transposed = transposes(p);
  CorrelateJob job{};
  job.transposed = transposed;
  job.axis[0] = correlate_axis(axis_d(p), transposed),
  job.axis[1] = merge.h ? merged_axis(axis_h(p)) : correlate_axis(axis_h(p), transposed);
  job.axis[2] = merge.w ? merged_axis(axis_w(p)) : correlate_axis(axis_w(p), transposed);
  std::int64_t pixels = p.batch, taps = 1;
  for (const CorrelateAxis& axis : job.axis) pixels *= axis.units.value, taps *= axis.taps.kernel;
  const std::int64_t merged = merge.w ? p.stride_w : 1;
  job.batch = make_divisor(p.batch), job.merged = make_divisor(merged), job.depth = make_divisor(source_channels(p));
  job.pixels = std::uint32_t(pixels), job.channels = std::uint32_t(result_channels(p));
  job.rows = std::uint32_t(result_channels(p) * merged), job.taps = std::uint32_t(taps);
  const Strides& source = transposed ? p.x : p.y;
  const Strides& result = transposed ? p.y : p.x;
  job.source_n = source.n, job.source_c = source.c;
  job.source_axis[0] = source.d, job.source_axis[1] = source.h, job.source_axis[2] = source.w;
  job.result_n = result.n, job.result_c = result.c;
  job.result_axis[0] = result.d, job.result_axis[1] = result.h, job.result_axis[2] = result.w;
  job.activation = transposed ? p.activation : Activation::kNone, job.slope = p.activation_slope;
  return job;
}

std::vector<DirectTile> direct_tiles() {
  std::vector<DirectTile> tiles;
  for (const TileShape& tile : kTileShapes) tiles.push_back({tile.channels, tile.pixels});
  tiles.push_back({1, kDirectThreads});
  return tiles;
}

bool direct_fits(const Problem& p, int config) {
  if (p.op == Operator::kConvTransposeWeight) return direct_weight_fits(p, config);
  if (config == kTileCount) return rows_fits(p);
  return config >= 0 && config < kTileCount && tile_fits(p, config);
}

std::int64_t direct_workspace_bytes(const Problem& p, int config) {
  if (p.batch == 0) return 0;
  if (p.op == Operator::kConvTransposeWeight) return direct_weight_bytes(p, config);
  return config == kTileCount ? 0 : tile_bytes(p, config);
}

DirectWork direct_work(const Problem& p, int config) {
  if (p.batch == 0 || p.op == Operator::kConvTransposeWeight) return {1, 1};
  return config == kTileCount ? rows_work(p) : tile_work(p, config);
}

void direct(const Launch& launch, const Problem& p, const DirectOperands& operands, int config) {
  if (p.batch == 0) return;
  require(direct_fits(p, config), "config = ", config, "; it does not fit this problem");
  const DeviceScope scope(launch.device);
  if (p.op == Operator::kConvTransposeWeight) return direct_weight(launch, p, operands, config);
  if (config == kTileCount) return rows_run(launch, p, operands);
  tile_run(launch, p, operands, config);
}

}  // namespace upfold::cuda
#endif
