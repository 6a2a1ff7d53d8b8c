// Of the smoke program: what is no operator, copies and sums, on random sizes between guard bands.
#pragma once

#include <algorithm>
#include <cstdio>

#include "channel_sums.h"
#include "im2row.h"
#include "smoke_memory.h"
#include "to_pixels.h"

namespace upfold::cuda {
namespace {

struct Tally {
  long runs = 0, failures = 0;
  bool tells = false;
};

Strides dense(std::int64_t c, std::int64_t d, std::int64_t h, std::int64_t w, bool channels_last) {
  if (channels_last) return {c * d * h * w, 1, c * h * w, c * w, c};
  return {c * d * h * w, d * h * w, h * w, w, 1};
}

// Copies of rows, which are no operator: what lies between them stays.
void run_copy_rows(Dtype dtype, Random& random, Tally& tally) {
  const std::int64_t rows = pick(random, {1, 3, 40}), columns = pick(random, {1, 8, 37, 512});
  const Rows shape{rows, columns, columns + pick(random, {0, 8, 3}), columns + pick(random, {0, 16, 5})};
  const bool relu = pick(random, {0, 1}) != 0;
  const std::vector<float> values = integers(random, rows * shape.from_row);
  std::vector<float> expected(std::size_t(rows * shape.to_row), 2.0f);
  Buffer from(rows * shape.from_row, dtype), to(rows * shape.to_row, dtype);
  from.upload(values), to.upload(expected);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < columns; ++i) {
      const float value = values[std::size_t(row * shape.from_row + i)];
      expected[std::size_t(row * shape.to_row + i)] = relu && value < 0.0f ? 0.0f : value;
    }
  }
  copy_rows({0, 0}, dtype, shape, relu, from.data(), to.data());
  check(cudaDeviceSynchronize(), "copy_rows");
  ++tally.runs;
  if (to.download() == expected && from.guards_hold() && to.guards_hold()) return;
  ++tally.failures;
  std::printf("copy_rows of type %d: wrong values, or a guard band was written; %lld rows of %lld, %lld and %lld apart\n",
              int(dtype), (long long)rows, (long long)columns, (long long)shape.from_row, (long long)shape.to_row);
}

// The gradient of a bias, which is no operator either: planes of any alignment, and rows of channels.
void run_channel_sums(Dtype dtype, Random& random, Tally& tally) {
  if (element_bytes(dtype) > 4) return;
  const std::int64_t samples = pick(random, {1, 2, 7}), channels = pick(random, {1, 3, 16, 40}), last = pick(random, {0, 1}),
                     height = pick(random, {1, 5, 64}), width = pick(random, {1, 16, 37, 128}), pixels = height * width;
  std::vector<float> values = integers(random, samples * channels * pixels), expected(std::size_t(channels), 0.0f);
  Buffer from(samples * channels * pixels, dtype), to(channels, dtype);
  // A channel keeps about a thousand values at the most, so that bfloat16 holds its sum.
  const unsigned sparse = unsigned(std::max<std::int64_t>(4, samples * pixels / 1000));
  for (std::int64_t i = 0; i < samples * channels * pixels; ++i) {
    float& value = values[std::size_t(i)];
    if (random() % sparse != 0) value = 0.0f;
    expected[std::size_t(last ? i % channels : i / pixels % channels)] += value;
  }
  from.upload(values);
  const Strides strides = dense(channels, 1, height, width, last != 0);
  const std::int64_t alignment = pick(random, {element_bytes(dtype), 16});
  const ChannelSumsCall call(0, {dtype, samples, channels, {1, height, width}, strides, alignment});
  Buffer workspace(ceil_div(std::max<std::int64_t>(call.workspace_bytes(), 0), 4), Dtype::kFloat32);
  call.run(from.data(), to.data(), workspace.data(), 0);
  check(cudaDeviceSynchronize(), "channel_sums");
  ++tally.runs;
  if (to.download() == expected && from.guards_hold() && to.guards_hold() && workspace.guards_hold()) return;
  ++tally.failures;
  std::printf("channel_sums of type %d: wrong values, or a guard band was written; %lld x %lld x %lld x %lld, last %lld\n",
              int(dtype), (long long)samples, (long long)channels, (long long)height, (long long)width, (long long)last);
}

