// The planner of the fused method whose rows are units and whose columns are channels and phases; host code, for one source.
#pragma once

#include <algorithm>

#include "fused_units_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostUnitCount = std::int64_t(1) << 30, kLeastUnitRun = 8;  // outputs of a unit in a row of y
constexpr std::int64_t kMostUnitChannels = 32;                                     // of x, of which each block fills in its own
// In cycles (H200): what a block takes beside; a vector that a thread fills in, of float32 and of 16-bit values; a product of 64
// columns; and bytes of y that a multiprocessor puts in one.
constexpr double kUnitStart = 2100, kUnitFill[] = {350, 600}, kUnitProduct = 32, kUnitStored[] = {18, 11};

class UnitsPlanner {
 public:
  UnitsPlanner(const Problem& p, std::int64_t columns, const SharedMemory& shared, int multiprocessors)
      : p_(p), n_(columns), shared_(shared), multiprocessors_(multiprocessors), size_(element_bytes(p.dtype)) {}

  UnitsPlan plan() {
    if (!is_regular() || !units() || !products() || !order()) return {};
    for (std::int64_t strips = 1; strips <= std::min<std::int64_t>(now_.job.tiles, 256); ++strips) try_strips(strips);
    return best_;
  }

 private:
  const Problem& p_;
  const std::int64_t n_;
  const SharedMemory shared_;
  const std::int64_t multiprocessors_, size_;
  UnitsPlan best_, now_;
  std::int64_t shifts_h_ = 0, shifts_w_ = 0;

  bool is_regular() {
    const bool deep = p_.in_d * p_.out_d * p_.kernel_d != 1 || p_.pad_d != 0;
    if (deep || p_.dilation_h * p_.dilation_w != 1 || p_.in_h * p_.in_w == 0) return false;
    if (p_.kernel_h % p_.stride_h != 0 || p_.kernel_w % p_.stride_w != 0) return false;
    for (const std::int64_t size : {p_.in_h, p_.in_w, p_.out_h, p_.out_w, p_.batch, p_.in_channels, p_.out_channels})
      if (size >= 1 << 20) return false;
    shifts_h_ = p_.kernel_h / p_.stride_h, shifts_w_ = p_.kernel_w / p_.stride_w;
    return p_.pad_h < 1 << 15 && p_.pad_w < 1 << 15 && shifts_h_ * shifts_w_ <= 16;
  }

  // Of an axis: the first unit with outputs, and how many have some.
  static void count_units(const Axis& a, std::int32_t& first, std::int64_t& count) {
    first = std::int32_t(a.pad / a.stride), count = (a.out - 1 + a.pad) / a.stride - first + 1;
  }
  bool units() {
    UnitsJob& job = now_.job;
    std::int64_t h = 0, w = 0;
    count_units(axis_h(p_), job.first_h, h), count_units(axis_w(p_), job.first_w, w);
    const std::int64_t pitch = w + shifts_w_ - 1;
    if ((h + shifts_h_) * pitch >= 1 << 24) return false;
    job.pitch = make_divisor(pitch), job.places = std::int32_t(h * pitch), job.before = std::int32_t(shifts_w_ - 1);
    job.halo = std::int32_t((shifts_h_ - 1) * pitch + shifts_w_ - 1), job.shifts_h = std::int32_t(shifts_h_);
    job.tiles = std::int32_t(ceil_div(job.places, 64));
    job.in_h = std::int32_t(p_.in_h), job.in_w = std::int32_t(p_.in_w);
    job.out_h = std::int32_t(p_.out_h), job.out_w = std::int32_t(p_.out_w);
    job.stride_h = std::int32_t(p_.stride_h), job.stride_w = std::int32_t(p_.stride_w);
    job.pad_h = std::int32_t(p_.pad_h), job.pad_w = std::int32_t(p_.pad_w);
    job.x_n = p_.x.n, job.x_c = p_.x.c, job.x_h = p_.x.h, job.x_w = p_.x.w;
    job.y_n = p_.y.n, job.y_c = p_.y.c, job.y_h = p_.y.h, job.y_w = p_.y.w;
    job.w_ic = p_.w.n, job.w_oc = p_.w.c, job.w_h = p_.w.h, job.w_w = p_.w.w;
    job.activation = p_.activation, job.slope = p_.activation_slope;
    // Pixels in pairs, the first of which is even: from the one that the first place of a row reads, or the one ahead of it.
    const std::int64_t first = job.first_w - job.before, even = first - (first % 2 != 0 ? 1 : 0);
    const bool paired = p_.x.w == 1 && (p_.in_w | p_.x.h | p_.x.c | p_.x.n) % 2 == 0;
    job.first_pair = std::int32_t(even), job.row_pairs = {};
    if (paired) job.row_pairs = make_divisor(ceil_div(first + pitch - even, std::int64_t(2)));
    return true;
  }

