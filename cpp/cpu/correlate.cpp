#include "correlate.h"

#include "correlate_plan.h"
#include "weights.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// One task: the outputs of a block of samples, groups, output channels and q, all phases of them.
struct Task {
  Range groups;    // several only where a task takes all output channels of them
  Range channels;  // real output channels within each group
  Range n;
  std::int64_t qd;
  Range qh, qw;
};

template <typename T>
class Correlation {
  using Sum = typename Number<T>::Sum;
  using R = typename Number<T>::Real;
  static constexpr std::int64_t kParts = Number<T>::kParts;
  static constexpr std::int64_t kRowPhasesTogether = 4;
  // Groups are taken together up to about this many channels, so that a channels_last pixel is read and written in one piece.
  static constexpr std::int64_t kGroupedChannels = 16;

 public:
  Correlation(const Problem& p, const Operands& operands, int threads)
      : p_(p),
        is_conv_(p.op == Operator::kConv),
        channels_(group_channels<T>(p)),
        weights_(p, static_cast<const T*>(operands.w)),
        packed_weights_(static_cast<const R*>(operands.workspace)),
        bias_(is_conv_ ? nullptr : static_cast<const T*>(operands.bias)),
        out_(static_cast<T*>(is_conv_ ? operands.x : operands.y)),
        out_strides_(is_conv_ ? p.x : p.y),
        d_(axis_d(p), is_conv_),
        h_(axis_h(p), is_conv_),
        w_(axis_w(p), is_conv_),
        d_groups_(phase_group_limit(d_.axis)),
        h_groups_(phase_group_limit(h_.axis)),
        w_groups_(phase_group_limit(w_.axis)),
        d_group_count_(list_phase_groups(d_.axis, d_groups_)),
        h_group_count_(list_phase_groups(h_.axis, h_groups_)),
        w_group_count_(list_phase_groups(w_.axis, w_groups_)),
        packer_({static_cast<const T*>(is_conv_ ? operands.y : operands.x), is_conv_ ? p.y : p.x}, h_.source, w_.source,
                is_conv_ ? &h_groups_[0] : &kWhole, is_conv_ ? h_group_count_ : 1, is_conv_ ? &w_groups_[0] : &kWhole,
                is_conv_ ? w_group_count_ : 1),
        group_block_({0, p.groups}, out_strides_.w == 1 ? 1 : kGroupedChannels / larger(channels_.in, channels_.out)),
        slabs_({0, channels_.real_out()}, kSlabChannels, kTileChannels),
        out_row_(out_axis(w_)),
        blocks_(choose_blocks(shape(), h_, w_, p.batch, group_block_.count * slabs_.count * length(d_.q), threads)) {}

  std::int64_t tasks() const {
    return group_block_.count * slabs_.count * blocks_.samples.count * length(d_.q) * blocks_.h.count * blocks_.w.count;
  }

