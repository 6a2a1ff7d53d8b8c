// What the product for equal kernel and stride works on, and how its sums become neighbouring outputs.
//
// Neighbouring outputs are kRun rows of kGroup units: a *line* is the outputs of one channel, phase of depth and height, and run
// of width phases. Lanes exchange what they hold, so that a quad writes whole sectors.
#pragma once

#include "activation.cuh"
#include "divide.cuh"
#include "lanes.cuh"

namespace upfold::cuda {

struct EqualJob {
  Divisor pixels, width, height;                // of a sample's input
  Divisor runs, strides_h, strides_d;           // runs of kRun width phases; strides
  Divisor taps, row_tiles, all_row_tiles;       // row tiles of a group, and of all groups
  std::int32_t tiles, units, rows, ic, chunks;  // rows and ic of a group
  std::int32_t stride_w;
  bool resident;                  // a row tile's whole weight stays in shared memory
  std::int32_t x_grain, w_grain;  // bytes of one copy
  std::int32_t store;             // 2: the outputs of kGroup units are one aligned vector; 1: those of a unit; 0: neither
  std::int64_t x_n, x_c, w_ic, y_n, y_c, y_d, y_h;
  std::int64_t step_d, step_h;  // in y, from a unit to the next on the axis
  Activation activation;
  float slope;
};

// kBlocks of them share a multiprocessor.
template <int kWarpsM_, int kWarpsN_, int kM16_, int kN8_, int kBlocks_>
struct EqualTile {
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kM16 = kM16_, kN8 = kN8_, kBlocks = kBlocks_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN, kRows = 16 * kM16 * kWarpsM, kUnits = 8 * kN8 * kWarpsN;
};

// How a thread's sums are cut into vectors of neighbouring outputs.
template <typename Value, int kRun_>
struct EqualStore {
  static constexpr bool kHalf = sizeof(Value) == 2;
  static constexpr int kRun = kRun_, kGroup = kRun == 1 ? 4 : kHalf || kRun == 2 ? 2 : 1, kVector = kRun * kGroup;
  static constexpr int kPlaces = kHalf ? (kRun == 2 ? 2 : 1) : kRun;  // vectors along 16 units
  static constexpr int kWords = kVector * int(sizeof(Value)) / 4;
  // Lines of kM16 row tiles.
  template <int kM16>
  static constexpr int kLines = kRun == 1             ? 2 * kM16
                                : !kHalf && kRun == 4 ? kM16 / 2
                                                      : kM16;
};

// Rows (of a panel) that sum element c = 0 (1) and c = 2 (3) of a row tile's sums belong to, counted from the warp's first.
template <typename Value, int kRun>
UPFOLD_DEVICE std::int32_t row_of(std::int32_t m, std::int32_t half, std::int32_t lane) {
  if constexpr (sizeof(Value) == 2) return m * 16 + half * 8 + lane / 4;
  if constexpr (kRun == 4) return m / 2 * 32 + lane / 4 * 4 + m % 2 * 2 + half;
  return m * 16 + lane / 4 * 2 + half;
}

// The first row of line number `line` that this lane stores.
template <typename Value, int kRun>
UPFOLD_DEVICE std::int32_t line_row(std::int32_t line, std::int32_t lane) {
  if constexpr (kRun == 1) return row_of<Value, kRun>(line / 2, line % 2, lane);
  if constexpr (sizeof(Value) != 2) return row_of<Value, kRun>(kRun == 4 ? 2 * line : line, 0, lane);
  const std::int32_t half = kRun == 2 ? lane / 4 % 2 : lane / 8 % 2;
  return row_of<Value, kRun>(line, half, lane & (kRun == 2 ? ~4 : ~12));
}

// The first unit of place number `place` among 16 units that this lane stores.
template <typename Value, int kRun>
UPFOLD_DEVICE std::int32_t place_unit(std::int32_t place, std::int32_t lane) {
  const std::int32_t t = lane % 4;
  if constexpr (sizeof(Value) != 2) return t * 4 + place * EqualStore<Value, kRun>::kGroup;
  if constexpr (kRun == 1) return t / 2 * 4 + t % 2 * 8;
  if constexpr (kRun == 2) return place * 8 + t * 2;
  return lane / 4 % 2 * 8 + t * 2;
}

// The vector of one line and place, from the sums of a warp's kM16 row tiles and 2 * `pair`, 2 * `pair` + 1 of its unit tiles.
// All lanes of a warp call it together.
template <typename Value, int kRun, int kM16, int kN8>
UPFOLD_DEVICE void collect(const float (&sums)[kM16][kN8][4], int line, int pair, int place, std::int32_t lane,
                           std::uint32_t (&out)[EqualStore<Value, kRun>::kWords]) {
  const int j = 2 * pair;
  if constexpr (sizeof(Value) == 4) {
    float v[4];
    if constexpr (kRun == 1) {
      const int m = line / 2, c = line % 2 * 2;
      v[0] = sums[m][j][c], v[1] = sums[m][j + 1][c], v[2] = sums[m][j][c + 1], v[3] = sums[m][j + 1][c + 1];
    } else {
      const int m = kRun == 4 ? 2 * line : line, n = kRun == 4 ? j + place % 2 : j, c = kRun == 4 ? place / 2 : place;
      const float(&other)[4] = kRun == 4 ? sums[m + (kRun == 4)][n] : sums[m][j + 1];
      v[0] = sums[m][n][c], v[1] = sums[m][n][c + 2], v[2] = other[c], v[3] = other[c + 2];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = __float_as_uint(v[i]);
  } else if constexpr (kRun == 1) {
    const int m = line / 2, c = line % 2 * 2;
    const std::uint32_t first = pair_of<Value>(sums[m][j][c], sums[m][j][c + 1]);
    const std::uint32_t second = pair_of<Value>(sums[m][j + 1][c], sums[m][j + 1][c + 1]);
    const bool odd = lane & 1;
    const std::uint32_t own = odd ? second : first, got = exchange(odd ? first : second, 1);
    out[0] = odd ? got : own, out[1] = odd ? own : got;
  } else if constexpr (kRun == 2) {
    const float(&c)[4] = sums[line][j + place];
    const std::uint32_t first = pair_of<Value>(c[0], c[1]), second = pair_of<Value>(c[2], c[3]);
    const bool odd = lane & 4;
    const std::uint32_t own = odd ? second : first, got = exchange(odd ? first : second, 4);
    out[0] = __byte_perm(own, got, odd ? 0x1054 : 0x5410), out[1] = __byte_perm(own, got, odd ? 0x3276 : 0x7632);
  } else {
    const bool odd = lane & 4, upper = lane & 8;
    std::uint32_t own[2], got[2];  // by half of the row tile, of the unit tile that this lane keeps
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float(&c)[4] = sums[line][j];
      const float(&d)[4] = sums[line][j + 1];
      const std::uint32_t first = pair_of<Value>(c[2 * h], c[2 * h + 1]), second = pair_of<Value>(d[2 * h], d[2 * h + 1]);
      own[h] = odd ? second : first, got[h] = exchange(odd ? first : second, 4);
    }
    const std::uint32_t far_own = exchange(upper ? own[0] : own[1], 8), far_got = exchange(upper ? got[0] : got[1], 8);
    const std::uint32_t near_own = upper ? own[1] : own[0], near_got = upper ? got[1] : got[0];
    const std::uint32_t near_even = odd ? near_got : near_own, near_odd = odd ? near_own : near_got;
    const std::uint32_t far_even = odd ? far_got : far_own, far_odd = odd ? far_own : far_got;
    const std::uint32_t p0 = upper ? far_even : near_even, p1 = upper ? far_odd : near_odd;
    const std::uint32_t p2 = upper ? near_even : far_even, p3 = upper ? near_odd : far_odd;
    out[0] = __byte_perm(p0, p1, 0x5410), out[1] = __byte_perm(p2, p3, 0x5410);
    out[2] = __byte_perm(p0, p1, 0x7632), out[3] = __byte_perm(p2, p3, 0x7632);
  }
}

// Offset in y of a unit's first output, without the line; -1 past the last unit.
UPFOLD_DEVICE std::int64_t unit_offset(const EqualJob& job, std::int32_t unit) {
  if (unit >= job.units) return -1;
  std::uint32_t rest = std::uint32_t(unit);
  const std::uint32_t n = divide(job.pixels, rest);
  rest -= n * job.pixels.value;
  const std::int32_t w = std::int32_t(take(job.width, rest)), h = std::int32_t(take(job.height, rest));
  return n * job.y_n + std::int32_t(rest) * job.step_d + h * job.step_h + w * job.stride_w;
}

// What a block's rows are: where their lines lie in y, and their bias.
template <typename Value, typename Tile, int kRun>
struct EqualRows {
  static constexpr int kLines = EqualStore<Value, kRun>::template kLines<Tile::kM16>;
  Value* lines[kLines];  // null past the last row
  float added[Tile::kM16][2];

