// Where the fused gradient of the input reads words of y in the order of the weight as it lies; host code, for its planner.
#pragma once

#include "fused_input_cost.cuh"

namespace upfold::cuda {
namespace {

struct InputWords {
  const Problem& p;
  const InputJob& job;  // whose boxes are chosen
  std::int64_t element, alignment;

  // Whether the words of a row of the weight, as it lies, are taps that follow one another in y too (two of 16 bits), and the
  // lanes' places in a step are those of every other step, moved: where a channel's words divide those of two steps.
  bool can_read() const {
    const std::int64_t taps = kernel_taps(p), bytes = taps * element, row = std::int64_t(job.oc) * taps;
    if (alignment % 16 != 0 || bytes % 4 != 0 || 64 % bytes != 0) return false;
    if (element == 2 && (p.kernel_w % 2 != 0 || p.dilation_w != 1 || p.stride_w % 2 != 0 || job.skew % 2 != 0)) return false;
    return job.run && p.w.n >= row && p.w.n * element % 16 == 0 && p.in_channels < kMostInputCount;
  }

  // Bytes from a lane's pixel to a word of its taps, counted over channels.
  std::int64_t at(std::int64_t word, std::int64_t pitch) const {
    const std::int64_t taps = kernel_taps(p), number = word * 4 / element, tap = number % taps;
    const std::int64_t kw = tap % p.kernel_w, kh = tap / p.kernel_w % p.kernel_h, kd = tap / p.kernel_w / p.kernel_h;
    const std::int64_t row = kd * p.dilation_d * job.axis[1].extent.value + kh * p.dilation_h;
    return number / taps * pitch + (row * job.span + kw * p.dilation_w + job.skew) * element;
  }
  // Once a chunk is planned.
  void place(int channels, InputPlan& plan) const {
    InputJob& job = plan.job;
    for (int i = 0; i < 4; ++i) job.word_from[i] = std::int32_t(at(i, job.pitch));
    const auto moved = [&](int words) { return std::int32_t(at(words, job.pitch) - at(0, job.pitch)); };
    job.word_second = moved(4), job.word_step = moved(8), job.word_steps = moved(16);
    BoxTensor& w = plan.weight;
    w.dtype = p.dtype, w.swizzle = w.burst = 128;
    for (int i = 0; i < 5; ++i) w.sizes[i] = w.box[i] = 1;
    w.sizes[0] = job.oc * kernel_taps(p), w.sizes[1] = p.in_channels;
    w.box[0] = std::int32_t(128 / element), w.box[1] = std::int32_t(channels);
    for (std::int64_t& stride : w.strides) stride = p.w.n * element;
  }
};

}  // namespace
}  // namespace upfold::cuda
