// The gradient of the input of maps of one pixel: each output has one tap or none, and x' is the product of the weight's rows, as
// they lie, with a few vectors of y's gradient, one launch that reads the weight once.
//
// A block owns kPointInputRows rows (channels of x) and up to kSamples samples. A thread has the same few vectors of 16 bytes of
// both rows at a time, all of them on their way at once, and of y's gradient what their columns (output channel, tap) reach,
// zeros where that is padding. Its sums are added by the lanes of a warp, and those of warps in ascending order through shared
// memory. Sums are float32, also of TF32: nothing is rounded that need not be.
//   weight   [row][output channel][tap]
//   offsets  [tap]: of its output in y, from a channel's first one on, or -1; in shared memory
#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kPointInputThreads = 256, kPointInputRows = 2;
constexpr int kPointInputValues = 32;  // of y's gradient that a thread holds, of all samples

struct PointInputAxis {
  std::int32_t pad, dilation, out;
  std::int64_t y;  // from output to output
};
struct PointInputJob {
  Divisor row_tiles, groups;
  Divisor taps, kernel_w, kernel_h;
  std::int32_t rows, columns, channels, batch;  // of a group; channels: of y
  PointInputAxis axis[3];
  std::int64_t w_row, x_n, x_c, y_n, y_c;
};

template <typename Value>
struct alignas(16) PointInputVector {
  static constexpr int kEach = 16 / int(sizeof(Value));
  Value v[kEach];
};

UPFOLD_DEVICE std::int32_t point_output(const PointInputJob& job, std::uint32_t tap) {
  std::int32_t at[3];
  at[2] = std::int32_t(take(job.kernel_w, tap)), at[1] = std::int32_t(take(job.kernel_h, tap)), at[0] = std::int32_t(tap);
  std::int64_t offset = 0;
  bool exists = true;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::int32_t o = at[i] * job.axis[i].dilation - job.axis[i].pad;
    exists = exists && o >= 0 && o < job.axis[i].out;
    offset += o * job.axis[i].y;
  }
  return exists ? std::int32_t(offset) : -1;
}

template <typename Value, int kSamples>
__global__ void __launch_bounds__(kPointInputThreads)
    fused_point_input_kernel(const __grid_constant__ PointInputJob job, const Value* __restrict__ y, const Value* __restrict__ w,
                             Value* __restrict__ x) {
  using Vector = PointInputVector<Value>;
  constexpr int kEach = Vector::kEach, kVectors = kPointInputValues / kEach / kSamples, kWarps = kPointInputThreads / 32;
  static_assert(kVectors > 0, "a vector at a time");
  extern __shared__ std::int32_t offsets[];
  __shared__ float warps[kWarps][kPointInputRows * kSamples];
  const std::int32_t thread = std::int32_t(threadIdx.x);
  std::uint32_t rest = blockIdx.x;
  const std::int32_t first_row = std::int32_t(take(job.row_tiles, rest)) * kPointInputRows;
  const std::int32_t group = std::int32_t(take(job.groups, rest)), first_n = std::int32_t(rest) * kSamples;
  for (std::uint32_t tap = threadIdx.x; tap < job.taps.value; tap += kPointInputThreads) offsets[tap] = point_output(job, tap);
  __syncthreads();  // offsets are there
  take_turn();
  const Value* const from = w + (std::int64_t(group) * job.rows + first_row) * job.w_row;
  const Value* const gradient = y + first_n * job.y_n + std::int64_t(group) * job.channels * job.y_c;
  const bool second = first_row + 1 < job.rows;
#if UPFOLD_WARPGROUPS
  // Rows come to the second-level cache while the gradient is read.
  if (thread < (second ? 2 : 1)) ask_for_bulk(from + thread * job.w_row, std::uint32_t(job.columns) * sizeof(Value));
#endif
  float sums[kPointInputRows][kSamples] = {};
#pragma unroll 1
  for (std::int32_t first = 0; first < job.columns; first += kPointInputThreads * kEach * kVectors) {
    const auto vector = [&](int row, int j) {
      const std::int32_t column = first + (j * kPointInputThreads + thread) * kEach;
      return reinterpret_cast<const uint4*>(from + (column < job.columns && (row == 0 || second) ? row * job.w_row + column : 0));
    };
    float values[kVectors][kSamples][kEach];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const std::int32_t column = first + (j * kPointInputThreads + thread) * kEach;
      std::uint32_t channel = std::uint32_t(column);
      std::int32_t tap = std::int32_t(take(job.taps, channel));
      std::int64_t at = channel * job.y_c;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const std::int32_t offset = column < job.columns ? offsets[tap] : -1;
#pragma unroll
        for (int n = 0; n < kSamples; ++n) {
          const bool exists = offset >= 0 && first_n + n < job.batch;
          values[j][n][e] = widen(load_or_zero(gradient + (exists ? n * job.y_n + at + offset : 0), exists));
        }
        if (++tap == std::int32_t(job.taps.value)) tap = 0, at += job.y_c;
      }
    }
    Vector loaded[kPointInputRows][kVectors];
