// How the fused gradient of the weight cuts a problem into boxes, pieces and steps (fused_weight_boxes.cuh).
#pragma once

#include "fused_weight_planner.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kBoxStaticBytes = sizeof(FusedWeightBoxBarriers) + kBoxAlignment;

// In cycles (H200): a product of 2048 sums; a row of a box, a vector of it, one of zeros because it lies outside; what a step
// takes beside; a microsecond.
constexpr double kProductCycles = 256, kRowCycles = 1.3, kVectorCycles = 0.5, kOutsideCycles = 1.8, kStepCycles = 150,
                 kMicrosecondCycles = 1755;
// How much longer all takes with two stages, or three, and what shared memory does, whose accesses also wait for one another.
constexpr double kTwoStages = 1.2, kThreeStages = 1.05, kSharedWaits = 1.3;
constexpr std::int64_t kMostBoxes = 10, kMostPieces = 16, kMostCopies = 96;  // of a piece, of a step
constexpr std::int64_t kMostBox = 256;                                       // elements of an axis of a box
constexpr std::int64_t kLeastSharedBytes = 1 << 20;                          // of y in a block, from which sharing it pays (H100)
constexpr std::int64_t kPlaneRows = kPlaneChannels, kPartRows = 32;          // channels of a box of x that is no whole tile

// A piece is some boxes of x next to one another, of so many vectors each; y has `pitch` bytes between rows.
struct BoxCut : WeightCut {
  std::int64_t box_vectors, pitch;
};

class BoxPlanner : public WeightPlanner {
 public:
  BoxPlanner(const Problem& p, const FusedWeightTileSize& tile, std::int64_t alignment)
      : WeightPlanner(p, tile, 16), aligned_(alignment >= 16) {}

  // The boxes, pieces and steps that take least time, of maps as one row where they can be.
  bool cut(const SharedMemory& shared) {
    if (!aligned_ || !((merge() && choose()) || (describe() && choose()))) return false;
    cut_ = best_, pitch_ = best_.pitch, x_bytes_ = x_bytes(best_), stage_bytes_ = stage_bytes(best_);
    const std::int64_t allowed =
        std::min(shared.of_block, shared.of_multiprocessor / tile_.blocks - kReservedBytes) - kBoxStaticBytes;
    stages_ = std::min<std::int64_t>(kBoxMostStages, allowed / stage_bytes_);
    return stages_ >= 2;
  }

  FusedWeightPlan plan() const {
    FusedWeightPlan plan = WeightPlanner::plan();
    plan.boxes = boxes();
    const std::int64_t y_read = length_ * planes_ * best_.rows * kPlaneChannels * pitch_;  // bytes, of a block
    plan.sharers = tile_.wide && channel_tiles_ % 2 == 0 && y_read >= kLeastSharedBytes ? 2 : 1;
    plan.engine_cycles = std::int64_t(engine_cycles(best_) / double(tile_.blocks * cut_.chunks) * double(cut_.rows));
    const std::int64_t x_size[] = {p_.in_w, p_.in_h, p_.in_d}, y_size[] = {p_.out_w, p_.out_h, p_.out_d};
    const std::int64_t x_runs[] = {(merges_ ? row_pixels() : p_.in_w) * p_.in_h, 1, p_.in_d};
    const std::int64_t y_runs[] = {p_.out_w * p_.out_h, 1, p_.out_d}, y_rows_of_x[] = {joined_columns(), p_.in_h, p_.out_d};
    plan.x = tensor(p_.x, p_.in_channels, row_ > 0 || merges_ ? x_runs : x_size);
    plan.y = tensor(joins_y_ ? joined_strides() : p_.y, p_.out_channels, merges_ ? y_runs : joins_y_ ? y_rows_of_x : y_size);
    plan.cuts = joins_y_ || (merges_ && p_.in_w < row_pixels());
    if (row_ > 0) plan.x.strides[1] = ceil_div(p_.in_w * p_.in_h * size_, 16) * 16;  // of one row
    plan.x.box[0] = plan.boxes.box_width, plan.x.box[1] = plan.boxes.box_channels;
    plan.x.swizzle = std::int32_t(16 * best_.box_vectors);
    plan.y.box[0] = std::int32_t(pitch_ / size_), plan.y.box[1] = std::int32_t(y_rows());
    // What one block alone reads comes from memory: there longer bursts pay, elsewhere the second-level cache is the limit.
    plan.x.burst = plan.y.burst = channel_tiles_ * unit_tiles_ == 1 ? 256 : 128;
    const std::int64_t row_bytes = ceil_div(parts_ * p_.groups * units_ * tile_.taps * kPlaneRows * 4, std::int64_t(256)) * 256;
    if (can_sum() && plan.workspace_bytes + row_bytes <= workspace_cap_) {
      // Behind the partial sums, and so ahead of what is packed.
      plan.sum.channel_planes = make_divisor(ceil_div(out_channels_per_group(p_), kPlaneRows));
      plan.sum.out_channels = std::int32_t(out_channels_per_group(p_));
      plan.sum.plane_rows = make_divisor(row_taps_ * tap_units_ * tile_.taps);
      plan.sum.line_rows = make_divisor(tap_units_ * tile_.taps);
      plan.sums = true, plan.row_sums_at = plan.partial_bytes;
      plan.partial_bytes += row_bytes, plan.workspace_bytes += row_bytes;
    }
    if (packs_x_) plan.x_pack = pack(p_.x, p_.in_channels, x_size, plan.x);
    if (packs_y_) plan.y_pack = pack(p_.y, p_.out_channels, y_size, plan.y);
    return plan;
  }