  // The scratch of one thread, in bytes.
  std::int64_t scratch_bytes() const { return parts_.end; }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const Scratch scratch(scratch_bytes());
    for (std::int64_t task = begin; task < end; ++task) run(task_of(task), scratch.data());
  }

 private:
  static constexpr PhaseGroup kWhole{0, 0, 1, 1, 0, 0};

  static Axis out_axis(const CorrelateAxis& a) { return a.is_conv ? Axis{a.axis.in, a.axis.in, 1, 1, 0, 1} : a.axis; }

  std::int64_t row_count() const { return row_layout(out_row_, 0, out_row_.out, w_group_count_).rows; }

  TaskShape shape() const {
    return {group_block_.size * slabs_.size, group_block_.size * channels_.real_in(), row_count() * summed_together(),
            depth_limit() * packer_.planes_per_depth()};
  }

  // Row phases that are summed before any is written. Written together they fill the output row after row; a stride of rows
  // between stores defeats the prefetch of the lines to be written (measured on depthwise k4s2, before it had a kernel of its
  // own: 1.7 times as long).
  std::int64_t summed_together() const { return h_.out.stride <= kRowPhasesTogether ? h_.out.stride : 1; }

  std::int64_t depth_limit() const { return smaller(d_.axis.kernel, d_.source.size); }

  Task task_of(std::int64_t index) const {
    Task task{};
    task.qw = blocks_.w[index % blocks_.w.count];
    index /= blocks_.w.count;
    task.qh = blocks_.h[index % blocks_.h.count];
    index /= blocks_.h.count;
    task.qd = d_.q.begin + index % length(d_.q);
    index /= length(d_.q);
    task.n = blocks_.samples[index % blocks_.samples.count];
    index /= blocks_.samples.count;
    // Neighbouring tasks share the weights of their slab.
    task.channels = slabs_[index % slabs_.count];
    task.groups = group_block_[index / slabs_.count];
    return task;
  }

  PackLayout pack_layout(Range qh, Range qw, std::int64_t samples, std::int64_t depths) const {
    return make_pack_layout(h_.window(qh), w_.window(qw), samples, depths * packer_.planes_per_depth());
  }

  // Offsets of the parts of the scratch. Blocks of one axis differ in size by their windows, so the largest one is taken.
  struct Parts {
    std::int64_t sums, row, staged, rows, taps, depths, end;
  };
  Parts parts() const {
    std::int64_t packed = 0, sums = 0;
    for (std::int64_t i = 0; i < blocks_.h.count; ++i) {
      for (std::int64_t j = 0; j < blocks_.w.count; ++j) {
        const PackLayout layout = pack_layout(blocks_.h[i], blocks_.w[j], blocks_.samples.size, depth_limit());
        packed = larger(packed, packed_size(layout, group_block_.size * channels_.real_in(), kTileSlack));
        sums = larger(sums, sum_pitch(layout));
      }
    }
    const auto bytes = [](std::int64_t count, std::size_t size) { return round_up(count * static_cast<std::int64_t>(size), 64); };
    const std::int64_t row = row_count() * row_pitch();
    Parts at{};
    at.sums = bytes(packed, sizeof(R));
    at.row = at.sums + bytes(sums * row_count() * summed_together() * slabs_.size * group_block_.size, sizeof(R));
    at.staged = at.row + bytes(row, sizeof(Sum));
    at.rows = at.staged + bytes(row, sizeof(T));
    at.taps = at.rows + bytes(group_block_.size * slabs_.size * out_pitch(), sizeof(T));
    at.depths = at.taps + bytes(kernel_taps(p_), sizeof(TapOffset));
    at.end = at.depths + bytes(2 * d_.axis.kernel, sizeof(std::int64_t));
    return at;
  }
  std::int64_t row_pitch() const { return round_up(blocks_.w.size, 16); }
  std::int64_t out_pitch() const { return round_up(smaller(blocks_.w.size * out_row_.stride, out_row_.out), 16); }
  static std::int64_t sum_pitch(const PackLayout& layout) { return round_up(layout.plane_pitch + kTileSlack, 16); }

  struct Buffers {
    R* packed;
    R* sums;
    Sum* row;
    T* staged;
    T* rows;
    TapOffset* taps;
    std::int64_t* depths;        // of the planes packed
    std::int64_t* depth_of_tap;  // index into depths for each kd, or -1
  };

  void run(const Task& task, unsigned char* scratch) const {
    const Parts at = parts_;
    const Buffers b{reinterpret_cast<R*>(scratch),
                    reinterpret_cast<R*>(scratch + at.sums),
                    reinterpret_cast<Sum*>(scratch + at.row),
                    reinterpret_cast<T*>(scratch + at.staged),
                    reinterpret_cast<T*>(scratch + at.rows),
                    reinterpret_cast<TapOffset*>(scratch + at.taps),
                    reinterpret_cast<std::int64_t*>(scratch + at.depths),
                    reinterpret_cast<std::int64_t*>(scratch + at.depths) + d_.axis.kernel};
    const std::int64_t depths = list_depths(d_, task.qd, b.depths, b.depth_of_tap);
    const PackLayout layout = pack_layout(task.qh, task.qw, length(task.n), depths);
    packer_.pack(layout, task.n.begin, task.groups.begin * channels_.in, length(task.groups) * channels_.in, b.depths, depths,
                 kTileSlack, b.packed);
    const Range outputs_d = d_.outputs({task.qd, task.qd + 1}), outputs_h = h_.outputs(task.qh), outputs_w = w_.outputs(task.qw);
    const RowLayout row_layout_w = row_layout(out_row_, outputs_w.begin, outputs_w.end, w_group_count_);
    for (std::int64_t od = outputs_d.begin; od < outputs_d.end; ++od) {
      // The first row of each phase; the others of a phase are stride apart.
      const std::int64_t first_rows = smaller(outputs_h.begin + h_.out.stride, outputs_h.end), together = summed_together();
      for (std::int64_t oh = outputs_h.begin; oh < first_rows; oh += together) {
        const Range phases{oh, smaller(oh + together, first_rows)};
        for (std::int64_t phase = phases.begin; phase < phases.end; ++phase) {
          sum_phase(task, layout, od, phase, phase_sums(task, layout, phase - oh, b), b);
        }
        for (std::int64_t n = 0; n < length(task.n); ++n) write_phases(task, layout, row_layout_w, {n, 0, od, 0, 0}, phases, b);
      }
    }
  }

  R* phase_sums(const Task& task, const PackLayout& layout, std::int64_t index, const Buffers& b) const {
    return b.sums + index * length(task.channels) * length(task.groups) * row_count() * sum_pitch(layout);
  }

  // Writes all rows of some phases, in order, for sample `index.n` of the task and depth index.d.
  void write_phases(const Task& task, const PackLayout& layout, const RowLayout& row, const Strides& index, Range phases,
                    const Buffers& b) const {
    const Range outputs = h_.outputs(task.qh);
    for (std::int64_t first = phases.begin; first < outputs.end; first += h_.out.stride) {
      for (std::int64_t oh = first; oh < smaller(first + length(phases), outputs.end); ++oh) {
        const std::int64_t at =
            ((oh + h_.out.pad) / h_.out.stride - task.qh.begin) * layout.w.pitch + index.n * layout.sample_pitch;
        const R* sums = phase_sums(task, layout, oh - first, b);
        write(task, row, sum_pitch(layout), sums + at, {task.n.begin + index.n, 0, index.d, oh, 0}, b);
      }
    }
  }

  // Sums of all rows of the phase of (od, oh), for all column phases.
  void sum_phase(const Task& task, const PackLayout& layout, std::int64_t od, std::int64_t oh, R* sums, const Buffers& b) const {
    const std::int64_t pitch = sum_pitch(layout), rows = row_count();
    const std::int64_t channels = length(task.channels) * length(task.groups);
    const auto clear = [pitch](R* from, std::int64_t planes) {
      std::memset(from, 0, static_cast<std::size_t>(planes * pitch) * sizeof(R));
    };
    // The first products of a phase overwrite its sums; only what no tap reaches must be cleared.
    if (!is_conv_ && w_group_count_ < rows) clear(sums, channels * rows);
    const Range outputs = h_.outputs(task.qh);
    const std::int64_t row_begin = (oh + h_.out.pad) / h_.out.stride - task.qh.begin;
    const std::int64_t row_end = row_begin + (outputs.end - 1 - oh) / h_.out.stride + 1;
    const Range ow = w_.outputs(task.qw);
    const std::int64_t phases = is_conv_ ? 1 : w_group_count_;
    for (std::int64_t g = 0; g < phases; ++g) {
      const std::int64_t phase = is_conv_ ? 0 : w_groups_[g].phase;
      const std::int64_t row = rows == 1 || is_conv_ ? 0 : w_.axis.stride <= kInterleavedStride ? phase : g;
      const std::int64_t tap_count = list_taps(task, layout, od, oh, g, b);
      if (tap_count == 0) {
        for (std::int64_t c = 0; c < channels; ++c) clear(sums + (c * rows + row) * pitch, 1);
        continue;
      }
      // The columns of this phase among the outputs of the block.
      const std::int64_t first = ceil_div(ow.begin + w_.out.pad - phase, w_.out.stride) - task.qw.begin;
      const std::int64_t last = floor_div(ow.end - 1 + w_.out.pad - phase, w_.out.stride) - task.qw.begin;
      if (first > last) continue;
      CorrelateArgs<R> args{};
      args.channels = channels_.real_in();
      args.x_pitch = layout.channel_pitch;
      args.sums_pitch = rows * pitch;
      args.begin = row_begin * layout.w.pitch + first;
      args.end = (length(task.n) - 1) * layout.sample_pitch + (row_end - 1) * layout.w.pitch + last + 1;
      for (std::int64_t group = task.groups.begin; group < task.groups.end; ++group) {
        const std::int64_t index = group - task.groups.begin;
        args.x = b.packed + layout.lead + index * channels_.real_in() * layout.channel_pitch;
        args.sums = sums + (index * length(task.channels) * rows + row) * pitch;
        sum_group(task, group, tap_count, b.taps, args);
      }
    }
  }

  // All products of one group, in blocks of at most kBlockTerms.
  void sum_group(const Task& task, std::int64_t group, std::int64_t tap_count, const TapOffset* taps,
                 CorrelateArgs<R> args) const {
    R* const sums = args.sums;
    const std::int64_t tap_block = smaller(tap_count, kBlockTerms), channel_block = kBlockTerms / tap_block;
    for (std::int64_t tap = 0; tap < tap_count; tap += tap_block) {
      args.taps = taps + tap;
      args.tap_count = smaller(tap_block, tap_count - tap);
      for (std::int64_t c = 0; c < channels_.real_in(); c += channel_block) {
        args.accumulate = tap > 0 || c > 0;
        args.channel_begin = c;
        args.channel_end = smaller(c + channel_block, channels_.real_in());
        for (std::int64_t m = task.channels.begin; m < task.channels.end;) {
          const std::int64_t width = tile_channels(task.channels.end - m);
          args.weights = packed_weights_ + weights_.offset(group, m);
          args.sums = sums + (m - task.channels.begin) * args.sums_pitch;
          correlate(width, args);
          m += width;
        }
      }
    }
  }

  // The taps of the phase (od, oh, column group g); for conv all taps, each on the plane of its phase.
  std::int64_t list_taps(const Task& task, const PackLayout& layout, std::int64_t od, std::int64_t oh, std::int64_t g,
                         const Buffers& b) const {
    const std::int64_t sign = is_conv_ ? 1 : -1;
    const std::int64_t d_phase = (od + d_.out.pad) % d_.out.stride, h_phase = (oh + h_.out.pad) % h_.out.stride;
    std::int64_t count = 0;
    for (std::int64_t gd = 0; gd < d_group_count_; ++gd) {
      const PhaseGroup& group_d = d_groups_[gd];
      if (!is_conv_ && group_d.phase != d_phase) continue;
      for (std::int64_t jd = 0; jd < group_d.count; ++jd) {
        const std::int64_t kd = group_d.first + jd * group_d.tap_step;
        if (b.depth_of_tap[kd] < 0) continue;
        for (std::int64_t gh = 0; gh < h_group_count_; ++gh) {
          const PhaseGroup& group_h = h_groups_[gh];
          if (!is_conv_ && group_h.phase != h_phase) continue;
          for (std::int64_t gw = is_conv_ ? 0 : g; gw < (is_conv_ ? w_group_count_ : g + 1); ++gw) {
            const PhaseGroup& group_w = w_groups_[gw];
            const std::int64_t plane =
                is_conv_ ? (b.depth_of_tap[kd] * h_group_count_ + gh) * w_group_count_ + gw : b.depth_of_tap[kd];
            for (std::int64_t jh = 0; jh < group_h.count; ++jh) {
              const std::int64_t kh = group_h.first + jh * group_h.tap_step;
              const std::int64_t dh = task.qh.begin + sign * (group_h.shift + jh * group_h.in_step) - layout.h.real.begin;
              for (std::int64_t jw = 0; jw < group_w.count; ++jw) {
                const std::int64_t kw = group_w.first + jw * group_w.tap_step;
                const std::int64_t dw = task.qw.begin + sign * (group_w.shift + jw * group_w.in_step) - layout.w.real.begin;
                b.taps[count++] = {plane * layout.plane_pitch + dh * layout.w.pitch + dw,
                                   (kd * h_.axis.kernel + kh) * w_.axis.kernel + kw};
              }
            }
          }
        }
      }
    }
    return count;
  }

  // Writes the outputs `index` (n, d, h) of all channels of the task, whose sums start at `first` in planes of `pitch` elements.
  void write(const Task& task, const RowLayout& row, std::int64_t pitch, const R* first, const Strides& index,
             const Buffers& b) const {
    const std::int64_t channels = length(task.channels) / kParts, count = row.end - row.begin;
    const bool dense = out_strides_.w == 1 || count == 1;
    const std::int64_t first_channel = task.groups.begin * channels_.out + task.channels.begin / kParts;
    T* out = out_ + index.n * out_strides_.n + first_channel * out_strides_.c + index.d * out_strides_.d +
             index.h * out_strides_.h + row.begin * out_strides_.w;
    for (std::int64_t c = 0; c < channels * length(task.groups); ++c) {
      const Epilogue<Sum> epilogue{bias_ ? widen(bias_[first_channel + c]) : Sum{}, is_conv_ ? Activation::kNone : p_.activation,
                                   p_.activation_slope};
      const R* sums = first + c * kParts * row.rows * pitch;
      T* to = dense ? out + c * out_strides_.c : b.rows + c * out_pitch();
      write_channel(row, epilogue, sums, pitch, b, to);
    }
    if (!dense) {
      scatter_rows(b.rows, out_pitch(), channels * length(task.groups), count, out, out_strides_.c, out_strides_.w);
    }
  }

  void write_channel(const RowLayout& row, const Epilogue<Sum>& epilogue, const R* sums, std::int64_t pitch, const Buffers& b,
                     T* to) const {
    if constexpr (kParts == 1) {
      write_row(row, w_groups_, epilogue, sums, pitch, b.staged, to);
    } else {
      const R* imaginary = sums + row.rows * pitch;
      for (std::int64_t r = 0; r < row.rows; ++r) {
        for (std::int64_t q = 0; q < row.count_q; ++q) b.row[r * row.pitch + q] = {sums[r * pitch + q], imaginary[r * pitch + q]};
      }
      write_row(row, w_groups_, epilogue, static_cast<const Sum*>(b.row), row.pitch, b.staged, to);
    }
  }

  const Problem& p_;
  const bool is_conv_;
  const GroupChannels channels_;
  const WeightPacker<T> weights_;
  const R* packed_weights_;
  const T* bias_;
  T* out_;
  const Strides out_strides_;
  const CorrelateAxis d_, h_, w_;
  const Table<PhaseGroup> d_groups_, h_groups_, w_groups_;
  const std::int64_t d_group_count_, h_group_count_, w_group_count_;
  const Packer<T> packer_;
  const Blocks group_block_, slabs_;
  const Axis out_row_;
  const TaskBlocks blocks_;
  const Parts parts_ = parts();
};

}  // namespace

template <typename T>
std::int64_t correlate_workspace_bytes(const Problem& p) {
  return WeightPacker<T>(p, nullptr).bytes();
}

template <typename T>
bool correlate_direct(const Problem& p, const Operands& operands, int threads) {
  if (!WeightPacker<T>(p, static_cast<const T*>(operands.w)).pack(operands.workspace, threads)) return false;
  const Correlation<T> correlation(p, operands, threads);
  if (correlation.scratch_bytes() > kLargestScratch) return false;
  parallel_for(correlation.tasks(), threads, correlation);
  return true;
}

#define UPFOLD_INSTANTIATE(T)                                         \
  template std::int64_t correlate_workspace_bytes<T>(const Problem&); \
  template bool correlate_direct<T>(const Problem&, const Operands&, int);
UPFOLD_INSTANTIATE(float)
UPFOLD_INSTANTIATE(double)
UPFOLD_INSTANTIATE(Half)
UPFOLD_INSTANTIATE(BFloat16)
UPFOLD_INSTANTIATE(Complex<float>)
UPFOLD_INSTANTIATE(Complex<double>)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cpu::UPFOLD_ISA
