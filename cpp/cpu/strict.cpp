#include "strict.h"

#include "activation.h"
#include "parallel.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

template <typename R>
UPFOLD_INLINE R times(R a, R b) {
  return a * b;
}
template <typename R>
UPFOLD_INLINE Complex<R> times(Complex<R> a, Complex<R> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

UPFOLD_INLINE double wide(float v) { return v; }
UPFOLD_INLINE double wide(double v) { return v; }
template <typename R>
UPFOLD_INLINE Complex<double> wide(Complex<R> v) {
  return {v.re, v.im};
}
UPFOLD_INLINE void unwide(double v, float& r) { r = static_cast<float>(v); }
UPFOLD_INLINE void unwide(double v, double& r) { r = v; }
template <typename R>
UPFOLD_INLINE void unwide(Complex<double> v, Complex<R>& r) {
  r = {static_cast<R>(v.re), static_cast<R>(v.im)};
}

// A running sum of blocks of kBlock products, the blocks in the operands' precision and their sum in double.
template <typename Sum>
class BlockedSum {
 public:
  void add(Sum product) {
    block_ = block_ + product;
    if (++count_ == kBlock) flush();
  }
  Sum result() {
    flush();
    Sum sum;
    unwide(total_, sum);
    return sum;
  }

 private:
  static constexpr int kBlock = 128;
  void flush() {
    total_ = total_ + wide(block_);
    block_ = Sum{};
    count_ = 0;
  }
  Sum block_{};
  decltype(wide(Sum{})) total_{};
  int count_ = 0;
};

template <typename T>
class Strict {
  using Sum = typename Number<T>::Sum;

 public:
  Strict(const Problem& p, const Operands& operands)
      : p_(p),
        x_(static_cast<T*>(operands.x)),
        w_(static_cast<T*>(operands.w)),
        bias_(static_cast<const T*>(operands.bias)),
        y_(static_cast<T*>(operands.y)),
        d_(axis_d(p)),
        h_(axis_h(p)),
        wide_(axis_w(p)) {}

  void conv_transpose_row(std::int64_t n, std::int64_t oc, std::int64_t od, std::int64_t oh) const {
    const Epilogue<Sum> epilogue{bias_ ? widen(bias_[oc]) : Sum{}, p_.activation, p_.activation_slope};
    T* out = y_ + n * p_.y.n + oc * p_.y.c + od * p_.y.d + oh * p_.y.h;
    for (std::int64_t ow = 0; ow < wide_.out; ++ow) {
      const Sum sum = conv_transpose_at(n, oc, od, oh, ow);
      finish_row(epilogue, &sum, 1, out + ow * p_.y.w);
    }
  }

  void conv_row(std::int64_t n, std::int64_t ic, std::int64_t id, std::int64_t ih) const {
    T* out = x_ + n * p_.x.n + ic * p_.x.c + id * p_.x.d + ih * p_.x.h;
    for (std::int64_t iw = 0; iw < wide_.in; ++iw) narrow(conv_at(n, ic, id, ih, iw), out[iw * p_.x.w]);
  }

 private:
  Sum conv_transpose_at(std::int64_t n, std::int64_t oc, std::int64_t od, std::int64_t oh, std::int64_t ow) const {
    const PhaseTaps td = phase_taps(d_, phase_of(d_, od)), th = phase_taps(h_, phase_of(h_, oh));
    const PhaseTaps tw = phase_taps(wide_, phase_of(wide_, ow));
    const std::int64_t per_group = in_channels_per_group(p_), group = oc / out_channels_per_group(p_);
    BlockedSum<Sum> sum;
    for (std::int64_t kd = td.first; kd < d_.kernel; kd += td.tap_step) {
      const std::int64_t id = input_of(d_, od, kd);
      if (id < 0 || id >= d_.in) continue;
      for (std::int64_t kh = th.first; kh < h_.kernel; kh += th.tap_step) {
        const std::int64_t ih = input_of(h_, oh, kh);
        if (ih < 0 || ih >= h_.in) continue;
        for (std::int64_t kw = tw.first; kw < wide_.kernel; kw += tw.tap_step) {
          const std::int64_t iw = input_of(wide_, ow, kw);
          if (iw < 0 || iw >= wide_.in) continue;
          const T* x = x_ + n * p_.x.n + group * per_group * p_.x.c + id * p_.x.d + ih * p_.x.h + iw * p_.x.w;
          const T* w = weight(group * per_group, oc, kd, kh, kw);
          for (std::int64_t c = 0; c < per_group; ++c) sum.add(times(widen(x[c * p_.x.c]), widen(w[c * p_.w.n])));
        }
      }
    }
    return sum.result();
  }

  Sum conv_at(std::int64_t n, std::int64_t ic, std::int64_t id, std::int64_t ih, std::int64_t iw) const {
    const std::int64_t per_group = out_channels_per_group(p_), group = ic / in_channels_per_group(p_);
    BlockedSum<Sum> sum;
    for (std::int64_t kd = 0; kd < d_.kernel; ++kd) {
      const std::int64_t od = output_of(d_, id, kd);
      if (od < 0 || od >= d_.out) continue;
      for (std::int64_t kh = 0; kh < h_.kernel; ++kh) {
        const std::int64_t oh = output_of(h_, ih, kh);
        if (oh < 0 || oh >= h_.out) continue;
        for (std::int64_t kw = 0; kw < wide_.kernel; ++kw) {
          const std::int64_t ow = output_of(wide_, iw, kw);
          if (ow < 0 || ow >= wide_.out) continue;
          const T* y = y_ + n * p_.y.n + group * per_group * p_.y.c + od * p_.y.d + oh * p_.y.h + ow * p_.y.w;
          const T* w = weight(ic, group * per_group, kd, kh, kw);
          for (std::int64_t c = 0; c < per_group; ++c) sum.add(times(widen(y[c * p_.y.c]), widen(w[c * p_.w.c])));
        }
      }
    }
    return sum.result();
  }

  // oc counts over all channels.
  const T* weight(std::int64_t ic, std::int64_t oc, std::int64_t kd, std::int64_t kh, std::int64_t kw) const {
    return w_ + ic * p_.w.n + oc % out_channels_per_group(p_) * p_.w.c + kd * p_.w.d + kh * p_.w.h + kw * p_.w.w;
  }

  const Problem& p_;
  T* x_;
  T* w_;
  const T* bias_;
  T* y_;
  const Axis d_, h_, wide_;
};

// Splits a unit into its row: calls f(n, c, d, h).
template <typename F>
void for_each_row(std::int64_t begin, std::int64_t end, std::int64_t channels, std::int64_t depth, std::int64_t height,
                  const F& f) {
  for (std::int64_t unit = begin; unit < end; ++unit) {
    f(unit / height / depth / channels, unit / height / depth % channels, unit / height % depth, unit % height);
  }
}

}  // namespace

template <typename T>
void strict_direct(const Problem& p, const Operands& operands, int threads) {
  const Strict<T> strict(p, operands);
  if (p.op == Operator::kConvTranspose) {
    parallel_for(p.batch * p.out_channels * p.out_d * p.out_h, threads, [&](std::int64_t begin, std::int64_t end) {
      for_each_row(begin, end, p.out_channels, p.out_d, p.out_h, [&](auto... index) { strict.conv_transpose_row(index...); });
    });
  } else {
    parallel_for(p.batch * p.in_channels * p.in_d * p.in_h, threads, [&](std::int64_t begin, std::int64_t end) {
      for_each_row(begin, end, p.in_channels, p.in_d, p.in_h, [&](auto... index) { strict.conv_row(index...); });
    });
  }
}

template void strict_direct<float>(const Problem&, const Operands&, int);
template void strict_direct<double>(const Problem&, const Operands&, int);
template void strict_direct<Half>(const Problem&, const Operands&, int);
template void strict_direct<BFloat16>(const Problem&, const Operands&, int);
template void strict_direct<Complex<float>>(const Problem&, const Operands&, int);
template void strict_direct<Complex<double>>(const Problem&, const Operands&, int);

}  // namespace upfold::cpu::UPFOLD_ISA
