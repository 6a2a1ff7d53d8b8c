// The fused method whose columns stay in shared memory: its choice of tiles, and its kernels for float32 rounded to TF32.
#include "fused_columns_launch.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_COLUMNS(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_columns_plan.cuh"

namespace upfold::cuda {

extern template void run_columns<__half>(const Launch&, const ColumnsPlan&, int, const FusedOperands&);
extern template void run_columns<__nv_bfloat16>(const Launch&, const ColumnsPlan&, int, const FusedOperands&);

namespace {

constexpr int kWarpgroupsOf[] = {1, 2};
constexpr int kColumnsTiles = int(sizeof(kWarpgroupsOf) / sizeof(kWarpgroupsOf[0]));

bool can_run_columns(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9 || !can_copy_boxes()) return false;
  const DeviceScope scope(device);
  return has_columns_kernels<float>();
}

ColumnsPlan plan_columns(int device, const Problem& p, int config, std::int64_t alignment) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return ColumnsPlanner(p, kWarpgroupsOf[config], shared_memory(device), alignment, count).plan();
}

}  // namespace

std::vector<int> fused_columns_tiles() { return {kWarpgroupsOf, kWarpgroupsOf + kColumnsTiles}; }

bool fused_columns_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op != Operator::kConvTranspose || !multiplied || config < 0 || config >= kColumnsTiles) return false;
  return can_run_columns(device) && (p.batch == 0 || plan_columns(device, p, config, alignment).possible);
}

FusedColumnsCall::FusedColumnsCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), config_(config), problem_(p) {
  require(fused_columns_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const ColumnsPlan>(plan_columns(device, p, config, alignment));
}

FusedColumnsWork FusedColumnsCall::work() const { return plan_ == nullptr ? FusedColumnsWork{} : plan_->work; }

void FusedColumnsCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.x);
  require(address % 16 == 0, "x begins at ", address, "; it was planned for a multiple of 16");
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  const int warpgroups = kWarpgroupsOf[config_];
  if (problem_.dtype == Dtype::kFloat32) return run_columns<float>(launch, *plan_, warpgroups, operands);
  if (problem_.dtype == Dtype::kFloat16) return run_columns<__half>(launch, *plan_, warpgroups, operands);
  run_columns<__nv_bfloat16>(launch, *plan_, warpgroups, operands);
}

}  // namespace upfold::cuda
#endif
