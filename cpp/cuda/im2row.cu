// im2row: a thread copies some vectors of the rows, which it writes in their order. The taps of a kernel's row are one run of y
// where they follow one another along the width, else each is one: a run begins and ends with a pixel, and so does y's row, so
// that a vector of whole channels lies in y or outside.
#include "divide.cuh"

namespace upfold::cuda {

constexpr int kThreads = 256, kAtATime = 4;  // vectors of a thread, whose loads are in flight together

// Axes are depth, height and width; distances are in vectors.
struct Im2RowJob {
  Divisor vectors, runs;  // of a run; of a row of the kernel
  Divisor kernel_h, kernel_d, in_w, in_h, in_d;
  std::uint32_t count;  // of all rows
  std::int32_t stride[3], pad[3], dilation[3], out[2];
  std::int64_t n, d, h, w, width;  // of y; what its row has
};

// So many vectors of a run, aligned as all of them: three channels of 16 bits would else be written two bytes at a time.
template <typename Vector>
struct alignas(sizeof(Vector) < 4 ? 4 * sizeof(Vector) : 16) Im2RowGroup {
  static constexpr int kVectors = sizeof(Vector) < 4 ? 4 : 16 / int(sizeof(Vector));
  Vector v[kVectors];
};

// The kTogether vectors from `at` on.
template <typename Vector, int kTogether>
__device__ __forceinline__ void read_vectors(const Im2RowJob& job, const Vector* __restrict__ y, std::uint32_t rest,
                                             Vector (&values)[kTogether]) {
  const std::int32_t in_run = std::int32_t(take(job.vectors, rest)), run = std::int32_t(take(job.runs, rest));
  const std::int32_t kh = std::int32_t(take(job.kernel_h, rest)), kd = std::int32_t(take(job.kernel_d, rest));
  const std::int32_t iw = std::int32_t(take(job.in_w, rest)), ih = std::int32_t(take(job.in_h, rest));
  const std::int32_t id = std::int32_t(take(job.in_d, rest));
  const std::int32_t od = id * job.stride[0] - job.pad[0] + kd * job.dilation[0];
  const std::int32_t oh = ih * job.stride[1] - job.pad[1] + kh * job.dilation[1];
  const std::int64_t along = (iw * job.stride[2] - job.pad[2] + run * job.dilation[2]) * job.w + in_run;
  const bool inside = od >= 0 && od < job.out[0] && oh >= 0 && oh < job.out[1];
  const Vector* const from = y + rest * job.n + od * job.d + oh * job.h + along;
#pragma unroll
  for (int i = 0; i < kTogether; ++i) values[i] = inside && along + i >= 0 && along + i < job.width ? from[i] : Vector{};
}

template <typename Vector, int kTogether>
__global__ void __launch_bounds__(kThreads)
    im2row_kernel(const Im2RowJob job, const Vector* __restrict__ y, Vector* __restrict__ rows) {
  constexpr int kSteps = kTogether > 1 ? 1 : kAtATime;
  const std::uint32_t first = (blockIdx.x * std::uint32_t(kThreads * kSteps) + threadIdx.x) * kTogether;
  Vector values[kSteps][kTogether];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const std::uint32_t at = first + std::uint32_t(i * kThreads * kTogether);
    if (at < job.count) read_vectors<Vector, kTogether>(job, y, at, values[i]);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const std::uint32_t at = first + std::uint32_t(i * kThreads * kTogether);
    if (at >= job.count) continue;
    if constexpr (kTogether == 1) {
      rows[at] = values[i][0];
    } else {
      Im2RowGroup<Vector> group;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) group.v[j] = values[i][j];
      *reinterpret_cast<Im2RowGroup<Vector>*>(rows + at) = group;
    }
  }
}

#define UPFOLD_VECTORS(DO) \
  DO(std::uint16_t, 1) DO(std::uint16_t, 4) DO(std::uint32_t, 1) DO(std::uint32_t, 4) DO(uint2, 1) DO(uint2, 2) DO(uint4, 1)
#define UPFOLD_INSTANTIATE(Vector, kTogether) \
  template __global__ void im2row_kernel<Vector, kTogether>(const Im2RowJob, const Vector*, Vector*);
UPFOLD_VECTORS(UPFOLD_INSTANTIATE)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "im2row.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostReach = std::int64_t(1) << 30;
constexpr double kMostBytes = double(std::int64_t(1) << 31);  // of rows, which are counted in vectors of two bytes or more

