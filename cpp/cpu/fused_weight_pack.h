// Channels of pixels laid out in panels, panel[pixel][channel of the panel], in float32.
#pragma once

#include "transpose.h"

namespace upfold::cpu::UPFOLD_ISA {

// A panel holds `width` channels of each pixel; the next ones start `pitch` floats later. Behind the last channel lies whatever
// fills a vector.
struct Panels {
  float* data;
  std::int64_t width, pitch;
};

// Pixels of a row or a plane of a tensor: pixel i of channel c is in[c * channel + i * pixel].
template <typename T>
struct PixelRow {
  const T* in;
  std::int64_t channel, pixel;
  std::int64_t channels, count;
};

// The first `count` of a vector; the other lanes are 0.
template <typename T>
UPFOLD_INLINE Vector<float> load_first(const T* from, std::int64_t count) {
  T lanes[kLanes<float>] = {};
  std::memcpy(lanes, from, static_cast<std::size_t>(count) * sizeof(T));
  return load_wide(lanes);
}

// S channels, in rows that `from` names, of up to a vector of pixels: S floats at the position of each.
template <int S, typename T>
UPFOLD_INLINE void pack_block(const T* const* from, std::int64_t first, std::int64_t count, const std::int64_t* positions,
                              float* out, std::int64_t width) {
  constexpr int L = kLanes<float>;
  Vector<float> v[S];
  for (int c = 0; c < S; ++c) v[c] = count >= L ? load_wide(from[c] + first) : load_first(from[c] + first, count);
  interleave_vectors<float, S>(v);
  if (S == L && count >= L) {
    for (int i = 0; i < L; ++i) store(v[i], out + positions[first + i] * width);
    return;
  }
  float lane[S * L];
  for (int i = 0; i < S; ++i) store(v[i], lane + i * L);
  for (std::int64_t i = 0; i < smaller(count, L); ++i) {
    std::memcpy(out + positions[first + i] * width, lane + i * S, S * sizeof(float));
  }
}

// S channels of all pixels. What is written past a panel's width is overwritten by the next pixel, so pixels come in ascending
// positions, and the last channels of a panel first.
template <int S, typename T>
static void pack_rows(const PixelRow<T>& row, std::int64_t first_channel, const std::int64_t* positions, float* out,
                      std::int64_t width) {
  constexpr std::int64_t L = kLanes<float>;
  const T* from[S];
  for (int c = 0; c < S; ++c) from[c] = row.in + smaller(first_channel + c, row.channels - 1) * row.channel;
  for (std::int64_t i = 0; i < row.count; i += L) {
    // A last vector that would reach past the end starts earlier and writes some pixels again.
    const std::int64_t first = i + L <= row.count || row.count < L ? i : row.count - L;
    pack_block<S>(from, first, row.count - first, positions, out, width);
  }
}

// The panel of pixel i is at panels.data + positions[i] * panels.width.
template <typename T>
static void pack_panels(const PixelRow<T>& row, const std::int64_t* positions, const Panels& panels) {
  for (std::int64_t c = 0; c < row.channels; c += panels.width) {
    float* const out = panels.data + c / panels.width * panels.pitch;
    const std::int64_t channels = smaller(row.channels - c, panels.width);
    if (row.pixel == 1 && panels.width <= 4) {
      pack_rows<4>(row, c, positions, out, panels.width);
    } else if (row.pixel == 1) {
      for (std::int64_t i = (channels - 1) / kTransposed * kTransposed; i >= 0; i -= kTransposed) {
        pack_rows<kTransposed>(row, c + i, positions, out + i, panels.width);
      }
    } else {
      const std::int64_t filled = smaller(round_up(channels, kLanes<float>), panels.width);
      for (std::int64_t i = 0; i < row.count; ++i) {
        const T* from = row.in + c * row.channel + i * row.pixel;
        float* to = out + positions[i] * panels.width;
        if (row.channel == 1) {
          for (std::int64_t k = 0; k < channels; ++k) to[k] = widen(from[k]);
        } else {
          for (std::int64_t k = 0; k < channels; ++k) to[k] = widen(from[k * row.channel]);
        }
        for (std::int64_t k = channels; k < filled; ++k) to[k] = 0.0f;
      }
    }
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
