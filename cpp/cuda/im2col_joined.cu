// im2col at memory speed, for 16-bit and 32-bit floats, where rows are short or y is channels-last: see rows.cuh.
//
// Planar y: a lane owns kPair neighbouring pixels of kItems channels and writes them in the rows of all taps, so that y comes
// from memory once and from the nearest cache for the other taps. Lanes own neighbouring pixels: every store is one run.
// Channels-last y: a block owns 32 pixels and kTileChannels channels; tap by tap it reads along channels, turns the tile round
// through shared memory and writes along pixels. Positions outside y give 0.
#include "joined.cuh"

namespace upfold::cuda {

template <typename Value, typename Column, int kItems>
__global__ void __launch_bounds__(kRowThreads)
    im2col_joined_kernel(const RowsJob job, const Value* __restrict__ y, Column* __restrict__ columns) {
  constexpr int kPairs = kPair<Column>;
  std::uint32_t rest = blockIdx.x;
  const std::uint32_t tile = take(job.tiles, rest), position = (tile * kRowThreads + threadIdx.x) * kPairs;
  if (position >= job.positions) return;
  // The pixels of a pair may lie in different rows or samples, or the second may not exist.
  const std::int32_t pixels = position + kPairs <= job.positions ? kPairs : 1;
  const Value* images[kPairs];
  std::int32_t od[kPairs], oh[kPairs], ow[kPairs];
  Column* targets[kPairs];
  std::int32_t channels[kPairs];
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    const Place place = place_of(job, position + (pair < pixels ? pair : 0));
    const std::int32_t channel = std::int32_t(rest + place.channel_tile) * kItems;
    channels[pair] = pair < pixels ? job.channels - channel : 0;
    od[pair] = std::int32_t(place.d * job.d.stride.value) + job.d.origin;
    oh[pair] = std::int32_t(place.h * job.h.stride.value) + job.h.origin;
    ow[pair] = std::int32_t(place.w * job.w.stride.value) + job.w.origin;
    images[pair] = y + (job.n_begin + place.n) * job.y_n + (job.oc_begin + channel) * job.y_c;
    targets[pair] = columns + place.n * job.sample_stride + channel * job.channel_stride +
                    (std::int64_t(place.d) * job.h.in_count.value + place.h) * job.w.in_count.value + place.w;
  }
  const bool one_access = targets[kPairs - 1] == targets[0] + (kPairs - 1) && job.row_stride % kPairs == 0 &&
                          reinterpret_cast<std::uintptr_t>(targets[0]) % (kPairs * sizeof(Column)) == 0;
  std::int64_t row = 0;  // offset of the tap's row of columns
  for (std::int32_t kd = 0; kd < job.d.kernel; ++kd) {
    for (std::int32_t kh = 0; kh < job.h.kernel; ++kh) {
      std::uint32_t limits[kPairs];
      std::int64_t lines[kPairs];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const std::int32_t at_d = od[pair] + kd * job.d.dilation, at_h = oh[pair] + kh * job.h.dilation;
        const bool inside =
            std::uint32_t(at_d) < std::uint32_t(job.d.out_size) && std::uint32_t(at_h) < std::uint32_t(job.h.out_size);
        limits[pair] = inside ? std::uint32_t(job.w.out_size) : 0;
        lines[pair] = at_d * job.y_d + at_h * job.y_h;
      }
#pragma unroll 2
      for (std::int32_t kw = 0; kw < job.w.kernel; ++kw, row += job.row_stride) {
        Pack<Column, kPairs> values[kItems];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const std::int32_t at = ow[pair] + kw * job.w.dilation;
          const std::int64_t offset = lines[pair] + at * job.y_w;
          const bool inside = std::uint32_t(at) < limits[pair];
#pragma unroll
          for (int item = 0; item < kItems; ++item) {
            const bool read = inside && item < channels[pair];
            values[item].v[pair] = read ? convert<Column>(images[pair][offset + item * job.y_c]) : convert<Column>(0.0f);
          }
        }
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
          const std::int64_t offset = row + item * job.channel_stride;
          if (one_access && item < channels[kPairs - 1]) {
            *reinterpret_cast<Pack<Column, kPairs>*>(targets[0] + offset) = values[item];
            continue;
          }
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            if (item < channels[pair]) targets[pair][offset] = values[item].v[pair];
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

constexpr int kRowItems = 4;

#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column)                                                   \
  template __global__ void im2col_joined_kernel<Value, Column, 1>(const RowsJob, const Value*, Column*);         \
  template __global__ void im2col_joined_kernel<Value, Column, kRowItems>(const RowsJob, const Value*, Column*); \
  template __global__ void im2col_channels_kernel<Value, Column>(const RowsJob, const Value*, Column*);
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kFewLanes = 1 << 17;      // about half of what a large device holds
constexpr std::int64_t kFewPositions = 1 << 12;  // below this a tile of positions may stay half empty

template <typename Value, typename Column>
bool launch_joined(const Launch& launch, RowsJob& job, const void* y, void* columns) {
  const bool channels_last = job.y_c == 1 && job.channels > 1;
  const int items = channels_last ? kTileChannels : lane_channels(job, kRowItems);
  const auto kernel = channels_last ? im2col_channels_kernel<Value, Column>
                      : items > 1   ? im2col_joined_kernel<Value, Column, kRowItems>
                                    : im2col_joined_kernel<Value, Column, 1>;
  const unsigned blocks = cut_joined(job, channels_last ? 32 : kRowThreads * kPair<Column>, items, 1);
  if (blocks == 0) return false;
  launch_kernel("im2col", kernel, launch, blocks, kRowThreads, job, static_cast<const Value*>(y), static_cast<Column*>(columns));
  return true;
}

}  // namespace

int lane_channels(const RowsJob& job, int items) {
  const std::int64_t phases = std::int64_t(job.d.phases.value) * job.h.phases.value;
  const bool enough = job.positions * phases * ceil_div(job.channels, items) >= kFewLanes;
  return enough && 2 * job.channels > items ? items : 1;
}

unsigned cut_joined(RowsJob& job, int tile, int channels, int phases) {
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

bool im2col_joined(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* y, void* columns) {
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)             \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) \
    return launch_joined<Value, Column>(launch, job, y, columns);
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
