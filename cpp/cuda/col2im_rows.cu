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
                                Sum<Column> (&sums)[kItems][kPairs][kPhases]) {
  const std::int32_t in_h = std::int32_t(job.h.in_count.value), in_w = std::int32_t(job.w.in_count.value);
  std::int32_t id = rows.id;
  for (std::int32_t kd = rows.kd; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    if (std::uint32_t(id) >= job.d.in_count.value) continue;
    std::int32_t ih = rows.ih;
    for (std::int32_t kh = rows.kh; kh < job.h.kernel; kh += job.h.tap_step, ih -= job.h.in_step) {
      if (std::uint32_t(ih) >= job.h.in_count.value) continue;
      const std::int32_t offset = (kd * job.h.kernel + kh) * job.w.kernel * job.row_stride + (id * in_h + ih) * in_w;
      std::int32_t back = 0;
#pragma unroll 2
      for (std::int32_t step = 0; step < job.w.kernel; step += job.w.tap_step, back += job.w.in_step) {
        Column values[kItems][kPairs][kPhases];
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
              values[item][pair][r] = std::uint32_t(iw + beside) < limit ? source[beside] : Column{};
            }
          }
        }
#pragma unroll
        for (int item = 0; item < kItems; ++item)
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
            for (int r = 0; r < kPhases; ++r) add(sums[item][pair][r], widen(values[item][pair][r]));
      }
    }
  }
}

// Writes kCount neighbours along w, as one access where they may and all of them exist.
template <typename Value, int kCount>
UPFOLD_DEVICE void store_run(const RowsJob& job, Value* y, std::int32_t ow, const Pack<Value, kCount>& values) {
  const std::int32_t left = std::int32_t(job.w.out_count.value) - ow;
  if (job.vector >= kCount && left >= kCount) {
    *reinterpret_cast<Pack<Value, kCount>*>(y + ow) = values;
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < left) y[std::int64_t(ow + i) * job.y_w] = values.v[i];
  }
}

// The outputs of one lane in a row, from its sums. Where the stride is kPhases, the units of a pair are one run.
template <int kItems, int kPairs, int kPhases, typename Value, typename Column>
UPFOLD_DEVICE void store_units(const RowsJob& job, Value* y, float bias, std::int32_t unit, std::int32_t phase,
                               Sum<Column> (&sums)[kItems][kPairs][kPhases]) {
  const std::int32_t stride = std::int32_t(job.w.stride.value);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    Pack<Value, kPairs * kPhases> run;
#pragma unroll
    for (int i = 0; i < kPairs * kPhases; ++i) {
      const float sum = sums[item][i / kPhases][i % kPhases] + bias;
      run.v[i] = Narrow<Value>::from(finish(job.activation, job.slope, sum));
    }
    const std::int32_t ow = (unit + item * 32 * kPairs) * stride + phase;
    if (stride == kPhases) {
      store_run(job, y, ow, run);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kPairs * kPhases; ++i) {
      const std::int32_t at = ow + i / kPhases * stride + i % kPhases;
      if (phase + i % kPhases < stride && at < std::int32_t(job.w.out_count.value)) y[std::int64_t(at) * job.y_w] = run.v[i];
    }
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
  Sum<Column> sums[kItems][kPairs][kPhases] = {};
  gather_units<kItems, kPairs, kPhases, false>(job, unit_rows<kPhases>(job, od, oh, phase, place.unit), sources, sums);
  const std::int64_t channel = job.oc_begin + oc;
  y += (job.n_begin + rest) * job.y_n + channel * job.y_c + (job.d.out_begin + std::int64_t(od)) * job.y_d +
       (job.h.out_begin + std::int64_t(oh)) * job.y_h + std::int64_t(job.w.out_begin) * job.y_w;
  const float added = bias == nullptr ? 0.0f : widen(bias[channel]);
  store_units<kItems, kPairs, kPhases, Value, Column>(job, y, added, place.unit, phase, sums);
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
    Sum<Column> sums[kItems][1][kPhases] = {};
    gather_units<kItems, 1, kPhases, true>(job, unit_rows<kPhases>(job, od, oh, phase, place.unit), sources, sums);
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const std::int32_t c = std::int32_t(warp) + item * kWarps;
      const float added = bias == nullptr || c >= channels ? 0.0f : widen(bias[job.oc_begin + first_channel + c]);
#pragma unroll
      for (int r = 0; r < kPhases; ++r) {
        outputs[lane * kPhases + r][c] = Narrow<Value>::from(finish(job.activation, job.slope, sums[item][0][r] + added));
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

// The pairs of types (of y and of the columns) that the kernels for rows take.
#define UPFOLD_ROW_TYPES(DO)                             \
  DO(kFloat32, kFloat32, float, float)                   \
  DO(kFloat16, kFloat16, __half, __half)                 \
  DO(kFloat16, kFloat32, __half, float)                  \
  DO(kBFloat16, kBFloat16, __nv_bfloat16, __nv_bfloat16) \
  DO(kBFloat16, kFloat32, __nv_bfloat16, float)

// Items of a lane: 8 outputs for one or two phases, so that as many loads are in flight.
template <typename Column, int kPhases>
constexpr int kRowItems = (kPhases == 4 ? 2 : 4) / kPair<Column>;

#define UPFOLD_INSTANTIATE_PHASES(Value, Column, kPhases)                                                             \
  template __global__ void col2im_rows_kernel<Value, Column, kPhases, 1>(const RowsJob, const Column*, const Value*, Value*); \
  template __global__ void col2im_channels_kernel<Value, Column, kPhases>(const RowsJob, const Column*, const Value*, Value*);
#define UPFOLD_INSTANTIATE_ITEMS(Value, Column, kPhases) \
  template __global__ void col2im_rows_kernel<Value, Column, kPhases, kRowItems<Column, kPhases>>( \
      const RowsJob, const Column*, const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 1)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 2)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 4)                  \
  UPFOLD_INSTANTIATE_ITEMS(Value, Column, 1)                   \
  UPFOLD_INSTANTIATE_ITEMS(Value, Column, 2)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)
template __global__ void col2im_rows_kernel<float, float, 4, 2>(const RowsJob, const float*, const float*, float*);
template __global__ void col2im_rows_kernel<__half, float, 4, 2>(const RowsJob, const float*, const __half*, __half*);
template __global__ void col2im_rows_kernel<__nv_bfloat16, float, 4, 2>(const RowsJob, const float*, const __nv_bfloat16*,
                                                                        __nv_bfloat16*);

}  // namespace upfold::cuda
