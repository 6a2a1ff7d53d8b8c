// What the row kernel of the direct method is made of: its block and units, the weight in shared memory, the window of the source
// that a thread reads, and the stores.
#pragma once

#include "activation.cuh"
#include "direct.cuh"

namespace upfold::cuda {

constexpr int kManyUnits = 4;  // of a thread, where there are enough of them

struct RowsJob {
  CorrelateJob problem;
  Divisor units_h;  // groups of kU units on the H axis of a sample
  Divisor channel_chunks, phase_chunks, tile_runs;
  std::uint32_t unit_groups, tiles, tiles_of_run;  // tiles of unit groups; a block takes tiles_of_run of them in turn
  std::int32_t parts;                              // warps that share the source channels out
  std::int32_t kernel[3], stride[3], merged_h, merged_w;
  std::int64_t w_group, w_channel, w_depth, w_axis[3];
  std::int32_t rotation;  // results that a unit of the W axis starts before a run
  bool runs;              // whole runs of neighbouring results are aligned
};

struct RowsBlock {
  std::uint32_t chunk, tile_run, group;
  std::int32_t phase_w;  // first of the merged phases
  std::int32_t residue[3];
};

UPFOLD_DEVICE RowsBlock rows_block(const RowsJob& job, int phases_w) {
  std::uint32_t rest = blockIdx.x;
  RowsBlock block;
  block.chunk = take(job.channel_chunks, rest);
  block.phase_w = std::int32_t(take(job.phase_chunks, rest)) * phases_w;
#pragma unroll
  for (int i = 2; i >= 0; --i) block.residue[i] = std::int32_t(take(job.problem.axis[i].phases, rest));
  block.tile_run = take(job.tile_runs, rest);
  block.group = rest;
  return block;
}

// The first unit of a thread; the others follow on the H axis.
struct RowUnits {
  std::uint32_t sample;
  std::int32_t at[3];
  bool live;
};

UPFOLD_DEVICE RowUnits row_units(const RowsJob& job, std::uint32_t index, int count) {
  RowUnits units;
  units.live = index < job.unit_groups;
  units.at[2] = std::int32_t(take(job.problem.axis[2].units, index));
  units.at[1] = std::int32_t(take(job.units_h, index)) * count;
  units.at[0] = std::int32_t(take(job.problem.axis[0].units, index));
  units.sample = index;
  return units;
}

struct RowTap {
  std::int64_t offset;                 // in the source
  std::int32_t displacement[3], k[3];  // of the source; of the kernel, for phase 0 where phases are merged
};

// Tap number `tap` of the phase; where windows hold the taps of the H and W axes, of the D axis alone.
template <int kM>
UPFOLD_DEVICE RowTap row_tap(const RowsJob& job, const PhaseAxisTaps (&phase)[3], std::int32_t tap) {
  std::int32_t j[3] = {tap, 0, 0};
  if (kM == 0) {
    const std::int32_t plane = tap / phase[2].count;
    j[0] = plane / phase[1].count, j[1] = plane % phase[1].count, j[2] = tap % phase[2].count;
  }
  const std::int32_t merged[3] = {1, job.merged_h, job.merged_w};
  RowTap found{};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    found.displacement[i] = phase[i].displacement + j[i] * phase[i].move;
    found.k[i] = (phase[i].first + j[i] * phase[i].step) * merged[i];
    found.offset += found.displacement[i] * job.problem.source_axis[i];
  }
  return found;
}

