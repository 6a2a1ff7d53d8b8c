// The passes of one task: which outputs take which taps.
#pragma once

#include "fused_weights.h"
#include "fused_window.h"

namespace upfold::cpu::UPFOLD_ISA {

// Some taps for the outputs of one list.
struct FusedPass {
  std::int64_t list;
  std::int64_t run_begin, run_end;
  bool sets;  // the first of its outputs
};

// Room for the lists, in a thread's scratch.
struct FusedLists {
  TilePixel* pixels;
  std::int64_t* begin;  // of each list among the pixels
  TapRun* runs;
  FusedPass* passes;
  std::int64_t pass_count;
};

// Where the sums of an output lie: distances between samples, rows and columns, and the first row and column of the task.
struct FusedTarget {
  std::int64_t n, h, w;
  std::int64_t first_h, first_w;
};

struct FusedBlock {
  Range samples, qh, qw;
};

// How many pixels the lists of the largest task hold, and how many lists there are.
UPFOLD_INLINE std::int64_t listed_pixels(const FusedPlan& plan) {
  const std::int64_t rows = plan.tap_by_tap ? plan.h.base.axis.kernel : plan.h.phase_count;
  const std::int64_t columns = plan.tap_by_tap ? plan.w.base.axis.kernel : plan.w.phase_count;
  return plan.samples.size * plan.h_blocks.size * rows * plan.w_blocks.size * columns;
}
UPFOLD_INLINE std::int64_t list_count(const FusedPlan& plan) {
  return plan.tap_by_tap ? plan.h.base.axis.kernel * plan.w.base.axis.kernel : plan.h.phase_count * plan.w.phase_count;
}

class FusedLister {
 public:
  FusedLister(const FusedPlan& plan, const FusedBlock& block, const FusedWindow& window, const FusedTarget& target)
      : plan_(plan), block_(block), window_(window), target_(target) {}

  // One list for each pair of phases of h and w, or for each tap: those of its outputs.
  void list_pixels(FusedLists& lists) const {
    TilePixel* to = lists.pixels;
    for_each_list([&](std::int64_t list, const PhaseGroup& h, Range rows, const PhaseGroup& w, Range columns) {
      lists.begin[list] = to - lists.pixels;
      const Range qh = outputs_of(plan_.h, block_.qh, h, rows), qw = outputs_of(plan_.w, block_.qw, w, columns);
      to = list_rectangle(qh, h.phase, qw, w.phase, to);
      lists.begin[list + 1] = to - lists.pixels;
    });
  }

  // The passes over those lists for the outputs of one depth: `d` is its phase, kd of which depth_of_tap[kd] < 0 reads nothing.
  template <typename Weights>
  void list_passes(const Weights& weights, const PhaseGroup& d, const std::int64_t* depth_of_tap, FusedLists& lists) const {
    Writer writer{lists, plan_, 0, 0};
    for_each_list([&](std::int64_t list, const PhaseGroup& h, Range rows, const PhaseGroup& w, Range columns) {
      if (lists.begin[list] == lists.begin[list + 1]) return;
      std::int64_t depths = 0;
      for (std::int64_t jd = 0; jd < d.count; ++jd) depths += depth_of_tap[d.first + jd * d.tap_step] >= 0 ? 1 : 0;
      writer.spread(depths * length(rows) * length(columns));
      writer.start(list, !plan_.tap_by_tap);
      add_taps(weights, {d, h, w, rows, columns}, depth_of_tap, writer);
    });
    lists.pass_count = writer.finish();
  }

 private:
  // f(list, phase of h, which of its taps, phase of w, which of its taps).
  template <typename F>
  void for_each_list(const F& f) const {
    const bool single = plan_.tap_by_tap;
    std::int64_t list = 0;
    for (std::int64_t gh = 0; gh < plan_.h.phase_count; ++gh) {
      const PhaseGroup& h = plan_.h.phases[gh];
      for (std::int64_t jh = 0; jh < (single ? h.count : 1); ++jh) {
        for (std::int64_t gw = 0; gw < plan_.w.phase_count; ++gw) {
          const PhaseGroup& w = plan_.w.phases[gw];
          for (std::int64_t jw = 0; jw < (single ? w.count : 1); ++jw) {
            f(list++, h, single ? Range{jh, jh + 1} : Range{0, h.count}, w, single ? Range{jw, jw + 1} : Range{0, w.count});
          }
        }
      }
    }
  }

