// How the fused gradient of the weight cuts a problem into blocks and steps.
#pragma once

#include <algorithm>

#include "fused_weight_launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostCount = std::int64_t(1) << 30, kMostBox = 256,  // elements of an axis of a box
    kPlaneRows = kPlaneChannels, kPartRows = 32;  // channels of a box of x where they are not whole tiles
constexpr std::int64_t kMostPartial = std::int64_t(64) << 20;  // bytes of partial sums, beyond the first part
constexpr std::int64_t kMultiprocessors = 132;                 // those of an H200: parts do not depend on the device
constexpr std::int64_t kMultiprocessorBytes = 228 << 10, kReservedBytes = 1 << 10,
                       kStaticBytes = sizeof(FusedWeightShared) + sizeof(FusedWeightBarriers),
                       kBoxStaticBytes = sizeof(FusedWeightBoxBarriers) + kBoxAlignment;

// What a step costs, in products of one unit-tile; and what a block costs beside its steps, in microseconds (H200).
constexpr double kStepProducts = 0.7, kBlockMicroseconds = 3.0, kProductMicroseconds = 0.26, kSumBytesMicrosecond = 1.5e6;

// Of boxes (H200), in cycles: a product of 2048 sums; a row of a box, a vector of it, one of zeros because it lies outside; what a
// step takes beside; a microsecond.
constexpr double kProductCycles = 256, kRowCycles = 1.3, kVectorCycles = 0.5, kOutsideCycles = 1.8, kStepCycles = 150,
                 kMicrosecondCycles = 1755;
// How much longer all takes with two stages, or three, and what shared memory does, whose accesses also wait for one another.
constexpr double kTwoStages = 1.2, kThreeStages = 1.05, kSharedWaits = 1.3;
constexpr std::int64_t kMostBoxes = 10, kMostPieces = 16, kMostCopies = 96;  // of a piece, of a step

int log_of(std::int64_t value) {
  int log = 0;
  while ((std::int64_t(2) << log) <= value) ++log;
  return log;
}

// The logarithm of the bytes, at most 16, that divide all of these.
int grain_of(std::int64_t alignment, std::initializer_list<std::int64_t> bytes) {
  std::int64_t grain = std::min<std::int64_t>(16, alignment);
  for (std::int64_t b : bytes)
    while (b % grain != 0) grain /= 2;
  return log_of(grain);
}

// Of 1 << log threads that copy neighbouring pieces: as few turns as can be, and few threads without a piece.
int lanes_of(std::int64_t pieces, int least, int most) {
  int best = most;
  std::int64_t best_slots = -1;
  for (int log = most; log >= std::max(least, 2); --log) {
    const std::int64_t slots = ceil_div(pieces, std::int64_t(1) << log) << log;
    if (best_slots < 0 || slots < best_slots) best = log, best_slots = slots;
  }
  return best;
}

struct Cut {
  std::int64_t rows, row_vectors, chunks;
  std::int64_t box_vectors, pitch;  // of boxes
};

class Planner {
 public:
  Planner(const Problem& p, const FusedWeightTileSize& tile, std::int64_t alignment)
      : p_(p), tile_(tile), alignment_(alignment) {
    size_ = element_bytes(p.dtype), vector_ = 16 / size_, w_ = axis_w(p);
    if (w_.kernel == 1) w_.dilation = 1;
    const std::int64_t s = size_;
    x_grain_ = grain_of(alignment, {p.x.n * s, p.x.c * s, p.x.d * s, p.x.h * s, p.in_w * s});
    y_grain_ = grain_of(alignment, {p.y.n * s, p.y.c * s, p.y.d * s, p.y.h * s, p.out_w * s});
    const std::int64_t elements = (std::int64_t(1) << y_grain_) / size_;
    const std::int64_t grain = tile.boxes ? vector_ : elements;
    shift_ = ((-w_.pad) % grain + grain) % grain;
    tap_units_ = ceil_div(w_.kernel, tile.taps), row_taps_ = p.kernel_d * p.kernel_h;
    units_ = ceil_div(out_channels_per_group(p), kPlaneChannels) * row_taps_ * tap_units_;
    const std::int64_t warps = tile.warps;
    planes_ = warps % tap_units_ == 0   ? warps / tap_units_
              : tap_units_ % warps == 0 ? 1
                                        : std::min(warps, (warps + tap_units_ - 2) / tap_units_ + 1);
    choose_reads();
  }