 private:
  const bool aligned_;
  BoxCut best_{};
  // Pixels of a row of a run, and how many of them a box may begin early; whether operands are packed.
  std::int64_t row_ = 0, early_ = 0;
  bool packs_x_ = false, packs_y_ = false;
  // Whether the rows of y that a row of x meets are one row; whether maps of both are, of x with zeros behind its rows.
  bool joins_y_ = false, merges_ = false;

  std::int64_t y_rows() const { return std::min(out_channels_per_group(p_), kPlaneRows); }
  std::int64_t x_bytes(const BoxCut& cut) const { return 2 * cut.products() * 16 * tile_.channels; }
  std::int64_t stage_bytes(const BoxCut& cut) const {
    const std::int64_t bytes = x_bytes(cut) + planes_ * cut.rows * kPlaneChannels * cut.pitch;
    return ceil_div(bytes, kBoxAlignment) * kBoxAlignment;
  }

  // Whether a kernel sums y's channels too, and its rows are every element of y once.
  bool can_sum() const {
    const bool compiled = (reads_ == kPairs && tile_.taps == 2) || reads_ == kFours ||
                          (reads_ == kShiftedPairs && tile_.taps == 3 && tile_.channels == 64);
    if (size_ != 2 || !compiled) return false;
    for (const Axis& a : {axis_d(p_), axis_h(p_), axis_w(p_)})
      if (a.kernel != a.stride || a.pad != 0 || a.out != a.in * a.stride || (a.kernel > 1 && a.dilation != 1)) return false;
    return true;
  }

  bool choose() {
    const bool pairs = w_.dilation == 1 && w_.stride % 2 == 0 && tile_.taps % 2 == 0 && shift_ % 2 == 0;
    reads_ = size_ == 2 ? (reads_fours() ? kFours : half_reads()) : pairs ? kPairs : kAny;
    if (merges_) shift_ = 0;  // of taps of the height, whose boxes begin at vectors
    const std::int64_t planned = kMultiprocessorBytes / tile_.blocks - kReservedBytes - kBoxStaticBytes;
    const std::int64_t all = merges_ ? p_.in_h * row_pixels() / vector_ : ceil_div(p_.in_w + early_, vector_);
    double best = -1;
    for (std::int64_t vectors = 8; vectors >= (joins_y_ || merges_ ? 2 : 1); vectors /= 2) {
      const std::int64_t most = vectors == 1 ? 1 : std::min(kMostBoxes, ceil_div(all, vectors));
      for (std::int64_t boxes = 1; boxes <= most; ++boxes) {
        BoxCut cut{{1, vectors * boxes, ceil_div(all, vectors * boxes)}, vectors, 0};
        const std::int64_t least = box_pitch(cut);
        for (cut.pitch = least; cut.pitch < least + 128 && cut.pitch <= kMostBox * size_; cut.pitch += 16) {
          choose_pieces(cut, planned, best);
        }
      }
    }
    return best >= 0;
  }
  // Whether four taps of a pixel are two aligned words, in every row.
  bool reads_fours() const {
    return tile_.taps == 2 && tap_units_ % 2 == 0 && w_.dilation == 1 && w_.stride % 4 == 0 && shift_ % 4 == 0;
  }
  std::int64_t box_pitch(const BoxCut& cut) const {
    if (!merges_) return least_pitch(cut, size_ == 4 ? 0 : 8 / size_);
    const std::int64_t rows = cut.row_vectors * vector_ / row_pixels();
    const std::int64_t columns = (rows - 1) * map_row() + (p_.kernel_h - 1) * y_row() + (row_pixels() - 1) * w_.stride +
                                 tap_units_ * tile_.taps * w_.dilation + 8 / size_;
    return ceil_div(columns * size_, std::int64_t(16)) * 16;
  }

