// The register tile of the fused gradient of the weight: a few channels of one side times a few vectors of channels of the other,
// summed over pixels. Both sides are packed in panels, [pixel][channel of the panel], so that a tap is nothing but an offset.
#pragma once

#include "fused_tile.h"

namespace upfold::cpu::UPFOLD_ISA {

// Pixels at equal distances, in floats from the start of a panel of either side.
struct PixelRun {
  std::int64_t narrow, wide;
  std::int64_t narrow_step, wide_step;
  std::int64_t count;
};

// sums[a * pitch + m] (+)= the sum over the pixels of the runs of narrow[a] * wide[m].
struct OuterArgs {
  const PixelRun* runs;
  std::int64_t run_count;
  const float* narrow;
  const float* wide;
  float* sums;
  std::int64_t pitch;
  bool accumulate;  // otherwise the sums are set
};

// Pixels that are added up one after the other: the sums of so many are then added to each other, so that their roundings grow
// with the square root of this and of the pixels, not with the pixels.
constexpr std::int64_t kChainedPixels = 64;

template <int P, int V>
static void outer_tile(const OuterArgs& a) {
  constexpr int L = kLanes<float>;
  Vector<float> sum[P][V], held[P][V];
  for (int p = 0; p < P; ++p) {
    for (int v = 0; v < V; ++v) sum[p][v] = held[p][v] = Vector<float>{};
  }
  const auto hold = [&] {
    for (int p = 0; p < P; ++p) {
      for (int v = 0; v < V; ++v) held[p][v] = held[p][v] + sum[p][v], sum[p][v] = Vector<float>{};
    }
  };
  std::int64_t left = kChainedPixels;
  for (std::int64_t r = 0; r < a.run_count; ++r) {
    const PixelRun& run = a.runs[r];
    const float* narrow = a.narrow + run.narrow;
    const float* wide = a.wide + run.wide;
    for (std::int64_t rest = run.count; rest > 0;) {
      const std::int64_t count = smaller(rest, left);
      for (std::int64_t i = 0; i < count; ++i, narrow += run.narrow_step, wide += run.wide_step) {
        Vector<float> channels[V];
        for (int v = 0; v < V; ++v) channels[v] = load(wide + v * L);
        for (int p = 0; p < P; ++p) {
          for (int v = 0; v < V; ++v) sum[p][v] = multiply_add(channels[v], narrow[p], sum[p][v]);
        }
      }
      rest -= count, left -= count;
      if (left > 0) continue;
      hold();
      left = kChainedPixels;
    }
  }
  hold();
  for (int p = 0; p < P; ++p) {
    float* to = a.sums + p * a.pitch;
    for (int v = 0; v < V; ++v) store(a.accumulate ? held[p][v] + load(to + v * L) : held[p][v], to + v * L);
  }
}

template <int P, int V>
static void outer_rows(std::int64_t rows, const OuterArgs& a) {
  if constexpr (P > 0) {
    if (rows == P) return outer_tile<P, V>(a);
    return outer_rows<P - 1, V>(rows, a);
  }
}

// `rows` is at most tile_pixels(vectors).
static void outer_products(std::int64_t rows, std::int64_t vectors, const OuterArgs& a) {
  switch (vectors) {
    case 1:
      return outer_rows<8, 1>(rows, a);
    case 2:
      return outer_rows<tile_pixels(2), 2>(rows, a);
    case 3:
      return outer_rows<tile_pixels(3), 3>(rows, a);
    default:
      return outer_rows<tile_pixels(kMostTileVectors), kMostTileVectors>(rows, a);
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