// Entries [first, last) of the weight, counted tap by tap and channel by channel: each holds, for the taps of a window, kC
// channels times kSh x kSw phases.
template <typename Value, int kSh, int kSw, int kC, int kM, bool kHalf>
UPFOLD_DEVICE void fill_piece(const RowsJob& job, const RowsBlock& block, const RowTap* taps, std::uint32_t first,
                              std::uint32_t last, const Value* __restrict__ w, Sum<Value>* piece) {
  constexpr std::uint32_t kV = kC * kSh * kSw, kWindow = kM == 0 ? 1 : kM;
  for (std::uint32_t i = threadIdx.x; i < (last - first) * (kV * kWindow * kWindow); i += kDirectThreads) {
    const std::uint32_t v = i % kV, j = i / kV % (kWindow * kWindow);
    std::uint32_t tap = first + i / (kV * kWindow * kWindow);
    const std::uint32_t depth = take(job.problem.depth, tap), channel = block.chunk * kC + v / (kSh * kSw);
    const std::int32_t phase_w = block.phase_w + std::int32_t(kHalf ? (v + kSw / 2) % kSw : v % kSw);
    const std::int32_t kh = taps[tap].k[1] + std::int32_t(v / kSw % kSh) + std::int32_t(j / kWindow) * job.stride[1];
    const std::int32_t kw = taps[tap].k[2] + phase_w + std::int32_t(j % kWindow) * job.stride[2];
    const bool exists = channel < job.problem.channels && kh < job.kernel[1] && kw < job.kernel[2] && phase_w < job.merged_w;
    piece[i] = exists ? widen(w[block.group * job.w_group + depth * job.w_depth + channel * job.w_channel +
                                taps[tap].k[0] * job.w_axis[0] + kh * job.w_axis[1] + kw * job.w_axis[2]])
                      : Sum<Value>{};
  }
}

// What a thread reads for one tap: a position for each of its units (kM = 0), or the window that a kernel of kM x kM taps of a
// phase, one position apart, reads for all of them. Where units start half a stride beyond the phases of the W axis (kHalf), the
// second half of their results reads one position further.
template <typename Value, int kU, int kM, bool kHalf>
struct RowReader {
  static constexpr int kRows = kM == 0 ? kU : kU + kM - 1, kColumns = (kM == 0 ? 1 : kM) + kHalf, kAbove = kM == 0 ? 0 : kM - 1;
  const Value* from;  // displacement 0 of the first unit
  std::int64_t step, left;
  std::int32_t at[3], advance;
  bool live;

  UPFOLD_METHOD RowReader(const RowsJob& job, const RowUnits& units, const Value* planes) {
    const CorrelateJob& p = job.problem;
    from = planes + units.sample * p.source_n;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      at[i] = units.at[i] * p.axis[i].advance;
      from += at[i] * p.source_axis[i];
    }
    advance = p.axis[1].advance, step = advance * p.source_axis[1], left = p.source_axis[2], live = units.live;
  }

  // A bit for each position of the window that lies in the source.
  UPFOLD_METHOD std::uint32_t inside(const CorrelateJob& p, const RowTap& tap) const {
    const std::int32_t d = at[0] + tap.displacement[0], h = at[1] + tap.displacement[1], w = at[2] + tap.displacement[2];
    std::uint32_t columns = 0, mask = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      columns |= std::uint32_t(w + kHalf - j) < std::uint32_t(p.axis[2].source_size) ? 1u << j : 0u;
    if (!live || std::uint32_t(d) >= std::uint32_t(p.axis[0].source_size)) columns = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (std::uint32_t(h + (r - kAbove) * advance) < std::uint32_t(p.axis[1].source_size)) mask |= columns << (r * kColumns);
    }
    return mask;
  }

  UPFOLD_METHOD void load(std::int64_t offset, std::uint32_t mask, Value (&window)[kRows][kColumns]) const {
    const Value* row = from + offset - kAbove * step + (kHalf ? left : 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r, row += step) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) window[r][j] = mask >> (r * kColumns + j) & 1u ? *(row - j * left) : Value{};
    }
  }
};

template <typename Value, int kSh, int kSw, int kC, int kU, int kM, bool kHalf>
struct RowSums {
  using Total = Sum<Value>;
  using Reader = RowReader<Value, kU, kM, kHalf>;
  static constexpr int kV = kC * kSh * kSw, kWindow = kM == 0 ? 1 : kM;
  Total v[kU][kV];

  UPFOLD_METHOD void add_window(const Value (&raw)[Reader::kRows][Reader::kColumns], const Total* weights) {
#pragma unroll
    for (int j = 0; j < kWindow * kWindow; ++j) {
      Total w[kV];
#pragma unroll
      for (int i = 0; i < kV; ++i) w[i] = weights[j * kV + i];
#pragma unroll
      for (int u = 0; u < kU; ++u) {
        const Value* const row = raw[u + Reader::kAbove - j / kWindow];
#pragma unroll
        for (int i = 0; i < kV; ++i) {
          const int further = kHalf && i % kSw < (kSw + 1) / 2 ? 1 : 0;  // the first half reads one position less far
          add_product(v[u][i], w[i], widen(row[j % kWindow + further]));
        }
      }
    }
  }

