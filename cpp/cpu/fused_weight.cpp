#include "fused_weight.h"

#include "fused_weight_pack.h"
#include "fused_weight_plan.h"
#include "parallel.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// Offsets of the parts of a thread's scratch.
struct WeightScratch {
  std::int64_t y, identity, columns, runs, end;

  explicit WeightScratch(const FusedWeightPlan& plan) {
    const auto bytes = [](std::int64_t count, std::size_t size) { return round_up(count * static_cast<std::int64_t>(size), 64); };
    const auto panels = [](const Blocks& slabs, std::int64_t width) { return ceil_div(slabs.size, width) * width; };
    // A vector is stored whole where a panel is narrower.
    const std::int64_t slack = kLanes<float>;
    y = bytes((plan.tile_positions() + 1) * panels(plan.x_slabs, plan.x_width()) + slack, sizeof(float));
    identity = y + bytes(plan.y_positions() * panels(plan.y_slabs, plan.y_width()) + slack, sizeof(float));
    columns = identity + bytes(plan.tile_positions(), sizeof(std::int64_t));
    runs = columns + bytes((plan.w_blocks.size + plan.w.reach) * plan.w.axis.stride, sizeof(std::int64_t));
    end = runs + bytes(plan.tile_positions(), sizeof(PixelRun));
  }
};

// Some pixels of x: rows and columns of some planes.
struct PixelTile {
  Range planes, h, w;
};

template <typename T>
class FusedWeight {
 public:
  FusedWeight(const Problem& p, const FusedWeightPlan& plan, const Operands& operands)
      : p_(p),
        plan_(plan),
        x_(static_cast<const T*>(operands.x)),
        y_(static_cast<const T*>(operands.y)),
        w_(static_cast<T*>(operands.w)),
        sums_(static_cast<float*>(operands.workspace)),
        scratch_(plan) {}

  std::int64_t tasks() const { return plan_.chunks * p_.groups * plan_.slab_pairs(); }

  // The sums of some pairs of slabs over their chunks.
  void operator()(std::int64_t begin, std::int64_t end) const {
    const Scratch scratch(scratch_.end);
    unsigned char* const at = scratch.data();
    const Buffers b{reinterpret_cast<float*>(at), reinterpret_cast<float*>(at + scratch_.y),
                    reinterpret_cast<std::int64_t*>(at + scratch_.identity),
                    reinterpret_cast<std::int64_t*>(at + scratch_.columns), reinterpret_cast<PixelRun*>(at + scratch_.runs)};
    for (std::int64_t i = 0; i < plan_.tile_positions(); ++i) b.identity[i] = i;
    for (std::int64_t task = begin; task < end; ++task) run(task, b);
  }

 private:
  struct Buffers {
    float *x, *y;
    std::int64_t *identity, *columns;
    PixelRun* runs;
  };
  struct Task {
    std::int64_t group;
    Range x_channels, y_channels;
    float* sums;
  };

