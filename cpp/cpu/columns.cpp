// col2im in gather form and its adjoint im2col: one output row, or one row of column pixels, at a time.
#include <type_traits>

#include "isa.h"
#include "number.h"
#include "parallel.h"
#include "rows.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// Channels handled together when w is not the dense axis of y, so that their neighbours in memory are written together.
constexpr std::int64_t kChannelBlock = 16;

// Taps summed in one pass over a row.
constexpr int kFusedTaps = 4;

template <int N, typename C, typename Sum>
void add_fused(Sum* UPFOLD_RESTRICT sums, const C* const* sources, std::int64_t begin, std::int64_t end) {
  const C* UPFOLD_RESTRICT s0 = sources[0];
  const C* UPFOLD_RESTRICT s1 = sources[N > 1 ? 1 : 0];
  const C* UPFOLD_RESTRICT s2 = sources[N > 2 ? 2 : 0];
  const C* UPFOLD_RESTRICT s3 = sources[N > 3 ? 3 : 0];
  for (std::int64_t i = begin; i < end; ++i) {
    Sum sum = sums[i] + widen(s0[i]);
    if (N > 1) sum = sum + widen(s1[i]);
    if (N > 2) sum = sum + widen(s2[i]);
    if (N > 3) sum = sum + widen(s3[i]);
    sums[i] = sum;
  }
}

// One tap row: sums[i] += source[i] for i in [begin, end).
template <typename C>
struct TapRow {
  const C* source;
  std::int64_t begin, end;
};

// Adds n rows in order. Where all of them are present they share one pass; the ragged ends follow row by row, which leaves the
// order of the sum of each element unchanged.
template <typename C, typename Sum>
void add_taps(Sum* sums, const TapRow<C>* taps, int n) {
  const C* sources[kFusedTaps];
  std::int64_t begin = 0, end = taps[0].end;
  for (int j = 0; j < n; ++j) {
    sources[j] = taps[j].source;
    begin = larger(begin, taps[j].begin);
    end = smaller(end, taps[j].end);
  }
  if (begin >= end) begin = end = taps[0].end;
  switch (begin < end ? n : 0) {
    case 1:
      add_fused<1>(sums, sources, begin, end);
      break;
    case 2:
      add_fused<2>(sums, sources, begin, end);
      break;
    case 3:
      add_fused<3>(sums, sources, begin, end);
      break;
    case 4:
      add_fused<4>(sums, sources, begin, end);
      break;
    default:
      break;
  }
  for (int j = 0; j < n; ++j) {
    const C* source = taps[j].source;
    for (std::int64_t i = taps[j].begin; i < smaller(begin, taps[j].end); ++i) sums[i] = sums[i] + widen(source[i]);
    for (std::int64_t i = larger(end, taps[j].begin); i < taps[j].end; ++i) sums[i] = sums[i] + widen(source[i]);
  }
}

template <typename T, typename C>
class ColumnsToImage {
  using Sum = typename Number<T>::Sum;

 public:
  ColumnsToImage(const Problem& p, const ColumnBlock& block, const C* columns, const T* bias, T* y)
      : p_(p),
        b_(block),
        columns_(columns),
        bias_(bias),
        y_(y),
        d_(axis_d(p)),
        h_(axis_h(p)),
        w_(axis_w(p)),
        groups_(phase_group_limit(w_)),
        group_count_(list_phase_groups(w_, groups_)),
        layout_(row_layout(w_, block.out_w.begin, block.out_w.end, group_count_)),
        dense_(p.y.w == 1 || length(block.out_w) == 1),
        channel_block_(dense_ ? 1 : smaller(kChannelBlock, length(block.oc))) {}