  bool supported() const {
    if (p_.op != Operator::kConvTransposeWeight || p_.batch == 0) return false;
    if (p_.dtype != Dtype::kFloat32 && p_.dtype != Dtype::kFloat16 && p_.dtype != Dtype::kBFloat16) return false;
    if ((p_.x.w != 1 && p_.in_w > 1) || (p_.y.w != 1 && p_.out_w > 1)) return false;
    for (const Axis& a : {axis_d(p_), axis_h(p_), axis_w(p_)}) {
      if (std::max({a.in, a.out, a.kernel, a.stride, a.pad, a.dilation}) > kMostCount) return false;
      if (a.in > kMostCount / a.stride || a.kernel > kMostCount / a.dilation) return false;
    }
    const std::int64_t rows = p_.in_d * p_.in_h;
    return p_.in_d <= kMostCount / p_.in_h && p_.batch <= kMostCount / rows && units_ <= kMostCount / 64 &&
           in_channels_per_group(p_) <= kMostCount && p_.groups <= kMostCount;
  }

  bool cut(const SharedMemory& shared) { return tile_.boxes ? cut_boxes(shared) : cut_copies(shared); }

  // The cut that takes the fewest products and steps, among those of which three stages fit where any does.
  bool cut_copies(const SharedMemory& shared) {
    const std::int64_t planned = kMultiprocessorBytes / tile_.blocks - kReservedBytes - kStaticBytes;
    const std::int64_t all = ceil_div(p_.in_w, vector_), total_rows = p_.batch * p_.in_d * p_.in_h;
    double best = -1;
    for (int stages = 3; stages >= 2 && best < 0; --stages) {
      for (std::int64_t vectors = 1; vectors <= std::min<std::int64_t>(all, kStepVectors); ++vectors) {
        const std::int64_t chunks = ceil_div(all, vectors);
        if (ceil_div(all, chunks) != vectors) continue;
        for (std::int64_t rows = 1; rows * vectors <= kStepVectors && (rows == 1 || chunks == 1) && rows <= total_rows; ++rows) {
          const Cut cut{rows, vectors, chunks, 0, 0};
          if (stages * stage_bytes(cut) > planned) continue;
          const double cost = double(ceil_div(total_rows, rows) * chunks) * (double(products(cut)) + kStepProducts);
          if (best < 0 || cost < best) best = cost, cut_ = cut;
        }
      }
    }
    if (best < 0) return false;
    const std::int64_t allowed =
        std::min(shared.of_block, shared.of_multiprocessor / tile_.blocks - kReservedBytes) - kStaticBytes;
    stages_ = std::min<std::int64_t>(kWeightMostStages, std::min(allowed, std::max(planned, allowed)) / stage_bytes(cut_));
    if (stages_ < 2) stages_ = (shared.of_block - kStaticBytes) / stage_bytes(cut_) >= 2 ? 2 : 0;
    steps_ = ceil_div(total_rows, cut_.rows) * cut_.chunks;
    step_microseconds_ = kProductMicroseconds * sums() * (double(products(cut_)) + kStepProducts);
    return stages_ >= 2 && steps_ <= kMostCount;
  }

