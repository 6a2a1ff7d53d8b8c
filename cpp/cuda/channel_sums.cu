// Every channel is summed in parts, which blocks share out, in float32 and in a fixed order; a second launch adds the parts up,
// where there are several.
//   in planes  a block has a part of one channel: lines of 16 bytes of its planes, of one sample after the other
//   in rows    channels follow one another in all pixels: a block has some steps of as many vectors as it has threads, a multiple
//              of the vectors after which channels begin anew, so that a thread meets the same channels in every step
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kPlaneThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kPlaneBlocks = 4;  // of a multiprocessor, which has 1024 threads
#else
constexpr int kPlaneBlocks = 6;
#endif
constexpr int kMostRowThreads = 1024;             // of a block
constexpr int kLoads = 4;                         // of a thread, in flight
constexpr int kPartLanes = 32, kPartShares = 32;  // channels of a block that adds parts up, and threads of each

struct PlaneSumsJob {
  Divisor channels, lines;      // lines that may touch a plane
  std::uint32_t all, per_part;  // lines of a channel, of a part
  std::int32_t pixels;          // of a plane
  std::int64_t n, c;
};

struct RowSumsJob {
  std::uint32_t vectors, per_part;  // of the tensor; steps of a part
  std::int32_t channels;
};

template <typename Value>
UPFOLD_DEVICE float sum_line(const uint4& line) {
  if constexpr (sizeof(Value) == 4) {
    return (__uint_as_float(line.x) + __uint_as_float(line.y)) + (__uint_as_float(line.z) + __uint_as_float(line.w));
  } else {
    const Value* const v = reinterpret_cast<const Value*>(&line);
    return ((widen(v[0]) + widen(v[1])) + (widen(v[2]) + widen(v[3]))) +
           ((widen(v[4]) + widen(v[5])) + (widen(v[6]) + widen(v[7])));
  }
}

