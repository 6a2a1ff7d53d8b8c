// col2im and im2col on the GPU, for any sizes, strides of y and dtype; one implementation for one to three axes.
//
// col2im, gather form. A thread owns one output element at a time (grid-stride) and is its only writer; a block owns kThreads
// neighbouring ones: neighbours in ow for a planar y, in oc for a channels-last y, so that stores coalesce. It reads
// columns[n][oc, tap][id][ih][iw], pixels dense, rows of any stride, one value for each tap of the output's residue class, in
// ascending order: neighbouring outputs of one phase read neighbouring pixels. im2col. A thread owns one column element at a
// time, a block kThreads neighbours in iw; it reads y at (n, oc, i * stride - pad + k * dilation) and writes 0 where that lies
// outside. No shared memory, no barrier, no atomics. Offsets are 32-bit when the host has proved that they suffice. Common types
// and strides never come here: col2im_*.cu and im2col_*.cu take them.
#include "../columns.h"
#include "activation.cuh"
#include "taps.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256;

template <typename Index>
struct Distances {
  Index n, c, d, h, w;
};

// A Problem and a ColumnBlock as the kernels want them. Begins are positions in the full tensors; `rows` = channels * taps.
template <typename Index>
struct ColumnsJob {
  std::int64_t total;  // elements that the launch writes
  Index n_begin, n_count, oc_begin, oc_count;
  AxisTaps<Index> d, h, w;
  Index taps;
  Index sample_stride, row_stride;            // row_stride: im2col
  Index channel_stride, tap_d, tap_h, tap_w;  // between rows of columns: col2im
  Distances<Index> y;
  Index out_d, out_h, out_w;
  Activation activation;
  float slope;
  bool channels_fastest;
};

template <typename Index>
UPFOLD_DEVICE Index take(Index& rest, Index size) {
  const Index quotient = rest / size;
  const Index remainder = rest - quotient * size;
  rest = quotient;
  return remainder;
}

template <typename Column, typename Index>
UPFOLD_DEVICE Sum<Column> gather(const ColumnsJob<Index>& job, const Column* columns, Index od, Index oh, Index ow) {
  const Index height = job.h.in_end - job.h.in_begin, width = job.w.in_end - job.w.in_begin;
  const TapRun<Index> run_d = taps_of_output(job.d, od), run_h = taps_of_output(job.h, oh), run_w = taps_of_output(job.w, ow);
  Sum<Column> sum{};
  Index id = run_d.first_in;
  for (Index kd = run_d.first_tap; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    if (id < job.d.in_begin || id >= job.d.in_end) continue;
    Index ih = run_h.first_in;
    for (Index kh = run_h.first_tap; kh < job.h.kernel; kh += job.h.tap_step, ih -= job.h.in_step) {
      if (ih < job.h.in_begin || ih >= job.h.in_end) continue;
      const Index row = kd * job.tap_d + kh * job.tap_h;
      const Index pixel = ((id - job.d.in_begin) * height + (ih - job.h.in_begin)) * width - job.w.in_begin;
      Index iw = run_w.first_in;
      for (Index kw = run_w.first_tap; kw < job.w.kernel; kw += job.w.tap_step, iw -= job.w.in_step) {
        if (iw < job.w.in_begin || iw >= job.w.in_end) continue;
        add(sum, widen(columns[row + kw * job.tap_w + pixel + iw]));
      }
    }
  }
  return sum;
}

template <typename Value, typename Column, typename Index>
__global__ void __launch_bounds__(kThreads)
    col2im_kernel(ColumnsJob<Index> job, const Column* columns, const Value* bias, Value* y) {
  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;
  for (std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x; i < job.total; i += step) {
    Index rest = Index(i), oc = 0;
    if (job.channels_fastest) oc = take(rest, job.oc_count);
    const Index ow = job.w.out_begin + take(rest, job.w.out_count);
    const Index oh = job.h.out_begin + take(rest, job.h.out_count);
    const Index od = job.d.out_begin + take(rest, job.d.out_count);
    if (!job.channels_fastest) oc = take(rest, job.oc_count);
    const Index n = rest;
    auto sum = gather(job, columns + n * job.sample_stride + oc * job.channel_stride, od, oh, ow);
    oc += job.oc_begin;
    if (bias != nullptr) add(sum, widen(bias[oc]));
    y[(n + job.n_begin) * job.y.n + oc * job.y.c + od * job.y.d + oh * job.y.h + ow * job.y.w] =
        Narrow<Value>::from(activate(job.activation, job.slope, sum));
  }
}

