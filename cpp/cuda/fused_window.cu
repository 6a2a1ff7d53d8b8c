// The fused method for windows: its choice of tiles, its plans and its kernels.
#include "fused_window_kernel.cuh"

namespace upfold::cuda {

#define UPFOLD_INSTANTIATE_WINDOW(index, Value, ...)                                                                            \
  template __global__ void fused_window_kernel<WindowTile<Value, __VA_ARGS__>>(const __grid_constant__ WindowJob, const Value*, \
                                                                               const Value*, const Value*, Value*);
UPFOLD_WINDOW_TILES(UPFOLD_INSTANTIATE_WINDOW, float)
UPFOLD_WINDOW_TILES(UPFOLD_INSTANTIATE_WINDOW, __half)
UPFOLD_WINDOW_TILES(UPFOLD_INSTANTIATE_WINDOW, __nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "fused_window_plan.cuh"

namespace upfold::cuda {
namespace {

constexpr WindowSize kWindowTiles[] = {
#define UPFOLD_TILE(index, Value, ...) window_size_of<__VA_ARGS__>(),
    UPFOLD_WINDOW_TILES(UPFOLD_TILE, )
#undef UPFOLD_TILE
};
constexpr int kWindowTileCount = int(sizeof(kWindowTiles) / sizeof(kWindowTiles[0]));

WindowPlan plan_window(int device, const Problem& p, int config, std::int64_t alignment) {
  return WindowPlanner(p, kWindowTiles[config], shared_memory(device).of_block, alignment).plan();
}

template <typename Value>
void run_window(const Launch& launch, const WindowPlan& plan, bool input, int config, const FusedOperands& o) {
  const auto source = static_cast<const Value*>(input ? o.y : o.x), w = static_cast<const Value*>(o.w);
  const auto bias = static_cast<const Value*>(input ? nullptr : o.bias);
  const auto result = static_cast<Value*>(input ? const_cast<void*>(o.x) : o.y);
  const auto grid = [&](int threads) { return Grid{unsigned(plan.blocks), unsigned(threads), plan.shared_bytes, true}; };
#define UPFOLD_RUN(index, type, ...)                                                         \
  if (config == index)                                                                       \
    return launch_grid("fused", fused_window_kernel<WindowTile<Value, __VA_ARGS__>>, launch, \
                       grid(WindowTile<Value, __VA_ARGS__>::kThreads), plan.job, source, w, bias, result);
  UPFOLD_WINDOW_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
}

}  // namespace

std::vector<int> fused_window_tiles() {
  std::vector<int> channels;
  for (const WindowSize& tile : kWindowTiles) channels.push_back(int(tile.channels));
  return channels;
}

bool fused_window_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool multiplied = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op == Operator::kConvTransposeWeight || !multiplied || config < 0 || config >= kWindowTileCount) return false;
  return code_capability(device) >= 80 && (p.batch == 0 || plan_window(device, p, config, alignment).possible);
}

FusedWindowCall::FusedWindowCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), config_(config), alignment_(alignment), problem_(p) {
  require(fused_window_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  if (p.batch > 0) plan_ = std::make_shared<const WindowPlan>(plan_window(device, p, config, alignment));
}

FusedWindowWork FusedWindowCall::work() const {
  if (plan_ == nullptr) return {};
  const WindowJob& job = plan_->job;
  const std::int64_t loaded = job.pixels * std::int64_t(job.chunks), laid = job.taps * std::int64_t(job.chunks);
  return {plan_->blocks, loaded, laid, ceil_div(laid, kWindowTiles[config_].split)};
}

void FusedWindowCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  for (const void* const operand : {operands.x, operands.w, static_cast<const void*>(operands.y)}) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operand);
    require(address % std::uintptr_t(alignment_) == 0, "an operand begins at ", address, "; it was planned for a multiple of ",
            alignment_);
  }
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  const bool input = problem_.op == Operator::kConv;
  if (problem_.dtype == Dtype::kFloat32) return run_window<float>(launch, *plan_, input, config_, operands);
  if (problem_.dtype == Dtype::kFloat16) return run_window<__half>(launch, *plan_, input, config_, operands);
  run_window<__nv_bfloat16>(launch, *plan_, input, config_, operands);
}

}  // namespace upfold::cuda
#endif
