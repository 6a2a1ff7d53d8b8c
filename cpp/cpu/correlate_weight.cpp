#include "correlate_weight.h"

#include "correlate_plan.h"
#include "dot_tile.h"
#include "parallel.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// The reduction is cut into blocks of pixels (sums in the planes' precision, one per vector lane), the blocks into chunks (sums
// in double), and the chunks are added in order. None of these depends on the number of threads.
constexpr std::int64_t kLargestBlock = 2048;  // pixels
constexpr std::int64_t kSmallestBlock = 256;
constexpr std::int64_t kBlockElements = 98304;  // packed elements of x and y, to stay in the second-level cache
constexpr std::int64_t kTasksWanted = 64;
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;  // of all chunks, unless one alone takes more

template <typename T>
class WeightCorrelation {
  using R = typename Number<T>::Real;
  static constexpr std::int64_t kParts = Number<T>::kParts;
  static constexpr std::int64_t kGroupedChannels = 16;
  static constexpr std::int64_t kSlabX = 64, kSlabY = 32;  // channels of one task

 public:
  WeightCorrelation(const Problem& p, const Operands& operands)
      : p_(p),
        w_out_(static_cast<T*>(operands.w)),
        partial_(static_cast<double*>(operands.workspace)),
        ic_(in_channels_per_group(p)),
        oc_(out_channels_per_group(p)),
        taps_(kernel_taps(p)),
        d_(axis_d(p), true),
        h_(axis_h(p), true),
        w_(axis_w(p), true),
        h_groups_(phase_group_limit(h_.axis)),
        w_groups_(phase_group_limit(w_.axis)),
        h_group_count_(list_phase_groups(h_.axis, h_groups_)),
        w_group_count_(list_phase_groups(w_.axis, w_groups_)),
        x_packer_({static_cast<const T*>(operands.x), p.x}, {p.in_h, 1, 0}, {p.in_w, 1, 0}, &kWhole, 1, &kWhole, 1),
        y_packer_({static_cast<const T*>(operands.y), p.y}, h_.source, w_.source, &h_groups_[0], h_group_count_, &w_groups_[0],
                  w_group_count_),
        group_block_({0, p.groups}, kGroupedChannels / larger(ic_, oc_)),
        x_slabs_({0, ic_}, kSlabX / kParts),
        y_slabs_({0, oc_}, kSlabY / kParts),
        blocks_(choose_reduction_blocks()),
        chunk_count_(choose_chunk_count()) {}

  std::int64_t chunk_count() const { return chunk_count_; }
  std::int64_t tasks() const { return chunk_count_ * group_block_.count * x_slabs_.count * y_slabs_.count; }
  std::int64_t partial_bytes() const { return chunk_count_ * partial_size() * static_cast<std::int64_t>(sizeof(double)); }

  // Sums of the chunks' blocks, into the workspace.
  void operator()(std::int64_t begin, std::int64_t end) const {
    const Scratch scratch(parts().end);
    for (std::int64_t task = begin; task < end; ++task) run(task, scratch.data());
  }

