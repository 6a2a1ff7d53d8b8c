// Packed planes: a window of a tensor, converted to float or double and laid out so that a tap is a constant offset.
//
//   planes[channel][plane][sample][row][position]
//
// A row holds the real pixels of the window and then zeros; the pixels left of a row are the zeros at the end of the row above
// it, and likewise above and below a sample, so one band of zeros serves both sides and a whole window is one flat row. A complex
// channel becomes two real ones, (re, im).
#pragma once

#include "rows.h"

namespace upfold::cpu::UPFOLD_ISA {

// One axis of a tensor read as phases: q and phase name position o = q * stride + phase - pad.
struct SourceAxis {
  std::int64_t size, stride, pad;
};

// The real q of one phase: those with 0 <= o < size.
UPFOLD_INLINE Range real_range(const SourceAxis& a, std::int64_t phase) {
  return {ceil_div(a.pad - phase, a.stride), ceil_div(a.size + a.pad - phase, a.stride)};
}

// A window [begin, end) of q, and the part of it that holds a real pixel of some phase.
struct Window {
  Range q, real;
  std::int64_t pitch;  // distance between rows of this axis's length, the shared zeros included
};

// `wanted` is the number of distinct outputs that will share the flat index along this axis.
UPFOLD_INLINE Window make_window(const SourceAxis& a, Range q, std::int64_t wanted) {
  // Phase 0 has the largest q of the first pixel, phase stride - 1 the smallest; likewise at the end.
  Window window{q, {real_range(a, a.stride - 1).begin, real_range(a, 0).end}, 0};
  window.real.begin = smaller(larger(window.real.begin, q.begin), q.end);
  window.real.end = larger(smaller(window.real.end, q.end), window.real.begin);
  const std::int64_t zeros = larger(window.real.begin - q.begin, q.end - window.real.end);
  window.pitch = larger(length(window.real) + zeros, wanted);
  return window;
}

struct PackLayout {
  Window h, w;
  std::int64_t samples, planes;
  std::int64_t sample_pitch, plane_pitch, channel_pitch;
  std::int64_t lead;  // zeros in front, for the pixels above and left of the first
};

// `slack` elements behind the last channel may be read by a vector; they hold zeros too.
UPFOLD_INLINE PackLayout make_pack_layout(const Window& h, const Window& w, std::int64_t samples, std::int64_t planes) {
  PackLayout layout{h, w, samples, planes, h.pitch * w.pitch, 0, 0, 0};
  layout.plane_pitch = samples * layout.sample_pitch;
  // An odd number of cache lines, so that the same pixel of many channels does not fall into one set of the cache.
  layout.channel_pitch = round_up(planes * layout.plane_pitch, 32) + 16;
  layout.lead = round_up((h.real.begin - h.q.begin) * w.pitch + w.real.begin - w.q.begin, 16);
  return layout;
}

UPFOLD_INLINE std::int64_t packed_size(const PackLayout& layout, std::int64_t channels, std::int64_t slack) {
  return layout.lead + channels * layout.channel_pitch + round_up(slack, 16);
}

template <typename T>
struct TensorView {
  const T* data;
  Strides strides;
};

template <typename R, typename T>
UPFOLD_INLINE void put(T value, R* to, std::int64_t) {
  *to = static_cast<R>(widen(value));
}
template <typename R>
UPFOLD_INLINE void put(Complex<R> value, R* to, std::int64_t part_pitch) {
  to[0] = value.re;
  to[part_pitch] = value.im;
}

// Copies `count` pixels, `step` elements apart, of `channels` channels; the denser axis is the inner one.
template <typename R, typename T>
static void pack_pixels(const T* UPFOLD_RESTRICT in, std::int64_t step, std::int64_t channel_stride, std::int64_t channels,
                        std::int64_t count, R* UPFOLD_RESTRICT out, std::int64_t pitch) {
  constexpr std::int64_t kParts = Number<T>::kParts;
  constexpr std::int64_t kBlock = 16;
  if (step == 1) {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t i = 0; i < count; ++i) put(in[c * channel_stride + i], out + c * kParts * pitch + i, pitch);
    }
  } else if (step == 2) {
    for (std::int64_t c = 0; c < channels; ++c) {
      for (std::int64_t i = 0; i < count; ++i) put(in[c * channel_stride + i * 2], out + c * kParts * pitch + i, pitch);
    }
  } else {
    // Blocks of pixels by blocks of channels: whichever axis is dense, its cache lines are used up while they are near.
    for (std::int64_t first = 0; first < count; first += kBlock) {
      const std::int64_t last = smaller(first + kBlock, count);
      for (std::int64_t c = 0; c < channels; ++c) {
        for (std::int64_t i = first; i < last; ++i) put(in[c * channel_stride + i * step], out + c * kParts * pitch + i, pitch);
      }
    }
  }
}

