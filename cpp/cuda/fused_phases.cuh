// The fused method with pairs of an output channel and a phase as the rows of a product.
//
// On each axis unit q owns the outputs q * stride + phase - pad. A phase's tap at *shift* d reads input q - d, so that all phases
// of a unit read one window, and with kernel = m * stride every phase has a tap at each of the m shifts. Phases of an axis with
// the same shifts are one *class*; one class of the depth's and one of the height's are a *set*. A *line* is an output channel
// and one phase of both; a block owns some lines of one set, in all phases of the width, for the units of one *box* after
// another:
//   weight  [step][slice][16 rows][lane][16 bytes]: fragments of the tensor cores, made once from torch's layout;
//   x       [channel][line of the box][input], or [line][input][channel] where x is channels-last, as they lie in memory, in
//           one place or in two, so that a chunk is copied while another is multiplied;
//   staged  [line][line of units][output]: the results of a box in the order of y, stored in runs. Where y is channels-last, some
//           lines of a pair of phases, neighbouring channels, are one run: [run][line of units][output][channel].
// A *step* of the reduction is a shift of depth and height and some channels; its *slices* are the shifts of the width. A product
// multiplies two *slots*, of eight channels of 16-bit types or four of float32: neighbours of one shift, or, where a group has no
// more channels than a slot (*folded*), the same at two neighbouring shifts.
//
// Where the shifts of the width are 0, 1, ... (*window*), the four columns of a lane in the four products of its warp are
// neighbouring units, so that one vector of x serves them and, with the vector before it, all shifts. Otherwise a product has
// eight neighbouring units, and each value is read by itself.
// Rows are ordered by the class of the width's phase, each class in groups of 16, so that a group multiplies no zero in place of
// a tap that it has not: NaN and infinity stay where taps carry them.
#pragma once

#include "activation.cuh"
#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kMostAxisPhases = 64, kMostAxisShifts = 16, kMostClasses = 8, kMostPhaseSets = 16, kMostEmpty = 64;
constexpr int kMostWidthShifts = kMostClasses * kMostAxisShifts, kWindowUnits = 4;  // shifts of all classes; units of a window
constexpr int kMostWindowShifts = kWindowUnits + 1;                                 // which a vector and the one before it serve
constexpr int kFragmentBytes = 512;                                                 // of 16 rows and two slots

