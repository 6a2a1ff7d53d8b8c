// col2im at memory speed, for 16-bit and 32-bit floats: see rows.cuh for how units and rows are shared out.
//
// Planar y: a lane owns kItems * kPair units of one row (n, oc, od, oh), kPhases neighbouring outputs of each, and is their only
// writer. Lanes own neighbouring units, so that every tap is one run of pixels a warp and the outputs of a warp are one run too.
// Channels-last y: a block owns 32 such lanes for kTileChannels channels, one channel a warp at a time, and turns the outputs
// round through shared memory, so that columns are read along pixels and y is written along channels.
// Taps are summed in ascending order; a row outside the input is skipped, a pixel outside it adds 0.
#include "activation.cuh"
#include "rows.cuh"

namespace upfold::cuda {

// What a lane reads: the channel's columns, where its units' inputs begin, and the first of its phases.
template <int kPhases>
struct UnitRows {
  std::int32_t id, ih, kd, kh;
  std::int32_t first_tap[kPhases], first_in[kPhases];
};

template <int kPhases>
UPFOLD_DEVICE UnitRows<kPhases> unit_rows(const RowsJob& job, std::uint32_t od, std::uint32_t oh, std::int32_t phase,
                                          std::int32_t unit) {
  UnitRows<kPhases> rows;
  const std::uint32_t rd = take(job.d.stride, od), rh = take(job.h.stride, oh);
  rows.id = std::int32_t(od) + job.d.first_in[rd], rows.kd = job.d.first_tap[rd];
  rows.ih = std::int32_t(oh) + job.h.first_in[rh], rows.kh = job.h.first_tap[rh];
#pragma unroll
  for (int r = 0; r < kPhases; ++r) {
    const bool exists = phase + r < std::int32_t(job.w.stride.value);
    rows.first_tap[r] = exists ? job.w.first_tap[phase + r] : job.w.kernel;
    rows.first_in[r] = exists ? unit + job.w.first_in[phase + r] : 0;
  }
  return rows;
}

// Items lie 32 lanes apart in a row (sources[0] serves all), or, across channels, each in its own source.
template <int kItems, int kPairs, int kPhases, bool kAcross, typename Column>
UPFOLD_DEVICE void gather_units(const RowsJob& job, const UnitRows<kPhases>& rows, const Column* const (&sources)[kItems],
                                float (&sums)[kItems * kPairs * kPhases]) {
  const std::int32_t in_h = std::int32_t(job.h.in_count.value), in_w = std::int32_t(job.w.in_count.value);
  std::int32_t id = rows.id;
  for (std::int32_t kd = rows.kd; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    if (std::uint32_t(id) >= job.d.in_count.value) continue;
    std::int32_t ih = rows.ih;
    for (std::int32_t kh = rows.kh; kh < job.h.kernel; kh += job.h.tap_step, ih -= job.h.in_step) {
      if (std::uint32_t(ih) >= job.h.in_count.value) continue;
      const std::int32_t offset = (kd * job.h.kernel + kh) * job.w.kernel * job.row_stride + (id * in_h + ih) * in_w;
      std::int32_t step = 0, back = 0;
#pragma unroll 2
      for (std::int32_t tap = 0; tap < job.w.most_taps; ++tap, step += job.w.tap_step, back += job.w.in_step) {
        Column values[kItems * kPairs * kPhases];
#pragma unroll
        for (int r = 0; r < kPhases; ++r) {
          const std::int32_t kw = rows.first_tap[r] + step, iw = rows.first_in[r] - back;
          const std::uint32_t limit = kw < job.w.kernel ? in_w : 0;
          const std::int64_t at = offset + kw * job.row_stride + iw;
#pragma unroll
          for (int item = 0; item < kItems; ++item) {
            const Column* source = sources[kAcross ? item : 0] + at;
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
              const int beside = (kAcross ? 0 : item * 32 * kPairs) + pair;
              values[(item * kPairs + pair) * kPhases + r] = std::uint32_t(iw + beside) < limit ? source[beside] : Column{};
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kItems * kPairs * kPhases; ++i) sums[i] += widen(values[i]);
      }
    }
  }
}

// Adds the bias to every sum of a lane and applies the activation.
template <int kCount>
UPFOLD_DEVICE void finish_all(const RowsJob& job, float bias, float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += bias;
  if (job.activation == Activation::kNone) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = finish(job.activation, job.slope, sums[i]);
}

// The outputs of one lane in a row: a run for each item, as wide accesses where they may be and every item is whole.
template <typename Value, int kItems, int kRun, int kPhases>
UPFOLD_DEVICE void store_items(const RowsJob& job, Value* y, std::int32_t unit, std::int32_t phase,
                               const float (&sums)[kItems * kRun]) {
  constexpr int kWide = kRun * int(sizeof(Value)) <= 16 ? kRun : 16 / int(sizeof(Value));
  constexpr int kUnits = 32 * kRun / kPhases;  // from one item to the next
  const std::int32_t stride = std::int32_t(job.w.stride.value), count = std::int32_t(job.w.out_count.value);
  const std::int32_t first = unit * stride + phase;
  if (stride == kPhases && job.vector >= kWide && first + (kItems - 1) * kUnits * kPhases + kRun <= count) {
#pragma unroll
    for (int i = 0; i < kItems * kRun; i += kWide) {
      Pack<Value, kWide> wide;
#pragma unroll
      for (int j = 0; j < kWide; ++j) wide.v[j] = Narrow<Value>::from(sums[i + j]);
      *reinterpret_cast<Pack<Value, kWide>*>(y + first + i / kRun * kUnits * kPhases + i % kRun) = wide;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kItems * kRun; ++i) {
    const std::int32_t r = i % kPhases, at = first + (i / kRun * kUnits + i % kRun / kPhases) * stride + r;
    if (phase + r < stride && at < count) y[std::int64_t(at) * job.y_w] = Narrow<Value>::from(sums[i]);
  }
}

template <typename Value, typename Column, int kPhases, int kItems>
__global__ void __launch_bounds__(kRowThreads)
    col2im_rows_kernel(const RowsJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  constexpr int kPairs = kPair<Column>;
  const std::uint32_t warp = blockIdx.x * kWarps + threadIdx.x / 32;
  if (warp >= job.warps) return;
  const RowPlace place = place_of<kItems, kPairs>(job, warp, threadIdx.x % 32);
  if (place.row >= job.rows || place.unit >= job.units) return;
  std::uint32_t rest = place.row;
  const std::int32_t phase = std::int32_t(take(job.chunks, rest)) * kPhases;
  const std::uint32_t oh = take(job.h.out_count, rest), od = take(job.d.out_count, rest), oc = take(job.row_channels, rest);
  const Column* const source = columns + rest * job.sample_stride + oc * job.channel_stride;
  const Column* sources[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) sources[item] = source;
  float sums[kItems * kPairs * kPhases] = {};
  gather_units<kItems, kPairs, kPhases, false>(job, unit_rows<kPhases>(job, od, oh, phase, place.unit), sources, sums);
  const std::int64_t channel = job.oc_begin + oc;
  y += (job.n_begin + rest) * job.y_n + channel * job.y_c + (job.d.out_begin + std::int64_t(od)) * job.y_d +
       (job.h.out_begin + std::int64_t(oh)) * job.y_h + std::int64_t(job.w.out_begin) * job.y_w;
  finish_all(job, bias == nullptr ? 0.0f : widen(bias[channel]), sums);
  store_items<Value, kItems, kPairs * kPhases, kPhases>(job, y, place.unit, phase, sums);
}

template <typename Value, typename Column, int kPhases>
__global__ void __launch_bounds__(kRowThreads)
    col2im_channels_kernel(const RowsJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  constexpr int kItems = kTileChannels / kWarps;
  __shared__ Value outputs[32 * kPhases][kTileChannels + 1];
  __shared__ std::int64_t begins[32];  // offset in y of each lane's first output
  __shared__ std::int32_t counts[32];  // and how many outputs it has
  const std::uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, rest)) * kTileChannels;
  const std::int32_t left = job.channels - first_channel, channels = left < kTileChannels ? left : kTileChannels;
  const RowPlace place = place_of<1, 1>(job, rest, lane);
  rest = place.row;
  const std::int32_t phase = std::int32_t(take(job.chunks, rest)) * kPhases;
  const std::uint32_t oh = take(job.h.out_count, rest), od = take(job.d.out_count, rest);
  const bool live = place.row < job.rows && place.unit < job.units;
  const std::int32_t stride = std::int32_t(job.w.stride.value);
  if (live) {
    const Column* sources[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      // A channel beyond the last reads the last one again, and is not written.
      const std::int32_t c = std::int32_t(warp) + item * kWarps;
      const std::int32_t channel = first_channel + (c < channels ? c : channels - 1);
      sources[item] = columns + rest * job.sample_stride + channel * job.channel_stride;
    }
    float sums[kItems * kPhases] = {};
    gather_units<kItems, 1, kPhases, true>(job, unit_rows<kPhases>(job, od, oh, phase, place.unit), sources, sums);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const std::int32_t c = std::int32_t(warp) + item * kWarps;
      const float added = bias == nullptr || c >= channels ? 0.0f : widen(bias[job.oc_begin + first_channel + c]);
#pragma unroll
      for (int r = 0; r < kPhases; ++r) {
        outputs[lane * kPhases + r][c] = Narrow<Value>::from(finish(job.activation, job.slope, sums[item * kPhases + r] + added));
      }
    }
  }
  if (warp == 0) {
    const std::int32_t ow = place.unit * stride + phase, outs = std::int32_t(job.w.out_count.value) - ow;
    const std::int32_t phases = stride - phase < kPhases ? stride - phase : kPhases;
    counts[lane] = live ? (outs < phases ? outs : phases) : 0;
    begins[lane] = (job.n_begin + rest) * job.y_n + (job.d.out_begin + std::int64_t(od)) * job.y_d +
                   (job.h.out_begin + std::int64_t(oh)) * job.y_h + (job.w.out_begin + std::int64_t(ow)) * job.y_w;
  }
  __syncthreads();  // the lanes' outputs, begins and counts are read by other warps
  y += (job.oc_begin + first_channel) * job.y_c;
  for (std::int32_t i = std::int32_t(threadIdx.x); i < 32 * kPhases * channels; i += kRowThreads) {
    const std::int32_t at = i / channels, c = i - at * channels, owner = at / kPhases, r = at % kPhases;
    if (r < counts[owner]) y[begins[owner] + std::int64_t(r) * job.y_w + c * job.y_c] = outputs[at][c];
  }
}

