// Weights packed for the register tiles: weights[group][block of output channels][tap][input channel][output channel of the
// block].
#pragma once

#include "api.h"
#include "parallel.h"
#include "tile.h"

namespace upfold::cpu::UPFOLD_ISA {

// Channels of one group in the sense of the operator that runs: `in` is summed over. A complex channel is two real ones.
struct GroupChannels {
  std::int64_t in, out;
  std::int64_t parts;

  std::int64_t real_in() const { return in * parts; }
  std::int64_t real_out() const { return out * parts; }
  std::int64_t blocks() const { return ceil_div(real_out(), kTileChannels); }
};

template <typename T>
UPFOLD_INLINE GroupChannels group_channels(const Problem& p) {
  const bool is_conv = p.op == Operator::kConv;
  const std::int64_t in = in_channels_per_group(p), out = out_channels_per_group(p);
  return {is_conv ? out : in, is_conv ? in : out, Number<T>::kParts};
}

template <typename R>
UPFOLD_INLINE R real_weight(R w, std::int64_t, std::int64_t) {
  return w;
}
// (re + i im) as the 2 x 2 matrix that takes (re, im) of a pixel to (re, im) of the product.
template <typename R>
UPFOLD_INLINE R real_weight(Complex<R> w, std::int64_t in_part, std::int64_t out_part) {
  return in_part == out_part ? w.re : in_part == 0 ? w.im : -w.im;
}

template <typename T>
class WeightPacker {
  using R = typename Number<T>::Real;

 public:
  WeightPacker(const Problem& p, const T* w) : p_(p), w_(w), channels_(group_channels<T>(p)) {}

  std::int64_t tasks() const { return p_.groups * channels_.blocks(); }
  std::int64_t weight_bytes() const {
    return round_up(
        p_.groups * channels_.real_out() * channels_.real_in() * kernel_taps(p_) * static_cast<std::int64_t>(sizeof(R)), 64);
  }
  std::int64_t bytes() const { return weight_bytes() + round_up(tasks(), 64); }

  // Returns whether all weights are finite.
  bool pack(void* workspace, int threads) const {
    R* packed = static_cast<R*>(workspace);
    unsigned char* finite = static_cast<unsigned char*>(workspace) + weight_bytes();
    parallel_for(tasks(), threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t group = task / channels_.blocks(), block = task % channels_.blocks() * kTileChannels;
        finite[task] = pack_block(group, block, packed + offset(group, block)) ? 1 : 0;
      }
    });
    for (std::int64_t task = 0; task < tasks(); ++task) {
      if (finite[task] == 0) return false;
    }
    return true;
  }

  // Where the block that begins with real output channel `m` of a group lies.
  std::int64_t offset(std::int64_t group, std::int64_t m) const {
    return (group * channels_.real_out() + m) * kernel_taps(p_) * channels_.real_in();
  }

 private:
  // Packs up to kTileChannels output channels, split as the tiles split them.
  bool pack_block(std::int64_t group, std::int64_t m, R* out) const {
    R defect = 0;  // stays 0 unless a weight is Inf or NaN
    const std::int64_t end = smaller(m + kTileChannels, channels_.real_out());
    while (m < end) {
      const std::int64_t width = tile_channels(end - m);
      for (std::int64_t kd = 0; kd < p_.kernel_d; ++kd) {
        for (std::int64_t kh = 0; kh < p_.kernel_h; ++kh) {
          for (std::int64_t kw = 0; kw < p_.kernel_w; ++kw) {
            const T* tap = w_ + kd * p_.w.d + kh * p_.w.h + kw * p_.w.w;
            for (std::int64_t c = 0; c < channels_.real_in(); ++c) {
              for (std::int64_t i = 0; i < width; ++i) {
                const R w = weight(tap, group, c, m + i);
                defect += (w - w);
                *out++ = w;
              }
            }
          }
        }
      }
      m += width;
    }
    return defect == 0;
  }

  R weight(const T* tap, std::int64_t group, std::int64_t c, std::int64_t m) const {
    const std::int64_t in = c / channels_.parts, out = m / channels_.parts;
    const bool is_conv = p_.op == Operator::kConv;
    const std::int64_t ic = is_conv ? group * channels_.out + out : group * channels_.in + in;
    return real_weight(widen(tap[ic * p_.w.n + (is_conv ? in : out) * p_.w.c]), c % channels_.parts, m % channels_.parts);
  }

  const Problem& p_;
  const T* w_;
  const GroupChannels channels_;
};

}  // namespace upfold::cpu::UPFOLD_ISA