  void choose_pieces(BoxCut cut, std::int64_t planned, double& best) {
    const std::int64_t pieces = total_rows() * cut.chunks;
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
      best = cost, best_ = cut, steps_ = steps, step_microseconds_ = step / kMicrosecondCycles;
    }
  }

  // Vectors of y outside it that the boxes of a row of x have, in each row of a box.
  std::int64_t vectors_outside(const BoxCut& cut) const {
    if (joins_y_ || merges_) return 0;
    const std::int64_t step = cut.row_vectors * vector_ * w_.stride, columns = cut.pitch / size_, begin = -w_.pad - shift_;
    std::int64_t outside = 0;
    for (std::int64_t i = 0; i < cut.chunks && begin + i * step < 0; ++i) outside += std::min(columns, -(begin + i * step));
    for (std::int64_t i = cut.chunks - 1; i >= 0 && begin + i * step + columns > w_.out; --i)
      outside += std::min(columns, begin + i * step + columns - w_.out);
    return ceil_div(outside, vector_);
  }
  // Cycles of a multiprocessor for the pieces of one row of x, of the same of all its blocks: of the copy engine, which takes its
  // time for each row of a box,
  double engine_cycles(const BoxCut& cut) const {
    const double chunks = double(cut.chunks), vectors = chunks * double(cut.row_vectors);
    const double inside = merges_ ? double(p_.in_h * row_pixels() / vector_) : double(ceil_div(p_.in_w, vector_));
    const double outside = row_ > 0 ? 0 : vectors - inside;
    const double x = vectors / double(cut.box_vectors) * kRowCycles + vectors * kVectorCycles + outside * kOutsideCycles;
    const double y =
        chunks * (kRowCycles + double(cut.pitch) / 16 * kVectorCycles) + double(vectors_outside(cut)) * kOutsideCycles;
    return tile_.blocks * (x_rows() * x + planes_rows() * y);
  }
  // or of products, or of shared memory, where products read x, rows are read and copies arrive.
  double row_cycles(const BoxCut& cut) const {
    const double chunks = double(cut.chunks), vectors = chunks * double(cut.row_vectors);
    const int meet = reads_ == kFours ? conflicts_of_fours(cut.pitch) : conflicts(cut.pitch * (reads_ == kPairs ? 2 : 1));
    const double reads = vectors / 2 * double(4 * tile_.taps * tile_.warps * meet);
    const double x_reads = vectors / 2 * double(tile_.taps * tile_.warps * tile_.channels) / 16;
    const double arrivals = (x_rows() * vectors * 16 + planes_rows() * chunks * double(cut.pitch)) / 128;
    const double accesses = kSharedWaits * tile_.blocks * (reads + x_reads + arrivals);
    return std::max({engine_cycles(cut), vectors / 2 * kProductCycles * sums(), accesses});
  }
  double x_rows() const { return double(std::min<std::int64_t>(tile_.channels, in_channels_per_group(p_))); }
  double planes_rows() const { return double(std::min(planes_, units_ / plane_units_) * y_rows()); }

  // Whether a tensor's rows begin at multiples of 16 bytes. Rows that lie on one another are packed.
  bool fits(const Strides& s, std::int64_t channels, const std::int64_t (&size)[3]) const {
    const std::int64_t strides[] = {s.n, s.c, s.d, s.h}, counts[] = {p_.batch, channels, size[2], size[1]};
    for (int i = 0; i < 4; ++i) {
      if (counts[i] == 1) continue;
      if (strides[i] < size[0] || strides[i] * size_ % 16 != 0 || strides[i] * size_ >= std::int64_t(1) << 40) return false;
    }
    return true;
  }
  // The same of maps, whose rows follow one another.
  bool maps_fit(const Strides& s, std::int64_t channels, const std::int64_t (&size)[3]) const {
    return s.h == size[0] && size[0] <= kMostCount / size[1] && fits(s, channels, {size[0] * size[1], 1, size[2]});
  }
  bool x_maps_fit() const { return maps_fit(p_.x, p_.in_channels, {p_.in_w, p_.in_h, p_.in_d}); }
  // Whether boxes of x may begin before a row and end behind it, in its neighbours: what they hold there meets columns outside
  // y, and all pixels of a map meet the same taps, so that a NaN goes nowhere else.
  bool rows_are_a_run() const {
    const bool inside = w_.pad == 0 && p_.pad_h == 0 && (w_.kernel - 1) * w_.dilation < w_.stride && w_.out <= w_.in * w_.stride;
    return inside && x_maps_fit() && p_.in_w * w_.stride % vector_ == 0;
  }
  // Elements from the row of a tap of the height to that of the next one.
  std::int64_t y_row() const { return p_.dilation_h * p_.y.h; }
  std::int64_t joined_columns() const { return (p_.kernel_h - 1) * y_row() + p_.out_w; }
  Strides joined_strides() const {
    Strides s = p_.y;
    s.h *= p_.stride_h;
    return s;
  }
  // Whether all rows of y that a row of x meets are one row of whole vectors; columns ahead of a row would be those of the one
  // before. Products end with their pieces, not within one.
  bool can_join_y() const {
    if (!tile_.wide || w_.pad != 0 || p_.pad_h != 0 || p_.in_w <= vector_ || p_.y.h < p_.out_w) return false;
    if (p_.kernel_h * p_.dilation_h > kMostCount / p_.y.h) return false;
    return fits(joined_strides(), p_.out_channels, {p_.out_w, p_.in_h, p_.out_d});
  }

  // Of maps as one row: pixels of a row of x, in whole vectors; columns of y that it meets.
  std::int64_t row_pixels() const { return ceil_div(p_.in_w, vector_) * vector_; }
  std::int64_t map_row() const { return p_.stride_h * p_.out_w; }
  // Whether maps of y, whose rows follow one another, are rows of whole vectors, and rows of x one vector or two, so that what a
  // product reads is as far from the one before everywhere. Behind the last row of x, where it has zeros, there is no row of y.
  bool can_merge() const {
    if (w_.pad != 0 || p_.pad_h != 0 || p_.in_h == 1 || p_.in_w > 2 * vector_) return false;
    if ((p_.in_w < row_pixels() && !tile_.wide) || p_.out_h > p_.in_h * p_.stride_h) return false;
    if (p_.in_h * p_.stride_h > kMostCount / p_.out_w || map_row() % vector_ != 0) return false;
    return maps_fit(p_.y, p_.out_channels, {p_.out_w, p_.out_h, p_.out_d});
  }
  bool merge() {
    if (!can_merge()) return false;
    merges_ = true, number_planes(true);
    if (!pack_first(p_.in_w < row_pixels() || !x_maps_fit(), false)) return false;
    set_shift();
    return true;
  }

  // Whether boxes can be described, of the operands or of what is packed of them.
  bool describe() {
    merges_ = false, number_planes(false);
    const std::int64_t x_size[] = {p_.in_w, p_.in_h, p_.in_d}, y_size[] = {p_.out_w, p_.out_h, p_.out_d};
    const bool x_fits = fits(p_.x, p_.in_channels, x_size), y_fits = fits(p_.y, p_.out_channels, y_size);
    joins_y_ = !y_fits && can_join_y();
    if (joins_y_) set_shift();
    row_ = !x_fits && !joins_y_ && rows_are_a_run() ? p_.in_w : 0;
    early_ = row_ == 0 ? 0 : vector_ - (std::int64_t(1) << std::min(log_of(vector_), log_of(p_.in_w & -p_.in_w)));
    return pack_first(!x_fits && row_ == 0, !y_fits && !joins_y_);
  }
  // Taps of the height begin within a vector: the most columns from its first, which are halves of vectors for all or for none.
  void set_shift() { shift_ = y_row() % vector_ == 0 ? 0 : y_row() % (vector_ / 2) == 0 ? vector_ / 2 : vector_ - 1; }
  bool pack_first(bool x, bool y) {
    packs_x_ = x, packs_y_ = y;
    const std::int64_t x_vectors = packed_vectors(p_.in_channels, {p_.in_w, p_.in_h, p_.in_d}),
                       y_vectors = packed_vectors(p_.out_channels, {p_.out_w, p_.out_h, p_.out_d});
    if ((packs_x_ && x_vectors > kMostCount) || (packs_y_ && y_vectors > kMostCount)) return false;
    packed_bytes_ = 16 * ((packs_x_ ? x_vectors : 0) + (packs_y_ ? y_vectors : 0));
    return true;
  }
  std::int64_t packed_vectors(std::int64_t channels, const std::int64_t (&size)[3]) const {
    return p_.batch * channels * size[1] * size[2] * ceil_div(size[0], vector_);
  }

  FusedWeightBoxes boxes() const {
    const std::int64_t vectors = best_.box_vectors, channels = tile_.channels, in_channels = in_channels_per_group(p_);
    const std::int64_t boxes = cut_.row_vectors / vectors;
    FusedWeightBoxes b{};
    b.width = std::int32_t(cut_.row_vectors * vector_), b.box_width = std::int32_t(vectors * vector_);
    b.piece_products = std::int32_t(ceil_div(cut_.row_vectors, 2)), b.box_products = std::int32_t(ceil_div(vectors, 2));
    b.box_channels = std::int32_t(in_channels % channels == 0 ? channels : in_channels < channels ? in_channels : kPartRows);
    b.channel_boxes = make_divisor(ceil_div(std::min(channels, in_channels), std::int64_t(b.box_channels)));
    b.piece_copies = make_divisor(planes_ + boxes * b.channel_boxes.value);
    b.x_box = std::int32_t(16 * vectors * b.box_channels), b.x_bytes = std::int32_t(16 * vectors * channels);
    b.y_box = std::int32_t(y_rows() * pitch_), b.y_bytes = std::int32_t(kPlaneChannels * pitch_);
    // From vector to vector of y's pixels; pieces of a product.
    const std::int64_t next_row = map_row() * size_, row_vectors = row_pixels() / vector_;
    const std::int64_t vector = merges_ && row_vectors == 1 ? next_row : 16 * w_.stride, turn = vectors == 1 ? 2 : 1;
    b.y_next = std::int32_t(merges_ && row_vectors == 2 ? next_row : 2 * vector),
    b.y_turn = std::int32_t(turn * b.y_bytes - (b.piece_products - 1) * b.y_next);
    b.x_next = 2, b.x_turn = std::int32_t(turn * b.x_bytes / 16 - (b.box_products - 1) * b.x_next);
    b.second = std::int32_t(vectors == 1 ? b.y_bytes : vector);
    // The kind of swizzle, the distances of groups of eight rows and, without one, of the vectors of the reduction.
    const std::uint64_t kind = vectors == 8 ? 1 : vectors == 4 ? 2 : vectors == 2 ? 3 : 0;
    b.x_layout = kind << 62 | std::uint64_t(8 * vectors) << 32 | std::uint64_t(vectors == 1 ? channels : 1) << 16;
    b.row = std::int32_t(row_), b.y_row = joins_y_ ? std::int32_t(y_row()) : 0;
    b.tap_row = merges_ ? std::int32_t(y_row()) : 0, b.row_units = make_divisor(tap_units_);
    b.y_piece = std::int32_t(merges_ ? b.width / row_pixels() * map_row() : b.width * w_.stride);
    b.row_pixels = std::int32_t(merges_ ? 2 * vector_ : cut_.chunks * b.width);
    b.second_pixel = std::int32_t(merges_ && row_vectors == 1 ? 0 : vector_);
    return b;
  }

  // Rows of whole vectors: [sample][channel][depth][height].
  FusedWeightPackJob pack(const Strides& s, std::int64_t channels, const std::int64_t (&size)[3], BoxTensor& tensor) const {
    const std::int64_t row = ceil_div(size[0], vector_), map = row * size[1] * size[2];
    const std::int64_t strides[] = {map, row, row * size[1], map * channels};
    for (int i = 0; i < 4; ++i) tensor.strides[i] = 16 * strides[i];
    FusedWeightPackJob job{};
    job.row_vectors = make_divisor(row), job.height = make_divisor(size[1]), job.depth = make_divisor(size[2]);
    job.channels = make_divisor(channels);
    job.vectors = std::uint32_t(packed_vectors(channels, size)), job.width = std::int32_t(size[0]);
    job.n = s.n, job.c = s.c, job.d = s.d, job.h = s.h;
    job.end = (p_.batch - 1) * s.n + (channels - 1) * s.c + (size[2] - 1) * s.d + (size[1] - 1) * s.h + size[0];
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
};

}  // namespace
}  // namespace upfold::cuda
