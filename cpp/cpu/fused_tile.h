// The register tile of the fused method: a few pixels times a few vectors of output channels. x is packed as [pixel][channel], so
// a pixel's value is broadcast and the weights are the vectors; a tile takes any pixels, and a border costs nothing.
#pragma once

#include "tile.h"

namespace upfold::cpu::UPFOLD_ISA {

// One output: the source pixel that tap offsets are added to, and where its sums lie, in steps.
struct TilePixel {
  std::int64_t x, sums;
};

// `taps` neighbouring taps whose channels follow each other in x and in the packed weights alike.
struct TapRun {
  std::int64_t x;     // added to TilePixel::x
  std::int64_t slot;  // of the first tap in the packed weights
  std::int64_t taps;
};

// One call: sums[pixel][m] (+)= weights[slot][channel][m] * x[pixel + run][channel] over the runs and `channels` channels.
struct PassArgs {
  const TapRun* runs;
  std::int64_t run_count;
  std::int64_t channels;
  const float* x;
  const float* weights;  // the slots are `channels` times the block's width apart
  const TilePixel* pixels;
  std::int64_t pixel_count;
  float* sums;
  std::int64_t sums_step;
  const float* bias;  // added where the sums are set
  bool accumulate;    // otherwise the sums are set
};

template <int P, int V>
UPFOLD_INLINE void fused_tile(const PassArgs& a, const TilePixel* pixels) {
  constexpr int L = kLanes<float>;
  Vector<float> sum[P][V];
  for (int p = 0; p < P; ++p) {
    for (int v = 0; v < V; ++v) sum[p][v] = Vector<float>{};
  }
  for (std::int64_t r = 0; r < a.run_count; ++r) {
    const TapRun& run = a.runs[r];
    const float* x[P];
    for (int p = 0; p < P; ++p) x[p] = a.x + pixels[p].x + run.x;
    const float* w = a.weights + run.slot * a.channels * V * L;
    const std::int64_t count = run.taps * a.channels;
    for (std::int64_t c = 0; c < count; ++c, w += V * L) {
      Vector<float> weights[V];
      for (int v = 0; v < V; ++v) weights[v] = load(w + v * L);
      for (int p = 0; p < P; ++p) {
        for (int v = 0; v < V; ++v) sum[p][v] = multiply_add(weights[v], x[p][c], sum[p][v]);
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    float* to = a.sums + pixels[p].sums * a.sums_step;
    for (int v = 0; v < V; ++v) {
      store(sum[p][v] + load(a.accumulate ? to + v * L : a.bias + v * L), to + v * L);
    }
  }
}

// Pixels of a tile beside V vectors of channels: enough sums to hide the latency of an addition, and no more pointers than the
// processor has general registers.
constexpr int tile_pixels(int vectors) {
  if (kVectorRegisters == 32) return vectors == 4 ? 6 : 8;
  return vectors == 3 ? 4 : vectors == 2 ? 6 : 8;
}

constexpr int kMostTileVectors = kVectorRegisters == 32 ? 4 : 3;

// The last pixels, fewer than a whole tile.
template <int P, int V>
static void fused_rest(const PassArgs& a, const TilePixel* pixels, std::int64_t left) {
  if constexpr (P > 0) {
    if (left == P) return fused_tile<P, V>(a, pixels);
    return fused_rest<P - 1, V>(a, pixels, left);
  }
}

template <int V>
static void fused_pass(const PassArgs& a) {
  constexpr int P = tile_pixels(V);
  std::int64_t i = 0;
  for (; i + P <= a.pixel_count; i += P) fused_tile<P, V>(a, a.pixels + i);
  fused_rest<P - 1, V>(a, a.pixels + i, a.pixel_count - i);
}

[[maybe_unused]] static void fused_pass(std::int64_t vectors, const PassArgs& a) {
  switch (vectors) {
    case 1:
      return fused_pass<1>(a);
    case 2:
      return fused_pass<2>(a);
    case 3:
      return fused_pass<3>(a);
    default:
      return fused_pass<kMostTileVectors>(a);
  }
}

}  // namespace upfold::cpu::UPFOLD_ISA