  // The same where only the first `phases` of the W axis have the tap: the others must not meet the source, which may not be
  // finite.
  UPFOLD_METHOD void add_some(const Value (&raw)[Reader::kRows][Reader::kColumns], const Total* weights, std::int32_t phases) {
#pragma unroll
    for (int i = 0; i < kV; ++i) {
      if (i % kSw >= phases) continue;
      const Total w = weights[i];
#pragma unroll
      for (int u = 0; u < kU; ++u) add_product(v[u][i], w, widen(raw[u][0]));
    }
  }

  // The sums of the parts, in order, in the first one.
  UPFOLD_METHOD void join(int part, int parts, std::int32_t thread, std::int32_t unit_threads, Total* exchange) {
    if (parts == 1) return;
#pragma unroll
    for (int i = 0; i < kU * kV; ++i) {
      __syncthreads();  // the sums before are taken
      exchange[threadIdx.x] = v[i / kV][i % kV];
      __syncthreads();  // the sums are there
      if (part > 0) continue;
#pragma unroll 1
      for (int other = 1; other < parts; ++other) add(v[i / kV][i % kV], exchange[other * unit_threads + thread]);
    }
  }

  UPFOLD_METHOD void finish_all(const CorrelateJob& p, const RowsBlock& block, const Value* __restrict__ bias) {
    if (bias == nullptr && p.activation == Activation::kNone) return;
#pragma unroll
    for (int c = 0; c < kC; ++c) {
      const std::uint32_t channel = block.chunk * kC + c;
      const Total more = bias != nullptr && channel < p.channels ? widen(bias[block.group * p.channels + channel]) : Total{};
#pragma unroll
      for (int i = 0; i < kU * kSh * kSw; ++i) {
        Total& sum = v[i / (kSh * kSw)][c * kSh * kSw + i % (kSh * kSw)];
        if (bias != nullptr) add(sum, more);
        sum = finish(p.activation, p.slope, sum);
      }
    }
  }
};

// kCount neighbours in one store.
template <typename Value, int kCount>
struct alignas(sizeof(Value) * kCount <= 16 ? sizeof(Value) * kCount : sizeof(Value)) Run {
  Value v[kCount];
};

// How the results of a unit in a row are stored, the same for all of a thread's rows: in runs where these are aligned. Where the
// unit starts `rotation` before a run, a lane passes its first results on to the lane before and gets as many from the next.
// Where runs are not aligned, and the lanes of the warp own neighbouring units of one row, neighbouring lanes store neighbours.
template <typename Value, int kSw>
struct RowPlace {
  static constexpr int kRun = (kSw & (kSw - 1)) != 0 ? 1 : kSw * sizeof(Value) <= 16 ? kSw : int(16 / sizeof(Value));
  static constexpr int kPieces = kSw / kRun;
  std::int32_t w, size, rotation;
  std::int64_t step;
  bool turns, dense, passed, whole[kPieces];

  UPFOLD_METHOD RowPlace(const RowsJob& job, const RowsBlock& block, const RowUnits& units) {
    const CorrelateAxis& axis = job.problem.axis[2];
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32, last = job.merged_w - block.phase_w;
    w = units.at[2] * axis.result_step + block.residue[2] + axis.result_shift + block.phase_w;
    size = axis.result_size;
    if (last < kSw && w + last < size) size = w + last;  // phases that do not exist
    step = job.problem.result_axis[2], rotation = job.rotation;
    const bool runs = job.runs && kRun > 1, previous = lane > 0 && units.at[2] > 0;
    const bool next = lane < 31 && units.at[2] + 1 < std::int32_t(axis.units.value);
    turns = runs && rotation > 0;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const std::int32_t begin = w + rotation + k * kRun;
      whole[k] = runs && begin >= 0 && begin + kRun <= size && (rotation == 0 || k + 1 < kPieces || next);
    }
    const std::int32_t first = units.at[2] - lane;
    dense = !runs && kSw > 1 && step == 1 && last >= kSw && first >= 0 && first + 31 < std::int32_t(axis.units.value);
    passed = turns && previous && w + rotation - kRun >= 0 && w + rotation <= size;
  }

  template <int kBit>
  UPFOLD_METHOD void turn(Value (&v)[2 * kSw]) const {
    if constexpr (kBit < kRun) {
      if ((rotation & kBit) == 0) return;
#pragma unroll
      for (int r = 0; r < 2 * kSw - kBit; ++r) v[r] = v[r + kBit];
    }
  }

  // Through `staged`, the warp's own part of shared memory.
  UPFOLD_METHOD void store_dense(const Value (&v)[kSw], Value* to, bool live, Value* staged) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
    __syncwarp();  // the warp has left the results before
