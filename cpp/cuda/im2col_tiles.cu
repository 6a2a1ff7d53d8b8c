// im2col at memory speed, for 16-bit and 32-bit floats and a planar y, through shared memory.
//
// A block owns a tile of pixels (rows x width of one input plane, or whole small planes of several images), one kd and a run of
// kh. It reads the lines of y that these need once, along y, with zeros outside, and holds each line split by phase: position
// q * stride + r lies at [r][q]. What tap kw reads for neighbouring pixels then lies side by side whatever the stride, at one
// offset from where tap 0 would read it; a table holds that offset for each tap. So the loop over taps is a load from shared
// memory and a store for each value, with no test of bounds, and lanes store neighbouring pixels. Where the pixels are few the
// warps share the taps out.
#include "rows.cuh"

namespace upfold::cuda {

// A line is a row of y as far as a tile needs it; `slot` is its number among those of one image.
struct TileJob {
  // Blocks are counted through (run of kh, kd, tile on w, tile on h, group of images).
  Divisor runs, kernel_d, tiles_w, tiles_h;
  // Images are planes of y, counted through (id, inner, outer): inner is the channel, or the sample where samples lie closer.
  Divisor in_d, inner;
  std::uint32_t images, group;  // all, and those of a block
  std::int64_t y_begin, y_inner, y_outer, y_d, y_h;
  std::int64_t columns_inner, columns_outer;
  std::int32_t y_w, row_stride;
  // Pixels: `units` = kPair neighbours each, of an image's tile.
  Divisor units, width;
  std::int32_t rows, in_h, in_w;
  // Slot number s holds the line oh = first + s / per * step_far + s % per * step_near.
  Divisor slots, per;
  std::int32_t step_far, step_near, slot_row, slot_kh;
  // Elements of shared memory: a phase of a line, a line. Vectors of a line; positions by which it begins ahead of tap 0.
  Divisor vectors;
  std::int32_t phase_pitch, line_pitch, ahead;
  std::int32_t line_table, image_table, tap_table;  // bytes before them
  std::int32_t run, unit_warps;                     // kh of a run; warps that own different pixels
  Divisor kernel_w, stride_w;
  std::int32_t kernel_h, dilation_d, dilation_h, dilation_w, stride_d, stride_h;
  std::int32_t origin_d, origin_h, origin_w, out_d, out_h, out_w;
};

struct TileBlock {
  std::uint32_t image;
  std::int32_t row, col;  // first pixel
  std::int32_t kd, kh, taps;
};

constexpr int kUnits = 4;           // of a lane at a time
constexpr int kVector = 4;          // values of an access to y, where its alignment allows
constexpr std::int64_t kZero = -1;  // the place of a line outside y

UPFOLD_DEVICE TileBlock place_block(const TileJob& job, std::uint32_t rest) {
  TileBlock block;
  block.kh = std::int32_t(take(job.runs, rest)) * job.run;
  block.kd = std::int32_t(take(job.kernel_d, rest));
  block.col = std::int32_t(take(job.tiles_w, rest) * job.width.value);
  block.row = std::int32_t(take(job.tiles_h, rest)) * job.rows;
  block.image = rest * job.group;
  const std::int32_t left = job.kernel_h - block.kh;
  block.taps = (left < job.run ? left : job.run) * std::int32_t(job.kernel_w.value);
  return block;
}

// Where the lines lie in y, the images in columns, and what each tap reads.
UPFOLD_DEVICE void fill_tables(const TileJob& job, const TileBlock& block, std::int64_t* line_at, std::int64_t* image_at,
                               std::int32_t* tap_at) {
  const std::uint32_t lines = job.group * job.slots.value;
  const std::int32_t oh_begin = block.row * job.stride_h + job.origin_h + block.kh * job.dilation_h;
  for (std::uint32_t line = threadIdx.x; line < lines; line += kRowThreads) {
    std::uint32_t local = line;
    std::uint32_t far = take(job.slots, local);
    const std::int32_t near = std::int32_t(take(job.per, far));
    std::uint32_t outer = block.image + local;
    const bool exists = outer < job.images;
    const std::int32_t id = std::int32_t(take(job.in_d, outer));
    const std::uint32_t inner = take(job.inner, outer);
    const std::int32_t od = id * job.stride_d + job.origin_d + block.kd * job.dilation_d;
    const std::int32_t oh = oh_begin + std::int32_t(far) * job.step_far + near * job.step_near;
    const bool inside = exists && std::uint32_t(od) < std::uint32_t(job.out_d) && std::uint32_t(oh) < std::uint32_t(job.out_h);
    line_at[line] = inside ? job.y_begin + inner * job.y_inner + outer * job.y_outer + od * job.y_d + oh * job.y_h : kZero;
    if (far == 0 && near == 0)
      image_at[local] = inner * job.columns_inner + outer * job.columns_outer + std::int64_t(id) * job.in_h * job.in_w;
  }
  for (std::int32_t tap = std::int32_t(threadIdx.x); tap < block.taps; tap += kRowThreads) {
    std::uint32_t kh = std::uint32_t(tap);
    const std::uint32_t kw = take(job.kernel_w, kh);
    std::uint32_t q = kw * job.dilation_w + job.ahead;
    const std::uint32_t r = take(job.stride_w, q);
    tap_at[tap] = std::int32_t(kh * job.slot_kh * job.line_pitch + r * job.phase_pitch + q);
  }
}

// Puts one vector of a line, from its position `at` on, where the phases of its elements lie.
template <typename Value, int kLoad>
UPFOLD_DEVICE void hold(const TileJob& job, Value* line, std::uint32_t at, const Pack<Value, kLoad>& values) {
  if (job.stride_w.value == 1) {
    *reinterpret_cast<Pack<Value, kLoad>*>(line + at) = values;
    return;
  }
  std::uint32_t q = at, r = take(job.stride_w, q);
#pragma unroll
  for (int i = 0; i < kLoad; ++i) {
    line[r * job.phase_pitch + q] = values.v[i];
    if (++r == job.stride_w.value) r = 0, ++q;
  }
}

template <typename Value, int kLoad>
UPFOLD_DEVICE void load_lines(const TileJob& job, const TileBlock& block, const Value* __restrict__ y,
                              const std::int64_t* line_at, Value* held) {
  constexpr int kBatch = 4;  // loads in flight
  const std::uint32_t total = job.group * job.slots.value * job.vectors.value;
  const std::int32_t ow_begin = block.col * std::int32_t(job.stride_w.value) + job.origin_w - job.ahead;
  for (std::uint32_t first = threadIdx.x; first < total; first += kBatch * kRowThreads) {
    Pack<Value, kLoad> values[kBatch];
    std::uint32_t lines[kBatch], at[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      lines[i] = first + i * kRowThreads;
      at[i] = take(job.vectors, lines[i]) * kLoad;
#pragma unroll
      for (int j = 0; j < kLoad; ++j) values[i].v[j] = Narrow<Value>::from(0.0f);
      if (first + i * kRowThreads >= total) continue;
      const std::int64_t line = line_at[lines[i]];
      const std::int32_t ow = ow_begin + std::int32_t(at[i]);
      // A vector lies inside or outside: out_w and ow are multiples of kLoad.
      if (line != kZero && std::uint32_t(ow) < std::uint32_t(job.out_w))
        values[i] = *reinterpret_cast<const Pack<Value, kLoad>*>(y + line + ow * job.y_w);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kRowThreads < total) hold<Value, kLoad>(job, held + lines[i] * job.line_pitch, at[i], values[i]);
    }
  }
}

