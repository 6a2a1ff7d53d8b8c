// The sums of a task, [output][channel of the block], on their way into the result.
#pragma once

#include "activation.h"
#include "fused_plan.h"
#include "transpose.h"

namespace upfold::cpu::UPFOLD_ISA {

// Sums of `samples` times `rows` times `columns` outputs, `width` floats apart, of which `channels` belong to the result.
struct FusedSums {
  float* sums;
  std::int64_t samples, rows, columns;
  std::int64_t width, channels;
  const float* bias;  // of the channels
  const FusedAxis& h;
  std::int64_t first_row;

  // A row that no tap reaches holds the bias alone.
  bool is_empty(std::int64_t row) const { return h.phase_count < h.base.out.stride && !h.has_taps(first_row + row); }
};

template <typename T>
static void write_empty_row(const FusedSums& s, const Epilogue<float>& epilogue, T* out, std::int64_t channel_stride) {
  for (std::int64_t c = 0; c < s.channels; ++c) {
    T value{};
    finish_row(epilogue, s.bias + c, 1, &value);
    for (std::int64_t w = 0; w < s.columns; ++w) out[c * channel_stride + w] = value;
  }
}

// Rows that follow each other without a gap are written as one.
template <typename T>
static void write_rows(FusedSums s, const Epilogue<float>& epilogue, T* out, const Strides& strides, float* staged) {
  if (s.h.phase_count == s.h.base.out.stride && s.rows > 1 && strides.h == s.columns) {
    s.columns *= s.rows;
    s.rows = 1;
  }
  for (std::int64_t n = 0; n < s.samples; ++n) {
    for (std::int64_t h = 0; h < s.rows; ++h) {
      const float* sums = s.sums + (n * s.rows + h) * s.columns * s.width;
      T* to = out + n * strides.n + h * strides.h;
      if (s.is_empty(h)) {
        write_empty_row(s, epilogue, to, strides.c);
        continue;
      }
      if constexpr (std::is_same_v<T, float>) {
        channels_from_pixels(sums, s.width, s.channels, s.columns, to, strides.c);
      } else {
        for (std::int64_t c = 0; c < s.channels; c += kLanes<float>) {
          const std::int64_t count = smaller(kLanes<float>, s.channels - c);
          channels_from_pixels(sums + c, s.width, count, s.columns, staged, s.columns);
          for (std::int64_t i = 0; i < count; ++i) {
            for (std::int64_t w = 0; w < s.columns; ++w) narrow(staged[i * s.columns + w], to[(c + i) * strides.c + w]);
          }
        }
      }
    }
  }
}

template <typename T>
static void write_pixels(const FusedSums& s, T* out, const Strides& strides) {
  const float* sums = s.sums;
  for (std::int64_t n = 0; n < s.samples; ++n) {
    for (std::int64_t h = 0; h < s.rows; ++h) {
      for (std::int64_t w = 0; w < s.columns; ++w, sums += s.width) {
        T* to = out + n * strides.n + h * strides.h + w * strides.w;
        if (strides.c == 1) {
          for (std::int64_t c = 0; c < s.channels; ++c) narrow(sums[c], to[c]);
        } else {
          for (std::int64_t c = 0; c < s.channels; ++c) narrow(sums[c], to[c * strides.c]);
        }
      }
    }
  }
}

// Whether the sums are written row by row, with no need of those of empty rows.
UPFOLD_INLINE bool writes_rows(const Strides& strides) { return strides.w == 1 && strides.c != 1; }

// `staged` holds kLanes rows of all outputs of a sample; it is unused for float. The bias is in the sums already.
template <typename T>
static void write_sums(const FusedSums& s, const Epilogue<float>& epilogue, T* out, const Strides& strides, float* staged) {
  if (epilogue.kind != Activation::kNone) {
    finish_row(epilogue, s.sums, s.samples * s.rows * s.columns * s.width, s.sums);
  }
  if (writes_rows(strides)) {
    write_rows(s, epilogue, out, strides, staged);
  } else {
    write_pixels(s, out, strides);
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