  std::int64_t units() const {
    return length(b_.n) * ceil_div(length(b_.oc), channel_block_) * length(b_.out_d) * length(b_.out_h);
  }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const std::int64_t sum_size = layout_.rows * layout_.pitch;
    const std::int64_t out_pitch = round_up(length(b_.out_w), 16);
    const Scratch scratch(round_up(sum_size * static_cast<std::int64_t>(sizeof(Sum) + sizeof(T)), 64) +
                          (dense_ ? 0 : channel_block_ * out_pitch * static_cast<std::int64_t>(sizeof(T))));
    Sum* sums = reinterpret_cast<Sum*>(scratch.data());
    T* staged = reinterpret_cast<T*>(sums + sum_size);
    T* rows = staged + sum_size;
    const std::int64_t blocks = ceil_div(length(b_.oc), channel_block_);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      std::int64_t rest = unit;
      const std::int64_t oh = b_.out_h.begin + rest % length(b_.out_h);
      rest /= length(b_.out_h);
      const std::int64_t od = b_.out_d.begin + rest % length(b_.out_d);
      rest /= length(b_.out_d);
      const std::int64_t oc = b_.oc.begin + rest % blocks * channel_block_;
      const std::int64_t n = b_.n.begin + rest / blocks;
      const std::int64_t oc_end = smaller(oc + channel_block_, b_.oc.end);
      T* out = y_ + n * p_.y.n + oc * p_.y.c + od * p_.y.d + oh * p_.y.h + b_.out_w.begin * p_.y.w;
      for (std::int64_t c = oc; c < oc_end; ++c) {
        sum_row(n, c, od, oh, sums);
        const Epilogue<Sum> epilogue{bias_ ? widen(bias_[c]) : Sum{}, p_.activation, p_.activation_slope};
        write_row(layout_, groups_, epilogue, sums, layout_.pitch, staged, dense_ ? out : rows + (c - oc) * out_pitch);
      }
      if (!dense_) scatter_rows(rows, out_pitch, oc_end - oc, length(b_.out_w), out, p_.y.c, p_.y.w);
    }
  }

 private:
  void sum_row(std::int64_t n, std::int64_t oc, std::int64_t od, std::int64_t oh, Sum* sums) const {
    for (std::int64_t i = 0; i < layout_.rows * layout_.pitch; ++i) sums[i] = Sum{};
    const PhaseTaps taps_d = phase_taps(d_, phase_of(d_, od));
    const PhaseTaps taps_h = phase_taps(h_, phase_of(h_, oh));
    if (taps_d.count == 0 || taps_h.count == 0) return;
    const std::int64_t id_first = input_of(d_, od, taps_d.first), ih_first = input_of(h_, oh, taps_h.first);
    for (std::int64_t jd = 0; jd < taps_d.count; ++jd) {
      const std::int64_t id = id_first - jd * taps_d.in_step;
      if (id < 0) break;
      if (id >= d_.in) continue;
      for (std::int64_t jh = 0; jh < taps_h.count; ++jh) {
        const std::int64_t ih = ih_first - jh * taps_h.in_step;
        if (ih < 0) break;
        if (ih >= h_.in) continue;
        const std::int64_t kd = taps_d.first + jd * taps_d.tap_step, kh = taps_h.first + jh * taps_h.tap_step;
        const std::int64_t row = (oc - b_.oc.begin) * kernel_taps(p_) + (kd * h_.kernel + kh) * w_.kernel;
        add_input_row(columns_ + (n - b_.n.begin) * b_.sample_stride + row * b_.row_stride +
                          ((id - b_.in_d.begin) * length(b_.in_h) + ih - b_.in_h.begin) * length(b_.in_w),
                      sums);
      }
    }
  }

  // Adds what one input row sends through the taps kw; `source` is that row in the columns of tap (kd, kh, 0).
  void add_input_row(const C* source, Sum* sums) const {
    const std::int64_t i_begin = larger(b_.in_w.begin, 0), i_end = smaller(b_.in_w.end, w_.in);
    for (std::int64_t g = 0; g < group_count_; ++g) {
      const PhaseGroup& group = groups_[g];
      Sum* phase_sums = sums + (layout_.all_phases ? group.phase : g) * layout_.pitch;
      TapRow<C> taps[kFusedTaps];
      int pending = 0;
      for (std::int64_t j = 0; j < group.count; ++j) {
        const std::int64_t offset = group.shift + j * group.in_step - layout_.first_q;  // input i goes to sums[i + offset]
        const std::int64_t begin = larger(i_begin + offset, 0), end = smaller(i_end + offset, layout_.count_q);
        if (begin >= end) continue;
        const C* row = source + (group.first + j * group.tap_step) * b_.row_stride;
        taps[pending++] = {row - (offset + b_.in_w.begin), begin, end};
        if (pending == kFusedTaps) {
          add_taps(phase_sums, taps, pending);
          pending = 0;
        }
      }
      if (pending > 0) add_taps(phase_sums, taps, pending);
    }
  }

  const Problem& p_;
  const ColumnBlock& b_;
  const C* columns_;
  const T* bias_;
  T* y_;
  const Axis d_, h_, w_;
  const Table<PhaseGroup> groups_;
  const std::int64_t group_count_;
  const RowLayout layout_;
  const bool dense_;
  const std::int64_t channel_block_;
};

