// The fused method with pairs of an output channel and a phase as the rows of a product.
//
// On each axis unit q owns the outputs q * stride + phase - pad. A phase's tap at *shift* d reads input q - d, so that all phases
// of a unit read one window, and with kernel = m * stride every phase has a tap at each of the m shifts. Phases of an axis with
// the same shifts are one *class*; one class of the depth's and one of the height's are a *set*. A *line* is an output channel
// and one phase of both; a block owns some lines of one set, in all phases of the width, for the units of one *box* after
// another:
//   weight  [step][16 rows][lane][4]: fragments of the tensor cores, float32, made once from torch's layout;
//   x       [2][channel][line of the box][input], or [2][line][input][channel] where x is channels-last, as they lie in memory;
//   staged  [line][line of units][output]: the results of a box in the order of y, stored in runs.
// Rows are ordered by the class of the width's phase, each class in groups of 16, so that a group multiplies no zero in place of
// a tap that it has not: NaN and infinity stay where taps carry them.
#pragma once

#include "activation.cuh"
#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kMostAxisPhases = 64, kMostAxisShifts = 16, kMostClasses = 8, kMostPhaseSets = 16, kMostEmpty = 64;

struct PhaseAxis {
  std::int32_t in, out, stride, pad, kernel, dilation;
  std::int32_t first_unit, most_shift, box;  // the first unit with outputs; the largest shift; units of a box
  Divisor tiles;                             // boxes along the axis
  // Classes of phases that have taps: those of class c are phases[first_phase[c]] ... and have shifts[first_shift[c]] ...
  std::int32_t classes;
  std::uint8_t first_phase[kMostClasses + 1], first_shift[kMostClasses + 1];
  std::uint8_t phases[kMostAxisPhases];
  std::int16_t shifts[kMostClasses * kMostAxisShifts];
};

struct PhaseJob {
  PhaseAxis axis[3];
  Activation activation;
  float slope;
  std::int32_t batch, box_n, ic, oc, groups;
  Divisor boxes;                                                // of all
  Divisor box_lines, box_h, box_d, box_w;                       // lines of units of a box, and what makes them up
  Divisor combinations, row_tiles;                              // row tiles of all groups, and of one
  std::int32_t set_tiles[kMostPhaseSets + 1];                   // first row tile of each set
  std::int32_t lines;                                           // of a row tile
  std::int32_t width_phases, width_shifts;                      // with a tap; in all classes
  std::int16_t all_shifts[kMostClasses * kMostAxisShifts];      // of the width, each once
  std::uint32_t shift_groups[kMostClasses * kMostAxisShifts];   // of such a shift, the groups of 16 rows that have taps there
  std::uint8_t group_class[32], first_group[kMostClasses + 1];  // of the width: of each 16 rows; and where a class begins
  std::int32_t empty_count, empty_lines;  // pairs of phases without a tap; lines of such that a row tile stores too
  std::uint8_t empty_d[kMostEmpty], empty_h[kMostEmpty];  // those pairs
  bool channels_fastest;                                  // lines are numbered by channel first
  bool prefill;                                           // some phases of the width have no tap
  // x in shared memory: bytes from a channel, a line and an input to the next; of one chunk of channels.
  bool dense;
  std::int32_t channel_step, line_step, input_step, skew;
  std::int32_t chunk_channels, chunks, stage_bytes;
  std::int32_t grain;                               // bytes of a copy
  Divisor run_vectors;                              // of 16 bytes, of a staged run
  Divisor in_row, in_h, in_d;                       // places of a line, and lines of inputs of a box
  std::int32_t place_count, copy_count, run_count;  // of a channel (dense: of a vector of them); of a chunk
  std::int32_t weight_bytes, staged_pitch, staged_line,
      staged_bytes;    // of all steps; elements from a staged run to the next, and of a line; of all
  std::int32_t steps;  // of one chunk, at the most
  std::int64_t x_n, x_c, x_axis[3], y_n, y_c, y_axis[3], w_ic, w_oc, w_axis[3];
};
static_assert(sizeof(PhaseJob) <= 3800, "with the pointers it is the arguments of a launch");

template <int kWarpsM_, int kWarpsN_, int kWarpsK_, int kM16_, int kN8_, int kBlocks_>
struct PhaseTile {
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_, kM16 = kM16_, kN8 = kN8_, kBlocks = kBlocks_;
  static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK, kThreads = 32 * kWarps;
  static constexpr int kGroups = kWarpsM * kM16, kRows = 16 * kGroups, kUnits = kWarpsN * kN8 * 8;
  static constexpr int kReduced = (kWarpsK - 1) * kWarpsM * kWarpsN * kM16 * kN8 * 32;  // float4, of partial sums
};