  void run(std::int64_t index, const Buffers& b) const {
    const std::int64_t pair = index % plan_.slab_pairs(), group = index / plan_.slab_pairs() % p_.groups;
    const std::int64_t chunk = index / plan_.slab_pairs() / p_.groups;
    const Task task{group, plan_.x_slabs[pair / plan_.y_slabs.count], plan_.y_slabs[pair % plan_.y_slabs.count],
                    sums_ + index * plan_.sums_size()};
    const std::int64_t first = plan_.tiles() * chunk / plan_.chunks, last = plan_.tiles() * (chunk + 1) / plan_.chunks;
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t column = i % plan_.w_blocks.count, row = i / plan_.w_blocks.count % plan_.h_blocks.count;
      const PixelTile tile{plan_.planes[i / plan_.w_blocks.count / plan_.h_blocks.count], plan_.h_blocks[row],
                           plan_.w_blocks[column]};
      add_tile(task, tile, i > first, b);
    }
  }

  void add_tile(const Task& task, const PixelTile& tile, bool accumulate, const Buffers& b) const {
    pack_x(task, tile, b);
    std::int64_t tap = 0;
    for (std::int64_t kd = 0; kd < p_.kernel_d; ++kd) {
      for (std::int64_t gh = 0; gh < plan_.h_group_count; ++gh) {
        const PhaseGroup& h = plan_.h_groups[gh];
        pack_y(task, tile, kd, h, b);
        for (std::int64_t jh = 0; jh < h.count; ++jh) {
          tap = (kd * p_.kernel_h + h.first + jh * h.tap_step) * p_.kernel_w;
          for (std::int64_t gw = 0; gw < plan_.w_group_count; ++gw) {
            const PhaseGroup& w = plan_.w_groups[gw];
            for (std::int64_t jw = 0; jw < w.count; ++jw) {
              const std::int64_t runs = list_runs(tile, kd, {h, h.shift + jh * h.in_step}, {w, w.shift + jw * w.in_step},
                                                  gw * plan_.phase_positions(), b.runs);
              if (runs > 0 || !accumulate) multiply(task, tap + w.first + jw * w.tap_step, runs, accumulate, b);
            }
          }
        }
      }
    }
  }

  // Channels of a plane that the slabs of a task take, and where its panels are.
  std::int64_t depth(std::int64_t plane) const { return plane % p_.in_d; }

  void pack_x(const Task& task, const PixelTile& tile, const Buffers& b) const {
    const std::int64_t columns = length(tile.w), first = task.group * plan_.x_channels + task.x_channels.begin;
    const Panels panels{b.x, plan_.x_width(), (plan_.tile_positions() + 1) * plan_.x_width()};
    // Whole rows that follow each other are packed as one.
    const bool joins = columns == p_.in_w && p_.x.h == p_.x.w * p_.in_w;
    const std::int64_t rows = joins ? 1 : length(tile.h), count = joins ? columns * length(tile.h) : columns;
    const std::int64_t* positions = b.identity;
    for (std::int64_t plane = tile.planes.begin; plane < tile.planes.end; ++plane) {
      const T* in =
          x_ + plane / p_.in_d * p_.x.n + depth(plane) * p_.x.d + first * p_.x.c + tile.h.begin * p_.x.h + tile.w.begin * p_.x.w;
      for (std::int64_t row = 0; row < rows; ++row, in += p_.x.h, positions += count) {
        pack_panels<T>({in, p_.x.c, p_.x.w, length(task.x_channels), count}, positions, panels);
      }
    }
  }

  // The rows of one phase of h that the tile's pixels reach by tap kd, all columns.
  void pack_y(const Task& task, const PixelTile& tile, std::int64_t kd, const PhaseGroup& h, const Buffers& b) const {
    const std::int64_t first = task.group * plan_.y_channels + task.y_channels.begin;
    const Panels panels{b.y, plan_.y_width(), plan_.y_positions() * plan_.y_width()};
    const std::int64_t last_h = tile.h.end + h.shift + (h.count - 1) * h.in_step;
    const Range real_h = real_range(plan_.h.source, h.phase), w = y_columns(tile.w);
    if (w.begin >= w.end) return;
    for (std::int64_t plane = tile.planes.begin; plane < tile.planes.end; ++plane) {
      const std::int64_t od = output_of(plan_.d.axis, depth(plane), kd);
      if (od < 0 || od >= p_.out_d) continue;
      const T* in = y_ + plane / p_.in_d * p_.y.n + od * p_.y.d + first * p_.y.c + w.begin * p_.y.w;
      for (std::int64_t q = larger(tile.h.begin, real_h.begin); q < smaller(last_h, real_h.end); ++q) {
        list_columns(tile, w, position(tile, plane, q), b.columns);
        const std::int64_t oh = q * plan_.h.source.stride + h.phase - plan_.h.source.pad;
        pack_panels<T>({in + oh * p_.y.h, p_.y.c, p_.y.w, length(task.y_channels), length(w)}, b.columns, panels);
      }
    }
  }

  // Where q of a row of a plane starts among the positions of y.
  std::int64_t position(const PixelTile& tile, std::int64_t plane, std::int64_t q) const {
    const std::int64_t rows = plan_.h_blocks.size + plan_.h.reach, columns = plan_.w_blocks.size + plan_.w.reach;
    return ((plane - tile.planes.begin) * rows + q - tile.h.begin) * columns;
  }

  // The columns of y that taps of these pixels reach.
  Range y_columns(Range w) const {
    const SourceAxis& y = plan_.w.source;
    return {larger(w.begin * y.stride - y.pad, 0), smaller((w.end + plan_.w.reach) * y.stride - y.pad, y.size)};
  }

  void list_columns(const PixelTile& tile, Range columns, std::int64_t row, std::int64_t* positions) const {
    const std::int64_t stride = plan_.w.source.stride, t = columns.begin + plan_.w.source.pad - tile.w.begin * stride;
    std::int64_t q = t / stride, phase = t % stride;
    for (std::int64_t i = 0; i < length(columns); ++i) {
      const std::int64_t group = plan_.w_group_of_phase[phase];
      positions[i] = group * plan_.phase_positions() + (group < plan_.w_group_count ? row + q : 0);
      if (++phase < stride) continue;
      phase = 0;
      ++q;
    }
  }

  // A tap of one axis: its phase, and how far it reaches.
  struct AxisTap {
    const PhaseGroup& group;
    std::int64_t shift;
  };
  static Range reached(const CorrelateAxis& a, Range block, const AxisTap& tap) {
    const Range real = real_range(a.source, tap.group.phase);
    return {larger(real.begin - tap.shift, block.begin), smaller(real.end - tap.shift, block.end)};
  }

  // The pixels of the tile that a tap carries into y; returns how many runs they make.
  std::int64_t list_runs(const PixelTile& tile, std::int64_t kd, const AxisTap& tap_h, const AxisTap& tap_w,
                         std::int64_t first_position, PixelRun* runs) const {
    const Range h = reached(plan_.h, tile.h, tap_h), w = reached(plan_.w, tile.w, tap_w);
    if (h.begin >= h.end || w.begin >= w.end) return 0;
    RunWriter writer{runs, plan_.shape.x_is_wide, plan_.x_width(), plan_.y_width(), 0};
    for (std::int64_t plane = tile.planes.begin; plane < tile.planes.end; ++plane) {
      const std::int64_t od = output_of(plan_.d.axis, depth(plane), kd);
      if (od < 0 || od >= p_.out_d) continue;
      for (std::int64_t row = h.begin; row < h.end; ++row) {
        const std::int64_t x = ((plane - tile.planes.begin) * length(tile.h) + row - tile.h.begin) * length(tile.w);
        const std::int64_t y = first_position + position(tile, plane, row + tap_h.shift);
        writer.add(x + w.begin - tile.w.begin, y + w.begin - tile.w.begin + tap_w.shift, length(w));
      }
    }
    return writer.count;
  }

  struct RunWriter {
    PixelRun* runs;
    bool x_is_wide;
    std::int64_t x_width, y_width;
    std::int64_t count;

    // `pixels` neighbours, from these positions on; they lengthen the last run where they follow it at the distance of its own.
    void add(std::int64_t x, std::int64_t y, std::int64_t pixels) {
      const PixelRun run = x_is_wide ? PixelRun{y * y_width, x * x_width, y_width, x_width, pixels}
                                     : PixelRun{x * x_width, y * y_width, x_width, y_width, pixels};
      PixelRun* last = runs + count - 1;
      if (count > 0 && last->count == 1 && pixels == 1) {
        last->narrow_step = run.narrow - last->narrow;
        last->wide_step = run.wide - last->wide;
      }
      if (count > 0 && (pixels == 1 || (last->narrow_step == run.narrow_step && last->wide_step == run.wide_step)) &&
          run.narrow == last->narrow + last->count * last->narrow_step &&
          run.wide == last->wide + last->count * last->wide_step) {
        last->count += pixels;
      } else {
        runs[count++] = run;
      }
    }
  };

  // All products of the task's channels for one tap.
  void multiply(const Task& task, std::int64_t tap, std::int64_t runs, bool accumulate, const Buffers& b) const {
    const bool x_is_wide = plan_.shape.x_is_wide;
    const Range narrow = x_is_wide ? task.y_channels : task.x_channels, wide = x_is_wide ? task.x_channels : task.y_channels;
    const std::int64_t x_pitch = (plan_.tile_positions() + 1) * plan_.x_width(), y_pitch = plan_.y_positions() * plan_.y_width();
    const std::int64_t narrow_pitch = x_is_wide ? y_pitch : x_pitch, wide_pitch = x_is_wide ? x_pitch : y_pitch;
    const std::int64_t rows = plan_.shape.rows, width = plan_.shape.wide_width();
    float* const sums = task.sums + tap * plan_.sums_rows() * plan_.sums_pitch();
    for (std::int64_t m = 0; m < length(wide); m += width) {
      const std::int64_t vectors = ceil_div(smaller(length(wide) - m, width), kLanes<float>);
      OuterArgs args{
          b.runs,    runs, x_is_wide ? b.y : b.x, (x_is_wide ? b.x : b.y) + m / width * wide_pitch, sums + m, plan_.sums_pitch(),
          accumulate};
      for (std::int64_t a = 0; a < length(narrow); a += rows) {
        outer_products(smaller(length(narrow) - a, rows), vectors, args);
        args.narrow += narrow_pitch;
        args.sums += rows * plan_.sums_pitch();
      }
    }
  }

  const Problem& p_;
  const FusedWeightPlan& plan_;
  const T* x_;
  const T* y_;
  T* w_;
  float* sums_;
  const WeightScratch scratch_;
};

