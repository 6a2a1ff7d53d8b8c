// The gradients of the fused method for small layers in one launch (fused_small.cuh): their tiles, plans and launches.
#include "fused_small.cuh"

namespace upfold::cuda {

#define UPFOLD_INSTANTIATE(index, Value, kInput, ...)                                                                  \
  template __global__ void fused_small_kernel<Value, SmallTile<__VA_ARGS__>, kInput>(const __grid_constant__ SmallJob, \
                                                                                     const Value*, const Value*, Value*);
#define UPFOLD_INSTANTIATE_SMALL(Value)                \
  UPFOLD_SMALL_TILES(UPFOLD_INSTANTIATE, Value, false) \
  UPFOLD_SMALL_TILES(UPFOLD_INSTANTIATE, Value, true)
UPFOLD_INSTANTIATE_SMALL(float)
UPFOLD_INSTANTIATE_SMALL(__half)
UPFOLD_INSTANTIATE_SMALL(__nv_bfloat16)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "compiled.h"
#include "fused_api.h"
#include "launch.cuh"

namespace upfold::cuda {

struct SmallPlan {
  bool possible;
  SmallJob job;
  std::int64_t blocks;
};

namespace {

constexpr std::int64_t kMostSmallCount = std::int64_t(1) << 30;  // of what the kernels keep in 32 bits

struct SmallSize {
  std::int64_t channels, columns, split, blocks;  // blocks: that a multiprocessor has at once
};
constexpr SmallSize kSmallTiles[] = {
#define UPFOLD_TILE(index, Value, kInput, ...)                                                          \
  {SmallTile<__VA_ARGS__>::kChannels, SmallTile<__VA_ARGS__>::kColumns, SmallTile<__VA_ARGS__>::kSplit, \
   SmallTile<__VA_ARGS__>::kBlocks},
    UPFOLD_SMALL_TILES(UPFOLD_TILE, , )
#undef UPFOLD_TILE
};
constexpr int kSmallTileCount = int(sizeof(kSmallTiles) / sizeof(kSmallTiles[0]));

// Steps in memory of a tensor whose elements along the width follow one another; those of axes of one element are none.
struct SmallSteps {
  std::int64_t n, c, d, h;
  bool are_whole(std::int64_t elements) const { return (n | c | d | h) % elements == 0; }
};
SmallSteps steps_of(const Strides& s, std::int64_t n, std::int64_t c, std::int64_t d, std::int64_t h) {
  return {n > 1 ? s.n : 0, c > 1 ? s.c : 0, d > 1 ? s.d : 0, h > 1 ? s.h : 0};
}

SmallPlan plan_small(const Problem& p, const SmallSize& tile, std::int64_t alignment) {
  SmallPlan plan{};
  const bool input = p.op == Operator::kConv;
  const std::int64_t each = 8 / element_bytes(p.dtype);
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)})
    if (a.kernel != a.stride || (a.kernel > 1 && a.dilation != 1) || a.pad != 0) return plan;
  if (p.groups != 1 || p.kernel_w != 2 || p.in_w % each != 0 || alignment % 16 != 0 || p.x.w != 1 || p.y.w != 1) return plan;
  const SmallSteps x = steps_of(p.x, p.batch, p.in_channels, p.in_d, p.in_h),
                   y = steps_of(p.y, p.batch, p.out_channels, p.out_d, p.out_h),
                   w = steps_of(p.w, p.in_channels, p.out_channels, p.kernel_d, p.kernel_h);
  if (!x.are_whole(each) || !y.are_whole(2 * each) || std::min({x.n, x.c, x.d, x.h, y.n, y.c, y.d, y.h}) < 0) return plan;
  const std::int64_t rows = p.out_channels * p.kernel_d * p.kernel_h, chunks = p.batch * in_pixels(p) / each;
  const auto reach = [&](const SmallSteps& s, std::int64_t n, std::int64_t c, std::int64_t d, std::int64_t h, std::int64_t last) {
    return s.n * n + s.c * c + s.d * d + s.h * h + last;
  };
  const std::int64_t furthest = std::max({reach(x, p.batch, p.in_channels, p.in_d, p.in_h, p.in_w),
                                          reach(y, p.batch, p.out_channels, p.out_d, p.out_h, p.out_w),
                                          reach(w, p.in_channels, p.out_channels, p.kernel_d, p.kernel_h, 2 * p.w.w)});
  if (furthest >= kMostSmallCount || std::min({w.n, w.c, w.d, w.h, p.w.w}) < 0) return plan;
  if (input) {  // a channel's rows of the kernel follow one another, a lane's are whole, and each element of x is by itself
    const bool dense = p.w.w == 1 && (p.kernel_h == 1 || w.h == 2) && (p.kernel_d == 1 || w.d == 2 * p.kernel_h) &&
                       (p.out_channels == 1 || w.c == kernel_taps(p));
    if (!dense || rows % (each / 2) != 0 || w.n % each != 0) return plan;
  }
  SmallJob& job = plan.job;
  job.chunks_w = make_divisor(p.in_w / each), job.in_h = make_divisor(p.in_h), job.in_d = make_divisor(p.in_d);
  job.kernel_h = make_divisor(p.kernel_h), job.kernel_d = make_divisor(p.kernel_d);
  job.channels = std::int32_t(p.in_channels), job.rows = std::int32_t(rows), job.chunks = std::int32_t(chunks);
  const std::int64_t reduced = input ? ceil_div(rows, each / 2) : chunks;  // chunks of a channel
  job.steps = std::int32_t(ceil_div(reduced, std::int64_t(4)));
  job.steps_of_split = std::int32_t(ceil_div(std::int64_t(job.steps), tile.split));
  job.x_n = std::int32_t(x.n), job.x_c = std::int32_t(x.c), job.x_d = std::int32_t(x.d), job.x_h = std::int32_t(x.h);
  job.y_n = std::int32_t(y.n), job.y_c = std::int32_t(y.c), job.y_d = std::int32_t(y.d), job.y_h = std::int32_t(y.h);
  job.w_n = std::int32_t(w.n), job.w_c = std::int32_t(w.c), job.w_d = std::int32_t(w.d), job.w_h = std::int32_t(w.h);
  job.w_w = std::int32_t(p.w.w), job.step_d = std::int32_t(p.stride_d * y.d), job.step_h = std::int32_t(p.stride_h * y.h);
  job.paired = p.w.w == 1 && w.are_whole(2);
  const std::int64_t columns = input ? chunks * each : rows * 2, tiles = ceil_div(columns, tile.columns);
  job.column_tiles = make_divisor(tiles);
  plan.blocks = tiles * ceil_div(p.in_channels, tile.channels);
  plan.possible = plan.blocks < kMostSmallCount;
  return plan;
}

