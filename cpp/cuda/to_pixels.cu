// Copies of planes as pixels whose channels are innermost, by the kernel that packs sources for the fused method: a block turns
// pixels of as many channels as are 128 bytes in shared memory (fused_last_source.cuh).
#include "fused_last_source.cuh"

namespace upfold::cuda {

#define UPFOLD_INSTANTIATE(Bits) \
  template __global__ void fused_last_source_kernel<Bits>(const __grid_constant__ LastSourceJob, const Bits*, uint4*);
UPFOLD_INSTANTIATE(std::uint16_t)
UPFOLD_INSTANTIATE(std::uint32_t)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"
#include "to_pixels.h"

namespace upfold::cuda {

struct ToPixelsPlan {
  LastSourceJob job;
  std::int64_t samples;
  unsigned blocks;
  bool narrow;  // elements of 2 bytes
};

namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 30;  // pixels, vectors of a pixel, blocks

template <typename Bits>
void run_to_pixels(const Launch& launch, const ToPixelsPlan& plan, const void* from, void* to) {
  launch_in_turn("to_pixels", fused_last_source_kernel<Bits>, launch, plan.blocks, kSourceThreads,
                 source_at(plan.job, from, plan.samples), static_cast<const Bits*>(from), static_cast<uint4*>(to));
}

}  // namespace

ToPixelsCall::ToPixelsCall(int device, const PlanesTensor& tensor) : device_(device) {
  const std::int64_t size = element_bytes(tensor.dtype), channels = tensor.channels;
  const std::int64_t pixels = tensor.size[0] * tensor.size[1] * tensor.size[2], vectors = channels * size / 16;
  if (size > 4 || channels * size % 16 != 0 || pixels == 0 || channels >= kMost || tensor.samples * pixels >= kMost) return;
  ToPixelsPlan plan{source_job(tensor.strides, channels, vectors, pixels, tensor.size[2], tensor.size[1]), tensor.samples, 0,
                    size == 2};
  quicken_source(plan.job, tensor.strides, tensor.samples, size);
  plan.job.pixels = std::uint32_t(tensor.samples * pixels);
  const std::int64_t blocks = source_blocks(plan.job);
  if (blocks == 0 || blocks >= kMost) return;
  plan.blocks = unsigned(blocks);
  plan_ = std::make_shared<const ToPixelsPlan>(plan);
}

void ToPixelsCall::run(const void* from, void* to, std::uintptr_t stream) const {
  require(plan_ != nullptr, "planes whose channels are no whole vectors of 16 bytes, or too many");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  plan_->narrow ? run_to_pixels<std::uint16_t>(launch, *plan_, from, to) : run_to_pixels<std::uint32_t>(launch, *plan_, from, to);
}

}  // namespace upfold::cuda
#endif