// A lane's unit: where its pixels lie in columns and what tap 0 would read for them. `pixels` exist; one access where `whole`.
template <typename Column>
struct Unit {
  Column* target;
  std::int32_t held[kPair<Column>];
  std::int32_t pixels;
  bool whole;
};

template <typename Column>
UPFOLD_DEVICE Unit<Column> unit_of(const TileJob& job, const TileBlock& block, std::uint32_t number, Column* columns,
                                   const std::int64_t* image_at) {
  constexpr std::uint32_t kPixels = kPair<Column>;
  const std::uint32_t pixel = take(job.units, number) * kPixels;
  Unit<Column> unit{columns, {}, 0, false};
  if (number >= job.group || block.image + number >= job.images) return unit;
#pragma unroll
  for (std::uint32_t i = 0; i < kPixels; ++i) {
    std::uint32_t row = pixel + i;
    const std::int32_t col = std::int32_t(take(job.width, row)), at_h = block.row + std::int32_t(row);
    const bool exists = std::int32_t(row) < job.rows && at_h < job.in_h && block.col + col < job.in_w;
    unit.held[i] = exists ? std::int32_t(number * job.slots.value + row * job.slot_row) * job.line_pitch + col : 0;
    unit.pixels += exists ? 1 : 0;
    if (i == 0) unit.target += image_at[number] + std::int64_t(at_h) * job.in_w + block.col + col;
  }
  // Tiles are as wide as the plane or an even number of pixels: the second pixel of a unit follows the first in columns.
  const bool aligned = reinterpret_cast<std::uintptr_t>(unit.target) % (kPixels * sizeof(Column)) == 0;
  unit.whole = unit.pixels == int(kPixels) && job.row_stride % int(kPixels) == 0 && aligned;
  return unit;
}