#pragma unroll
    for (int row = 0; row < kPointInputRows; ++row)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const uint4 v = __ldg(vector(row, j));
        loaded[row][j] = *reinterpret_cast<const Vector*>(&v);
      }
#pragma unroll
    for (int row = 0; row < kPointInputRows; ++row)
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
#pragma unroll
        for (int n = 0; n < kSamples; ++n)
#pragma unroll
          for (int e = 0; e < kEach; ++e) sums[row][n] = fmaf(widen(loaded[row][j].v[e]), values[j][n][e], sums[row][n]);
  }
#pragma unroll
  for (int i = 0; i < kPointInputRows * kSamples; ++i) {
    float& sum = sums[i / kSamples][i % kSamples];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
    if (thread % 32 == 0) warps[thread / 32][i] = sum;
  }
  __syncthreads();  // the sums of all warps are there
  const std::int32_t row = first_row + thread / kSamples, n = first_n + thread % kSamples;
  if (thread >= kPointInputRows * kSamples || row >= job.rows || n >= job.batch) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += warps[i][thread];
  x[n * job.x_n + (std::int64_t(group) * job.rows + row) * job.x_c] = Narrow<Value>::from(sum);
}

#define UPFOLD_INSTANTIATE_POINT_INPUT_OF(Value, kSamples)                                                                \
  template __global__ void fused_point_input_kernel<Value, kSamples>(const __grid_constant__ PointInputJob, const Value*, \
                                                                     const Value*, Value*);
#define UPFOLD_INSTANTIATE_POINT_INPUT(Value) \
  UPFOLD_INSTANTIATE_POINT_INPUT_OF(Value, 1) \
  UPFOLD_INSTANTIATE_POINT_INPUT_OF(Value, 4)
