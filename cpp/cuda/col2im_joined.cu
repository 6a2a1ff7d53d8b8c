// col2im at memory speed, for 16-bit and 32-bit floats, where rows are short or y is channels-last: see rows.cuh.
//
// Planar y: a lane owns kPairs neighbouring units of kItems channels, kPhases neighbouring outputs of each unit, and is their
// only writer. Every tap is one run of pixels a warp and the outputs of a warp are runs too: stored as they are where a lane's
// run is one aligned access, else turned round through shared memory so that lanes store neighbours. Channels-last y: a block
// owns 32 units for kTileChannels channels, kTileChannels / kWarps of them a warp, and turns the outputs round through shared
// memory, so that columns are read along pixels and y is written along channels. Taps are summed in ascending order; what lies
// outside the input adds 0.
#include "activation.cuh"
#include "joined.cuh"

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
      const std::int64_t row = kd * job.tap_d + kh * job.tap_h + (id * in_h + ih) * in_w;
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
          const std::int64_t at = row + kw * job.tap_w + iw;
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

// Where the outputs of a lane lie: `count` of a run in `channels` of the kItems channels, the first at `offset`.
struct Run {
  std::int64_t offset;
  std::int32_t count, channels;
};

// The runs of a warp, each `length` neighbours long, stored so that neighbouring lanes store neighbouring outputs. The whole warp
// takes part; `stage` is the warp's own.
template <typename Value, int kItems, int kRun>
UPFOLD_DEVICE void store_staged(const RowsJob& job, Value* stage, Value* y, const Run& run, std::int32_t length,
                                const float (&sums)[kItems * kRun]) {
  const std::int32_t lane = std::int32_t(threadIdx.x % 32);
  const std::uint32_t scale = 65536u / std::uint32_t(length) + 1;  // exact for the quotients of numbers below 256
  std::int64_t offsets[kRun];
  std::int32_t channels[kRun];
#pragma unroll
  for (int slot = 0; slot < kRun; ++slot) {
    if (slot >= length) break;
    const std::int32_t i = slot * 32 + lane, owner = std::int32_t(std::uint32_t(i) * scale >> 16), r = i - owner * length;
    offsets[slot] = __shfl_sync(~0u, static_cast<long long>(run.offset), owner) + std::int64_t(r) * job.y_w;
    const std::int32_t count = __shfl_sync(~0u, run.count, owner), of_owner = __shfl_sync(~0u, run.channels, owner);
    channels[slot] = r < count ? of_owner : 0;
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    __syncwarp();  // the stage of the channel before has been read
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      if (r < length) stage[staged_at(lane * length + r)] = Narrow<Value>::from(sums[item * kRun + r]);
    }
    __syncwarp();  // and this one is complete
#pragma unroll
    for (int slot = 0; slot < kRun; ++slot) {
      if (slot >= length) break;
      if (item < channels[slot]) y[offsets[slot]] = stage[staged_at(slot * 32 + lane)];
      offsets[slot] += job.y_c;
    }
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

// The outputs of a lane's unit from its first phase on: where they begin, channels left out, and how many there are, 0 where the
// position does not exist.
struct Output {
  std::int64_t offset;
  std::int32_t count;
};

UPFOLD_DEVICE Output output_of_place(const RowsJob& job, const Place& place, std::uint32_t rd, std::uint32_t rh,
                                     std::int32_t phase, std::uint32_t position) {
  const std::uint32_t od = place.d * job.d.stride.value + rd, oh = place.h * job.h.stride.value + rh;
  const std::int32_t ow = std::int32_t(place.w * job.w.stride.value) + phase, outs = std::int32_t(job.w.out_count.value) - ow;
  const bool live = position < job.positions && od < job.d.out_count.value && oh < job.h.out_count.value && outs > 0;
  return {(job.n_begin + place.n) * job.y_n + (job.d.out_begin + std::int64_t(od)) * job.y_d +
              (job.h.out_begin + std::int64_t(oh)) * job.y_h + (job.w.out_begin + std::int64_t(ow)) * job.y_w,
          live ? outs : 0};
}

template <typename Column>
UPFOLD_DEVICE Unit<Column> unit_of_place(const RowsJob& job, const Place& place, const Column* columns, std::int64_t channel,
                                         bool live) {
  const std::uint32_t pixel = (place.d * job.h.in_count.value + place.h) * job.w.in_count.value + place.w;
  return {columns + place.n * job.sample_stride + channel * job.channel_stride + std::int32_t(pixel), std::int32_t(place.d),
          std::int32_t(place.h), std::int32_t(place.w), live};
}

// Lanes store what they own where a run is a single aligned access, else the warp turns its runs round. The whole warp takes
// part.
template <typename Value, int kPhases, int kItems, int kPairs>
UPFOLD_DEVICE void store_lane(const RowsJob& job, Value* y, const Run& run, std::int32_t length,
                              const float (&sums)[kItems * kPairs * kPhases]) {
  constexpr int kRun = kPairs * kPhases;
  constexpr bool kOneAccess = kRun * int(sizeof(Value)) <= 16;
  const bool apart = std::int32_t(job.w.stride.value) != kPhases || job.vector < kRun;
  const bool staged = kRun > 1 && (!kOneAccess || apart);
  if constexpr (kRun > 1) {
    __shared__ Value stages[kWarps][kStage<kRun>];
    if (staged) store_staged<Value, kItems, kRun>(job, stages[threadIdx.x / 32], y, run, length, sums);
  }
  if constexpr (kOneAccess) {
    if (staged) return;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (item < run.channels) store_run<Value, kRun>(y + run.offset + item * job.y_c, job.y_w, run.count, sums + item * kRun);
    }
  }
}