template <typename Value, typename Column>
UPFOLD_DEVICE void store_taps(const TileJob& job, const TileBlock& block, const Value* held, const std::int32_t* tap_at,
                              const std::int64_t* image_at, Column* columns) {
  constexpr int kPixels = kPair<Column>;
  const std::int32_t warp = std::int32_t(threadIdx.x / 32), lane = std::int32_t(threadIdx.x % 32);
  const std::int32_t total = std::int32_t(job.group * job.units.value), tap_warps = kWarps / job.unit_warps;
  const std::int32_t unit_warp = warp % job.unit_warps, tap_warp = warp / job.unit_warps;
  if (tap_warp >= tap_warps) return;
  for (std::int32_t first = unit_warp * 32 * kUnits; first < total; first += job.unit_warps * 32 * kUnits) {
    Unit<Column> units[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) units[i] = unit_of(job, block, std::uint32_t(first + i * 32 + lane), columns, image_at);
#pragma unroll 2
    for (std::int32_t tap = tap_warp; tap < block.taps; tap += tap_warps) {
      const Value* const from = held + tap_at[tap];
      const std::int32_t row = tap * job.row_stride;
      Pack<Column, kPixels> values[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int j = 0; j < kPixels; ++j) values[i].v[j] = convert<Column>(from[units[i].held[j]]);
      }
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        Column* const to = units[i].target + row;
        if (units[i].whole) {
          *reinterpret_cast<Pack<Column, kPixels>*>(to) = values[i];
          continue;
        }
#pragma unroll
        for (int j = 0; j < kPixels; ++j) {
          if (j < units[i].pixels) to[j] = values[i].v[j];
        }
      }
    }
  }
}

template <typename Value, typename Column, int kLoad>
__global__ void __launch_bounds__(kRowThreads, 5)
    im2col_tiles_kernel(const TileJob job, const Value* __restrict__ y, Column* __restrict__ columns) {
  extern __shared__ uint4 shared[];
  Value* const held = reinterpret_cast<Value*>(shared);
  char* const tables = reinterpret_cast<char*>(shared);
  std::int64_t* const line_at = reinterpret_cast<std::int64_t*>(tables + job.line_table);
  std::int64_t* const image_at = reinterpret_cast<std::int64_t*>(tables + job.image_table);
  std::int32_t* const tap_at = reinterpret_cast<std::int32_t*>(tables + job.tap_table);
  const TileBlock block = place_block(job, blockIdx.x);
  fill_tables(job, block, line_at, image_at, tap_at);
  __syncthreads();
  load_lines<Value, kLoad>(job, block, y, line_at, held);
  __syncthreads();
  const std::int32_t first_tap = (block.kd * job.kernel_h + block.kh) * std::int32_t(job.kernel_w.value);
  store_taps(job, block, held, tap_at, image_at, columns + std::int64_t(first_tap) * job.row_stride);
}

