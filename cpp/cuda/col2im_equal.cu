// col2im at memory speed, for 16-bit and 32-bit floats, where kernel_w == stride_w, dilation_w == 1 and y is planar.
//
// Every output then has one tap along w: pixel q of column row kw = r is output q * stride_w + r, shifted by the padding. A block
// owns a tile: some planes (n, oc, od), or some units of the rows of one plane, or part of one unit (rows.cuh says what a unit
// is). A lane owns kVector neighbouring pixels, counted through the rows of a plane without a break, for some phases of h and
// some r: it sums their taps over d and h, each an access of kVector columns where alignment allows. Sums go to shared memory
// in the order of y, with the same alignment, and from there to y in accesses of 16 bytes. Taps are summed in ascending order;
// what lies outside the input adds nothing.
#include "col2im_equal.cuh"

namespace upfold::cuda {

// Some phases of h, as neighbouring lines of the tile's units, and some neighbouring taps of w: what a lane sums at a time.
// Lines beyond the last have kh = `kernel`, as those that no tap reaches.
template <int kLines>
struct EqualGroup {
  std::int32_t line, r;                    // the first of each
  std::int32_t kh[kLines], shift[kLines];  // the first tap, and the row that it reads, counted from the unit
};

template <int kLines, int kTaps>
UPFOLD_DEVICE EqualGroup<kLines> group_of(const EqualJob& job, const EqualTile& tile, std::uint32_t number) {
  const RowAxis& h = job.rows.h;
  EqualGroup<kLines> group;
  group.r = std::int32_t(take(job.tap_chunks, number)) * kTaps, group.line = std::int32_t(number) * kLines;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const bool exists = group.line + i < job.phases;
    const std::int32_t phase = tile.phase + (exists ? group.line + i : 0);
    group.kh[i] = exists ? h.first_tap[phase] : h.kernel, group.shift[i] = h.first_in[phase];
  }
  return group;
}

// kVector neighbouring pixels, counted through the rows of units.
struct EqualPixels {
  std::int32_t first, unit, q;  // of the first one
  std::int32_t last_unit;       // of the last one
};

// The unit and the pixel inside its row of the next neighbour.
UPFOLD_DEVICE void step_pixel(std::int32_t width, std::int32_t& unit, std::int32_t& q) {
  if (++q == width) q = 0, ++unit;
}

UPFOLD_DEVICE EqualPixels pixels_of(const RowsJob& job, std::int32_t first) {
  EqualPixels pixels;
  std::uint32_t unit = std::uint32_t(first), last = unit + kVector - 1;
  pixels.first = first, pixels.q = std::int32_t(take(job.w.in_count, unit)), pixels.unit = std::int32_t(unit);
  pixels.last_unit = std::int32_t(divide(job.w.in_count, last));
  return pixels;
}

// The columns of one tap of d and one of h for `count` taps of w, 0 where they lie outside; `from` belongs to the first pixel,
// `shift` is the row that a unit reads, counted from the unit, and `height` the rows that exist.
template <int kTaps, typename Column>
UPFOLD_DEVICE void load_line(const RowsJob& job, const Column* from, const EqualPixels& pixels, std::int32_t shift,
                             std::int32_t height, std::int32_t count, Pack<Column, kVector>* values) {
  const std::int32_t low = pixels.unit + shift, high = pixels.last_unit + shift;
  const bool outside = high < 0 || low >= height, inside = low >= 0 && high < height;
  const bool aligned = reinterpret_cast<std::uintptr_t>(from) % sizeof(Pack<Column, kVector>) == 0 && job.tap_w % kVector == 0;
  if (outside || (inside && aligned)) {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      const bool read = inside && i < count;
      values[i] = read ? *reinterpret_cast<const Pack<Column, kVector>*>(from + i * job.tap_w) : Pack<Column, kVector>{};
    }
    return;
  }
  std::int32_t row = low, q = pixels.q;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const bool read = std::uint32_t(row) < std::uint32_t(height);
