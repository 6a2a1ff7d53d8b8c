// Copies of x and of the weight for the product over windows (gemm_window.h): words of any type with the channels in front.
//
// Planar x and the weight: a block turns a tile of 32 positions (or rows of the weight) and 64 channels round in shared memory,
// so that both sides are runs. Channels-last x: a lane moves one access of a position.
#include "divide.cuh"
#include "values.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256, kTileWarps = kThreads / 32, kTilePositions = 32, kTileChannels = 64;

struct PixelJob {
  Divisor tiles;                       // of the places, or accesses of a place
  Divisor slots, pitch, rows, planes;  // of a position, of a row, of a plane, of a sample
  std::uint32_t places;                // [position][slot]
  std::int32_t lead;                   // positions by which the first slot reads behind
  std::int32_t positions, width, channels, padded;
  std::int64_t n, c, d, h, w;  // distances of x
};

// Where a place reads; false where it is a zero.
UPFOLD_DEVICE bool pixel_of(const PixelJob& job, std::uint32_t place, std::int64_t& offset) {
  const bool live = place < job.places;
  const std::int32_t slot = std::int32_t(take(job.slots, place)), position = std::int32_t(place) + slot - job.lead;
  const bool behind = live && position >= 0 && position < job.positions;
  std::uint32_t rest = behind ? std::uint32_t(position) : 0;
  const std::uint32_t w = take(job.pitch, rest), h = take(job.rows, rest), d = take(job.planes, rest);
  offset = rest * job.n + d * job.d + h * job.h + w * job.w;
  return behind && w < std::uint32_t(job.width);
}

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    window_turn_kernel(const PixelJob job, const Word* __restrict__ x, Word* __restrict__ to) {
  __shared__ Word tile[kTileChannels][kTilePositions + 1];
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  std::uint32_t rest = blockIdx.x;
  const std::uint32_t first = take(job.tiles, rest) * kTilePositions;
  const std::int32_t first_channel = std::int32_t(rest) * kTileChannels;
  std::int64_t offset;
  const bool live = pixel_of(job, first + std::uint32_t(lane), offset);
  x += offset + first_channel * job.c;
#pragma unroll
  for (int i = 0; i < kTileChannels / kTileWarps; ++i) {
    const std::int32_t c = warp + i * kTileWarps;
    tile[c][lane] = live && first_channel + c < job.channels ? x[c * job.c] : Word{};
  }
  __syncthreads();  // the tile is complete
  to += std::int64_t(first) * job.padded + first_channel;
  const std::int32_t channels = job.padded - first_channel;
#pragma unroll
  for (int i = 0; i < kTilePositions / kTileWarps; ++i) {
    const std::int32_t at = warp + i * kTileWarps;
#pragma unroll
    for (int c = lane; c < kTileChannels; c += 32) {
      if (first + std::uint32_t(at) < job.places && c < channels) to[std::int64_t(at) * job.padded + c] = tile[c][at];
    }
  }
}

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    window_copy_kernel(const PixelJob job, const Word* __restrict__ x, Word* __restrict__ to) {
  std::uint32_t place = blockIdx.x * kThreads + threadIdx.x;
  const std::int32_t c = std::int32_t(take(job.tiles, place));
  if (place >= job.places) return;
  std::int64_t offset;
  const bool live = pixel_of(job, place, offset);
  to[std::int64_t(place) * job.padded + c] = live && c < job.channels ? x[offset + c] : Word{};
}

