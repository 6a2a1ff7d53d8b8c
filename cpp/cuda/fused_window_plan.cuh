// The planner of the fused method for windows; host code, for one source.
#pragma once

#include <algorithm>

#include "fused_api.h"
#include "fused_window_kernel.cuh"
#include "launch.cuh"

namespace upfold::cuda {

struct WindowPlan {
  bool possible = false;
  WindowJob job = {};
  std::int64_t blocks = 0;
  int shared_bytes = 0;
};

namespace {

constexpr std::int64_t kMostWindowCount = std::int64_t(1) << 30;  // of what the kernels keep in 32 bits
constexpr std::int64_t kLeastWindowChannels = 8;                  // fewer fill little of a step

struct WindowSize {
  std::int64_t channels, positions, split, sum_bytes, result_pitch[2];  // pitches: of 16-bit values and of float32
};
template <int... kShape>
constexpr WindowSize window_size_of() {
  using Half = WindowTile<__half, kShape...>;
  using Float = WindowTile<float, kShape...>;
  return {Half::kChannels, Half::kPositions, Half::kSplit, Half::kSumBytes, {Half::kResultPitch, Float::kResultPitch}};
}

class WindowPlanner {
 public:
  WindowPlanner(const Problem& p, const WindowSize& tile, std::int64_t most_shared, std::int64_t alignment)
      : p_(p),
        tile_(tile),
        most_shared_(most_shared),
        alignment_(alignment),
        size_(element_bytes(p.dtype)),
        forward_(p.op == Operator::kConvTranspose),
        source_(forward_ ? p.x : p.y),
        result_(forward_ ? p.y : p.x) {}

  WindowPlan plan() {
    plan_.possible = is_small() && number() && list_taps() && loads_patch() && loads_weight() && stores() && fits();
    return plan_;
  }

 private:
  const Problem& p_;
  const WindowSize tile_;
  const std::int64_t most_shared_, alignment_, size_;
  const bool forward_;
  const Strides source_, result_;
  std::int64_t period_[3] = {}, before_[3] = {}, positions_ = 0, raw_rows_ = 0;
  WindowPlan plan_;

  struct Side {
    std::int64_t size, step;
  };
  // An axis of the source and of the result, and the offsets of its first and last taps.
  struct Sides {
    Axis axis;
    Side source, result;
    std::int64_t first, step;  // offset of tap 0, and from tap to tap
    std::int64_t lowest() const { return std::min(first, first + (axis.kernel - 1) * step); }
    std::int64_t highest() const { return std::max(first, first + (axis.kernel - 1) * step); }
  };
  Sides sides(int i) const {
    const Axis a = i == 0 ? axis_d(p_) : i == 1 ? axis_h(p_) : axis_w(p_);
    const Side x{a.in, i == 0 ? p_.x.d : i == 1 ? p_.x.h : p_.x.w}, y{a.out, i == 0 ? p_.y.d : i == 1 ? p_.y.h : p_.y.w};
    if (forward_) return {a, x, y, a.pad, -a.dilation};
    return {a, y, x, -a.pad, a.dilation};
  }

  bool is_small() {
    WindowJob& job = plan_.job;
    const std::int64_t in = in_channels_per_group(p_), out = out_channels_per_group(p_);
    for (int i = 0; i < 3; ++i) {
      const Sides s = sides(i);
      if (s.axis.stride != 1 || s.axis.kernel > kMostWindowTaps || s.axis.dilation >= kMostWindowCount) return false;
      for (const Side& side : {s.source, s.result})
        if (side.size >= kMostWindowCount || side.step < 0 || side.step >= kMostWindowCount) return false;
    }
    for (const Strides& s : {source_, result_})
      if (s.n < 0 || s.c < 0 || s.n >= kMostWindowCount || s.c >= kMostWindowCount) return false;
    const std::int64_t counts[] = {p_.batch, p_.in_channels * kernel_taps(p_), p_.out_channels * kernel_taps(p_)};
    for (const std::int64_t count : counts)
      if (count >= kMostWindowCount) return false;
    job.k = std::int32_t(forward_ ? in : out), job.m = std::int32_t(forward_ ? out : in);
    job.chunks = std::int32_t(ceil_div(job.k * size_, std::int64_t(kWindowChunk)));
    job.chunks_of_tap = make_divisor(job.chunks);
    job.batch = std::int32_t(p_.batch), job.activation = forward_ ? p_.activation : Activation::kNone;
    job.slope = p_.activation_slope;
    const Sides w = sides(2);
    const bool runs = (w.source.size == 1 || w.source.step == 1) && (w.result.size == 1 || w.result.step == 1);
    return runs && job.k >= kLeastWindowChannels && kernel_taps(p_) <= kMostWindowTaps;
  }

