// The arithmetic of the direct method: which source positions a unit of a phase reads; and what its two files share.
#pragma once

#include "divide.cuh"
#include "taps.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kDirectThreads = 256;

// Steps of a reduction that lie in shared memory together: fewer for wide elements, so that a tile takes as many bytes.
template <typename Value>
constexpr int kDepth = sizeof(Sum<Value>) == 4   ? 8
                       : sizeof(Sum<Value>) == 8 ? 4
                                                 : 2;

constexpr std::int32_t kTableTaps = 256;

struct CorrelateAxis {
  AxisTaps<std::int32_t> taps;  // of the transposed convolution
  std::int32_t source_size, result_size;
  std::int32_t advance, result_step;  // source positions and result positions from one unit to the next
  Divisor units, phases;
};

struct CorrelateJob {
  CorrelateAxis axis[3];  // d, h, w
  bool transposed;        // the transposed convolution, else its adjoint
  Divisor channel_tiles, pixel_tiles;
  Divisor depth;                         // source channels of a group: the fastest part of the reduction
  std::uint32_t pixels, channels, taps;  // units of all samples; result channels of a group; of the kernel
  std::int64_t source_n, source_c, source_axis[3];
  std::int64_t result_n, result_c, result_axis[3];
  Activation activation;
  float slope;
};

// The taps of a block's phase on one axis: tap number j is first + j * step and displaces the source by displacement + j * move.
struct PhaseAxisTaps {
  std::int32_t first, step, count, displacement, move;
};

UPFOLD_DEVICE PhaseAxisTaps phase_axis_taps(const CorrelateAxis& axis, bool transposed, std::int32_t phase) {
  const AxisTaps<std::int32_t>& a = axis.taps;
  if (!transposed) return {0, 1, a.kernel, -a.pad, a.dilation};
  const TapRun<std::int32_t> run = taps_of_output(a, phase);
  const std::int32_t count = run.first_tap < a.kernel ? (a.kernel - run.first_tap - 1) / a.tap_step + 1 : 0;
  return {run.first_tap, a.tap_step, count, run.first_in, -a.in_step};
}

// Where one thread's unit reads: the sample, and the source position of displacement 0 on each axis.
struct SourceUnit {
  std::int64_t sample;
  std::int32_t at[3];
  bool live;
};

UPFOLD_DEVICE SourceUnit source_unit(const CorrelateJob& job, std::uint32_t pixel) {
  SourceUnit unit;
  unit.live = pixel < job.pixels;
#pragma unroll
  for (int i = 2; i >= 0; --i) unit.at[i] = std::int32_t(take(job.axis[i].units, pixel)) * job.axis[i].advance;
  unit.sample = pixel * job.source_n;
  return unit;
}

// A tap of the phase: how far it displaces the source on each axis, and its number in the kernel.
struct Tap {
  std::int32_t displacement[3], number;
};

UPFOLD_DEVICE Tap tap_of(const CorrelateJob& job, const PhaseAxisTaps (&phase)[3], std::int32_t tap) {
  const std::int32_t plane = tap / phase[2].count, j[3] = {plane / phase[1].count, plane % phase[1].count, tap % phase[2].count};
  Tap found;
  found.number = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    found.displacement[i] = phase[i].displacement + j[i] * phase[i].move;
    found.number = found.number * job.axis[i].taps.kernel + phase[i].first + j[i] * phase[i].step;
  }
  return found;
}

// The first taps of a block's phase lie in shared memory; a kernel with more finds the others anew each time.
struct PhaseTable {
  PhaseAxisTaps axis[3];
  Tap taps[kTableTaps];
};
UPFOLD_DEVICE Tap look_up(const CorrelateJob& job, const PhaseTable& table, std::int32_t tap) {
  return tap < kTableTaps ? table.taps[tap] : tap_of(job, table.axis, tap);
}

// The offset that a displaced unit reads, or -1 outside the source.
UPFOLD_DEVICE std::int64_t source_offset(const CorrelateJob& job, const SourceUnit& unit, const Tap& tap) {
  std::int64_t offset = unit.sample;
  bool inside = unit.live;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::int32_t at = unit.at[i] + tap.displacement[i];
    inside = inside && std::uint32_t(at) < std::uint32_t(job.axis[i].source_size);
    offset += at * job.source_axis[i];
  }
  return inside ? offset : -1;
}

#define UPFOLD_DIRECT_TYPES(DO)  \
  DO(kFloat32, float)            \
  DO(kFloat64, double)           \
  DO(kFloat16, __half)           \
  DO(kBFloat16, __nv_bfloat16)   \
  DO(kComplex64, Complex<float>) \
  DO(kComplex128, Complex<double>)

#ifndef __CUDACC_RTC__
struct Launch;
struct DirectOperands;
constexpr std::int64_t kDirectMost = std::int64_t(1) << 30;  // of any size or count that the kernels keep in 32 bits

// The adjoint in w, a file of its own: its result is small and its reduction long.
bool direct_weight_fits(const Problem& p, int config);
std::int64_t direct_weight_bytes(const Problem& p, int config);
void direct_weight(const Launch& launch, const Problem& p, const DirectOperands& operands, int config);
#endif

}  // namespace upfold::cuda
