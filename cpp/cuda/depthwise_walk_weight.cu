// The depthwise method, the adjoint in w of whole rows (depthwise_walk.cuh) of 16-bit types. A thread walks down beside a run of
// y, reads every row of it once, and adds up all taps that it meets; blocks and parts are those of depthwise_weight.cu.
//   short: kernels and strides that are known when compiling: a step reads the rows of y of one stride and a row of x;
//   wide: strides of a vector and more and kernels of kMh and kM strides: a block has the taps of one phase of the H axis.
// A product whose pixel or whose gradient lies outside is left out, for it need not be 0 times something finite.
#include "depthwise_walk.cuh"
#include "depthwise_weight.cuh"

namespace upfold::cuda {

// Taps, and what fills them up to a power of two.
template <int kTaps>
constexpr int kSums = kTaps <= 4    ? 4
                      : kTaps <= 8  ? 8
                      : kTaps <= 16 ? 16
                                    : 32;

// A run of a walk: its column, its steps and, in elements, its first row of x and its plane of y.
struct WalkItem {
  std::int32_t column, tile, x, y;
  bool live;
};

UPFOLD_DEVICE WalkItem walk_item(const DepthwiseJob& job, const WeightBlock& block, std::uint32_t item) {
  const AxisTaps<std::int32_t>& d = job.axis[0];
  WalkItem found;
  found.column = std::int32_t(take(job.columns, item)), found.tile = std::int32_t(take(job.tiles, item)) * job.tiles_of_run;
  const std::int32_t id = std::int32_t(take(job.depth, item)), od = id * d.stride - d.pad + block.kd * d.dilation;
  const std::int32_t ic = std::int32_t(divide(job.multiplier, std::uint32_t(block.channel)));
  found.x = std::int32_t(item) * job.x.n + ic * job.x.c + id * job.x.axis[0];
  found.y = std::int32_t(item) * job.y.n + block.channel * job.y.c + od * job.y.axis[0];
  found.live = inside(od, d.out_count);
  return found;
}

// Where the sum of a tap of a block's channel and part lies.
UPFOLD_DEVICE std::uint32_t sum_offset(const DepthwiseWeightJob& job, const WeightBlock& block, std::int32_t kh,
                                       std::int32_t kw) {
  const AxisTaps<std::int32_t>* const axis = job.problem.axis;
  const std::int32_t plane = block.channel * axis[0].kernel + block.kd;
  return block.part * job.elements + std::uint32_t((plane * axis[1].kernel + kh) * axis[2].kernel + kw);
}

// Adds the products of a step of a short walk: of kSh rows of y with the kMh rows of x that they reach. Where kAll, all rows
// are there.
template <int kKh, int kS, int kK, bool kAll, int kSh, int kMh, int kC, int kCount>
UPFOLD_DEVICE void add_step(const float (&pixels)[kMh][kC], const float (&rows)[kSh][kCount], const bool (&of_x)[kMh],
                            const bool (&of_y)[kSh], float* sums) {
#pragma unroll
  for (int j = 0; j < kSh * kMh; ++j) {
    const int t = j % kMh, q = j / kMh, kh = kKh - kSh + q - t * kSh;
    if (kh < 0 || !(kAll || (of_x[t] && of_y[q]))) continue;
#pragma unroll
    for (int i = 0; i < kC * kK; ++i) add_product(sums[kh * kK + i % kK], pixels[t][i / kK], rows[q][i / kK * kS + i % kK]);
  }
}

// float16 is widened all at once, which takes more registers than the shifts of bfloat16.
template <typename Value, int kBlocks>
constexpr int kWeightBlocks = kBlocks;
template <int kBlocks>
constexpr int kWeightBlocks<__half, kBlocks> = kBlocks < 3 ? kBlocks : 3;

// kSh, kKh and kS, kK: strides and kernels of the H and W axes; kP: padding of the W axis.
template <typename Value, int kSh, int kKh, int kS, int kK, int kP>
__global__ void __launch_bounds__(kDepthwiseThreads, kWeightBlocks<Value, kWalkBlocks<kKh * kK, kS>>)
    depthwise_walk_weight_kernel(const DepthwiseWeightJob job, const Value* __restrict__ x, const Value* __restrict__ y,
                                 float* __restrict__ partial) {
  constexpr int kC = kVector<Value> / kS, kMh = (kKh + kSh - 1) / kSh, kTail = kK - kS - kP > 0 ? kK - kS - kP : 0;
  using Row = RunRow<Value, kP, kVector<Value>, kTail>;
  using Pixels = RunRow<Value, 0, kC, 0>;
  take_turn();
  __shared__ float exchange[kWarps * kSums<kKh * kK>];
  const WeightBlock block = weight_block(job, true);
  const DepthwiseJob& p = job.problem;
  const AxisTaps<std::int32_t>& h = p.axis[1];
  float sums[kSums<kKh * kK>] = {};
  for (std::uint32_t i = block.begin + threadIdx.x; i < block.end; i += kDepthwiseThreads) {
    const WalkItem item = walk_item(p, block, i);
    const std::int32_t out_count = item.live ? h.out_count : 0, column = item.column * kVector<Value>;
    const std::int32_t steps = h.in_end - item.tile < p.tiles_of_run ? h.in_end - item.tile : p.tiles_of_run;
    const typename Row::Edges edges = Row::edges(column, p.axis[2].out_count);
    // The last kSh taps of a row of x: those that it is the first to see. They reach kMh - 1 rows below it too.
    std::int32_t oh = (item.tile - (kMh - 1)) * kSh - h.pad + kKh - kSh;
    const Value* plane = y + (item.y + oh * p.y.axis[1] + column);
    const Value* from = x + (item.x + item.tile * p.x.axis[1] + item.column * kC);
    Row next[kSh];
    Pixels below;
    float pixels[kMh][kC] = {};
#pragma unroll
    for (int q = 0; q < kSh; ++q) next[q].load(plane + q * p.y.axis[1], inside(oh + q, out_count), edges);
    below.load(from, steps > 0, {{}, true, {}});
#pragma unroll 1
    for (std::int32_t step = 1 - kMh; step < steps; ++step) {
      float rows[kSh][Row::kCount];
      bool of_y[kSh];
#pragma unroll
      for (int q = 0; q < kSh; ++q) next[q].widen(rows[q]), of_y[q] = inside(oh + q, out_count);
      below.widen(pixels[kMh - 1]);
      oh += kSh, plane += kSh * p.y.axis[1], from += p.x.axis[1];
#pragma unroll
      for (int q = 0; q < kSh; ++q) next[q].load(plane + q * p.y.axis[1], inside(oh + q, out_count), edges);
      below.load(from, step + kMh < steps, {{}, true, {}});
      bool of_x[kMh], all = of_y[0] && of_y[kSh - 1];
#pragma unroll
      for (int t = 0; t < kMh; ++t) of_x[t] = inside(step + t, steps), all = all && of_x[t];
      all ? add_step<kKh, kS, kK, true>(pixels, rows, of_x, of_y, sums)
          : add_step<kKh, kS, kK, false>(pixels, rows, of_x, of_y, sums);
#pragma unroll
      for (int j = 0; j < (kMh - 1) * kC; ++j) pixels[j / kC][j % kC] = pixels[j / kC + 1][j % kC];
    }
  }
  const float sum = sum_of_block<kWarps>(sums, exchange);
  const std::int32_t thread = std::int32_t(threadIdx.x);
  if (thread < kKh * kK) partial[sum_offset(job, block, thread / kK, thread % kK)] = sum;
}

// The column of x that a wide walk's sum number m * kV + j takes from: those are the columns of one unit, or one more where the
// second half of a vector lies in the unit after.
template <int kM, int kV, int kColumns>
UPFOLD_DEVICE constexpr int met_column(int sum) {
  return (kColumns > kM && sum % kV >= kV / 2 ? kM : kM - 1) - sum / kV % kM;
}

// Adds the products of a step of a wide walk: of a vector of y with the kMh rows of x that its taps come from. Sum (mh * kM + m)
// * kV + j is of tap number m of the row's element j. Where kAll, all rows are there.
template <int kM, bool kAll, int kMh, int kV, int kColumns>
UPFOLD_DEVICE void add_step(const float (&pixels)[kMh][kColumns], const float (&row)[kV], const bool (&of_x)[kMh], float* sums) {
#pragma unroll
  for (int mh = 0; mh < kMh; ++mh) {
    if (!kAll && !of_x[mh]) continue;
#pragma unroll
    for (int i = 0; i < kM * kV; ++i) {
      const int column = met_column<kM, kV, kColumns>(i);
      add_product(sums[mh * kM * kV + i], pixels[mh][column], row[i % kV]);
    }
  }
}

// kMh and kM: kernels of the H and W axes in strides. All vectors of a block begin at the same phase of the W axis, and lie in
// one unit of it; or where kHalves a stride is a vector, and the second half lies in the unit after. A thread has one item.
template <typename Value, int kMh, int kM, bool kHalves>
__global__ void __launch_bounds__(kDepthwiseThreads, 4)
    depthwise_walk_weight_wide_kernel(const DepthwiseWeightJob job, const Value* __restrict__ x, const Value* __restrict__ y,
                                      float* __restrict__ partial) {
  constexpr int kV = kVector<Value>, kColumns = kM + (kHalves ? 1 : 0);
  using Row = RunRow<Value, 0, kV, 0>;
  using Pixels = RunRow<Value, kColumns, 0, 0>;
  take_turn();
  __shared__ float exchange[kWarps * kMh * kM * kV];
  const WeightBlock block = weight_block(job, true);
  const DepthwiseJob& p = job.problem;
  const AxisTaps<std::int32_t>&h = p.axis[1], &v = p.axis[2];
  const std::int32_t starts = v.stride / kV, tap_row = block.group / starts, start = block.group % starts;
  const std::int32_t first_unit = tap_row >= h.pad ? 0 : (h.pad - tap_row + h.stride - 1) / h.stride;
  const WalkItem item = walk_item(p, block, block.begin + threadIdx.x);
  const std::int32_t vector = (item.column * starts + start) * kV, oh = (first_unit + item.tile) * h.stride - h.pad + tap_row;
  const bool live = block.begin + threadIdx.x < block.end && item.live && vector < v.out_count && oh < h.out_count;
  const std::int32_t left = (h.out_count - 1 - oh) / h.stride + 1, steps = left < p.tiles_of_run ? left : p.tiles_of_run;
  const std::int32_t column = (vector + v.pad) / v.stride + (kHalves ? 2 : 1);  // behind those that it meets
  const typename Pixels::Edges edges = Pixels::edges(column, v.in_end);
  std::int32_t ih = first_unit + item.tile - (kMh - 1);
  const Value* plane = y + (item.y + oh * p.y.axis[1] + vector);
  const Value* from = x + (item.x + ih * p.x.axis[1] + column);
  Pixels below;
  float pixels[kMh][kColumns];  // of the step's row of x, and of those above
#pragma unroll
  for (int mh = kMh - 1; mh >= 0; --mh, ++ih, from += p.x.axis[1]) {
    below.load(from, live && inside(ih, h.in_end), edges);
    if (mh > 0) below.widen(pixels[mh]);
  }
  Row next;
  next.load(plane, live, {{}, true, {}});
  float sums[kMh * kM * kV] = {};
#pragma unroll 1
  for (std::int32_t step = live ? 1 : steps + 1; step <= steps; ++step, ++ih) {  // `ih` is the row below
    float row[kV];
    next.widen(row);
    below.widen(pixels[0]);
    plane += h.stride * p.y.axis[1];
    next.load(plane, step < steps, {{}, true, {}});
    below.load(from, inside(ih, h.in_end), edges);
    from += p.x.axis[1];
    bool of_x[kMh], all = true;
#pragma unroll
    for (int mh = 0; mh < kMh; ++mh) of_x[mh] = inside(ih - 1 - mh, h.in_end), all = all && of_x[mh];
    all ? add_step<kM, true>(pixels, row, of_x, sums) : add_step<kM, false>(pixels, row, of_x, sums);
#pragma unroll
    for (int j = kMh * kColumns - 1; j >= kColumns; --j)
      pixels[j / kColumns][j % kColumns] = pixels[j / kColumns - 1][j % kColumns];
  }
#pragma unroll
  for (int i = 0; i < kMh * kM * kV; ++i) {
    if (!edges.lead[met_column<kM, kV, kColumns>(i)]) sums[i] = 0.0f;
  }
  const float sum = sum_of_block<kWarps>(sums, exchange);
  const std::int32_t thread = std::int32_t(threadIdx.x), j = thread % kV, m = thread / kV % kM;
  if (thread >= kMh * kM * kV) return;
  const std::int32_t kh = tap_row + thread / (kV * kM) * h.stride, phase = (start * kV + v.pad) % v.stride;
  const std::int32_t kw = phase + j + m * v.stride - (kHalves && j >= kV / 2 ? v.stride : 0);
  partial[sum_offset(job, block, kh, kw)] = sum;
}

// kSh, kKh, kS, kK, kP
#define UPFOLD_SHORT(DO, Value) \
  DO(Value, 2, 4, 2, 4, 1)      \
  DO(Value, 2, 2, 2, 2, 0)      \
  DO(Value, 2, 3, 2, 3, 1)      \
  DO(Value, 1, 3, 1, 3, 1)      \
  DO(Value, 1, 5, 1, 5, 2)      \
  DO(Value, 1, 1, 2, 4, 1)
// kMh, kM, kHalves
#define UPFOLD_WIDE(DO, Value) \
  DO(Value, 2, 2, false)       \
  DO(Value, 2, 2, true)        \
  DO(Value, 1, 2, false)       \
  DO(Value, 1, 2, true)        \
  DO(Value, 1, 1, false)
#define UPFOLD_HALF_TYPES(DO) DO(kFloat16, __half) DO(kBFloat16, __nv_bfloat16)
#define UPFOLD_ARGUMENTS(Value) (const DepthwiseWeightJob, const Value*, const Value*, float*);
#define UPFOLD_MAKE_SHORT(Value, kSh, kKh, kS, kK, kP) \
  template __global__ void depthwise_walk_weight_kernel<Value, kSh, kKh, kS, kK, kP> UPFOLD_ARGUMENTS(Value)
#define UPFOLD_MAKE_WIDE(Value, kMh, kM, kHalves) \
  template __global__ void depthwise_walk_weight_wide_kernel<Value, kMh, kM, kHalves> UPFOLD_ARGUMENTS(Value)
#define UPFOLD_MAKE(dtype, Value)        \
  UPFOLD_SHORT(UPFOLD_MAKE_SHORT, Value) \
  UPFOLD_WIDE(UPFOLD_MAKE_WIDE, Value)
UPFOLD_HALF_TYPES(UPFOLD_MAKE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

bool short_fits(const Problem& p) {
#define UPFOLD_IS_SHORT(Value, kSh, kKh, kS, kK, kP) || (has_kernel(p, kSh, kKh, kS, kK) && p.pad_w == kP)
  return false UPFOLD_SHORT(UPFOLD_IS_SHORT, );
#undef UPFOLD_IS_SHORT
}

bool wide_fits(const Problem& p) {
  const std::int64_t run = 16 / element_bytes(p.dtype);
#define UPFOLD_IS_WIDE(Value, kMh, kM, kHalves) || is_wide(p, run, kMh, kM, kHalves)
  return false UPFOLD_WIDE(UPFOLD_IS_WIDE, );
#undef UPFOLD_IS_WIDE
}

template <typename Value>
using WeightKernel = void (*)(const DepthwiseWeightJob, const Value*, const Value*, float*);

template <typename Value>
WeightKernel<Value> kernel_of(const Problem& p) {
#define UPFOLD_CHOOSE(type, kSh, kKh, kS, kK, kP) \
  if (has_kernel(p, kSh, kKh, kS, kK) && p.pad_w == kP) return depthwise_walk_weight_kernel<Value, kSh, kKh, kS, kK, kP>;
  UPFOLD_SHORT(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
#define UPFOLD_CHOOSE(type, kMh, kM, kHalves) \
  if (is_wide(p, kVector<Value>, kMh, kM, kHalves)) return depthwise_walk_weight_wide_kernel<Value, kMh, kM, kHalves>;
  UPFOLD_WIDE(UPFOLD_CHOOSE, Value)
#undef UPFOLD_CHOOSE
  return nullptr;
}

}  // namespace

bool depthwise_walk_weight_job(const Problem& p, DepthwiseWeightJob& job) {
  const std::int64_t run = 16 / element_bytes(p.dtype);
  const bool is_short = short_fits(p);
  if (p.dtype == Dtype::kFloat32) return false;  // which is as fast element by element
  if (!depthwise_dense(p) || p.out_w % run != 0 || (is_short ? p.in_w % (run / p.stride_w) != 0 : !wide_fits(p))) return false;
  const std::int64_t taps = kernel_taps(p), elements = p.out_channels * taps, starts = is_short ? 1 : p.stride_w / run;
  job.problem = depthwise_job(p);
  DepthwiseJob& base = job.problem;
  base.columns = make_divisor(is_short ? p.in_w * p.stride_w / run : ceil_div(p.out_w / run, starts));
  base.depth = make_divisor(p.in_d);
  job.kernel_h = make_divisor(p.kernel_h), job.kernel_w = make_divisor(p.kernel_w), job.taps = make_divisor(taps);
  job.groups = make_divisor(is_short ? 1 : p.stride_h * starts), job.elements = std::uint32_t(elements);
  const std::int64_t blocks = p.out_channels * p.kernel_d * job.groups.value, columns = p.batch * p.in_d * base.columns.value;
  const Walks walks = walks_of(is_short ? p.in_h : ceil_div(p.out_h, p.stride_h), columns * blocks, 1);
  base.tiles = make_divisor(walks.count), base.tiles_of_run = std::int32_t(walks.steps);
  job.items = std::uint32_t(columns * walks.count);
  depthwise_share_parts(job, ceil_div(job.items, kDepthwiseThreads), kDepthwiseThreads);
  return blocks * job.parts.value <= kDepthwiseMost && (is_short || job.length == kDepthwiseThreads);
}

bool depthwise_walk_weight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands,
                           const DepthwiseWeightJob& job) {
  const bool of_x = !short_fits(p) || depthwise_aligned(p, p.x, p.in_w, operands.x, 16 / p.stride_w);
  if (!of_x || !depthwise_aligned(p, p.y, p.out_w, operands.y, 16)) return false;
  const std::int64_t blocks = p.out_channels * p.kernel_d * job.groups.value * job.parts.value;
#define UPFOLD_RUN(dtype_name, Value)                                                                  \
  if (p.dtype == Dtype::dtype_name)                                                                    \
    launch_in_turn("depthwise", kernel_of<Value>(p), launch, unsigned(blocks), kDepthwiseThreads, job, \
                   static_cast<const Value*>(operands.x), static_cast<const Value*>(operands.y),       \
                   static_cast<float*>(operands.workspace));
  UPFOLD_HALF_TYPES(UPFOLD_RUN)
#undef UPFOLD_RUN
  return true;
}

}  // namespace upfold::cuda
#endif