  // Positions of all samples: rows as long as what they read and what they hold.
  bool number() {
    WindowJob& job = plan_.job;
    std::int64_t reach_source = p_.batch * source_.n + (job.k + kWindowChunk) * source_.c, count = p_.batch;
    std::int64_t reach_result = p_.batch * result_.n + (job.m + tile_.channels) * result_.c;
    for (int i = 0; i < 3; ++i) {
      const Sides s = sides(i);
      before_[i] = std::max<std::int64_t>(0, -s.lowest());
      period_[i] = std::max(before_[i] + s.source.size, s.result.size + std::max<std::int64_t>(0, s.highest()));
      if (period_[i] >= kMostWindowCount || count >= kMostWindowCount / period_[i]) return false;
      count *= period_[i];
      job.axis[i] = {make_divisor(period_[i]),    std::int32_t(before_[i]),    std::int32_t(s.source.size),
                     std::int32_t(s.result.size), std::int32_t(s.source.step), std::int32_t(s.result.step)};
      reach_source += s.source.size * s.source.step, reach_result += period_[i] * s.result.step;
    }
    if (is_one_run()) join_axes();
    positions_ = count;
    job.source_n = std::int32_t(source_.n), job.source_c = std::int32_t(source_.c);
    job.result_n = std::int32_t(result_.n), job.result_c = std::int32_t(result_.c);
    return std::max(reach_source, reach_result) < kMostWindowCount && count < kMostWindowCount / 2;
  }
  // With one tap, and planes that lie the same in both operands, all rows of a sample are one.
  bool is_one_run() const {
    if (kernel_taps(p_) != 1) return false;
    for (int i = 0; i < 3; ++i)
      if (sides(i).first != 0) return false;
    const auto dense = [&](const Strides& s) {
      return (p_.in_w == 1 || s.w == 1) && (p_.in_h == 1 || s.h == p_.in_w) && (p_.in_d == 1 || s.d == p_.in_h * p_.in_w);
    };
    return dense(source_) && dense(result_);
  }
  void join_axes() {
    const std::int64_t pixels = in_pixels(p_);
    for (int i = 0; i < 2; ++i) period_[i] = 1, plan_.job.axis[i] = {make_divisor(1), 0, 1, 1, 0, 0};
    period_[2] = pixels;
    plan_.job.axis[2] = {make_divisor(pixels), 0, std::int32_t(pixels), std::int32_t(pixels), 1, 1};
  }

  bool list_taps() {
    WindowJob& job = plan_.job;
    std::int64_t furthest = 0;
    job.taps = 0;
    const Sides axes[] = {sides(0), sides(1), sides(2)};
    for (std::int64_t d = 0; d < p_.kernel_d; ++d)
      for (std::int64_t h = 0; h < p_.kernel_h; ++h)
        for (std::int64_t w = 0; w < p_.kernel_w; ++w) {
          const std::int64_t tap[] = {d, h, w};
          std::int64_t shift = 0;
          for (int i = 0; i < 3; ++i) shift = shift * period_[i] + axes[i].first + tap[i] * axes[i].step + before_[i];
          if (shift >= kMostWindowCount) return false;
          job.shift[job.taps++] = std::int32_t(shift), furthest = std::max(furthest, shift);
        }
    job.pixels = std::int32_t(tile_.positions + furthest), job.pixel_pitch = std::int32_t(job.chunks * kWindowChunk + 16);
    return furthest < kMostWindowCount - tile_.positions;
  }

  bool loads_patch() {
    WindowJob& job = plan_.job;
    const std::int64_t row = job.axis[2].source;
    job.load = std::int32_t(size_);
    for (const std::int32_t bytes : {16, 8}) {
      const std::int64_t each = bytes / size_;
      bool whole = alignment_ % bytes == 0 && row % each == 0 && (source_.n % each == 0 || p_.batch == 1) &&
                   (source_.c % each == 0 || job.k * p_.groups == 1);
      for (int i = 0; i < 2; ++i) whole = whole && (job.axis[i].source == 1 || job.axis[i].source_step % each == 0);
      if (whole) job.load = std::max(job.load, bytes);
    }
    job.vectors = make_divisor(row * size_ / job.load);
    const std::int64_t words = job.load == size_ ? 4 : job.load;  // of channels, WindowPatch::kWords
    job.channel_sets = make_divisor(ceil_div(ceil_div(job.k * size_, std::int64_t(4)), words));
    return true;
  }