struct PhaseAxis {
  std::int32_t in, out, stride, pad, dilation;
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
  std::int32_t batch, box_n, ic, oc;
  Divisor boxes;                               // of all
  Divisor box_lines, box_h, box_d;             // lines of units of a box, and what makes them up
  Divisor grid_w;                              // columns of a line of units: units, in a window rounded up to vectors of four
  Divisor combinations, row_tiles;             // row tiles of all groups, and of one
  std::int32_t set_tiles[kMostPhaseSets + 1];  // first row tile of each set
  std::int32_t lines;                          // of a row tile
  // Of the shifts of the width in all classes, each once: the shift, the groups of 16 rows that have taps there, and the offset
  // of those taps in w beside that of a row's phase.
  std::int32_t width_shifts;
  std::int16_t all_shifts[kMostWidthShifts];
  std::uint32_t shift_groups[kMostWidthShifts];
  std::int32_t shift_weight[kMostWidthShifts];
  std::uint8_t group_class[32], first_group[kMostClasses + 1];  // of the width: of each 16 rows; and where a class begins
  std::int32_t empty_count, empty_lines;  // pairs of phases without a tap; lines of such that a row tile stores too
  std::uint8_t empty_d[kMostEmpty], empty_h[kMostEmpty];  // those pairs
  // Where y is channels-last (`pixels`) lines are numbered by channel first, of which a pair of phases has `pair_channels`, and
  // `pixel` lines are a run: all channels of an output, which joins that of its neighbour in y (`joined`), or some of them.
  // Otherwise the counts are 1.
  bool pixels, joined;
  std::int32_t pixel, pair_channels, run_lines;  // and lines with products as runs
  // Bit masks of elements: how far a run may lie behind a vector in y, and behind where its stores begin, which of a long run is
  // a line of the cache.
  std::uint32_t skews, run_skews;
  bool prefill;  // some phases of the width have no tap
  // Rows are numbered by phase first: 16 lines in each phase of the width. Runs begin, lie among the staged results, and end at
  // even elements, so that two are stored at a time. Both, in a window: what a lane has of a line is one run of y, of such pairs.
  bool by_phase, pairs, lane_runs;
  bool window, folded;
  // x in shared memory: bytes from a channel, a line and an input to the next; of one chunk of channels.
  bool dense;
  std::int32_t channel_step, line_step, input_step, skew;
  std::int32_t chunk_channels, chunks, stage_bytes, last_stage;  // the number of the last of its places: 0 or 1
  std::int32_t grain;                                            // bytes of a copy
  Divisor places;                                                // of a channel (dense: of a vector of them)
  std::int32_t place_lanes, place_step;  // threads of a place; where x is dense, places that are copied at a time
  std::int32_t kept_places;              // threads whose first place is kept in shared memory: all, or none where it has no room
  Divisor run_vectors;                   // of 16 bytes, of a staged run
  std::int32_t run_rows;                 // runs that threads store at a time, a vector each: at least one
  // Of runs whose outputs lie apart: bytes of a store, the stores of an output, and outputs.
  std::int32_t piece;
  Divisor pixel_pieces, run_outputs;
  Divisor in_row, in_h, in_d;          // places of a line, and lines of inputs of a box
  std::int32_t copy_count, run_count;  // of a chunk
  // Of all chunks; elements from a staged output to the next, of a run, and of a line's; of all lines; and of those bytes, at
  // their end, constant results of each channel.
  std::int32_t weight_bytes, staged_pixel, staged_pitch, staged_line, staged_bytes, pattern_bytes;
  std::int32_t steps, step_channels;  // steps of one chunk, at the most; channels of one
  // In full float32: 2 if the weight lies split, 1 if each read splits it, which those of a window do not. And nothing.
  std::int32_t weight_parts;
  std::uint32_t zero;
  Divisor slices;  // of a step
  std::int64_t x_n, x_c, x_axis[3], y_n, y_c, y_axis[3], w_ic, w_oc, w_axis[3];
};
static_assert(sizeof(PhaseJob) <= 3800, "with the pointers it is the arguments of a launch");

// kLast: x or y is channels-last.
template <bool kLast_, int kWarpsM_, int kWarpsN_, int kWarpsK_, int kM16_, int kN8_, int kBlocks_>
struct PhaseTile {
  static constexpr bool kLast = kLast_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsK = kWarpsK_, kM16 = kM16_, kN8 = kN8_, kBlocks = kBlocks_;
  static constexpr int kWarps = kWarpsM * kWarpsN * kWarpsK, kThreads = 32 * kWarps;
  static constexpr int kGroups = kWarpsM * kM16, kRows = 16 * kGroups, kUnits = kWarpsN * kN8 * 8;
  static_assert(kN8 == kWindowUnits && 2 * kRows <= kThreads, "a window is a vector; a thread makes a line");
  static constexpr int kReduced = (kWarpsK - 1) * kWarpsM * kWarpsN * kM16 * kN8 * 32;  // float4, of partial sums
};

// Of a step of the reduction: where its shifts and channels begin in x, the offset of its taps in w beside those of a row's
// phases, and its first channel of a chunk.
struct PhaseStep {
  std::int32_t from, weight, channel;
};
// Of a row: where it goes among the staged results, in bytes (-1: nowhere), and its bias.
struct alignas(8) PhaseRow {
  std::int32_t to;
  float bias;
};
// Of a line: where it begins in y, its outputs on the axes of depth and height for unit 0 (far outside: no line), and its channel
// of the group.
struct alignas(16) PhaseLine {
  std::int64_t y;
  std::int32_t d, h;
  float bias;
  std::int32_t channel;
};
constexpr std::int32_t kNoLine = -(1 << 30);
// A line of units in one line, in vectors of 16 bytes: the address in y of the first one that holds an output of the box, where
// it is staged in shared memory (of lines without taps: the bias, as often as a word holds it, or, of pixels, where that of their
// first channel lies), and how many bytes behind it the box begins (kNoRun: no output of it is there). Of outputs that lie apart
// the last number is the bytes of their channels.
struct alignas(16) PhaseRun {
  std::uint64_t y;
  std::uint32_t staged;
  std::int32_t skew;
};
constexpr std::int32_t kNoRun = 1 << 29;
// What a thread copies first of each box, beside the place where the box begins: where it lies in x and in shared memory, and its
// coordinates.
struct alignas(16) PhasePlace {
  std::int32_t from, to;
  std::int16_t n, d, h, w;
};
// The box whose inputs are copied next: where its first place lies in x (it may be outside), how much of the batch is left, and
// the input of each axis at that place.
struct alignas(16) PhaseNext {
  std::uint64_t first;
  std::int32_t left_n, from[3];
};

