// How the fused gradient of the weight cuts a problem into boxes, pieces and steps (fused_weight_boxes.cuh).
#pragma once

#include "fused_weight_boxes_cost.cuh"
#include "fused_weight_pack_launch.cuh"

namespace upfold::cuda {
namespace {

class BoxPlanner : public WeightPlanner {
 public:
  BoxPlanner(const Problem& p, const FusedWeightTileSize& tile, std::int64_t alignment)
      : WeightPlanner(p, tile, 16), aligned_(alignment >= 16) {}

  // The boxes, pieces and steps that take least time, of maps as one row where they can be.
  bool cut(const SharedMemory& shared) {
    if (!aligned_ || !(choose_maps() || choose_rows())) return false;
    begin_at(best_.align);
    steps_ = best_.steps, step_microseconds_ = best_.cycles / kMicrosecondCycles;
    cut_ = best_, pitch_ = best_.pitch, x_bytes_ = x_bytes(best_), stage_bytes_ = stage_bytes(best_);
    if (!fits_packed()) return false;
    const std::int64_t allowed =
        std::min(shared.of_block, shared.of_multiprocessor / tile_.blocks - kReservedBytes) - kBoxStaticBytes;
    stages_ = std::min<std::int64_t>(kBoxMostStages, allowed / stage_bytes_);
    if (tile_.wide && stages_ * stage_bytes_ >= sum_bytes()) most_together_ = kMostTogether;
    return stages_ >= 2;
  }

  FusedWeightPlan plan() const {
    FusedWeightPlan plan = WeightPlanner::plan();
    plan.boxes = boxes();
    plan.sharers = together_ == 1 && shares() ? 2 : 1;
    plan.engine_cycles = std::int64_t(engine_cycles(best_) / double(tile_.blocks * cut_.chunks) * double(cut_.rows));
    const std::int64_t x_size[] = {p_.in_w, p_.in_h, p_.in_d}, y_size[] = {p_.out_w, p_.out_h, p_.out_d};
    const std::int64_t x_runs[] = {(merges_ ? row_pixels() : p_.in_w) * p_.in_h, 1, p_.in_d};
    const std::int64_t y_runs[] = {p_.out_w * p_.out_h, 1, p_.out_d}, y_rows_of_x[] = {joined_columns(), p_.in_h, p_.out_d};
    const std::int64_t x_padded[] = {x_row(best_) * vector_, p_.in_h, p_.in_d};
    plan.x = tensor(p_.x, p_.in_channels, row_ > 0 || merges_ ? x_runs : packs_x_ ? x_padded : x_size);
    plan.y = tensor(joins_y_ ? joined_strides() : p_.y, p_.out_channels, merges_ ? y_runs : joins_y_ ? y_rows_of_x : y_size);
    plan.cuts = cuts();
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
    if (packs_x_) plan.x_pack = pack(p_.x, p_.in_channels, x_size, x_row(best_), plan.x);
    if (packs_y_) plan.y_pack = pack(p_.y, p_.out_channels, y_size, y_row_vectors(), plan.y);
    return plan;
  }

 private:
  bool shares() const override {
    const std::int64_t y_read = length_ * planes_ * best_.rows * kPlaneChannels * pitch_;  // bytes, of a block
    return tile_.wide && channel_tiles_ % 2 == 0 && y_read >= kLeastSharedBytes;
  }

  const bool aligned_;
  BoxCut best_{};
  // Pixels of a row of a run, and how many of them a box may begin early; whether operands are packed.
  std::int64_t row_ = 0, early_ = 0;
  bool packs_x_ = false, packs_y_ = false;
  // Whether the rows of y that a row of x meets are one row; whether maps of both are, of x with zeros behind its rows.
  bool joins_y_ = false, merges_ = false;

