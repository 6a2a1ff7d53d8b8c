// im2col at memory speed, for 16-bit and 32-bit floats: see rows.cuh for how positions are shared out.
//
// Planar y: a lane owns kPair neighbouring pixels, kItems times 32 lanes apart, and writes them in the rows of all taps, so that
// y comes from memory once and from the nearest cache for the other taps. Lanes own neighbouring pixels: every store is one run.
// Channels-last y: a block owns 32 pixels and kTileChannels channels; tap by tap it reads along channels, turns the tile round
// through shared memory and writes along pixels. Positions outside y give 0.
#include "rows.cuh"

namespace upfold::cuda {

template <typename Column, typename Value>
UPFOLD_DEVICE Column convert(Value v) {
  return Narrow<Column>::from(widen(v));
}

// A pixel of a lane: what its first tap reads, the coordinates of that in y, and where its columns go.
template <typename Value, typename Column>
struct Pixel {
  const Value* source;
  Column* target;
  std::int32_t od, oh, ow;
  bool live;  // false: nothing is read or written
};

template <typename Value, typename Column>
UPFOLD_DEVICE Pixel<Value, Column> pixel_of(const RowsJob& job, std::uint32_t position, std::int64_t channel, const Value* y,
                                            Column* columns) {
  const Place place = place_of(job, position);
  channel += place.channel_tile;
  const std::int32_t od = std::int32_t(place.d * job.d.stride.value) + job.d.origin,
                     oh = std::int32_t(place.h * job.h.stride.value) + job.h.origin,
                     ow = std::int32_t(place.w * job.w.stride.value) + job.w.origin;
  return {y + (job.n_begin + place.n) * job.y_n + (job.oc_begin + channel) * job.y_c + od * job.y_d + oh * job.y_h +
              std::int64_t(ow) * job.y_w,
          columns + place.n * job.sample_stride + channel * job.channel_stride +
              (std::int64_t(place.d) * job.h.in_count.value + place.h) * job.w.in_count.value + place.w,
          od,
          oh,
          ow,
          position < job.positions};
}

// Pixels in pairs: one access where they lie side by side, which those at the end of a row or a sample may not.
template <typename Value, typename Column, int kPairs>
UPFOLD_DEVICE void store_pair(const Pixel<Value, Column>* pixels, std::int64_t offset, std::int32_t row_stride,
                              const Pack<Column, kPairs>& values) {
  Column* const target = pixels[0].target + offset;
  const bool aligned = row_stride % kPairs == 0 && reinterpret_cast<std::uintptr_t>(target) % sizeof(values) == 0;
  if (aligned && pixels[kPairs - 1].live && pixels[kPairs - 1].target == pixels[0].target + (kPairs - 1)) {
    *reinterpret_cast<Pack<Column, kPairs>*>(target) = values;
    return;
  }
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    if (pixels[pair].live) pixels[pair].target[offset] = values.v[pair];
  }
}

template <typename Value, typename Column, int kItems>
__global__ void __launch_bounds__(kRowThreads, kItems* kPair<Column> > 2 ? 3 : 4)
    im2col_rows_kernel(const RowsJob job, const Value* __restrict__ y, Column* __restrict__ columns) {
  constexpr int kPairs = kPair<Column>;
  std::uint32_t rest = blockIdx.x;
  const std::uint32_t tile = take(job.tiles, rest);
  const std::uint32_t first = (tile * kWarps + threadIdx.x / 32) * 32 * kItems + threadIdx.x % 32;
  Pixel<Value, Column> pixels[kItems * kPairs];
#pragma unroll
  for (int i = 0; i < kItems * kPairs; ++i) {
    pixels[i] = pixel_of(job, (first + i / kPairs * 32) * kPairs + i % kPairs, rest, y, columns);
  }
  std::int64_t row = 0;  // offset of the tap's row of columns
  for (std::int32_t kd = 0; kd < job.d.kernel; ++kd) {
    for (std::int32_t kh = 0; kh < job.h.kernel; ++kh) {
      std::uint32_t limits[kItems * kPairs];
#pragma unroll
      for (int i = 0; i < kItems * kPairs; ++i) {
        const bool inside = pixels[i].live && std::uint32_t(pixels[i].od + kd * job.d.dilation) < std::uint32_t(job.d.out_size) &&
                            std::uint32_t(pixels[i].oh + kh * job.h.dilation) < std::uint32_t(job.h.out_size);
        limits[i] = inside ? std::uint32_t(job.w.out_size) : 0;
      }
      const std::int64_t line = kd * job.d.dilation * job.y_d + kh * job.h.dilation * job.y_h;
#pragma unroll 2
      for (std::int32_t kw = 0; kw < job.w.kernel; ++kw, row += job.row_stride) {
        Pack<Column, kPairs> values[kItems];
#pragma unroll
        for (int i = 0; i < kItems * kPairs; ++i) {
          const bool inside = std::uint32_t(pixels[i].ow + kw * job.w.dilation) < limits[i];
          const std::int64_t at = line + std::int64_t(kw * job.w.dilation) * job.y_w;
          values[i / kPairs].v[i % kPairs] = inside ? convert<Column>(pixels[i].source[at]) : convert<Column>(0.0f);
        }
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
          store_pair<Value, Column, kPairs>(pixels + item * kPairs, row, job.row_stride, values[item]);
        }
      }
    }
  }
}

