// The fused method: its choice of tiles, and its kernels for float32 rounded to TF32.
#include "fused_launch.cuh"
#include "fused_pixels_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_FUSED(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>
#include <limits>

#include "fused_equal.h"
#include "fused_phases.h"
#include "fused_plan.cuh"

namespace upfold::cuda {

// Compiled in sources of their own.
extern template void run_fused<__half>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template void run_fused<__nv_bfloat16>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template void run_warpgroups<float>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template void run_warpgroups<__half>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template void run_warpgroups<__nv_bfloat16>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template void run_pixels<float>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template void run_pixels<__half>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template void run_pixels<__nv_bfloat16>(const Launch&, const FusedPlan&, const FusedOperands&, int);
extern template bool has_warpgroups<float>();

namespace {

template <typename Tile>
constexpr FusedTileSize size_of() {
  FusedTileSize size{
      Tile::kChannels, Tile::kPhasesH, Tile::kPhasesW, Tile::kUnits, Tile::kVectors, Tile::kThreads, Tile::kBlocks, 0, 0, 0,
      false,           false,          false};
  if constexpr (kOfWarpgroups<Tile>) {
    size.threads = Tile::kBlockThreads, size.products = Tile::kInsts, size.product_groups = Tile::kInstN8;
    size.packed_inputs = Tile::kPackedInputs;
  }
  if constexpr (kOfPixels<Tile>) {
    size.threads = Tile::kBlockThreads, size.pixels = true, size.whole = Tile::kWhole;
    size.staged_bytes = Tile::kWarps * kPixelStagedVectors<Tile> * kWordBytes;
  }
  return size;
}
constexpr FusedTileSize kTiles[] = {
#define UPFOLD_TILE(index, Value, ...) size_of<FusedTile<__VA_ARGS__>>(),
    UPFOLD_FUSED_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) size_of<WarpgroupTile<__VA_ARGS__>>(),
        UPFOLD_WARPGROUP_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
#define UPFOLD_TILE(index, Value, ...) size_of<PixelTile<__VA_ARGS__>>(),
            UPFOLD_PIXEL_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr std::int64_t kUncapped = std::numeric_limits<std::int64_t>::max();
constexpr int kTileCount = int(sizeof(kTiles) / sizeof(kTiles[0]));

// Tiles of pixels and channels come first, then those of equal kernel and stride, then those of phases.
int first_phase_tile() {
  static const int first = kTileCount + int(equal_tiles().size());
  return first;
}

// Those of float16 are older than those of the other types, and than asynchronous copies.
bool has_tensor_cores(int device, Dtype dtype) { return code_capability(device) >= (dtype == Dtype::kFloat16 ? 75 : 80); }

// Whether a tile's kernel is there: warpgroups are of compute capability 9.0 alone, and must have been compiled for it.
bool is_compiled(int device, int config) {
  if (config < kFirstWarpgroupTile) return true;
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9) return false;
  const DeviceScope scope(device);
  return has_warpgroups<float>();
}

// The launches of a tile of pixels and channels.
void run_plan(const Launch& launch, Dtype dtype, const FusedPlan& plan, const FusedOperands& operands, int config) {
  const auto run = [&](auto tiles, auto warpgroup_tiles, auto pixel_tiles) {
    if (config >= kFirstPixelTile) return pixel_tiles(launch, plan, operands, config);
    if (config < kFirstWarpgroupTile) return tiles(launch, plan, operands, config);
    warpgroup_tiles(launch, plan, operands, config);
  };
  if (dtype == Dtype::kFloat32) return run(run_fused<float>, run_warpgroups<float>, run_pixels<float>);
  if (dtype == Dtype::kFloat16) return run(run_fused<__half>, run_warpgroups<__half>, run_pixels<__half>);
  run(run_fused<__nv_bfloat16>, run_warpgroups<__nv_bfloat16>, run_pixels<__nv_bfloat16>);
}

}  // namespace

std::vector<FusedTileSize> fused_tiles() {
  std::vector<FusedTileSize> tiles(kTiles, kTiles + kTileCount);
  for (const EqualTileSize& tile : equal_tiles())
    tiles.push_back({tile.rows, 0, 0, tile.units, 0, tile.threads, tile.blocks, 0, 0, 0, false, false, false});
  for (const PhaseTileSize& tile : phase_tiles())
    tiles.push_back({tile.rows, 1, 1, tile.units, 0, tile.threads, tile.blocks, 0, 0, 0, false, false, false, true});
  return tiles;
}

bool fused_fits(int device, const Problem& p, int config, std::int64_t alignment, bool exact) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConvTranspose || !multiplied || config < 0 || !has_tensor_cores(device, p.dtype)) return false;
  if (config >= first_phase_tile())
    return p.batch == 0 || plan_phases(device, p, config - first_phase_tile(), alignment, exact) != nullptr;
  if (exact && p.dtype == Dtype::kFloat32) return false;
  if (config >= kTileCount) return equal_fits(device, p, config - kTileCount);
  if (!is_compiled(device, config)) return false;
  return p.batch == 0 || plan_fused(p, kTiles[config], shared_memory(device), alignment, kUncapped).possible;
}