  // The boxes, pieces and steps that take least time.
  bool cut_boxes(const SharedMemory& shared) {
    if (!boxes_fit()) return false;
    const std::int64_t planned = kMultiprocessorBytes / tile_.blocks - kReservedBytes - kBoxStaticBytes;
    const std::int64_t all = ceil_div(p_.in_w + early_, vector_);
    double best = -1;
    for (std::int64_t vectors = 8; vectors >= 1; vectors /= 2) {
      const std::int64_t most = vectors == 1 ? 1 : std::min(kMostBoxes, ceil_div(all, vectors));
      for (std::int64_t boxes = 1; boxes <= most; ++boxes) {
        Cut cut{1, vectors * boxes, ceil_div(all, vectors * boxes), vectors, 0};
        const std::int64_t least = least_pitch(cut);
        for (cut.pitch = least; cut.pitch < least + 128 && cut.pitch <= kMostBox * size_; cut.pitch += 16) {
          choose_pieces(cut, planned, best);
        }
      }
    }
    if (best < 0) return false;
    const std::int64_t allowed =
        std::min(shared.of_block, shared.of_multiprocessor / tile_.blocks - kReservedBytes) - kBoxStaticBytes;
    stages_ = std::min<std::int64_t>(kBoxMostStages, allowed / stage_bytes(cut_));
    return stages_ >= 2;
  }
  void choose_pieces(Cut cut, std::int64_t planned, double& best) {
    const std::int64_t pieces = p_.batch * p_.in_d * p_.in_h * cut.chunks;
    if (pieces > kMostCount) return;
    const double piece = row_cycles(cut) / double(cut.chunks);
    const std::int64_t least = cut.box_vectors == 1 ? 2 : 1;  // a product takes two vectors
    const std::int64_t copies = planes_ + ceil_div(cut.row_vectors, cut.box_vectors);
    for (cut.rows = least; cut.rows <= kMostPieces; cut.rows += least) {
      const std::int64_t stages = planned / stage_bytes(cut), steps = ceil_div(pieces, cut.rows);
      if (stages < 2 || (cut.rows > least && (steps * (cut.rows - least) >= pieces || cut.rows * copies > kMostCopies))) return;
      const double step = double(cut.rows) * piece + kStepCycles;
      const double cost = double(steps) * step * (stages == 2 ? kTwoStages : stages == 3 ? kThreeStages : 1.0);
      if (best >= 0 && cost >= best) continue;
      best = cost, cut_ = cut, steps_ = steps, step_microseconds_ = step / kMicrosecondCycles;
    }
  }

  // Parts of the reduction: as many as keep the blocks of a large device busy in whole waves.
  bool split(std::int64_t workspace_cap) {
    channel_tiles_ = ceil_div(in_channels_per_group(p_), tile_.channels), unit_tiles_ = ceil_div(units_, tile_.warps);
    const std::int64_t tiles = channel_tiles_ * unit_tiles_ * p_.groups, slots = kMultiprocessors * tile_.blocks;
    part_elements_ = units_ * tile_.taps * kPlaneChannels * sum_pitch() * p_.groups;
    const std::int64_t bytes = part_elements_ * 4, most = std::min((workspace_cap - packed_bytes_) / bytes, 1 + kMostPartial / bytes);
    if (workspace_cap < packed_bytes_ || most < 1 || tiles > kMostCount) return false;
    double best = -1;
    for (std::int64_t parts = 1; parts <= std::min(most, steps_); ++parts) {
      if (parts > 1 && tiles * parts > std::max(4 * slots, 2 * tiles)) break;
      const std::int64_t length = ceil_div(steps_, parts);
      if (ceil_div(steps_, length) != parts) continue;
      const double cost = double(ceil_div(tiles * parts, slots)) * (double(length) * step_microseconds_ + kBlockMicroseconds) +
                          double(parts * bytes) / kSumBytesMicrosecond;
      if (best < 0 || cost < best) best = cost, parts_ = parts, length_ = length;
    }
    return best >= 0 && tiles * parts_ <= kMostCount;
  }

  FusedWeightPlan plan() const {
    FusedWeightPlan plan{};
    plan.possible = true, plan.reads = reads_, plan.parts = parts_;
    plan.job = job();
    plan.sum = sum();
    plan.blocks = unsigned(channel_tiles_ * unit_tiles_ * p_.groups * parts_);
    plan.shares = parts_ >= 8, plan.threads = unsigned(tile_.threads);
    const std::int64_t outputs = plan.shares ? 8 : 64, channels = 32;
    plan.sum.channel_tiles = make_divisor(ceil_div(in_channels_per_group(p_), channels));
    plan.sum.output_tiles = make_divisor(ceil_div(plan.sum.outputs, outputs));
    plan.sum_blocks = unsigned(std::int64_t(plan.sum.channel_tiles.value) * plan.sum.output_tiles.value * p_.groups);
    plan.workspace_bytes = plan.partial_bytes = parts_ * part_elements_ * 4;
    if (tile_.boxes) plan_boxes(plan);
    return plan;
  }

 private:
  const Problem& p_;
  const FusedWeightTileSize& tile_;
  const std::int64_t alignment_;
  Axis w_;
  std::int64_t size_, vector_, shift_, tap_units_, row_taps_, units_, planes_;
  int x_grain_, y_grain_;
  FusedWeightReads reads_ = kAny;
  Cut cut_{};
  std::int64_t stages_ = 0, steps_ = 0, channel_tiles_ = 0, unit_tiles_ = 0, part_elements_ = 0, parts_ = 0, length_ = 0;
  double step_microseconds_ = 0;
  // Of boxes: pixels of a row of a run, those that a box may begin early, what is packed.
  std::int64_t row_ = 0, early_ = 0, packed_bytes_ = 0;
  bool packs_x_ = false, packs_y_ = false;

