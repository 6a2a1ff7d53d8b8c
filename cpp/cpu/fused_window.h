// A task's part of the source, packed as x[depth][sample][row][column][channel] in float32.
#pragma once

#include "fused_plan.h"
#include "transpose.h"

namespace upfold::cpu::UPFOLD_ISA {

// Rows and columns of the source, those in the padding included, and the distances in floats between neighbours.
struct FusedWindow {
  Range h, w;
  std::int64_t pixel, row, sample, depth;
};

UPFOLD_INLINE FusedWindow fused_window(const FusedPlan& plan, Range qh, Range qw, std::int64_t samples) {
  FusedWindow window{plan.h.window(qh), plan.w.window(qw), plan.channels.pixel_pitch(), 0, 0, 0};
  if (plan.tap_by_tap) window = {plan.h.within_source(window.h), plan.w.within_source(window.w), window.pixel, 0, 0, 0};
  window.row = larger(length(window.w), 0) * window.pixel;
  window.sample = larger(length(window.h), 0) * window.row;
  window.depth = samples * window.sample;
  return window;
}

template <typename T>
static void pack_columns(const T* in, const Strides& strides, std::int64_t channels, std::int64_t count, float* out,
                         std::int64_t pitch) {
  if (strides.c == 1) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t c = 0; c < channels; ++c) out[i * pitch + c] = widen(in[i * strides.w + c]);
    }
  } else if (strides.w == 1) {
    pixels_from_channels(in, strides.c, channels, count, out, pitch);
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t c = 0; c < channels; ++c) out[i * pitch + c] = widen(in[i * strides.w + c * strides.c]);
    }
  }
}

// Packs one sample's plane, which `in` starts at; what lies in the padding is set to 0.
template <typename T>
static void pack_plane(const FusedPlan& plan, const FusedWindow& window, const T* in, const Strides& strides, float* out) {
  const auto clear = [](float* from, std::int64_t count) {
    if (count > 0) std::memset(from, 0, static_cast<std::size_t>(count) * sizeof(float));
  };
  const Range real_h = plan.h.within_source(window.h), real_w = plan.w.within_source(window.w);
  const std::int64_t left = smaller(larger(real_w.begin - window.w.begin, 0), length(window.w));
  const std::int64_t count = larger(length(real_w), 0), right = length(window.w) - left - count;
  for (std::int64_t row = window.h.begin; row < window.h.end; ++row) {
    float* to = out + (row - window.h.begin) * window.row;
    const bool is_real = row >= real_h.begin && row < real_h.end && count > 0;
    clear(to, is_real ? left * window.pixel : window.row);
    if (is_real) clear(to + (left + count) * window.pixel, right * window.pixel);
  }
  if (count == 0) return;
  // A few channels at a time: their rows follow each other in memory. The last ones overlap those before.
  const std::int64_t channels = plan.channels.in, step = strides.c == 1 ? channels : smaller(kTransposed, channels);
  for (std::int64_t c = 0; c < channels; c += step) {
    const std::int64_t first = smaller(c, channels - step);
    for (std::int64_t row = real_h.begin; row < real_h.end; ++row) {
      pack_columns(in + row * strides.h + real_w.begin * strides.w + first * strides.c, strides, step, count,
                   out + (row - window.h.begin) * window.row + left * window.pixel + first, window.pixel);
    }
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
