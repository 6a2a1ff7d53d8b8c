// im2col at memory speed, for 16-bit and 32-bit floats: see rows.cuh for how rows are shared out; a unit here is one pixel.
//
// Planar y: a lane owns kItems * kPair pixels of one pixel row (n, oc, id, ih) and writes them in the rows of all taps, so that y
// comes from memory once and from the nearest cache for the other taps. Lanes own neighbouring pixels: every store is one run.
// Channels-last y: a block owns 32 pixels and kTileChannels channels; tap by tap it reads along channels, turns the tile round
// through shared memory and writes along pixels. Positions outside y give 0.
#include "rows.cuh"

namespace upfold::cuda {

template <typename Column, typename Value>
UPFOLD_DEVICE Column convert(Value v) {
  return Narrow<Column>::from(widen(v));
}

template <typename Value, typename Column, int kItems>
__global__ void __launch_bounds__(kRowThreads)
    im2col_rows_kernel(const RowsJob job, const Value* __restrict__ y, Column* __restrict__ columns) {
  constexpr int kPairs = kPair<Column>;
  const std::uint32_t warp = blockIdx.x * kWarps + threadIdx.x / 32;
  if (warp >= job.warps) return;
  const RowPlace place = place_of<kItems, kPairs>(job, warp, threadIdx.x % 32);
  if (place.row >= job.rows || place.unit >= job.units) return;
  std::uint32_t rest = place.row;
  const std::uint32_t ih = take(job.h.in_count, rest), id = take(job.d.in_count, rest), oc = take(job.row_channels, rest);
  const std::int32_t stride_w = std::int32_t(job.w.stride.value), pixels = job.units - place.unit;
  const std::int32_t od = std::int32_t(id * job.d.stride.value) + job.d.origin;
  const std::int32_t oh = std::int32_t(ih * job.h.stride.value) + job.h.origin;
  const std::int32_t ow = place.unit * stride_w + job.w.origin;
  const Value* const image = y + (job.n_begin + rest) * job.y_n + (job.oc_begin + oc) * job.y_c;
  Column* target = columns + rest * job.sample_stride + oc * job.channel_stride +
                   (std::int64_t(id) * job.h.in_count.value + ih) * job.w.in_count.value + place.unit;
  for (std::int32_t kd = 0; kd < job.d.kernel; ++kd) {
    const std::int32_t at_d = od + kd * job.d.dilation;
    for (std::int32_t kh = 0; kh < job.h.kernel; ++kh) {
      const std::int32_t at_h = oh + kh * job.h.dilation;
      const bool inside =
          std::uint32_t(at_d) < std::uint32_t(job.d.out_size) && std::uint32_t(at_h) < std::uint32_t(job.h.out_size);
      const std::uint32_t limit = inside ? std::uint32_t(job.w.out_size) : 0;
      const Value* const line = image + at_d * job.y_d + at_h * job.y_h;
#pragma unroll 2
      for (std::int32_t kw = 0; kw < job.w.kernel; ++kw, target += job.row_stride) {
        Pack<Column, kPairs> values[kItems];
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            const std::int32_t at = ow + kw * job.w.dilation + (item * 32 * kPairs + pair) * stride_w;
            values[item].v[pair] = std::uint32_t(at) < limit ? convert<Column>(line[at * job.y_w]) : convert<Column>(0.0f);
          }
        }
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
          Column* const to = target + item * 32 * kPairs;
          if (job.vector >= kPairs && item * 32 * kPairs + kPairs <= pixels) {
            *reinterpret_cast<Pack<Column, kPairs>*>(to) = values[item];
            continue;
          }
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            if (item * 32 * kPairs + pair < pixels) to[pair] = values[item].v[pair];
          }
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
  const RowPlace place = place_of<1, 1>(job, rest, std::uint32_t(lane));
  const bool live = place.row < job.rows && place.unit < job.units;
  rest = place.row;
  const std::uint32_t ih = take(job.h.in_count, rest), id = take(job.d.in_count, rest);
  if (warp == 0) {
    tile.sample[lane] = (job.n_begin + rest) * job.y_n;
    tile.od[lane] = std::int32_t(id * job.d.stride.value) + job.d.origin;
    tile.oh[lane] = std::int32_t(ih * job.h.stride.value) + job.h.origin;
    tile.ow[lane] = place.unit * std::int32_t(job.w.stride.value) + job.w.origin;
    tile.live[lane] = live;
  }
  Column* target = columns + rest * job.sample_stride + (first_channel + warp) * job.channel_stride +
                   (std::int64_t(id) * job.h.in_count.value + ih) * job.w.in_count.value + place.unit;
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

template <typename Column>
constexpr int kRowItems = 4 / kPair<Column>;

#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column)                                                         \
  template __global__ void im2col_rows_kernel<Value, Column, 1>(const RowsJob, const Value*, Column*);                 \
  template __global__ void im2col_rows_kernel<Value, Column, kRowItems<Column>>(const RowsJob, const Value*, Column*); \
  template __global__ void im2col_channels_kernel<Value, Column>(const RowsJob, const Value*, Column*);
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Column>
bool pairs_aligned(const ColumnBlock& block, const void* columns) {
  constexpr int kPairs = kPair<Column>;
  return reinterpret_cast<std::uintptr_t>(columns) % (kPairs * sizeof(Column)) == 0 && block.sample_stride % kPairs == 0 &&
         block.row_stride % kPairs == 0 && length(block.in_w) % kPairs == 0;
}

template <typename Value, typename Column>
bool launch_rows(const Launch& launch, const ColumnBlock& block, RowsJob& job, const void* y, void* columns) {
  constexpr int kItems = kRowItems<Column>, kPairs = kPair<Column>;
  const std::int64_t units = job.w.in_count.value;
  const std::int64_t rows = std::int64_t(job.h.in_count.value) * job.d.in_count.value * job.rows;
  const auto source = static_cast<const Value*>(y);
  const auto target = static_cast<Column*>(columns);
  if (job.row_channels.value == 1 && job.channels > 1) {
    if (!spread_rows(job, rows, units, 1, 1) || std::int64_t(job.warps) * job.channel_tiles.value >= 1 << 30) return false;
    launch_kernel("im2col", im2col_channels_kernel<Value, Column>, launch, job.warps * job.channel_tiles.value, kRowThreads, job,
                  source, target);
    return true;
  }
  const bool full = fills_lanes(units, kItems, kPairs);
  if (!spread_rows(job, rows * job.row_channels.value, units, full ? kItems : 1, kPairs)) return false;
  job.vector = pairs_aligned<Column>(block, columns) ? kPairs : 1;
  const auto kernel = full ? im2col_rows_kernel<Value, Column, kItems> : im2col_rows_kernel<Value, Column, 1>;
  launch_kernel("im2col", kernel, launch, (job.warps + kWarps - 1) / kWarps, kRowThreads, job, source, target);
  return true;
}

}  // namespace

bool im2col_rows(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y,
                 void* columns) {
  RowsJob job{};
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                                            \
  if (p.dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) {                            \
    return make_rows_job(p, block, job) && launch_rows<Value, Column>(launch, block, job, y, columns); \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
