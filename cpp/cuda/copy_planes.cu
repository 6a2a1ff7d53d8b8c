// Planes, [sample][channel][pixel] with dense pixels, to [channel][sample][pixel] or to [sample][pixel][channel].
//
// Side by side: a lane owns kItems accesses of kBytes, 32 lanes apart, counted through the samples and channels; lanes own
// neighbouring accesses, so that loads and stores of a warp are runs. Channels to the front: a block turns a tile of 32 pixels
// and 64 channels round in shared memory.
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256, kItems = 4;

// Distances in accesses.
struct CopyJob {
  Divisor pixels, samples;
  std::uint32_t accesses;
  std::int64_t x_sample, x_channel, row;
};

template <typename Access>
__global__ void __launch_bounds__(kThreads)
    copy_planes_kernel(const CopyJob job, const Access* __restrict__ x, Access* __restrict__ to) {
  const std::uint32_t first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * 32 * kItems + threadIdx.x % 32;
  Access values[kItems];
  std::int64_t targets[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    std::uint32_t rest = first + item * 32;
    const bool live = rest < job.accesses;
    const std::uint32_t pixel = take(job.pixels, rest), sample = take(job.samples, rest);
    targets[item] = live ? rest * job.row + std::int64_t(sample) * job.pixels.value + pixel : -1;
    if (live) values[item] = x[sample * job.x_sample + rest * job.x_channel + pixel];
  }
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (targets[item] >= 0) to[targets[item]] = values[item];
  }
}

constexpr int kTilePixels = 32, kTileChannels = 64, kTileWarps = kThreads / 32;

struct TransposeJob {
  Divisor tiles, pixels;  // of a sample
  std::uint32_t positions;
  std::int32_t channels;
  std::int64_t sample, channel;
};

__global__ void __launch_bounds__(kThreads)
    transpose_planes_kernel(const TransposeJob job, const float* __restrict__ from, float* __restrict__ to) {
  __shared__ float tile[kTileChannels][kTilePixels + 1];
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  std::uint32_t rest = blockIdx.x;
  const std::uint32_t first = take(job.tiles, rest) * kTilePixels, position = first + std::uint32_t(lane);
  const std::int32_t first_channel = std::int32_t(rest) * kTileChannels, channels = job.channels - first_channel;
  std::uint32_t sample = position;
  const std::uint32_t pixel = take(job.pixels, sample);
  from += sample * job.sample + first_channel * job.channel + pixel;
#pragma unroll
  for (int i = 0; i < kTileChannels / kTileWarps; ++i) {
    const std::int32_t c = warp + i * kTileWarps;
    if (position < job.positions && c < channels) tile[c][lane] = from[c * job.channel];
  }
  __syncthreads();  // the tile is complete
  to += std::int64_t(first) * job.channels + first_channel;
#pragma unroll
  for (int i = 0; i < kTilePixels / kTileWarps; ++i) {
    const std::int32_t at = warp + i * kTileWarps;
#pragma unroll
    for (int c = lane; c < kTileChannels; c += 32) {
      if (first + std::uint32_t(at) < job.positions && c < channels) to[std::int64_t(at) * job.channels + c] = tile[c][at];
    }
  }
}

#define UPFOLD_COPY_TYPES(DO) DO(unsigned short) DO(unsigned) DO(uint2) DO(uint4)
#define UPFOLD_INSTANTIATE(Access) template __global__ void copy_planes_kernel<Access>(const CopyJob, const Access*, Access*);
UPFOLD_COPY_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "copy_planes.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;

// The widest access, in bytes, that every distance and address allows.
std::int64_t widest(const Planes& planes, std::int64_t row, std::int64_t element, const void* x, const void* to) {
  const std::int64_t bits = std::int64_t(reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(to)) |
                            (planes.pixels | planes.sample | planes.channel | row) * element | 16;
  return bits & -bits;
}

template <typename Access>
void launch_copy(const Launch& launch, const Planes& planes, std::int64_t row, std::int64_t element, const void* x, void* to) {
  const auto accesses = [element](std::int64_t elements) { return elements * element / std::int64_t(sizeof(Access)); };
  const std::int64_t all = accesses(planes.pixels) * planes.samples * planes.channels;
  const CopyJob job{make_divisor(accesses(planes.pixels)),
                    make_divisor(planes.samples),
                    std::uint32_t(all),
                    accesses(planes.sample),
                    accesses(planes.channel),
                    accesses(row)};
  launch_kernel("copy of x", copy_planes_kernel<Access>, launch, unsigned((all + kThreads * kItems - 1) / (kThreads * kItems)),
                kThreads, job, static_cast<const Access*>(x), static_cast<Access*>(to));
}

}  // namespace

bool copy_planes(const Launch& launch, Dtype dtype, const Planes& planes, std::int64_t row, const void* x, void* to) {
  const std::int64_t element = element_bytes(dtype), access = widest(planes, row, element, x, to);
  if (planes.pixels * planes.samples * planes.channels * element / access >= kMost) return false;
#define UPFOLD_CASE(Access)                                   \
  if (access == std::int64_t(sizeof(Access))) {               \
    launch_copy<Access>(launch, planes, row, element, x, to); \
    return true;                                              \
  }
  UPFOLD_COPY_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

bool transpose_planes(const Launch& launch, const Planes& planes, const float* from, float* to) {
  const std::int64_t positions = planes.samples * planes.pixels, tiles = (positions + kTilePixels - 1) / kTilePixels;
  const std::int64_t channel_tiles = (planes.channels + kTileChannels - 1) / kTileChannels;
  if (positions >= kMost || planes.channels >= kMost || tiles * channel_tiles >= kMost) return false;
  const TransposeJob job{
      make_divisor(tiles), make_divisor(planes.pixels), std::uint32_t(positions), std::int32_t(planes.channels), planes.sample,
      planes.channel};
  launch_kernel("transpose", transpose_planes_kernel, launch, unsigned(tiles * channel_tiles), kThreads, job, from, to);
  return true;
}

}  // namespace upfold::cuda
#endif
