#include "depthwise_pixels.h"

#include "activation.h"
#include "correlate_plan.h"
#include "parallel.h"
#include "wide.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// The taps that reach each output of one axis, and the inputs that they read there.
class AxisTaps {
 public:
  explicit AxisTaps(const Axis& a) : begin_(a.out + 1), taps_(a.out * most_taps(a)) {
    std::int64_t count = 0;
    for (std::int64_t o = 0; o < a.out; ++o) {
      begin_[o] = count;
      const PhaseTaps phase = phase_taps(a, phase_of(a, o));
      for (std::int64_t j = 0; j < phase.count; ++j) {
        const std::int64_t k = phase.first + j * phase.tap_step, i = input_of(a, o, k);
        if (i >= 0 && i < a.in) taps_[count++] = {i, k};
      }
    }
    begin_[a.out] = count;
  }

  struct Tap {
    std::int64_t input, tap;
  };
  struct List {
    const Tap* first;
    const Tap* last;
    const Tap* begin() const { return first; }
    const Tap* end() const { return last; }
  };
  List of(std::int64_t o) const { return {&taps_[0] + begin_[o], &taps_[0] + begin_[o + 1]}; }

  static std::int64_t most_taps(const Axis& a) {
    std::int64_t most = 1;
    for (std::int64_t phase = 0; phase < a.stride; ++phase) most = larger(most, phase_taps(a, phase).count);
    return most;
  }

 private:
  const Table<std::int64_t> begin_;
  const Table<Tap> taps_;
};

// The products of one output pixel: x[t][c] * weights[t][c].
template <typename T>
struct PixelTerms {
  using R = typename Number<T>::Real;
  const T* x[kBlockTerms];
  const R* weights[kBlockTerms];
  std::int64_t count = 0;
};

template <typename T, int V, typename R = typename Number<T>::Real>
UPFOLD_INLINE void sum_channels(const PixelTerms<T>& terms, const R* bias, std::int64_t c, R* out) {
  Vector<R> sum[V] = {};
  for (std::int64_t t = 0; t < terms.count; ++t) {
    for (int v = 0; v < V; ++v) {
      const std::int64_t at = c + v * kLanes<R>;
      sum[v] = multiply_add_lanes<R>(load_wide(terms.x[t] + at), load(terms.weights[t] + at), sum[v]);
    }
  }
  for (int v = 0; v < V; ++v) store(sum[v] + load(bias + c + v * kLanes<R>), out + c + v * kLanes<R>);
}

template <typename T, typename R = typename Number<T>::Real>
static void sum_pixel(const PixelTerms<T>& terms, const R* bias, std::int64_t channels, R* out) {
  constexpr std::int64_t L = kLanes<R>;
  std::int64_t c = 0;
  for (; c + 4 * L <= channels; c += 4 * L) sum_channels<T, 4>(terms, bias, c, out);
  for (; c + L <= channels; c += L) sum_channels<T, 1>(terms, bias, c, out);
  // The last vector starts earlier and sums some channels again.
  if (c < channels) sum_channels<T, 1>(terms, bias, channels - L, out);
}

template <typename T>
class DepthwisePixels {
  using R = typename Number<T>::Real;

 public:
  DepthwisePixels(const Problem& p, const Operands& operands)
      : p_(p),
        x_(static_cast<const T*>(operands.x)),
        w_(static_cast<const T*>(operands.w)),
        bias_(static_cast<const T*>(operands.bias)),
        y_(static_cast<T*>(operands.y)),
        weights_(static_cast<R*>(operands.workspace)),
        taps_d_(axis_d(p)),
        taps_h_(axis_h(p)),
        taps_w_(axis_w(p)) {}

  // The weight as [tap][channel].
  void pack() const {
    for (std::int64_t c = 0; c < p_.in_channels; ++c) {
      for (std::int64_t t = 0; t < kernel_taps(p_); ++t) {
        const std::int64_t kw = t % p_.kernel_w, kh = t / p_.kernel_w % p_.kernel_h, kd = t / p_.kernel_w / p_.kernel_h;
        weights_[t * p_.in_channels + c] = widen(w_[c * p_.w.n + kd * p_.w.d + kh * p_.w.h + kw * p_.w.w]);
      }
    }
  }

  std::int64_t rows() const { return p_.batch * p_.out_d * p_.out_h; }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const Scratch scratch(2 * p_.in_channels * static_cast<std::int64_t>(sizeof(R)));
    R* const bias = reinterpret_cast<R*>(scratch.data());
    for (std::int64_t c = 0; c < p_.in_channels; ++c) bias[c] = bias_ ? widen(bias_[c]) : R(0);
    for (std::int64_t row = begin; row < end; ++row) write_row(row, bias, bias + p_.in_channels);
  }

 private:
  void write_row(std::int64_t row, const R* bias, R* sums) const {
    const std::int64_t n = row / p_.out_h / p_.out_d, od = row / p_.out_h % p_.out_d, oh = row % p_.out_h;
    const Epilogue<R> epilogue{R(0), p_.activation, p_.activation_slope};
    T* out = y_ + n * p_.y.n + od * p_.y.d + oh * p_.y.h;
    for (std::int64_t ow = 0; ow < p_.out_w; ++ow, out += p_.y.w) {
      PixelTerms<T> terms;
      list_terms(n, od, oh, ow, terms);
      if constexpr (std::is_same_v<T, R>) {
        if (p_.activation == Activation::kNone) {
          sum_pixel(terms, bias, p_.in_channels, out);
          continue;
        }
      }
      sum_pixel(terms, bias, p_.in_channels, sums);
      finish_row(epilogue, sums, p_.in_channels, out);
    }
  }

  void list_terms(std::int64_t n, std::int64_t od, std::int64_t oh, std::int64_t ow, PixelTerms<T>& terms) const {
    for (const auto& d : taps_d_.of(od)) {
      for (const auto& h : taps_h_.of(oh)) {
        const T* x = x_ + n * p_.x.n + d.input * p_.x.d + h.input * p_.x.h;
        const std::int64_t tap = (d.tap * p_.kernel_h + h.tap) * p_.kernel_w;
        for (const auto& w : taps_w_.of(ow)) {
          terms.x[terms.count] = x + w.input * p_.x.w;
          terms.weights[terms.count++] = weights_ + (tap + w.tap) * p_.in_channels;
        }
      }
    }
  }

  const Problem& p_;
  const T* x_;
  const T* w_;
  const T* bias_;
  T* y_;
  R* weights_;
  const AxisTaps taps_d_, taps_h_, taps_w_;
};

}  // namespace

template <typename T>
bool is_depthwise_pixels(const Problem& p) {
  if (p.op != Operator::kConvTranspose || p.in_channels != p.groups || p.out_channels != p.groups) return false;
  if (Number<T>::kParts != 1 || p.x.c != 1 || p.y.c != 1) return false;
  std::int64_t terms = 1;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) terms *= AxisTaps::most_taps(a);
  return p.in_channels >= kLanes<typename Number<T>::Real> && terms <= kBlockTerms;
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
