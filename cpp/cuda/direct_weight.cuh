// What the kernels of the direct method for the adjoint in w are made of: where positions and columns lie, and the way of a slice
// from global to shared memory.
#pragma once

#include "direct.cuh"

namespace upfold::cuda {

constexpr int kPositions = 32;  // of a slice: the lanes of a warp

struct WeightJob {
  Divisor in_d, in_h, in_w, kernel_h, kernel_w;
  Divisor taps, row_tiles, column_tiles, parts;
  std::uint32_t rows, columns;      // of a group: input channels, output channels * taps
  std::uint32_t positions, length;  // of all samples, of one part
  std::int32_t out[3], stride[3], pad[3], dilation[3];
  std::int64_t x_n, x_c, x_axis[3], y_n, y_c, y_axis[3], w_n, w_c, w_axis[3];
};

// Where a lane's position lies: its offset in x, and in y the sample and the output of a tap that displaces nothing.
struct Position {
  std::int64_t x, y;
  std::int32_t o[3];
  bool live;
};

UPFOLD_DEVICE Position position_of(const WeightJob& job, std::uint32_t at, std::uint32_t end) {
  Position p;
  p.live = at < end;
  const std::int32_t w = std::int32_t(take(job.in_w, at)), h = std::int32_t(take(job.in_h, at)),
                     d = std::int32_t(take(job.in_d, at));
  p.x = at * job.x_n + d * job.x_axis[0] + h * job.x_axis[1] + w * job.x_axis[2];
  p.y = at * job.y_n;
  p.o[0] = d * job.stride[0] - job.pad[0], p.o[1] = h * job.stride[1] - job.pad[1], p.o[2] = w * job.stride[2] - job.pad[2];
  return p;
}

// A column's output channel, as an offset in y, and how far its tap displaces an output.
struct WeightColumn {
  std::int64_t channel;
  std::int32_t displacement[3];
};

UPFOLD_DEVICE WeightColumn weight_column(const WeightJob& job, std::uint32_t group, std::uint32_t column) {
  std::uint32_t oc = column;
  std::uint32_t tap = take(job.taps, oc);
  const std::int32_t kw = std::int32_t(take(job.kernel_w, tap)), kh = std::int32_t(take(job.kernel_h, tap));
  const std::int64_t channels = job.columns / job.taps.value;
  return {(group * channels + oc) * job.y_c, {std::int32_t(tap) * job.dilation[0], kh * job.dilation[1], kw * job.dilation[2]}};
}

// Its place in y for a position; false outside.
UPFOLD_DEVICE bool column_offset(const WeightJob& job, const WeightColumn& column, const Position& p, std::int64_t& offset) {
  const std::int32_t od = p.o[0] + column.displacement[0], oh = p.o[1] + column.displacement[1],
                     ow = p.o[2] + column.displacement[2];
  offset = p.y + column.channel + od * job.y_axis[0] + oh * job.y_axis[1] + ow * job.y_axis[2];
  return p.live && std::uint32_t(od) < std::uint32_t(job.out[0]) && std::uint32_t(oh) < std::uint32_t(job.out[1]) &&
         std::uint32_t(ow) < std::uint32_t(job.out[2]);
}

struct WeightBlock {
  std::uint32_t column0, row0, part, group, begin, end;
  std::int32_t rows, columns;  // of the tile, that exist
};

template <int kTileR, int kTileC>
UPFOLD_DEVICE WeightBlock weight_block(const WeightJob& job) {
  std::uint32_t rest = blockIdx.x;
  WeightBlock block;
  block.column0 = take(job.column_tiles, rest) * kTileC, block.row0 = take(job.row_tiles, rest) * kTileR;
  block.part = take(job.parts, rest), block.group = rest, block.begin = block.part * job.length;
  block.end = job.positions - block.begin < job.length ? job.positions : block.begin + job.length;
  block.rows = job.rows - block.row0 < kTileR ? std::int32_t(job.rows - block.row0) : kTileR;
  block.columns = job.columns - block.column0 < kTileC ? std::int32_t(job.columns - block.column0) : kTileC;
  return block;
}

// Where a block leaves its sums: beside those of the other parts or, where there are none, in w itself.
template <typename Value>
struct WeightResult {
  Sum<Value>* partial;
  Value* w;
};

UPFOLD_DEVICE std::int64_t weight_offset(const WeightJob& job, std::int64_t ic, std::uint32_t column) {
  std::uint32_t tap = take(job.taps, column);  // column becomes the output channel
  const std::uint32_t kw = take(job.kernel_w, tap), kh = take(job.kernel_h, tap);
  return ic * job.w_n + column * job.w_c + tap * job.w_axis[0] + kh * job.w_axis[1] + kw * job.w_axis[2];
}

template <typename Value>
UPFOLD_DEVICE void leave_sum(const WeightJob& job, const WeightBlock& block, const WeightResult<Value>& to, std::int32_t row,
                             std::int32_t column, Sum<Value> sum) {
  if (row >= block.rows || column >= block.columns) return;
  const std::int64_t ic = std::int64_t(block.group) * job.rows + block.row0 + row;
  if (to.partial == nullptr) {
    to.w[weight_offset(job, ic, block.column0 + column)] = Narrow<Value>::from(sum);
  } else {
    const std::int64_t groups = gridDim.x / (job.column_tiles.value * job.row_tiles.value * job.parts.value);
    to.partial[(block.part * groups * job.rows + ic) * job.columns + block.column0 + column] = sum;
  }
}

// A slice of kK positions on its way to shared memory: a thread brings one position of every kStep-th row and column.
template <typename Value, int kTileR, int kTileC>
struct WeightSlice {
  using Total = Sum<Value>;
  static constexpr int kK = kDepth<Value>, kStep = kDirectThreads / kK, kRows = kTileR / kStep, kColumns = kTileC / kStep;
  // Rows start four banks apart: the kK positions of a few neighbouring rows, which a warp writes, meet in no bank.
  Total x[2][kK][kTileR + 4], y[2][kK][kTileC + 4];
};

template <typename Value, int kTileR, int kTileC>
struct WeightReader {
  using Slice = WeightSlice<Value, kTileR, kTileC>;
  Value x[Slice::kRows], y[Slice::kColumns];