  // The weights of (group, ic) numbers [begin, end) from the sums of the chunks.
  void finish(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t ic = begin; ic < end; ++ic) {
      std::int64_t tap = 0;
      for (std::int64_t kd = 0; kd < p_.kernel_d; ++kd) {
        for (std::int64_t kh = 0; kh < p_.kernel_h; ++kh) {
          for (std::int64_t kw = 0; kw < p_.kernel_w; ++kw, ++tap) {
            finish_tap(ic, tap, w_out_ + ic * p_.w.n + kd * p_.w.d + kh * p_.w.h + kw * p_.w.w);
          }
        }
      }
    }
  }

 private:
  static constexpr PhaseGroup kWhole{0, 0, 1, 1, 0, 0};

  void finish_tap(std::int64_t ic, std::int64_t tap, T* out) const {
    for (std::int64_t oc = 0; oc < oc_; ++oc) {
      if constexpr (kParts == 1) {
        narrow(static_cast<R>(total(ic, oc, tap)), out[oc * p_.w.c]);
      } else {
        const double re = total(2 * ic, 2 * oc, tap) - total(2 * ic + 1, 2 * oc + 1, tap);
        const double im = total(2 * ic, 2 * oc + 1, tap) + total(2 * ic + 1, 2 * oc, tap);
        out[oc * p_.w.c] = {static_cast<R>(re), static_cast<R>(im)};
      }
    }
  }

  std::int64_t depth_limit() const { return smaller(d_.axis.kernel, d_.source.size); }

  TaskBlocks choose_reduction_blocks() const {
    const std::int64_t planes = depth_limit() * y_packer_.planes_per_depth();
    const std::int64_t channels = kParts * group_block_.size * (x_slabs_.size + y_slabs_.size * planes);
    const std::int64_t pixels = larger(smaller(kBlockElements / channels, kLargestBlock), kSmallestBlock);
    const Blocks w_blocks(w_.q, length(w_.q) <= 2 * pixels ? length(w_.q) : row_block(w_, pixels));
    const std::int64_t w_pitch = w_.window(w_blocks[0]).pitch;
    const Blocks h_blocks(h_.q, larger(pixels / w_pitch, 1));
    const bool whole = w_blocks.count == 1 && h_blocks.count == 1;
    const std::int64_t samples = whole ? larger(pixels / (w_pitch * h_.window(h_.q).pitch), 1) : 1;
    return {Blocks({0, p_.batch}, samples), h_blocks, w_blocks};
  }

  std::int64_t block_count() const { return blocks_.samples.count * p_.in_d * blocks_.h.count * blocks_.w.count; }

  std::int64_t choose_chunk_count() const {
    const std::int64_t others = group_block_.count * x_slabs_.count * y_slabs_.count;
    const std::int64_t affordable = kPartialBytes / (partial_size() * static_cast<std::int64_t>(sizeof(double)));
    return smaller(block_count(), larger(smaller(kTasksWanted / others, affordable), 1));
  }

  // partial[chunk][group and real ic][tap][real oc]
  std::int64_t partial_size() const { return p_.groups * ic_ * kParts * taps_ * oc_ * kParts; }
  std::int64_t partial_index(std::int64_t ic, std::int64_t oc, std::int64_t tap) const {
    return (ic * taps_ + tap) * oc_ * kParts + oc;
  }
  double total(std::int64_t ic, std::int64_t oc, std::int64_t tap) const {
    double sum = 0;
    for (std::int64_t c = 0; c < chunk_count_; ++c) sum += partial_[c * partial_size() + partial_index(ic, oc, tap)];
    return sum;
  }

  struct Parts {
    std::int64_t y, totals, offsets, depths, end;
  };
  PackLayout y_layout(std::int64_t h, std::int64_t w, std::int64_t samples, std::int64_t depths) const {
    return make_pack_layout(h_.window(blocks_.h[h]), w_.window(blocks_.w[w]), samples, depths * y_packer_.planes_per_depth());
  }
  // x shares the pitches of y, so that one flat index serves both.
  PackLayout x_layout(const PackLayout& y, Range h, Range w, std::int64_t samples) const {
    return make_pack_layout({h, h, y.h.pitch}, {w, w, y.w.pitch}, samples, 1);
  }
  Parts parts() const {
    std::int64_t x_size = 0, y_size = 0;
    for (std::int64_t h = 0; h < blocks_.h.count; ++h) {
      for (std::int64_t w = 0; w < blocks_.w.count; ++w) {
        const PackLayout y = y_layout(h, w, blocks_.samples.size, depth_limit());
        y_size = larger(y_size, packed_size(y, group_block_.size * y_slabs_.size * kParts, kTileSlack));
        const PackLayout x = x_layout(y, blocks_.h[h], blocks_.w[w], blocks_.samples.size);
        x_size = larger(x_size, packed_size(x, group_block_.size * x_slabs_.size * kParts, kTileSlack));
      }
    }
    const auto bytes = [](std::int64_t count, std::size_t size) { return round_up(count * static_cast<std::int64_t>(size), 64); };
    const std::int64_t pairs = taps_ * y_slabs_.size * kParts;
    Parts at{};
    at.y = bytes(x_size, sizeof(R));
    at.totals = at.y + bytes(y_size, sizeof(R));
    at.offsets = at.totals + bytes(group_block_.size * x_slabs_.size * kParts * pairs, sizeof(double));
    at.depths = at.offsets + bytes(pairs, sizeof(std::int64_t));
    at.end = at.depths + bytes(2 * d_.axis.kernel, sizeof(std::int64_t));
    return at;
  }

  struct Task {
    std::int64_t chunk;
    Range groups, x_channels, y_channels;  // channels within each group
    double* totals;                        // [group and real ic of the task][tap][real oc of the task]
    std::int64_t pairs;                    // taps times real oc: the pitch of totals
  };
  struct Buffers {
    R* x;
    R* y;
    std::int64_t* offsets;
    std::int64_t* depths;
    std::int64_t* depth_of_tap;
  };

  void run(std::int64_t index, unsigned char* scratch) const {
    const Parts at = parts_;
    std::int64_t* depths = reinterpret_cast<std::int64_t*>(scratch + at.depths);
    const Buffers b{reinterpret_cast<R*>(scratch), reinterpret_cast<R*>(scratch + at.y),
                    reinterpret_cast<std::int64_t*>(scratch + at.offsets), depths, depths + d_.axis.kernel};
    Task task{};
    task.y_channels = y_slabs_[index % y_slabs_.count];
    index /= y_slabs_.count;
    task.x_channels = x_slabs_[index % x_slabs_.count];
    index /= x_slabs_.count;
    task.groups = group_block_[index % group_block_.count];
    task.chunk = index / group_block_.count;
    task.totals = reinterpret_cast<double*>(scratch + at.totals);
    task.pairs = taps_ * length(task.y_channels) * kParts;
    const std::int64_t rows = length(task.groups) * length(task.x_channels) * kParts;
    for (std::int64_t i = 0; i < rows * task.pairs; ++i) task.totals[i] = 0;
    const std::int64_t last = block_count() * (task.chunk + 1) / chunk_count_;
    for (std::int64_t block = block_count() * task.chunk / chunk_count_; block < last; ++block) add_block(task, block, b);
    store_totals(task);
  }

  void add_block(const Task& task, std::int64_t block, const Buffers& b) const {
    const std::int64_t w_index = block % blocks_.w.count, h_index = block / blocks_.w.count % blocks_.h.count;
    block /= blocks_.w.count * blocks_.h.count;
    const std::int64_t id = block % p_.in_d;
    const Range samples = blocks_.samples[block / p_.in_d], h = blocks_.h[h_index], w = blocks_.w[w_index];
    std::int64_t depth_count = 0;
    for (std::int64_t kd = 0; kd < d_.axis.kernel; ++kd) {
      const std::int64_t od = output_of(d_.axis, id, kd);
      b.depth_of_tap[kd] = od >= 0 && od < d_.axis.out ? depth_count : -1;
      if (b.depth_of_tap[kd] >= 0) b.depths[depth_count++] = od;
    }
    if (depth_count == 0) return;
    const PackLayout y = y_layout(h_index, w_index, length(samples), depth_count);
    const PackLayout x = x_layout(y, h, w, length(samples));
    const std::int64_t groups = length(task.groups);
    // Several groups are taken together only with all of their channels, which then follow each other.
    const std::int64_t x_count = length(task.x_channels) * groups, y_count = length(task.y_channels) * groups;
    x_packer_.pack(x, samples.begin, task.groups.begin * ic_ + task.x_channels.begin, x_count, &id, 1, kTileSlack, b.x);
    y_packer_.pack(y, samples.begin, task.groups.begin * oc_ + task.y_channels.begin, y_count, b.depths, depth_count, kTileSlack,
                   b.y);
    const bool finite = all_finite(b.x, packed_size(x, x_count * kParts, kTileSlack)) &&
                        all_finite(b.y, packed_size(y, y_count * kParts, kTileSlack));
    const std::int64_t x_channels = length(task.x_channels) * kParts, y_channels = length(task.y_channels) * kParts;
    const std::int64_t count = (length(samples) - 1) * y.sample_pitch + (length(h) - 1) * y.w.pitch + length(w);
    for (std::int64_t g = 0; g < groups; ++g) {
      const R* group_x = b.x + x.lead + g * x_channels * x.channel_pitch;
      const R* group_y = b.y + y.lead + g * y_channels * y.channel_pitch;
      double* totals = task.totals + g * x_channels * task.pairs;
      for_each_tap(y, h, w, b, [&](std::int64_t tap, std::int64_t offset, Range rows, Range columns) {
        for (std::int64_t c = 0; c < y_channels; ++c) b.offsets[tap * y_channels + c] = offset + c * y.channel_pitch;
        if (finite) return;
        add_exactly(x, length(samples), rows, columns, group_x, x_channels, group_y + offset, y, y_channels,
                    totals + tap * y_channels, task.pairs);
      });
      if (!finite) continue;
      // Taps whose depth is outside y have no planes: runs of the others.
      const std::int64_t depth_taps = h_.axis.kernel * w_.axis.kernel * y_channels;
      for (std::int64_t kd = 0; kd < d_.axis.kernel; ++kd) {
        if (b.depth_of_tap[kd] < 0) continue;
        dot_products(group_x, x.channel_pitch, x_channels, group_y, b.offsets + kd * depth_taps, depth_taps, count,
                     totals + kd * depth_taps, task.pairs);
      }
    }
  }

  static bool all_finite(const R* values, std::int64_t count) {
    R defect[16] = {};
    std::int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      for (int lane = 0; lane < 16; ++lane) defect[lane] += values[i + lane] - values[i + lane];
    }
    for (; i < count; ++i) defect[0] += values[i] - values[i];
    R sum = 0;
    for (int lane = 0; lane < 16; ++lane) sum += defect[lane];
    return sum == 0;
  }

  // Calls f(tap, offset of y's pixels relative to x's, rows, columns) for the taps with a plane; rows and columns are the pixels
  // of the block, counted from its corner, that the tap carries into y.
  template <typename F>
  void for_each_tap(const PackLayout& y, Range h, Range w, const Buffers& b, const F& f) const {
    for (std::int64_t kd = 0; kd < d_.axis.kernel; ++kd) {
      if (b.depth_of_tap[kd] < 0) continue;
      for (std::int64_t gh = 0; gh < h_group_count_; ++gh) {
        for (std::int64_t gw = 0; gw < w_group_count_; ++gw) {
          const std::int64_t plane = (b.depth_of_tap[kd] * h_group_count_ + gh) * w_group_count_ + gw;
          for (std::int64_t jh = 0; jh < h_groups_[gh].count; ++jh) {
            const std::int64_t shift_h = h_groups_[gh].shift + jh * h_groups_[gh].in_step;
            const std::int64_t kh = h_groups_[gh].first + jh * h_groups_[gh].tap_step;
            for (std::int64_t jw = 0; jw < w_groups_[gw].count; ++jw) {
              const std::int64_t shift_w = w_groups_[gw].shift + jw * w_groups_[gw].in_step;
              const std::int64_t kw = w_groups_[gw].first + jw * w_groups_[gw].tap_step;
              f((kd * h_.axis.kernel + kh) * w_.axis.kernel + kw,
                plane * y.plane_pitch + (h.begin + shift_h - y.h.real.begin) * y.w.pitch + w.begin + shift_w - y.w.real.begin,
                reached(h_, h, h_groups_[gh].phase, shift_h), reached(w_, w, w_groups_[gw].phase, shift_w));
            }
          }
        }
      }
    }
  }

  static Range reached(const CorrelateAxis& a, Range block, std::int64_t phase, std::int64_t shift) {
    const Range real = real_range(a.source, phase);
    return {larger(real.begin - shift, block.begin) - block.begin, smaller(real.end - shift, block.end) - block.begin};
  }

  // Blocks with an Inf or a NaN: only pairs of pixels that exist, so that no padding zero meets it.
  static void add_exactly(const PackLayout& x_layout, std::int64_t samples, Range rows, Range columns, const R* x,
                          std::int64_t x_channels, const R* y, const PackLayout& y_layout, std::int64_t y_channels,
                          double* totals, std::int64_t totals_pitch) {
    for (std::int64_t a = 0; a < x_channels; ++a) {
      for (std::int64_t c = 0; c < y_channels; ++c) {
        double sum = 0;
        for (std::int64_t sample = 0; sample < samples; ++sample) {
          for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            const std::int64_t at = sample * x_layout.sample_pitch + row * x_layout.w.pitch;
            const R* left = x + a * x_layout.channel_pitch + at;
            const R* right = y + c * y_layout.channel_pitch + at;
            for (std::int64_t i = columns.begin; i < columns.end; ++i) sum += static_cast<double>(left[i] * right[i]);
          }
        }
        totals[a * totals_pitch + c] += sum;
      }
    }
  }

  void store_totals(const Task& task) const {
    double* partial = partial_ + task.chunk * partial_size();
    const std::int64_t x_channels = length(task.x_channels) * kParts, y_channels = length(task.y_channels) * kParts;
    for (std::int64_t a = 0; a < length(task.groups) * x_channels; ++a) {
      const std::int64_t ic =
          (task.groups.begin + a / x_channels) * ic_ * kParts + task.x_channels.begin * kParts + a % x_channels;
      for (std::int64_t tap = 0; tap < taps_; ++tap) {
        std::memcpy(partial + partial_index(ic, task.y_channels.begin * kParts, tap),
                    task.totals + a * task.pairs + tap * y_channels, static_cast<std::size_t>(y_channels) * sizeof(double));
      }
    }
  }

  const Problem& p_;
  T* w_out_;
  double* partial_;
  const std::int64_t ic_, oc_, taps_;
  const CorrelateAxis d_, h_, w_;
  const Table<PhaseGroup> h_groups_, w_groups_;
  const std::int64_t h_group_count_, w_group_count_;
  const Packer<T> x_packer_, y_packer_;
  const Blocks group_block_, x_slabs_, y_slabs_;
  const TaskBlocks blocks_;
  const std::int64_t chunk_count_;
  const Parts parts_ = parts();
};

}  // namespace

template <typename T>
std::int64_t correlate_weight_workspace_bytes(const Problem& p) {
  return WeightCorrelation<T>(p, {}).partial_bytes();
}

template <typename T>
void correlate_weight(const Problem& p, const Operands& operands, int threads) {
  const WeightCorrelation<T> correlation(p, operands);
  parallel_for(correlation.tasks(), threads, correlation);
  parallel_for(p.in_channels, threads, [&](std::int64_t begin, std::int64_t end) { correlation.finish(begin, end); });
}

#define UPFOLD_INSTANTIATE(T)                                                \
  template std::int64_t correlate_weight_workspace_bytes<T>(const Problem&); \
  template void correlate_weight<T>(const Problem&, const Operands&, int);
UPFOLD_INSTANTIATE(float)
UPFOLD_INSTANTIATE(double)
UPFOLD_INSTANTIATE(Half)
UPFOLD_INSTANTIATE(BFloat16)
UPFOLD_INSTANTIATE(Complex<float>)
UPFOLD_INSTANTIATE(Complex<double>)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cpu::UPFOLD_ISA
