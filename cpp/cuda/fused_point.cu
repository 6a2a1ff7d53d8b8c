// The fused method for maps of one pixel: each output has one tap, a column of the weight, and the reduction over the channels of
// x is a product of a matrix and a few vectors, which reads the weight once, as it lies, in one launch.
//
// A block owns kPointColumns neighbouring columns of a group, in all its rows (channels of x), and up to kSamples samples. A
// thread has a vector of 16 bytes of the columns in every so manieth row, several of them on their way at once, and the sums of
// these columns; those of a warp are added by its lanes, and those of warps in ascending order through shared memory. Sums are
// float32, also of TF32: nothing is rounded that need not be.
//   weight   [row][output channel][tap] or [row][tap][output channel]
//   x        [sample][row], of a block's samples, in shared memory
#include "activation.cuh"
#include "divide.cuh"

namespace upfold::cuda {

constexpr int kPointThreads = 256, kPointColumns = 32, kPointLoads = 8;
constexpr int kMostPointRows = 2048;  // whose x has room in shared memory, in four samples

struct PointAxis {
  std::int32_t pad, out;
  std::int64_t y;  // from output to output
};
struct PointJob {
  Divisor column_tiles, groups;
  Divisor kernel_w, kernel_h;
  Divisor inner;                                // of a column, what changes first: taps of a channel, or channels of a tap
  bool by_channel;                              // that is channels
  std::int32_t rows, columns, channels, batch;  // of a group
  PointAxis axis[3];
  std::int64_t w_row, x_n, x_c, y_n, y_c;
  Activation activation;
  float slope;
};

template <typename Value>
struct PointVector {
  static constexpr int kEach = 16 / int(sizeof(Value)), kLanes = kPointColumns / kEach, kRows = kPointThreads / kLanes;
  Value v[kEach];
};

// Where a column's result lies in y, from the first channel of its group, and its channel; none: it falls into the padding.
UPFOLD_DEVICE bool place_column(const PointJob& job, std::uint32_t column, std::int32_t& channel, std::int64_t& offset) {
  std::uint32_t rest = column;
  const std::uint32_t inner = take(job.inner, rest);
  channel = std::int32_t(job.by_channel ? inner : rest);
  std::uint32_t tap = job.by_channel ? rest : inner;
  const std::int32_t w = std::int32_t(take(job.kernel_w, tap)) - job.axis[2].pad,
                     h = std::int32_t(take(job.kernel_h, tap)) - job.axis[1].pad, d = std::int32_t(tap) - job.axis[0].pad;
  offset = channel * job.y_c + d * job.axis[0].y + h * job.axis[1].y + w * job.axis[2].y;
  return d >= 0 && d < job.axis[0].out && h >= 0 && h < job.axis[1].out && w >= 0 && w < job.axis[2].out;
}

template <typename Value, int kSamples>
__global__ void __launch_bounds__(kPointThreads)
    fused_point_kernel(const __grid_constant__ PointJob job, const Value* __restrict__ x, const Value* __restrict__ w,
                       const Value* __restrict__ bias, Value* __restrict__ y) {
  using Vector = PointVector<Value>;
  constexpr int kEach = Vector::kEach, kLanes = Vector::kLanes, kRows = Vector::kRows, kWarps = kPointThreads / 32;
  __shared__ float values[kSamples][kMostPointRows];
  __shared__ float warps[kWarps][kSamples][kPointColumns];
  const std::int32_t thread = std::int32_t(threadIdx.x), lane = thread % kLanes, own_row = thread / kLanes;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_column = std::int32_t(take(job.column_tiles, rest)) * kPointColumns;
  const std::int32_t group = std::int32_t(take(job.groups, rest)), first_n = std::int32_t(rest) * kSamples;
  const bool exists = first_column + lane * kEach < job.columns;
  const Value* const from = w + std::int64_t(group) * job.rows * job.w_row + first_column + (exists ? lane * kEach : 0);
  Vector loaded[kPointLoads];
  const auto load = [&](std::int32_t first) {
#pragma unroll
    for (int i = 0; i < kPointLoads; ++i) {
      const std::int32_t row = first + i * kRows + own_row;
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + (row < job.rows ? row : 0) * job.w_row));
      loaded[i] = *reinterpret_cast<const Vector*>(&v);
    }
  };
  take_turn();
  load(0);
  for (std::int32_t i = thread; i < kSamples * job.rows; i += kPointThreads) {
    const std::int32_t n = i / job.rows, row = i - n * job.rows;
    const Value* const at = x + (first_n + n) * job.x_n + (std::int64_t(group) * job.rows + row) * job.x_c;
    values[n][row] = first_n + n < job.batch ? widen(*at) : 0.0f;
  }
  __syncthreads();  // x is there
  float sums[kSamples][kEach] = {};
  for (std::int32_t first = 0; first < job.rows; first += kPointLoads * kRows) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kPointLoads; ++i) {
      const std::int32_t row = first + i * kRows + own_row;
      if (row >= job.rows) continue;
#pragma unroll
      for (int n = 0; n < kSamples; ++n) {
        const float value = values[n][row];
#pragma unroll
        for (int e = 0; e < kEach; ++e) sums[n][e] = fmaf(value, widen(loaded[i].v[e]), sums[n][e]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kSamples; ++n) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
#pragma unroll
      for (int mask = 16; mask >= kLanes; mask /= 2) sums[n][e] += __shfl_xor_sync(~0u, sums[n][e], mask);
      if (thread % 32 < kLanes) warps[thread / 32][n][lane * kEach + e] = sums[n][e];
    }
  }
  __syncthreads();  // the sums of all warps are there
  const std::int32_t n = thread / kPointColumns, column = first_column + thread % kPointColumns;
  if (n >= kSamples || first_n + n >= job.batch || column >= job.columns) return;
  std::int32_t channel;
  std::int64_t offset;
  if (!place_column(job, std::uint32_t(column), channel, offset)) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += warps[i][n][thread % kPointColumns];
  const std::int64_t first_channel = std::int64_t(group) * job.channels;
  if (bias != nullptr) sum += widen(bias[first_channel + channel]);
  y[(first_n + n) * job.y_n + first_channel * job.y_c + offset] = Narrow<Value>::from(finish(job.activation, job.slope, sum));
}

