#include "depthwise.h"

#include "correlate_plan.h"
#include "depthwise_rows.h"
#include "weights.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// One task: the outputs of one sample, group, q of the depth and block of q of the rows and columns.
struct Task {
  std::int64_t n, group, qd;
  Range qh, qw;
};

// Whether all w phases have as many taps, of the same pixels.
bool shares_taps(const Problem& p) {
  const bool whole = p.stride_w == 1 || (p.kernel_w % p.stride_w == 0 && p.dilation_w == 1);
  return whole && has_shared_taps(p.stride_w, p.pad_w % p.stride_w);
}

// With stride 1 there is nothing to interleave, and beyond this many products an output the wider tiles of correlate_direct win.
constexpr std::int64_t kFewProducts = 16;

// Products summed in one output, at most.
std::int64_t products(const Problem& p) {
  std::int64_t count = 1;
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) count *= phase_taps(a, 0).count;
  return count;
}

template <typename T>
class Depthwise {
  using R = typename Number<T>::Real;
  // The packed rows of a task should stay in the first-level cache beside the outputs on their way.
  static constexpr std::int64_t kPacked = 24576 / static_cast<std::int64_t>(sizeof(R));
  static constexpr std::int64_t kLongestRow = 2048;

 public:
  Depthwise(const Problem& p, const Operands& operands)
      : p_(p),
        channels_(group_channels<T>(p)),
        weights_(p, static_cast<const T*>(operands.w)),
        packed_weights_(static_cast<const R*>(operands.workspace)),
        bias_(static_cast<const T*>(operands.bias)),
        out_(static_cast<T*>(operands.y)),
        d_(axis_d(p), false),
        h_(axis_h(p), false),
        w_(axis_w(p), false),
        d_groups_(phase_group_limit(d_.axis)),
        h_groups_(phase_group_limit(h_.axis)),
        w_groups_(phase_group_limit(w_.axis)),
        d_group_count_(list_phase_groups(d_.axis, d_groups_)),
        h_group_count_(list_phase_groups(h_.axis, h_groups_)),
        w_group_count_(list_phase_groups(w_.axis, w_groups_)),
        has_shared_taps_(shares_taps(p)),
        packer_({static_cast<const T*>(operands.x), p.x}, h_.source, w_.source, &kWhole, 1, &kWhole, 1),
        w_blocks_(w_.q, length(w_.q) <= 2 * kLongestRow ? length(w_.q) : row_block(w_, kLongestRow)),
        h_blocks_(h_.q, row_count()) {}

  std::int64_t tasks() const { return p_.batch * p_.groups * length(d_.q) * h_blocks_.count * w_blocks_.count; }