  // Sums of the blocks of a multiprocessor, of 2048 taps of warps times channels.
  double sums() const { return double(tile_.taps * tile_.channels * tile_.warps) / 2048.0 * tile_.blocks; }

  void choose_reads() {
    const bool near = w_.dilation == 1, pairs = near && w_.stride == 2;
    if (size_ == 4 && tile_.boxes) {
      reads_ = near && w_.stride % 2 == 0 && tile_.taps % 2 == 0 && shift_ % 2 == 0 ? kPairs : kAny;
    } else if (size_ == 4) {
      reads_ = pairs && tile_.taps % 2 == 0 && shift_ % 2 == 0 ? kPairs : kAny;
    } else if (pairs) {
      reads_ = tile_.taps == 2 && shift_ % 4 == 0 && w_.kernel <= 2 ? kPairs : kShiftedPairs;
    } else {
      reads_ = !near ? kAny : w_.stride == 1 ? kUnitStride : kWords;
    }
  }

  static std::int64_t products(const Cut& cut) { return (cut.rows * cut.row_vectors + 1) / 2; }
  std::int64_t sum_pitch() const { return ceil_div(in_channels_per_group(p_), 8) * 8; }

  // Columns of y that a row of a step reads, the shift included.
  std::int64_t columns(const Cut& cut) const {
    return shift_ + (cut.row_vectors * vector_ - 1) * w_.stride + (w_.kernel - 1) * w_.dilation + 1;
  }

  // Bytes of a row of y that are read: taps beyond the kernel too, and the words behind a pair of values.
  std::int64_t least_pitch(const Cut& cut) const {
    const std::int64_t behind = tile_.boxes && size_ == 4 ? 0 : 8 / size_;
    const std::int64_t read = columns(cut) + (tap_units_ * tile_.taps - w_.kernel) * w_.dilation + behind;
    return ceil_div(read * size_, 16) * 16;
  }
  // How many lanes meet in a bank when eight rows and four lanes of each are read; pairs are read half a warp at a time, whose rows
  // are two apart in boxes.
  int conflicts(std::int64_t bytes) const {
    const int words = reads_ == kPairs ? 2 : 1, rows = 8 / words, apart = tile_.boxes ? words : 1;
    int banks[32] = {}, most = 0;
    for (int row = 0; row < rows; ++row)
      for (int lane = 0; lane < 4; ++lane)
        for (int word = 0; word < words; ++word)
          most = std::max(most, ++banks[(row * apart * (bytes / 4) + lane * w_.stride % 32 + word) % 32]);
    return most;
  }
  // Bytes between rows: as few as meet in the fewest banks.
  std::int64_t pitch(const Cut& cut) const {
    if (tile_.boxes) return cut.pitch;
    const std::int64_t least = least_pitch(cut);
    std::int64_t best = least;
    int fewest = 99;
    for (std::int64_t bytes = least; bytes < least + 128; bytes += 16) {
      const int most = conflicts(bytes);
      if (most < fewest) fewest = most, best = bytes;
    }
    return best;
  }

  // Vectors of y outside it that the boxes of a row of x have, in each row of a box.
  std::int64_t vectors_outside(const Cut& cut) const {
    const std::int64_t step = cut.row_vectors * vector_ * w_.stride, columns = cut.pitch / size_, begin = -w_.pad - shift_;
    std::int64_t outside = 0;
    for (std::int64_t i = 0; i < cut.chunks && begin + i * step < 0; ++i) outside += std::min(columns, -(begin + i * step));
    for (std::int64_t i = cut.chunks - 1; i >= 0 && begin + i * step + columns > w_.out; --i)
      outside += std::min(columns, begin + i * step + columns - w_.out);
    return ceil_div(outside, vector_);
  }
  // Cycles of a multiprocessor for the pieces of one row of x, of the same of all its blocks: of products, of the copy engine, which
  // takes its time for each row of a box, or of shared memory, where products read x, rows are read and copies arrive.
  double row_cycles(const Cut& cut) const {
    const double chunks = double(cut.chunks), vectors = chunks * double(cut.row_vectors), blocks = tile_.blocks;
    const double x_rows = double(std::min<std::int64_t>(tile_.channels, in_channels_per_group(p_)));
    const double y_rows = double(std::min(planes_, units_ / tap_units_) * std::min(kPlaneRows, out_channels_per_group(p_)));
    const double x_outside = row_ > 0 ? 0 : vectors - double(ceil_div(p_.in_w, vector_));
    const double x_engine = vectors / double(cut.box_vectors) * kRowCycles + vectors * kVectorCycles + x_outside * kOutsideCycles;
    const double y_engine =
        chunks * (kRowCycles + double(cut.pitch) / 16 * kVectorCycles) + double(vectors_outside(cut)) * kOutsideCycles;
    const double engine = blocks * (x_rows * x_engine + y_rows * y_engine);
    const double reads = vectors / 2 * double(4 * tile_.taps * tile_.warps * conflicts(cut.pitch));
    const double x_reads = vectors / 2 * double(tile_.taps * tile_.warps * tile_.channels) / 16;
    const double arrivals = (x_rows * vectors * 16 + y_rows * chunks * double(cut.pitch)) / 128;
    return std::max({engine, vectors / 2 * kProductCycles * sums(), kSharedWaits * blocks * (reads + x_reads + arrivals)});
  }

