// Blocks of float transposed in registers on their way between channel-major and pixel-major layouts.
#pragma once

#include "wide.h"
#include "zip.h"

namespace upfold::cpu::UPFOLD_ISA {

// Channels taken together on the way in: a vector then holds kLanes / kTransposed pixels.
constexpr int kTransposed = kLanes<float> < 8 ? kLanes<float> : 8;

template <typename T>
UPFOLD_INLINE void pixels_from_channels_block(const T* in, std::int64_t channel_stride, float* out, std::int64_t pitch) {
  constexpr int L = kLanes<float>, S = kTransposed;
  Vector<float> v[S];
  for (int c = 0; c < S; ++c) v[c] = load_wide(in + c * channel_stride);
  interleave_vectors<float, S>(v);
  for (int i = 0; i < S; ++i) {
    float lane[L];
    store(v[i], lane);
    for (int j = 0; j < L / S; ++j) std::memcpy(out + (i * (L / S) + j) * pitch, lane + j * S, S * sizeof(float));
  }
}

// out[i * pitch + c] = in[c * channel_stride + i] for i < count and c < channels.
template <typename T>
static void pixels_from_channels(const T* in, std::int64_t channel_stride, std::int64_t channels, std::int64_t count, float* out,
                                 std::int64_t pitch) {
  constexpr std::int64_t L = kLanes<float>, S = kTransposed;
  // A last block that would reach past the end starts earlier and writes some values again.
  const std::int64_t blocked = channels >= S && count >= L ? channels : 0;
  for (std::int64_t c = 0; c < blocked; c += S) {
    const std::int64_t first = c + S <= channels ? c : channels - S;
    for (std::int64_t i = 0; i < count; i += L) {
      const std::int64_t pixel = i + L <= count ? i : count - L;
      pixels_from_channels_block(in + first * channel_stride + pixel, channel_stride, out + pixel * pitch + first, pitch);
    }
  }
  for (std::int64_t c = blocked; c < channels; ++c) {
    for (std::int64_t i = 0; i < count; ++i) out[i * pitch + c] = widen(in[c * channel_stride + i]);
  }
}

// out[c * channel_stride + i] = in[i * pitch + c] for i < S and c < channels, which are at least a vector.
template <int S>
static void channels_from_few(const float* in, std::int64_t pitch, std::int64_t channels, float* UPFOLD_RESTRICT out,
                              std::int64_t channel_stride) {
  constexpr std::int64_t L = kLanes<float>;
  for (std::int64_t c = 0; c < channels; c += L) {
    const std::int64_t first = c + L <= channels ? c : channels - L;
    Vector<float> v[S];
    for (int i = 0; i < S; ++i) v[i] = load(in + i * pitch + first);
    interleave_vectors<float, S>(v);
    float lane[S * L];
    for (int i = 0; i < S; ++i) store(v[i], lane + i * L);
    for (std::int64_t k = 0; k < L; ++k) std::memcpy(out + (first + k) * channel_stride, lane + k * S, S * sizeof(float));
  }
}

// out[c * channel_stride + i] = in[i * pitch + c] for i < count and c < channels.
static void channels_from_pixels(const float* in, std::int64_t pitch, std::int64_t channels, std::int64_t count,
                                 float* UPFOLD_RESTRICT out, std::int64_t channel_stride) {
  constexpr std::int64_t L = kLanes<float>;
  if (channels >= L && count < L) {
    std::int64_t i = 0;
    for (; i + 4 <= count; i += 4) channels_from_few<4>(in + i * pitch, pitch, channels, out + i, channel_stride);
    for (; i + 2 <= count; i += 2) channels_from_few<2>(in + i * pitch, pitch, channels, out + i, channel_stride);
    for (; i < count; ++i) channels_from_few<1>(in + i * pitch, pitch, channels, out + i, channel_stride);
    return;
  }
  const std::int64_t blocked = channels >= L && count >= L ? channels : 0;
  for (std::int64_t c = 0; c < blocked; c += L) {
    const std::int64_t first = c + L <= channels ? c : channels - L;
    for (std::int64_t i = 0; i < count; i += L) {
      const std::int64_t pixel = i + L <= count ? i : count - L;
      Vector<float> v[L];
      for (int j = 0; j < L; ++j) v[j] = load(in + (pixel + j) * pitch + first);
      interleave_vectors<float, L>(v);
      for (int j = 0; j < L; ++j) store(v[j], out + (first + j) * channel_stride + pixel);
    }
  }
  for (std::int64_t c = blocked; c < channels; ++c) {
    for (std::int64_t i = 0; i < count; ++i) out[c * channel_stride + i] = in[i * pitch + c];
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