  // Two vectors each: of one shift, or the last ones of two shifts where they are odd in number.
  bool products() {
    UnitsJob& job = now_.job;
    job.ic = std::int32_t(in_channels_per_group(p_)), job.oc = std::int32_t(out_channels_per_group(p_));
    const std::int64_t vectors = ceil_div(job.ic, 16 / size_), shifts = shifts_h_ * shifts_w_;
    if (job.ic > kMostUnitChannels || ceil_div(vectors * shifts, std::int64_t(2)) > kMostUnitProducts) return false;
    job.vectors = std::int32_t(vectors), job.pair_vectors = make_divisor(vectors), job.products = 0;
    // Shifts from the farthest on, so that places follow one another.
    const auto vector_of = [&](std::int64_t shift, std::int64_t vector) {
      const std::int64_t back = shifts - 1 - shift;
      return UnitsVector{std::int8_t(back / shifts_w_), std::int8_t(back % shifts_w_), std::int8_t(vector)};
    };
    const auto push = [&](const UnitsVector& first, const UnitsVector& second) {
      job.vector[2 * job.products] = first, job.vector[2 * job.products + 1] = second, ++job.products;
    };
    for (std::int64_t shift = 0; shift < shifts; ++shift)
      for (std::int64_t v = 0; v + 1 < vectors; v += 2) push(vector_of(shift, v), vector_of(shift, v + 1));
    for (std::int64_t shift = 0; vectors % 2 == 1 && shift < shifts; shift += 2) {
      const UnitsVector none{0, 0, -1};
      push(vector_of(shift, vectors - 1), shift + 1 < shifts ? vector_of(shift + 1, vectors - 1) : none);
    }
    return true;
  }

  // The order of columns is that of y.
  bool order() {
    UnitsJob& job = now_.job;
    const bool last = p_.y.c == 1 && p_.out_w > 1 && p_.y.w != 1;
    job.channels_first = !last;
    job.fast = make_divisor(last ? job.oc : job.stride_w), job.middle = make_divisor(last ? job.stride_w : job.stride_h);
    const std::int64_t columns = job.oc * p_.stride_h * p_.stride_w, run = p_.stride_w * (last ? job.oc : 1);
    job.columns = std::int32_t(columns);
    const bool dense = last ? p_.y.w == job.oc : p_.y.w == 1;
    const std::int64_t steps = run | p_.pad_w * p_.y.w | p_.y.h | p_.y.n | (last ? 0 : p_.y.c);
    job.together = !dense || steps % 2 != 0 ? 1 : steps % 4 != 0 ? 2 : 4;
    const std::int64_t rows = job.w_ic | job.w_oc | job.w_h | job.stride_w;
    job.rows_of_weights = !last && job.w_w == 1 && rows * size_ % 16 == 0;
    const std::int64_t farthest = (job.oc - 1) * p_.y.c + (p_.stride_h - 1) * p_.y.h + (p_.stride_w - 1) * p_.y.w;
    job.column_tiles = make_divisor(ceil_div(columns, n_)), job.groups = make_divisor(p_.groups);
    return run >= kLeastUnitRun && columns < 1 << 24 && farthest < kMostUnitCount;
  }

  void try_strips(std::int64_t strips) {
    UnitsJob& job = now_.job;
    job.strip_tiles = std::int32_t(ceil_div(job.tiles, strips));
    job.strips = make_divisor(ceil_div(job.tiles, job.strip_tiles));
    job.filled = job.strip_tiles * 64 + job.halo;
    job.strip_places = make_divisor(job.filled);
    const std::int64_t shared = 16 * (std::int64_t(job.vectors) * job.filled + 2 * job.products * n_);
    const std::int64_t own = 1 << 11;  // of the system and of the kernel itself
    if (shared > shared_.of_block - own || job.vectors * job.filled >= 1 << 14) return;
    const std::int64_t blocks = p_.batch * p_.groups * job.column_tiles.value * job.strips.value;
    if (blocks >= kMostUnitCount) return;
    const std::int64_t most = std::min<std::int64_t>(kUnitBlocks, shared_.of_multiprocessor / (shared + own));
    now_.shared_bytes = int(shared);
    now_.work = {blocks, std::max<std::int64_t>(1, std::min(most, ceil_div(blocks, multiprocessors_))), job.strip_tiles,
                 ceil_div(std::int64_t(job.vectors) * job.filled, std::int64_t(kUnitThreads)) +
                     ceil_div(2 * job.products * n_, std::int64_t(kUnitThreads)),
                 job.products};
    for (int i = 0; i < job.products; ++i) {
      const std::int32_t first = place_of(job.vector[2 * i]), second = place_of(job.vector[2 * i + 1]);
      const bool alone = job.vector[2 * i + 1].vector < 0;
      job.product[i] = {std::uint16_t(first), std::uint16_t(alone ? 0 : second - first)};
    }
    now_.possible = true, now_.cycles = cycles();
    if (!best_.possible || now_.cycles < best_.cycles) best_ = now_;
  }
  std::int32_t place_of(const UnitsVector& v) const {
    const UnitsJob& job = now_.job;
    return v.vector * job.filled + job.halo - v.shift_h * std::int32_t(job.pitch.value) - v.shift_w;
  }

  double cycles() const {
    const FusedUnitsWork& work = now_.work;
    const double store = 64.0 * double(n_ * size_) / kUnitStored[size_ == 2],
                 multiply = double(work.products * n_) / 64 * kUnitProduct;
    const double block = kUnitStart + double(work.filled) * kUnitFill[size_ == 2];
    const double waves = double(ceil_div(work.blocks, multiprocessors_ * work.resident));
    return waves * (block + double(work.resident * work.tiles) * std::max(store, multiply));
  }
};

}  // namespace
}  // namespace upfold::cuda