// From one pixel of a row to the next: of one that has no next, as if it had.
std::int64_t pixel_of(const Problem& p) { return p.out_w == 1 ? p.out_channels : p.y.w; }

// The widest vector, in bytes, of which a pixel's channels, and everything that lies apart, are whole ones.
std::int64_t vector_bytes(const Problem& p, const void* y) {
  const std::int64_t size = element_bytes(p.dtype);
  std::int64_t all = p.out_channels | pixel_of(p);
  if (p.batch > 1) all |= p.y.n;
  if (p.out_d > 1) all |= p.y.d;
  if (p.out_h > 1) all |= p.y.h;
  const std::int64_t bytes = all * size | std::int64_t(reinterpret_cast<std::uintptr_t>(y)) | 16;
  return bytes & -bytes;
}

template <typename Vector>
void launch_rows(const Launch& launch, const Problem& p, const void* y, void* rows) {
  // Complex numbers, which are aligned as their parts are, may be more than a vector.
  const auto vectors = [&](std::int64_t elements) { return elements * element_bytes(p.dtype) / std::int64_t(sizeof(Vector)); };
  const std::int64_t pixel = pixel_of(p);
  const bool joined = p.dilation_w == 1 && pixel == p.out_channels;
  const std::int64_t runs = joined ? 1 : p.kernel_w;
  const std::int64_t count = vectors(p.batch * in_pixels(p) * kernel_taps(p) * p.out_channels);
  Im2RowJob job{};
  job.vectors = make_divisor(vectors(p.out_channels * p.kernel_w / runs)), job.runs = make_divisor(runs);
  job.kernel_h = make_divisor(p.kernel_h), job.kernel_d = make_divisor(p.kernel_d);
  job.in_w = make_divisor(p.in_w), job.in_h = make_divisor(p.in_h), job.in_d = make_divisor(p.in_d);
  job.count = std::uint32_t(count);
  const Axis axes[] = {axis_d(p), axis_h(p), axis_w(p)};
  for (int i = 0; i < 3; ++i) {
    job.stride[i] = std::int32_t(axes[i].stride), job.pad[i] = std::int32_t(axes[i].pad);
    job.dilation[i] = std::int32_t(axes[i].dilation);
  }
  job.out[0] = std::int32_t(p.out_d), job.out[1] = std::int32_t(p.out_h);
  job.n = vectors(p.y.n), job.d = vectors(p.y.d), job.h = vectors(p.y.h);
  job.w = vectors(pixel), job.width = vectors(p.out_w * pixel);
  const auto run = [&](auto kernel, std::int64_t of_thread) {
    launch_kernel("im2row", kernel, launch, unsigned(ceil_div(count, kThreads * of_thread)), kThreads, job,
                  static_cast<const Vector*>(y), static_cast<Vector*>(rows));
  };
  constexpr int kTogether = Im2RowGroup<Vector>::kVectors;
  if constexpr (kTogether > 1) {
    if (job.vectors.value % kTogether == 0) return run(im2row_kernel<Vector, kTogether>, kTogether);
  }
  run(im2row_kernel<Vector, 1>, kAtATime);
}

}  // namespace

bool fits_im2row(const Problem& p) {
  if (p.groups != 1 || (p.out_channels > 1 && p.y.c != 1) || pixel_of(p) < p.out_channels) return false;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    const std::int64_t pad = a.pad < 0 ? -a.pad : a.pad;
    if (a.in * a.stride + pad + a.kernel * a.dilation >= kMostReach || a.out >= kMostReach) return false;
  }
  const double rows = double(p.batch) * double(in_pixels(p)), row = double(p.out_channels * kernel_taps(p));
  return rows * row * double(element_bytes(p.dtype)) < kMostBytes;
}

void im2row(const Launch& launch, const Problem& p, const void* y, void* rows) {
  if (p.batch == 0) return;
  switch (vector_bytes(p, y)) {
    case 2:
      return launch_rows<std::uint16_t>(launch, p, y, rows);
    case 4:
      return launch_rows<std::uint32_t>(launch, p, y, rows);
    case 8:
      return launch_rows<uint2>(launch, p, y, rows);
    default:
      return launch_rows<uint4>(launch, p, y, rows);
  }
}

}  // namespace upfold::cuda
#endif
