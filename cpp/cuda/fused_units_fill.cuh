// What a block of the fused method of units fills shared memory with: its places of x, its weights, and what it knows of its
// columns.
#pragma once

#include "fused_units.cuh"
#include "warpgroup.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct UnitsOperands {
  using Value = typename Tile::Value;
  static constexpr int kVector = Tile::kVector,
                       kAtATime = 24 / kVector;        // vectors of weights that a thread fills in at a time
  static constexpr int kBatch = kVector == 4 ? 3 : 2;  // pairs of those of x
  struct alignas(16) Vector {
    Value v[kVector];
  };

  const UnitsJob& job;
  uint4* memory;
  UnitsColumn* columns;  // kN of them, in shared memory
  std::int32_t n, group, first_column, first_tile, end_tile;

  __device__ __forceinline__ uint4* weights() const { return memory + job.vectors * job.filled; }

  static __device__ __forceinline__ float rounded(float v) { return __uint_as_float(to_tf32(v)); }
  static __device__ __forceinline__ __half rounded(__half v) { return v; }
  static __device__ __forceinline__ __nv_bfloat16 rounded(__nv_bfloat16 v) { return v; }

  // A vector of channels from `channel` on, `step` elements apart, behind an address; zeros where there are none. All loads are
  // begun before any is asked for.
  __device__ __forceinline__ Vector gather(const Value* from, std::int64_t step, std::int32_t channel, bool exists) const {
    Vector values;
#pragma unroll
    for (int e = 0; e < kVector; ++e) values.v[e] = load_or_zero(from + (channel + e) * step, exists && channel + e < job.ic);
    return values;
  }
  static __device__ __forceinline__ void put(uint4& to, Vector values) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) values.v[e] = rounded(values.v[e]);
    to = *reinterpret_cast<const uint4*>(&values);
  }

  // Where a place of the strip reads x, and whether that is inside.
  struct Source {
    const Value* from;
    bool exists;
  };
  __device__ __forceinline__ Source source(const Value* x, std::int32_t place) const {
    const std::int32_t first = first_tile * 64 - job.halo + job.shifts_h * std::int32_t(job.pitch.value);
    std::uint32_t row = std::uint32_t(first + place);
    const std::int32_t iw = job.first_w - job.before + std::int32_t(take(job.pitch, row));
    const std::int32_t ih = job.first_h - job.shifts_h + std::int32_t(row);
    const bool exists = std::uint32_t(ih) < std::uint32_t(job.in_h) && std::uint32_t(iw) < std::uint32_t(job.in_w);
    return {exists ? x + ih * job.x_h + iw * job.x_w : x, exists};
  }
  // Pairs of vectors of a place, of which neighbouring ones are of neighbouring places. Threads wait for all loads of a batch
  // together.
  __device__ __forceinline__ void fill_inputs(const Value* x) const {
    const std::int32_t count = (job.vectors + 1) / 2 * job.filled;
#pragma unroll 1
    for (std::int32_t first = std::int32_t(threadIdx.x); first < count; first += kBatch * kUnitThreads) {
      Vector batch[kBatch][2];
      std::int32_t to[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        std::uint32_t pair = std::uint32_t(first + k * kUnitThreads);
        const bool is_there = std::int32_t(pair) < count;
        const std::int32_t place = std::int32_t(take(job.strip_places, pair)), vector = 2 * std::int32_t(pair);
        const Source own = source(x, place);
#pragma unroll
        for (int i = 0; i < 2; ++i) batch[k][i] = gather(own.from, job.x_c, (vector + i) * kVector, own.exists && is_there);
        to[k] = is_there ? vector * job.filled + place : -1;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (to[k] < 0) continue;
        put(memory[to[k]], batch[k][0]);
        if (to[k] + job.filled < job.vectors * job.filled) put(memory[to[k] + job.filled], batch[k][1]);
      }
    }
  }

  // Of pixels of which two are aligned together: two places at a time, a vector of channels each, and several such pairs whose
  // loads are all begun before any is asked for.
  using PixelPair = Word<2 * sizeof(Value)>;
  static __device__ __forceinline__ uint4 half_of(const PixelPair (&pairs)[kVector], int half) {
    if constexpr (sizeof(Value) == 2) {
      const std::uint32_t pick = half == 0 ? 0x5410 : 0x7632;
      return {__byte_perm(pairs[0], pairs[1], pick), __byte_perm(pairs[2], pairs[3], pick), __byte_perm(pairs[4], pairs[5], pick),
              __byte_perm(pairs[6], pairs[7], pick)};
    } else {
      std::uint32_t words[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) words[e] = to_tf32(__uint_as_float(half == 0 ? pairs[e].x : pairs[e].y));
      return {words[0], words[1], words[2], words[3]};
    }
  }
  __device__ __forceinline__ void fill_pairs(const Value* x) const {
    constexpr int kTogether = 4;
    const std::int32_t first = first_tile * 64 - job.halo + job.shifts_h * std::int32_t(job.pitch.value);
    std::uint32_t row = std::uint32_t(first);
    const std::int32_t in_row = std::int32_t(take(job.pitch, row)), pairs = std::int32_t(job.row_pairs.value);
    const std::int32_t rows = (in_row + job.filled + std::int32_t(job.pitch.value) - 1) / std::int32_t(job.pitch.value);
    const std::int32_t count = job.vectors * rows * pairs;
    const std::int32_t behind = job.first_pair - job.first_w + job.before - in_row;  // the first pair's place in the strip
#pragma unroll 1
    for (std::int32_t begin = std::int32_t(threadIdx.x); begin < count; begin += kTogether * kUnitThreads) {
      PixelPair words[kTogether][kVector];
      std::int32_t to[kTogether][2];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        std::uint32_t rest = std::uint32_t(begin + k * kUnitThreads);
        const bool is_pair = std::int32_t(rest) < count;
        const std::int32_t pair = std::int32_t(take(job.row_pairs, rest)), vector = std::int32_t(take(job.pair_vectors, rest));
        const std::int32_t own_row = std::int32_t(rest), iw = job.first_pair + 2 * pair,
                           ih = job.first_h - job.shifts_h + std::int32_t(row) + own_row;
        const bool exists = is_pair && std::uint32_t(ih) < std::uint32_t(job.in_h) && std::uint32_t(iw) < std::uint32_t(job.in_w);
        const Value* from = x + (exists ? ih * job.x_h + iw + vector * kVector * job.x_c : 0);
#pragma unroll
        for (int e = 0; e < kVector; ++e, from += job.x_c) {
          words[k][e] = {};
          if (exists && vector * kVector + e < job.ic) words[k][e] = __ldg(reinterpret_cast<const PixelPair*>(from));
        }
        const std::int32_t place = behind + 2 * pair + own_row * std::int32_t(job.pitch.value);
        // A row has pitch places: what is beyond them is the next row's.
        const std::int32_t in_place = iw - job.first_w + job.before;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const bool own = is_pair && std::uint32_t(in_place + half) < job.pitch.value &&
                           std::uint32_t(place + half) < std::uint32_t(job.filled);
          to[k][half] = own ? vector * job.filled + place + half : -1;
        }
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (to[k][half] >= 0) memory[to[k][half]] = half_of(words[k], half);
        }
      }
    }
  }
  __device__ __forceinline__ void fill_pixels(const Value* x) const {
    if (job.row_pairs.value > 0) return fill_pairs(x);
    fill_inputs(x);
  }

  // The column of the block behind a column of its products. Of 16-bit values a lane's two columns of each eight are followed by
  // its two of the next eight, so that four outputs of a lane are neighbours.
  static __device__ __forceinline__ std::int32_t column_of(std::int32_t number) {
    return sizeof(Value) == 4 ? number : number / 16 * 16 + number % 8 / 2 * 4 + number / 8 % 2 * 2 + number % 2;
  }

  // A thread's column of the weights: neighbouring threads have nearly neighbouring ones.
  struct Column {
    const Value* from;
    std::int32_t number;
    bool exists;
  };
  static constexpr std::int32_t kTurns = kUnitThreads / Tile::kN;  // vectors of a column between a thread's
  __device__ __forceinline__ Column own_column(const Value* w) const {
    const std::int32_t number = std::int32_t(threadIdx.x) % Tile::kN, column = first_column + column_of(number);
    const UnitsPhase phase = units_phase(job, column);
    const bool exists = column < job.columns;
    const Value* const own = w + std::int64_t(group) * job.ic * job.w_ic;
    return {exists ? own + phase.oc * job.w_oc + phase.h * job.w_h + phase.w * job.w_w : own, number, exists};
  }
  __device__ __forceinline__ Vector weight(const Column& column, std::int32_t i) const {
    const UnitsVector vector = job.vector[i];
    const Value* const tap = column.from + vector.shift_h * job.stride_h * job.w_h + vector.shift_w * job.stride_w * job.w_w;
    return gather(tap, job.w_ic, vector.vector < 0 ? job.ic : vector.vector * kVector, column.exists);
  }
  // The first ones of a thread, which are on their way while it fills in x, and the others.
  __device__ __forceinline__ void load_weights(const Value* w, Vector (&held)[kAtATime]) const {
    const Column column = own_column(w);
#pragma unroll
    for (int k = 0; k < kAtATime; ++k) {
      const std::int32_t i = std::int32_t(threadIdx.x) / Tile::kN + k * kTurns;
      held[k] = weight(column, i < 2 * job.products ? i : 0);
    }
  }
  __device__ __forceinline__ void fill_weights(const Value* w, const Vector (&held)[kAtATime]) const {
    const Column column = own_column(w);
    std::int32_t i = std::int32_t(threadIdx.x) / Tile::kN;
#pragma unroll
    for (int k = 0; k < kAtATime; ++k, i += kTurns) {
      if (i < 2 * job.products) put(weights()[i * Tile::kN + column.number], held[k]);
    }
#pragma unroll 2
    for (; i < 2 * job.products; i += kTurns) put(weights()[i * Tile::kN + column.number], weight(column, i));
  }

  // Where neighbouring columns are a vector of w: that of each of a vector of channels, which a thread turns to vectors of
  // channels of each column.
  struct Rows {
    Vector v[kVector];
  };
  static constexpr std::int32_t kRowsOfVector = Tile::kN / kVector;  // groups of columns
  struct RowsPlace {
    const Value* from;
    std::int32_t first, channels;  // zeros before the first channel and behind the last
  };
  __device__ __forceinline__ RowsPlace rows_place(const Value* w, std::int32_t number) const {
    const bool is_there = number < 2 * job.products * kRowsOfVector;
    const UnitsVector vector = job.vector[is_there ? number / kRowsOfVector : 0];
    const std::int32_t column = first_column + number % kRowsOfVector * kVector;
    const UnitsPhase phase = units_phase(job, column);
    const std::int32_t first = vector.vector * kVector, channels = is_there && column < job.columns ? job.ic - first : 0;
    return {w + (std::int64_t(group) * job.ic + first) * job.w_ic + phase.oc * job.w_oc + phase.w +
                (phase.h + vector.shift_h * job.stride_h) * job.w_h + vector.shift_w * job.stride_w,
            first, channels};
  }
  __device__ __forceinline__ void load_rows(const Value* w, std::int32_t number, Rows& rows) const {
    RowsPlace place = rows_place(w, number);
#pragma unroll
    for (int e = 0; e < kVector; ++e, place.from += job.w_ic) {
      uint4 row = {};
      if (place.first >= 0 && e < place.channels) row = __ldg(reinterpret_cast<const uint4*>(place.from));
      rows.v[e] = *reinterpret_cast<const Vector*>(&row);
    }
  }
  // All of the block's, before the kernels ahead have ended.
  __device__ __forceinline__ void ask(const Value* w) const {
    if (!job.rows_of_weights) return;
#pragma unroll 1
    for (std::int32_t i = std::int32_t(threadIdx.x); i < 2 * job.products * kRowsOfVector; i += kUnitThreads) {
      const RowsPlace place = rows_place(w, i);
#pragma unroll
      for (int e = 0; e < kVector; ++e)
        if (place.first >= 0 && e < place.channels) ask_for(place.from + e * job.w_ic);
    }
  }
  // Neighbouring lanes begin with neighbouring columns, which lie in different banks.
  __device__ __forceinline__ void put_rows(std::int32_t number, const Rows& rows) const {
    if (number >= 2 * job.products * kRowsOfVector) return;
    Vector turned[kVector];
#pragma unroll
    for (int i = 0; i < kVector * kVector; ++i) turned[i / kVector].v[i % kVector] = rows.v[i % kVector].v[i / kVector];
    const std::int32_t first = std::int32_t(threadIdx.x) % kVector;
#pragma unroll
    for (int step = 1; step < kVector; step *= 2) {
      Vector moved[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) moved[i] = first & step ? turned[(i + step) % kVector] : turned[i];
#pragma unroll
      for (int i = 0; i < kVector; ++i) turned[i] = moved[i];
    }
    uint4* const to = weights() + number / kRowsOfVector * Tile::kN;
#pragma unroll
    for (int i = 0; i < kVector; ++i) put(to[number_of(number % kRowsOfVector * kVector + (i + first) % kVector)], turned[i]);
  }
  // The column of the products for one of the block: column_of turned round.
  static __device__ __forceinline__ std::int32_t number_of(std::int32_t column) {
    return sizeof(Value) == 4 ? column : column / 16 * 16 + column % 4 / 2 * 8 + column % 16 / 4 * 2 + column % 2;
  }
  __device__ __forceinline__ void fill_by_rows(const Value* x, const Value* w) const {
    Rows rows;
    load_rows(w, std::int32_t(threadIdx.x), rows);  // on its way while x is filled in
    fill_pixels(x);
    put_rows(std::int32_t(threadIdx.x), rows);
#pragma unroll 1
    for (std::int32_t i = std::int32_t(threadIdx.x) + kUnitThreads; i < 2 * job.products * kRowsOfVector; i += kUnitThreads) {
      load_rows(w, i, rows);
      put_rows(i, rows);
    }
  }

  __device__ __forceinline__ void fill_columns(const Value* bias) const {
    for (std::int32_t i = std::int32_t(threadIdx.x); i < Tile::kN; i += kUnitThreads) {
      const std::int32_t column = first_column + column_of(i);
      UnitsColumn own = {-1, 0.0f, 0, 0};
      if (column < job.columns) {
        const UnitsPhase phase = units_phase(job, column);
        own.at = std::int32_t(phase.oc * job.y_c + phase.h * job.y_h + phase.w * job.y_w);
        own.h = phase.h, own.w = phase.w;
        if (bias != nullptr) own.bias = widen(bias[group * job.oc + phase.oc]);
      }
      columns[i] = own;
    }
  }

  __device__ __forceinline__ void fill(const Value* x, const Value* w, const Value* bias) const {
    const Value* const own = x + n * job.x_n + std::int64_t(group) * job.ic * job.x_c;
    if (job.rows_of_weights) {
      fill_by_rows(own, w);
    } else {
      Vector held[kAtATime];
      load_weights(w, held);
      fill_pixels(own);
      fill_weights(w, held);
    }
    fill_columns(bias);
  }
};
#endif

}  // namespace upfold::cuda
