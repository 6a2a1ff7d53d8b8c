// im2col at memory speed, for 16-bit and 32-bit floats and a planar y, through shared memory.
//
// A block owns a tile of pixels (rows x width of one input plane, or whole small planes of several images), one kd and a run of
// kh. It reads the lines of y that these need once, along y, with zeros outside, and holds each line split by phase: position
// q * stride + r lies at [r][q]. What tap kw reads for neighbouring pixels then lies side by side whatever the stride, at one
// offset from where tap 0 would read it; a table holds that offset for each tap. So the loop over taps is a load from shared
// memory and a store for each value, with no test of bounds, and lanes store neighbouring pixels. Where the pixels are few the
// warps share the taps out.
#include "im2col_tiles.cuh"

namespace upfold::cuda {

struct TileBlock {
  std::uint32_t image;
  std::int32_t row, col;    // first pixel
  std::int32_t rows, cols;  // of pixels that exist
  std::int32_t kd, kh, taps;
};

constexpr std::int64_t kZero = -1;  // the place of a line outside y; those inside are not negative

// Blocks of a multiprocessor that the registers leave room for; before sm_80 it holds 1024 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kBlocks = 4;
#else
constexpr int kBlocks = 5;
#endif

UPFOLD_DEVICE TileBlock place_block(const TileJob& job, std::uint32_t rest) {
  TileBlock block;
  block.kh = std::int32_t(take(job.runs, rest)) * job.run;
  block.kd = std::int32_t(take(job.kernel_d, rest));
  block.col = std::int32_t(take(job.tiles_w, rest) * job.width.value);
  block.row = std::int32_t(take(job.tiles_h, rest)) * job.rows;
  block.image = rest * job.group;
  const std::int32_t rows = job.in_h - block.row, cols = job.in_w - block.col;
  block.rows = rows < job.rows ? rows : job.rows;
  block.cols = cols < std::int32_t(job.width.value) ? cols : std::int32_t(job.width.value);
  const std::int32_t left = job.kernel_h - block.kh;
  block.taps = (left < job.run ? left : job.run) * std::int32_t(job.kernel_w.value);
  return block;
}

// Where the lines lie in y, the images in columns, and by how many bytes each tap reads behind tap 0.
template <typename Value>
UPFOLD_DEVICE void fill_tables(const TileJob& job, const TileBlock& block, std::int64_t* line_at, std::int64_t* image_at,
                               std::int32_t* tap_at) {
  const std::uint32_t lines = job.group * job.slots.value;
  const std::int32_t oh_begin = block.row * job.stride_h + job.origin_h + block.kh * job.dilation_h;
  for (std::uint32_t line = threadIdx.x; line < lines; line += kRowThreads) {
    std::uint32_t local = line;
    std::uint32_t major = take(job.slots, local);
    const std::int32_t minor = std::int32_t(take(job.per, major));
    std::uint32_t outer = block.image + local;
    const bool exists = outer < job.images;
    const std::int32_t id = std::int32_t(take(job.in_d, outer));
    const std::uint32_t inner = take(job.inner, outer);
    const std::int32_t od = id * job.stride_d + job.origin_d + block.kd * job.dilation_d;
    const std::int32_t oh = oh_begin + std::int32_t(major) * job.step_major + minor * job.step_minor;
    const bool inside = exists && std::uint32_t(od) < std::uint32_t(job.out_d) && std::uint32_t(oh) < std::uint32_t(job.out_h);
    line_at[line] = inside ? job.y_begin + inner * job.y_inner + outer * job.y_outer + od * job.y_d + oh * job.y_h : kZero;
    if (major == 0 && minor == 0)
      image_at[local] = inner * job.columns_inner + outer * job.columns_outer + std::int64_t(id) * job.in_h * job.in_w;
  }
  for (std::int32_t tap = std::int32_t(threadIdx.x); tap < block.taps; tap += kRowThreads) {
    std::uint32_t kh = std::uint32_t(tap);
    const std::uint32_t kw = take(job.kernel_w, kh);
    std::uint32_t q = kw * job.dilation_w + job.ahead;
    const std::uint32_t r = take(job.stride_w, q);
    const std::uint32_t at = kh * job.slot_kh * job.line_pitch + r * job.phase_pitch + q;
    tap_at[tap] = std::int32_t(at * sizeof(Value));
  }
}

// Puts one vector of a line, from its position `at` on, where the phases of its elements lie.
template <typename Value, int kLoad>
UPFOLD_DEVICE void hold(const TileJob& job, Value* line, std::uint32_t at, const Pack<Value, kLoad>& values) {
  if (job.stride_w.value == 1) {
    *reinterpret_cast<Pack<Value, kLoad>*>(line + at) = values;
    return;
  }
  if constexpr (kLoad > 1) {
    if (job.stride_w.value == 2) {
      Pack<Value, kLoad / 2> phases[2];
#pragma unroll
      for (int i = 0; i < kLoad; ++i) phases[i % 2].v[i / 2] = values.v[i];
      *reinterpret_cast<Pack<Value, kLoad / 2>*>(line + at / 2) = phases[0];
      *reinterpret_cast<Pack<Value, kLoad / 2>*>(line + job.phase_pitch + at / 2) = phases[1];
      return;
    }
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
  constexpr int kBatch = kLoad == 8 ? 2 : 4;  // loads in flight
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
      if (line >= 0 && std::uint32_t(ow) < std::uint32_t(job.out_w))
        values[i] = *reinterpret_cast<const Pack<Value, kLoad>*>(y + line + ow * job.y_w);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kRowThreads < total) hold<Value, kLoad>(job, held + lines[i] * job.line_pitch, at[i], values[i]);
    }
  }
}

