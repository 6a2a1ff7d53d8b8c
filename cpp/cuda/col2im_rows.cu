// col2im at memory speed, for 16-bit and 32-bit floats, where y is planar and its rows are long: see rows.cuh.
//
// A lane owns kItems * kPair units of one row (n, oc, od, oh), kPhases neighbouring outputs of each, and is their only writer.
// Lanes own neighbouring units, so that every tap is one run of pixels a warp and the outputs of a warp are one run too. Taps are
// summed in ascending order; a row outside the input is skipped, a pixel outside it adds 0.
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

// Items lie 32 lanes apart in the row.
template <int kItems, int kPairs, int kPhases, typename Column>
UPFOLD_DEVICE void gather_units(const RowsJob& job, const UnitRows<kPhases>& rows, const Column* columns,
                                float (&sums)[kItems * kPairs * kPhases]) {
  const std::int32_t in_h = std::int32_t(job.h.in_count.value), in_w = std::int32_t(job.w.in_count.value);
  std::int32_t id = rows.id;
  for (std::int32_t kd = rows.kd; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    if (std::uint32_t(id) >= job.d.in_count.value) continue;
    std::int32_t ih = rows.ih;
    for (std::int32_t kh = rows.kh; kh < job.h.kernel; kh += job.h.tap_step, ih -= job.h.in_step) {
      if (std::uint32_t(ih) >= job.h.in_count.value) continue;
      const std::int32_t offset = kd * job.tap_d + kh * job.tap_h + (id * in_h + ih) * in_w;
      std::int32_t step = 0, back = 0;
#pragma unroll 2
      for (std::int32_t tap = 0; tap < job.w.most_taps; ++tap, step += job.w.tap_step, back += job.w.in_step) {
        Column values[kItems * kPairs * kPhases];
#pragma unroll
        for (int r = 0; r < kPhases; ++r) {
          const std::int32_t kw = rows.first_tap[r] + step, iw = rows.first_in[r] - back;
          const std::uint32_t limit = kw < job.w.kernel ? in_w : 0;
          const std::int64_t at = offset + kw * job.tap_w + iw;
#pragma unroll
          for (int item = 0; item < kItems; ++item) {
            const Column* const source = columns + at;
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
              const int beside = item * 32 * kPairs + pair;
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
  std::uint32_t rest = blockIdx.x * kWarps + threadIdx.x / 32;
  if (rest >= job.warps) return;
  const std::int32_t unit = std::int32_t((take(job.tiles, rest) * kItems * 32 + threadIdx.x % 32) * kPairs);
  if (unit >= std::int32_t(job.w.units.value)) return;
  const std::int32_t phase = std::int32_t(take(job.chunks, rest)) * kPhases;
  const std::uint32_t oh = take(job.h.out_count, rest), od = take(job.d.out_count, rest), oc = take(job.channel_rows, rest);
  const Column* const source = columns + rest * job.sample_stride + oc * job.channel_stride;
  float sums[kItems * kPairs * kPhases] = {};
  gather_units<kItems, kPairs, kPhases>(job, unit_rows<kPhases>(job, od, oh, phase, unit), source, sums);
  const std::int64_t channel = job.oc_begin + oc;
  y += (job.n_begin + rest) * job.y_n + channel * job.y_c + (job.d.out_begin + std::int64_t(od)) * job.y_d +
       (job.h.out_begin + std::int64_t(oh)) * job.y_h + std::int64_t(job.w.out_begin) * job.y_w;
  finish_all(job, bias == nullptr ? 0.0f : widen(bias[channel]), sums);
  store_items<Value, kItems, kPairs * kPhases, kPhases>(job, y, unit, phase, sums);
}

// Items of a lane, so that enough loads are in flight and what a row costs is shared by enough outputs.
template <int kPhases>
constexpr int kRowItems = kPhases == 4 ? 2 : 4;

#define UPFOLD_INSTANTIATE_PHASES(Value, Column, kPhases)                                                               \
  template __global__ void col2im_rows_kernel<Value, Column, kPhases, kRowItems<kPhases>>(const RowsJob, const Column*, \
                                                                                          const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 1)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 2)                  \
  UPFOLD_INSTANTIATE_PHASES(Value, Column, 4)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Value, typename Column, int kPhases>
bool launch_rows(const Launch& launch, RowsJob& job, const void* columns, const void* bias, void* y) {
  constexpr int kItems = kRowItems<kPhases>;
  if (!spread_rows(job, std::int64_t(job.d.out_count.value) * job.h.out_count.value, 32 * kItems * kPair<Column>, kPhases))
    return false;
  launch_kernel("col2im", col2im_rows_kernel<Value, Column, kPhases, kItems>, launch, (job.warps + kWarps - 1) / kWarps,
                kRowThreads, job, static_cast<const Column*>(columns), static_cast<const Value*>(bias), static_cast<Value*>(y));
  return true;
}

}  // namespace

bool col2im_rows(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                 void* y) {
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                                           \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) {                             \
    if (job.w.stride.value == 1) return launch_rows<Value, Column, 1>(launch, job, columns, bias, y); \
    if (job.w.stride.value == 2) return launch_rows<Value, Column, 2>(launch, job, columns, bias, y); \
    return launch_rows<Value, Column, 4>(launch, job, columns, bias, y);                              \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