// Where the pixels of a block lie in y, for the taps to step from.
struct TilePixels {
  std::int64_t sample[32];  // offset of the pixel's sample in y
  std::int32_t od[32], oh[32], ow[32];
  bool live[32];
};

template <typename Value, typename Column>
__global__ void __launch_bounds__(kRowThreads)
    im2col_channels_kernel(const RowsJob job, const Value* __restrict__ y, Column* __restrict__ columns) {
  __shared__ TilePixels tile;
  __shared__ Column turned[2][32][kTileChannels + 1];
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, rest)) * kTileChannels;
  const std::int32_t channels = job.channels - first_channel;
  const std::uint32_t position = rest * 32 + std::uint32_t(lane);
  const Place place = place_of(job, position);
  const bool live = position < job.positions;
  if (warp == 0) {
    tile.sample[lane] = (job.n_begin + place.n) * job.y_n;
    tile.od[lane] = std::int32_t(place.d * job.d.stride.value) + job.d.origin;
    tile.oh[lane] = std::int32_t(place.h * job.h.stride.value) + job.h.origin;
    tile.ow[lane] = std::int32_t(place.w * job.w.stride.value) + job.w.origin;
    tile.live[lane] = live;
  }
  Column* target = columns + place.n * job.sample_stride + (first_channel + warp) * job.channel_stride +
                   (std::int64_t(place.d) * job.h.in_count.value + place.h) * job.w.in_count.value + place.w;
  y += (job.oc_begin + first_channel) * job.y_c;
  __syncthreads();  // tile was written by warp 0
  const std::int32_t taps = job.d.kernel * job.h.kernel * job.w.kernel;
  std::int32_t kd = 0, kh = 0, kw = 0;
  for (std::int32_t tap = 0; tap < taps; ++tap, target += job.row_stride) {
#pragma unroll
    for (int item = 0; item < 32 / kWarps; ++item) {
      const std::int32_t pixel = warp + item * kWarps;
      const std::int32_t od = tile.od[pixel] + kd * job.d.dilation, oh = tile.oh[pixel] + kh * job.h.dilation,
                         ow = tile.ow[pixel] + kw * job.w.dilation;
      const bool inside = tile.live[pixel] && lane < channels && std::uint32_t(od) < std::uint32_t(job.d.out_size) &&
                          std::uint32_t(oh) < std::uint32_t(job.h.out_size) && std::uint32_t(ow) < std::uint32_t(job.w.out_size);
      const std::int64_t at = tile.sample[pixel] + od * job.y_d + oh * job.y_h + std::int64_t(ow) * job.y_w + lane * job.y_c;
      turned[tap & 1][pixel][lane] = inside ? convert<Column>(y[at]) : convert<Column>(0.0f);
    }
    __syncthreads();  // the tile of this tap is complete, and everyone has left that of the tap before
#pragma unroll
    for (int item = 0; item < kTileChannels / kWarps; ++item) {
      const std::int32_t c = warp + item * kWarps;
      if (live && c < channels) target[item * kWarps * job.channel_stride] = turned[tap & 1][lane][c];
    }
    if (++kw == job.w.kernel) kw = 0, ++kh;
    if (kh == job.h.kernel) kh = 0, ++kd;
  }
}

constexpr int kRowItems = 2;

#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column)                                                 \
  template __global__ void im2col_rows_kernel<Value, Column, 1>(const RowsJob, const Value*, Column*);         \
  template __global__ void im2col_rows_kernel<Value, Column, kRowItems>(const RowsJob, const Value*, Column*); \
  template __global__ void im2col_channels_kernel<Value, Column>(const RowsJob, const Value*, Column*);
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "launch.cuh"
#include "taps.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // of any position or count, so that sums of two stay below 2^31
constexpr std::int64_t kFewLanes = 1 << 17;            // about half of what a large device holds
constexpr std::int64_t kFewPositions = 1 << 14;        // below this a tile of positions may stay half empty