// Packs the tensors' channels into planes of phases. The planes of one depth are its row phases times its column phases, in the
// order of the groups given (a single group of phase 0 for a tensor that is not split).
template <typename T>
class Packer {
  using R = typename Number<T>::Real;
  static constexpr std::int64_t kParts = Number<T>::kParts;

 public:
  Packer(const TensorView<T>& tensor, const SourceAxis& h, const SourceAxis& w, const PhaseGroup* h_groups,
         std::int64_t h_group_count, const PhaseGroup* w_groups, std::int64_t w_group_count)
      : tensor_(tensor),
        h_(h),
        w_(w),
        h_groups_(h_groups),
        w_groups_(w_groups),
        h_group_count_(h_group_count),
        w_group_count_(w_group_count) {}

  std::int64_t planes_per_depth() const { return h_group_count_ * w_group_count_; }

  // Packs channels [channel, channel + channels) of samples n, n + 1, ... at the depths given into `out`, whose first element is
  // the first of the leading zeros.
  void pack(const PackLayout& layout, std::int64_t n, std::int64_t channel, std::int64_t channels, const std::int64_t* depths,
            std::int64_t depth_count, std::int64_t slack, R* out) const {
    fill_zero(out, layout.lead);
    R* planes = out + layout.lead;
    const std::int64_t used = layout.planes * layout.plane_pitch;
    for (std::int64_t c = 0; c < channels * kParts; ++c) {
      fill_zero(planes + c * layout.channel_pitch + used, layout.channel_pitch - used);
    }
    fill_zero(planes + channels * kParts * layout.channel_pitch, packed_size(layout, 0, slack) - layout.lead);
    for (std::int64_t d = 0; d < depth_count; ++d) {
      for (std::int64_t gh = 0; gh < h_group_count_; ++gh) {
        for (std::int64_t gw = 0; gw < w_group_count_; ++gw) {
          const std::int64_t plane = (d * h_group_count_ + gh) * w_group_count_ + gw;
          for (std::int64_t sample = 0; sample < layout.samples; ++sample) {
            const T* in =
                tensor_.data + (n + sample) * tensor_.strides.n + channel * tensor_.strides.c + depths[d] * tensor_.strides.d;
            pack_plane(layout, in, channels, h_groups_[gh].phase, w_groups_[gw].phase,
                       planes + plane * layout.plane_pitch + sample * layout.sample_pitch);
          }
        }
      }
    }
  }

 private:
  static void fill_zero(R* out, std::int64_t count) {
    if (count > 0) std::memset(out, 0, static_cast<std::size_t>(count) * sizeof(R));
  }

  static void fill_zero(const PackLayout& layout, std::int64_t channels, std::int64_t count, R* out) {
    for (std::int64_t c = 0; count > 0 && c < channels * kParts; ++c) fill_zero(out + c * layout.channel_pitch, count);
  }

  void pack_plane(const PackLayout& layout, const T* in, std::int64_t channels, std::int64_t h_phase, std::int64_t w_phase,
                  R* out) const {
    const Range real_h = real_range(h_, h_phase), real_w = real_range(w_, w_phase);
    // Positions of the row where the pixels of this phase lie.
    const std::int64_t first = smaller(larger(real_w.begin - layout.w.real.begin, 0), layout.w.pitch);
    const std::int64_t last = larger(smaller(real_w.end, layout.w.real.end) - layout.w.real.begin, first);
    const std::int64_t ow = (layout.w.real.begin + first) * w_.stride + w_phase - w_.pad;
    for (std::int64_t row = 0; row < layout.h.pitch; ++row, out += layout.w.pitch) {
      const std::int64_t q = layout.h.real.begin + row;
      if (q < real_h.begin || q >= real_h.end || q >= layout.h.real.end) {
        fill_zero(layout, channels, layout.w.pitch, out);
        continue;
      }
      const std::int64_t oh = q * h_.stride + h_phase - h_.pad;
      fill_zero(layout, channels, first, out);
      if (last > first) {
        pack_pixels(in + oh * tensor_.strides.h + ow * tensor_.strides.w, w_.stride * tensor_.strides.w, tensor_.strides.c,
                    channels, last - first, out + first, layout.channel_pitch);
      }
      fill_zero(layout, channels, layout.w.pitch - last, out + last);
    }
  }

  const TensorView<T> tensor_;
  const SourceAxis h_, w_;
  const PhaseGroup* h_groups_;
  const PhaseGroup* w_groups_;
  const std::int64_t h_group_count_, w_group_count_;
};

}  // namespace upfold::cpu::UPFOLD_ISA
