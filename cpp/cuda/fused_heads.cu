// The fused method for heads: its choice of tiles, and its kernels for float32 rounded to TF32.
#include "fused_heads_launch.cuh"

namespace upfold::cuda {

UPFOLD_HEADS_NARROW(UPFOLD_INSTANTIATE_HEADS_KERNEL, float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_heads_plan.cuh"

namespace upfold::cuda {

extern template void run_heads<__half>(const Launch&, const HeadsPlan&, int, const FusedOperands&);
extern template void run_heads<__nv_bfloat16>(const Launch&, const HeadsPlan&, int, const FusedOperands&);

namespace {

constexpr int kHeadsBlocks[] = {4, 8};
constexpr int kHeadsTiles = int(sizeof(kHeadsBlocks) / sizeof(kHeadsBlocks[0]));

bool can_run_heads(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9 || !can_copy_boxes()) return false;
  const DeviceScope scope(device);
  return has_heads_kernels<float>();
}

HeadsPlan plan_heads(int device, const Problem& p, int config, std::int64_t alignment) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return HeadsPlanner(p, kHeadsBlocks[config], shared_memory(device).of_block, alignment, count).plan();
}

}  // namespace

std::vector<int> fused_heads_tiles() {
  std::vector<int> pixels;
  for (const int blocks : kHeadsBlocks) pixels.push_back(8 * blocks);
  return pixels;
}

bool fused_heads_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConvTranspose || !multiplied || config < 0 || config >= kHeadsTiles) return false;
  return can_run_heads(device) && (p.batch == 0 || plan_heads(device, p, config, alignment).possible);
}

FusedHeadsCall::FusedHeadsCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), config_(config), problem_(p) {
  require(fused_heads_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const HeadsPlan>(plan_heads(device, p, config, alignment));
}

FusedHeadsWork FusedHeadsCall::work() const {
  if (plan_ == nullptr) return {};
  const HeadsJob& job = plan_->job;
  const std::int64_t products = job.steps * std::int64_t(4) * kHeadsBlocks[config_];
  return {plan_->blocks, plan_->warps, plan_->turns, job.each, products, job.slot_bytes};
}

void FusedHeadsCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.x);
  require(address % 16 == 0, "x begins at ", address, "; it was planned for a multiple of 16");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  const int blocks = kHeadsBlocks[config_];
  if (problem_.dtype == Dtype::kFloat32) return run_heads<float>(launch, *plan_, blocks, operands);
  if (problem_.dtype == Dtype::kFloat16) return run_heads<__half>(launch, *plan_, blocks, operands);
  run_heads<__nv_bfloat16>(launch, *plan_, blocks, operands);
}

}  // namespace upfold::cuda
#endif
