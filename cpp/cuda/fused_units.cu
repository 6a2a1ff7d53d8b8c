// The fused method whose rows are units and whose columns are channels and phases: its choice of tiles, and its kernels for
// float32 rounded to TF32.
#include "fused_units_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_UNITS(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_units_plan.cuh"

namespace upfold::cuda {

extern template void run_units<__half>(const Launch&, const UnitsPlan&, int, const FusedOperands&);
extern template void run_units<__nv_bfloat16>(const Launch&, const UnitsPlan&, int, const FusedOperands&);

namespace {

constexpr int kUnitColumns[] = {
#define UPFOLD_TILE(index, Value, kN8) 8 * kN8,
    UPFOLD_UNITS_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr int kUnitTiles = int(sizeof(kUnitColumns) / sizeof(kUnitColumns[0]));

bool can_run_units(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9) return false;
  const DeviceScope scope(device);
  return has_units_kernels<float>();
}

UnitsPlan plan_units(int device, const Problem& p, int config) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return UnitsPlanner(p, kUnitColumns[config], shared_memory(device), count).plan();
}

}  // namespace

std::vector<int> fused_units_tiles() { return {kUnitColumns, kUnitColumns + kUnitTiles}; }

bool fused_units_fits(int device, const Problem& p, int config) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConvTranspose || !multiplied || config < 0 || config >= kUnitTiles) return false;
  return can_run_units(device) && (p.batch == 0 || plan_units(device, p, config).possible);
}

FusedUnitsCall::FusedUnitsCall(int device, const Problem& p, int config) : device_(device), config_(config), problem_(p) {
  require(fused_units_fits(device, p, config), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const UnitsPlan>(plan_units(device, p, config));
}

FusedUnitsWork FusedUnitsCall::work() const { return plan_ == nullptr ? FusedUnitsWork{} : plan_->work; }

void FusedUnitsCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (problem_.dtype == Dtype::kFloat32) return run_units<float>(launch, *plan_, config_, operands);
  if (problem_.dtype == Dtype::kFloat16) return run_units<__half>(launch, *plan_, config_, operands);
  run_units<__nv_bfloat16>(launch, *plan_, config_, operands);
}

}  // namespace upfold::cuda
#endif