template <typename Value, typename Column, int kPhases, int kItems, int kPairs>
__global__ void __launch_bounds__(kRowThreads)
    col2im_joined_kernel(const RowsJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  constexpr int kRun = kPairs * kPhases;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t phase = std::int32_t(take(job.chunks, rest)) * kPhases, stride = std::int32_t(job.w.stride.value);
  const std::uint32_t rh = take(job.h.phases, rest), rd = take(job.d.phases, rest), tile = take(job.tiles, rest);
  const std::uint32_t position = (tile * kRowThreads + threadIdx.x) * kPairs;
  const Place place = place_of(job, position);
  const std::int32_t channel = std::int32_t(rest + place.channel_tile) * kItems;
  const std::int32_t length = kPairs == 1 && stride - phase < kRun ? stride - phase : kRun;
  const Output output = output_of_place(job, place, rd, rh, phase, position);
  Run run{0, 0, 0};
  Unit<Column> units[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    // A channel beyond the last reads the last one again, and is not written.
    const std::int32_t c = channel + item < job.channels ? channel + item : job.channels - 1;
    units[item] = unit_of_place(job, place, columns, c, output.count > 0);
  }
  if (output.count > 0) {
    run.channels = job.channels - channel < kItems ? job.channels - channel : kItems;
    run.count = output.count < length ? output.count : length;
    run.offset = output.offset + (job.oc_begin + channel) * job.y_c;
  }
  float sums[kItems * kRun] = {};
  gather_units<kItems, kPairs, kPhases>(job, rd, rh, phase, units, sums);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const bool added = bias != nullptr && item < run.channels;
    finish_run<kRun>(job, added ? widen(bias[job.oc_begin + channel + item]) : 0.0f, sums + item * kRun);
  }
  store_lane<Value, kPhases, kItems, kPairs>(job, y, run, length, sums);
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
  const Output output = output_of_place(job, place, rd, rh, phase, position);
  if (output.count > 0) {
    Unit<Column> units[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      // A channel beyond the last reads the last one again, and is not written.
      const std::int32_t c = warp + item * kWarps;
      units[item] = unit_of_place(job, place, columns, first_channel + (c < channels ? c : channels - 1), true);
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
    const std::int32_t phases = stride - phase < kPhases ? stride - phase : kPhases;
    counts[lane] = output.count < phases ? output.count : phases;
    begins[lane] = output.offset;
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

// Channels of a lane, so that enough loads are in flight and what a position costs is shared by enough outputs.
template <int kPhases>
constexpr int kRowItems = kPhases == 1 ? 4 : 8 / kPhases;
template <int kPhases>
constexpr int kPairItems = kPhases == 4 ? 1 : 4 / kPhases;

#define UPFOLD_INSTANTIATE_ROWS(Value, Column, kPhases, kItems, kPairs)                                               \
  template __global__ void col2im_joined_kernel<Value, Column, kPhases, kItems, kPairs>(const RowsJob, const Column*, \
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

template <typename Value, typename Column, int kPhases>
bool launch_joined(const Launch& launch, RowsJob& job, const void* columns, const void* bias, void* y) {
  auto kernel = col2im_joined_kernel<Value, Column, kPhases, 1, 1>;
  int items = lane_channels(job, kRowItems<kPhases>), pairs = 1;
  if (items > 1) kernel = col2im_joined_kernel<Value, Column, kPhases, kRowItems<kPhases>, 1>;
  if constexpr (kPair<Column> > 1 && kPhases <= 4) {
    if (items > 1 && job.w.stride.value == kPhases && job.w.units.value % kPair<Column> == 0) {
      kernel = col2im_joined_kernel<Value, Column, kPhases, kPairItems<kPhases>, kPair<Column>>;
      items = kPairItems<kPhases>, pairs = kPair<Column>;
    }
  }
  const unsigned blocks = cut_joined(job, kRowThreads * pairs, items, kPhases);
  if (blocks == 0) return false;
  launch_kernel("col2im", kernel, launch, blocks, kRowThreads, job, static_cast<const Column*>(columns),
                static_cast<const Value*>(bias), static_cast<Value*>(y));
  return true;
}

template <typename Value, typename Column, int kPhases>
bool launch_channels(const Launch& launch, RowsJob& job, const void* columns, const void* bias, void* y) {
  const unsigned blocks = cut_joined(job, 32, kTileChannels, kPhases);
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
  const auto launch_stride = stride == 1   ? launch_joined<Value, Column, 1>
                             : stride == 2 ? launch_joined<Value, Column, 2>
                             : stride <= 4 ? launch_joined<Value, Column, 4>
                                           : launch_joined<Value, Column, 8>;
  return launch_stride(launch, job, columns, bias, y);
}

}  // namespace

bool col2im_joined(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                   void* y) {
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)             \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) \
    return launch_any<Value, Column>(launch, job, columns, bias, y);
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