UPFOLD_INSTANTIATE_POINT_INPUT(float)
UPFOLD_INSTANTIATE_POINT_INPUT(__half)
UPFOLD_INSTANTIATE_POINT_INPUT(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_api.h"
#include "launch.cuh"

namespace upfold::cuda {

struct PointInputPlan {
  bool possible;
  PointInputJob job;
  std::int64_t blocks, samples;  // samples: of a block
};

namespace {

constexpr std::int64_t kMostPointInputCount = std::int64_t(1) << 30;  // of what the kernels keep in 32 bits
constexpr std::int64_t kMostPointInputTaps = 4096;                    // whose offsets are 16 KiB of shared memory

PointInputPlan plan_point_input(const Problem& p, std::int64_t alignment) {
  PointInputPlan plan{};
  const std::int64_t each = 16 / element_bytes(p.dtype), taps = kernel_taps(p), channels = out_channels_per_group(p);
  const std::int64_t columns = channels * taps, rows = in_channels_per_group(p);
  if (in_pixels(p) != 1 || alignment % 16 != 0 || taps > kMostPointInputTaps) return plan;
  PointInputJob& job = plan.job;
  const Axis axes[] = {axis_d(p), axis_h(p), axis_w(p)};
  const std::int64_t steps[] = {p.y.d, p.y.h, p.y.w};
  std::int64_t reach = 0;
  for (int i = 0; i < 3; ++i) {
    const Axis& a = axes[i];
    for (const std::int64_t count : {a.kernel * a.dilation, a.pad, a.out, steps[i]})
      if (count < 0 || count >= kMostPointInputCount) return plan;
    job.axis[i] = {std::int32_t(a.pad), std::int32_t(a.dilation), std::int32_t(a.out), steps[i]};
    reach += a.out * steps[i];
  }
  const bool dense = (channels == 1 || p.w.c == taps) && (p.kernel_w == 1 || p.w.w == 1) &&
                     (p.kernel_h == 1 || p.w.h == p.kernel_w) && (p.kernel_d == 1 || p.w.d == p.kernel_w * p.kernel_h);
  const std::int64_t row = rows * p.groups == 1 ? columns : p.w.n;
  if (!dense || columns % each != 0 || row % each != 0 || row < columns || columns >= kMostPointInputCount) return plan;
  job.taps = make_divisor(taps), job.kernel_w = make_divisor(p.kernel_w), job.kernel_h = make_divisor(p.kernel_h);
  job.rows = std::int32_t(rows), job.columns = std::int32_t(columns), job.channels = std::int32_t(channels);
  job.batch = std::int32_t(p.batch);
  job.w_row = row, job.x_n = p.x.n, job.x_c = p.x.c, job.y_n = p.y.n, job.y_c = p.y.c;
  const std::int64_t tiles = ceil_div(rows, std::int64_t(kPointInputRows));
  plan.samples = p.batch == 1 ? 1 : 4;
  job.row_tiles = make_divisor(tiles), job.groups = make_divisor(p.groups);
  plan.blocks = tiles * p.groups * ceil_div(p.batch, plan.samples);
  plan.possible = reach < kMostPointInputCount && rows < kMostPointInputCount && p.batch < kMostPointInputCount &&
                  plan.blocks < kMostPointInputCount;
  return plan;
}

template <typename Value>
void run_point_input(const Launch& launch, const PointInputPlan& plan, const FusedOperands& o) {
  const auto kernel = plan.samples == 1 ? fused_point_input_kernel<Value, 1> : fused_point_input_kernel<Value, 4>;
  const Grid grid{unsigned(plan.blocks), kPointInputThreads, int(plan.job.taps.value) * 4, true};
  launch_grid("fused", kernel, launch, grid, plan.job, static_cast<const Value*>(o.y), static_cast<const Value*>(o.w),
              static_cast<Value*>(const_cast<void*>(o.x)));
}

}  // namespace

std::vector<int> fused_point_input_tiles() { return {kPointInputRows}; }

bool fused_point_input_fits(int, const Problem& p, int config, std::int64_t alignment) {
  const bool summed = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  return p.op == Operator::kConv && summed && config == 0 && p.batch > 0 && plan_point_input(p, alignment).possible;
}

FusedPointInputCall::FusedPointInputCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), dtype_(p.dtype) {
  require(fused_point_input_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  plan_ = std::make_shared<const PointInputPlan>(plan_point_input(p, alignment));
}

FusedPointWork FusedPointInputCall::work() const { return {plan_->blocks, kPointInputRows, plan_->samples}; }

void FusedPointInputCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.w);
  require(address % 16 == 0, "the weight begins at ", address, "; it was planned for a multiple of 16");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (dtype_ == Dtype::kFloat32) return run_point_input<float>(launch, *plan_, operands);
  if (dtype_ == Dtype::kFloat16) return run_point_input<__half>(launch, *plan_, operands);
  run_point_input<__nv_bfloat16>(launch, *plan_, operands);
}

}  // namespace upfold::cuda
#endif