// Items of a lane, so that enough loads are in flight and what a row costs is shared by enough outputs.
template <int kPhases>
constexpr int kRowItems = kPhases == 4 ? 2 : 4;

#define UPFOLD_INSTANTIATE_PHASES(Value, Column, kPhases)                                                                     \
  template __global__ void col2im_rows_kernel<Value, Column, kPhases, 1>(const RowsJob, const Column*, const Value*, Value*); \
  template __global__ void col2im_rows_kernel<Value, Column, kPhases, kRowItems<kPhases>>(const RowsJob, const Column*,       \
                                                                                          const Value*, Value*);              \
  template __global__ void col2im_channels_kernel<Value, Column, kPhases>(const RowsJob, const Column*, const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 1)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 2)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 4)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "columns.cuh"
#include "launch.cuh"
#include "taps.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // of any position or count, so that sums of two stay below 2^31

bool axis_fits(const Axis& a, std::int64_t y_step) {
  if (a.stride > kMostPhases || std::max({a.in, a.out, a.kernel, a.pad, a.dilation}) > kMost) return false;
  if (a.in * a.stride + a.pad > kMost || a.kernel * a.dilation > kMost) return false;
  return a.out * std::max<std::int64_t>(y_step, 1) <= kMost;
}

RowAxis row_axis(const Axis& a, const Range& in, const Range& out) {
  const std::int64_t gcd = greatest_common_divisor(a.stride, a.dilation);
  RowAxis axis{};
  axis.stride = make_divisor(a.stride);
  axis.out_count = make_divisor(std::max<std::int64_t>(length(out), 1));
  axis.in_count = make_divisor(std::max<std::int64_t>(length(in), 1));
  axis.in_count.value = std::uint32_t(length(in));  // 0 where no input reaches the block; nothing is divided by it then
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

template <typename Value, typename Column, int kPhases>
bool launch_rows(const Launch& launch, RowsJob& job, const void* columns, const void* bias, void* y) {
  constexpr int kItems = kRowItems<kPhases>, kPairs = kPair<Column>;
  const std::int64_t units = ceil_div(job.w.out_count.value, job.w.stride.value);
  const std::int64_t chunks = ceil_div(job.w.stride.value, kPhases);
  job.chunks = make_divisor(chunks);
  const std::int64_t rows = chunks * job.h.out_count.value * job.d.out_count.value * job.rows;
  const auto source = static_cast<const Column*>(columns);
  const auto added = static_cast<const Value*>(bias);
  const auto target = static_cast<Value*>(y);
  if (job.row_channels.value == 1 && job.channels > 1) {
    if (!spread_rows(job, rows, units, 1, 1) || std::int64_t(job.warps) * job.channel_tiles.value >= kMost) return false;
    launch_kernel("col2im", col2im_channels_kernel<Value, Column, kPhases>, launch, job.warps * job.channel_tiles.value,
                  kRowThreads, job, source, added, target);
    return true;
  }
  const bool full = fills_lanes(units, kItems, kPairs);
  if (!spread_rows(job, rows * job.row_channels.value, units, full ? kItems : 1, kPairs)) return false;
  const unsigned blocks = (job.warps + kWarps - 1) / kWarps;
  const auto kernel = full ? col2im_rows_kernel<Value, Column, kPhases, kItems> : col2im_rows_kernel<Value, Column, kPhases, 1>;
  launch_kernel("col2im", kernel, launch, blocks, kRowThreads, job, source, added, target);
  return true;
}

}  // namespace