// Of all threads of a block, in the first one.
UPFOLD_DEVICE float sum_block(float sum) {
  __shared__ float warps[kPlaneThreads / 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();  // the sums of all warps are there
  float total = warps[0];
#pragma unroll
  for (int i = 1; i < kPlaneThreads / 32; ++i) total += warps[i];
  return total;
}

// kWhole: planes are whole aligned lines. Elsewhere a plane's first and last lines have elements of others, which are not read.
template <typename Value, bool kWhole>
__global__ void __launch_bounds__(kPlaneThreads, kPlaneBlocks)
    plane_sums_kernel(const PlaneSumsJob job, const Value* __restrict__ from, float* __restrict__ parts,
                      Value* __restrict__ sums) {
  take_turn();
  constexpr std::int32_t kEach = 16 / int(sizeof(Value));
  std::uint32_t part = blockIdx.x;
  const std::uint32_t channel = take(job.channels, part), first = part * job.per_part;
  const std::uint32_t end = job.all - first < job.per_part ? job.all : first + job.per_part;
  const Value* const plane = from + std::int64_t(channel) * job.c;
  float sum[kLoads] = {};
  for (std::uint32_t i = first + threadIdx.x; i < end; i += kPlaneThreads * kLoads) {
    uint4 lines[kLoads];
    const Value* begin[kLoads];  // of the line, which may lie ahead of the plane's
    std::int32_t at[kLoads];     // that, counted in the plane
    bool inside[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const std::uint32_t own = i + std::uint32_t(k) * kPlaneThreads;
      std::uint32_t n = own < end ? own : end - 1;
      at[k] = std::int32_t(take(job.lines, n)) * kEach;
      const Value* const sample = plane + std::int64_t(n) * job.n;
      if (!kWhole) at[k] -= std::int32_t(reinterpret_cast<std::uintptr_t>(sample) / sizeof(Value) % kEach);
      begin[k] = sample + at[k];
      inside[k] = kWhole || (at[k] >= 0 && at[k] + kEach <= job.pixels);
      if (own >= end) inside[k] = false, at[k] = job.pixels;
      lines[k] = {};
      if (kWhole || inside[k]) lines[k] = __ldg(reinterpret_cast<const uint4*>(begin[k]));
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const float line = sum_line<Value>(lines[k]);
      sum[k] += inside[k] ? line : 0.0f;
      if constexpr (!kWhole) {
        if (inside[k]) continue;
        for (std::int32_t e = 0; e < kEach; ++e)
          if (at[k] + e >= 0 && at[k] + e < job.pixels) sum[k] += widen(begin[k][e]);
      }
    }
  }
  const float total = sum_block((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (threadIdx.x > 0) return;
  if (parts != nullptr) {
    parts[part * job.channels.value + channel] = total;
  } else {
    sums[channel] = Narrow<Value>::from(total);
  }
}

template <typename Value, int kEach>
struct alignas(kEach * sizeof(Value)) RowVector {
  Value v[kEach];
};

// Vectors of kEach elements; the tensor is whole ones.
template <typename Value, int kEach>
__global__ void __launch_bounds__(kMostRowThreads)
    row_sums_kernel(const RowSumsJob job, const Value* __restrict__ from, float* __restrict__ parts, Value* __restrict__ sums) {
  take_turn();
  extern __shared__ float staged[];  // [thread][element]
  const std::uint32_t threads = blockDim.x;
  const std::uint64_t first = std::uint64_t(blockIdx.x) * job.per_part * threads + threadIdx.x;
  const auto* const vectors = reinterpret_cast<const RowVector<Value, kEach>*>(from);
  float sum[kEach] = {};
  for (std::uint32_t step = 0; step < job.per_part; step += kLoads) {
    RowVector<Value, kEach> loaded[kLoads];
    bool exists[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const std::uint64_t own = first + std::uint64_t(step + k) * threads;
      exists[k] = step + k < job.per_part && own < job.vectors;
      loaded[k] = vectors[exists[k] ? own : job.vectors - 1];
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum[e] += exists[k] ? widen(loaded[k].v[e]) : 0.0f;
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) staged[threadIdx.x * kEach + e] = sum[e];
  __syncthreads();  // the sums of all threads are there
  // Rows of all channels, the later half of them added to the former, until one is left.
  for (std::int32_t rows = std::int32_t(threads) * kEach / job.channels; rows > 1;) {
    const std::int32_t former = (rows + 1) / 2;
    for (std::int32_t i = std::int32_t(threadIdx.x); i < (rows - former) * job.channels; i += std::int32_t(threads))
      staged[i] += staged[i + former * job.channels];
    rows = former;
    __syncthreads();  // the rows that are left are there
  }
  for (std::int32_t channel = std::int32_t(threadIdx.x); channel < job.channels; channel += std::int32_t(threads)) {
    if (parts != nullptr) {
      parts[std::int64_t(blockIdx.x) * job.channels + channel] = staged[channel];
    } else {
      sums[channel] = Narrow<Value>::from(staged[channel]);
    }
  }
}

// A thread adds every kPartShares-th part of its channel, a warp the sums of a channel's threads.
template <typename Value>
__global__ void __launch_bounds__(kPartLanes* kPartShares)
    add_channel_parts_kernel(std::int32_t channels, std::int32_t count, const float* __restrict__ parts,
                             Value* __restrict__ sums) {
  __shared__ float staged[kPartShares][kPartLanes + 1];
  const std::int32_t lane = std::int32_t(threadIdx.x % kPartLanes), share = std::int32_t(threadIdx.x / kPartLanes);
  const std::int32_t channel = std::int32_t(blockIdx.x) * kPartLanes + lane, own = channel < channels ? channel : channels - 1;
  take_turn();  // the parts
  float sum = 0.0f;
  for (std::int32_t part = share; part < count; part += kPartShares * kLoads) {
    float loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const std::int32_t at = part + k * kPartShares;
      loaded[k] = parts[std::int64_t(at < count ? at : share) * channels + own];
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) sum += part + k * kPartShares < count ? loaded[k] : 0.0f;
  }
  staged[share][lane] = sum;
  __syncthreads();  // the sums of all shares are there
  float total = staged[lane][share];
#pragma unroll
  for (int mask = kPartShares / 2; mask > 0; mask /= 2) total += __shfl_xor_sync(~0u, total, mask);
  const std::int32_t written = std::int32_t(blockIdx.x) * kPartLanes + share;
  if (lane == 0 && written < channels) sums[written] = Narrow<Value>::from(total);
}

#define UPFOLD_CHANNEL_SUM_TYPES(DO) DO(kFloat32, float) DO(kFloat16, __half) DO(kBFloat16, __nv_bfloat16)
#define UPFOLD_INSTANTIATE(dtype, Value)                                                                               \
  template __global__ void plane_sums_kernel<Value, true>(const PlaneSumsJob, const Value*, float*, Value*);           \
  template __global__ void plane_sums_kernel<Value, false>(const PlaneSumsJob, const Value*, float*, Value*);          \
  template __global__ void row_sums_kernel<Value, 16 / sizeof(Value)>(const RowSumsJob, const Value*, float*, Value*); \
  template __global__ void row_sums_kernel<Value, 1>(const RowSumsJob, const Value*, float*, Value*);                  \
  template __global__ void add_channel_parts_kernel<Value>(std::int32_t, std::int32_t, const float*, Value*);
UPFOLD_CHANNEL_SUM_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>
#include <numeric>

#include "channel_sums.h"
#include "launch.cuh"

namespace upfold::cuda {

struct ChannelSumsPlan {
  Dtype dtype;
  bool in_rows, whole;  // whole: aligned vectors
  PlaneSumsJob planes;
  RowSumsJob rows;
  std::int64_t parts, threads;  // threads of a block, in rows
};

namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // lines and vectors that are counted in 32 bits
constexpr std::int64_t kRowRegisters = 64;             // of a thread
// Lines that a block reads in the time of the second launch, about (H200: 4.2 TB/s, 1.5 us).
constexpr std::int64_t kLaunchLines = 500;

// Whether elements of the three spatial axes follow one another, `step` apart.
bool pixels_follow(const ChannelSumsTensor& t, std::int64_t step) {
  const std::int64_t strides[3] = {t.strides.d, t.strides.h, t.strides.w};
  for (int i = 2; i >= 0; --i) {
    if (t.size[i] > 1 && strides[i] != step) return false;
    step *= t.size[i];
  }
  return true;
}

// The parts of a channel whose blocks take least time, of lines that a device reads `resident` blocks at a time.
std::int64_t parts_of_planes(std::int64_t channels, std::int64_t lines, std::int64_t resident) {
  const std::int64_t most = std::min(ceil_div(lines, std::int64_t(kPlaneThreads) * kLoads), ceil_div(2 * resident, channels));
  std::int64_t best = 1, least = ceil_div(channels, resident) * lines;
  for (std::int64_t parts = 2; parts <= most; ++parts) {
    const std::int64_t cost = ceil_div(channels * parts, resident) * ceil_div(lines, parts) + kLaunchLines;
    if (cost < least) best = parts, least = cost;
  }
  return best;
}

bool plan_planes(const ChannelSumsTensor& t, std::int64_t multiprocessors, ChannelSumsPlan& plan) {
  const std::int64_t pixels = t.size[0] * t.size[1] * t.size[2], size = element_bytes(t.dtype), each = 16 / size;
  if (!pixels_follow(t, 1) || pixels >= kMost) return false;
  plan.whole = t.alignment >= 16 && pixels % each == 0 && (t.strides.n * size) % 16 == 0 && (t.strides.c * size) % 16 == 0;
  const std::int64_t lines = plan.whole ? pixels / each : (pixels + 2 * each - 2) / each, all = t.samples * lines;
  if (all >= kMost) return false;
  plan.parts = parts_of_planes(t.channels, all, multiprocessors * kPlaneBlocks);
  PlaneSumsJob& job = plan.planes;
  job.channels = make_divisor(t.channels), job.lines = make_divisor(lines);
  job.all = std::uint32_t(all), job.per_part = std::uint32_t(ceil_div(all, plan.parts));
  plan.parts = ceil_div(all, std::int64_t(job.per_part));
  job.pixels = std::int32_t(pixels), job.n = t.strides.n, job.c = t.strides.c;
  return t.channels * plan.parts < kMost;
}

bool plan_rows(const ChannelSumsTensor& t, std::int64_t multiprocessors, ChannelSumsPlan& plan) {
  const std::int64_t pixels = t.size[0] * t.size[1] * t.size[2], size = element_bytes(t.dtype);
  if (!pixels_follow(t, t.channels)) return false;
  if (t.samples > 1 && t.strides.n != pixels * t.channels) return false;
  const std::int64_t elements = t.samples * pixels * t.channels;
  plan.in_rows = true, plan.whole = t.alignment >= 16 && elements % (16 / size) == 0;
  const std::int64_t each = plan.whole ? 16 / size : 1, period = t.channels / std::gcd(t.channels, each);
  const std::int64_t vectors = elements / each;
  if (period > kMostRowThreads || vectors >= kMost) return false;
  constexpr std::int64_t kThreads = 512;
  plan.threads = period > kThreads ? period : kThreads / period * period;
  const std::int64_t steps = ceil_div(vectors, plan.threads);
  const std::int64_t resident = multiprocessors * std::max<std::int64_t>((64 << 10) / kRowRegisters / plan.threads, 1);
  plan.parts = std::clamp<std::int64_t>(steps / kLoads, 1, resident);
  RowSumsJob& job = plan.rows;
  job.vectors = std::uint32_t(vectors), job.per_part = std::uint32_t(ceil_div(steps, plan.parts));
  plan.parts = ceil_div(steps, std::int64_t(job.per_part)), job.channels = std::int32_t(t.channels);
  return true;
}

template <typename Value>
void run_sums(const Launch& launch, const ChannelSumsPlan& plan, const void* tensor, void* to, void* workspace) {
  const auto from = static_cast<const Value*>(tensor);
  const auto parts = static_cast<float*>(plan.parts > 1 ? workspace : nullptr);
  const auto sums = static_cast<Value*>(to);
  const std::int64_t channels = plan.in_rows ? plan.rows.channels : plan.planes.channels.value;
  if (plan.in_rows) {
    constexpr int kEach = 16 / int(sizeof(Value));
    const int bytes = int(plan.threads) * (plan.whole ? kEach : 1) * int(sizeof(float));
    launch_grid("channel sums", plan.whole ? row_sums_kernel<Value, kEach> : row_sums_kernel<Value, 1>, launch,
                Grid{unsigned(plan.parts), unsigned(plan.threads), bytes, true}, plan.rows, from, parts, sums);
  } else {
    launch_in_turn("channel sums", plan.whole ? plane_sums_kernel<Value, true> : plane_sums_kernel<Value, false>, launch,
                   unsigned(channels * plan.parts), kPlaneThreads, plan.planes, from, parts, sums);
  }
  if (plan.parts > 1) {
    launch_in_turn("channel sums", add_channel_parts_kernel<Value>, launch, unsigned(ceil_div(channels, kPartLanes)),
                   kPartLanes * kPartShares, std::int32_t(channels), std::int32_t(plan.parts), parts, sums);
  }
}

}  // namespace

ChannelSumsCall::ChannelSumsCall(int device, const ChannelSumsTensor& tensor) : device_(device) {
  ChannelSumsPlan plan{};
  plan.dtype = tensor.dtype;
  require(element_bytes(tensor.dtype) <= 4, "dtype ", int(tensor.dtype),
          "; channels are summed of float32, float16 and bfloat16");
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (tensor.channels >= kMost || tensor.samples >= kMost) return;
  const bool rows = tensor.channels > 1 && tensor.strides.c == 1;
  if (rows ? plan_rows(tensor, multiprocessors, plan) : plan_planes(tensor, multiprocessors, plan))
    plan_ = std::make_shared<const ChannelSumsPlan>(plan);
}

std::int64_t ChannelSumsCall::workspace_bytes() const {
  if (plan_ == nullptr) return -1;
  const std::int64_t channels = plan_->in_rows ? plan_->rows.channels : plan_->planes.channels.value;
  return plan_->parts > 1 ? plan_->parts * channels * std::int64_t(sizeof(float)) : 0;
}

void ChannelSumsCall::run(const void* tensor, void* sums, void* workspace, std::uintptr_t stream) const {
  require(plan_ != nullptr, "no kernel sums channels that lie so");
  const DeviceScope scope(device_);
#define UPFOLD_CASE(dtype_name, Value) \
  if (plan_->dtype == Dtype::dtype_name) return run_sums<Value>({device_, stream}, *plan_, tensor, sums, workspace);
  UPFOLD_CHANNEL_SUM_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
}

}  // namespace upfold::cuda
#endif