#pragma unroll
    for (int i = 0; i < kTaps; ++i) values[i].v[e] = read && i < count ? from[i * job.tap_w + e] : Column{};
    step_pixel(std::int32_t(job.w.in_count.value), row, q);
  }
}

// sums[(line * kTaps + tap of w) * kVector + pixel]
template <int kLines, int kTaps, typename Column>
UPFOLD_DEVICE void gather_group(const RowsJob& job, const Column* columns, const EqualPlane& plane, const EqualPixels& pixels,
                                const EqualGroup<kLines>& group, float (&sums)[kLines * kTaps * kVector]) {
  const std::int32_t width = std::int32_t(job.w.in_count.value), height = std::int32_t(job.h.in_count.value);
  const std::int32_t count = std::int32_t(job.w.stride.value) - group.r;
  columns += plane.n * job.sample_stride + plane.oc * job.channel_stride + (group.r * job.tap_w + pixels.first);
  std::int32_t id = plane.id;
  for (std::int32_t kd = plane.kd; kd < job.d.kernel; kd += job.d.tap_step, id -= job.d.in_step) {
    if (std::uint32_t(id) >= job.d.in_count.value) continue;
    const Column* const source = columns + (kd * job.tap_d + id * (height * width));
    std::int32_t step = 0, back = 0;
#pragma unroll 1
    for (std::int32_t tap = 0; tap < job.h.most_taps; ++tap, step += job.h.tap_step, back += job.h.in_step) {
      Pack<Column, kVector> values[kLines * kTaps];
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const std::int32_t kh = group.kh[i] + step, shift = group.shift[i] - back;
        load_line<kTaps>(job, source + (kh * job.tap_h + shift * width), pixels, shift, kh < job.h.kernel ? height : 0, count,
                         values + i * kTaps);
      }
#pragma unroll
      for (int i = 0; i < kLines * kTaps * kVector; ++i) sums[i] += widen(values[i / kVector].v[i % kVector]);
    }
  }
}

// Adds the bias to every sum of a lane and applies the activation.
template <int kCount>
UPFOLD_DEVICE void finish_sums(const RowsJob& job, float bias, float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] += bias;
  if (job.activation == Activation::kNone) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = finish(job.activation, job.slope, sums[i]);
}

// Puts the sums of a lane where their outputs lie in the tile; `base` is the place of the plane's first output. kChecked: some
// of the outputs may not exist.
template <bool kChecked, int kLines, int kTaps, typename Value>
UPFOLD_DEVICE void place_sums(const EqualJob& job, const EqualTile& tile, const EqualPixels& pixels,
                              const EqualGroup<kLines>& group, const float (&sums)[kLines * kTaps * kVector], std::int32_t base,
                              Value* stage) {
  const RowsJob& rows = job.rows;
  const std::int32_t stride = std::int32_t(rows.w.stride.value), stride_h = std::int32_t(rows.h.stride.value);
  const std::int32_t count = stride - group.r;
  std::int32_t unit = pixels.unit, q = pixels.q;
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    const bool live = pixels.first + e >= tile.begin && pixels.first + e < tile.end;
    const std::int32_t ow = q * stride + job.shift - tile.first_ow + group.r;
    const std::int32_t place = base + ((unit - tile.unit) * job.phases + group.line) * job.line_step + ow;
    const std::int32_t left = std::int32_t(rows.h.out_count.value) - unit * stride_h - tile.phase;
    const std::int32_t lines = (live ? at_most(left, job.phases) : 0) - group.line;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
#pragma unroll
      for (int r = 0; r < kTaps; ++r) {
        if (kChecked && (i >= lines || r >= count || std::uint32_t(ow + r) >= std::uint32_t(tile.width))) continue;
        stage[padded<Value>(place + i * job.line_step + r)] = Narrow<Value>::from(sums[(i * kTaps + r) * kVector + e]);
      }
    }
    step_pixel(std::int32_t(rows.w.in_count.value), unit, q);
  }
}