UPFOLD_INLINE void convert(float value, float& result) { result = value; }
template <typename T>
UPFOLD_INLINE void convert(T value, T& result) {
  result = value;
}
UPFOLD_INLINE void convert(Half value, float& result) { result = widen(value); }
UPFOLD_INLINE void convert(BFloat16 value, float& result) { result = widen(value); }

template <typename T, typename C>
class ImageToColumns {
 public:
  ImageToColumns(const Problem& p, const ColumnBlock& block, const T* y, C* columns)
      : p_(p),
        b_(block),
        y_(y),
        columns_(columns),
        d_(axis_d(p)),
        h_(axis_h(p)),
        w_(axis_w(p)),
        groups_(phase_group_limit(w_)),
        group_count_(list_phase_groups(w_, groups_)),
        layout_(row_layout(w_, 0, w_.out, group_count_)),
        dense_(p.y.w == 1 || w_.out == 1),
        channel_block_(dense_ ? 1 : smaller(kChannelBlock, length(block.oc))) {}

  std::int64_t units() const {
    return length(b_.n) * ceil_div(length(b_.oc), channel_block_) * length(b_.in_d) * length(b_.in_h);
  }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const std::int64_t phase_size = layout_.rows * layout_.pitch;
    const std::int64_t row_pitch = round_up(w_.out, 16);
    const Scratch scratch((phase_size + (dense_ ? 0 : channel_block_ * row_pitch)) * static_cast<std::int64_t>(sizeof(T)));
    T* phases = reinterpret_cast<T*>(scratch.data());
    T* rows = phases + phase_size;
    const std::int64_t blocks = ceil_div(length(b_.oc), channel_block_);
    for (std::int64_t unit = begin; unit < end; ++unit) {
      std::int64_t rest = unit;
      const std::int64_t ih = b_.in_h.begin + rest % length(b_.in_h);
      rest /= length(b_.in_h);
      const std::int64_t id = b_.in_d.begin + rest % length(b_.in_d);
      rest /= length(b_.in_d);
      const std::int64_t oc = b_.oc.begin + rest % blocks * channel_block_;
      const std::int64_t n = b_.n.begin + rest / blocks;
      const std::int64_t channels = smaller(channel_block_, b_.oc.end - oc);
      const T* image = y_ + n * p_.y.n + oc * p_.y.c;
      C* out = columns_ + (n - b_.n.begin) * b_.sample_stride + (oc - b_.oc.begin) * kernel_taps(p_) * b_.row_stride +
               ((id - b_.in_d.begin) * length(b_.in_h) + ih - b_.in_h.begin) * length(b_.in_w);
      for (std::int64_t tap = 0; tap < d_.kernel * h_.kernel; ++tap) {
        const std::int64_t od = output_of(d_, id, tap / h_.kernel), oh = output_of(h_, ih, tap % h_.kernel);
        C* tap_out = out + tap * w_.kernel * b_.row_stride;
        if (od < 0 || od >= d_.out || oh < 0 || oh >= h_.out) {
          clear(tap_out, channels);
          continue;
        }
        const T* row = image + od * p_.y.d + oh * p_.y.h;
        if (!dense_) gather_rows(row, p_.y.c, p_.y.w, channels, w_.out, rows, row_pitch);
        for (std::int64_t c = 0; c < channels; ++c) {
          fill_taps(dense_ ? row : rows + c * row_pitch, phases, tap_out + c * kernel_taps(p_) * b_.row_stride);
        }
      }
    }
  }

 private:
  void clear(C* out, std::int64_t channels) const {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t kw = 0; kw < w_.kernel; ++kw) {
        C* to = out + (c * kernel_taps(p_) + kw) * b_.row_stride;
        for (std::int64_t i = 0; i < length(b_.in_w); ++i) to[i] = C{};
      }
    }
  }

  // Splits a dense row of y into its phases.
  void split_row(const T* row, T* phases) const {
    if (layout_.all_phases) return split_phases(layout_, row, phases);
    for (std::int64_t g = 0; g < group_count_; ++g) {
      for (std::int64_t q = 0; q < layout_.count_q; ++q) {
        const std::int64_t o = (layout_.first_q + q) * layout_.stride + groups_[g].phase - layout_.pad;
        if (o >= 0 && o < w_.out) phases[g * layout_.pitch + q] = row[o];
      }
    }
  }

  // Writes the column rows of the taps kw for one dense row of y.
  void fill_taps(const T* row, T* phases, C* out) const {
    if (w_.stride > 1) split_row(row, phases);
    for (std::int64_t g = 0; g < group_count_; ++g) {
      const PhaseGroup& group = groups_[g];
      // The q of this phase that lie inside y.
      const std::int64_t q_begin = larger(ceil_div(w_.pad - group.phase, w_.stride), 0);
      const std::int64_t q_end = ceil_div(w_.out + w_.pad - group.phase, w_.stride);
      const T* source = w_.stride == 1 ? row : phases + (layout_.all_phases ? group.phase : g) * layout_.pitch;
      for (std::int64_t j = 0; j < group.count; ++j) {
        const std::int64_t shift = group.shift + j * group.in_step;
        C* UPFOLD_RESTRICT to = out + (group.first + j * group.tap_step) * b_.row_stride - b_.in_w.begin;
        const std::int64_t begin = smaller(larger(q_begin - shift, b_.in_w.begin), b_.in_w.end);
        const std::int64_t end = smaller(larger(q_end - shift, begin), b_.in_w.end);
        const T* UPFOLD_RESTRICT from = source + shift - layout_.first_q;
        for (std::int64_t i = b_.in_w.begin; i < begin; ++i) to[i] = C{};
        for (std::int64_t i = begin; i < end; ++i) convert(from[i], to[i]);
        for (std::int64_t i = end; i < b_.in_w.end; ++i) to[i] = C{};
      }
    }
  }

  const Problem& p_;
  const ColumnBlock& b_;
  const T* y_;
  C* columns_;
  const Axis d_, h_, w_;
  const Table<PhaseGroup> groups_;
  const std::int64_t group_count_;
  const RowLayout layout_;
  const bool dense_;
  const std::int64_t channel_block_;
};

