// Columns of groups with a single input channel: the outer product of its pixels and its row of the weight. cuBLAS, asked for a
// product of depth 1, stays far below the rate of the memory; this writes the columns at it.
//
// A lane owns kWide neighbouring pixels of one channel, counted through the samples, and writes them in every row of the channel;
// lanes own neighbouring pixels, so that every store of a warp is one run. No shared memory, no barrier.
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256;

template <typename Value, int kCount>
struct alignas(kCount * sizeof(Value)) Run {
  Value v[kCount];
};

struct OuterJob {
  Divisor tiles, pixels;    // of a sample, in runs
  std::uint32_t positions;  // runs of all samples
  std::int32_t rows;        // of a channel
  std::int64_t x_sample, x_channel, w_channel;
  std::int64_t sample_stride, row_stride, channel_stride;  // of columns
};

template <typename Value, typename Column, int kWide>
__global__ void __launch_bounds__(kThreads)
    outer_kernel(const OuterJob job, const Value* __restrict__ x, const Value* __restrict__ w, Column* __restrict__ columns) {
  std::uint32_t channel = blockIdx.x;
  std::uint32_t position = take(job.tiles, channel) * kThreads + threadIdx.x;
  if (position >= job.positions) return;
  const std::int64_t pixel = std::int64_t(take(job.pixels, position)) * kWide;
  const Run<Value, kWide> read =
      *reinterpret_cast<const Run<Value, kWide>*>(x + position * job.x_sample + channel * job.x_channel + pixel);
  Column values[kWide];
#pragma unroll
  for (int i = 0; i < kWide; ++i) values[i] = widen(read.v[i]);
  w += channel * job.w_channel;
  columns += position * job.sample_stride + channel * job.channel_stride + pixel;
#pragma unroll 4
  for (std::int32_t row = 0; row < job.rows; ++row, columns += job.row_stride) {
    const Column factor = widen(w[row]);
    Run<Column, kWide> products;
#pragma unroll
    for (int i = 0; i < kWide; ++i) products.v[i] = values[i] * factor;
    *reinterpret_cast<Run<Column, kWide>*>(columns) = products;
  }
}

// The types of x and of the columns, and the pixels of a wide run: 16 bytes of columns.
#define UPFOLD_OUTER_TYPES(DO)    \
  DO(kFloat32, float, float, 4)   \
  DO(kFloat64, double, double, 2) \
  DO(kFloat16, __half, float, 4)  \
  DO(kBFloat16, __nv_bfloat16, float, 4)

#define UPFOLD_INSTANTIATE(dtype, Value, Column, kWide)                                                             \
  template __global__ void outer_kernel<Value, Column, kWide>(const OuterJob, const Value*, const Value*, Column*); \
  template __global__ void outer_kernel<Value, Column, 1>(const OuterJob, const Value*, const Value*, Column*);
UPFOLD_OUTER_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"
#include "outer.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;

bool aligned(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % std::uintptr_t(bytes) == 0;
}

template <typename Value, typename Column, int kWide>
void launch_outer(const Launch& launch, const OuterBlock& block, const void* x, const void* w, void* columns) {
  const auto fits = [](std::int64_t step) { return step % kWide == 0; };
  const bool wide = fits(block.pixels) && fits(block.x_sample) && fits(block.x_channel) && fits(block.sample_stride) &&
                    fits(block.row_stride) && aligned(x, kWide * sizeof(Value)) && aligned(columns, kWide * sizeof(Column));
  const std::int64_t runs = wide ? block.pixels / kWide : block.pixels;
  const std::int64_t tiles = (runs * block.samples + kThreads - 1) / kThreads;
  // The plan takes this kernel for fewer only.
  require(runs < kMost && runs * block.samples < kMost && tiles * block.channels < kMost, "an outer product of ", block.samples,
          " samples of ", block.pixels, " pixels and ", block.channels, " channels; it takes fewer than 2^30 of them together");
  const OuterJob job{make_divisor(tiles),
                     make_divisor(runs),
                     std::uint32_t(runs * block.samples),
                     std::int32_t(block.rows),
                     block.x_sample,
                     block.x_channel,
                     block.w_channel,
                     block.sample_stride,
                     block.row_stride,
                     block.rows * block.row_stride};
  launch_kernel("outer product", wide ? outer_kernel<Value, Column, kWide> : outer_kernel<Value, Column, 1>, launch,
                unsigned(tiles * block.channels), kThreads, job, static_cast<const Value*>(x), static_cast<const Value*>(w),
                static_cast<Column*>(columns));
}

}  // namespace

void outer_columns(const Launch& launch, Dtype dtype, const OuterBlock& block, const void* x, const void* w, void* columns) {
#define UPFOLD_CASE(dtype_name, Value, Column, kWide) \
  if (dtype == Dtype::dtype_name) return launch_outer<Value, Column, kWide>(launch, block, x, w, columns);
  UPFOLD_OUTER_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  throw InvalidArgument(concat("dtype ", int(dtype), "; outer products are made of real numbers"));
}

}  // namespace upfold::cuda
#endif
