// The fused gradient of the input, for float32 rounded to TF32, and what the other types share.
#include "fused_input_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_INPUTS(float)
UPFOLD_INSTANTIATE_INPUTS_LATER

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_input_plan.cuh"

namespace upfold::cuda {

extern template void run_input<__half>(const Launch&, const InputPlan&, const FusedInputOperands&, int);
extern template void run_input<__nv_bfloat16>(const Launch&, const InputPlan&, const FusedInputOperands&, int);

namespace {

constexpr std::int64_t kLeastInputChannels = 16, kLeastReducedChannels = 3;  // of a group: fewer leave most of a tile empty

template <typename Tile>
constexpr InputTileSize input_size_of() {
  return {Tile::kPixels,
          Tile::kChannels,
          Tile::kTurn,
          Tile::kReads,
          Tile::kOfWords,
          Tile::kStages,
          kInputHasLater<Tile> ? Tile::kLaterBytes : 0};
}
constexpr InputTileSize kInputTiles[] = {
#define UPFOLD_TILE(index, Value, ...) input_size_of<InputTile<__VA_ARGS__>>(),
    UPFOLD_INPUT_TILES(UPFOLD_TILE, ) UPFOLD_INPUT_WORD_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr int kInputTileCount = int(sizeof(kInputTiles) / sizeof(kInputTiles[0]));

bool can_run_input(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9) return false;
  const DeviceScope scope(device);
  return has_input_kernels<float>();
}

InputPlan plan_input(int device, const Problem& p, int config, std::int64_t alignment) {
  const std::int64_t shared = shared_memory(device).of_block;
  const InputPlan plan = InputPlanner(p, kInputTiles[config], shared, alignment, false).plan();
  if (kInputTiles[config].later_bytes == 0 || p.dtype != Dtype::kFloat32 || !plan.possible || plan.job.whole < kLeastLaterTiles)
    return plan;
  const InputPlan later = InputPlanner(p, kInputTiles[config], shared, alignment, true).plan();
  return later.possible && later.job.whole >= kLeastLaterTiles ? later : plan;
}

}  // namespace

std::vector<FusedInputTile> fused_input_tiles() {
  std::vector<FusedInputTile> tiles;
  for (const InputTileSize& tile : kInputTiles) tiles.push_back({tile.pixels, tile.channels, int(tile.reads)});
  return tiles;
}

bool fused_input_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConv || !multiplied || config < 0 || config >= kInputTileCount) return false;
  if (in_channels_per_group(p) < kLeastInputChannels || out_channels_per_group(p) < kLeastReducedChannels) return false;
  if (kInputTiles[config].of_words && !can_copy_boxes()) return false;
  return can_run_input(device) && (p.batch == 0 || plan_input(device, p, config, alignment).possible);
}

FusedInputCall::FusedInputCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), config_(config), alignment_(alignment), problem_(p) {
  require(fused_input_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const InputPlan>(plan_input(device, p, config, alignment));
}

std::int64_t FusedInputCall::workspace_bytes() const { return plan_ == nullptr ? 0 : plan_->workspace_bytes; }

FusedInputWork FusedInputCall::work() const {
  if (plan_ == nullptr) return {};
  const InputJob& job = plan_->job;
  const std::int64_t steps = std::int64_t(job.chunks) * job.steps;
  const std::int64_t copied = std::int64_t(job.chunks) * job.chunk_channels * job.columns * job.grain;
  const std::int64_t split_tiles = (plan_->blocks - job.whole) / job.splits.value;
  return {job.whole, split_tiles, job.splits.value, steps, copied, job.grain, job.resident, job.later > 0, job.clustered};
}

void FusedInputCall::run(const FusedInputOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.y);
  require(address % std::uintptr_t(alignment_) == 0, "y begins at ", address, "; it was planned for a multiple of ", alignment_);
  if (kInputTiles[config_].of_words) {
    const auto w = reinterpret_cast<std::uintptr_t>(operands.w);
    require(w % 16 == 0, "w begins at ", w, "; it was planned for a multiple of 16");
  }
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (problem_.dtype == Dtype::kFloat32) return run_input<float>(launch, *plan_, operands, config_);
  if (problem_.dtype == Dtype::kFloat16) return run_input<__half>(launch, *plan_, operands, config_);
  run_input<__nv_bfloat16>(launch, *plan_, operands, config_);
}

}  // namespace upfold::cuda
#endif