  std::int64_t scratch_bytes() const { return parts_.end; }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const Scratch scratch(scratch_bytes());
    for (std::int64_t task = begin; task < end; ++task) run(task_of(task), scratch.data());
  }

 private:
  static constexpr PhaseGroup kWhole{0, 0, 1, 1, 0, 0};

  std::int64_t depth_limit() const { return smaller(d_.axis.kernel, d_.source.size); }
  // The rows of a block. Neighbouring blocks pack their shared reach twice, so a block is at least as long as that.
  std::int64_t row_count() const {
    const std::int64_t rows = kPacked / (pack_layout(h_.q, w_blocks_[0], 1).w.pitch * depth_limit());
    return larger(rows - h_.reach, smaller(h_.reach, 64));
  }

  // The phases of w that have one list of taps.
  std::int64_t phases_sharing() const { return has_shared_taps_ ? w_.out.stride : 1; }
  std::int64_t segments() const { return d_group_count_ * h_group_count_ * (w_.out.stride / phases_sharing()); }
  // The phase of the first output of a block.
  std::int64_t head(Range qw) const { return w_.outputs(qw).begin + w_.out.pad - qw.begin * w_.out.stride; }

  // Neighbouring tasks write neighbouring rows.
  Task task_of(std::int64_t index) const {
    Task task{};
    task.qw = w_blocks_[index % w_blocks_.count];
    index /= w_blocks_.count;
    task.qh = h_blocks_[index % h_blocks_.count];
    index /= h_blocks_.count;
    task.qd = d_.q.begin + index % length(d_.q);
    index /= length(d_.q);
    task.group = index % p_.groups;
    task.n = index / p_.groups;
    return task;
  }

  PackLayout pack_layout(Range qh, Range qw, std::int64_t depths) const {
    Window w = w_.window(qw);
    w.pitch = round_up(w.pitch, 16);
    return make_pack_layout(h_.window(qh), w, 1, depths);
  }

  // Offsets of the parts of the scratch.
  struct Parts {
    std::int64_t sums, weights, offsets, taps, begin, depths, end;
  };
  Parts parts() const {
    std::int64_t packed = 0;
    for (std::int64_t i = 0; i < h_blocks_.count; ++i) {
      for (std::int64_t j = 0; j < w_blocks_.count; ++j) {
        packed = larger(packed, packed_size(pack_layout(h_blocks_[i], w_blocks_[j], depth_limit()), 1, kRowSlack));
      }
    }
    const auto bytes = [](std::int64_t count, std::size_t size) { return round_up(count * static_cast<std::int64_t>(size), 64); };
    Parts at{};
    at.sums = bytes(packed, sizeof(R));
    at.weights = at.sums + bytes(smaller(w_blocks_.size * w_.out.stride, w_.out.size), sizeof(R));
    at.offsets = at.weights + bytes(kernel_taps(p_), sizeof(R));
    at.taps = at.offsets + bytes(kernel_taps(p_), sizeof(std::int64_t));
    at.begin = at.taps + bytes(kernel_taps(p_), sizeof(std::int64_t));
    at.depths = at.begin + bytes(segments() + 1, sizeof(std::int64_t));
    at.end = at.depths + bytes(2 * d_.axis.kernel, sizeof(std::int64_t));
    return at;
  }

  struct Buffers {
    R* packed;
    R* sums;
    R* weights;                  // of one output channel, in the order of taps
    std::int64_t* offsets;       // of the taps' pixels
    std::int64_t* taps;          // ordered by phases of d, h and w
    std::int64_t* begin;         // of the taps of each pair of phases of d and h, or of each phase of w within them
    std::int64_t* depths;        // of the planes packed
    std::int64_t* depth_of_tap;  // index into depths for each kd, or -1
  };

  void run(const Task& task, unsigned char* scratch) const {
    const Parts& at = parts_;
    const auto indices = [scratch](std::int64_t offset) { return reinterpret_cast<std::int64_t*>(scratch + offset); };
    const Buffers b{reinterpret_cast<R*>(scratch),
                    reinterpret_cast<R*>(scratch + at.sums),
                    reinterpret_cast<R*>(scratch + at.weights),
                    indices(at.offsets),
                    indices(at.taps),
                    indices(at.begin),
                    indices(at.depths),
                    indices(at.depths) + d_.axis.kernel};
    const std::int64_t depths = list_depths(d_, task.qd, b.depths, b.depth_of_tap);
    const PackLayout layout = pack_layout(task.qh, task.qw, depths);
    packer_.pack(layout, task.n, task.group, 1, b.depths, depths, kRowSlack, b.packed);
    list_taps(task, layout, b);
    for (std::int64_t m = 0; m < channels_.out; ++m) {
      read_weights(task.group, m, b);
      write_channel(task, layout, m, b);
    }
  }

  // The taps of each pair of phases of d and h, in ascending order, and for each of them those of the w phases.
  void list_taps(const Task& task, const PackLayout& layout, const Buffers& b) const {
    const std::int64_t stride = w_.out.stride, first = head(task.qw);
    std::int64_t count = 0, segment = 0;
    for (std::int64_t gd = 0; gd < d_group_count_; ++gd) {
      for (std::int64_t gh = 0; gh < h_group_count_; ++gh) {
        const RowTaps rows{d_groups_[gd], h_groups_[gh], task.qh.begin, task.qw.begin, layout, b};
        if (has_shared_taps_) {
          b.begin[segment++] = count;
          count = list_shared_taps(rows, first, count);
          continue;
        }
        for (std::int64_t r = 0; r < stride; ++r) {
          b.begin[segment++] = count;
          count = list_own_taps(rows, (first + r) % stride, (first + r) / stride, count);
        }
      }
    }
    b.begin[segment] = count;
  }

  // The taps of one phase of d and one of h: f(offset of a row of pixels, its first tap).
  struct RowTaps {
    const PhaseGroup &d, &h;
    std::int64_t qh, qw;
    const PackLayout& layout;
    const Buffers& b;
  };
  template <typename F>
  void for_each_row(const RowTaps& rows, const F& f) const {
    for (std::int64_t jd = 0; jd < rows.d.count; ++jd) {
      const std::int64_t kd = rows.d.first + jd * rows.d.tap_step, plane = rows.b.depth_of_tap[kd];
      if (plane < 0) continue;
      for (std::int64_t jh = 0; jh < rows.h.count; ++jh) {
        const std::int64_t kh = rows.h.first + jh * rows.h.tap_step;
        const std::int64_t dh = rows.qh - rows.h.shift - jh * rows.h.in_step - rows.layout.h.real.begin;
        const std::int64_t dw = rows.qw - rows.layout.w.real.begin;
        f(plane * rows.layout.plane_pitch + dh * rows.layout.w.pitch + dw, (kd * h_.axis.kernel + kh) * w_.axis.kernel);
      }
    }
  }

  std::int64_t list_shared_taps(const RowTaps& rows, std::int64_t first, std::int64_t count) const {
    const std::int64_t stride = w_.out.stride;
    for_each_row(rows, [&](std::int64_t offset, std::int64_t tap) {
      for (std::int64_t jw = 0; jw < w_groups_[0].count; ++jw, ++count) {
        rows.b.offsets[count] = offset - jw * w_groups_[0].in_step;
        for (std::int64_t r = 0; r < stride; ++r) rows.b.taps[count * stride + r] = tap + (first + r) % stride + jw * stride;
      }
    });
    return count;
  }

  std::int64_t list_own_taps(const RowTaps& rows, std::int64_t phase, std::int64_t passed, std::int64_t count) const {
    const std::int64_t g = group_of(w_groups_, w_group_count_, phase);
    if (g == w_group_count_) return count;
    const PhaseGroup& w = w_groups_[g];
    for_each_row(rows, [&](std::int64_t offset, std::int64_t tap) {
      for (std::int64_t jw = 0; jw < w.count; ++jw, ++count) {
        rows.b.offsets[count] = offset + passed - w.shift - jw * w.in_step;
        rows.b.taps[count] = tap + w.first + jw * w.tap_step;
      }
    });
    return count;
  }

  void read_weights(std::int64_t group, std::int64_t m, const Buffers& b) const {
    // The block of packed weights that holds m, and its width.
    std::int64_t first = m / kTileChannels * kTileChannels, width = tile_channels(channels_.out - first);
    while (m >= first + width) {
      first += width;
      width = tile_channels(channels_.out - first);
    }
    const R* packed = packed_weights_ + weights_.offset(group, first) + m - first;
    const std::int64_t count = b.begin[segments()] * phases_sharing();
    for (std::int64_t t = 0; t < count; ++t) b.weights[t] = packed[b.taps[t] * width];
  }

  static std::int64_t group_of(const Table<PhaseGroup>& groups, std::int64_t count, std::int64_t phase) {
    std::int64_t g = 0;
    while (g < count && groups[g].phase != phase) ++g;
    return g;
  }

  // Writes the rows of output channel m of the task's group, in order.
  void write_channel(const Task& task, const PackLayout& layout, std::int64_t m, const Buffers& b) const {
    const Range outputs_d = d_.outputs({task.qd, task.qd + 1}), outputs_h = h_.outputs(task.qh), ow = w_.outputs(task.qw);
    const std::int64_t channel = task.group * channels_.out + m, count = length(ow), head_w = head(task.qw);
    const Epilogue<R> epilogue{bias_ ? widen(bias_[channel]) : R(0), p_.activation, p_.activation_slope};
    RowArgs<R> row{};
    for (std::int64_t od = outputs_d.begin; od < outputs_d.end; ++od) {
      const std::int64_t gd = group_of(d_groups_, d_group_count_, phase_of(d_.axis, od));
      T* out = out_ + task.n * p_.y.n + channel * p_.y.c + od * p_.y.d + outputs_h.begin * p_.y.h + ow.begin;
      row.x = b.packed + layout.lead;
      std::int64_t phase = phase_of(h_.axis, outputs_h.begin);
      for (std::int64_t oh = outputs_h.begin; oh < outputs_h.end; ++oh, out += p_.y.h) {
        const std::int64_t gh = group_of(h_groups_, h_group_count_, phase);
        if (gd == d_group_count_ || gh == h_group_count_) {
          fill(epilogue, count, out);
        } else {
          set_taps(gd * h_group_count_ + gh, b, row);
          write_row(row, head_w, epilogue, count, b.sums, out);
        }
        if (++phase == h_.out.stride) {
          phase = 0;
          row.x += layout.w.pitch;
        }
      }
    }
  }

  void set_taps(std::int64_t phases, const Buffers& b, RowArgs<R>& row) const {
    const std::int64_t first = has_shared_taps_ ? b.begin[phases] : 0;
    row.offsets = b.offsets + first;
    row.weights = b.weights + first * phases_sharing();
    row.count = has_shared_taps_ ? b.begin[phases + 1] - first : 0;
    row.begin = b.begin + phases * w_.out.stride;
  }

  // A row that no tap reaches.
  static void fill(const Epilogue<R>& epilogue, std::int64_t count, T* out) {
    const R no_tap(0);
    T value{};
    finish_row(epilogue, &no_tap, 1, &value);
    for (std::int64_t i = 0; i < count; ++i) out[i] = value;
  }

  void write_row(RowArgs<R>& row, std::int64_t head, const Epilogue<R>& epilogue, std::int64_t count, R* sums, T* out) const {
    if constexpr (std::is_same_v<T, R>) {
      if (epilogue.kind == Activation::kNone) {
        row.bias = epilogue.bias;
        return sum_row_any(row, head, count, out);
      }
    }
    sum_row_any(row, head, count, sums);
    finish_row(epilogue, sums, count, out);
  }

  void sum_row_any(const RowArgs<R>& row, std::int64_t head, std::int64_t count, R* out) const {
    if (has_shared_taps_) return sum_shared_any(w_.out.stride, head, row, count, out);
    return sum_row<R, 2, OwnTaps<R, 2>>(row, count, out);
  }

  const Problem& p_;
  const GroupChannels channels_;
  const WeightPacker<T> weights_;
  const R* packed_weights_;
  const T* bias_;
  T* out_;
  const CorrelateAxis d_, h_, w_;
  const Table<PhaseGroup> d_groups_, h_groups_, w_groups_;
  const std::int64_t d_group_count_, h_group_count_, w_group_count_;
  const bool has_shared_taps_;
  const Packer<T> packer_;
  const Blocks w_blocks_, h_blocks_;
  const Parts parts_ = parts();
};

}  // namespace

