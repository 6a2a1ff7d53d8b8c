#include "depthwise_pixels.h"

#include "activation.h"
#include "correlate_plan.h"
#include "parallel.h"
#include "wide.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// The taps of each result of one axis, and the pixels of the source that they read there; for conv, results are inputs.
class AxisTaps {
 public:
  AxisTaps(const Axis& a, bool is_conv)
      : begin_((is_conv ? a.in : a.out) + 1), taps_((is_conv ? a.in : a.out) * most(a, is_conv)) {
    std::int64_t count = 0;
    for (std::int64_t result = 0; result < (is_conv ? a.in : a.out); ++result) {
      begin_[result] = count;
      const PhaseTaps phase = is_conv ? PhaseTaps{0, a.kernel, 1, 0} : phase_taps(a, phase_of(a, result));
      for (std::int64_t j = 0; j < phase.count; ++j) {
        const std::int64_t k = phase.first + j * phase.tap_step;
        const std::int64_t pixel = is_conv ? output_of(a, result, k) : input_of(a, result, k);
        if (pixel >= 0 && pixel < (is_conv ? a.out : a.in)) taps_[count++] = {pixel, k};
      }
      begin_[result + 1] = count;
    }
  }

  struct Tap {
    std::int64_t pixel, tap;
  };
  struct List {
    const Tap* first;
    const Tap* last;
    const Tap* begin() const { return first; }
    const Tap* end() const { return last; }
  };
  List of(std::int64_t result) const { return {&taps_[0] + begin_[result], &taps_[0] + begin_[result + 1]}; }

  // The most taps of one result.
  static std::int64_t most(const Axis& a, bool is_conv) {
    std::int64_t count = is_conv ? a.kernel : 1;
    for (std::int64_t phase = 0; !is_conv && phase < a.stride; ++phase) count = larger(count, phase_taps(a, phase).count);
    return count;
  }

 private:
  const Table<std::int64_t> begin_;
  const Table<Tap> taps_;
};

// One product of a pixel: x[c] * weights[c].
template <typename T>
struct PixelTerm {
  const T* x;
  const typename Number<T>::Real* weights;
};

// out[c] = bias[c] + the products, in blocks of at most kBlockTerms.
template <typename T, int V, typename R = typename Number<T>::Real>
UPFOLD_INLINE void sum_channels(const PixelTerm<T>* terms, std::int64_t count, const R* bias, std::int64_t c, R* out) {
  Vector<R> total[V] = {};
  for (std::int64_t first = 0; first < count; first += kBlockTerms) {
    Vector<R> sum[V] = {};
    for (std::int64_t t = first; t < smaller(first + kBlockTerms, count); ++t) {
      for (int v = 0; v < V; ++v) {
        const std::int64_t at = c + v * kLanes<R>;
        sum[v] = multiply_add_lanes<R>(load_wide(terms[t].x + at), load(terms[t].weights + at), sum[v]);
      }
    }
    for (int v = 0; v < V; ++v) total[v] = total[v] + sum[v];
  }
  for (int v = 0; v < V; ++v) store(total[v] + load(bias + c + v * kLanes<R>), out + c + v * kLanes<R>);
}

template <typename T, typename R = typename Number<T>::Real>
static void sum_pixel(const PixelTerm<T>* terms, std::int64_t count, const R* bias, std::int64_t channels, R* out) {
  constexpr std::int64_t L = kLanes<R>;
  std::int64_t c = 0;
  for (; c + 4 * L <= channels; c += 4 * L) sum_channels<T, 4>(terms, count, bias, c, out);
  for (; c + L <= channels; c += L) sum_channels<T, 1>(terms, count, bias, c, out);
  // The last vector starts earlier and sums some channels again.
  if (c < channels) sum_channels<T, 1>(terms, count, bias, channels - L, out);
}

template <typename T>
class DepthwisePixels {
  using R = typename Number<T>::Real;

 public:
  DepthwisePixels(const Problem& p, const Operands& operands)
      : p_(p),
        is_conv_(p.op == Operator::kConv),
        in_(static_cast<const T*>(is_conv_ ? operands.y : operands.x)),
        w_(static_cast<const T*>(operands.w)),
        bias_(is_conv_ ? nullptr : static_cast<const T*>(operands.bias)),
        out_(static_cast<T*>(is_conv_ ? operands.x : operands.y)),
        weights_(static_cast<R*>(operands.workspace)),
        in_strides_(is_conv_ ? p.y : p.x),
        out_strides_(is_conv_ ? p.x : p.y),
        activation_(is_conv_ ? Activation::kNone : p.activation),
        columns_(is_conv_ ? p.in_w : p.out_w),
        taps_d_(axis_d(p), is_conv_),
        taps_h_(axis_h(p), is_conv_),
        taps_w_(axis_w(p), is_conv_) {}