#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column)                                          \
  template __global__ void im2col_tiles_kernel<Value, Column, 1>(const TileJob, const Value*, Column*); \
  template __global__ void im2col_tiles_kernel<Value, Column, kVector>(const TileJob, const Value*, Column*);
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kTileBytes = 24 << 10;  // of lines, so that a multiprocessor holds several blocks
constexpr std::int64_t kTapTable = 1 << 10;    // taps of a block at most
constexpr std::int64_t kRun = 256;             // pixels that should lie side by side before a block takes more of kh
constexpr std::int64_t kRounds = 2;            // of all lanes of a block over its pixels, at most
constexpr std::int64_t kFewBlocks = 2000;      // fewer leave much of a large device idle at the end

// What a block takes: planes, rows and columns of pixels, and kh.
struct Tile {
  std::int64_t group, rows, width, run;
};

// Sizes of a tile as plain numbers. Lines are shared where rows and kh reach the same ones, else there is one for each pair.
class TileSizes {
 public:
  TileSizes(const RowsJob& job, int element, int load)
      : job_(job), element_(element), load_(load), ahead_(((job.w.origin % load) + load) % load) {}

  std::int64_t positions(std::int64_t width) const {  // of y in a line, in whole vectors
    const std::int64_t reach = std::int64_t(job_.w.kernel - 1) * job_.w.dilation;
    return ceil_div(ahead_ + (width - 1) * job_.w.stride.value + reach + 1, load_) * load_;
  }
  // Odd, so that neighbouring phases lie in different banks.
  std::int64_t phase_pitch(std::int64_t width) const { return ceil_div(positions(width), job_.w.stride.value) | 1; }
  std::int64_t line_pitch(std::int64_t width) const {
    const std::int64_t stride = job_.w.stride.value;
    return stride == 1 ? positions(width) : phase_pitch(width) * stride;
  }
  std::int64_t line_bytes(std::int64_t width) const { return line_pitch(width) * element_ + std::int64_t(sizeof(std::int64_t)); }
  std::int64_t shared_slots(const Tile& t) const { return (t.rows - 1) * step() + (t.run - 1) * dilation() + 1; }
  bool shares(const Tile& t) const { return shared_slots(t) < t.rows * t.run; }
  std::int64_t slots(const Tile& t) const { return std::min(shared_slots(t), t.rows * t.run); }
  // The most rows with so much of kh, and the most of kh with so many rows, that `lines` hold.
  std::int64_t most_rows(std::int64_t lines, std::int64_t run) const { return most(lines, run, dilation(), step()); }
  std::int64_t most_run(std::int64_t lines, std::int64_t rows) const { return most(lines, rows, step(), dilation()); }
  std::int64_t ahead() const { return ahead_; }

 private:
  std::int64_t step() const { return job_.h.stride.value; }
  std::int64_t dilation() const { return job_.h.dilation; }
  static std::int64_t most(std::int64_t lines, std::int64_t count, std::int64_t its_step, std::int64_t step) {
    const std::int64_t left = lines - 1 - (count - 1) * its_step;
    return std::max(lines / count, left < 0 ? 0 : left / step + 1);
  }

  const RowsJob& job_;
  std::int64_t element_, load_, ahead_;
};

// Parts of about equal size, at most `most` each.
std::int64_t even_part(std::int64_t size, std::int64_t most) { return ceil_div(size, ceil_div(size, most)); }

std::int64_t images_of(const RowsJob& job) { return std::int64_t(job.samples.value) * job.channels * job.d.in_count.value; }

std::int64_t blocks_of(const RowsJob& job, const Tile& t) {
  const std::int64_t tiles = ceil_div(job.h.in_count.value, t.rows) * ceil_div(job.w.in_count.value, t.width);
  return ceil_div(images_of(job), t.group) * tiles * ceil_div(job.h.kernel, t.run) * job.d.kernel;
}

// The part of a row that a tile takes: all of it, or a multiple of 32 pixels whose line leaves room for others; 0 if none does.
std::int64_t tile_width(const RowsJob& job, const TileSizes& sizes) {
  const std::int64_t width = job.w.in_count.value, most = kTileBytes / (job.h.in_count.value > 1 || job.h.kernel > 1 ? 4 : 1);
  if (sizes.line_bytes(width) <= most) return width;
  if (sizes.line_bytes(32) > most) return sizes.line_bytes(32) <= kTileBytes ? 32 : 0;
  std::int64_t part = 32;
  while (sizes.line_bytes(2 * part) <= most) part *= 2;
  return ceil_div(even_part(width, part), 32) * 32;
}