  std::int64_t x_bytes(const Cut& cut) const { return 2 * products(cut) * (16 * tile_.channels + (tile_.boxes ? 0 : 16)); }
  std::int64_t stage_bytes(const Cut& cut) const {
    const std::int64_t bytes = x_bytes(cut) + planes_ * cut.rows * kPlaneChannels * pitch(cut);
    return tile_.boxes ? ceil_div(bytes, kBoxAlignment) * kBoxAlignment : bytes;
  }

  FusedWeightJob job() const {
    FusedWeightJob job{};
    job.chunks = make_divisor(cut_.chunks), job.in_h = make_divisor(p_.in_h), job.in_d = make_divisor(p_.in_d);
    job.rows = make_divisor(cut_.rows), job.row_vectors = make_divisor(cut_.row_vectors);
    job.total_rows = std::uint32_t(p_.batch * p_.in_d * p_.in_h), job.steps = std::uint32_t(steps_);
    job.length = std::uint32_t(length_);
    job.step_vectors = std::int32_t(cut_.rows * cut_.row_vectors), job.products = std::int32_t(products(cut_));
    job.channel_tiles = make_divisor(channel_tiles_), job.unit_tiles = make_divisor(unit_tiles_);
    job.groups = make_divisor(p_.groups), job.tap_units = make_divisor(tap_units_), job.row_taps = make_divisor(row_taps_);
    job.kernel_h = make_divisor(p_.kernel_h);
    job.units = std::int32_t(units_), job.block_planes = std::int32_t(planes_);
    job.in_channels = std::int32_t(in_channels_per_group(p_)), job.out_channels = std::int32_t(out_channels_per_group(p_));
    job.in_w = std::int32_t(p_.in_w);
    job.out_d = std::int32_t(p_.out_d), job.out_h = std::int32_t(p_.out_h), job.out_w = std::int32_t(p_.out_w);
    int i = 0;
    for (const Axis& a : {axis_d(p_), axis_h(p_), w_}) {
      job.stride[i] = std::int32_t(a.stride), job.pad[i] = std::int32_t(a.pad), job.dilation[i++] = std::int32_t(a.dilation);
    }
    job.x_n = p_.x.n, job.x_c = p_.x.c, job.x_d = p_.x.d, job.x_h = p_.x.h;
    job.y_n = p_.y.n, job.y_c = p_.y.c, job.y_d = p_.y.d, job.y_h = p_.y.h;
    job.x_grain = x_grain_, job.y_grain = y_grain_;
    job.x_pieces = (2 * job.products) << (kVectorLog - x_grain_);
    job.y_pieces = std::int32_t(ceil_div(columns(cut_) * size_, std::int64_t(1) << y_grain_));
    const int threads = log_of(tile_.copiers);
    job.x_lanes = lanes_of(job.x_pieces, threads - log_of(tile_.channels), 4);
    job.y_lanes = lanes_of(job.y_pieces, 0, 4);
    job.y_at = std::int32_t(x_bytes(cut_)), job.shift = std::int32_t(shift_ * size_), job.pitch = std::int32_t(pitch(cut_));
    job.stage_bytes = std::int32_t(stage_bytes(cut_)), job.stages = std::int32_t(stages_);
    job.sum_pitch = std::int32_t(sum_pitch());
    return job;
  }