template <typename T, typename C>
void run_col2im(const Problem& p, const ColumnBlock& block, const void* columns, const void* bias, void* y, int threads) {
  const ColumnsToImage<T, C> run(p, block, static_cast<const C*>(columns), static_cast<const T*>(bias), static_cast<T*>(y));
  parallel_for(run.units(), threads, run);
}

template <typename T, typename C>
void run_im2col(const Problem& p, const ColumnBlock& block, const void* y, void* columns, int threads) {
  const ImageToColumns<T, C> run(p, block, static_cast<const T*>(y), static_cast<C*>(columns));
  parallel_for(run.units(), threads, run);
}

}  // namespace

void col2im(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns, const void* bias, void* y,
            int threads) {
  with_element_type(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    if (column_dtype == p.dtype) return run_col2im<T, T>(p, block, columns, bias, y, threads);
    if constexpr (sizeof(T) == 2) run_col2im<T, float>(p, block, columns, bias, y, threads);
  });
}

void im2col(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y, void* columns, int threads) {
  with_element_type(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    if (column_dtype == p.dtype) return run_im2col<T, T>(p, block, y, columns, threads);
    if constexpr (sizeof(T) == 2) run_im2col<T, float>(p, block, y, columns, threads);
  });
}

}  // namespace upfold::cpu::UPFOLD_ISA