// Planes as pixels whose channels are innermost.
void run_to_pixels(Dtype dtype, Random& random, Tally& tally) {
  if (element_bytes(dtype) > 4) return;
  const std::int64_t samples = pick(random, {1, 3}), channels = pick(random, {8, 24, 72}), pixels = pick(random, {1, 7, 64, 200});
  const std::int64_t count = samples * channels * pixels;
  const std::vector<float> values = integers(random, count);
  std::vector<float> expected(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t pixel = i % pixels, channel = i / pixels % channels, n = i / pixels / channels;
    expected[std::size_t((n * pixels + pixel) * channels + channel)] = values[std::size_t(i)];
  }
  Buffer from(count, dtype), to(count, dtype);
  from.upload(values);
  const ToPixelsCall call(0, {dtype, samples, channels, {1, 1, pixels}, dense(channels, 1, 1, pixels, false)});
  call.run(from.data(), to.data(), 0);
  check(cudaDeviceSynchronize(), "to_pixels");
  ++tally.runs;
  if (to.download() == expected && from.guards_hold() && to.guards_hold()) return;
  ++tally.failures;
  std::printf("to_pixels of type %d: wrong values, or a guard band was written; %lld x %lld x %lld\n", int(dtype),
              (long long)samples, (long long)channels, (long long)pixels);
}

// Rows of channels of every tap, of a gradient whose channels are innermost, some of more.
void run_im2row(Problem p, Random& random, Tally& tally) {
  const std::int64_t more = pick(random, {0, 0, 8, 3}), step = p.out_channels + more, taps = kernel_taps(p);
  p.op = Operator::kConv, p.groups = 1;
  p.y = {p.out_d * p.out_h * p.out_w * step, 1, p.out_h * p.out_w * step, p.out_w * step, step};
  if (!fits_im2row(p)) return;
  const std::int64_t count = p.batch * out_pixels(p) * step, rows = p.batch * in_pixels(p) * taps * p.out_channels;
  const std::vector<float> values = integers(random, count);
  std::vector<float> expected(std::size_t(rows), 0.0f);
  const Axis axes[] = {axis_d(p), axis_h(p), axis_w(p)};
  for (std::int64_t i = 0; i < rows; ++i) {
    std::int64_t rest = i / p.out_channels, at = i % p.out_channels, tap[3], in[3];
    for (int axis = 2; axis >= 0; --axis) tap[axis] = rest % axes[axis].kernel, rest /= axes[axis].kernel;
    for (int axis = 2; axis >= 0; --axis) in[axis] = rest % axes[axis].in, rest /= axes[axis].in;
    const std::int64_t strides[] = {p.y.d, p.y.h, p.y.w};
    bool inside = true;
    for (int axis = 0; axis < 3; ++axis) {
      const std::int64_t out = in[axis] * axes[axis].stride - axes[axis].pad + tap[axis] * axes[axis].dilation;
      inside = inside && out >= 0 && out < axes[axis].out, at += out * strides[axis];
    }
    if (inside) expected[std::size_t(i)] = values[std::size_t(rest * p.y.n + at)];
  }
  Buffer from(count, p.dtype), to(rows, p.dtype);
  from.upload(values);
  im2row({0, 0}, p, from.data(), to.data());
  check(cudaDeviceSynchronize(), "im2row");
  ++tally.runs;
  if (to.download() == expected && from.guards_hold() && to.guards_hold()) return;
  ++tally.failures;
  std::printf("im2row of type %d: wrong values, or a guard band was written; %lld x %lld channels, %lld apart, to %lld pixels\n",
              int(p.dtype), (long long)p.batch, (long long)p.out_channels, (long long)step, (long long)in_pixels(p));
}

}  // namespace
}  // namespace upfold::cuda