  Range outputs_of(const FusedAxis& axis, Range block, const PhaseGroup& phase, Range taps) const {
    if (!plan_.tap_by_tap) return axis.outputs_of(block, phase.phase);
    return axis.reached_by(block, phase.phase, phase.first + taps.begin * phase.tap_step);
  }

  TilePixel* list_rectangle(Range qh, std::int64_t phase_h, Range qw, std::int64_t phase_w, TilePixel* to) const {
    for (std::int64_t n = 0; n < length(block_.samples); ++n) {
      for (std::int64_t h = qh.begin; h < qh.end; ++h) {
        const std::int64_t x = n * window_.sample + (h * plan_.h.q_step - window_.h.begin) * window_.row;
        const std::int64_t sums = n * target_.n + (plan_.h.output(h, phase_h) - target_.first_h) * target_.h;
        for (std::int64_t w = qw.begin; w < qw.end; ++w) {
          *to++ = {x + (w * plan_.w.q_step - window_.w.begin) * window_.pixel,
                   sums + (plan_.w.output(w, phase_w) - target_.first_w) * target_.w};
        }
      }
    }
    return to;
  }

  struct Writer {
    FusedLists& lists;
    const FusedPlan& plan;
    std::int64_t runs, passes;
    std::int64_t taps = 0, most_taps = 1;
    bool is_open = false;

    // Passes of about equal size take all `count` taps.
    void spread(std::int64_t count) {
      const std::int64_t most = larger(kBlockTerms / plan.channels.chunk, 1);
      most_taps = larger(ceil_div(count, larger(ceil_div(count, most), 1)), 1);
    }

    void start(std::int64_t list, bool sets) {
      close();
      lists.passes[passes] = {list, runs, runs, sets};
      taps = 0;
      is_open = true;
    }
    void add(std::int64_t x, std::int64_t slot) {
      const std::int64_t channels = plan.channels.chunk;
      if (taps == most_taps) start(lists.passes[passes].list, false);
      ++taps;
      TapRun* last = lists.runs + runs - 1;
      const bool follows = runs > lists.passes[passes].run_begin && plan.channels.chunks == 1 &&
                           x == last->x + last->taps * channels && slot == last->slot + last->taps;
      if (follows) {
        ++last->taps;
      } else {
        lists.runs[runs++] = {x, slot, 1};
      }
    }
    void close() {
      if (is_open && runs > lists.passes[passes].run_begin) {
        lists.passes[passes].run_end = runs;
        ++passes;
      }
      is_open = false;
    }
    std::int64_t finish() {
      close();
      return passes;
    }
  };

  struct TapRanges {
    const PhaseGroup &d, &h, &w;
    Range rows, columns;
  };
  template <typename Weights>
  void add_taps(const Weights& weights, const TapRanges& taps, const std::int64_t* depth_of_tap, Writer& writer) const {
    for (std::int64_t jd = 0; jd < taps.d.count; ++jd) {
      const std::int64_t kd = taps.d.first + jd * taps.d.tap_step;
      if (depth_of_tap[kd] < 0) continue;
      for (std::int64_t jh = taps.rows.begin; jh < taps.rows.end; ++jh) {
        const std::int64_t kh = taps.h.first + jh * taps.h.tap_step;
        for (std::int64_t i = taps.columns.begin; i < taps.columns.end; ++i) {
          // In the order of their slots.
          const std::int64_t jw = plan_.is_conv ? i : taps.columns.begin + taps.columns.end - 1 - i;
          const std::int64_t kw = taps.w.first + jw * taps.w.tap_step, slot = weights.slot(kd, kh, kw);
          if (slot < 0) continue;
          writer.add(depth_of_tap[kd] * window_.depth + plan_.h.shift(kh) * window_.row + plan_.w.shift(kw) * window_.pixel,
                     slot);
        }
      }
    }
  }

  const FusedPlan& plan_;
  const FusedBlock& block_;
  const FusedWindow& window_;
  const FusedTarget& target_;
};

}  // namespace upfold::cpu::UPFOLD_ISA
