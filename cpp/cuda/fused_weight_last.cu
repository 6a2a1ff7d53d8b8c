// The fused gradient of the weight whose channels are innermost: its tiles, its plan, and its kernels for float16 and float32.
#include "fused_weight_last_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT_LAST(__half)
UPFOLD_INSTANTIATE_WEIGHT_LAST_PACK(std::uint16_t, false)
UPFOLD_INSTANTIATE_WEIGHT_LAST_PACK(std::uint16_t, true)
UPFOLD_INSTANTIATE_WEIGHT_LAST_PACK(std::uint32_t, false)
UPFOLD_WEIGHT_LAST_FLOAT_TILES(UPFOLD_INSTANTIATE_WEIGHT_LAST_FLOAT_KERNEL)
UPFOLD_INSTANTIATE_WEIGHT_LAST_SUM(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_weight_last_tables.cuh"

namespace upfold::cuda {

extern template void run_weight_last<__nv_bfloat16>(const Launch&, const WeightLastPlan&, std::int64_t, int,
                                                    const FusedOperands&);

namespace {

template <typename Tile>
constexpr WeightLastTileSize size_of() {
  return {Tile::kRowGroups, Tile::kUnits, Tile::kFirst8, Tile::kSecond8, false, Tile::kThreads};
}
template <typename Tile>
constexpr WeightLastTileSize size_of_floats() {
  return {Tile::kRowGroups, Tile::kUnits, Tile::kColumns8 / 2, Tile::kColumns8 / 2, true, Tile::kThreads};
}
constexpr WeightLastTileSize kTiles[] = {
#define UPFOLD_TILE(index, Value, ...) size_of<WeightLastTile<__VA_ARGS__>>(),
    UPFOLD_WEIGHT_LAST_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, ...) size_of_floats<WeightLastFloatTile<__VA_ARGS__>>(),
        UPFOLD_WEIGHT_LAST_FLOAT_TILES(UPFOLD_TILE)
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
  for (const WeightLastTileSize& t : kTiles) tiles.push_back({64 * t.row_groups, 8 * t.set_columns8()});
  return tiles;
}

FusedWeightLastCall::FusedWeightLastCall(int device, const Problem& p, int config, std::int64_t alignment,
                                         std::int64_t workspace_cap)
    : device_(device), config_(config), problem_(p) {
  require(config >= 0 && config < kTileCount, "config = ", config, "; the gradient of the weight by channels has ", kTileCount);
  if (!can_run(device)) return;
  WeightLastPlan plan = plan_weight_last(p, kTiles[config], alignment, workspace_cap, shared_memory(device).of_block);
  if (plan.possible) plan_ = std::make_shared<const WeightLastPlan>(std::move(plan));
}

std::int64_t FusedWeightLastCall::workspace_bytes() const {
  return plan_ == nullptr ? -1 : plan_->partial_bytes + plan_->x.packed_bytes + plan_->y.packed_bytes;
}

FusedWeightLastWork FusedWeightLastCall::work() const {
  if (plan_ == nullptr) return {};
  const WeightLastJob& job = plan_->job;
  const std::int64_t patches = job.first_patch[job.sets.value] / job.sets.value;
  const std::int64_t copied = job.x_boxes * job.x_box + patches * job.y_box;
  const std::int64_t packed = (plan_->x.packed_bytes + plan_->y.packed_bytes) / plan_->batch * problem_.batch;
  return {
      plan_->tiles * plan_->parts,       job.length,        plan_->launches, job.steps,    copied, packed, plan_->partial_bytes,
      std::int64_t(plan_->store_cycles), job.cluster.value, job.squares,     plan_->planes};
}

void FusedWeightLastCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  require(plan_ != nullptr, "config = ", config_, "; it does not fit this problem");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (problem_.dtype == Dtype::kFloat32) return run_weight_last<float>(launch, *plan_, problem_.batch, config_, operands);
  if (problem_.dtype == Dtype::kFloat16) return run_weight_last<__half>(launch, *plan_, problem_.batch, config_, operands);
  run_weight_last<__nv_bfloat16>(launch, *plan_, problem_.batch, config_, operands);
}

}  // namespace upfold::cuda
#endif
