// The fused gradient of the weight whose channels are innermost: its tiles, its plan, and its kernels for float16.
#include "fused_weight_last_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_LAST(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_weight_last_tables.cuh"

namespace upfold::cuda {

extern template void run_weight_last<__nv_bfloat16>(const Launch&, const WeightLastPlan&, std::int64_t, int,
                                                    const FusedOperands&);

namespace {

constexpr WeightLastTileSize kTiles[] = {
#define UPFOLD_TILE(index, Value, rows, first, second) {rows, first, second},
    UPFOLD_WEIGHT_LAST_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

bool can_run(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9 || !can_copy_boxes()) return false;
  const DeviceScope scope(device);
  return has_weight_last_kernels<__half>();
}

}  // namespace

std::vector<FusedWeightLastTile> fused_weight_last_tiles() {
  std::vector<FusedWeightLastTile> tiles;
  for (const WeightLastTileSize& t : kTiles) tiles.push_back({64 * t.row_groups, 8 * (t.first8 + t.second8) * t.units()});
  return tiles;
}

FusedWeightLastCall::FusedWeightLastCall(int device, const Problem& p, int config, std::int64_t alignment,
                                         std::int64_t workspace_cap)
    : device_(device), config_(config), problem_(p) {
  require(config >= 0 && config < kTileCount, "config = ", config, "; the gradient of the weight by channels has ", kTileCount);
  if (!can_run(device)) return;
  WeightLastPlan plan = WeightLastPlanner(p, kTiles[config], alignment, workspace_cap, shared_memory(device).of_block).plan();
  if (plan.possible) plan_ = std::make_shared<const WeightLastPlan>(std::move(plan));
}

std::int64_t FusedWeightLastCall::workspace_bytes() const {
  return plan_ == nullptr ? -1 : plan_->partial_bytes + plan_->x.packed_bytes + plan_->y.packed_bytes;
}

FusedWeightLastWork FusedWeightLastCall::work() const {
  if (plan_ == nullptr) return {};
  const WeightLastJob& job = plan_->job;
  const std::int64_t patches = job.first_patch[job.sets.value] / job.sets.value;
  const std::int64_t copied = kTiles[config_].row_groups * job.x_box + patches * job.y_box;
  const std::int64_t packed = (plan_->x.packed_bytes + plan_->y.packed_bytes) / plan_->batch * problem_.batch;
  return {plan_->tiles * plan_->parts, job.length, plan_->launches, job.steps, copied, packed, plan_->partial_bytes};
}

void FusedWeightLastCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  require(plan_ != nullptr, "config = ", config_, "; it does not fit this problem");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (problem_.dtype == Dtype::kFloat16) return run_weight_last<__half>(launch, *plan_, problem_.batch, config_, operands);
  run_weight_last<__nv_bfloat16>(launch, *plan_, problem_.batch, config_, operands);
}

}  // namespace upfold::cuda
#endif
