// The arithmetic of the direct method: which source positions a unit of a phase reads; and what its files share.
//
// A transposed convolution and its adjoint in x are correlations: the result at unit q of a phase sums source(q * advance +
// displacement of tap) * weight over the taps of that phase and the channels of the group; the transposed convolution has
// stride_d * stride_h * stride_w phases and advance 1, its adjoint one phase and advance `stride`. Where the dilation is 1, tap
// r + j * stride of phase r reads what tap j of a transposed convolution of stride 1 reads, whatever r: the phases of the W axis
// then are rows of one product, as the channels are, and neighbouring results lie in neighbouring rows.
#pragma once

#include "divide.cuh"
#include "taps.cuh"
#include "values.cuh"

namespace upfold::cuda {

#define UPFOLD_METHOD __device__ __forceinline__

constexpr int kDirectThreads = 256;

// Steps of a reduction that lie in shared memory together: fewer for wide elements, so that a tile takes as many bytes.
template <typename Value>
constexpr int kDepth = sizeof(Sum<Value>) == 4   ? 8
                       : sizeof(Sum<Value>) == 8 ? 4
                                                 : 2;

constexpr std::int32_t kTableTaps = 256;

// Four neighbours of shared memory, in one load where they take 16 bytes.
template <typename Total>
struct alignas(16) Quad {
  Total v[4];
};

struct CorrelateAxis {
  AxisTaps<std::int32_t> taps;  // of the transposed convolution
  std::int32_t source_size, result_size;
  std::int32_t advance, result_step;  // source positions and result positions from one unit to the next
  std::int32_t result_shift;          // the result position of unit 0, phase 0
  Divisor units, phases;
};

struct CorrelateJob {
  CorrelateAxis axis[3];  // d, h, w
  bool transposed;        // the transposed convolution, else its adjoint
  bool samples_first;     // units are counted through the samples of a position, else through the positions of a sample
  Divisor batch;
  Divisor merged;  // phases of the W axis that are rows
  Divisor depth;   // source channels of a group: the fastest part of the reduction
  std::uint32_t pixels, channels, rows,
      taps;  // units of all samples; result channels and rows of a group; taps of a packed weight
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

// A unit's sample and its number on each axis.
struct Unit {
  std::uint32_t sample;
  std::int32_t at[3];
};

UPFOLD_DEVICE Unit unit_of(const CorrelateJob& job, std::uint32_t pixel) {
  Unit unit;
  if (job.samples_first) unit.sample = take(job.batch, pixel);
#pragma unroll
  for (int i = 2; i >= 0; --i) unit.at[i] = std::int32_t(take(job.axis[i].units, pixel));
  if (!job.samples_first) unit.sample = pixel;
  return unit;
}

// Where one thread's unit reads: the sample, and the source position of displacement 0 on each axis.
struct SourceUnit {
  std::int64_t sample;
  std::int32_t at[3];
  bool live;
};

UPFOLD_DEVICE SourceUnit source_unit(const CorrelateJob& job, std::uint32_t pixel) {
  const Unit unit = unit_of(job, pixel);
  SourceUnit source{unit.sample * job.source_n, {}, pixel < job.pixels};
#pragma unroll
  for (int i = 0; i < 3; ++i) source.at[i] = unit.at[i] * job.axis[i].advance;
  return source;
}

// A tap of the phase: how far it displaces the source on each axis, and its number in the packed weight.
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

// Whether a displaced unit reads a position of the source.
UPFOLD_DEVICE bool source_inside(const CorrelateJob& job, const SourceUnit& unit, const Tap& tap) {
  bool inside = unit.live;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    inside = inside && std::uint32_t(unit.at[i] + tap.displacement[i]) < std::uint32_t(job.axis[i].source_size);
  }
  return inside;
}

UPFOLD_DEVICE std::int64_t source_offset(const CorrelateJob& job, const SourceUnit& unit, const Tap& tap) {
  std::int64_t offset = unit.sample;
#pragma unroll
  for (int i = 0; i < 3; ++i) offset += (unit.at[i] + tap.displacement[i]) * job.source_axis[i];
  return offset;
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
constexpr std::int64_t kDirectMost = std::int64_t(1) << 30;    // of any size or count that the kernels keep in 32 bits
constexpr std::int64_t kMostPartial = std::int64_t(64) << 20;  // bytes of partial sums, beyond the first part

inline bool transposes(const Problem& p) { return p.op == Operator::kConvTranspose; }
inline std::int64_t result_channels(const Problem& p) {
  return transposes(p) ? out_channels_per_group(p) : in_channels_per_group(p);
}
inline std::int64_t source_channels(const Problem& p) {
  return transposes(p) ? in_channels_per_group(p) : out_channels_per_group(p);
}

// Whether the phases of an axis are merged.
struct Merge {
  bool h, w;
};
// The job of a problem; and whether it can be stated in 32 bits.
bool correlate_fits(const Problem& p, const Merge& merge);
CorrelateJob correlate_job(const Problem& p, const Merge& merge);

inline std::int64_t round_up(std::int64_t size, std::int64_t to) { return ceil_div(size, to) * to; }

// A copy of the weight in the type of the sums: (group, tap, source channel, row), the last two padded with zeros.
struct PackedShape {
  std::int64_t taps, depth, rows, merged;
};
void pack_weight(const Launch& launch, const Problem& p, const PackedShape& shape, const void* w, void* packed);

// The tiles of channels and units.
struct TileShape {
  int channels, pixels;
};
constexpr int kTileCount = 5;
extern const TileShape kTileShapes[kTileCount];
bool tile_fits(const Problem& p, int config);
std::int64_t tile_bytes(const Problem& p, int config);
// Blocks of the launch, and steps of the reduction of each.
struct DirectWork;
DirectWork tile_work(const Problem& p, int config);
void tile_run(const Launch& launch, const Problem& p, const DirectOperands& operands, int config);

// Few channels, which serves everything as well.
bool rows_fits(const Problem& p);
DirectWork rows_work(const Problem& p);
void rows_run(const Launch& launch, const Problem& p, const DirectOperands& operands);

// The adjoint in w, a file of its own: its result is small and its reduction long.
bool direct_weight_fits(const Problem& p, int config);
std::int64_t direct_weight_bytes(const Problem& p, int config);
void direct_weight(const Launch& launch, const Problem& p, const DirectOperands& operands, int config);
// The same of few positions: blocks, none of complex numbers.
std::int64_t dots_blocks(const Problem& p);
void dots_run(const Launch& launch, const Problem& p, const DirectOperands& operands);
#endif

}  // namespace upfold::cuda