struct WeightJob {
  Divisor tiles, kw, kh, kd, stride;
  std::uint32_t rows;  // (oc, kd, kh, kw)
  std::int32_t taps, full, channels, padded, lines;
  std::int64_t n, c, d, h, w;  // distances of the weight
};

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    window_weight_kernel(const WeightJob job, const Word* __restrict__ weight, Word* __restrict__ to) {
  __shared__ Word tile[kTileChannels][kTilePositions + 1];
  __shared__ std::int64_t targets[kTilePositions];
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  std::uint32_t rest = blockIdx.x;
  const std::uint32_t first = take(job.tiles, rest) * kTilePositions, row = first + std::uint32_t(lane);
  const std::int32_t first_channel = std::int32_t(rest) * kTileChannels;
  std::uint32_t oc = row < job.rows ? row : 0;
  const std::uint32_t kw = take(job.kw, oc), kh = take(job.kh, oc), kd = take(job.kd, oc);
  weight += oc * job.c + kd * job.d + kh * job.h + kw * job.w + first_channel * job.n;
#pragma unroll
  for (int i = 0; i < kTileChannels / kTileWarps; ++i) {
    const std::int32_t c = warp + i * kTileWarps;
    tile[c][lane] = row < job.rows && first_channel + c < job.channels ? weight[c * job.n] : Word{};
  }
  if (warp == 0) {
    std::uint32_t j = kw;
    const std::int32_t phase = std::int32_t(take(job.stride, j)),
                       line = std::int32_t((oc * job.kd.value + kd) * job.kh.value + kh);
    const bool full = phase < job.full;
    const std::int64_t taps = full ? job.taps : job.taps - 1, before = full ? 0 : std::int64_t(job.full) * job.lines * job.taps;
    const std::int64_t of_phase = std::int64_t(full ? phase : phase - job.full) * job.lines + line;
    targets[lane] = before + of_phase * taps + taps - 1 - std::int32_t(j);
  }
  __syncthreads();  // the tile and its targets are complete
  to += first_channel;
  const std::int32_t channels = job.padded - first_channel;
#pragma unroll
  for (int i = 0; i < kTilePositions / kTileWarps; ++i) {
    const std::int32_t at = warp + i * kTileWarps;
#pragma unroll
    for (int c = lane; c < kTileChannels; c += 32) {
      if (first + std::uint32_t(at) < job.rows && c < channels) to[targets[at] * job.padded + c] = tile[c][at];
    }
  }
}

struct AdjointJob {
  Divisor stride, kh, kd, oc, taps;
  std::int64_t elements;
  std::int64_t n, c, d, h, w;  // distances of the weight
};

// One element of the target a thread.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    window_adjoint_kernel(const AdjointJob job, const Word* __restrict__ weight, Word* __restrict__ to) {
  const std::int64_t at = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= job.elements) return;
  std::uint32_t ic = std::uint32_t(at);
  const std::uint32_t phase = take(job.stride, ic), kh = take(job.kh, ic), kd = take(job.kd, ic), oc = take(job.oc, ic);
  const std::uint32_t kw = phase + (job.taps.value - 1 - take(job.taps, ic)) * job.stride.value;
  to[at] = weight[ic * job.n + oc * job.c + kd * job.d + kh * job.h + kw * job.w];
}

// The way back of window_weight_kernel, from rows [oc][kd][kh][phase][j] of channels.
template <typename Value, typename From>
__global__ void __launch_bounds__(kThreads)
    window_result_kernel(const WeightJob job, const From* __restrict__ from, Value* __restrict__ weight) {
  __shared__ From tile[kTileChannels][kTilePositions + 1];
  const std::int32_t lane = std::int32_t(threadIdx.x % 32), warp = std::int32_t(threadIdx.x / 32);
  std::uint32_t rest = blockIdx.x;
  const std::uint32_t first = take(job.tiles, rest) * kTilePositions;
  const std::int32_t first_channel = std::int32_t(rest) * kTileChannels, channels = job.channels - first_channel;
#pragma unroll
  for (int i = 0; i < kTilePositions / kTileWarps; ++i) {
    const std::int32_t at = warp + i * kTileWarps;
    std::uint32_t line = first + std::uint32_t(at);
    if (line >= job.rows) continue;
    std::uint32_t j = take(job.kw, line);
    const std::int64_t phase = take(job.stride, j);
    const From* const source =
        from + ((line * std::int64_t(job.stride.value) + phase) * job.taps + job.taps - 1 - j) * job.padded;
#pragma unroll
    for (int c = lane; c < kTileChannels; c += 32) {
      if (c < channels) tile[c][at] = source[first_channel + c];
    }
  }
  __syncthreads();  // the tile is complete
  std::uint32_t oc = first + std::uint32_t(lane);
  if (oc >= job.rows) return;
  const std::uint32_t kw = take(job.kw, oc), kh = take(job.kh, oc), kd = take(job.kd, oc);
  weight += oc * job.c + kd * job.d + kh * job.h + kw * job.w + first_channel * job.n;
#pragma unroll
  for (int i = 0; i < kTileChannels / kTileWarps; ++i) {
    const std::int32_t c = warp + i * kTileWarps;
    if (c < channels) weight[c * job.n] = Narrow<Value>::from(tile[c][lane]);
  }
}

