// The fused method whose channels are innermost: its choice of tiles, and its kernels for float32 rounded to TF32.
#include "fused_last_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_LAST(float, std::uint32_t)
UPFOLD_INSTANTIATE_LAST_SOURCE(std::uint32_t)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <limits>

#include "fused_last_plan.cuh"

namespace upfold::cuda {

extern template void run_last<__half>(const Launch&, const LastPlan&, int, const LastOperands&);
extern template void run_last<__nv_bfloat16>(const Launch&, const LastPlan&, int, const LastOperands&);
extern template void pack_last<__half>(const Launch&, const LastPlan&, const void*, void*);
extern template void pack_last<__nv_bfloat16>(const Launch&, const LastPlan&, const void*, void*);

namespace {

// Of a group: with fewer most of a chunk or of a product is empty.
constexpr std::int64_t kUncapped = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLeastLastSources = 16, kLeastLastResults = 8;

constexpr LastTileSize kLastTiles[] = {
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastTile<__VA_ARGS__>>(),
    UPFOLD_LAST_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastTurnedTile<__VA_ARGS__>>(),
        UPFOLD_LAST_TURNED_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastAlternatingTile<__VA_ARGS__>>(),
            UPFOLD_LAST_ALTERNATING_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastPlanesTile<__VA_ARGS__>>(),
                UPFOLD_LAST_PLANES_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastToPlanesTile<__VA_ARGS__>>(),
                    UPFOLD_LAST_TO_PLANES_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastTransposingTile<__VA_ARGS__>>(),
                        UPFOLD_LAST_TRANSPOSING_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastWholeTile<__VA_ARGS__>>(),
                            UPFOLD_LAST_WHOLE_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastWholeBoxesTile<__VA_ARGS__>>(),
                                UPFOLD_LAST_WHOLE_BOXES_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastExact<LastTile<__VA_ARGS__>>>(),
                                    UPFOLD_LAST_EXACT_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastExact<LastTurnedTile<__VA_ARGS__>>>(),
                                        UPFOLD_LAST_EXACT_TURNED_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastRunsTile<__VA_ARGS__>>(),
                                            UPFOLD_LAST_RUNS_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastWeightRowsTile<__VA_ARGS__>>(),
                                                UPFOLD_LAST_WEIGHT_ROWS_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) last_size_of<LastPlanesTile<__VA_ARGS__>>(),
                                                    UPFOLD_LAST_PLANES_OF_THREE_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr int kLastTileCount = int(sizeof(kLastTiles) / sizeof(kLastTiles[0]));

bool can_run_last(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9 || !can_copy_boxes()) return false;
  const DeviceScope scope(device);
  return has_last_kernels<float>();
}

LastPlan plan_last(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t cap) {
  const LastTileSize& tile = kLastTiles[config];
  const SharedMemory shared = shared_memory(device);
  const std::int64_t each = tile.blocks == 1 ? shared.of_block : shared.of_multiprocessor / tile.blocks - (1 << 10);
  const LastPlan plan = LastPlanner(p, tile, each, alignment, cap).plan(true);
  return plan.possible || cap == kUncapped ? plan : LastPlanner(p, tile, each, alignment, cap).plan(false);
}

}  // namespace

std::vector<FusedLastTile> fused_last_tiles() {
  std::vector<FusedLastTile> tiles;
  for (const LastTileSize& tile : kLastTiles)
    tiles.push_back({tile.product * tile.products, tile.columns, tile.phases, tile.blocks, tile.vectors});
  return tiles;
}

