// im2col at memory speed, for 16-bit and 32-bit floats, where y is planar and the rows of the input are long: see rows.cuh.
//
// A lane owns kItems * kPair pixels of one pixel row (n, oc, id, ih) and writes them in the rows of all taps, so that y comes
// from memory once and from the nearest cache for the other taps. Lanes own neighbouring pixels: every store is one run.
// Positions outside y give 0.
#include "rows.cuh"

namespace upfold::cuda {

template <typename Value, typename Column, int kItems>
__global__ void __launch_bounds__(kRowThreads)
    im2col_rows_kernel(const RowsJob job, const Value* __restrict__ y, Column* __restrict__ columns) {
  constexpr int kPairs = kPair<Column>;
  std::uint32_t rest = blockIdx.x * kWarps + threadIdx.x / 32;
  if (rest >= job.warps) return;
  const std::int32_t unit = std::int32_t((take(job.tiles, rest) * kItems * 32 + threadIdx.x % 32) * kPairs);
  const std::int32_t pixels = std::int32_t(job.w.units.value) - unit;
  if (pixels <= 0) return;
  const std::uint32_t ih = take(job.h.in_count, rest), id = take(job.d.in_count, rest), oc = take(job.channel_rows, rest);
  const std::int32_t stride_w = std::int32_t(job.w.stride.value);
  const std::int32_t od = std::int32_t(id * job.d.stride.value) + job.d.origin;
  const std::int32_t oh = std::int32_t(ih * job.h.stride.value) + job.h.origin;
  const std::int32_t ow = unit * stride_w + job.w.origin;
  const Value* const image = y + (job.n_begin + rest) * job.y_n + (job.oc_begin + oc) * job.y_c;
  Column* target = columns + rest * job.sample_stride + oc * job.channel_stride +
                   (std::int64_t(id) * job.h.in_count.value + ih) * job.w.in_count.value + unit;
  // Every row of columns begins at the same place of an access.
  const bool paired = job.row_stride % kPairs == 0 && reinterpret_cast<std::uintptr_t>(target) % (kPairs * sizeof(Column)) == 0;
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
          if (paired && item * 32 * kPairs + kPairs <= pixels) {
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

template <typename Column>
constexpr int kRowItems = 4 / kPair<Column>;

#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  template __global__ void im2col_rows_kernel<Value, Column, kRowItems<Column>>(const RowsJob, const Value*, Column*);
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"

namespace upfold::cuda {

bool im2col_rows(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* y, void* columns) {
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)                                                                    \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) {                                                      \
    constexpr int kItems = kRowItems<Column>;                                                                                  \
    if (!spread_rows(job, std::int64_t(job.d.in_count.value) * job.h.in_count.value, 32 * kItems * kPair<Column>, 1))          \
      return false;                                                                                                            \
    launch_kernel("im2col", im2col_rows_kernel<Value, Column, kItems>, launch, (job.warps + kWarps - 1) / kWarps, kRowThreads, \
                  job, static_cast<const Value*>(y), static_cast<Column*>(columns));                                           \
    return true;                                                                                                               \
  }
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
