// The fused gradients of groups: their choice of tiles, and their kernels for float32 rounded to TF32.
#include "fused_groups_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_GROUPS(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "compiled.h"
#include "fused_groups_plan.cuh"

namespace upfold::cuda {

extern template void run_groups<__half>(const Launch&, const GroupsPlan&, bool, const FusedOperands&);
extern template void run_groups<__nv_bfloat16>(const Launch&, const GroupsPlan&, bool, const FusedOperands&);

namespace {

GroupsPlan plan_groups(int device, const Problem& p, std::int64_t alignment, std::int64_t workspace_cap) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const SharedMemory shared = shared_memory(device);
  return GroupsPlanner(p, {shared, count, alignment, workspace_cap}).plan();
}

}  // namespace

FusedGroupsCall::FusedGroupsCall(int device, const Problem& p, std::int64_t alignment, std::int64_t workspace_cap)
    : device_(device), alignment_(alignment), problem_(p) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op == Operator::kConvTranspose || !multiplied || p.batch == 0 || code_capability(device) < 80) return;
  const GroupsPlan plan = plan_groups(device, p, alignment, workspace_cap);
  if (plan.possible) plan_ = std::make_shared<const GroupsPlan>(plan);
}

std::int64_t FusedGroupsCall::workspace_bytes() const { return plan_ == nullptr ? -1 : plan_->workspace_bytes; }

FusedGroupsWork FusedGroupsCall::work() const {
  if (plan_ == nullptr) return {};
  const GroupsJob& job = plan_->job;
  const std::int64_t size = element_bytes(problem_.dtype);
  const std::int64_t steps = plan_->tile.channels * size / 32;
  const std::int64_t products = std::int64_t(job.tile_h) * job.segments.value * job.taps * steps * plan_->tile.blocks;
  const std::int64_t of = problem_.op == Operator::kConv ? 1 : problem_.groups * job.ic_tiles.value;
  const std::int64_t packs = ceil_div(job.weight_bytes, std::int64_t(kGroupsThreads * sizeof(uint2)));
  return {job.tiles * of, plan_->blocks, plan_->loads, products, packs, plan_->tile.channels};
}

void FusedGroupsCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  require(plan_ != nullptr, "these gradients of groups do not fit this problem");
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.y);
  require(address % std::uintptr_t(alignment_) == 0, "y begins at ", address, "; it was planned for a multiple of ", alignment_);
  const std::uintptr_t other = reinterpret_cast<std::uintptr_t>(operands.x);
  require(!plan_->x_in_vectors || other % 16 == 0, "x begins at ", other, "; it was planned for a multiple of 16");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  const bool of_weight = problem_.op == Operator::kConvTransposeWeight;
  if (problem_.dtype == Dtype::kFloat32) return run_groups<float>(launch, *plan_, of_weight, operands);
  if (problem_.dtype == Dtype::kFloat16) return run_groups<__half>(launch, *plan_, of_weight, operands);
  run_groups<__nv_bfloat16>(launch, *plan_, of_weight, operands);
}

}  // namespace upfold::cuda
#endif