  // Taps, and channels of y, follow one another.
  bool loads_weight() {
    WindowJob& job = plan_.job;
    const Strides& w = p_.w;
    const std::int64_t taps = kernel_taps(p_), out = out_channels_per_group(p_);
    const bool dense = (p_.kernel_w == 1 || w.w == 1) && (p_.kernel_h == 1 || w.h == p_.kernel_w) &&
                       (p_.kernel_d == 1 || w.d == p_.kernel_h * p_.kernel_w) && (out == 1 || w.c == taps);
    if (!dense || w.n < 0 || w.n >= kMostWindowCount) return false;
    job.by_source = forward_, job.w_row = w.n;
    // With zeros for what fills the last chunk of the reduction.
    const std::int64_t reduced = job.chunks * kWindowChunk / size_;
    const std::int64_t length = (forward_ ? std::min<std::int64_t>(tile_.channels, job.m) : job.k) * taps;
    raw_rows_ = forward_ ? reduced : tile_.channels;
    job.raw_pitch = std::int32_t(ceil_div((forward_ ? length : reduced * taps) * size_, std::int64_t(16)) * 16);
    const std::int64_t row = job.raw_pitch / size_;
    job.raw_k = std::int32_t(forward_ ? row : taps), job.raw_m = std::int32_t(forward_ ? taps : row);
    job.unit = std::int32_t(size_);
    // Of a tile's row, of the last tile's, and from row to row.
    const std::int64_t bytes = (length | out * taps | (p_.in_channels > 1 ? w.n : 0)) * size_;
    for (const std::int32_t unit : {16, 4})
      if (alignment_ % unit == 0 && bytes % unit == 0) job.unit = std::max(job.unit, unit);
    return true;
  }

  bool stores() {
    WindowJob& job = plan_.job;
    // Where rows of the result follow one another in it as they do here, they are one run.
    std::int64_t run = job.axis[2].result, numbered = period_[2];
    if (run == numbered && (job.axis[1].result == 1 || job.axis[1].result_step == run))
      run *= job.axis[1].result, numbered *= period_[1];
    job.joined = std::int32_t(size_);
    for (const std::int32_t bytes : {16, 8}) {
      const std::int64_t each = bytes / size_;
      bool whole = alignment_ % bytes == 0 && run % each == 0 && numbered % each == 0 && tile_.positions % each == 0 &&
                   (job.m * p_.groups == 1 || result_.c % each == 0) && (p_.batch == 1 || result_.n % each == 0);
      for (int i = 0; i < 2; ++i)
        if (job.axis[i].result > 1 && !(i == 1 && run != job.axis[2].result))
          whole = whole && job.axis[i].result_step % each == 0;
      if (whole) job.joined = std::max(job.joined, bytes);
    }
    return true;
  }

  bool fits() {
    WindowJob& job = plan_.job;
    const std::int64_t channel_tiles = ceil_div(std::int64_t(job.m), tile_.channels);
    const std::int64_t blocks = ceil_div(positions_, tile_.positions) * channel_tiles;
    if (blocks >= kMostWindowCount / p_.groups) return false;
    plan_.blocks = blocks * p_.groups;
    job.groups = make_divisor(p_.groups), job.channel_tiles = make_divisor(channel_tiles);
    const std::int64_t raw = raw_rows_ * job.raw_pitch;
    const std::int64_t weight =
        std::int64_t(job.taps) * job.chunks * (kWindowChunk / 16) * (tile_.channels / 8) * kWindowPlane * 4;
    std::int64_t at = std::max(std::int64_t(job.pixels) * job.pixel_pitch, tile_.channels * tile_.result_pitch[size_ == 4]);
    if (std::max({at, raw, weight}) > most_shared_) return false;
    job.raw_at = std::int32_t(at), job.weight_at = std::int32_t(at + raw);
    at += std::max(raw + weight, tile_.sum_bytes);
    at = ceil_div(at, std::int64_t(16)) * 16;
    job.places_at = std::int32_t(at), at += tile_.positions * 4;
    plan_.shared_bytes = int(at);
    return at <= most_shared_;
  }
};

}  // namespace
}  // namespace upfold::cuda
