// The planner of the fused method for heads; host code, for one source.
#pragma once

#include <algorithm>

#include "fused_heads_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostHeadsCount = std::int64_t(1) << 30;
constexpr std::int64_t kMostHeadsInputs = 256, kMostHeadsRun = 1024;  // channels of a box; units of a run
constexpr std::int64_t kHeadsAhead = 2;                               // rows that a warp has asked for
// In cycles (H200): a product of a warp, a unit beside its products; and bytes that a multiprocessor gets in one.
constexpr std::int64_t kHeadsProduct = 8, kHeadsUnit = 400, kHeadsBytes = 25;

class HeadsPlanner {
 public:
  HeadsPlanner(const Problem& p, int blocks, std::int64_t most_shared, std::int64_t alignment, int multiprocessors)
      : p_(p),
        size_(p.dtype == Dtype::kFloat32 ? 4 : 2),
        pixels_(8 * blocks),
        most_shared_(most_shared),
        aligned_(alignment % 16 == 0),
        multiprocessors_(multiprocessors) {}

  HeadsPlan plan() {
    if (!aligned_ || !is_head() || !lies_in_rows()) return plan_;
    describe();
    plan_.possible = cut();
    return plan_;
  }

 private:
  const Problem& p_;
  const std::int64_t size_, pixels_, most_shared_;
  const bool aligned_;
  const std::int64_t multiprocessors_;
  HeadsPlan plan_;

  bool is_head() const {
    for (const std::int64_t count : {p_.batch, p_.in_h, p_.out_h, p_.out_w})
      if (count >= kMostHeadsCount / 4) return false;
    if (p_.in_d * p_.out_d * p_.kernel_d != 1 || p_.pad_d != 0 || p_.groups != 1) return false;
    for (const Axis& a : {axis_h(p_), axis_w(p_)}) {
      if (a.kernel != kHeadsTaps || a.stride != kHeadsStride || a.dilation != 1 || a.in < 1) return false;
      // Outputs behind the last unit would have the bias alone.
      if (a.pad >= kMostHeadsCount / 4 || a.out + a.pad > kHeadsStride * (a.in + 1)) return false;
    }
    const std::int64_t weight = p_.in_channels * p_.w.n + p_.out_channels * p_.w.c + kHeadsTaps * (p_.w.h + p_.w.w);
    if (weight >= kMostHeadsCount) return false;
    return p_.out_channels <= kMostHeadsChannels && p_.in_channels <= kMostHeadsInputs && p_.in_channels % (32 / size_) == 0;
  }

  // Rows of x in whole vectors, of which a box holds one, of all channels.
  bool lies_in_rows() const {
    if (p_.in_w % 8 != 0 || p_.in_w > pixels_ || (pixels_ > 32 && (p_.in_w <= 32 || size_ == 4)) || p_.x.w != 1) return false;
    const std::int64_t vector = 16 / size_;
    for (const std::int64_t stride : {p_.x.c, p_.in_h == 1 ? vector : p_.x.h, p_.batch == 1 ? vector : p_.x.n})
      if (stride <= 0 || stride % vector != 0 || stride >= (std::int64_t(1) << 36)) return false;
    return true;
  }

  void describe() {
    HeadsJob& job = plan_.job;
    const std::int64_t row = p_.in_h == 1 ? 16 : p_.x.h * size_, sample = p_.batch == 1 ? 16 : p_.x.n * size_;
    plan_.x = {p_.dtype, {p_.in_w, p_.in_channels, p_.in_h, p_.batch, 1}, {p_.x.c * size_, row, sample, 16}, {}, 0, 128};
    BoxTensor& x = plan_.x;
    x.box[0] = std::int32_t(pixels_), x.box[1] = std::int32_t(p_.in_channels), x.box[2] = x.box[3] = x.box[4] = 1;
    x.swizzle = std::int32_t(pixels_ * size_);
    plan_.odd = p_.pad_w % 2 != 0;
    job.oc = std::int32_t(p_.out_channels);
    job.steps = std::int32_t(p_.in_channels * size_ / 32), job.slot_bytes = std::int32_t(p_.in_channels * pixels_ * size_);
    job.in_h = std::int32_t(p_.in_h), job.in_w = std::int32_t(p_.in_w);
    job.out_h = std::int32_t(p_.out_h), job.out_w = std::int32_t(p_.out_w), job.pad_h = std::int32_t(p_.pad_h);
    job.first_ow = -std::int32_t(p_.pad_w / 2 * 2);
    job.units = std::int32_t(std::min(ceil_div(p_.out_h + p_.pad_h, std::int64_t(kHeadsStride)), p_.in_h + 1));
    job.activation = p_.activation, job.slope = p_.activation_slope;
    job.y_n = p_.y.n, job.y_c = p_.y.c, job.y_h = p_.y.h, job.y_w = p_.y.w;
    job.w_ic = std::int32_t(p_.w.n), job.w_oc = std::int32_t(p_.w.c);
    job.w_h = std::int32_t(p_.w.h), job.w_w = std::int32_t(p_.w.w);
    job.wide = p_.y.w == 1 && (p_.y.n | p_.y.c | p_.y.h | job.first_ow) % 4 == 0;
    job.taps_together = job.w_w == 1 && (job.w_ic | job.w_oc | job.w_h) % 4 == 0;
  }

  // The fastest length of runs: each copies a row more than it has units.
  bool cut() {
    HeadsJob& job = plan_.job;
    const std::int64_t weight = job.steps * std::int64_t(2 * 64 * 16),
                       left = most_shared_ - weight - kHeadsAlignment - std::int64_t(sizeof(HeadsBarriers));
    const std::int64_t most = std::min<std::int64_t>(kMostHeadsWarps, left / (2 * job.slot_bytes));
    if (most < 1 || p_.batch * job.units >= kMostHeadsCount) return false;
    std::int64_t best = 0;
    for (std::int64_t each = 1; each <= std::min<std::int64_t>(job.units, kMostHeadsRun); ++each) {
      const std::int64_t parts = ceil_div(job.units, each), runs = p_.batch * parts;
      const std::int64_t turns = ceil_div(runs, multiprocessors_ * most), warps = ceil_div(runs, multiprocessors_ * turns);
      const std::int64_t products = turns * each * (job.steps * pixels_ / 2 * kHeadsProduct + kHeadsUnit);
      const std::int64_t cycles = products + turns * warps * (each + 1) * job.slot_bytes / kHeadsBytes;
      if (best > 0 && cycles >= best) continue;
      best = cycles;
      job.parts = make_divisor(parts), job.runs = std::int32_t(runs), job.each = std::int32_t(each);
      plan_.warps = int(warps), plan_.turns = turns;
      plan_.blocks = int(std::min(multiprocessors_, ceil_div(runs, plan_.warps * turns)));
    }
    const std::int64_t wanted = plan_.turns > 1 ? kMostHeadsSlots : job.each + 1;
    const std::int64_t slots = std::min({left / (plan_.warps * job.slot_bytes), wanted, std::int64_t(kMostHeadsSlots)});
    job.slots = std::int32_t(slots), job.ahead = std::int32_t(std::min(slots, kHeadsAhead));
    plan_.shared_bytes = int(plan_.warps * job.slots * job.slot_bytes + weight + kHeadsAlignment);
    return true;
  }
};

}  // namespace
}  // namespace upfold::cuda
