// col2im at memory speed, for 16-bit and 32-bit floats: see rows.cuh for how units and positions are shared out.
//
// Planar y: a lane owns kPairs neighbouring units, kItems times 32 lanes apart, kPhases neighbouring outputs of each, and is
// their only writer. Lanes own neighbouring units, so that every tap is one run of pixels a warp and the outputs of a warp are
// runs too: stored as they are where a lane's run is one aligned access, else turned round through shared memory so that lanes
// store neighbours. Channels-last y: a block owns 32 units for kTileChannels channels, kTileChannels / kWarps of them a warp, and
// turns the outputs round through shared memory, so that columns are read along pixels and y is written along channels. Taps are
// summed in ascending order; a row outside the input is skipped, a pixel outside it adds 0.
#include "activation.cuh"
#include "rows.cuh"

namespace upfold::cuda {

// A unit of a lane: its coordinates, and where the columns of its channel have the pixel of these coordinates.
template <typename Column>
struct Unit {
  const Column* source;
  std::int32_t d, h, w;
  bool live;  // false: nothing is read or written
};

// sums[(item * kPairs + pair) * kPhases + r] over the taps of phases rd, rh and phase + r; pairs are neighbouring units. Taps and
// their distances are those of the block, so that a lane adds one offset to an address and tests one coordinate for each value.
template <int kItems, int kPairs, int kPhases, typename Column>
UPFOLD_DEVICE void gather_units(const RowsJob& job, std::uint32_t rd, std::uint32_t rh, std::int32_t phase,
                                const Unit<Column> (&units)[kItems], float (&sums)[kItems * kPairs * kPhases]) {
  const std::int32_t in_h = std::int32_t(job.h.in_count.value), in_w = std::int32_t(job.w.in_count.value);
  std::int32_t id = job.d.first_in[rd];
  for (std::int32_t kd = job.d.first_tap[rd]; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    std::int32_t ih = job.h.first_in[rh];
    for (std::int32_t kh = job.h.first_tap[rh]; kh < job.h.kernel; kh += job.h.tap_step, ih -= job.h.in_step) {
      std::uint32_t limits[kItems];
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const bool inside = units[item].live && std::uint32_t(units[item].d + id) < job.d.in_count.value &&
                            std::uint32_t(units[item].h + ih) < job.h.in_count.value;
        limits[item] = inside ? std::uint32_t(in_w) : 0;
      }
      const std::int64_t row = std::int64_t((kd * job.h.kernel + kh) * job.w.kernel) * job.row_stride + (id * in_h + ih) * in_w;
      std::int32_t step = 0, back = 0;
#pragma unroll(kItems* kPairs* kPhases > 4 ? 1 : 2)
      for (std::int32_t tap = 0; tap < job.w.most_taps; ++tap, step += job.w.tap_step, back += job.w.in_step) {
        Column values[kItems * kPairs * kPhases];
#pragma unroll
        for (int r = 0; r < kPhases; ++r) {
          const bool exists = phase + r < std::int32_t(job.w.stride.value);
          const std::int32_t kw = (exists ? job.w.first_tap[phase + r] : job.w.kernel) + step;
          const std::int32_t iw = (exists ? job.w.first_in[phase + r] : 0) - back;
          const bool is_tap = kw < job.w.kernel;
          const std::int64_t at = row + kw * job.row_stride + iw;
#pragma unroll
          for (int item = 0; item < kItems; ++item) {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
              const bool inside = is_tap && std::uint32_t(units[item].w + iw + pair) < limits[item];
              values[(item * kPairs + pair) * kPhases + r] = inside ? units[item].source[at + pair] : Column{};
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kItems * kPairs * kPhases; ++i) sums[i] += widen(values[i]);
      }
    }
  }
}

// The outputs of one lane for one channel: kRun neighbours, `count` of which exist; all of them are one aligned access.
template <typename Value, int kRun>
UPFOLD_DEVICE void store_run(Value* y, std::int32_t y_w, std::int32_t count, const float* sums) {
  if (count == kRun) {
    Pack<Value, kRun> wide;
#pragma unroll
    for (int i = 0; i < kRun; ++i) wide.v[i] = Narrow<Value>::from(sums[i]);
    *reinterpret_cast<Pack<Value, kRun>*>(y) = wide;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    if (i < count) y[std::int64_t(i) * y_w] = Narrow<Value>::from(sums[i]);
  }
}

// How many elements of shared memory a warp needs to turn runs of kRun round: one more for every 32, against bank conflicts.
template <int kRun>
constexpr int kStage = 33 * kRun;
UPFOLD_DEVICE std::int32_t staged_at(std::int32_t i) { return i + i / 32; }

// Where the outputs of a lane's unit lie: `count` neighbours, the first at `offset`.
struct Run {
  std::int64_t offset;
  std::int32_t count;
};

// The runs of a warp, each `length` neighbours long, stored so that neighbouring lanes store neighbouring outputs. The whole warp
// takes part; `stage` is the warp's own.
template <typename Value, int kRun>
UPFOLD_DEVICE void store_staged(Value* stage, Value* y, std::int32_t y_w, const Run& run, std::int32_t length,
                                const float* sums) {
  const std::int32_t lane = std::int32_t(threadIdx.x % 32);
  const std::uint32_t scale = 65536u / std::uint32_t(length) + 1;  // exact for the quotients of numbers below 256
  __syncwarp();                                                    // what was staged before has been read
#pragma unroll
  for (int r = 0; r < kRun; ++r) {
    if (r < length) stage[staged_at(lane * length + r)] = Narrow<Value>::from(sums[r]);
  }
  __syncwarp();  // and this is complete
#pragma unroll
  for (int slot = 0; slot < kRun; ++slot) {
    if (slot >= length) break;
    const std::int32_t i = slot * 32 + lane, owner = std::int32_t(std::uint32_t(i) * scale >> 16), r = i - owner * length;
    const std::int64_t offset = __shfl_sync(~0u, static_cast<long long>(run.offset), owner) + std::int64_t(r) * y_w;
    if (r < __shfl_sync(~0u, run.count, owner)) y[offset] = stage[staged_at(i)];
  }
}

// Adds a channel's bias to its sums and applies the activation.
template <int kCount>
UPFOLD_DEVICE void finish_run(const RowsJob& job, float bias, float* sums) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += bias;
  if (job.activation == Activation::kNone) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = finish(job.activation, job.slope, sums[i]);
}

