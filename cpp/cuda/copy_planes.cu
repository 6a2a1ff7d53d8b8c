// x side by side: [sample][channel][pixel] to [channel][sample][pixel], pixels dense in both.
//
// A lane owns kItems accesses of kBytes, 32 lanes apart, counted through the samples and channels; lanes own neighbouring
// accesses, so that loads and stores of a warp are runs. No shared memory, no barrier.
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
std::int64_t widest(const PlanesBlock& block, std::int64_t element, const void* x, const void* to) {
  const std::int64_t bits = std::int64_t(reinterpret_cast<std::uintptr_t>(x) | reinterpret_cast<std::uintptr_t>(to)) |
                            (block.pixels | block.x_sample | block.x_channel | block.row) * element | 16;
  return bits & -bits;
}

template <typename Access>
void launch_copy(const Launch& launch, const PlanesBlock& block, std::int64_t element, const void* x, void* to) {
  const auto accesses = [element](std::int64_t elements) { return elements * element / std::int64_t(sizeof(Access)); };
  const std::int64_t all = accesses(block.pixels) * block.samples * block.channels;
  const CopyJob job{make_divisor(accesses(block.pixels)),
                    make_divisor(block.samples),
                    std::uint32_t(all),
                    accesses(block.x_sample),
                    accesses(block.x_channel),
                    accesses(block.row)};
  launch_kernel("copy of x", copy_planes_kernel<Access>, launch, unsigned((all + kThreads * kItems - 1) / (kThreads * kItems)),
                kThreads, job, static_cast<const Access*>(x), static_cast<Access*>(to));
}

}  // namespace

bool copy_planes(const Launch& launch, Dtype dtype, const PlanesBlock& block, const void* x, void* to) {
  const std::int64_t element = element_bytes(dtype), access = widest(block, element, x, to);
  if (block.pixels * block.samples * block.channels * element / access >= kMost) return false;
#define UPFOLD_CASE(Access)                             \
  if (access == std::int64_t(sizeof(Access))) {         \
    launch_copy<Access>(launch, block, element, x, to); \
    return true;                                        \
  }
  UPFOLD_COPY_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
