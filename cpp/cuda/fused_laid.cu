// The gradient of the input by taps that are laid out in shared memory: its choice of tiles, and its kernels for float16.
#include "fused_laid_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAID(__half, UPFOLD_LAID_HALF_TILES)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_laid_plan.cuh"

namespace upfold::cuda {

extern template void run_laid<__nv_bfloat16>(const Launch&, const LaidPlan&, int, const FusedOperands&);
extern template void run_laid<float>(const Launch&, const LaidPlan&, int, const FusedOperands&);

namespace {

constexpr LaidTileSize kLaidSizes[] = {{256, 192}, {256, 128}, {128, 192}, {128, 128}};
constexpr int kLaidTiles = int(sizeof(kLaidSizes) / sizeof(kLaidSizes[0]));

bool can_run_laid(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9 || !can_copy_boxes()) return false;
  const DeviceScope scope(device);
  return has_laid_kernels<__half>();
}

LaidPlan plan_laid(int device, const Problem& p, int config, std::int64_t alignment) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return LaidPlanner(p, kLaidSizes[config], shared_memory(device).of_block, multiprocessors, alignment).plan();
}

}  // namespace

std::vector<std::pair<int, int>> fused_laid_tiles() {
  std::vector<std::pair<int, int>> tiles;
  for (const LaidTileSize& size : kLaidSizes) tiles.emplace_back(int(size.rows), int(size.pixels));
  return tiles;
}

bool fused_laid_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConv || !multiplied || config < 0 || config >= kLaidTiles || p.batch == 0) return false;
  return can_run_laid(device) && plan_laid(device, p, config, alignment).possible;
}

FusedLaidCall::FusedLaidCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), config_(config), dtype_(p.dtype) {
  require(fused_laid_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  plan_ = std::make_shared<const LaidPlan>(plan_laid(device, p, config, alignment));
}

FusedLaidWork FusedLaidCall::work() const {
  const LaidJob& job = plan_->job;
  return {job.tiles, job.part_chunks, job.splits.value, job.stages, plan_->edges == kLaidBeside};
}

void FusedLaidCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  for (const void* const operand : {operands.x, operands.w, static_cast<const void*>(operands.y)}) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operand);
    require(address % 16 == 0, "an operand begins at ", address, "; it was planned for a multiple of 16");
  }
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (dtype_ == Dtype::kFloat32) return run_laid<float>(launch, *plan_, config_, operands);
  if (dtype_ == Dtype::kFloat16) return run_laid<__half>(launch, *plan_, config_, operands);
  run_laid<__nv_bfloat16>(launch, *plan_, config_, operands);
}

}  // namespace upfold::cuda
#endif