  bool cuts() const { return joins_y_ || (merges_ && p_.in_w < row_pixels()); }
  std::int64_t y_rows() const { return std::min(out_channels_per_group(p_), kPlaneRows); }
  std::int64_t x_bytes(const BoxCut& cut) const {
    return ceil_div(cut.rows * cut.boxes() * cut.box_vectors, std::int64_t(2)) * 32 * tile_.channels;
  }
  std::int64_t stage_bytes(const BoxCut& cut) const {
    const std::int64_t behind = joins_y_ ? (cut.row_vectors * vector_ - pixels_of(cut)) * w_.stride * size_ : 0;
    const std::int64_t bytes = x_bytes(cut) + planes_ * cut.rows * kPlaneChannels * cut.pitch + behind;
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

  // Maps as one row, where they can be.
  bool choose_maps() {
    double best = -1;
    if (!can_merge()) return false;
    describe_maps(), choose(best);
    return best >= 0;
  }
  // Rows of y one by one, or joined, for which x may have to be packed, but y need not.
  bool choose_rows() {
    double best = -1, joined = -1;
    describe(false);
    if (!packs_y_ || !can_join_y()) choose(best);
    const BoxCut apart = best_;
    if (best >= 0) best = microseconds(best);
    if (can_join_y()) describe(true), choose(joined);
    if (joined >= 0) joined = kJoined * microseconds(joined);
    if (best >= 0 && (joined < 0 || best <= joined)) describe(false), best_ = apart;
    return best >= 0 || joined >= 0;
  }
  // What so many cycles for all steps of a tile come to, and the packing.
  double microseconds(double cycles) {
    const double packed = fits_packed() ? double(packed_bytes_) : 0, launch = packed > 0 ? kPackMicroseconds : 0;
    return cycles / kMicrosecondCycles * double(tiles()) / double(kMultiprocessors * tile_.blocks) + launch +
           packed * kPackedByteMicroseconds;
  }
  void choose(double& best) {
    for (const std::int64_t align : {std::int64_t(16), kSectorBytes}) {
      begin_at(align);
      choose_boxes(align, best);
    }
  }
  void choose_boxes(std::int64_t align, double& best) {
    const std::int64_t planned = kMultiprocessorBytes / tile_.blocks - kReservedBytes - kBoxStaticBytes;
    const std::int64_t all = row_vectors();
    for (std::int64_t vectors = 8; vectors >= (joins_y_ || merges_ ? 2 : 1); vectors /= 2) {
      const std::int64_t most = vectors == 1 ? 1 : std::min(kMostBoxes, ceil_div(all, vectors));
      for (std::int64_t boxes = 1; boxes <= most; ++boxes) {
        // Of a single box the last vectors may have no products.
        for (std::int64_t used = vectors * boxes; used > (boxes == 1 ? vectors / 2 : vectors * boxes - 1); used -= 2) {
          BoxCut cut{{1, used, ceil_div(all, used)}, vectors, 0, align, 0, 0};
          const std::int64_t least = box_pitch(cut);
          for (cut.pitch = least; cut.pitch < least + 128 && cut.pitch <= kMostBox * size_; cut.pitch += 16) {
            choose_pieces(cut, planned, best);
          }
        }
      }
    }
  }
  // Whether four taps of a pixel are two aligned words, in every row.
  bool reads_fours() const {
    return tile_.taps == 2 && tap_units_ % 2 == 0 && w_.dilation == 1 && w_.stride % 4 == 0 && shift_ % 4 == 0;
  }
  // Pixels of a piece that there are at most. What lanes read behind them is cut where rows are joined, whatever it is.
  std::int64_t pixels_of(const BoxCut& cut) const { return std::min(cut.row_vectors * vector_, p_.in_w); }
  std::int64_t box_pitch(const BoxCut& cut) const {
    if (!merges_)
      return least_pitch(joins_y_ ? pixels_of(cut) : cut.row_vectors * vector_, size_ == 4 || reads_ == kFours ? 0 : 8 / size_);
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
    const std::int64_t copies = planes_ + cut.boxes();
    for (cut.rows = least; cut.rows <= kMostPieces; cut.rows += least) {
      const std::int64_t stages = planned / stage_bytes(cut), steps = ceil_div(pieces, cut.rows);
      if (stages < 2 || (cut.rows > least && (steps * (cut.rows - least) >= pieces || cut.rows * copies > kMostCopies))) return;
      const double step = double(cut.rows) * piece + kStepCycles;
      const double cost = double(steps) * step * (stages == 2 ? kTwoStages : stages == 3 ? kThreeStages : 1.0);
      if (best >= 0 && cost >= best) continue;
      best = cost, best_ = cut, best_.steps = steps, best_.cycles = step;
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
  // Vectors of a row of x; of one that is packed, whose boxes then begin at multiples of their size.
  std::int64_t row_vectors() const { return merges_ ? p_.in_h * row_pixels() / vector_ : ceil_div(p_.in_w + early_, vector_); }
  std::int64_t x_row(const BoxCut& cut) const {
    if (merges_) return row_pixels() / vector_;
    const std::int64_t vectors = ceil_div(p_.in_w, vector_);
    return packs_x_ ? ceil_div(vectors, cut.box_vectors) * cut.box_vectors : vectors;
  }
  std::int64_t y_row_vectors() const { return ceil_div(p_.out_w, vector_); }
  // Bytes that divide where the rows of boxes begin, at most a line: by the strides of the tensor and the steps of the boxes.
  static std::int64_t when(bool counts, std::int64_t bytes) { return counts ? bytes : 0; }
  std::int64_t x_align(const BoxCut& cut) const {
    const std::int64_t chunk = when(cut.chunks > 1, 16 * cut.row_vectors), box = when(cut.boxes() > 1, 16 * cut.box_vectors);
    if (row_ > 0) return 16;
    if (packs_x_) return divisor_of(kLineBytes, {16 * x_row(cut) * (merges_ ? p_.in_h : 1), chunk, box});
    return divisor_of(kLineBytes, {when(p_.batch > 1, p_.x.n * size_), p_.x.c * size_, when(p_.in_d > 1, p_.x.d * size_),
                                   when(p_.in_h > 1 && !merges_, p_.x.h * size_), chunk, box});
  }
  std::int64_t y_align(const BoxCut& cut) const {
    const std::int64_t chunk =
        when(cut.chunks > 1, merges_ ? 16 * cut.row_vectors / row_pixels() * map_row() : 16 * cut.row_vectors * w_.stride);
    const std::int64_t first = when(!joins_y_, (w_.pad + shift_) * size_),
                       early = when(early_ > 0, (vector_ - early_) * w_.stride * size_);
    const std::int64_t taps = when(joins_y_ && p_.kernel_h > 1 && y_row() * size_ % cut.align != 0, cut.align);
    if (packs_y_) return divisor_of(kLineBytes, {16 * y_row_vectors(), chunk, first, early});
    const std::int64_t row = merges_ ? 0 : joins_y_ ? joined_strides().h : p_.y.h;
    return divisor_of(kLineBytes, {when(p_.batch > 1, p_.y.n * size_), p_.y.c * size_, when(p_.out_d > 1, p_.y.d * size_),
                                   when(p_.out_h > 1, row * size_), chunk, first, early, taps});
  }
  // Cycles of a multiprocessor for the pieces of one row of x, of the same of all its blocks: of the copies,
  double engine_cycles(const BoxCut& cut) const {
    BoxCopies copies;
    const double chunks = double(cut.chunks), boxes = chunks * double(cut.boxes());
    copies.add(x_rows() * boxes, cut.box_vectors, x_align(cut));
    copies.add(planes_rows() * chunks, cut.pitch / 16, y_align(cut));
    const double inside = merges_ || !packs_x_ ? double(row_vectors()) : double(x_row(cut));
    const double x_outside = row_ > 0 ? 0 : std::max(0.0, boxes * double(cut.box_vectors) - inside);
    copies.outside = x_rows() * x_outside + planes_rows() * double(vectors_outside(cut));
    return tile_.blocks * copies.cycles();
  }
  // or of products, or of shared memory, where products read x, rows are read and copies arrive.
  double row_cycles(const BoxCut& cut) const {
    const double chunks = double(cut.chunks), vectors = chunks * double(cut.row_vectors);
    const int meet = reads_ == kFours ? conflicts_of_fours(cut.pitch) : conflicts(cut.pitch * (reads_ == kPairs ? 2 : 1));
    const double reads = vectors / 2 * double(4 * tile_.taps * tile_.warps * meet);
    const double x_reads = vectors / 2 * double(tile_.taps * tile_.warps * tile_.channels) / 16;
    const double arrivals = (x_rows() * vectors * 16 + planes_rows() * chunks * double(cut.pitch)) / 128;
    const double accesses = kSharedWaits * tile_.blocks * (reads + x_reads + arrivals);
    return std::max({engine_cycles(cut), vectors / 2 * kProductCycles * (cuts() ? kCuttingProducts : 1.0) * sums(), accesses});
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
  void describe_maps() {
    merges_ = true, number_planes(true);
    packs_x_ = p_.in_w < row_pixels() || !x_maps_fit(), packs_y_ = false;
  }

  // What boxes are of where maps are not one row: the operands, or what is packed of them.
  void describe(bool joins) {
    merges_ = false, number_planes(false);
    const std::int64_t x_size[] = {p_.in_w, p_.in_h, p_.in_d}, y_size[] = {p_.out_w, p_.out_h, p_.out_d};
    const bool x_fits = fits(p_.x, p_.in_channels, x_size), y_fits = fits(p_.y, p_.out_channels, y_size);
    joins_y_ = joins;
    row_ = !x_fits && !joins_y_ && rows_are_a_run() ? p_.in_w : 0;
    early_ = row_ == 0 ? 0 : vector_ - (std::int64_t(1) << std::min(log_of(vector_), log_of(p_.in_w & -p_.in_w)));
    packs_x_ = !x_fits && row_ == 0, packs_y_ = !y_fits && !joins_y_;
  }
  // Bytes of which boxes of y begin at multiples, and so how many columns ahead of the first one that is read, and how they are
  // read. Of taps of the height of joined rows these are the most; merged maps begin at a box themselves, but their taps
  // anywhere.
  void begin_at(std::int64_t align) {
    const std::int64_t elements = align / size_;
    std::int64_t apart = p_.kernel_h > 1 ? elements : 0;  // divides where the taps of the height are
    while (apart > 0 && y_row() % apart != 0) apart /= 2;
    const bool taps_begin_anywhere = joins_y_ || merges_;
    shift_ = taps_begin_anywhere ? (apart > 0 ? elements - apart : 0) : ((-w_.pad) % elements + elements) % elements;
    const bool pairs = w_.dilation == 1 && w_.stride % 2 == 0 && tile_.taps % 2 == 0 && shift_ % 2 == 0;
    reads_ = size_ == 2 ? (reads_fours() ? kFours : half_reads()) : pairs ? kPairs : kAny;
    if (merges_) shift_ = 0;
  }
  bool fits_packed() {
    const std::int64_t x_vectors = packed_vectors(p_.in_channels, p_.in_h * p_.in_d, x_row(best_)),
                       y_vectors = packed_vectors(p_.out_channels, p_.out_h * p_.out_d, y_row_vectors());
    if ((packs_x_ && x_vectors > kMostCount) || (packs_y_ && y_vectors > kMostCount)) return false;
    packed_bytes_ = 16 * ((packs_x_ ? x_vectors : 0) + (packs_y_ ? y_vectors : 0));
    return true;
  }
  std::int64_t packed_vectors(std::int64_t channels, std::int64_t rows, std::int64_t row) const {
    return p_.batch * channels * rows * row;
  }

  FusedWeightBoxes boxes() const {
    const std::int64_t vectors = best_.box_vectors, channels = tile_.channels, in_channels = in_channels_per_group(p_);
    const std::int64_t boxes = best_.boxes();
    FusedWeightBoxes b{};
    b.width = std::int32_t(cut_.row_vectors * vector_), b.box_width = std::int32_t(vectors * vector_);
    b.piece_products = std::int32_t(ceil_div(cut_.row_vectors, 2));
    b.box_products = boxes == 1 ? b.piece_products : std::int32_t(ceil_div(vectors, 2));
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
    b.y_align = std::int32_t(best_.align / size_);
    b.tap_row = merges_ ? std::int32_t(y_row()) : 0, b.row_units = make_divisor(tap_units_);
    b.y_piece = std::int32_t(merges_ ? b.width / row_pixels() * map_row() : b.width * w_.stride);
    b.row_pixels = std::int32_t(merges_ ? 2 * vector_ : cut_.chunks * b.width);
    b.second_pixel = std::int32_t(merges_ && row_vectors == 1 ? 0 : vector_);
    return b;
  }

  // Rows of whole vectors: [sample][channel][depth][height].
  FusedWeightPackJob pack(const Strides& s, std::int64_t channels, const std::int64_t (&size)[3], std::int64_t row,
                          BoxTensor& tensor) const {
    const std::int64_t map = row * size[1] * size[2];
    const std::int64_t strides[] = {map, row, row * size[1], map * channels};
    for (int i = 0; i < 4; ++i) tensor.strides[i] = 16 * strides[i];
    return weight_pack_job(p_.batch, s, channels, size, row);
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