// Lanes store what they own where a run is a single aligned access, else the warp turns its runs round. The whole warp takes
// part.
template <typename Value, int kPhases, int kItems, int kPairs>
UPFOLD_DEVICE void store_lane(const RowsJob& job, Value* y, const Run (&runs)[kItems], std::int32_t length,
                              const float (&sums)[kItems * kPairs * kPhases]) {
  constexpr int kRun = kPairs * kPhases;
  constexpr bool kOneAccess = kRun * int(sizeof(Value)) <= 16;
  const bool apart = std::int32_t(job.w.stride.value) != kPhases || job.vector < kRun;
  const bool staged = kRun > 1 && (!kOneAccess || apart);
  if constexpr (kRun > 1) {
    __shared__ Value stages[kWarps][kStage<kRun>];
    if (staged) {
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        store_staged<Value, kRun>(stages[threadIdx.x / 32], y, job.y_w, runs[item], length, sums + item * kRun);
      }
    }
  }
  if constexpr (kOneAccess) {
    if (staged) return;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (runs[item].count > 0) store_run<Value, kRun>(y + runs[item].offset, job.y_w, runs[item].count, sums + item * kRun);
    }
  }
}

template <typename Value, typename Column, int kPhases, int kItems, int kPairs>
__global__ void __launch_bounds__(kRowThreads, kItems > 2 ? 4 : 1)
    col2im_rows_kernel(const RowsJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  constexpr int kRun = kPairs * kPhases;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t phase = std::int32_t(take(job.chunks, rest)) * kPhases, stride = std::int32_t(job.w.stride.value);
  const std::uint32_t rh = take(job.h.phases, rest), rd = take(job.d.phases, rest), tile = take(job.tiles, rest);
  const std::int32_t length = kPairs == 1 && stride - phase < kRun ? stride - phase : kRun;
  const std::uint32_t first = (tile * kWarps + threadIdx.x / 32) * 32 * kItems + threadIdx.x % 32;
  Unit<Column> units[kItems];
  Run runs[kItems];
  std::int64_t channels[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const std::uint32_t position = (first + item * 32) * kPairs;
    const Place place = place_of(job, position);
    const std::int64_t channel = channels[item] = rest + place.channel_tile;
    const std::int32_t od = std::int32_t(place.d * job.d.stride.value + rd), oh = std::int32_t(place.h * job.h.stride.value + rh),
                       ow = std::int32_t(place.w) * stride + phase, outs = job.w.out_count - ow;
    const bool live = position < job.positions && od < job.d.out_count && oh < job.h.out_count && outs > 0;
    const std::int32_t pixel = (std::int32_t(place.d) * std::int32_t(job.h.in_count.value) + std::int32_t(place.h)) *
                                   std::int32_t(job.w.in_count.value) +
                               std::int32_t(place.w);
    units[item] = {columns + place.n * job.sample_stride + channel * job.channel_stride + pixel, std::int32_t(place.d),
                   std::int32_t(place.h), std::int32_t(place.w), live};
    runs[item] = {(job.n_begin + place.n) * job.y_n + (job.oc_begin + channel) * job.y_c + (job.d.out_begin + od) * job.y_d +
                      (job.h.out_begin + oh) * job.y_h + (job.w.out_begin + std::int64_t(ow)) * job.y_w,
                  live ? (outs < length ? outs : length) : 0};
  }
  wait_for_predecessor();
  float added[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item)
    added[item] = units[item].live && bias != nullptr ? widen(bias[job.oc_begin + channels[item]]) : 0.0f;
  float sums[kItems * kRun] = {};
  gather_units<kItems, kPairs, kPhases>(job, rd, rh, phase, units, sums);
#pragma unroll
  for (int item = 0; item < kItems; ++item) finish_run<kRun>(job, added[item], sums + item * kRun);
  store_lane<Value, kPhases, kItems, kPairs>(job, y, runs, length, sums);
}