FusedCall::FusedCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap, bool exact)
    : device_(device), config_(config), alignment_(alignment), exact_(exact), problem_(p) {
  require(fused_fits(device, p, config, alignment, exact), "config = ", config, "; it does not fit this problem");
  if (p.batch == 0) return;
  if (config >= first_phase_tile()) phases_ = plan_phases(device, p, config - first_phase_tile(), alignment, exact);
  if (config >= kTileCount) return;
  plan_ = std::make_shared<const FusedPlan>(plan_fused(p, kTiles[config], shared_memory(device), alignment, workspace_cap));
}

std::int64_t FusedCall::workspace_bytes() const { return plan_ == nullptr ? 0 : plan_->workspace_bytes; }

FusedWork FusedCall::work() const {
  if (phases_ != nullptr) return phase_work(*phases_);
  if (plan_ == nullptr) return {};
  const FusedJob& job = plan_->job;
  const std::int64_t launches = (problem_.batch + plan_->batch - 1) / plan_->batch;
  return {std::int64_t(plan_->blocks) * launches, job.split_chunks, job.patch_pixels, std::int64_t(job.splits.value)};
}

void FusedCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (problem_.batch == 0) return;
  const std::uintptr_t x_address = reinterpret_cast<std::uintptr_t>(operands.x);
  require(x_address % std::uintptr_t(alignment_) == 0, "x begins at ", x_address, "; it was planned for a multiple of ",
          alignment_);
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (phases_ != nullptr) return fused_phases(launch, problem_, *phases_, exact_, operands, config_ - first_phase_tile());
  if (plan_ == nullptr) return fused_equal(launch, problem_, operands, config_ - kTileCount);
  const bool in_parts = plan_->batch < problem_.batch;
  if (!in_parts && operands.packed == nullptr) return run_plan(launch, problem_.dtype, *plan_, operands, config_);
  FusedPlan part = *plan_;
  if (operands.packed != nullptr) part.pack_blocks = 0;
  if (!in_parts) return run_plan(launch, problem_.dtype, part, operands, config_);
  FusedOperands own = operands;
  const std::int64_t size = element_bytes(problem_.dtype);
  for (std::int64_t n = 0; n < problem_.batch; n += part.batch) {
    part.job.batch = std::int32_t(std::min(part.batch, problem_.batch - n));
    run_plan(launch, problem_.dtype, part, own, config_);
    own.x = static_cast<const unsigned char*>(own.x) + part.batch * problem_.x.n * size;
    own.y = static_cast<unsigned char*>(own.y) + part.batch * problem_.y.n * size;
    part.pack_blocks = 0;  // the weight is packed
  }
}

std::int64_t FusedCall::packed_bytes() const { return plan_ == nullptr ? 0 : plan_->weight_end; }

std::vector<std::int64_t> FusedCall::packing() const {
  if (plan_ == nullptr) return {};
  const FusedJob& job = plan_->job;
  const std::int64_t sets = std::int64_t(job.sets_d.value) * job.sets_h.value * job.sets_w.value;
  std::vector<std::int64_t> layout{config_,
                                   std::int64_t(problem_.dtype),
                                   job.groups,
                                   job.ic,
                                   job.oc,
                                   job.chunks,
                                   job.most_slots,
                                   job.oc_tiles.value,
                                   job.sets_d.value,
                                   job.sets_h.value,
                                   job.sets_w.value,
                                   problem_.kernel_d,
                                   problem_.kernel_h,
                                   problem_.kernel_w};
  if (config_ >= kFirstWarpgroupTile) {
    layout.insert(layout.end(), job.taps, job.taps + sets * job.most_slots);
    return layout;
  }
  // The lists of shifts are packed too, and hold where a shift lies in the patch of a tile.
  layout.push_back(job.flat);
  for (const FusedAxis& axis : job.axis) {
    for (const std::int64_t value : {axis.taps.stride, axis.taps.pad, axis.taps.dilation, axis.low, axis.extent})
      layout.push_back(value);
    layout.push_back(axis.patch.value);
  }
  return layout;
}

void FusedCall::pack(const void* w, void* packed, std::uintptr_t stream) const {
  require(packed_bytes() > 0, "config = ", config_, "; its kernels read the weight as it lies");
  const DeviceScope scope(device_);
  FusedPlan part = *plan_;
  part.blocks = part.input_blocks = 0;
  run_plan({device_, stream}, problem_.dtype, part, {nullptr, w, nullptr, nullptr, nullptr, packed}, config_);
}

}  // namespace upfold::cuda
#endif
