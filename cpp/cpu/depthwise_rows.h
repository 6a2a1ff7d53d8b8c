// Output rows of one channel from packed rows of one channel: the phases of a row are summed in registers and interleaved there.
#pragma once

#include "zip.h"

namespace upfold::cpu::UPFOLD_ISA {

// The taps of an output row. With S phases numbered r in the order in which outputs meet them, out[q * S + r] is the bias plus
// the sum of weight * x[q + offset] over the taps of phase r.
template <typename R>
struct RowArgs {
  const R* x;
  const std::int64_t* offsets;
  const R* weights;
  // Shared taps: tap t has offsets[t] in phases below the split, one more in the others, and weights[t * S + r].
  std::int64_t count;
  // Otherwise phase r has the taps [begin[r], begin[r + 1]).
  const std::int64_t* begin;
  R bias;
};

// x may be read fewer than this many elements past the last q.
constexpr std::int64_t kRowSlack = 80;

template <typename R, int S, int V>
UPFOLD_INLINE void store_tile(Vector<R> (&sum)[V][S], R bias, R* out) {
  for (int v = 0; v < V; ++v) {
    for (int r = 0; r < S; ++r) sum[v][r] = sum[v][r] + bias;
    interleave_vectors<R, S>(sum[v]);
    for (int r = 0; r < S; ++r) store(sum[v][r], out + (v * S + r) * kLanes<R>);
  }
}

// Taps shared by all phases; N of them, or any number where N is 0.
template <typename R, int S, int Split, int N>
struct SharedTaps {
  template <int V>
  UPFOLD_INLINE void tile(const RowArgs<R>& a, std::int64_t q, R* out) {
    Vector<R> sum[V][S];
    for (int v = 0; v < V; ++v) {
      for (int r = 0; r < S; ++r) sum[v][r] = Vector<R>{};
    }
    const std::int64_t count = N > 0 ? N : a.count;
    for (std::int64_t t = 0; t < count; ++t) {
      const R* x = a.x + q + a.offsets[t];
      const R* w = a.weights + t * S;
      for (int v = 0; v < V; ++v) {
        const Vector<R> pixels = load(x + v * kLanes<R>), next = load(x + v * kLanes<R> + (Split < S ? 1 : 0));
        for (int r = 0; r < S; ++r) sum[v][r] = multiply_add(r < Split ? pixels : next, w[r], sum[v][r]);
      }
    }
    store_tile<R, S, V>(sum, a.bias, out);
  }
};

// Taps of each phase for itself.
template <typename R, int S>
struct OwnTaps {
  template <int V>
  UPFOLD_INLINE void tile(const RowArgs<R>& a, std::int64_t q, R* out) {
    Vector<R> sum[V][S];
    for (int r = 0; r < S; ++r) {
      for (int v = 0; v < V; ++v) sum[v][r] = Vector<R>{};
      for (std::int64_t t = a.begin[r]; t < a.begin[r + 1]; ++t) {
        const R* x = a.x + q + a.offsets[t];
        for (int v = 0; v < V; ++v) sum[v][r] = multiply_add(load(x + v * kLanes<R>), a.weights[t], sum[v][r]);
      }
    }
    store_tile<R, S, V>(sum, a.bias, out);
  }
};

// Writes the outputs from `o` to `count`, fewer than a tile of V. Where a whole tile fits into the row it ends with the row and
// writes some outputs again.
template <typename R, int S, int V, typename Taps>
UPFOLD_INLINE void sum_rest(const RowArgs<R>& a, std::int64_t o, std::int64_t count, R* UPFOLD_RESTRICT out) {
  constexpr std::int64_t kTile = V * S * kLanes<R>;
  if (count >= kTile && count % S == 0) return Taps::template tile<V>(a, (count - kTile) / S, out + count - kTile);
  R tile[kTile];
  Taps::template tile<V>(a, o / S, tile);
  std::memcpy(out + o, tile, static_cast<std::size_t>(count - o) * sizeof(R));
}

// Writes `count` outputs.
template <typename R, int S, typename Taps>
static void sum_row(const RowArgs<R>& a, std::int64_t count, R* UPFOLD_RESTRICT out) {
  // Enough sums at once to hide the latency of an addition.
  constexpr int kWide = S == 1 ? 4 : S == 2 ? 2 : 1;
  constexpr std::int64_t kStep = S * kLanes<R>;
  std::int64_t o = 0;
  for (; o + kWide * kStep <= count; o += kWide * kStep) Taps::template tile<kWide>(a, o / S, out + o);
  if (o + kStep < count) {
    sum_rest<R, S, kWide, Taps>(a, o, count, out);
  } else if (o < count) {
    sum_rest<R, S, 1, Taps>(a, o, count, out);
  }
}

template <typename R, int S, int Split>
static void sum_shared(const RowArgs<R>& a, std::int64_t count, R* out) {
  switch (a.count) {
    case 2:
      return sum_row<R, S, SharedTaps<R, S, Split, 2>>(a, count, out);
    case 4:
      return sum_row<R, S, SharedTaps<R, S, Split, 4>>(a, count, out);
    default:
      return sum_row<R, S, SharedTaps<R, S, Split, 0>>(a, count, out);
  }
}

// Whether taps shared by all of `stride` phases have a kernel, the first output of a row being of phase `head`.
UPFOLD_INLINE bool has_shared_taps(std::int64_t stride, std::int64_t head) {
  return stride == 1 || ((stride == 2 || stride == 4 || stride == 8) && (head == 0 || 2 * head == stride));
}

template <typename R>
static void sum_shared_any(std::int64_t stride, std::int64_t head, const RowArgs<R>& a, std::int64_t count, R* out) {
  switch (stride) {
    case 1:
      return sum_shared<R, 1, 1>(a, count, out);
    case 2:
      return head == 0 ? sum_shared<R, 2, 2>(a, count, out) : sum_shared<R, 2, 1>(a, count, out);
    case 4:
      return head == 0 ? sum_shared<R, 4, 4>(a, count, out) : sum_shared<R, 4, 2>(a, count, out);
    default:
      return head == 0 ? sum_shared<R, 8, 8>(a, count, out) : sum_shared<R, 8, 4>(a, count, out);
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
