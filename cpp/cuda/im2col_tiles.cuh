// What a block of im2col_tiles.cu takes, and how the host chooses it.
#pragma once

#include "rows.cuh"

#ifndef __CUDACC_RTC__
#include <algorithm>
#endif

namespace upfold::cuda {

constexpr int kUnits = 4;  // of a lane at a time

// A line is a row of y as major as a tile needs it; `slot` is its number among those of one image.
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
  // Slot number s holds the line oh = first + s / per * step_major + s % per * step_minor.
  Divisor slots, per;
  std::int32_t step_major, step_minor, slot_row, slot_kh;
  // Elements of shared memory: a phase of a line, a line. Vectors of a line; positions by which it begins ahead of tap 0.
  Divisor vectors;
  std::int32_t phase_pitch, line_pitch, ahead;
  std::int32_t line_table, image_table, tap_table;  // bytes before them
  std::int32_t run, unit_warps;                     // kh of a run; warps that own different pixels
  Divisor kernel_w, stride_w;
  std::int32_t kernel_h, dilation_d, dilation_h, dilation_w, stride_d, stride_h;
  std::int32_t origin_d, origin_h, origin_w, out_d, out_h, out_w;
};

#ifndef __CUDACC_RTC__
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
  // Odd, so that neighbouring phases lie in different banks. Two phases take half vectors instead.
  std::int64_t phase_pitch(std::int64_t width) const {
    const std::int64_t pitch = ceil_div(positions(width), job_.w.stride.value);
    return job_.w.stride.value == 2 ? pitch : pitch | 1;
  }
  std::int64_t line_pitch(std::int64_t width) const {
    const std::int64_t stride = job_.w.stride.value;
    return stride == 1 ? positions(width) : phase_pitch(width) * stride;
  }
  std::int64_t line_bytes(std::int64_t width) const { return line_pitch(width) * element_ + 8; }  // and its place in y
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

// Values of an access to y: vectors where every line of y begins at a multiple of one and ends at one.
int load_of(const RowsJob& job, const void* y, int element) {
  for (int load = 16 / element; load >= 4 && job.y_w == 1; load /= 2) {
    const auto fits = [load](std::int64_t step) { return step % load == 0; };
    const bool steps = fits(job.y_n) && fits(job.y_c) && fits(job.y_d) && fits(job.y_h) && fits(job.w.out_size);
    if (steps && reinterpret_cast<std::uintptr_t>(y) % std::uintptr_t(load * element) == 0) return load;
  }
  return 1;
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
  tiles.step_major = shares ? 1 : stride, tiles.step_minor = shares ? 0 : dilation;
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

}  // namespace
#endif

}  // namespace upfold::cuda
