// The row kernel of the direct method: its plan, and the kernels for float32.
#include "direct_rows_kernel.cuh"

namespace upfold::cuda {

UPFOLD_INSTANTIATE_PLAIN_ROWS(float)
UPFOLD_INSTANTIATE_NARROW_ROWS(float)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

namespace upfold::cuda {

// Compiled in sources of their own, but for the last.
#define UPFOLD_EXTERN(dtype, Value) \
  extern template void run_rows<Value>(const Launch&, const Problem&, const DirectOperands&, const RowsPlan&, const RowsJob&);
UPFOLD_DIRECT_TYPES(UPFOLD_EXTERN)
#undef UPFOLD_EXTERN
template void run_rows<float>(const Launch&, const Problem&, const DirectOperands&, const RowsPlan&, const RowsJob&);

namespace {

constexpr std::int64_t kBusyBlocks = 4 * 132;  // from which an H200 is busy
constexpr std::int64_t kLeastChannels = 8;     // of the source, left to a part

bool narrow(const Problem& p) { return sum_bytes(p.dtype) == 4; }

std::int64_t unit_groups(const CorrelateJob& job, int units) {
  return std::int64_t(job.batch.value) * job.axis[0].units.value * ceil_div(job.axis[1].units.value, units) *
         job.axis[2].units.value;
}

// Whether every phase has two taps on the H axis and two on the W axis, one position apart.
bool two_by_two(const Problem& p) {
  return transposes(p) && p.dilation_h == 1 && p.dilation_w == 1 && p.kernel_h == 2 * p.stride_h && p.kernel_w == 2 * p.stride_w;
}

Merge rows_merge(const Problem& p) {
  if (!narrow(p) || !transposes(p) || p.dilation_w != 1 || p.stride_w == 1) return {false, false};
  return {p.stride_w == 2 && p.stride_h == 2 && two_by_two(p), true};
}

std::int64_t most_parts(const Problem& p) {
  std::int64_t parts = 1;
  while (parts < 8 && source_channels(p) >= 2 * parts * kLeastChannels) parts *= 2;
  return parts;
}

void choose_variant(const Problem& p, const CorrelateJob& job, std::int64_t each, RowsPlan& plan) {
  plan.units = 1, plan.window = 0, plan.half = false;
  const std::int64_t blocks = each * ceil_div(unit_groups(job, kManyUnits) * most_parts(p), kDirectThreads);
  if (!narrow(p) || job.axis[1].units.value < kManyUnits || blocks < kBusyBlocks) return;
  const bool eight = plan.phases_w == 8;
  if (plan.phases_h == 2 || eight) {
    if (!two_by_two(p) || (eight && (plan.channels != 1 || plan.merged_w != 8))) return;
    plan.window = 2, plan.half = p.pad_w % p.stride_w == p.stride_w / 2;
  }
  plan.units = kManyUnits;
}

// With units that start half a stride beyond the phases, at a multiple of the stride: as many as the results need.
void shift_units(const Problem& p, CorrelateJob& job) {
  job.axis[2].units = make_divisor(ceil_div(p.out_w, p.stride_w)), job.axis[2].result_shift = 0;
}

RowsPlan rows_plan(const Problem& p, CorrelateJob& job) {
  RowsPlan plan{};
  const Merge merge = rows_merge(p);
  plan.merged_w = merge.w ? p.stride_w : 1;
  plan.phases_h = merge.h ? 2 : 1, plan.phases_w = plan.merged_w <= 4 ? int(plan.merged_w) : 8;
  const std::int64_t channels = result_channels(p);
  plan.channels = channels == 1 ? 1 : narrow(p) && ceil_div(channels, 3) * 3 < ceil_div(channels, 4) * 4 ? 3 : 4;
  plan.channel_chunks = ceil_div(channels, plan.channels), plan.phase_chunks = ceil_div(plan.merged_w, plan.phases_w);
  plan.phases = 1;
  std::int64_t phase_taps = 1;
  for (const CorrelateAxis& axis : job.axis) {
    plan.phases *= axis.phases.value;
    phase_taps *= job.transposed ? ceil_div(axis.taps.kernel, axis.taps.tap_step) : axis.taps.kernel;
  }
  const std::int64_t each = plan.channel_chunks * plan.phase_chunks * plan.phases * p.groups;
  choose_variant(p, job, each, plan);
  if (plan.half) shift_units(p, job);
  plan.unit_groups = unit_groups(job, plan.units), plan.parts = 1;
  while (plan.parts < most_parts(p) && each * ceil_div(plan.unit_groups * plan.parts, kDirectThreads) < kBusyBlocks) {
    plan.parts *= 2;
  }
  plan.tiles = ceil_div(plan.unit_groups * plan.parts, kDirectThreads);
  plan.tiles_of_run = std::max<std::int64_t>(1, std::min<std::int64_t>(16, plan.tiles * each / (2 * kBusyBlocks)));
  const std::int64_t runs = ceil_div(plan.tiles, plan.tiles_of_run);
  plan.blocks = each <= kDirectMost && runs <= kDirectMost / each ? each * runs : 0;
  const std::int64_t results = plan.units * plan.channels * plan.phases_h * plan.phases_w * plan.tiles_of_run;
  plan.steps = (phase_taps * source_channels(p) / plan.parts + 1) * results;
  return plan;
}

// Whether runs of neighbouring results start at multiples of their size in every row.
bool runs_aligned(const RowsPlan& plan, const CorrelateJob& job, std::int64_t element, const void* result) {
  if (plan.phases_w != 2 && plan.phases_w != 4 && plan.phases_w != 8) return false;
  const std::int64_t run = std::min<std::int64_t>(plan.phases_w, 16 / element);
  const std::int64_t steps = job.result_n | job.result_c | job.result_axis[0] | job.result_axis[1];
  if (job.result_axis[2] != 1 || steps % run != 0 || reinterpret_cast<std::uintptr_t>(result) % (run * element) != 0)
    return false;
  return plan.merged_w == plan.phases_w || (plan.merged_w % plan.phases_w == 0 && -job.axis[2].result_shift % run == 0);
}

RowsJob rows_job(const Problem& p, const CorrelateJob& job, const RowsPlan& plan, const void* result) {
  RowsJob rows{};
  rows.problem = job;
  rows.units_h = make_divisor(ceil_div(job.axis[1].units.value, plan.units));
  rows.channel_chunks = make_divisor(plan.channel_chunks), rows.phase_chunks = make_divisor(plan.phase_chunks);
  rows.tile_runs = make_divisor(ceil_div(plan.tiles, plan.tiles_of_run));
  rows.unit_groups = std::uint32_t(plan.unit_groups), rows.tiles = std::uint32_t(plan.tiles);
  rows.tiles_of_run = std::uint32_t(plan.tiles_of_run), rows.parts = std::int32_t(plan.parts);
  int i = 0;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    rows.kernel[i] = std::int32_t(a.kernel), rows.stride[i++] = std::int32_t(a.stride);
  }
  rows.merged_h = plan.phases_h, rows.merged_w = std::int32_t(plan.merged_w);
  const bool transposed = transposes(p);
  rows.w_group = in_channels_per_group(p) * p.w.n;
  rows.w_channel = transposed ? p.w.c : p.w.n, rows.w_depth = transposed ? p.w.n : p.w.c;
  rows.w_axis[0] = p.w.d, rows.w_axis[1] = p.w.h, rows.w_axis[2] = p.w.w;
  const std::int64_t run = std::min<std::int64_t>(plan.phases_w, 16 / element_bytes(p.dtype));
  rows.runs = runs_aligned(plan, job, element_bytes(p.dtype), result);
  rows.rotation = rows.runs ? std::int32_t(-job.axis[2].result_shift % run) : 0;
  return rows;
}

}  // namespace

bool rows_fits(const Problem& p) {
  const Merge merge = rows_merge(p);
  if (!correlate_fits(p, merge)) return false;
  if (p.batch == 0) return true;
  CorrelateJob job = correlate_job(p, merge);
  return rows_plan(p, job).blocks > 0;
}

DirectWork rows_work(const Problem& p) {
  CorrelateJob job = correlate_job(p, rows_merge(p));
  const RowsPlan plan = rows_plan(p, job);
  return {plan.blocks, plan.steps};
}

void rows_run(const Launch& launch, const Problem& p, const DirectOperands& operands) {
  CorrelateJob job = correlate_job(p, rows_merge(p));
  const RowsPlan plan = rows_plan(p, job);
  const RowsJob rows = rows_job(p, job, plan, transposes(p) ? operands.y : operands.x);
  switch (p.dtype) {
#define UPFOLD_CASE(dtype, Value) \
  case Dtype::dtype:              \
    return run_rows<Value>(launch, p, operands, plan, rows);
    UPFOLD_DIRECT_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  }
}

}  // namespace upfold::cuda
#endif