// Of a step of the reduction: where its shift and channels begin in x, which groups of 16 rows have taps there, its shifts and
// its first channel of a chunk.
struct alignas(16) PhaseStep {
  std::int32_t from;
  std::uint32_t groups;
  std::uint16_t shift_d, shift_h, shift_w, channel;
};
// Of a row: where it goes among the staged results, in bytes (-1: nowhere), what its line adds to their skew, its bias, its
// channel of a group and its phases.
struct alignas(16) PhaseRow {
  std::int32_t to;
  float bias;
  std::int32_t channel;
  std::uint8_t phase_d, phase_h, phase_w, skew;
};
// Of a line: where it begins in y, and its outputs on the axes of depth and height for unit 0 (far outside: no line).
struct alignas(16) PhaseLine {
  std::int64_t y;
  std::int32_t d, h;
  float bias;
};
// Of a unit of a box: where its first output is staged, in bytes (-1: nowhere), and what its line adds to the skew.
struct PhaseColumn {
  std::int32_t to, skew;
};
constexpr std::int32_t kNoLine = -(1 << 30);
// A line of units in one line: where its first output of the box lies in y (negative far beyond: no output is there), where it is
// staged (-1: nowhere, its outputs are the bias).
struct alignas(16) PhaseRun {
  std::int64_t y;
  std::int32_t staged;
  float bias;
};
constexpr std::int64_t kNoRun = -(std::int64_t(1) << 62);

template <typename Tile>
struct PhaseTables {
  PhaseRow rows[Tile::kRows];
  PhaseColumn columns[Tile::kUnits];
  PhaseLine lines[2 * Tile::kRows];  // with products, and behind them without taps
};

// What a block keeps in shared memory, and which rows it owns: of one group, some lines of a set.
template <typename Value_, typename Tile_>
struct PhaseMemory {
  using Value = Value_;
  using Tile = Tile_;
  static constexpr int kSize = int(sizeof(Value)), kVector = 16 / kSize;
  static constexpr std::uint32_t kSkews = kVector - 1;

  const PhaseJob& job;
  unsigned char* const memory;
  std::int32_t group, tile, first_line, set_d, set_h;  // tile of the group; first_line of the set; classes

  __device__ __forceinline__ PhaseMemory(const PhaseJob& of, unsigned char* in, std::uint32_t combination) : job(of), memory(in) {
    tile = std::int32_t(take(job.row_tiles, combination)), group = std::int32_t(combination);
    std::int32_t set = 0;
    while (tile >= job.set_tiles[set + 1]) ++set;
    set_d = set / job.axis[1].classes, set_h = set % job.axis[1].classes;
    first_line = (tile - job.set_tiles[set]) * job.lines;
  }

  __device__ __forceinline__ float4* weight() const { return reinterpret_cast<float4*>(memory); }
  __device__ __forceinline__ unsigned char* stage(int i) const { return memory + job.weight_bytes + i * job.stage_bytes; }
  __device__ __forceinline__ Value* staged() const { return reinterpret_cast<Value*>(stage(2)); }
  __device__ __forceinline__ float4* reduced() const { return reinterpret_cast<float4*>(stage(2) + job.staged_bytes); }
  __device__ __forceinline__ PhaseTables<Tile>& tables() const {
    return *reinterpret_cast<PhaseTables<Tile>*>(reduced() + Tile::kReduced);
  }
  __device__ __forceinline__ PhaseStep* steps() const { return reinterpret_cast<PhaseStep*>(&tables() + 1); }
  __device__ __forceinline__ PhaseRun* runs() const { return reinterpret_cast<PhaseRun*>(steps() + job.steps); }
  static __device__ __forceinline__ bool exists(const PhaseRun& run) {
    return std::int32_t(run.y >> 32) != std::int32_t(kNoRun >> 32);
  }

  static __device__ __forceinline__ std::int32_t class_size(const std::uint8_t* first, std::int32_t c) {
    return first[c + 1] - first[c];
  }
  __device__ __forceinline__ std::int32_t set_steps() const {
    const std::int32_t shifts = class_size(job.axis[0].first_shift, set_d) * class_size(job.axis[1].first_shift, set_h);
    return shifts * job.width_shifts * (job.chunk_channels / 8);
  }
  // First units of a box on each axis, and its first sample.
  struct Box {
    std::int32_t unit[3], n;
  };
  __device__ __forceinline__ Box box_at(std::uint32_t number) const {
    Box box;
#pragma unroll
    for (int i = 2; i >= 0; --i)
      box.unit[i] = std::int32_t(take(job.axis[i].tiles, number)) * job.axis[i].box + job.axis[i].first_unit;
    box.n = std::int32_t(number) * job.box_n;
    return box;
  }
};

}  // namespace upfold::cuda