  // Whether a tensor's rows begin at multiples of 16 bytes, or, without `rows`, its maps.
  bool fits(const Strides& s, bool rows) const {
    for (std::int64_t stride : {s.n, s.c, s.d, rows ? s.h : 0})
      if (stride * size_ % 16 != 0 || stride * size_ >= std::int64_t(1) << 40) return false;
    return true;
  }
  // Whether boxes of x may begin before a row and end behind it, in its neighbours: what they hold there meets columns outside
  // y, and every pixel meets every tap, so that a NaN goes nowhere else.
  bool rows_are_a_run() const {
    const bool inside = w_.pad == 0 && (w_.kernel - 1) * w_.dilation < w_.stride && w_.out <= w_.in * w_.stride;
    return inside && p_.x.h == p_.in_w && fits(p_.x, false) && p_.in_w * w_.stride % vector_ == 0;
  }
  // Whether boxes can be described, of the operands or of what is packed of them.
  bool boxes_fit() {
    const bool x_fits = fits(p_.x, true);
    row_ = !x_fits && rows_are_a_run() ? p_.in_w : 0;
    early_ = row_ == 0 ? 0 : vector_ - (std::int64_t(1) << std::min(log_of(vector_), log_of(p_.in_w & -p_.in_w)));
    packs_x_ = !x_fits && row_ == 0, packs_y_ = !fits(p_.y, true);
    const std::int64_t x_words = packed_words(p_.in_channels, {p_.in_w, p_.in_h, p_.in_d});
    const std::int64_t y_words = packed_words(p_.out_channels, {p_.out_w, p_.out_h, p_.out_d});
    if ((packs_x_ && x_words > kMostCount) || (packs_y_ && y_words > kMostCount)) return false;
    packed_bytes_ = 4 * ((packs_x_ ? x_words : 0) + (packs_y_ ? y_words : 0));
    return alignment_ >= 16;
  }
  std::int64_t packed_words(std::int64_t channels, const std::int64_t (&size)[3]) const {
    return p_.batch * channels * size[1] * size[2] * ceil_div(size[0], vector_) * 4;
  }

  void plan_boxes(FusedWeightPlan& plan) const {
    const std::int64_t vectors = cut_.box_vectors, channels = tile_.channels, in_channels = in_channels_per_group(p_);
    const std::int64_t boxes = cut_.row_vectors / vectors, y_rows = std::min(out_channels_per_group(p_), kPlaneRows);
    FusedWeightBoxes& b = plan.boxes;
    b.width = std::int32_t(cut_.row_vectors * vector_), b.box_width = std::int32_t(vectors * vector_);
    b.piece_products = std::int32_t(ceil_div(cut_.row_vectors, 2)), b.box_products = std::int32_t(ceil_div(vectors, 2));
    b.box_channels = std::int32_t(in_channels % channels == 0 ? channels : in_channels < channels ? in_channels : kPartRows);
    b.channel_boxes = make_divisor(ceil_div(std::min(channels, in_channels), std::int64_t(b.box_channels)));
    b.piece_copies = make_divisor(planes_ + boxes * b.channel_boxes.value);
    b.x_box = std::int32_t(16 * vectors * b.box_channels), b.x_bytes = std::int32_t(16 * vectors * channels);
    b.y_box = std::int32_t(y_rows * cut_.pitch), b.y_bytes = std::int32_t(kPlaneChannels * cut_.pitch);
    const std::int64_t vector = 16 * w_.stride, turn = vectors == 1 ? 2 : 1;  // pieces
    b.y_next = std::int32_t(2 * vector), b.y_turn = std::int32_t(turn * b.y_bytes - (b.piece_products - 1) * b.y_next);
    b.x_next = 2, b.x_turn = std::int32_t(turn * b.x_bytes / 16 - (b.box_products - 1) * b.x_next);
    b.second = std::int32_t(vectors == 1 ? b.y_bytes : vector);
    // The kind of swizzle, the distances of groups of eight rows and, without one, of the vectors of the reduction.
    const std::uint64_t kind = vectors == 8 ? 1 : vectors == 4 ? 2 : vectors == 2 ? 3 : 0;
    b.x_layout = kind << 62 | std::uint64_t(8 * vectors) << 32 | std::uint64_t(vectors == 1 ? channels : 1) << 16;
    b.row = std::int32_t(row_);
    const std::int64_t x_size[] = {p_.in_w, p_.in_h, p_.in_d}, y_size[] = {p_.out_w, p_.out_h, p_.out_d};
    const std::int64_t x_runs[] = {p_.in_w * p_.in_h, 1, p_.in_d};
    plan.x = tensor(p_.x, p_.in_channels, row_ > 0 ? x_runs : x_size), plan.y = tensor(p_.y, p_.out_channels, y_size);
    if (row_ > 0) plan.x.strides[1] = ceil_div(p_.in_w * p_.in_h * size_, 16) * 16;  // of one row
    plan.x.box[0] = b.box_width, plan.x.box[1] = b.box_channels, plan.x.swizzle = std::int32_t(16 * vectors);
    plan.y.box[0] = std::int32_t(cut_.pitch / size_), plan.y.box[1] = std::int32_t(y_rows);
    // What one block alone reads comes from memory: there longer bursts pay, elsewhere the second-level cache is the limit.
    plan.x.burst = plan.y.burst = channel_tiles_ * unit_tiles_ == 1 ? 256 : 128;
    if (packs_x_) plan.x_pack = pack(p_.x, p_.in_channels, x_size, plan.x);
    if (packs_y_) plan.y_pack = pack(p_.y, p_.out_channels, y_size, plan.y);
    plan.workspace_bytes += packed_bytes_;
  }