bool axis_fits(const Axis& a, std::int64_t y_step) {
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
  axis.out_count = std::int32_t(length(out));
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

template <typename Value, typename Column>
bool launch_rows(const Launch& launch, RowsJob& job, const void* y, void* columns) {
  const bool channels_last = job.y_c == 1 && job.channels > 1;
  const int items = channels_last ? 1 : lane_items(job, kRowItems);
  const auto kernel = channels_last ? im2col_channels_kernel<Value, Column>
                      : items > 1   ? im2col_rows_kernel<Value, Column, kRowItems>
                                    : im2col_rows_kernel<Value, Column, 1>;
  const int tile = channels_last ? 32 : kRowThreads * kPair<Column> * items;
  const unsigned blocks = cut(job, tile, channels_last ? kTileChannels : 1, 1);
  if (blocks == 0) return false;
  launch_kernel("im2col", kernel, launch, blocks, kRowThreads, job, static_cast<const Value*>(y), static_cast<Column*>(columns));
  return true;
}

}  // namespace

bool make_rows_job(const Problem& p, const ColumnBlock& block, bool of_outputs, RowsJob& job) {
  const std::int64_t taps = kernel_taps(p), samples = length(block.n), channels = length(block.oc);
  if (!axis_fits(axis_d(p), 1) || !axis_fits(axis_h(p), 1) || !axis_fits(axis_w(p), p.y.w)) return false;
  // Empty phases begin at tap `kernel`, so that offsets of up to twice the taps are formed, though never read.
  if (2 * taps * block.row_stride > kMost || samples > kMost || channels > kMost) return false;
  job.d = row_axis(axis_d(p), block.in_d, block.out_d, of_outputs);
  job.h = row_axis(axis_h(p), block.in_h, block.out_h, of_outputs);
  job.w = row_axis(axis_w(p), block.in_w, block.out_w, of_outputs);
  // Three factors below 2^30 each may pass 2^63.
  const std::int64_t plane = std::int64_t(job.h.units.value) * job.w.units.value;
  if (plane >= kMost || plane * job.d.units.value >= kMost || plane * job.d.units.value * samples >= kMost) return false;
  job.positions = std::uint32_t(plane * job.d.units.value * samples),
  job.samples = make_divisor(std::max<std::int64_t>(samples, 1));
  job.channels = std::int32_t(channels);
  job.n_begin = block.n.begin, job.oc_begin = block.oc.begin;
  job.sample_stride = block.sample_stride, job.row_stride = std::int32_t(block.row_stride);
  job.channel_stride = taps * block.row_stride;
  job.y_n = p.y.n, job.y_c = p.y.c, job.y_d = p.y.d, job.y_h = p.y.h, job.y_w = std::int32_t(p.y.w);
  job.activation = p.activation, job.slope = p.activation_slope, job.vector = 1;
  return true;
}

int lane_items(const RowsJob& job, int items) {
  const std::int64_t phases = std::int64_t(job.d.phases.value) * job.h.phases.value;
  return std::int64_t(job.positions) * phases * job.channels >= items * kFewLanes ? items : 1;
}

unsigned cut(RowsJob& job, int tile, int channels, int phases) {
  const std::int64_t chunks = ceil_div(job.w.phases.value, phases), channel_tiles = ceil_div(job.channels, channels);
  job.chunks = make_divisor(chunks), job.channel_tiles = make_divisor(std::max<std::int64_t>(channel_tiles, 1));
  const bool joins = tile > 32 && job.positions < kFewPositions && job.positions * channel_tiles < kMost;
  if (joins) job.positions *= std::uint32_t(channel_tiles);
  const std::int64_t tiles = ceil_div(job.positions, tile);
  job.tiles = make_divisor(std::max<std::int64_t>(tiles, 1));
  const std::int64_t blocks = tiles * (joins ? 1 : channel_tiles);
  if (blocks >= kMost) return 0;
  const std::int64_t all = blocks * chunks * job.h.phases.value * job.d.phases.value;
  return all < kMost ? unsigned(all) : 0;
}

bool im2col_rows(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y,
                 void* columns) {
  RowsJob job{};
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                                            \
  if (p.dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) {                            \
    return make_rows_job(p, block, false, job) && launch_rows<Value, Column>(launch, job, y, columns); \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
