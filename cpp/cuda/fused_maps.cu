// The fused method of whole maps: its choice of tiles, and its kernels for float16.
#include "fused_maps_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_MAPS(__half)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_maps_plan.cuh"

namespace upfold::cuda {

extern template void run_maps<__nv_bfloat16>(const Launch&, const MapsPlan&, int, const FusedOperands&);

namespace {

constexpr MapsTileSize kMapsSizes[] = {maps_size_of<false, 16, false>(), maps_size_of<true, 16, false>(),
                                       maps_size_of<true, 24, true>(), maps_size_of<true, 16, true>()};
constexpr int kMapsTiles = int(sizeof(kMapsSizes) / sizeof(kMapsSizes[0]));

bool can_run_maps(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9 || !can_copy_boxes()) return false;
  const DeviceScope scope(device);
  return has_maps_kernels<__half>();
}

MapsPlan plan_maps(int device, const Problem& p, int config, std::int64_t alignment) {
  return MapsPlanner(p, kMapsSizes[config], shared_memory(device).of_block, alignment).plan();
}

}  // namespace

std::vector<int> fused_maps_tiles() {
  std::vector<int> columns;
  for (const MapsTileSize& size : kMapsSizes) columns.push_back(int(size.columns));
  return columns;
}

bool fused_maps_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool multiplied = p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConvTranspose || !multiplied || config < 0 || config >= kMapsTiles) return false;
  return can_run_maps(device) && (p.batch == 0 || plan_maps(device, p, config, alignment).possible);
}

FusedMapsCall::FusedMapsCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), config_(config), problem_(p) {
  require(fused_maps_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const MapsPlan>(plan_maps(device, p, config, alignment));
}

FusedMapsWork FusedMapsCall::work() const {
  if (plan_ == nullptr) return {};
  const MapsJob& job = plan_->job;
  const MapsTileSize& tile = kMapsSizes[config_];
  const std::int64_t copied = (job.samples * in_pixels(problem_) + tile.columns) * 2 * tile.channels;
  // A product of 64 columns, 16 channels and the pixels takes half a cycle for each of these.
  return {job.tiles, job.chunks, copied, job.positions, tile.columns / 64 * tile.channels / 16 * tile.pixels / 2};
}

void FusedMapsCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  for (const void* const operand : {operands.x, operands.w, static_cast<const void*>(operands.y)}) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operand);
    require(address % 16 == 0, "an operand begins at ", address, "; it was planned for a multiple of 16");
  }
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (problem_.dtype == Dtype::kFloat16) return run_maps<__half>(launch, *plan_, config_, operands);
  run_maps<__nv_bfloat16>(launch, *plan_, config_, operands);
}

}  // namespace upfold::cuda
#endif