#define UPFOLD_RESULT_TYPES(DO)                  \
  DO(kFloat32, float, float)                     \
  DO(kFloat64, double, double)                   \
  DO(kFloat16, __half, float)                    \
  DO(kBFloat16, __nv_bfloat16, float)            \
  DO(kComplex64, Complex<float>, Complex<float>) \
  DO(kComplex128, Complex<double>, Complex<double>)
#define UPFOLD_INSTANTIATE(dtype, Value, From) \
  template __global__ void window_result_kernel<Value, From>(const WeightJob, const From*, Value*);
UPFOLD_RESULT_TYPES(UPFOLD_INSTANTIATE)
#undef UPFOLD_INSTANTIATE

#define UPFOLD_WORDS(DO) DO(std::uint16_t) DO(std::uint32_t) DO(uint2) DO(uint4)
#define UPFOLD_INSTANTIATE(Word)                                                              \
  template __global__ void window_turn_kernel<Word>(const PixelJob, const Word*, Word*);      \
  template __global__ void window_copy_kernel<Word>(const PixelJob, const Word*, Word*);      \
  template __global__ void window_adjoint_kernel<Word>(const AdjointJob, const Word*, Word*); \
  template __global__ void window_weight_kernel<Word>(const WeightJob, const Word*, Word*);
UPFOLD_WORDS(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "gemm_window.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

template <typename Body>
void with_word(std::int64_t bytes, Body body) {
#define UPFOLD_CASE(Word) \
  if (bytes == std::int64_t(sizeof(Word))) return body(Word());
  UPFOLD_WORDS(UPFOLD_CASE)
#undef UPFOLD_CASE
}

unsigned blocks_of(std::int64_t tiles, std::int64_t channels) {
  const std::int64_t blocks = tiles * ceil_div(channels, kTileChannels);
  require(blocks < std::int64_t(1) << 31, "windows of ", blocks, " tiles; the copy takes fewer than 2^31");
  return unsigned(blocks);
}

PixelJob pixel_job(const Problem& p, const Window& window, const ColumnBlock& block) {
  PixelJob job{};
  const std::int64_t rows = length(block.in_h), planes = length(block.in_d);
  const std::int64_t positions = length(block.n) * planes * rows * window.pitch, slots = window.residues == 1 ? window.taps : 1;
  const std::int64_t places = positions * slots + (slots == 1 ? window.taps - 1 : 0);
  job.tiles = make_divisor(ceil_div(places, kTilePositions)), job.pitch = make_divisor(window.pitch);
  job.slots = make_divisor(slots), job.rows = make_divisor(rows), job.planes = make_divisor(planes);
  job.places = std::uint32_t(places), job.positions = std::int32_t(positions);
  job.lead = std::int32_t(window.taps - 1), job.width = std::int32_t(p.in_w);
  job.channels = std::int32_t(p.in_channels), job.padded = std::int32_t(window.channels);
  job.n = p.x.n, job.c = p.x.c, job.d = p.x.d, job.h = p.x.h, job.w = p.x.w;
  return job;
}

// The widest access, in bytes, to which everything of a channels-last x is aligned.
std::int64_t widest(const PixelJob& job, std::int64_t element, const void* x) {
  const std::int64_t bits =
      std::int64_t(reinterpret_cast<std::uintptr_t>(x)) | (job.channels | job.n | job.d | job.h | job.w) * element | 16;
  return bits & -bits;
}

}  // namespace