template <typename T>
bool is_depthwise(const Problem& p) {
  if (p.op != Operator::kConvTranspose || p.in_channels != p.groups || Number<T>::kParts != 1) return false;
  if (p.stride_w != 2 && !shares_taps(p)) return false;
  return p.out_w >= p.stride_w * kLanes<typename Number<T>::Real> && p.y.w == 1 && p.x.w == 1 &&
         products(p) <= (p.stride_w == 1 ? kFewProducts : kBlockTerms);
}

template <typename T>
bool depthwise_direct(const Problem& p, const Operands& operands, int threads) {
  if constexpr (Number<T>::kParts == 1) {
    if (!WeightPacker<T>(p, static_cast<const T*>(operands.w)).pack(operands.workspace, threads)) return false;
    const Depthwise<T> depthwise(p, operands);
    if (depthwise.scratch_bytes() > kLargestScratch) return false;
    parallel_for(depthwise.tasks(), threads, depthwise);
    return true;
  } else {
    static_cast<void>(p), static_cast<void>(operands), static_cast<void>(threads);
    return false;
  }
}

#define UPFOLD_INSTANTIATE(T)                    \
  template bool is_depthwise<T>(const Problem&); \
  template bool depthwise_direct<T>(const Problem&, const Operands&, int);
UPFOLD_INSTANTIATE(float)
UPFOLD_INSTANTIATE(double)
UPFOLD_INSTANTIATE(Half)
UPFOLD_INSTANTIATE(BFloat16)
UPFOLD_INSTANTIATE(Complex<float>)
UPFOLD_INSTANTIATE(Complex<double>)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cpu::UPFOLD_ISA
