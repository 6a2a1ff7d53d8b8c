// A program without torch and Python that times col2im and im2col alone, on layers whose columns fill a device's memory or do
// not:
//
//   column_rates [part of a name]
//
// Prints microseconds and the rate of the bytes that must move, columns and y once each. Data sets take turns, so that more than
// a cache is touched between two uses of the same one; the median of several repeats counts.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kTouched = 400'000'000;  // bytes between two uses of the same data
constexpr int kRepeats = 7, kWarm = 2;

struct Layer {
  const char* name;
  std::int64_t batch, channels, d, h, w;
  std::int64_t kernel_d, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
  bool windows;  // rows of columns as gemm's windows leave them
};

constexpr Layer kLayers[] = {
    {"k2s2 256x256", 4, 64, 1, 256, 256, 1, 2, 2, 2, 2, 0, 0, false},
    {"k2s2 80x80", 8, 256, 1, 80, 80, 1, 2, 2, 2, 2, 0, 0, false},
    {"k2s2 14x14", 256, 256, 1, 14, 14, 1, 2, 2, 2, 2, 0, 0, false},
    {"k2s2 8x8", 12, 512, 1, 8, 8, 1, 2, 2, 2, 2, 0, 0, false},
    {"k2s2 64x64x64", 1, 32, 64, 64, 64, 2, 2, 2, 2, 2, 0, 0, false},
    {"k4s4 37x37", 4, 256, 1, 37, 37, 1, 4, 4, 4, 4, 0, 0, false},
    {"k4s2p1 32x24", 16, 256, 1, 32, 24, 1, 4, 4, 2, 2, 1, 1, false},
    {"k4s2p1 64x64", 4, 256, 1, 64, 64, 1, 4, 4, 2, 2, 1, 1, false},
    {"k16s8p4 32x32", 4, 64, 1, 32, 32, 1, 16, 16, 8, 8, 4, 4, false},
    {"k3s1p1 512x512", 2, 64, 1, 512, 512, 1, 3, 3, 1, 1, 1, 1, false},
    {"k3s1p1 511x511", 2, 64, 1, 511, 511, 1, 3, 3, 1, 1, 1, 1, false},
    {"k4s2p1 37x37", 8, 256, 1, 37, 37, 1, 4, 4, 2, 2, 1, 1, false},
    {"k5s3 37x37", 8, 256, 1, 37, 37, 1, 5, 5, 3, 3, 1, 1, false},
    {"windows k4s2p1 32x24", 16, 256, 1, 32, 25, 1, 4, 2, 2, 2, 1, 1, true},
    {"windows 3x5 128x256", 2, 128, 1, 128, 52, 1, 3, 5, 1, 5, 1, 2, true},
    {"windows 3x7 512x512", 1, 64, 1, 512, 74, 1, 3, 7, 1, 7, 1, 3, true},
};

Problem problem_of(const Layer& l, Dtype dtype) {
  Problem p{};
  p.dtype = dtype, p.batch = l.batch, p.in_channels = p.groups = 1, p.out_channels = l.channels;
  p.in_d = l.d, p.in_h = l.h, p.in_w = l.w;
  p.kernel_d = p.stride_d = l.kernel_d, p.kernel_h = l.kernel_h, p.kernel_w = l.kernel_w;
  p.stride_h = l.stride_h, p.stride_w = l.stride_w, p.pad_h = l.pad_h, p.pad_w = l.pad_w;
  p.dilation_d = p.dilation_h = p.dilation_w = 1;
  const auto out = [](const Axis& a) { return (a.in - 1) * a.stride - 2 * a.pad + a.kernel; };
  p.out_d = out(axis_d(p)), p.out_h = out(axis_h(p)), p.out_w = out(axis_w(p));
  p.y = {l.channels * out_pixels(p), out_pixels(p), p.out_h * p.out_w, p.out_w, 1};
  return p;
}

// Median microseconds of `call(set)` over sets that take turns.
template <typename Call>
double microseconds(int sets, Call call) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate"), check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<float> times;
  for (int repeat = 0; repeat < kWarm + kRepeats; ++repeat) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    for (int set = 0; set < sets; ++set) call(set);
    check(cudaEventRecord(end), "cudaEventRecord"), check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    if (repeat >= kWarm) times.push_back(milliseconds);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return 1e3 * times[times.size() / 2] / sets;
}

void measure(const Layer& l, Dtype dtype) {
  const Problem p = problem_of(l, dtype);
  const std::int64_t pixels = in_pixels(p), row = (pixels * p.batch + 7) / 8 * 8, taps = kernel_taps(p);
  const ColumnBlock block{{0, p.batch}, {0, p.out_channels}, {0, p.in_d},  {0, p.in_h}, {0, p.in_w},
                          {0, p.out_d}, {0, p.out_h},        {0, p.out_w}, pixels,      row};
  ColumnStrides strides = dense_strides(p, block);
  const std::int64_t lines = p.kernel_d * p.kernel_h;
  if (l.windows) strides = {lines * row, p.kernel_h * row, row, p.out_channels * lines * row};
  for (const bool forward : {true, false}) {
    const Dtype column_dtype = forward && element_bytes(dtype) == 2 ? Dtype::kFloat32 : dtype;
    const std::int64_t columns = taps * p.out_channels * row * element_bytes(column_dtype),
                       y = p.batch * p.y.n * element_bytes(dtype), of_set = (columns + y + 511) / 512 * 512;
    const int sets = int(kTouched / of_set + 1);
    char* memory = nullptr;
    check(cudaMalloc(&memory, std::size_t(sets * of_set)), "cudaMalloc");
    check(cudaMemset(memory, 0, std::size_t(sets * of_set)), "cudaMemset");
    const double time = microseconds(sets, [&](int set) {
      char* const from = memory + set * of_set;
      char* const image = from + (columns + 255) / 256 * 256;
      if (forward) {
        col2im({0, 0}, p, block, strides, column_dtype, from, nullptr, image);
      } else {
        im2col({0, 0}, p, block, column_dtype, image, from);
      }
    });
    check(cudaFree(memory), "cudaFree");
    std::printf("%-22s %-9s %s %9.1f us %6.0f GB/s\n", l.name, dtype == Dtype::kFloat32 ? "float32" : "bfloat16",
                forward ? "col2im" : "im2col", time, double(columns + y) / time / 1e3);
  }
}

}  // namespace
}  // namespace upfold::cuda

int main(int argc, char** argv) {
  using namespace upfold;
  const cuda::Info found = cuda::info();
  if (found.devices.empty()) {
    std::printf("no GPU: %s\n", found.no_device_reason.c_str());
    return 2;
  }
  std::printf("%s; bfloat16 reads float32 columns and writes its own\n", found.devices[0].name.c_str());
  for (const cuda::Layer& layer : cuda::kLayers) {
    if (argc > 1 && std::strstr(layer.name, argv[1]) == nullptr) continue;
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) cuda::measure(layer, dtype);
  }
  return 0;
}