template <typename Value, typename Column, int kPhases>
__global__ void __launch_bounds__(kRowThreads)
    col2im_channels_kernel(const RowsJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  constexpr int kItems = kTileChannels / kWarps;
  __shared__ Value outputs[32 * kPhases][kTileChannels + 1];
  __shared__ std::int64_t begins[32];  // offset in y of each lane's first output
  __shared__ std::int32_t counts[32];  // and how many outputs it has
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_channel = std::int32_t(take(job.channel_tiles, rest)) * kTileChannels;
  const std::int32_t left = job.channels - first_channel, channels = left < kTileChannels ? left : kTileChannels;
  const std::int32_t phase = std::int32_t(take(job.chunks, rest)) * kPhases, stride = std::int32_t(job.w.stride.value);
  const std::uint32_t rh = take(job.h.phases, rest), rd = take(job.d.phases, rest);
  const std::uint32_t position = rest * 32 + std::uint32_t(lane);
  const Place place = place_of(job, position);
  const std::int32_t od = std::int32_t(place.d * job.d.stride.value + rd), oh = std::int32_t(place.h * job.h.stride.value + rh),
                     ow = std::int32_t(place.w) * stride + phase;
  const bool live = position < job.positions && od < job.d.out_count && oh < job.h.out_count && ow < job.w.out_count;
  wait_for_predecessor();
  if (live) {
    const std::int32_t pixel = (std::int32_t(place.d) * std::int32_t(job.h.in_count.value) + std::int32_t(place.h)) *
                                   std::int32_t(job.w.in_count.value) +
                               std::int32_t(place.w);
    Unit<Column> units[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      // A channel beyond the last reads the last one again, and is not written.
      const std::int32_t c = warp + item * kWarps;
      const std::int64_t channel = first_channel + (c < channels ? c : channels - 1);
      units[item] = {columns + place.n * job.sample_stride + channel * job.channel_stride + pixel, std::int32_t(place.d),
                     std::int32_t(place.h), std::int32_t(place.w), true};
    }
    float sums[kItems * kPhases] = {};
    gather_units<kItems, 1, kPhases>(job, rd, rh, phase, units, sums);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const std::int32_t c = warp + item * kWarps;
      finish_run<kPhases>(job, bias == nullptr || c >= channels ? 0.0f : widen(bias[job.oc_begin + first_channel + c]),
                          sums + item * kPhases);
#pragma unroll
      for (int r = 0; r < kPhases; ++r) outputs[lane * kPhases + r][c] = Narrow<Value>::from(sums[item * kPhases + r]);
    }
  }
  if (warp == 0) {
    const std::int32_t outs = job.w.out_count - ow, phases = stride - phase < kPhases ? stride - phase : kPhases;
    counts[lane] = live ? (outs < phases ? outs : phases) : 0;
    begins[lane] = (job.n_begin + place.n) * job.y_n + (job.d.out_begin + std::int64_t(od)) * job.y_d +
                   (job.h.out_begin + std::int64_t(oh)) * job.y_h + (job.w.out_begin + std::int64_t(ow)) * job.y_w;
  }
  __syncthreads();  // the lanes' outputs, begins and counts are read by other warps
  y += (job.oc_begin + first_channel) * job.y_c;
  const bool full = channels == kTileChannels;  // then nothing is divided
  for (std::int32_t i = std::int32_t(threadIdx.x); i < 32 * kPhases * channels; i += kRowThreads) {
    const std::int32_t at = full ? i / kTileChannels : i / channels, c = i - at * channels;
    const std::int32_t owner = at / kPhases, r = at % kPhases;
    if (r < counts[owner]) y[begins[owner] + std::int64_t(r) * job.y_w + c * job.y_c] = outputs[at][c];
  }
}

