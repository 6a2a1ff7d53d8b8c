// The fused gradient of the weight: its tiles, its plan, and its kernels for float32 rounded to TF32.
#include "fused_weight_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_WEIGHT(float, UPFOLD_WEIGHT_FLOAT_READS)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_weight_boxes_launch.cuh"
#include "fused_weight_plan.cuh"

namespace upfold::cuda {

// Compiled in sources of their own.
extern template void run_fused_weight<__half>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);
extern template void run_fused_weight<__nv_bfloat16>(const Launch&, const FusedWeightPlan&, int, const FusedOperands&);

namespace {

template <typename Tile>
constexpr FusedWeightTileSize size_of() {
  return {Tile::kTaps, Tile::kWarps, Tile::kChannels, Tile::kBlocks, Tile::kCopiers, Tile::kThreads, false, false};
}
template <typename Tile>
constexpr FusedWeightTileSize size_of_boxes() {
  return {Tile::kTaps, Tile::kWarps, Tile::kChannels, Tile::kBlocks, 0, Tile::kThreads, true, kWeightIsWide<Tile>};
}
constexpr FusedWeightTileSize kTiles[] = {
#define UPFOLD_TILE(index, kReads, Value, ...) size_of<FusedWeightTile<__VA_ARGS__>>(),
    UPFOLD_WEIGHT_TILES(UPFOLD_TILE, UPFOLD_WEIGHT_NO_READS, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, kReads, Value, ...) size_of_boxes<FusedWeightBoxTile<__VA_ARGS__>>(),
        UPFOLD_WEIGHT_BOX_TILES(UPFOLD_TILE, UPFOLD_WEIGHT_NO_READS, )
#undef UPFOLD_TILE
};
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

// Whether the kernels were compiled for the device with warpgroups; without them all threads copy and multiply.
bool has_warpgroups(int device) {
  const DeviceScope scope(device);
  cudaFuncAttributes found;
  const auto kernel = fused_weight_kernel<float, FusedWeightTile<UPFOLD_FIRST_WEIGHT_TILE>, kAny>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > sizeof(FusedWeightShared);
}

// Where pixels do not lie next to one another along the width, but channels do, from copies as planes.
FusedWeightPlan plan_of_planes(const Problem& p, const FusedWeightTileSize& tile, std::int64_t alignment, std::int64_t cap,
                               const SharedMemory& shared) {
  Problem planes = p;
  Pixels x{}, y{};
  if (p.in_w > 1 && p.x.w != 1) x = innermost_pixels(p.x, p.batch, p.in_channels, p.in_d, p.in_h, p.in_w);
  if (p.out_w > 1 && p.y.w != 1) y = innermost_pixels(p.y, p.batch, p.out_channels, p.out_d, p.out_h, p.out_w);
  if (x.samples > 0) planes.x = plane_strides(x, p.in_h, p.in_w);
  if (y.samples > 0) planes.y = plane_strides(y, p.out_h, p.out_w);
  const std::int64_t bytes = planes_bytes(x, p.dtype) + planes_bytes(y, p.dtype);
  if (bytes >= cap) return {};
  FusedWeightPlan plan = plan_fused_weight(planes, tile, alignment, cap - bytes, shared);
  plan.x_pixels = x, plan.y_pixels = y, plan.planes_bytes = bytes, plan.workspace_bytes += bytes;
  return plan;
}

}  // namespace

std::vector<FusedWeightTileSize> fused_weight_tiles() { return {kTiles, kTiles + kTileCount}; }

FusedWeightCall::FusedWeightCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap)
    : device_(device), config_(config), problem_(p) {
  require(config >= 0 && config < kTileCount, "config = ", config, "; the gradient of the weight has ", kTileCount);
  FusedWeightTileSize tile = kTiles[config];
  if (!has_warpgroups(device)) tile.threads = tile.copiers = 32 * tile.warps;
  if (tile.boxes && (tile.copiers > 0 || !can_copy_boxes())) return;
  const FusedWeightPlan plan = plan_of_planes(p, tile, alignment, workspace_cap, shared_memory(device));
  if (plan.possible) plan_ = std::make_shared<const FusedWeightPlan>(plan);
}

std::int64_t FusedWeightCall::workspace_bytes() const { return plan_ == nullptr ? -1 : plan_->workspace_bytes; }

FusedWeightWork FusedWeightCall::work() const {
  if (plan_ == nullptr) return {};
  const FusedWeightJob& job = plan_->job;
  const std::int64_t packed = 16 * (std::int64_t(plan_->x_pack.vectors) + plan_->y_pack.vectors);
  if (plan_->boxes.width > 0)
    return {std::int64_t(plan_->blocks),
            job.length,
            job.products,
            plan_->engine_cycles,
            packed,
            plan_->planes_bytes,
            std::int64_t(plan_->sharers),
            plan_->boxes.tap_row > 0,
            std::int64_t(job.together.value)};
  const auto copies = [](std::int64_t count, int grain) { return grain == 1 ? 4 * count : count; };
  const std::int64_t rows = std::int64_t(job.block_planes) * kPlaneChannels * job.rows.value;
  return {std::int64_t(plan_->blocks),
          job.length,
          job.products,
          copies(std::int64_t(job.x_pieces) * kTiles[config_].channels, job.x_grain) + copies(rows * job.y_pieces, job.y_grain),
          0,
          plan_->planes_bytes,
          1,
          false,
          1};
}

std::int64_t FusedWeightCall::sums() const { return plan_ != nullptr && plan_->sums ? plan_->sum.row_parts : 0; }

void FusedWeightCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  require(plan_ != nullptr, "config = ", config_, "; it does not fit this problem");
  require(operands.bias == nullptr || plan_->sums, "config = ", config_, "; it does not sum the channels of this gradient");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  FusedOperands own = operands;
  unsigned char* to = static_cast<unsigned char*>(operands.workspace);
  const bool has_x = plan_->x_pixels.samples > 0;
  if (has_x) {
    to_planes(launch, problem_.dtype, plan_->x_pixels, operands.x, to);
    own.x = to, to += planes_bytes(plan_->x_pixels, problem_.dtype);
  }
  if (plan_->y_pixels.samples > 0) {
    to_planes(launch, problem_.dtype, plan_->y_pixels, operands.y, to, has_x);
    own.y = to, to += planes_bytes(plan_->y_pixels, problem_.dtype);
  }
  own.workspace = to;
  if (problem_.dtype == Dtype::kFloat32) return run_fused_weight<float>(launch, *plan_, config_, own);
  if (problem_.dtype == Dtype::kFloat16) return run_fused_weight<__half>(launch, *plan_, config_, own);
  run_fused_weight<__nv_bfloat16>(launch, *plan_, config_, own);
}

}  // namespace upfold::cuda
#endif
