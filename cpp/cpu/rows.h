// Output rows along w, held as one row per phase while they are summed, so that every loop over pixels is contiguous.
//
// With t = o + pad = q * stride + phase, the pixels of one phase are numbered by q, and tap k of that phase carries input
// position i to q = i + shift. A phase row holds q in [first_q, first_q + count_q).
#pragma once

#include <type_traits>

#include "activation.h"
#include "number.h"

#if defined(_MSC_VER)
#define UPFOLD_RESTRICT __restrict
#else
#define UPFOLD_RESTRICT __restrict__
#endif

namespace upfold::cpu::UPFOLD_ISA {

UPFOLD_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
UPFOLD_INLINE std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
UPFOLD_INLINE std::int64_t round_up(std::int64_t a, std::int64_t unit) { return (a + unit - 1) / unit * unit; }

// A small table made once per call and read by all threads.
template <typename T>
class Table {
 public:
  explicit Table(std::int64_t size) : data_(new T[static_cast<std::size_t>(size)]) {}
  ~Table() { delete[] data_; }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  T& operator[](std::int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

// The taps of one phase: tap number j is first + j * tap_step and has shift + j * in_step.
struct PhaseGroup {
  std::int64_t phase, first, count, tap_step, shift, in_step;
};

// All non-empty phases of an axis, at most min(stride, kernel) of them, in the order of their first taps.
UPFOLD_INLINE std::int64_t phase_group_limit(const Axis& a) { return smaller(a.stride, a.kernel); }
UPFOLD_INLINE std::int64_t list_phase_groups(const Axis& a, const Table<PhaseGroup>& groups) {
  const std::int64_t gcd = greatest_common_divisor(a.stride, a.dilation);
  const std::int64_t tap_step = a.stride / gcd;
  const std::int64_t count = smaller(tap_step, a.kernel);
  for (std::int64_t k = 0; k < count; ++k) {
    const std::int64_t reach = k * a.dilation;
    groups[k] = {reach % a.stride, k, (a.kernel - k + tap_step - 1) / tap_step, tap_step, reach / a.stride, a.dilation / gcd};
  }
  return count;
}

// Strides up to this one keep a row for every phase and are interleaved by vector code; larger ones keep the non-empty phases.
constexpr std::int64_t kInterleavedStride = 8;

struct RowLayout {
  std::int64_t stride, pad, begin, end;  // the outputs [begin, end) of the axis
  std::int64_t first_q, count_q;
  std::int64_t rows, pitch;  // phase rows held, elements from one to the next
  bool all_phases;           // row r holds phase r; otherwise row r holds groups[r].phase
  std::int64_t head_phase;   // of the first output
};

UPFOLD_INLINE RowLayout row_layout(const Axis& a, std::int64_t begin, std::int64_t end, std::int64_t group_count) {
  RowLayout layout{a.stride, a.pad, begin, end, (begin + a.pad) / a.stride, 0, 0, 0, a.stride <= kInterleavedStride, 0};
  layout.count_q = (end - 1 + a.pad) / a.stride + 1 - layout.first_q;
  layout.rows = layout.all_phases ? a.stride : group_count;
  layout.pitch = round_up(layout.count_q, 16);
  layout.head_phase = begin + a.pad - layout.first_q * a.stride;
  return layout;
}

// The rows of S phases in the order in which outputs meet them from `first_phase` on: a row that was passed starts one q later.
template <typename In>
UPFOLD_INLINE In* met_row(In* rows, std::int64_t pitch, std::int64_t stride, std::int64_t first_phase, std::int64_t r) {
  const std::int64_t phase = first_phase + r;
  return phase < stride ? rows + phase * pitch : rows + (phase - stride) * pitch + 1;
}

// out[q * S + r] = f(the q-th of the r-th row met). The stores start where the output row does, so that they do not straddle
// cache lines whatever the padding; the loads that do come from the first-level cache.
template <int S, typename T, typename In, typename F>
UPFOLD_INLINE void interleave(const In* rows, std::int64_t pitch, std::int64_t first_phase, std::int64_t count,
                              T* UPFOLD_RESTRICT out, const F& f) {
  const In* met[S];
  for (int r = 0; r < S; ++r) met[r] = met_row(rows, pitch, S, first_phase, r);
  for (std::int64_t q = 0; q < count; ++q) {
    for (int r = 0; r < S; ++r) out[q * S + r] = f(met[r][q]);
  }
}

// The reverse, without f.
template <int S, typename T>
UPFOLD_INLINE void deinterleave(const T* UPFOLD_RESTRICT in, std::int64_t pitch, std::int64_t first_phase, std::int64_t count,
                                T* rows) {
  T* met[S];
  for (int r = 0; r < S; ++r) met[r] = met_row(rows, pitch, S, first_phase, r);
  for (std::int64_t q = 0; q < count; ++q) {
    for (int r = 0; r < S; ++r) met[r][q] = in[q * S + r];
  }
}

template <typename T, typename In, typename F>
UPFOLD_INLINE void interleave_any(std::int64_t stride, const In* rows, std::int64_t pitch, std::int64_t first_phase,
                                  std::int64_t count, T* out, const F& f) {
  switch (stride) {
    case 2:
      return interleave<2>(rows, pitch, first_phase, count, out, f);
    case 3:
      return interleave<3>(rows, pitch, first_phase, count, out, f);
    case 4:
      return interleave<4>(rows, pitch, first_phase, count, out, f);
    case 8:
      return interleave<8>(rows, pitch, first_phase, count, out, f);
    default:
      for (std::int64_t r = 0; r < stride; ++r) {
        const In* met = met_row(rows, pitch, stride, first_phase, r);
        for (std::int64_t q = 0; q < count; ++q) out[q * stride + r] = f(met[q]);
      }
  }
}

template <typename T>
UPFOLD_INLINE void deinterleave_any(std::int64_t stride, const T* in, std::int64_t pitch, std::int64_t first_phase,
                                    std::int64_t count, T* rows) {
  switch (stride) {
    case 2:
      return deinterleave<2>(in, pitch, first_phase, count, rows);
    case 3:
      return deinterleave<3>(in, pitch, first_phase, count, rows);
    case 4:
      return deinterleave<4>(in, pitch, first_phase, count, rows);
    case 8:
      return deinterleave<8>(in, pitch, first_phase, count, rows);
    default:
      for (std::int64_t r = 0; r < stride; ++r) {
        T* met = met_row(rows, pitch, stride, first_phase, r);
        for (std::int64_t q = 0; q < count; ++q) met[q] = in[q * stride + r];
      }
  }
}

// Turns phase rows (row r = phase r) into the dense outputs of a row, f(sum) each.
template <typename T, typename In, typename F>
static void merge_phases(const RowLayout& layout, const In* rows, std::int64_t pitch, T* out, const F& f) {
  const std::int64_t stride = layout.stride, count = (layout.end - layout.begin) / stride;
  interleave_any(stride, rows, pitch, layout.head_phase, count, out, f);
  for (std::int64_t i = count * stride; i < layout.end - layout.begin; ++i) {
    out[i] = f(met_row(rows, pitch, stride, layout.head_phase, i - count * stride)[count]);
  }
}

// The reverse, without f.
template <typename T>
static void split_phases(const RowLayout& layout, const T* in, T* rows) {
  const std::int64_t stride = layout.stride, count = (layout.end - layout.begin) / stride;
  deinterleave_any(stride, in, layout.pitch, layout.head_phase, count, rows);
  for (std::int64_t i = count * stride; i < layout.end - layout.begin; ++i) {
    met_row(rows, layout.pitch, stride, layout.head_phase, i - count * stride)[count] = in[i];
  }
}

// Writes one finished output row to `out`, dense. The phase rows of `sums` are sums_pitch apart; `staged` has room for
// layout.rows * layout.pitch elements (unused for stride 1).
template <typename T, typename Sum>
static void write_row(const RowLayout& layout, const Table<PhaseGroup>& groups, const Epilogue<Sum>& epilogue, const Sum* sums,
                      std::int64_t sums_pitch, T* staged, T* out) {
  if (layout.stride == 1) return finish_row(epilogue, sums, layout.end - layout.begin, out);
  if constexpr (std::is_same_v<T, Sum> && std::is_floating_point_v<Sum>) {
    if (layout.all_phases && epilogue.kind == Activation::kNone) {
      const Sum bias = epilogue.bias;
      return merge_phases(layout, sums, sums_pitch, out, [bias](Sum sum) { return sum + bias; });
    }
  }
  for (std::int64_t r = 0; r < layout.rows; ++r) {
    finish_row(epilogue, sums + r * sums_pitch, layout.count_q, staged + r * layout.pitch);
  }
  if (layout.all_phases) return merge_phases(layout, staged, layout.pitch, out, [](T value) { return value; });
  const Sum no_tap{};
  T empty{};
  finish_row(epilogue, &no_tap, 1, &empty);
  for (std::int64_t i = 0; i < layout.end - layout.begin; ++i) out[i] = empty;
  for (std::int64_t r = 0; r < layout.rows; ++r) {
    for (std::int64_t q = 0; q < layout.count_q; ++q) {
      const std::int64_t o = (layout.first_q + q) * layout.stride + groups[r].phase - layout.pad;
      if (o >= layout.begin && o < layout.end) out[o - layout.begin] = staged[r * layout.pitch + q];
    }
  }
}

// Copies `channels` dense rows into a tensor whose w stride is not 1, channels innermost where they are the denser axis.
template <typename T>
static void scatter_rows(const T* rows, std::int64_t pitch, std::int64_t channels, std::int64_t count, T* out,
                         std::int64_t channel_stride, std::int64_t w_stride) {
  if (channel_stride < w_stride) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t c = 0; c < channels; ++c) out[i * w_stride + c * channel_stride] = rows[c * pitch + i];
    }
  } else {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t i = 0; i < count; ++i) out[i * w_stride + c * channel_stride] = rows[c * pitch + i];
    }
  }
}

template <typename T>
static void gather_rows(const T* in, std::int64_t channel_stride, std::int64_t w_stride, std::int64_t channels,
                        std::int64_t count, T* rows, std::int64_t pitch) {
  if (channel_stride < w_stride) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t c = 0; c < channels; ++c) rows[c * pitch + i] = in[i * w_stride + c * channel_stride];
    }
  } else {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t i = 0; i < count; ++i) rows[c * pitch + i] = in[i * w_stride + c * channel_stride];
    }
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