  UPFOLD_METHOD void fetch(const WeightJob& job, const WeightBlock& block, const WeightColumn* columns, const Value* planes,
                           const Value* y_planes, std::uint32_t at) {
    const std::int32_t first = std::int32_t(threadIdx.x) / Slice::kK;
    const Position p = position_of(job, at + threadIdx.x % Slice::kK, block.end);
    const Value* from = planes + p.x + first * job.x_c;
#pragma unroll
    for (int i = 0; i < Slice::kRows; ++i, from += Slice::kStep * job.x_c) {
      x[i] = p.live && first + i * Slice::kStep < block.rows ? *from : Value{};
    }
#pragma unroll
    for (int i = 0; i < Slice::kColumns; ++i) {
      std::int64_t offset;
      const bool inside = column_offset(job, columns[first + i * Slice::kStep], p, offset);
      y[i] = inside && first + i * Slice::kStep < block.columns ? y_planes[offset] : Value{};
    }
  }

  UPFOLD_METHOD void put(Slice& slice, int buffer) const {
    const std::int32_t first = std::int32_t(threadIdx.x) / Slice::kK, k = std::int32_t(threadIdx.x) % Slice::kK;
#pragma unroll
    for (int i = 0; i < Slice::kRows; ++i) slice.x[buffer][k][first + i * Slice::kStep] = widen(x[i]);
#pragma unroll
    for (int i = 0; i < Slice::kColumns; ++i) slice.y[buffer][k][first + i * Slice::kStep] = widen(y[i]);
  }
};

#ifndef __CUDACC_RTC__
// What a launch knows of a problem whatever its tile.
inline WeightJob weight_job(const Problem& p) {
  WeightJob job{};
  job.in_d = make_divisor(p.in_d), job.in_h = make_divisor(p.in_h), job.in_w = make_divisor(p.in_w);
  job.kernel_h = make_divisor(p.kernel_h), job.kernel_w = make_divisor(p.kernel_w), job.taps = make_divisor(kernel_taps(p));
  job.rows = std::uint32_t(in_channels_per_group(p)), job.columns = std::uint32_t(out_channels_per_group(p) * kernel_taps(p));
  job.positions = std::uint32_t(p.batch * in_pixels(p));
  int i = 0;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    job.out[i] = std::int32_t(a.out), job.stride[i] = std::int32_t(a.stride), job.pad[i] = std::int32_t(a.pad);
    job.dilation[i++] = std::int32_t(a.dilation);
  }
  job.x_n = p.x.n, job.x_c = p.x.c, job.y_n = p.y.n, job.y_c = p.y.c;
  job.x_axis[0] = p.x.d, job.x_axis[1] = p.x.h, job.x_axis[2] = p.x.w;
  job.w_n = p.w.n, job.w_c = p.w.c, job.w_axis[0] = p.w.d, job.w_axis[1] = p.w.h, job.w_axis[2] = p.w.w;
  job.y_axis[0] = p.y.d, job.y_axis[1] = p.y.h, job.y_axis[2] = p.y.w;
  return job;
}
#endif

}  // namespace upfold::cuda