template <typename Value, typename Column, typename Index>
__global__ void __launch_bounds__(kThreads) im2col_kernel(ColumnsJob<Index> job, const Value* y, Column* columns) {
  const Index depth = job.d.in_end - job.d.in_begin, height = job.h.in_end - job.h.in_begin,
              width = job.w.in_end - job.w.in_begin;
  const std::int64_t step = std::int64_t(gridDim.x) * kThreads;
  for (std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x; i < job.total; i += step) {
    Index rest = Index(i);
    const Index w = take(rest, width), h = take(rest, height), d = take(rest, depth);
    const Index tap = take(rest, job.taps), oc = take(rest, job.oc_count), n = rest;
    Index k = tap;
    const Index kw = take(k, job.w.kernel), kh = take(k, job.h.kernel), kd = k;
    const Index od = (d + job.d.in_begin) * job.d.stride - job.d.pad + kd * job.d.dilation;
    const Index oh = (h + job.h.in_begin) * job.h.stride - job.h.pad + kh * job.h.dilation;
    const Index ow = (w + job.w.in_begin) * job.w.stride - job.w.pad + kw * job.w.dilation;
    const bool inside = od >= 0 && od < job.out_d && oh >= 0 && oh < job.out_h && ow >= 0 && ow < job.out_w;
    Column value{};
    if (inside) {
      const Index offset =
          (n + job.n_begin) * job.y.n + (oc + job.oc_begin) * job.y.c + od * job.y.d + oh * job.y.h + ow * job.y.w;
      value = Narrow<Column>::from(widen(y[offset]));
    }
    columns[n * job.sample_stride + (oc * job.taps + tap) * job.row_stride + (d * height + h) * width + w] = value;
  }
}

// Every pair that is accepted: the type of y, the type of the columns. Named here so that a compiler without host code sees them.
#define UPFOLD_COLUMN_TYPES(DO)                              \
  DO(kFloat32, kFloat32, float, float)                       \
  DO(kFloat64, kFloat64, double, double)                     \
  DO(kFloat16, kFloat16, __half, __half)                     \
  DO(kFloat16, kFloat32, __half, float)                      \
  DO(kBFloat16, kBFloat16, __nv_bfloat16, __nv_bfloat16)     \
  DO(kBFloat16, kFloat32, __nv_bfloat16, float)              \
  DO(kComplex64, kComplex64, Complex<float>, Complex<float>) \
  DO(kComplex128, kComplex128, Complex<double>, Complex<double>)