bool make_rows_job(const Problem& p, const ColumnBlock& block, RowsJob& job) {
  const std::int64_t taps = kernel_taps(p), samples = length(block.n), channels = length(block.oc);
  if (!axis_fits(axis_d(p), 1) || !axis_fits(axis_h(p), 1) || !axis_fits(axis_w(p), p.y.w)) return false;
  // Empty phases begin at tap `kernel`, so that offsets of up to twice the taps are formed, though never read.
  if (2 * taps * block.row_stride > kMost || samples > kMost || channels > kMost) return false;
  job.d = row_axis(axis_d(p), block.in_d, block.out_d);
  job.h = row_axis(axis_h(p), block.in_h, block.out_h);
  job.w = row_axis(axis_w(p), block.in_w, block.out_w);
  job.channels = std::int32_t(channels), job.rows = std::uint32_t(samples);
  job.row_channels = make_divisor(p.y.c == 1 ? 1 : channels);
  job.channel_tiles = make_divisor(ceil_div(channels, kTileChannels));
  job.n_begin = block.n.begin, job.oc_begin = block.oc.begin;
  job.sample_stride = block.sample_stride, job.row_stride = std::int32_t(block.row_stride);
  job.channel_stride = taps * block.row_stride;
  job.y_n = p.y.n, job.y_c = p.y.c, job.y_d = p.y.d, job.y_h = p.y.h, job.y_w = std::int32_t(p.y.w);
  job.activation = p.activation, job.slope = p.activation_slope;
  job.chunks = make_divisor(1), job.vector = 1;
  return true;
}