bool fused_last_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op == Operator::kConvTransposeWeight || !multiplied || config < 0 || config >= kLastTileCount) return false;
  // Of activations those that the kernels compute in full too: others they have only as exact as TF32 needs.
  const bool plain =
      p.activation == Activation::kNone || p.activation == Activation::kRelu || p.activation == Activation::kLeakyRelu;
  if (kLastTiles[config].exact && (p.dtype != Dtype::kFloat32 || !plain)) return false;
  const std::int64_t in = in_channels_per_group(p), out = out_channels_per_group(p);
  const bool forward = p.op == Operator::kConvTranspose;
  const std::int64_t results =
      (forward ? out : in) * (kLastTiles[config].runs || kLastTiles[config].weight_rows ? p.stride_w : 1);
  if ((forward ? in : out) < kLeastLastSources || results < kLeastLastResults) return false;
  return can_run_last(device) && (p.batch == 0 || plan_last(device, p, config, alignment, kUncapped).possible);
}

FusedLastCall::FusedLastCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap)
    : device_(device), config_(config), problem_(p) {
  require(fused_last_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const LastPlan>(plan_last(device, p, config, alignment, workspace_cap));
}

// What is packed of the weight begins the workspace, or has room of its own; behind it lies the source.
std::int64_t FusedLastCall::workspace_bytes() const { return plan_ == nullptr ? 0 : plan_->packed_bytes + plan_->source_bytes; }

std::int64_t FusedLastCall::packed_bytes() const { return plan_ == nullptr ? 0 : plan_->packed_bytes; }

FusedLastWork FusedLastCall::work() const {
  if (plan_ == nullptr) return {};
  const LastJob& job = plan_->job;
  const std::int64_t sets = job.sets.value;
  const double chunks = double(job.chunks) / double(job.splits.value) / double(sets);
  const double copied = double(plan_->patches) * chunks * double(plan_->patch_copied);
  return {std::int64_t(job.tiles),
          job.pairs * chunks,
          copied,
          job.resident,
          std::int64_t(job.splits.value),
          plan_->packed_bytes,
          plan_->source_bytes / plan_->batch * job.batch,
          job.loose,
          job.sharers};
}

std::vector<std::int64_t> FusedLastCall::packing() const {
  if (plan_ == nullptr) return {};
  const LastPackJob& job = plan_->pack;
  std::vector<std::int64_t> layout{config_,
                                   std::int64_t(problem_.dtype),
                                   std::int64_t(problem_.op),
                                   job.flat,
                                   problem_.groups,
                                   job.source_channels,
                                   job.result_channels,
                                   problem_.kernel_d,
                                   problem_.kernel_h,
                                   problem_.kernel_w};
  layout.insert(layout.end(), job.taps, job.taps + plan_->job.pairs);
  return layout;
}

void FusedLastCall::pack(const void* w, void* packed, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (problem_.dtype == Dtype::kFloat32) return pack_last<float>(launch, *plan_, w, packed);
  if (problem_.dtype == Dtype::kFloat16) return pack_last<__half>(launch, *plan_, w, packed);
  pack_last<__nv_bfloat16>(launch, *plan_, w, packed);
}

void FusedLastCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.x);
  require(plan_->source_bytes > 0 || address % 16 == 0, "the source begins at ", address,
          "; it was planned for a multiple of 16");
  const std::uintptr_t weight = reinterpret_cast<std::uintptr_t>(operands.w);
  require(plan_->weights == LastWeights::kPacked || weight % 16 == 0, "the weight begins at ", weight,
          "; it was planned for a multiple of 16");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  const bool is_packed = operands.packed != nullptr;
  unsigned char* const workspace = static_cast<unsigned char*>(operands.workspace);
  unsigned char* const source = workspace + (is_packed ? 0 : plan_->packed_bytes);
  const LastOperands own{operands.x, operands.w, operands.bias, operands.y, is_packed ? operands.packed : operands.workspace,
                         source,     is_packed};
  if (problem_.dtype == Dtype::kFloat32) return run_last<float>(launch, *plan_, config_, own);
  if (problem_.dtype == Dtype::kFloat16) return run_last<__half>(launch, *plan_, config_, own);
  run_last<__nv_bfloat16>(launch, *plan_, config_, own);
}

}  // namespace upfold::cuda
#endif