// Units of a lane, so that enough loads are in flight, and long runs of few rows: the memory is slower at short runs of many.
template <int kPhases>
constexpr int kRowItems = kPhases == 1 ? 4 : 8 / kPhases;
template <int kPhases>
constexpr int kPairItems = kPhases == 4 ? 1 : 4 / kPhases;

#define UPFOLD_INSTANTIATE_ROWS(Value, Column, kPhases, kItems, kPairs)                                             \
  template __global__ void col2im_rows_kernel<Value, Column, kPhases, kItems, kPairs>(const RowsJob, const Column*, \
                                                                                      const Value*, Value*);
#define UPFOLD_INSTANTIATE_PHASES(Value, Column, kPhases)                \
  UPFOLD_INSTANTIATE_ROWS(Value, Column, kPhases, 1, 1)                  \
  UPFOLD_INSTANTIATE_ROWS(Value, Column, kPhases, kRowItems<kPhases>, 1) \
  template __global__ void col2im_channels_kernel<Value, Column, kPhases>(const RowsJob, const Column*, const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 1)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 2)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 4)                  \
  UPFOLD_INSTANTIATE_ROWS(Value, Column, 8, 1, 1)
#define UPFOLD_INSTANTIATE_PAIRS(Value)                      \
  UPFOLD_INSTANTIATE_ROWS(Value, Value, 1, kPairItems<1>, 2) \
  UPFOLD_INSTANTIATE_ROWS(Value, Value, 2, kPairItems<2>, 2) \
  UPFOLD_INSTANTIATE_ROWS(Value, Value, 4, kPairItems<4>, 2)
UPFOLD_INSTANTIATE_PAIRS(__half)
UPFOLD_INSTANTIATE_PAIRS(__nv_bfloat16)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"

namespace upfold::cuda {
namespace {

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
  auto kernel = col2im_rows_kernel<Value, Column, kPhases, 1, 1>;
  int items = lane_items(job, kRowItems<kPhases>), pairs = 1;
  if (items > 1) kernel = col2im_rows_kernel<Value, Column, kPhases, kRowItems<kPhases>, 1>;
  if constexpr (kPair<Column> > 1 && kPhases <= 4) {
    if (items > 1 && job.w.stride.value == kPhases && job.w.units.value % kPair<Column> == 0) {
      kernel = col2im_rows_kernel<Value, Column, kPhases, kPairItems<kPhases>, kPair<Column>>;
      items = kPairItems<kPhases>, pairs = kPair<Column>;
    }
  }
  const unsigned blocks = cut(job, kRowThreads * pairs * items, 1, kPhases);
  if (blocks == 0) return false;
  launch_kernel("col2im", kernel, launch, blocks, kRowThreads, job, static_cast<const Column*>(columns),
                static_cast<const Value*>(bias), static_cast<Value*>(y));
  return true;
}

template <typename Value, typename Column, int kPhases>
bool launch_channels(const Launch& launch, RowsJob& job, const void* columns, const void* bias, void* y) {
  const unsigned blocks = cut(job, 32, kTileChannels, kPhases);
  if (blocks == 0) return false;
  launch_kernel("col2im", col2im_channels_kernel<Value, Column, kPhases>, launch, blocks, kRowThreads, job,
                static_cast<const Column*>(columns), static_cast<const Value*>(bias), static_cast<Value*>(y));
  return true;
}

template <typename Value, typename Column>
bool launch_any(const Launch& launch, RowsJob& job, const void* columns, const void* bias, void* y) {
  const auto stride = job.w.stride.value;
  if (job.y_c == 1 && job.channels > 1) {
    const auto launch_stride = stride == 1   ? launch_channels<Value, Column, 1>
                               : stride == 2 ? launch_channels<Value, Column, 2>
                                             : launch_channels<Value, Column, 4>;
    return launch_stride(launch, job, columns, bias, y);
  }
  const auto launch_stride = stride == 1   ? launch_rows<Value, Column, 1>
                             : stride == 2 ? launch_rows<Value, Column, 2>
                             : stride <= 4 ? launch_rows<Value, Column, 4>
                                           : launch_rows<Value, Column, 8>;
  return launch_stride(launch, job, columns, bias, y);
}

}  // namespace

bool col2im_rows(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns,
                 const void* bias, void* y) {
  RowsJob job{};
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                 \
  if (p.dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) { \
    if (!make_rows_job(p, block, true, job)) return false;                  \
    job.vector = neighbours(p, block, y, sizeof(Value));                    \
    return launch_any<Value, Column>(launch, job, columns, bias, y);        \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