template <typename Value>
void run_small(const Launch& launch, const SmallPlan& plan, bool input, int config, const FusedOperands& o) {
  const auto first = static_cast<const Value*>(input ? o.w : o.x), y = static_cast<const Value*>(o.y);
  SmallJob job = plan.job;
  job.paired = job.paired && reinterpret_cast<std::uintptr_t>(o.w) % (2 * sizeof(Value)) == 0;
  const std::uintptr_t written = reinterpret_cast<std::uintptr_t>(o.x);
  require(!input || written % (2 * sizeof(Value)) == 0, "the gradient of the input begins at ", written);
  const auto result = static_cast<Value*>(const_cast<void*>(input ? o.x : o.w));
#define UPFOLD_RUN(index, type, kInput, ...)                                                                          \
  if (config == index && input == kInput)                                                                             \
    launch_in_turn("fused", fused_small_kernel<Value, SmallTile<__VA_ARGS__>, kInput>, launch, unsigned(plan.blocks), \
                   SmallTile<__VA_ARGS__>::kThreads, job, first, y, result);
  UPFOLD_SMALL_TILES(UPFOLD_RUN, Value, false)
  UPFOLD_SMALL_TILES(UPFOLD_RUN, Value, true)
#undef UPFOLD_RUN
}

}  // namespace

std::vector<int> fused_small_tiles() {
  std::vector<int> blocks;
  for (const SmallSize& tile : kSmallTiles) blocks.push_back(int(tile.blocks));
  return blocks;
}

bool fused_small_fits(int device, const Problem& p, int config, std::int64_t alignment) {
  const bool summed = p.dtype == Dtype::kFloat32 || p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16;
  if (p.op == Operator::kConvTranspose || !summed || config < 0 || config >= kSmallTileCount || p.batch == 0) return false;
  return code_capability(device) >= 80 && plan_small(p, kSmallTiles[config], alignment).possible;
}

FusedSmallCall::FusedSmallCall(int device, const Problem& p, int config, std::int64_t alignment)
    : device_(device), config_(config), input_(p.op == Operator::kConv), dtype_(p.dtype) {
  require(fused_small_fits(device, p, config, alignment), "config = ", config, "; it does not fit this problem");
  plan_ = std::make_shared<const SmallPlan>(plan_small(p, kSmallTiles[config], alignment));
}

FusedSmallWork FusedSmallCall::work() const { return {plan_->blocks, plan_->job.steps_of_split}; }

void FusedSmallCall::run(const FusedOperands& operands, std::uintptr_t stream) const {
  const DeviceScope scope(device_);
  const Launch launch{device_, stream};
  if (dtype_ == Dtype::kFloat32) return run_small<float>(launch, *plan_, input_, config_, operands);
  if (dtype_ == Dtype::kFloat16) return run_small<__half>(launch, *plan_, input_, config_, operands);
  run_small<__nv_bfloat16>(launch, *plan_, input_, config_, operands);
}

}  // namespace upfold::cuda
#endif
