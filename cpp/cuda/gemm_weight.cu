// A weight in channels_last as the matrix of `gemm`: a block turns all taps of some channels round in shared memory.
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kTurnThreads = 256, kTurnElements = 4096;

struct TurnJob {
  Divisor parts, channels, taps;  // parts of an input channel's output channels; output channels of a part; taps
  std::int32_t all_channels;
  std::int64_t row;  // from an input channel to the next
};

template <typename Bits>
__global__ void __launch_bounds__(kTurnThreads)
    turn_weight_kernel(const TurnJob job, const Bits* __restrict__ from, Bits* __restrict__ to) {
  __shared__ Bits held[2 * kTurnElements];  // [tap][channel], rows of an odd number of words
  std::uint32_t input = blockIdx.x;
  const std::int32_t part = std::int32_t(job.channels.value), taps = std::int32_t(job.taps.value);
  const std::int32_t first = std::int32_t(take(job.parts, input)) * part, left = job.all_channels - first;
  const std::int32_t own = left < part ? left : part, pitch = part | 1;
  const Bits* const source = from + input * job.row + first;
  for (std::uint32_t i = threadIdx.x; i < std::uint32_t(part * taps); i += kTurnThreads) {
    std::uint32_t tap = i;
    const std::int32_t channel = std::int32_t(take(job.channels, tap));
    if (channel < own) held[std::int32_t(tap) * pitch + channel] = source[std::int64_t(tap) * job.all_channels + channel];
  }
  __syncthreads();  // the part is there
  Bits* const target = to + (std::int64_t(input) * job.all_channels + first) * taps;
  for (std::uint32_t i = threadIdx.x; i < std::uint32_t(own * taps); i += kTurnThreads) {
    std::uint32_t channel = i;
    const std::int32_t tap = std::int32_t(take(job.taps, channel));
    target[i] = held[tap * pitch + std::int32_t(channel)];
  }
}

template __global__ void turn_weight_kernel<std::uint16_t>(const TurnJob, const std::uint16_t*, std::uint16_t*);
template __global__ void turn_weight_kernel<std::uint32_t>(const TurnJob, const std::uint32_t*, std::uint32_t*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "gemm_layout.h"
#include "gemm_weight.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Bits>
void launch_turn(const Launch& launch, const TurnJob& job, unsigned blocks, const void* from, void* to) {
  launch_kernel("gemm", turn_weight_kernel<Bits>, launch, blocks, kTurnThreads, job, static_cast<const Bits*>(from),
                static_cast<Bits*>(to));
}

}  // namespace

bool turn_weight(const Launch& launch, const Problem& p, const void* from, void* to) {
  const std::int64_t channels = out_channels_per_group(p), taps = kernel_taps(p), size = element_bytes(p.dtype);
  const bool is_real = p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16 || p.dtype == Dtype::kFloat32;
  if (!is_tap_matrix(p, p.w, channels) || !is_real || taps > kTurnElements || p.in_channels == 0) return false;
  const std::int64_t part = std::min(channels, kTurnElements / taps), parts = ceil_div(channels, part);
  const std::int64_t blocks = parts * p.in_channels;
  if (blocks >= std::int64_t(1) << 31) return false;
  const TurnJob job{make_divisor(parts), make_divisor(part), make_divisor(taps), std::int32_t(channels), p.w.n};
  size == 2 ? launch_turn<std::uint16_t>(launch, job, unsigned(blocks), from, to)
            : launch_turn<std::uint32_t>(launch, job, unsigned(blocks), from, to);
  return true;
}

}  // namespace upfold::cuda
#endif