#define UPFOLD_INSTANTIATE_INDEX(Value, Column, Index)                                                                  \
  template __global__ void col2im_kernel<Value, Column, Index>(ColumnsJob<Index>, const Column*, const Value*, Value*); \
  template __global__ void im2col_kernel<Value, Column, Index>(ColumnsJob<Index>, const Value*, Column*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_INDEX(Value, Column, std::int32_t)        \
  UPFOLD_INSTANTIATE_INDEX(Value, Column, std::int64_t)
UPFOLD_COLUMN_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "columns.cuh"
#include "launch.cuh"
#include "rows.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMaxBlocks = std::int64_t(1) << 20;  // a grid-stride loop covers the rest
constexpr std::int64_t kLimit32 = (std::int64_t(1) << 31) - 1;

bool rows_fit(const Axis& a, std::int64_t y_step) {
  if (a.stride > kMostPhases || std::max({a.in, a.out, a.kernel, a.pad, a.dilation}) > kMost) return false;
  if (a.in * a.stride + a.pad > kMost || a.kernel * a.dilation > kMost) return false;
  return a.out * std::max<std::int64_t>(y_step, 1) <= kMost;
}

RowAxis row_axis(const Axis& a, const Range& in, const Range& out, bool of_outputs) {
  const std::int64_t gcd = greatest_common_divisor(a.stride, a.dilation);
  RowAxis axis{};
  axis.stride = make_divisor(a.stride);
  axis.in_count = make_divisor(std::max<std::int64_t>(length(in), 1));
  axis.units = of_outputs ? make_divisor(std::max<std::int64_t>(ceil_div(length(out), a.stride), 1)) : axis.in_count;
  axis.phases = make_divisor(of_outputs ? std::max<std::int64_t>(std::min(a.stride, length(out)), 1) : 1);
  axis.in_count.value = std::uint32_t(length(in));  // 0 where no input reaches the block; nothing is divided by it then
  axis.out_count = make_divisor(std::max<std::int64_t>(length(out), 1));
  axis.in_begin = std::int32_t(in.begin), axis.out_begin = std::int32_t(out.begin), axis.out_size = std::int32_t(a.out);
  axis.kernel = std::int32_t(a.kernel), axis.dilation = std::int32_t(a.dilation);
  axis.tap_step = std::int32_t(a.stride / gcd), axis.in_step = std::int32_t(a.dilation / gcd);
  axis.origin = std::int32_t(in.begin * a.stride - a.pad);
  axis.most_taps = std::int32_t(ceil_div(a.kernel, axis.tap_step));
  for (std::int64_t r = 0; r < a.stride; ++r) {
    const PhaseTaps taps = phase_taps(a, phase_of(a, out.begin + r));
    axis.first_tap[r] = std::int32_t(taps.first);
    axis.first_in[r] = taps.count == 0 ? 0 : std::int32_t(input_of(a, out.begin + r, taps.first) - in.begin);
  }
  return axis;
}

// The most neighbours along w that one aligned access to y may move; 0 where they lie apart.
int neighbours(const Problem& p, const ColumnBlock& block, const void* y, std::int64_t element) {
  if (p.y.w > 1) return 0;
  const std::int64_t address = std::int64_t(reinterpret_cast<std::uintptr_t>(y)) + block.out_w.begin * element;
  for (int count = int(16 / element); count > 1; count /= 2) {
    const auto fits = [count](std::int64_t step) { return step % count == 0; };
    if (address % (count * element) == 0 && fits(p.y.n) && fits(p.y.c) && fits(p.y.d) && fits(p.y.h)) return count;
  }
  return 1;
}

// The largest offset of a pixel from the begin of its channel's columns; 0 where 64 bits may not hold it.
std::int64_t channel_reach(const Problem& p, const ColumnBlock& block, const ColumnStrides& s) {
  const std::int64_t pixels = length(block.in_d) * length(block.in_h) * length(block.in_w);
  if (std::max({pixels, s.tap_d, s.tap_h, s.tap_w, p.kernel_d, p.kernel_h, p.kernel_w}) > kMost) return 0;
  return (p.kernel_d - 1) * s.tap_d + (p.kernel_h - 1) * s.tap_h + (p.kernel_w - 1) * s.tap_w + std::max<std::int64_t>(pixels, 1);
}

bool make_rows_job(const Problem& p, const ColumnBlock& block, const ColumnStrides& strides, bool of_outputs, RowsJob& job) {
  const std::int64_t samples = length(block.n), channels = length(block.oc);
  if (!rows_fit(axis_d(p), 1) || !rows_fit(axis_h(p), 1) || !rows_fit(axis_w(p), p.y.w)) return false;
  // Empty phases begin at tap `kernel`, so that offsets of up to twice the largest are formed, though never read.
  const std::int64_t reach = channel_reach(p, block, strides);
  if (reach == 0 || 2 * reach > kMost || block.row_stride > kMost || samples > kMost || channels > kMost) return false;
  job.d = row_axis(axis_d(p), block.in_d, block.out_d, of_outputs);
  job.h = row_axis(axis_h(p), block.in_h, block.out_h, of_outputs);
  job.w = row_axis(axis_w(p), block.in_w, block.out_w, of_outputs);
  // Three factors below 2^30 each may pass 2^63.
  const std::int64_t plane = std::int64_t(job.h.units.value) * job.w.units.value;
  if (plane >= kMost || plane * job.d.units.value >= kMost || plane * job.d.units.value * samples >= kMost) return false;
  job.positions = std::uint32_t(plane * job.d.units.value * samples);
  job.samples = make_divisor(std::max<std::int64_t>(samples, 1));
  job.channels = std::int32_t(channels), job.channel_rows = make_divisor(std::max<std::int64_t>(channels, 1));
  job.n_begin = block.n.begin, job.oc_begin = block.oc.begin;
  job.sample_stride = block.sample_stride, job.row_stride = std::int32_t(block.row_stride);
  job.channel_stride = strides.channel;
  job.tap_d = std::int32_t(strides.tap_d), job.tap_h = std::int32_t(strides.tap_h), job.tap_w = std::int32_t(strides.tap_w);
  job.y_n = p.y.n, job.y_c = p.y.c, job.y_d = p.y.d, job.y_h = p.y.h, job.y_w = std::int32_t(p.y.w);
  job.activation = p.activation, job.slope = p.activation_slope, job.vector = 1;
  return true;
}

// Every intermediate value of an axis fits: positions, taps, and the product of two residues.
bool axis_fits(const Axis& a) {
  if (a.stride > 46340 || a.dilation > kLimit32 || a.kernel > kLimit32 || a.pad > kLimit32) return false;
  if (a.in > kLimit32 / a.stride || a.kernel > kLimit32 / a.dilation) return false;
  return a.out + a.pad + a.in * a.stride + a.kernel * a.dilation <= kLimit32;
}

bool fits_32_bits(const Problem& p, const ColumnBlock& block, const ColumnStrides& strides) {
  const std::int64_t rows = length(block.oc) * kernel_taps(p), reach = channel_reach(p, block, strides);
  const std::int64_t outputs = p.batch * p.out_channels * out_pixels(p);
  const std::int64_t columns = (length(block.n) - 1) * block.sample_stride + (length(block.oc) - 1) * strides.channel + reach;
  const std::int64_t y = (p.batch - 1) * p.y.n + (p.out_channels - 1) * p.y.c + (p.out_d - 1) * p.y.d + (p.out_h - 1) * p.y.h +
                         (p.out_w - 1) * p.y.w;
  const std::int64_t largest = std::max({columns, outputs, y, length(block.n) * rows * block.row_stride});
  return reach > 0 && largest <= kLimit32 && axis_fits(axis_d(p)) && axis_fits(axis_h(p)) && axis_fits(axis_w(p));
}

template <typename Index>
ColumnsJob<Index> make_job(const Problem& p, const ColumnBlock& block, const ColumnStrides& strides, std::int64_t total) {
  ColumnsJob<Index> job;
  job.total = total;
  job.n_begin = Index(block.n.begin), job.n_count = Index(length(block.n));
  job.oc_begin = Index(block.oc.begin), job.oc_count = Index(length(block.oc));
  job.d = axis_taps<Index>(axis_d(p), block.in_d, block.out_d);
  job.h = axis_taps<Index>(axis_h(p), block.in_h, block.out_h);
  job.w = axis_taps<Index>(axis_w(p), block.in_w, block.out_w);
  job.taps = Index(kernel_taps(p));
  job.sample_stride = Index(block.sample_stride), job.row_stride = Index(block.row_stride);
  job.channel_stride = Index(strides.channel);
  job.tap_d = Index(strides.tap_d), job.tap_h = Index(strides.tap_h), job.tap_w = Index(strides.tap_w);
  job.y = {Index(p.y.n), Index(p.y.c), Index(p.y.d), Index(p.y.h), Index(p.y.w)};
  job.out_d = Index(p.out_d), job.out_h = Index(p.out_h), job.out_w = Index(p.out_w);
  job.activation = p.activation, job.slope = p.activation_slope;
  job.channels_fastest = p.out_channels > 1 && p.y.c < p.y.w;
  return job;
}

// Strides that are never stepped become 0, so that no limit is drawn from them.
ColumnStrides stepped_strides(const Problem& p, const ColumnBlock& block, const ColumnStrides& s) {
  return {length(block.oc) > 1 ? s.channel : 0, p.kernel_d > 1 ? s.tap_d : 0, p.kernel_h > 1 ? s.tap_h : 0,
          p.kernel_w > 1 ? s.tap_w : 0};
}

unsigned blocks_for(std::int64_t total) { return unsigned(std::min((total + kThreads - 1) / kThreads, kMaxBlocks)); }

template <typename Body>
void with_types(const Problem& p, Dtype column_dtype, Body body) {
#define UPFOLD_CASE(dtype_name, column_name, Value, Column) \
  if (p.dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) return body(TypePair<Value, Column>{});
  UPFOLD_COLUMN_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  refuse_types(p, column_dtype);
}

// Long rows of a planar y take the kernels for them. What decides was measured on an H200: from 96 units on, and where the last
// warp of a row is not mostly idle, they are up to a quarter faster than joined rows; below they are slower.
bool takes_long_rows(const RowsJob& job) {
  if (job.y_c == 1 && job.channels > 1) return false;
  constexpr std::int64_t kLong = 96, kOfWarp = 128;
  const std::int64_t units = job.w.units.value;
  return units >= kLong && 10 * units >= 6 * ceil_div(units, kOfWarp) * kOfWarp;
}

// What follows was measured on an H200, by layer and type. Rows of outputs that are whole aligned accesses take the kernels whose
// lanes own such accesses: `lanes` where those are of whole pixels, else `runs`. Small results and long rows of 4-byte outputs
// gain nothing by them.
constexpr std::int64_t kFewOutputs = 1 << 17;

bool takes_lanes(bool long_rows, std::size_t element) { return element == 2 || !long_rows; }

// The kernel for long rows stores outputs of strides 1, 2 and 4 as whole accesses too.
bool takes_runs(const RowsJob& job, bool long_rows) {
  const std::uint32_t stride = job.w.stride.value;
  return !long_rows || (stride > 2 && stride != 4 && job.vector >= 4 && job.w.out_count.value % 4 == 0);
}

// im2col of a planar y goes through shared memory where there is much to write and lanes that read y themselves would waste
// accesses: short rows; 2-byte columns of stride 1, or of several taps, or of whole runs. And where few pixels have many taps,
// which one lane would read one after another (k64 s32: 350 us for 23 MB).
bool takes_tiles(const RowsJob& job, std::int64_t total, std::size_t element) {
  constexpr std::int64_t kLarge = 40 << 20;  // bytes
  constexpr std::int64_t kManyTaps = 1 << 10;
  if (job.y_c == 1 && job.channels > 1) return false;
  const std::int64_t taps = total / std::max<std::int64_t>(std::int64_t(job.positions) * job.channels, 1);
  if (total * std::int64_t(element) < kLarge && taps < kManyTaps) return false;
  const bool long_rows = takes_long_rows(job);
  if (element == 4) return !long_rows;
  if (long_rows) return job.w.stride.value == 1;
  const bool one_tap = job.h.kernel <= std::int32_t(job.h.stride.value) && job.w.kernel <= std::int32_t(job.w.stride.value);
  return !one_tap || job.w.in_count.value % 8 == 0;
}

}  // namespace