// A lane's unit, `columns` being those of the tile's first pixel: where its pixels lie in columns, and the bytes before what tap
// 0 reads for them. `pixels` exist; one access where `whole`.
template <typename Column>
struct Unit {
  Column* target;
  std::int32_t held[kPair<Column>];
  std::int32_t pixels;
  bool whole;
};

template <typename Value, typename Column>
UPFOLD_DEVICE Unit<Column> unit_of(const TileJob& job, const TileBlock& block, std::uint32_t number, Column* columns,
                                   const std::int64_t* image_at) {
  constexpr std::uint32_t kPixels = kPair<Column>;
  const std::uint32_t pixel = take(job.units, number) * kPixels;
  Unit<Column> unit{columns, {}, 0, false};
  if (number >= job.group || block.image + number >= job.images) return unit;
  std::uint32_t row = pixel;
  std::int32_t col = std::int32_t(take(job.width, row));
  unit.target += image_at[number] + (std::int32_t(row) * job.in_w + col);
#pragma unroll
  for (std::uint32_t i = 0; i < kPixels; ++i) {
    const bool exists = std::int32_t(row) < block.rows && col < block.cols;
    const std::int32_t slot = std::int32_t(number * job.slots.value + row * job.slot_row);
    unit.held[i] = exists ? (slot * job.line_pitch + col) * std::int32_t(sizeof(Value)) : 0;
    unit.pixels += exists ? 1 : 0;
    if (++col == std::int32_t(job.width.value)) col = 0, ++row;
  }
  // Tiles are as wide as the plane or an even number of pixels: the second pixel of a unit follows the first in columns.
  const bool aligned = reinterpret_cast<std::uintptr_t>(unit.target) % (kPixels * sizeof(Column)) == 0;
  unit.whole = unit.pixels == int(kPixels) && job.row_stride % int(kPixels) == 0 && aligned;
  return unit;
}