// Pixels that keep the lanes of a block busy to the end: less than one round of all lanes, or whole rounds.
std::int64_t whole_rounds(std::int64_t pixels, int pair) {
  const std::int64_t round = kRowThreads * kUnits * pair;
  return pixels < round ? pixels : std::min(pixels / round, kRounds) * round;
}

// Smaller tiles where these would be too few to fill the device.
void shrink_tile(const RowsJob& job, Tile& t) {
  while (blocks_of(job, t) < kFewBlocks) {
    if (t.group > 1) {
      t.group = ceil_div(t.group, 2);
    } else if (t.rows > 1 && t.rows * t.width > kRun) {
      t.rows = ceil_div(t.rows, 2);
    } else if (t.run > 1) {
      t.run = ceil_div(t.run, 2);
    } else {
      return;
    }
  }
}

// False where no tile fits.
bool choose_tile(const RowsJob& job, const TileSizes& sizes, int pair, Tile& t) {
  const std::int64_t height = job.h.in_count.value, images = images_of(job);
  t = {1, 1, tile_width(job, sizes), 1};
  if (t.width == 0 || job.w.kernel > kTapTable) return false;
  const std::int64_t lines = kTileBytes / sizes.line_bytes(t.width), most_kh = kTapTable / job.w.kernel;
  t.rows = std::min({height, ceil_div(kRun, t.width), lines});
  t.run = even_part(job.h.kernel, std::min({std::int64_t(job.h.kernel), sizes.most_run(lines, t.rows), most_kh}));
  const std::int64_t rows = whole_rounds(std::min(height, sizes.most_rows(lines, t.run)) * t.width, pair) / t.width;
  t.rows = even_part(height, std::max(t.rows, rows));
  if (t.rows == height && t.width == std::int64_t(job.w.in_count.value)) {
    const std::int64_t pixels = height * t.width, planes = whole_rounds(lines / sizes.slots(t) * pixels, pair) / pixels;
    t.group = even_part(images, std::clamp<std::int64_t>(planes, 1, images));
  }
  shrink_tile(job, t);
  return true;
}

// Vectors where every line of y begins at a multiple of one and ends at one.
int load_of(const RowsJob& job, const void* y, int element) {
  const auto fits = [](std::int64_t step) { return step % kVector == 0; };
  const bool aligned = reinterpret_cast<std::uintptr_t>(y) % std::uintptr_t(kVector * element) == 0;
  const bool steps = fits(job.y_n) && fits(job.y_c) && fits(job.y_d) && fits(job.y_h) && fits(job.w.out_size);
  return job.y_w == 1 && aligned && steps ? kVector : 1;
}

void count_images(const RowsJob& job, const Tile& t, TileJob& tiles) {
  const std::int64_t channels = job.channels, samples = job.samples.value;
  // Images that lie side by side in columns follow each other, so that their pixels fill accesses together.
  const bool samples_first = job.sample_stride < job.channel_stride;
  tiles.in_d = make_divisor(job.d.in_count.value), tiles.inner = make_divisor(samples_first ? samples : channels);
  tiles.images = std::uint32_t(images_of(job)), tiles.group = std::uint32_t(t.group);
  tiles.y_begin = job.n_begin * job.y_n + job.oc_begin * job.y_c, tiles.y_d = job.y_d, tiles.y_h = job.y_h, tiles.y_w = job.y_w;
  tiles.y_inner = samples_first ? job.y_n : job.y_c, tiles.y_outer = samples_first ? job.y_c : job.y_n;
  tiles.columns_inner = samples_first ? job.sample_stride : job.channel_stride;
  tiles.columns_outer = samples_first ? job.channel_stride : job.sample_stride;
  tiles.row_stride = job.row_stride;
}