#pragma unroll
    for (int r = 0; r < kSw; ++r) staged[lane * kSw + r] = v[r];
    __syncwarp();  // the results are there
#pragma unroll
    for (int r = 0; r < kSw; ++r) {
      const std::int32_t ahead = lane + 32 * r - lane * kSw;
      if (live && std::uint32_t(w + ahead) < std::uint32_t(size)) to[ahead] = staged[lane + 32 * r];
    }
  }

  // `to` is the place of v[0]. All lanes of a warp take part, those that store nothing too.
  UPFOLD_METHOD void store(const Value (&v)[kSw], Value* to, bool live, Value* staged) const {
    if (dense) return store_dense(v, to, live, staged);
    Value turned[2 * kSw];
#pragma unroll
    for (int r = 0; r < kSw; ++r) turned[r] = turned[r + kSw] = v[r];
    if (turns) {
#pragma unroll
      for (int r = 0; r + 1 < kRun; ++r) {
        if (r < rotation) turned[r + kSw] = shuffle_down(v[r]);
      }
      turn<1>(turned);
      turn<2>(turned);
      turn<4>(turned);
    }
    if (!live) return;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      if (!whole[k]) continue;
      Run<Value, kRun> run;
#pragma unroll
      for (int r = 0; r < kRun; ++r) run.v[r] = turned[k * kRun + r];
      *reinterpret_cast<Run<Value, kRun>*>(to + rotation + k * kRun) = run;
    }
    store_rest(v, to);
  }

  // The results that no run holds.
  UPFOLD_METHOD void store_rest(const Value (&v)[kSw], Value* to) const {
    bool rest = !passed && rotation > 0;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) rest = rest || !whole[k];
    if (!rest) return;
#pragma unroll
    for (int r = 0; r < kSw; ++r) {
      bool stored = r < rotation && passed;
#pragma unroll
      for (int k = 0; k < kPieces; ++k)
        stored = stored || (whole[k] && r >= rotation + k * kRun && r < rotation + (k + 1) * kRun);
      if (!stored && std::uint32_t(w + r) < std::uint32_t(size)) to[r * step] = v[r];
    }
  }
};

template <typename Value, int kSh, int kSw, int kC, int kU, int kM, bool kHalf>
UPFOLD_DEVICE void store_rows(const RowsJob& job, const RowsBlock& block, const RowUnits& units, Value* __restrict__ result,
                              Value* staged, const RowSums<Value, kSh, kSw, kC, kU, kM, kHalf>& sums) {
  const CorrelateJob& p = job.problem;
  const RowPlace<Value, kSw> place(job, block, units);
  const std::int32_t d = units.at[0] * p.axis[0].result_step + block.residue[0] + p.axis[0].result_shift;
  const std::int32_t h = units.at[1] * p.axis[1].result_step + block.residue[1] + p.axis[1].result_shift;
  const bool exists = units.live && d < p.axis[0].result_size;
  const std::uint32_t first = block.chunk * kC;
  Value* row = result + units.sample * p.result_n + (std::int64_t(block.group) * p.channels + first) * p.result_c +
               d * p.result_axis[0] + h * p.result_axis[1] + place.w * p.result_axis[2];
  const std::int64_t next_unit = p.axis[1].result_step * p.result_axis[1];
#pragma unroll
  for (int u = 0; u < kU; ++u, row += next_unit) {
#pragma unroll
    for (int rh = 0; rh < kSh; ++rh) {
      const bool live = exists && std::uint32_t(h + u * p.axis[1].result_step + rh) < std::uint32_t(p.axis[1].result_size);
      Value* to = row + rh * p.result_axis[1];
#pragma unroll
      for (int c = 0; c < kC; ++c, to += p.result_c) {
        if (first + c >= p.channels) continue;
        Value v[kSw];
#pragma unroll
        for (int r = 0; r < kSw; ++r) v[r] = Narrow<Value>::from(sums.v[u][(c * kSh + rh) * kSw + r]);
        place.store(v, to, live, staged);
      }
    }
  }
}

}  // namespace upfold::cuda
