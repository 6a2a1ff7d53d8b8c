// The tile of y that a block of col2im_equal.cu makes: what is in it, and its way from shared memory to y.
#pragma once

#include "activation.cuh"
#include "rows.cuh"

namespace upfold::cuda {

constexpr int kVector = 4;
constexpr int kMostSegments = 256;
template <typename Value>
constexpr int kWide = 16 / int(sizeof(Value));
template <typename Value>
constexpr int kTileValues = (16 << 10) / int(sizeof(Value));
constexpr int kTileSlack = 64;  // for lines that begin anywhere in an access

struct EqualJob {
  RowsJob rows;
  // Blocks, counted through (part of a row, part of a plane's units, chunk of the phases of h, planes).
  Divisor parts, unit_tiles, phase_chunks;
  std::int32_t pixels, units, phases, planes;  // of a full tile: of one row, of h, of h in a unit, (n, oc, od)
  std::uint32_t all_planes;
  // Work of a block, counted through (vector, group, plane).
  Divisor vectors, groups;
  Divisor tap_chunks;  // of a line
  // A tile in shared memory: planes of lines. A segment, one line or all lines of a plane, is one run of y.
  std::int32_t line_step, plane_step;
  Divisor segment_lines, segment_chunks;  // lines of y, and accesses of 16 bytes
  std::int32_t shift;                     // output that tap 0 of pixel 0 reaches, counted from the block's first
  bool uncut;                             // pixels and units reach all outputs and no others
};

// A tile, cut where the block ends.
struct EqualTile {
  std::uint32_t plane;
  std::int32_t planes, unit, units, phase;
  std::int32_t begin, end;       // pixels, counted through the rows of units
  std::int32_t first_ow, width;  // outputs of a line
};

// A plane of y: its coordinates, the taps of d that reach it, where its first line of the tile lies in y.
struct EqualPlane {
  std::uint32_t n, oc;
  std::int32_t kd, id;
  std::int64_t offset;
};

// One word more for every 32, against bank conflicts. An aligned access of 16 bytes stays in one piece.
template <typename Value>
UPFOLD_DEVICE std::int32_t padded(std::int32_t i) {
  constexpr int kWord = 4 / int(sizeof(Value));
  return i + std::int32_t(std::uint32_t(i) / (32 * kWord) * kWord);
}

UPFOLD_DEVICE std::int32_t at_least(std::int32_t a, std::int32_t b) { return a > b ? a : b; }
UPFOLD_DEVICE std::int32_t at_most(std::int32_t a, std::int32_t b) { return a < b ? a : b; }

UPFOLD_DEVICE EqualTile tile_of_block(const EqualJob& job) {
  const RowsJob& rows = job.rows;
  EqualTile tile;
  std::uint32_t rest = blockIdx.x;
  const std::int32_t part = std::int32_t(take(job.parts, rest)), width = std::int32_t(rows.w.in_count.value);
  tile.unit = std::int32_t(take(job.unit_tiles, rest)) * job.units;
  tile.phase = std::int32_t(take(job.phase_chunks, rest)) * job.phases;
  tile.plane = rest * std::uint32_t(job.planes);
  tile.planes = at_most(job.planes, std::int32_t(job.all_planes - tile.plane));
  tile.units = at_most(job.units, std::int32_t(rows.h.units.value) - tile.unit);
  const std::int32_t first = part * job.pixels, end = at_most(first + job.pixels, width);
  tile.begin = tile.unit * width + first, tile.end = (tile.unit + tile.units - 1) * width + end;
  // The first and the last part of a line also hold the outputs that no pixel reaches.
  const std::int32_t stride = std::int32_t(rows.w.stride.value), outs = std::int32_t(rows.w.out_count.value);
  const std::int32_t from = at_most(at_least(first * stride + job.shift, 0), outs);
  const std::int32_t to = at_most(at_least(end * stride + job.shift, 0), outs);
  tile.first_ow = first == 0 ? 0 : from;
  tile.width = (end == width ? outs : to) - tile.first_ow;
  return tile;
}

UPFOLD_DEVICE EqualPlane plane_of(const EqualJob& job, const EqualTile& tile, std::uint32_t local) {
  const RowsJob& rows = job.rows;
  EqualPlane plane;
  std::uint32_t rest = tile.plane + local;
  std::uint32_t od = take(rows.d.out_count, rest);
  plane.oc = take(rows.channel_rows, rest), plane.n = rest;
  const std::int64_t oh = std::int64_t(rows.h.out_begin) + tile.unit * std::int32_t(rows.h.stride.value) + tile.phase;
  plane.offset = (rows.n_begin + plane.n) * rows.y_n + (rows.oc_begin + plane.oc) * rows.y_c +
                 (rows.d.out_begin + std::int64_t(od)) * rows.y_d + oh * rows.y_h + rows.w.out_begin + tile.first_ow;
  const std::uint32_t rd = take(rows.d.stride, od);
  plane.kd = rows.d.first_tap[rd], plane.id = std::int32_t(od) + rows.d.first_in[rd];
  return plane;
}

// How many values a plane's first output lies behind an aligned access of 16 bytes. Every line of a tile has this number, unless
// they follow each other.
template <typename Value>
UPFOLD_DEVICE std::int32_t behind(const Value* y, const EqualPlane& plane) {
  const auto first = reinterpret_cast<std::uintptr_t>(y) / sizeof(Value);
  return std::int32_t((std::uint32_t(first) + std::uint32_t(plane.offset)) % kWide<Value>);
}

// The outputs of the tile's lines that no pixel reaches: bias and activation alone.
template <typename Value>
UPFOLD_DEVICE void place_edges(const EqualJob& job, const EqualTile& tile, const Value* bias, const Value* y, Value* stage) {
  const RowsJob& rows = job.rows;
  const std::int32_t reached = std::int32_t(rows.w.in_count.value * rows.w.stride.value) + job.shift - tile.first_ow;
  const std::int32_t left = at_least(at_most(job.shift - tile.first_ow, tile.width), 0);
  const std::int32_t right = at_least(at_most(reached, tile.width), left), edge = left + tile.width - right;
  if (edge == 0) return;
  const std::int32_t lines = tile.units * job.phases;
  for (std::int32_t i = std::int32_t(threadIdx.x); i < tile.planes * lines * edge; i += kRowThreads) {
    const std::int32_t line = i / edge % lines, local = i / edge / lines, at = i % edge;
    const EqualPlane plane = plane_of(job, tile, std::uint32_t(local));
    const float sum = bias == nullptr ? 0.0f : widen(bias[rows.oc_begin + plane.oc]);
    const std::int32_t place = local * job.plane_step + behind(y, plane) + line * job.line_step;
    stage[padded<Value>(place + (at < left ? at : at - left + right))] =
        Narrow<Value>::from(finish(rows.activation, rows.slope, sum));
  }
}

// A run of y: of its places in the tile, counted from an aligned one, [begin, end) exist.
struct Segment {
  std::int64_t offset;  // in y, of place 0
  std::int32_t begin, end;
};

template <typename Value>
UPFOLD_DEVICE Segment segment_of(const EqualJob& job, const EqualTile& tile, std::int32_t number, const Value* y) {
  const RowsJob& rows = job.rows;
  const std::int32_t of_plane = job.units * job.phases / std::int32_t(job.segment_lines.value);
  const std::int32_t local = number / of_plane, line = (number - local * of_plane) * std::int32_t(job.segment_lines.value);
  const EqualPlane plane = plane_of(job, tile, std::uint32_t(local));
  const std::int32_t unit = line / job.phases, phase = line - unit * job.phases;
  const std::int32_t oh = unit * std::int32_t(rows.h.stride.value) + phase;  // from the tile's first
  const std::int32_t left =
      std::int32_t(rows.h.out_count.value) - tile.unit * std::int32_t(rows.h.stride.value) - tile.phase - oh;
  const std::int32_t in_tile = tile.units * job.phases - line;
  const std::int32_t lines = at_least(at_most(at_most(left, in_tile), std::int32_t(job.segment_lines.value)), 0);
  Segment segment;
  segment.begin = behind(y, plane), segment.end = segment.begin + lines * tile.width;
  segment.offset = plane.offset + oh * rows.y_h - segment.begin;
  return segment;
}

template <typename Value>
UPFOLD_DEVICE void store_tile(const EqualJob& job, std::int32_t segments, const Segment* table, const Value* stage, Value* y) {
  const std::int32_t count = segments * std::int32_t(job.segment_chunks.value);
  for (std::int32_t chunk = std::int32_t(threadIdx.x); chunk < count; chunk += kRowThreads) {
    std::uint32_t number = std::uint32_t(chunk);
    const std::int32_t place = std::int32_t(take(job.segment_chunks, number)) * kWide<Value>;
    const Segment segment = table[number];
    const Value* const from = stage + padded<Value>(chunk * kWide<Value>);
    Value* const to = y + (segment.offset + place);
    if (place >= segment.begin && place + kWide<Value> <= segment.end) {
      const std::uint32_t* const words = reinterpret_cast<const std::uint32_t*>(from);
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
      continue;
    }
#pragma unroll
    for (int e = 0; e < kWide<Value>; ++e) {
      if (place + e >= segment.begin && place + e < segment.end) to[e] = from[e];
    }
  }
}

}  // namespace upfold::cuda