  __device__ __forceinline__ void find(const EqualJob& job, std::uint32_t all_row_tile, std::int32_t warp_row, std::int32_t lane,
                                       const Value* bias, Value* y) {
    std::uint32_t group = all_row_tile;
    const std::int32_t first = std::int32_t(take(job.row_tiles, group)) * Tile::kRows + warp_row;
    const std::int64_t first_channel = std::int64_t(group) * std::int32_t(divide(job.taps, std::uint32_t(job.rows)));
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const std::int32_t row = first + line_row<Value, kRun>(i, lane);
      std::uint32_t rest = std::uint32_t(row) / kRun;
      const std::int32_t run = std::int32_t(take(job.runs, rest)), h = std::int32_t(take(job.strides_h, rest));
      const std::int32_t d = std::int32_t(take(job.strides_d, rest));
      Value* const line = y + (first_channel + std::int32_t(rest)) * job.y_c + d * job.y_d + h * job.y_h + run * kRun;
      lines[i] = row < job.rows ? line : nullptr;
    }
#pragma unroll
    for (int i = 0; i < 2 * Tile::kM16; ++i) {
      const std::int32_t row = first + row_of<Value, kRun>(i / 2, i % 2, lane);
      const bool exists = bias != nullptr && row < job.rows;
      added[i / 2][i % 2] = exists ? widen(bias[first_channel + std::int32_t(divide(job.taps, std::uint32_t(row)))]) : 0.0f;
    }
  }
};