// The weights from the sums of the chunks.
template <typename T>
class WeightSums {
 public:
  WeightSums(const Problem& p, const FusedWeightPlan& plan, const Operands& operands)
      : p_(p),
        plan_(plan),
        sums_(static_cast<const float*>(operands.workspace)),
        out_(static_cast<T*>(operands.w)),
        has_dense_taps_((p.kernel_w == 1 || p.w.w == 1) && (p.kernel_h == 1 || p.w.h == p.kernel_w) &&
                        (p.kernel_d == 1 || p.w.d == p.kernel_h * p.kernel_w)) {}

  // Channels of the narrow side, of all groups.
  std::int64_t rows() const { return p_.groups * (plan_.shape.x_is_wide ? plan_.y_channels : plan_.x_channels); }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const std::int64_t row = round_up(plan_.taps * plan_.sums_pitch() * static_cast<std::int64_t>(sizeof(float)), 64);
    const Scratch scratch(2 * row);
    float* const total = reinterpret_cast<float*>(scratch.data());
    float* const turned = reinterpret_cast<float*>(scratch.data() + row);
    for (std::int64_t i = begin; i < end; ++i) write(i, total, turned);
  }

 private:
  void write(std::int64_t index, float* total, float* turned) const {
    const bool x_is_wide = plan_.shape.x_is_wide;
    const Blocks& narrow = x_is_wide ? plan_.y_slabs : plan_.x_slabs;
    const Blocks& wide = x_is_wide ? plan_.x_slabs : plan_.y_slabs;
    const std::int64_t channels = length(narrow.range), group = index / channels, channel = index % channels;
    const std::int64_t slab = channel / narrow.size, row = channel % narrow.size;
    for (std::int64_t i = 0; i < wide.count; ++i) {
      const std::int64_t pair = x_is_wide ? i * plan_.y_slabs.count + slab : slab * plan_.y_slabs.count + i;
      const std::int64_t first = wide[i].begin, x = x_is_wide ? first : channel, y = x_is_wide ? channel : first;
      const float* sums = sums_ + (group * plan_.slab_pairs() + pair) * plan_.sums_size() + row * plan_.sums_pitch();
      std::int64_t pitch = plan_.sums_rows() * plan_.sums_pitch();
      if (plan_.chunks != 1) {
        add_chunks(sums, pitch, total);
        sums = total;
        pitch = plan_.sums_pitch();
      }
      put(sums, pitch, turned, length(wide[i]), out_ + (group * plan_.x_channels + x) * p_.w.n + y * p_.w.c,
          x_is_wide ? p_.w.n : p_.w.c);
    }
  }

  // total[tap][channel of the wide side], of one channel of the narrow side, from the first chunk's `tap_pitch` apart: the chunks
  // in their order.
  void add_chunks(const float* from, std::int64_t tap_pitch, float* total) const {
    constexpr std::int64_t kBlock = 64;
    const std::int64_t pitch = plan_.sums_pitch(), chunk = p_.groups * plan_.slab_pairs() * plan_.sums_size();
    for (std::int64_t tap = 0; tap < plan_.taps; ++tap) {
      for (std::int64_t first = 0; first < pitch; first += kBlock) {
        const std::int64_t count = smaller(kBlock, pitch - first);
        const float* sums = from + tap * tap_pitch + first;
        double sum[kBlock] = {};
        for (std::int64_t c = 0; c < plan_.chunks; ++c, sums += chunk) {
          for (std::int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(sums[i]);
        }
        for (std::int64_t i = 0; i < count; ++i) total[tap * pitch + first + i] = static_cast<float>(sum[i]);
      }
    }
  }

  // out[channel * channel_stride + offset of the tap] = total[tap * pitch + channel]
  void put(const float* total, std::int64_t pitch, float* turned, std::int64_t channels, T* out,
           std::int64_t channel_stride) const {
    const std::int64_t taps = plan_.taps;
    if constexpr (std::is_same_v<T, float>) {
      if (has_dense_taps_) return channels_from_pixels(total, pitch, channels, taps, out, channel_stride);
    }
    channels_from_pixels(total, pitch, channels, taps, turned, taps);
    for (std::int64_t c = 0; c < channels; ++c) {
      if (has_dense_taps_) {
        for (std::int64_t t = 0; t < taps; ++t) narrow(turned[c * taps + t], out[c * channel_stride + t]);
        continue;
      }
      for (std::int64_t t = 0; t < taps; ++t) {
        const std::int64_t kw = t % p_.kernel_w, kh = t / p_.kernel_w % p_.kernel_h, kd = t / p_.kernel_w / p_.kernel_h;
        narrow(turned[c * taps + t], out[c * channel_stride + kd * p_.w.d + kh * p_.w.h + kw * p_.w.w]);
      }
    }
  }

  const Problem& p_;
  const FusedWeightPlan& plan_;
  const float* sums_;
  T* out_;
  const bool has_dense_taps_;
};

}  // namespace

std::int64_t fused_weight_workspace_bytes(const Problem& p) {
  const FusedWeightPlan plan(p);
  if (WeightScratch(plan).end > kLargestScratch) return -1;
  return plan.chunks * p.groups * plan.slab_pairs() * plan.sums_size() * static_cast<std::int64_t>(sizeof(float));
}

template <typename T>
void fused_weight(const Problem& p, const Operands& operands, int threads) {
  const FusedWeightPlan plan(p);
  const FusedWeight<T> products(p, plan, operands);
  if (p.batch > 0) parallel_for(products.tasks(), threads, products);
  const WeightSums<T> sums(p, plan, operands);
  parallel_for(sums.rows(), threads, sums);
}

#define UPFOLD_INSTANTIATE(T) template void fused_weight<T>(const Problem&, const Operands&, int);
UPFOLD_INSTANTIATE(float)
UPFOLD_INSTANTIATE(Half)
UPFOLD_INSTANTIATE(BFloat16)
#undef UPFOLD_INSTANTIATE

}  // namespace upfold::cpu::UPFOLD_ISA