// Whether every output of a lane exists.
template <int kLines, int kTaps>
UPFOLD_DEVICE bool all_exist(const EqualJob& job, const EqualTile& tile, const EqualPixels& pixels,
                             const EqualGroup<kLines>& group) {
  return job.uncut && pixels.first >= tile.begin && pixels.first + kVector <= tile.end && group.line + kLines <= job.phases &&
         group.r + kTaps <= std::int32_t(job.rows.w.stride.value);
}

template <typename Value, typename Column, int kLines, int kTaps>
__global__ void __launch_bounds__(kRowThreads, 3)
    col2im_equal_kernel(const EqualJob job, const Column* __restrict__ columns, const Value* __restrict__ bias, Value* y) {
  __shared__ alignas(16) Value stage[(kTileValues<Value> + kTileSlack) / 32 * 33];
  __shared__ Segment table[kMostSegments];
  const RowsJob& rows = job.rows;
  const EqualTile tile = tile_of_block(job);
  const std::uint32_t items = job.vectors.value * job.groups.value * std::uint32_t(tile.planes);
  for (std::uint32_t item = threadIdx.x; item < items; item += kRowThreads) {
    std::uint32_t local = item;
    const std::int32_t first = tile.begin / kVector * kVector + std::int32_t(take(job.vectors, local)) * kVector;
    if (first >= tile.end) continue;
    const EqualPixels pixels = pixels_of(rows, first);
    const EqualGroup<kLines> group = group_of<kLines, kTaps>(job, tile, take(job.groups, local));
    const EqualPlane plane = plane_of(job, tile, local);
    const float added = bias == nullptr ? 0.0f : widen(bias[rows.oc_begin + plane.oc]);
    float sums[kLines * kTaps * kVector] = {};
    gather_group<kLines, kTaps>(rows, columns, plane, pixels, group, sums);
    finish_sums(rows, added, sums);
    const std::int32_t base = std::int32_t(local) * job.plane_step + behind(y, plane);
    if (all_exist<kLines, kTaps>(job, tile, pixels, group))
      place_sums<false, kLines, kTaps>(job, tile, pixels, group, sums, base, stage);
    else
      place_sums<true, kLines, kTaps>(job, tile, pixels, group, sums, base, stage);
  }
  if (!job.uncut) place_edges(job, tile, bias, y, stage);
  const std::int32_t segments = tile.planes * job.units * job.phases / std::int32_t(job.segment_lines.value);
  for (std::int32_t i = std::int32_t(threadIdx.x); i < segments; i += kRowThreads) table[i] = segment_of(job, tile, i, y);
  __syncthreads();  // the tile is complete
  store_tile(job, segments, table, stage, y);
}

