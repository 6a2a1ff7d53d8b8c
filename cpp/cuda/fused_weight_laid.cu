// The gradient of the weight by taps that are laid out in shared memory: its choice of tiles, and its kernels for float16.
#include "fused_weight_laid_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_LAID(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_weight_laid_plan.cuh"

namespace upfold::cuda {

extern template void run_weight_laid<__nv_bfloat16>(const Launch&, const WeightLaidPlan&, int, const FusedOperands&);

namespace {

constexpr WeightLaidTileSize kSizes[] = {{256, 192}, {256, 128}, {128, 192}, {128, 128}};
constexpr int kTileCount = int(sizeof(kSizes) / sizeof(kSizes[0]));

bool can_run_weight_laid(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9 || !can_copy_boxes()) return false;
  const DeviceScope scope(device);
  return has_weight_laid_kernels<__half>();
}

}  // namespace

std::vector<std::pair<int, int>> fused_weight_laid_tiles() {
  std::vector<std::pair<int, int>> tiles;
  for (const WeightLaidTileSize& size : kSizes) tiles.emplace_back(int(size.rows), int(size.columns));
  return tiles;
}

FusedWeightLaidCall::FusedWeightLaidCall(int device, const Problem& p, int config, std::int64_t alignment,
                                         std::int64_t workspace_cap)
    : device_(device), config_(config), dtype_(p.dtype) {
  require(config >= 0 && config < kTileCount, "config = ", config, "; the gradient of the weight by taps that are laid out has ",
          kTileCount);
  const bool multiplied = p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConvTransposeWeight || !multiplied || p.batch == 0 || !can_run_weight_laid(device)) return;
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const std::int64_t shared = shared_memory(device).of_block;
  const WeightLaidPlan plan = WeightLaidPlanner(p, kSizes[config], shared, multiprocessors, alignment, workspace_cap).plan();
  if (plan.possible) plan_ = std::make_shared<const WeightLaidPlan>(plan);
}

std::int64_t FusedWeightLaidCall::workspace_bytes() const {
  return plan_ == nullptr ? -1 : plan_->partial_bytes + plan_->row_sums_bytes + plan_->packed_bytes;
}

std::int64_t FusedWeightLaidCall::sums() const { return plan_ == nullptr ? 0 : plan_->sum.sum_rows; }

FusedWeightLaidWork FusedWeightLaidCall::work() const {
  if (plan_ == nullptr) return {};
  const WeightLaidJob& job = plan_->job;
  return {plan_->tiles,     job.splits.value, plan_->clusters,     job.part_chunks,     job.stages,
          job.buffer_bytes, plan_->paired,    plan_->packed_bytes, plan_->partial_bytes};
}

void FusedWeightLaidCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  require(plan_ != nullptr, "config = ", config_, "; it does not fit this problem");
  require(operands.bias == nullptr || sums() > 0, "config = ", config_, "; it does not sum the channels of this gradient");
  for (const void* const operand : {operands.x, operands.w, static_cast<const void*>(operands.y)}) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operand);
    require(address % 16 == 0, "an operand begins at ", address, "; it was planned for a multiple of 16");
  }
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (dtype_ == Dtype::kFloat16) return run_weight_laid<__half>(launch, *plan_, config_, operands);
  run_weight_laid<__nv_bfloat16>(launch, *plan_, config_, operands);
}

}  // namespace upfold::cuda
#endif