bool spread_rows(RowsJob& job, std::int64_t lines, int units, int phases) {
  const std::int64_t chunks = ceil_div(job.w.phases.value, phases), tiles = ceil_div(job.w.units.value, units);
  const std::int64_t rows = chunks * lines, channels = std::int64_t(job.channels) * job.samples.value;
  if (lines >= kMost || rows >= kMost || channels >= kMost || tiles * channels >= kMost) return false;
  if (rows >= kMost / (tiles * channels)) return false;
  job.chunks = make_divisor(chunks), job.tiles = make_divisor(tiles);
  job.warps = std::uint32_t(rows * channels * tiles);
  return true;
}

ColumnStrides dense_strides(const Problem& p, const ColumnBlock& block) {
  const std::int64_t tap_h = p.kernel_w * block.row_stride, tap_d = p.kernel_h * tap_h;
  return {p.kernel_d * tap_d, tap_d, tap_h, block.row_stride};
}

void col2im(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns,
            const void* bias, void* y) {
  col2im(launch, p, block, dense_strides(p, block), column_dtype, columns, bias, y);
}

void col2im(const Launch& launch, const Problem& p, const ColumnBlock& block, const ColumnStrides& given, Dtype column_dtype,
            const void* columns, const void* bias, void* y) {
  require_block(p, block);
  require_outputs(p, block);
  require_strides(p, block, given);
  const ColumnStrides strides = stepped_strides(p, block, given);
  const std::int64_t total = length(block.n) * length(block.oc) * length(block.out_d) * length(block.out_h) * length(block.out_w);
  with_types(p, column_dtype, [&](auto types) {
    using Value = typename decltype(types)::Value;
    using Column = typename decltype(types)::Column;
    if (total == 0) return;
    const DeviceScope scope(launch.device);
    RowsJob job{};
    if (make_rows_job(p, block, strides, true, job)) {
      job.vector = neighbours(p, block, y, sizeof(Value));
      const bool large = total >= kFewOutputs, long_rows = takes_long_rows(job);
      if (large && takes_lanes(long_rows, sizeof(Value)) && col2im_lanes(launch, p.dtype, column_dtype, job, columns, bias, y))
        return;
      if (large && takes_runs(job, long_rows) && col2im_runs(launch, p.dtype, column_dtype, job, columns, bias, y)) return;
      const auto common = long_rows ? col2im_rows : col2im_joined;
      if (common(launch, p.dtype, column_dtype, job, columns, bias, y)) return;
    }
    if (col2im_turned(launch, p, block, strides, column_dtype, columns, bias, y)) return;
    const auto run = [&](auto index) {
      using Index = decltype(index);
      launch_kernel("col2im", col2im_kernel<Value, Column, Index>, launch, blocks_for(total), kThreads,
                    make_job<Index>(p, block, strides, total), static_cast<const Column*>(columns),
                    static_cast<const Value*>(bias), static_cast<Value*>(y));
    };
    fits_32_bits(p, block, strides) ? run(std::int32_t()) : run(std::int64_t());
  });
}