#define UPFOLD_INSTANTIATE_POINT_OF(Value, kSamples)                                                                         \
  template __global__ void fused_point_kernel<Value, kSamples>(const __grid_constant__ PointJob, const Value*, const Value*, \
                                                               const Value*, Value*);
#define UPFOLD_INSTANTIATE_POINT(Value) \
  UPFOLD_INSTANTIATE_POINT_OF(Value, 1) \
  UPFOLD_INSTANTIATE_POINT_OF(Value, 4)
UPFOLD_INSTANTIATE_POINT(float)
UPFOLD_INSTANTIATE_POINT(__half)
UPFOLD_INSTANTIATE_POINT(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_api.h"
#include "launch.cuh"

namespace upfold::cuda {

struct PointPlan {
  bool possible;
  PointJob job;
  std::int64_t blocks, samples;  // samples: of a block
};

namespace {

constexpr std::int64_t kMostPointCount = std::int64_t(1) << 30;  // of what the kernels keep in 32 bits

PointPlan plan_point(const Problem& p, std::int64_t alignment) {
  PointPlan plan{};
  const std::int64_t size = element_bytes(p.dtype), each = 16 / size, taps = kernel_taps(p), channels = out_channels_per_group(p);
  const std::int64_t columns = channels * taps, rows = in_channels_per_group(p);
  if (in_pixels(p) != 1 || rows > kMostPointRows || alignment % 16 != 0) return plan;
  PointJob& job = plan.job;
  const Axis axes[] = {axis_d(p), axis_h(p), axis_w(p)};
  const std::int64_t steps[] = {p.y.d, p.y.h, p.y.w};
  for (int i = 0; i < 3; ++i) {
    const Axis& a = axes[i];
    // Every output has a tap: what has none other tiles fill with the bias.
    if ((a.dilation != 1 && a.kernel > 1) || a.pad < 0 || a.out + a.pad > a.kernel || a.kernel >= kMostPointCount) return plan;
    job.axis[i] = {std::int32_t(a.pad), std::int32_t(a.out), steps[i]};
  }
  // Columns of a row follow one another, taps first or channels first, and rows are whole vectors.
  const auto dense = [&](std::int64_t channel, std::int64_t tap) {
    return (channels == 1 || p.w.c == channel) && (p.kernel_w == 1 || p.w.w == tap) &&
           (p.kernel_h == 1 || p.w.h == tap * p.kernel_w) && (p.kernel_d == 1 || p.w.d == tap * p.kernel_w * p.kernel_h);
  };
  job.by_channel = !dense(taps, 1);
  if (job.by_channel && !dense(1, channels)) return plan;
  const std::int64_t row = rows * p.groups == 1 ? columns : p.w.n;
  if (columns % each != 0 || row % each != 0 || row < columns || columns >= kMostPointCount) return plan;
  job.inner = make_divisor(job.by_channel ? channels : taps);
  job.kernel_w = make_divisor(p.kernel_w), job.kernel_h = make_divisor(p.kernel_h);
  job.rows = std::int32_t(rows), job.columns = std::int32_t(columns), job.channels = std::int32_t(channels),
  job.batch = std::int32_t(p.batch);
  job.w_row = row, job.x_n = p.x.n, job.x_c = p.x.c, job.y_n = p.y.n, job.y_c = p.y.c;
  job.activation = p.activation, job.slope = p.activation_slope;
  const std::int64_t tiles = ceil_div(columns, std::int64_t(kPointColumns));
  plan.samples = p.batch == 1 ? 1 : 4;
  job.column_tiles = make_divisor(tiles), job.groups = make_divisor(p.groups);
  plan.blocks = tiles * p.groups * ceil_div(p.batch, plan.samples);
  plan.possible = p.batch < kMostPointCount && plan.blocks < kMostPointCount;
  return plan;
}

template <typename Value>
void run_point(const Launch& launch, const PointPlan& plan, const FusedOperands& o) {
  const auto kernel = plan.samples == 1 ? fused_point_kernel<Value, 1> : fused_point_kernel<Value, 4>;
  launch_in_turn("fused", kernel, launch, unsigned(plan.blocks), kPointThreads, plan.job, static_cast<const Value*>(o.x),
                 static_cast<const Value*>(o.w), static_cast<const Value*>(o.bias), static_cast<Value*>(o.y));
}

}  // namespace

std::vector<int> fused_point_tiles() { return {kPointColumns}; }

bool fused_point_fits(int, const Problem& p, int config, std::int64_t alignment) {
  const bool summed = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConvTranspose || !summed || config != 0) return false;
  return p.batch == 0 || plan_point(p, alignment).possible;
}

FusedPointCall::FusedPointCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), dtype_(p.dtype) {
  require(fused_point_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const PointPlan>(plan_point(p, alignment));
}

FusedPointWork FusedPointCall::work() const {
  if (plan_ == nullptr) return {};
  const std::int64_t step = kPointLoads * kPointThreads * 16 / element_bytes(dtype_) / kPointColumns;
  return {plan_->blocks, ceil_div(std::int64_t(plan_->job.rows), step) * step, plan_->samples};
}

void FusedPointCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.w);
  require(address % 16 == 0, "the weight begins at ", address, "; it was planned for a multiple of 16");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (dtype_ == Dtype::kFloat32) return run_point<float>(launch, *plan_, operands);
  if (dtype_ == Dtype::kFloat16) return run_point<__half>(launch, *plan_, operands);
  run_point<__nv_bfloat16>(launch, *plan_, operands);
}

}  // namespace upfold::cuda
#endif
