// The fused method for long strides and few input channels (compute capability 9.0), where every phase has a tap at each shift:
// upsampling of score maps. Rows of a product are 64 *units*, its columns pairs of an output channel and a phase, its reduction
// the channels of x at each shift, so that what a product sums are outputs. Along a row of a product lie neighbouring outputs of
// a unit, which with those of the next unit are a run in y: they are stored from registers.
//
// Unit q of an axis owns the outputs q * stride + phase - pad; its shift d reads input q - d. Units are counted flat, with as
// many places before the units of a row as its shifts reach back, so that a shift is a distance in x as it lies in shared memory:
//   x       [vector of 16 bytes of channels][place][16 bytes], zeros outside
//   weight  [product][2 vectors][column][16 bytes]
// A block owns some columns and some tiles of 64 places of an image, fills both, and its warpgroups take the tiles in turn.
#pragma once

#include "activation.cuh"
#include "divide.cuh"
#include "mma.cuh"

namespace upfold::cuda {

constexpr int kMostUnitProducts = 48, kUnitThreads = 256, kUnitBlocks = 2;

// Groups of eight columns of a block.
template <typename Value_, int kN8_>
struct UnitsTile {
  using Value = Value_;
  static constexpr int kN8 = kN8_, kN = 8 * kN8, kSize = int(sizeof(Value)), kVector = 16 / kSize;
};

// Of one of a product's two vectors: its shift and its vector of channels; a negative vector is nothing.
struct UnitsVector {
  std::int8_t shift_h, shift_w, vector;
};
// In vectors: from the first place of a tile to the product's first vector, and from there to the second.
struct UnitsProduct {
  std::uint16_t first, pitch;
};
// Of a column of a block: where its outputs lie in y beside those of the unit (negative: nowhere), its bias, and its phases.
struct alignas(16) UnitsColumn {
  std::int32_t at;
  float bias;
  std::int32_t h, w;
};

struct UnitsJob {
  Divisor column_tiles, groups, strips;  // of an image; strips: of tiles
  Divisor pitch;                         // places of a row of units
  Divisor fast, middle;                  // of a column: channels and phases of the width, in the order of y
  std::int32_t tiles, strip_tiles, places;
  std::int32_t halo, before;       // places before a tile that it reads; those of a row that are no units
  std::int32_t first_h, first_w;   // units
  std::int32_t shifts_h, vectors;  // vectors of a place
  std::int32_t filled;             // places of a strip
  Divisor strip_places;            // the same
  // Where two pixels are aligned together: pairs of them that a row of places has, the first at an even pixel (0: none); the
  // vectors of a place.
  Divisor row_pairs, pair_vectors;
  std::int32_t first_pair;       // that pixel
  std::int32_t ic, oc, columns;  // of a group
  std::int32_t in_h, in_w, out_h, out_w, stride_h, stride_w, pad_h, pad_w, products;
  bool channels_first;    // the order of columns: channels are the slowest
  bool rows_of_weights;   // aligned vectors of w are neighbouring columns
  std::int32_t together;  // columns whose outputs are an aligned run in y: 1, 2 or 4
  Activation activation;
  float slope;
  std::int64_t x_n, x_c, x_h, x_w, y_n, y_c, y_h, y_w, w_ic, w_oc, w_h, w_w;
  UnitsProduct product[kMostUnitProducts];
  UnitsVector vector[2 * kMostUnitProducts];
};

// A column's channel of the group and its phases.
struct UnitsPhase {
  std::int32_t oc, h, w;
};
UPFOLD_DEVICE UnitsPhase units_phase(const UnitsJob& job, std::int32_t column) {
  std::uint32_t slow = std::uint32_t(column);
  const std::int32_t fast = std::int32_t(take(job.fast, slow)), middle = std::int32_t(take(job.middle, slow));
  if (job.channels_first) return {std::int32_t(slow), middle, fast};
  return {fast, std::int32_t(slow), middle};
}

}  // namespace upfold::cuda