  // Rows of whole vectors: [sample][channel][depth][height].
  FusedWeightPackJob pack(const Strides& s, std::int64_t channels, const std::int64_t (&size)[3], BoxTensor& tensor) const {
    const std::int64_t row = ceil_div(size[0], vector_), map = row * size[1] * size[2];
    const std::int64_t strides[] = {map, row, row * size[1], map * channels};
    for (int i = 0; i < 4; ++i) tensor.strides[i] = 16 * strides[i];
    FusedWeightPackJob job{};
    job.row_words = make_divisor(4 * row), job.height = make_divisor(size[1]), job.depth = make_divisor(size[2]);
    job.channels = make_divisor(channels);
    job.words = std::uint32_t(packed_words(channels, size)), job.width = std::int32_t(size[0]);
    job.n = s.n, job.c = s.c, job.d = s.d, job.h = s.h;
    std::int64_t next = s.h * size[1];
    job.dense = size[1] > 1 && (size[2] == 1 || s.d == next);
    next *= size[2];
    job.dense = job.dense && (channels == 1 || s.c == next) && (p_.batch == 1 || s.n == next * channels);
    return job;
  }

  BoxTensor tensor(const Strides& s, std::int64_t channels, const std::int64_t (&size)[3]) const {
    BoxTensor tensor{p_.dtype, {size[0], channels, size[1], size[2], p_.batch}, {s.c, s.h, s.d, s.n}, {1, 1, 1, 1, 1}, 16, 128};
    const std::int64_t row = ceil_div(size[0] * size_, 16) * 16;
    for (std::int64_t& stride : tensor.strides) stride = stride == 0 ? row : stride * size_;  // 0: of one element, never stepped
    return tensor;
  }

  FusedWeightSumJob sum() const {
    FusedWeightSumJob sum{};
    sum.taps = make_divisor(kernel_taps(p_)), sum.kernel_w = make_divisor(p_.kernel_w);
    sum.kernel_h = make_divisor(p_.kernel_h), sum.row_taps = make_divisor(row_taps_), sum.unit_taps = make_divisor(tile_.taps);
    sum.tap_units = std::int32_t(tap_units_), sum.in_channels = std::int32_t(in_channels_per_group(p_));
    sum.outputs = std::int32_t(out_channels_per_group(p_) * kernel_taps(p_)), sum.parts = std::int32_t(parts_);
    sum.sum_pitch = std::int32_t(sum_pitch());
    sum.part_elements = part_elements_, sum.group_elements = part_elements_ / p_.groups;
    sum.w_n = p_.w.n, sum.w_c = p_.w.c, sum.w_d = p_.w.d, sum.w_h = p_.w.h, sum.w_w = p_.w.w;
    return sum;
  }
};

}  // namespace

FusedWeightPlan plan_fused_weight(const Problem& p, const FusedWeightTileSize& tile, std::int64_t alignment,
                                  std::int64_t workspace_cap, const SharedMemory& shared) {
  Planner planner(p, tile, alignment);
  if (!planner.supported() || !planner.cut(shared) || !planner.split(workspace_cap)) return {};
  return planner.plan();
}

}  // namespace upfold::cuda