bool spread_rows(RowsJob& job, std::int64_t rows, std::int64_t units, int items, int pairs) {
  job.lane_bits = 0;
  const std::int64_t wanted = items > 1 ? 32 : ceil_div(units, pairs);
  while (job.lane_bits < 5 && (std::int64_t(1) << job.lane_bits) < wanted) ++job.lane_bits;
  const std::int64_t tiles = ceil_div(units, (std::int64_t(pairs) * items) << job.lane_bits);
  if (rows >= kMost || units >= kMost) return false;
  const std::int64_t warps = tiles * ceil_div(rows, std::int64_t(32) >> job.lane_bits);
  if (warps >= kMost) return false;
  job.tiles = make_divisor(tiles);
  job.rows = std::uint32_t(rows), job.warps = std::uint32_t(warps), job.units = std::int32_t(units);
  return true;
}

bool fills_lanes(std::int64_t units, int items, int pairs) { return 2 * units >= std::int64_t(32) * items * pairs; }

bool col2im_rows(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns,
                 const void* bias, void* y) {
  RowsJob job{};
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                                   \
  if (p.dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) {                   \
    if (!make_rows_job(p, block, job)) return false;                                          \
    job.vector = neighbours(p, block, y, sizeof(Value));                                      \
    if (p.stride_w == 1) return launch_rows<Value, Column, 1>(launch, job, columns, bias, y); \
    if (p.stride_w == 2) return launch_rows<Value, Column, 2>(launch, job, columns, bias, y); \
    return launch_rows<Value, Column, 4>(launch, job, columns, bias, y);                      \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