#define UPFOLD_INSTANTIATE_GROUP(Value, Column, kLines, kTaps) \
  template __global__ void col2im_equal_kernel<Value, Column, kLines, kTaps>(const EqualJob, const Column*, const Value*, Value*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_GROUP(Value, Column, 1, 2)                \
  UPFOLD_INSTANTIATE_GROUP(Value, Column, 2, 2)                \
  UPFOLD_INSTANTIATE_GROUP(Value, Column, 1, 4)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostPairs = 128;   // of a unit; above it a block takes one phase of h
constexpr std::int64_t kFewBlocks = 512;   // smaller tiles rather than fewer blocks
constexpr std::int64_t kLeastTile = 1024;  // values
constexpr std::int64_t kFarEdge = 64;      // outputs of a line that no pixel reaches

std::int64_t round_up(std::int64_t count, std::int64_t step) { return ceil_div(count, step) * step; }

// Sizes of a tile, in the order in which they are tried: whole planes, whole units of one plane, part of one unit.
struct TileChoice {
  std::int64_t wide, capacity;  // values of one access, and of a tile
  std::int64_t planes, units, phases, pixels, out_w;
  bool joined;  // lines follow each other in y

  // Places of `count` neighbouring outputs that begin anywhere in an access.
  std::int64_t run(std::int64_t count) const { return round_up(count + wide - 1, wide); }
  std::int64_t of_units(std::int64_t count) const { return joined ? run(count * phases * out_w) : count * phases * run(out_w); }
  std::int64_t segments(std::int64_t count) const { return joined ? 1 : count * phases; }
};

// Fills in planes, units, phases and pixels; false where not even a few pixels fit.
bool choose_tile(const RowsJob& job, std::int64_t all_planes, std::int64_t edge, TileChoice& tile) {
  const std::int64_t stride_h = job.h.stride.value, stride = job.w.stride.value, all_units = job.h.units.value;
  const bool all_phases = job.h.phases.value * stride <= kMostPairs;
  tile.phases = all_phases ? job.h.phases.value : 1;
  tile.out_w = job.w.out_count.value, tile.pixels = job.w.in_count.value;
  // Lines of one tile lie equally far behind an aligned access, or follow each other, or there is one alone.
  const bool regular = job.y_h * (all_phases ? 1 : stride_h) % tile.wide == 0;
  tile.joined = (all_phases || stride_h == 1) && job.y_h == tile.out_w;
  const bool alone = !tile.joined && !regular;
  if (alone) tile.phases = 1;
  tile.planes = 1, tile.units = 1;
  const std::int64_t whole = tile.of_units(all_units);
  if (whole <= tile.capacity && tile.segments(all_units) <= kMostSegments && (!alone || all_units == 1)) {
    tile.units = all_units;
    tile.planes = std::min(std::min(tile.capacity / whole, all_planes), kMostSegments / tile.segments(all_units));
    return true;
  }
  if (tile.of_units(1) <= tile.capacity) {
    std::int64_t most =
        tile.joined ? (tile.capacity - tile.wide + 1) / (tile.phases * tile.out_w) : tile.capacity / tile.of_units(1);
    most = std::max<std::int64_t>(std::min(most, kMostSegments / tile.phases), 1);
    tile.units = alone ? 1 : ceil_div(all_units, ceil_div(all_units, most));
    return true;
  }
  tile.joined = false;
  if (!regular) tile.phases = 1;
  const std::int64_t places = tile.capacity / tile.phases / tile.wide * tile.wide - 2 * tile.wide - edge;
  const std::int64_t most = places / stride / kVector * kVector, width = job.w.in_count.value;
  tile.pixels = most > 0 ? round_up(ceil_div(width, ceil_div(width, most)), kVector) : 0;
  return tile.pixels > 0;
}

// Everything but the tile's own sizes; false where there are too many blocks.
bool fill_job(EqualJob& job, const TileChoice& tile, std::int64_t edge, unsigned& blocks) {
  const RowsJob& rows = job.rows;
  const std::int64_t width = rows.w.in_count.value, stride = rows.w.stride.value, all_units = rows.h.units.value;
  const std::int64_t parts = ceil_div(width, tile.pixels), unit_tiles = ceil_div(all_units, tile.units);
  const std::int64_t chunks = ceil_div(rows.h.phases.value, tile.phases), plane_tiles = ceil_div(job.all_planes, tile.planes);
  const std::int64_t of_plane = parts * unit_tiles * chunks;
  if (parts >= kMost || of_plane >= kMost || of_plane * plane_tiles >= kMost) return false;
  blocks = unsigned(of_plane * plane_tiles);
  job.parts = make_divisor(parts), job.unit_tiles = make_divisor(unit_tiles), job.phase_chunks = make_divisor(chunks);
  job.pixels = std::int32_t(tile.pixels), job.units = std::int32_t(tile.units);
  job.phases = std::int32_t(tile.phases), job.planes = std::int32_t(tile.planes);
  // A tile that begins inside a vector touches one more.
  const std::int64_t count = tile.units == 1 ? tile.pixels : tile.units * width;
  const bool begins = width % kVector == 0 || (unit_tiles == 1 && parts == 1);
  job.vectors = make_divisor(ceil_div(count, kVector) + (begins ? 0 : 1));
  const std::int64_t taps = stride > 2 ? 4 : 2, lines = stride > 2 || tile.phases == 1 ? 1 : 2;
  job.tap_chunks = make_divisor(ceil_div(stride, taps));
  job.groups = make_divisor(ceil_div(tile.phases, lines) * job.tap_chunks.value);
  const std::int64_t line = parts == 1 ? tile.out_w : tile.pixels * stride + edge;
  job.line_step = std::int32_t(tile.joined ? line : tile.run(line));
  job.plane_step = std::int32_t(tile.joined ? tile.of_units(tile.units) : tile.units * tile.phases * job.line_step);
  job.segment_lines = make_divisor(tile.joined ? tile.units * tile.phases : 1);
  job.segment_chunks = make_divisor((tile.joined ? job.plane_step : job.line_step) / tile.wide);
  return true;
}

template <typename Value, typename Column>
bool launch_equal(const Launch& launch, const RowsJob& rows, const void* columns, const void* bias, void* y) {
  const std::int64_t planes = std::int64_t(rows.channels) * rows.samples.value;
  if (planes >= kMost || planes * rows.d.out_count.value >= kMost) return false;
  EqualJob job{};
  job.rows = rows, job.all_planes = std::uint32_t(planes * rows.d.out_count.value);
  job.shift = rows.w.origin - rows.w.out_begin;
  const std::int64_t stride = rows.w.stride.value, out_w = rows.w.out_count.value;
  const std::int64_t reached = std::int64_t(rows.w.in_count.value) * stride + job.shift;
  const std::int64_t edge = std::max<std::int64_t>(job.shift, 0) + std::max<std::int64_t>(out_w - reached, 0);
  if (edge > kFarEdge) return false;
  TileChoice tile{};
  tile.wide = kWide<Value>;
  const std::int64_t of_block = std::int64_t(job.all_planes) * (rows.h.out_count.value * out_w) / kFewBlocks;
  // Whole rounds of the block's threads, each of which makes `stride` outputs of kVector pixels by `chunks` groups of taps.
  const std::int64_t chunks = stride > 2 ? ceil_div(stride, 4) : 1;
  const std::int64_t round = stride > 2 ? kRowThreads * kVector * stride / chunks : kTileValues<Value>;
  const std::int64_t most = kTileValues<Value> / round * round;
  tile.capacity = std::max(std::min(of_block, most), kLeastTile) / tile.wide * tile.wide + kTileSlack;
  unsigned blocks = 0;
  if (!choose_tile(rows, job.all_planes, edge, tile) || !fill_job(job, tile, edge, blocks)) return false;
  job.uncut = job.shift == 0 && reached == out_w && rows.h.units.value * rows.h.stride.value == rows.h.out_count.value;
  const auto kernel = stride > 2       ? col2im_equal_kernel<Value, Column, 1, 4>
                      : job.phases > 1 ? col2im_equal_kernel<Value, Column, 2, 2>
                                       : col2im_equal_kernel<Value, Column, 1, 2>;
  launch_kernel("col2im", kernel, launch, blocks, kRowThreads, job, static_cast<const Column*>(columns),
                static_cast<const Value*>(bias), static_cast<Value*>(y));
  return true;
}

}  // namespace

bool takes_equal(const RowsJob& job) {
  const std::int64_t pixels = std::int64_t(job.d.in_count.value) * job.h.in_count.value * job.w.in_count.value;
  return job.w.kernel == std::int32_t(job.w.stride.value) && job.w.dilation == 1 && job.vector > 0 && pixels > 0;
}

bool col2im_equal(const Launch& launch, Dtype dtype, Dtype column_dtype, RowsJob job, const void* columns, const void* bias,
                  void* y) {
  if (!takes_equal(job)) return false;
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)             \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) \
    return launch_equal<Value, Column>(launch, job, columns, bias, y);
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