void im2col(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y, void* columns) {
  require_block(p, block);
  const ColumnStrides strides = dense_strides(p, block);
  const std::int64_t pixels = length(block.in_d) * length(block.in_h) * length(block.in_w);
  const std::int64_t total = length(block.n) * length(block.oc) * kernel_taps(p) * pixels;
  with_types(p, column_dtype, [&](auto types) {
    using Value = typename decltype(types)::Value;
    using Column = typename decltype(types)::Column;
    if (total == 0) return;
    const DeviceScope scope(launch.device);
    RowsJob job{};
    if (make_rows_job(p, block, strides, false, job)) {
      const bool tiles = takes_tiles(job, total, sizeof(Column));
      if (tiles && im2col_tiles(launch, p.dtype, column_dtype, job, y, columns)) return;
      const auto common = takes_long_rows(job) ? im2col_rows : im2col_joined;
      if (common(launch, p.dtype, column_dtype, job, y, columns)) return;
    }
    const auto run = [&](auto index) {
      using Index = decltype(index);
      launch_kernel("im2col", im2col_kernel<Value, Column, Index>, launch, blocks_for(total), kThreads,
                    make_job<Index>(p, block, strides, total), static_cast<const Value*>(y), static_cast<Column*>(columns));
    };
    fits_32_bits(p, block, strides) ? run(std::int32_t()) : run(std::int64_t());
  });
}

}  // namespace upfold::cuda
#endif