template <typename Tile>
struct PhaseTables {
  PhaseRow rows[Tile::kRows];
  std::int32_t row_weight[Tile::kRows];  // the offset of a row's channel and phases in w; -1: no row
  std::int32_t columns[Tile::kUnits];    // where each unit of a box, in a window each four, is staged, in bytes; -1: nowhere
  PhaseLine lines[2 * Tile::kRows];      // with products, and behind them without taps
  PhaseNext next[2];                     // of this turn and of the one after
};

// What a block keeps in shared memory, and which rows it owns: of one group, some lines of a set.
template <typename Value_, bool kExact, typename Tile_>
struct PhaseMemory {
  using Value = Value_;
  using Tile = Tile_;
  static constexpr int kSize = int(sizeof(Value)), kVector = 16 / kSize;
  static constexpr int kParts = kExact ? 2 : 1;  // of a value: as TF32, and what that leaves
  static constexpr int kSlotChannels = kSize == 2 ? 8 : 4;

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

  // Of a fragment with what its rounding leaves, where that lies beside it.
  __device__ __forceinline__ std::int32_t fragment_vectors() const {
    return kFragmentBytes / 16 * (kExact ? job.weight_parts : 1);
  }
  __device__ __forceinline__ uint4* weight() const { return reinterpret_cast<uint4*>(memory); }
  __device__ __forceinline__ unsigned char* stage(int i) const { return memory + job.weight_bytes + i * job.stage_bytes; }
  __device__ __forceinline__ Value* staged() const { return reinterpret_cast<Value*>(stage(job.last_stage + 1)); }
  // What a kernel without channels-last operands knows of them.
  __device__ __forceinline__ bool dense() const { return Tile::kLast && job.dense; }
  __device__ __forceinline__ bool window() const { return job.window; }
  __device__ __forceinline__ bool pixels() const { return Tile::kLast && job.pixels; }
  __device__ __forceinline__ bool are_apart() const { return pixels() && !job.joined; }
  __device__ __forceinline__ std::int32_t pixel() const { return Tile::kLast ? job.pixel : 1; }
  __device__ __forceinline__ std::int32_t staged_pixel() const { return Tile::kLast ? job.staged_pixel : 1; }
  __device__ __forceinline__ std::int32_t run_lines() const { return Tile::kLast ? job.run_lines : job.lines; }
  __device__ __forceinline__ std::uint32_t skews() const { return Tile::kLast ? job.skews : kVector - 1; }

  __device__ __forceinline__ Value* pattern() const {
    return reinterpret_cast<Value*>(stage(job.last_stage + 1) + job.staged_bytes - job.pattern_bytes);
  }
  __device__ __forceinline__ float4* reduced() const {
    return reinterpret_cast<float4*>(stage(job.last_stage + 1) + job.staged_bytes);
  }
  __device__ __forceinline__ PhaseTables<Tile>& tables() const {
    return *reinterpret_cast<PhaseTables<Tile>*>(reduced() + Tile::kReduced);
  }
  __device__ __forceinline__ PhaseRun* runs() const { return reinterpret_cast<PhaseRun*>(&tables() + 1); }
  __device__ __forceinline__ PhasePlace* places() const { return reinterpret_cast<PhasePlace*>(runs() + job.run_count); }
  __device__ __forceinline__ PhaseStep* steps() const { return reinterpret_cast<PhaseStep*>(places() + job.kept_places); }
  static __device__ __forceinline__ std::int32_t class_size(const std::uint8_t* first, std::int32_t c) {
    return first[c + 1] - first[c];
  }
  __device__ __forceinline__ std::int32_t set_steps() const {
    const std::int32_t shifts = class_size(job.axis[0].first_shift, set_d) * class_size(job.axis[1].first_shift, set_h);
    return shifts * (job.chunk_channels / job.step_channels);
  }
  // First units of a box on each axis, and its first sample.
  struct Box {
    std::int32_t unit[3], n;
  };
  static constexpr std::int32_t kNowhere = -1;
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