// Copies what every `step`-th tap from `tap` on reads for a lane's units. kWhole: each unit is one access or nothing.
template <typename Value, bool kWhole, typename Column>
UPFOLD_DEVICE void copy_taps(const Unit<Column>* units, const Value* held, const std::int32_t* tap_at, std::int32_t tap,
                             std::int32_t taps, std::int32_t step, std::int32_t row_stride) {
  constexpr int kPixels = kPair<Column>;
#pragma unroll 2
  for (; tap < taps; tap += step) {
    const char* const from = reinterpret_cast<const char*>(held) + tap_at[tap];
    const std::int32_t row = tap * row_stride;
    Pack<Column, kPixels> values[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < kPixels; ++j)
        values[i].v[j] = convert<Column>(*reinterpret_cast<const Value*>(from + units[i].held[j]));
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      Column* const to = units[i].target + row;
      if constexpr (kWhole) {
        if (units[i].whole) *reinterpret_cast<Pack<Column, kPixels>*>(to) = values[i];
      } else {
        // Rows of an odd number of pixels: every second one is aligned.
        if (units[i].pixels == kPixels && reinterpret_cast<std::uintptr_t>(to) % sizeof(values[i]) == 0) {
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

template <typename Value, typename Column>
UPFOLD_DEVICE void store_taps(const TileJob& job, const TileBlock& block, const Value* held, const std::int32_t* tap_at,
                              const std::int64_t* image_at, Column* columns) {
  const std::int32_t warp = std::int32_t(threadIdx.x / 32), lane = std::int32_t(threadIdx.x % 32);
  const std::int32_t total = std::int32_t(job.group * job.units.value), tap_warps = kWarps / job.unit_warps;
  const std::int32_t unit_warp = warp % job.unit_warps, tap_warp = warp / job.unit_warps;
  if (tap_warp >= tap_warps) return;
  for (std::int32_t first = unit_warp * 32 * kUnits; first < total; first += job.unit_warps * 32 * kUnits) {
    Unit<Column> units[kUnits];
    bool plain = true;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      units[i] = unit_of<Value>(job, block, std::uint32_t(first + i * 32 + lane), columns, image_at);
      plain &= units[i].whole || units[i].pixels == 0;
    }
    if (kPair<Column> == 1 || __all_sync(~0u, plain)) {
      copy_taps<Value, true>(units, held, tap_at, tap_warp, block.taps, tap_warps, job.row_stride);
    } else {
      copy_taps<Value, false>(units, held, tap_at, tap_warp, block.taps, tap_warps, job.row_stride);
    }
  }
}

template <typename Value, typename Column, int kLoad>
__global__ void __launch_bounds__(kRowThreads, kBlocks)
    im2col_tiles_kernel(const TileJob job, const Value* __restrict__ y, Column* __restrict__ columns) {
  extern __shared__ uint4 shared[];
  Value* const held = reinterpret_cast<Value*>(shared);
  char* const tables = reinterpret_cast<char*>(shared);
  std::int64_t* const line_at = reinterpret_cast<std::int64_t*>(tables + job.line_table);
  std::int64_t* const image_at = reinterpret_cast<std::int64_t*>(tables + job.image_table);
  std::int32_t* const tap_at = reinterpret_cast<std::int32_t*>(tables + job.tap_table);
  const TileBlock block = place_block(job, blockIdx.x);
  fill_tables<Value>(job, block, line_at, image_at, tap_at);
  __syncthreads();
  load_lines<Value, kLoad>(job, block, y, line_at, held);
  __syncthreads();
  const std::int32_t first_tap = (block.kd * job.kernel_h + block.kh) * std::int32_t(job.kernel_w.value);
  columns += std::int64_t(first_tap) * job.row_stride + std::int64_t(block.row) * job.in_w + block.col;
  store_taps(job, block, held, tap_at, image_at, columns);
}

#define UPFOLD_INSTANTIATE_LOAD(Value, Column, load) \
  template __global__ void im2col_tiles_kernel<Value, Column, load>(const TileJob, const Value*, Column*);
#define UPFOLD_INSTANTIATE(dtype, column_dtype, Value, Column) \
  UPFOLD_INSTANTIATE_LOAD(Value, Column, 1)                    \
  UPFOLD_INSTANTIATE_LOAD(Value, Column, 4)
UPFOLD_ROW_TYPES(UPFOLD_INSTANTIATE)
UPFOLD_INSTANTIATE_LOAD(__half, __half, 8)
UPFOLD_INSTANTIATE_LOAD(__half, float, 8)
UPFOLD_INSTANTIATE_LOAD(__nv_bfloat16, __nv_bfloat16, 8)
UPFOLD_INSTANTIATE_LOAD(__nv_bfloat16, float, 8)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Value, typename Column>
bool launch_tiles(const Launch& launch, const RowsJob& job, const Value* y, Column* columns) {
  const int load = load_of(job, y, sizeof(Value));
  const TileSizes sizes(job, sizeof(Value), load);
  Tile t;
  if (images_of(job) >= kMost || !choose_tile(job, sizes, kPair<Column>, t) || blocks_of(job, t) >= kMost) return false;
  TileJob tiles{};
  count_images(job, t, tiles);
  count_lines(job, sizes, t, load, tiles);
  const unsigned blocks = count_pixels(job, t, kPair<Column>, tiles);
  const std::int64_t lines = t.group * sizes.slots(t), held = lines * tiles.line_pitch * std::int64_t(sizeof(Value));
  tiles.line_table = std::int32_t(ceil_div(held, 16) * 16), tiles.image_table = std::int32_t(tiles.line_table + lines * 8);
  tiles.tap_table = std::int32_t(tiles.image_table + t.group * 8);
  const int bytes = tiles.tap_table + std::int32_t(t.run * job.w.kernel * 4);
  auto kernel = load > 1 ? im2col_tiles_kernel<Value, Column, 4> : im2col_tiles_kernel<Value, Column, 1>;
  if constexpr (sizeof(Value) == 2) {
    if (load == 8) kernel = im2col_tiles_kernel<Value, Column, 8>;
  }
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