// Adds bias and activation, and stores a warp's sums; `first` is its first unit.
template <typename Value, typename Tile, int kRun>
UPFOLD_DEVICE void store_sums(const EqualJob& job, const EqualRows<Value, Tile, kRun>& rows, std::int32_t first,
                              std::int32_t lane, float (&sums)[Tile::kM16][Tile::kN8][4]) {
  using Store = EqualStore<Value, kRun>;
#pragma unroll
  for (int m = 0; m < Tile::kM16; ++m) {
#pragma unroll
    for (int i = 0; i < 4 * Tile::kN8; ++i) sums[m][i / 4][i % 4] += rows.added[m][i % 4 / 2];
  }
  if (job.activation != Activation::kNone) {
#pragma unroll
    for (int i = 0; i < 4 * Tile::kM16 * Tile::kN8; ++i) {
      float& sum = sums[i / 4 / Tile::kN8][i / 4 % Tile::kN8][i % 4];
      sum = finish(job.activation, job.slope, sum);
    }
  }
#pragma unroll
  for (int pair = 0; pair < Tile::kN8 / 2; ++pair) {
#pragma unroll
    for (int place = 0; place < Store::kPlaces; ++place) {
      const std::int32_t unit = first + pair * 16 + place_unit<Value, kRun>(place, lane);
      std::int64_t offsets[Store::kGroup];
#pragma unroll
      for (int i = 0; i < Store::kGroup; ++i) offsets[i] = i == 0 || job.store != 2 ? unit_offset(job, unit + i) : -1;
#pragma unroll
      for (int line = 0; line < EqualRows<Value, Tile, kRun>::kLines; ++line) {
        std::uint32_t words[Store::kWords];
        collect<Value, kRun>(sums, line, pair, place, lane, words);
        Value* const to = rows.lines[line];
        if (to == nullptr) continue;
        if (job.store == 2) {
          if (offsets[0] >= 0) store_words<Store::kVector* int(sizeof(Value))>(to + offsets[0], words);
          continue;
        }
        Value values[Store::kVector];
        memcpy(values, words, sizeof(words));
#pragma unroll
        for (int i = 0; i < Store::kGroup; ++i) {
          if (offsets[i] < 0) continue;
          if (job.store == 1) {
            std::uint32_t own[(kRun * sizeof(Value) + 3) / 4];
            memcpy(own, values + i * kRun, kRun * sizeof(Value));
            store_words<kRun* int(sizeof(Value))>(to + offsets[i], own);
          } else {
#pragma unroll
            for (int p = 0; p < kRun; ++p) to[offsets[i] + p] = values[i * kRun + p];
          }
        }
      }
    }
  }
}

}  // namespace upfold::cuda