  // The weight as [tap][channel].
  void pack() const {
    for (std::int64_t c = 0; c < p_.in_channels; ++c) {
      for (std::int64_t t = 0; t < kernel_taps(p_); ++t) {
        const std::int64_t kw = t % p_.kernel_w, kh = t / p_.kernel_w % p_.kernel_h, kd = t / p_.kernel_w / p_.kernel_h;
        weights_[t * p_.in_channels + c] = widen(w_[c * p_.w.n + kd * p_.w.d + kh * p_.w.h + kw * p_.w.w]);
      }
    }
  }

  std::int64_t rows() const { return p_.batch * (is_conv_ ? p_.in_d * p_.in_h : p_.out_d * p_.out_h); }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const std::int64_t channels = round_up(p_.in_channels * static_cast<std::int64_t>(sizeof(R)), 64);
    const Scratch scratch(2 * channels + most_terms(p_) * static_cast<std::int64_t>(sizeof(PixelTerm<T>)));
    const Buffers b{reinterpret_cast<R*>(scratch.data()), reinterpret_cast<R*>(scratch.data() + channels),
                    reinterpret_cast<PixelTerm<T>*>(scratch.data() + 2 * channels)};
    for (std::int64_t c = 0; c < p_.in_channels; ++c) b.bias[c] = bias_ ? widen(bias_[c]) : R(0);
    for (std::int64_t row = begin; row < end; ++row) write_row(row, b);
  }

 private:
  struct Buffers {
    R *bias, *sums;
    PixelTerm<T>* terms;
  };

  static std::int64_t most_terms(const Problem& p) {
    std::int64_t terms = 1;
    for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) terms *= AxisTaps::most(a, p.op == Operator::kConv);
    return terms;
  }

  void write_row(std::int64_t row, const Buffers& b) const {
    const std::int64_t depths = is_conv_ ? p_.in_d : p_.out_d, rows = is_conv_ ? p_.in_h : p_.out_h;
    const std::int64_t n = row / rows / depths, d = row / rows % depths, h = row % rows;
    const Epilogue<R> epilogue{R(0), activation_, p_.activation_slope};
    T* out = out_ + n * out_strides_.n + d * out_strides_.d + h * out_strides_.h;
    for (std::int64_t w = 0; w < columns_; ++w, out += out_strides_.w) {
      const std::int64_t count = list_terms({n, 0, d, h, w}, b.terms);
      if constexpr (std::is_same_v<T, R>) {
        if (activation_ == Activation::kNone) {
          sum_pixel(b.terms, count, b.bias, p_.in_channels, out);
          continue;
        }
      }
      sum_pixel(b.terms, count, b.bias, p_.in_channels, b.sums);
      finish_row(epilogue, b.sums, p_.in_channels, out);
    }
  }

  // The products of the result at `index`; returns how many.
  std::int64_t list_terms(const Strides& index, PixelTerm<T>* terms) const {
    std::int64_t count = 0;
    for (const auto& d : taps_d_.of(index.d)) {
      for (const auto& h : taps_h_.of(index.h)) {
        const T* in = in_ + index.n * in_strides_.n + d.pixel * in_strides_.d + h.pixel * in_strides_.h;
        const std::int64_t tap = (d.tap * p_.kernel_h + h.tap) * p_.kernel_w;
        for (const auto& w : taps_w_.of(index.w)) {
          terms[count++] = {in + w.pixel * in_strides_.w, weights_ + (tap + w.tap) * p_.in_channels};
        }
      }
    }
    return count;
  }

  const Problem& p_;
  const bool is_conv_;
  const T* in_;
  const T* w_;
  const T* bias_;
  T* out_;
  R* weights_;
  const Strides in_strides_, out_strides_;
  const Activation activation_;
  const std::int64_t columns_;
  const AxisTaps taps_d_, taps_h_, taps_w_;
};

}  // namespace

template <typename T>
bool is_depthwise_pixels(const Problem& p) {
  if (p.op == Operator::kConvTransposeWeight || p.in_channels != p.groups || p.out_channels != p.groups) return false;
  if (Number<T>::kParts != 1 || p.x.c != 1 || p.y.c != 1) return false;
  return p.in_channels >= kLanes<typename Number<T>::Real>;
}

template <typename T>
void depthwise_pixels_direct(const Problem& p, const Operands& operands, int threads) {
  if constexpr (Number<T>::kParts == 1) {
    const DepthwisePixels<T> depthwise(p, operands);
    depthwise.pack();
    parallel_for(depthwise.rows(), threads, depthwise);
  } else {
    static_cast<void>(p), static_cast<void>(operands), static_cast<void>(threads);
  }
}

#define UPFOLD_INSTANTIATE(T)                           \
  template bool is_depthwise_pixels<T>(const Problem&); \
  template void depthwise_pixels_direct<T>(const Problem&, const Operands&, int);
UPFOLD_INSTANTIATE(float)
UPFOLD_INSTANTIATE(double)
UPFOLD_INSTANTIATE(Half)
UPFOLD_INSTANTIATE(BFloat16)
UPFOLD_INSTANTIATE(Complex<float>)
UPFOLD_INSTANTIATE(Complex<double>)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cpu::UPFOLD_ISA