void count_lines(const RowsJob& job, const TileSizes& sizes, const Tile& t, int load, TileJob& tiles) {
  const bool shares = sizes.shares(t);
  const std::int32_t stride = std::int32_t(job.h.stride.value), dilation = job.h.dilation;
  tiles.slots = make_divisor(sizes.slots(t)), tiles.per = make_divisor(shares ? 1 : t.run);
  tiles.step_far = shares ? 1 : stride, tiles.step_near = shares ? 0 : dilation;
  tiles.slot_row = shares ? stride : std::int32_t(t.run), tiles.slot_kh = shares ? dilation : 1;
  tiles.vectors = make_divisor(sizes.positions(t.width) / load), tiles.ahead = std::int32_t(sizes.ahead());
  tiles.phase_pitch = std::int32_t(sizes.phase_pitch(t.width)), tiles.line_pitch = std::int32_t(sizes.line_pitch(t.width));
  tiles.stride_w = job.w.stride, tiles.kernel_w = make_divisor(job.w.kernel), tiles.kernel_h = job.h.kernel;
  tiles.dilation_d = job.d.dilation, tiles.dilation_h = dilation, tiles.dilation_w = job.w.dilation;
  tiles.stride_d = std::int32_t(job.d.stride.value), tiles.stride_h = stride;
  tiles.origin_d = job.d.origin, tiles.origin_h = job.h.origin, tiles.origin_w = job.w.origin;
  tiles.out_d = job.d.out_size, tiles.out_h = job.h.out_size, tiles.out_w = job.w.out_size;
}

// Returns the number of blocks.
unsigned count_pixels(const RowsJob& job, const Tile& t, int pixels, TileJob& tiles) {
  const std::int64_t units = ceil_div(t.rows * t.width, pixels), warps = ceil_div(t.group * units, 32 * kUnits);
  tiles.rows = std::int32_t(t.rows), tiles.run = std::int32_t(t.run);
  tiles.in_h = std::int32_t(job.h.in_count.value), tiles.in_w = std::int32_t(job.w.in_count.value);
  tiles.width = make_divisor(t.width), tiles.units = make_divisor(units);
  tiles.unit_warps = std::int32_t(std::min<std::int64_t>(warps, kWarps));
  tiles.runs = make_divisor(ceil_div(job.h.kernel, t.run)), tiles.kernel_d = make_divisor(job.d.kernel);
  tiles.tiles_h = make_divisor(ceil_div(tiles.in_h, t.rows)), tiles.tiles_w = make_divisor(ceil_div(tiles.in_w, t.width));
  return unsigned(blocks_of(job, t));
}

template <typename Value, typename Column>
bool launch_tiles(const Launch& launch, const RowsJob& job, const Value* y, Column* columns) {
  const int load = load_of(job, y, sizeof(Value));
  const TileSizes sizes(job, sizeof(Value), load);
  Tile t;
  if (!choose_tile(job, sizes, kPair<Column>, t) || blocks_of(job, t) >= kMost) return false;
  TileJob tiles{};
  count_images(job, t, tiles);
  count_lines(job, sizes, t, load, tiles);
  const unsigned blocks = count_pixels(job, t, kPair<Column>, tiles);
  const std::int64_t lines = t.group * sizes.slots(t), held = lines * tiles.line_pitch * std::int64_t(sizeof(Value));
  tiles.line_table = std::int32_t(ceil_div(held, 16) * 16), tiles.image_table = std::int32_t(tiles.line_table + lines * 8);
  tiles.tap_table = std::int32_t(tiles.image_table + t.group * 8);
  const int bytes = tiles.tap_table + std::int32_t(t.run * job.w.kernel * 4);
  const auto kernel = load > 1 ? im2col_tiles_kernel<Value, Column, kVector> : im2col_tiles_kernel<Value, Column, 1>;
  launch_grid("im2col", kernel, launch, {blocks, kRowThreads, bytes}, tiles, y, columns);
  return true;
}

}  // namespace

bool im2col_tiles(const Launch& launch, Dtype dtype, Dtype column_dtype, const RowsJob& job, const void* y, void* columns) {
#define UPFOLD_CASE(dtype_name, column_name, Value, Column)             \
  if (dtype == Dtype::dtype_name && column_dtype == Dtype::column_name) \
    return launch_tiles(launch, job, static_cast<const Value*>(y), static_cast<Column*>(columns));
  UPFOLD_ROW_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
  return false;
}

}  // namespace upfold::cuda
#endif