void window_pixels(const Launch& launch, const Problem& p, const Window& window, const ColumnBlock& block, const void* x,
                   void* to) {
  const std::int64_t size = element_bytes(p.dtype);
  const std::int64_t at = block.n.begin * p.x.n + block.in_d.begin * p.x.d + block.in_h.begin * p.x.h;
  const void* const from = static_cast<const char*>(x) + at * size;
  PixelJob job = pixel_job(p, window, block);
  if (p.in_channels == 1 || p.x.c != 1) {
    with_word(size, [&](auto word) {
      using Word = decltype(word);
      launch_kernel("windows of x", window_turn_kernel<Word>, launch, blocks_of(job.tiles.value, job.padded), kThreads, job,
                    static_cast<const Word*>(from), static_cast<Word*>(to));
    });
    return;
  }
  const std::int64_t access = widest(job, size, from), per_access = access / size;
  job.channels /= std::int32_t(per_access), job.padded /= std::int32_t(per_access);
  job.n /= per_access, job.d /= per_access, job.h /= per_access, job.w /= per_access;
  job.tiles = make_divisor(job.padded);
  const std::int64_t accesses = std::int64_t(job.places) * job.padded;
  require(accesses < std::int64_t(1) << 31, "windows of ", accesses, " accesses; the copy takes fewer than 2^31");
  with_word(access, [&](auto word) {
    using Word = decltype(word);
    launch_kernel("windows of x", window_copy_kernel<Word>, launch, unsigned((accesses + kThreads - 1) / kThreads), kThreads, job,
                  static_cast<const Word*>(from), static_cast<Word*>(to));
  });
}

namespace {

WeightJob weight_job(const Problem& p, const Window& window) {
  WeightJob job{};
  const std::int64_t lines = p.out_channels * p.kernel_d * p.kernel_h, rows = lines * p.kernel_w;
  job.tiles = make_divisor(ceil_div(rows, kTilePositions));
  job.kw = make_divisor(p.kernel_w), job.kh = make_divisor(p.kernel_h), job.kd = make_divisor(p.kernel_d);
  job.stride = make_divisor(p.stride_w), job.rows = std::uint32_t(rows);
  job.taps = std::int32_t(window.taps), job.full = std::int32_t(window.full), job.lines = std::int32_t(lines);
  job.channels = std::int32_t(p.in_channels), job.padded = std::int32_t(window.channels);
  job.n = p.w.n, job.c = p.w.c, job.d = p.w.d, job.h = p.w.h, job.w = p.w.w;
  return job;
}

}  // namespace

void window_weight(const Launch& launch, const Problem& p, const Window& window, const void* w, void* to) {
  const WeightJob job = weight_job(p, window);
  with_word(element_bytes(p.dtype), [&](auto word) {
    using Word = decltype(word);
    launch_kernel("windows of the weight", window_weight_kernel<Word>, launch, blocks_of(job.tiles.value, job.padded), kThreads,
                  job, static_cast<const Word*>(w), static_cast<Word*>(to));
  });
}

void window_weight_adjoint(const Launch& launch, const Problem& p, const Window& window, const void* w, void* to) {
  const std::int64_t elements = p.in_channels * p.out_channels * kernel_taps(p);
  require(elements < std::int64_t(1) << 31, "windows of a weight of ", elements, " elements; the copy takes fewer than 2^31");
  const AdjointJob job{make_divisor(p.stride_w),
                       make_divisor(p.kernel_h),
                       make_divisor(p.kernel_d),
                       make_divisor(p.out_channels),
                       make_divisor(window.taps),
                       elements,
                       p.w.n,
                       p.w.c,
                       p.w.d,
                       p.w.h,
                       p.w.w};
  with_word(element_bytes(p.dtype), [&](auto word) {
    using Word = decltype(word);
    launch_kernel("windows of the weight", window_adjoint_kernel<Word>, launch, unsigned((elements + kThreads - 1) / kThreads),
                  kThreads, job, static_cast<const Word*>(w), static_cast<Word*>(to));
  });
}

void window_weight_result(const Launch& launch, const Problem& p, const Window& window, const void* from, void* w) {
  const WeightJob job = weight_job(p, window);
#define UPFOLD_CASE(dtype_name, Value, From)                                                                      \
  if (p.dtype == Dtype::dtype_name) {                                                                             \
    return launch_kernel("gradient of the weight", window_result_kernel<Value, From>, launch,                     \
                         blocks_of(job.tiles.value, job.channels), kThreads, job, static_cast<const From*>(from), \
                         static_cast<Value*>(w));                                                                 \
  }
  UPFOLD_RESULT_TYPES(UPFOLD_CASE)
#undef UPFOLD_CASE
}

}  // namespace upfold::cuda
#endif
