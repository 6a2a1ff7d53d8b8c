// How the tensors of the fused method by boxes of channels lie, and which tiles read and store them so; host code, for one
// source.
#pragma once

#include <algorithm>
#include <array>

#include "fused_last_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostLastCount = std::int64_t(1) << 30;  // of what the kernels keep in 32 bits
constexpr std::int64_t kMostTurnedStep = 64;                   // so that eight positions are less than LastTurnedStore::Row holds
constexpr std::int64_t kMostBox = 256, kMostBoxStep = 8;       // of an axis
constexpr std::int64_t kMostBoxBytes = std::int64_t(1) << 40;  // from element to element of an axis
constexpr std::int64_t kSector = 32;                           // bytes of memory that are written together

using Triple = std::array<std::int64_t, 3>;

class LastLayout {
 public:
  LastLayout(const Problem& p, const LastTileSize& tile, bool aligned)
      : p_(p),
        tile_(tile),
        element_(element_bytes(p.dtype)),
        chunk_bytes_(16 * tile.vectors),
        forward_(p.op == Operator::kConvTranspose),
        aligned_(aligned),
        axes_{axis_d(p), axis_h(p), axis_w(p)} {
    for (int i = 0; i < 3; ++i) {
      positions_[i] = forward_ ? ceil_div(axes_[i].out, axes_[i].stride) : axes_[i].in;
      source_step_[i] = forward_ ? 1 : axes_[i].stride, result_step_[i] = forward_ ? axes_[i].stride : 1;
      source_size_[i] = forward_ ? axes_[i].in : axes_[i].out, result_size_[i] = forward_ ? axes_[i].out : axes_[i].in;
    }
    folded_ = folds();
    if (folded_) source_step_ = {1, 1, 1};
    if (tile_.runs) {  // positions begin with the tap that none is ahead of
      first_run_ = axes_[2].pad / axes_[2].stride;
      positions_[2] = ceil_div(axes_[2].out + axes_[2].pad % axes_[2].stride, axes_[2].stride);
    }
    counted_ = counts_through();
    if (counted_)
      for (Triple* const sizes : {&positions_, &result_size_}) *sizes = {(*sizes)[0], 1, (*sizes)[1] * (*sizes)[2]};
  }

 protected:
  const Strides& source_strides() const { return forward_ ? p_.x : p_.y; }
  const Strides& result_strides() const { return forward_ ? p_.y : p_.x; }
  std::int64_t source_channels() const { return forward_ ? in_channels_per_group(p_) : out_channels_per_group(p_); }
  std::int64_t result_channels() const { return forward_ ? out_channels_per_group(p_) : in_channels_per_group(p_); }
  std::int64_t chunk() const { return chunk_bytes_ / element_; }
  // Values of a pixel of the source in a group, as products read them.
  std::int64_t source_values() const {
    const std::int64_t channels = source_channels();
    return tile_.exact ? ceil_div(channels, std::int64_t(kExactChannels)) * kExactChannels * 2 : channels;
  }

  // Whether boxes can be described of the source as it lies. Axes on which elements repeat are packed.
  bool lies_in_boxes() const {
    const Strides& s = source_strides();
    if (s.c != 1 || !aligned_ || tile_.exact) return false;
    const std::int64_t strides[] = {s.n, s.d, s.h, s.w}, sizes[] = {p_.batch, source_size_[0], source_size_[1], source_size_[2]};
    for (int i = 0; i < 4; ++i) {
      if (strides[i] < (sizes[i] > 1 ? 1 : 0) || strides[i] * element_ % 16 != 0) return false;
      if (strides[i] * element_ >= kMostBoxBytes) return false;
    }
    return true;
  }

  // A source whose stride divides its height and width is folded: the pixels of a step along the width are channels of one, and
  // the rows of a step along the height are a depth, so that boxes have no steps. Chunks end with their pixel.
  bool folds() const {
    const Axis &d = axes_[0], &h = axes_[1], &w = axes_[2];
    if (forward_ || d.out != 1 || d.stride != 1 || d.kernel != 1 || d.pad != 0 || (h.stride == 1 && w.stride == 1)) return false;
    const bool dense = !lies_in_boxes() || source_strides().w == source_channels() * p_.groups;
    return dense && source_values() % chunk() == 0 && h.out % h.stride == 0 && w.out % w.stride == 0;
  }

  // Whether positions are counted through a plane, whose rows follow one another in the result: rows of the packed source are as
  // long, and what they are longer is zeros, which are those behind a row and those ahead of the next one.
  bool counts_through() const {
    const Axis &h = axes_[1], &w = axes_[2];
    const std::int64_t row = result_size_[2], low = forward_ ? w.pad - (w.kernel - 1) * w.dilation : -w.pad;
    const std::int64_t high = low + (w.kernel - 1) * w.dilation, gap = row - source_size_[2];
    if (!tile_.to_planes || tile_.planes || tile_.transposes || tile_.phases > 1 || h.stride * w.stride > 1) return false;
    if (result_size_[1] == 1 || result_strides().h != row || lies_in_boxes()) return false;
    const std::int64_t reach = (h.kernel - 1) * h.dilation + h.pad;  // rows that a tap is away from its result, at most
    return high <= 0 && -low <= gap && gap <= source_size_[2] && reach < INT16_MAX / 4 / row &&
           std::max(result_size_[1], source_size_[1]) < kMostLastCount / row;
  }
  // Pixels from row to row of the packed source.
  std::int64_t packed_row() const { return !counted_ ? source_size_[2] : forward_ ? axes_[2].out : axes_[2].in; }

  bool sizes() {
    for (int i = 0; i < 3; ++i) {
      const Axis& a = axes_[i];
      for (const std::int64_t size : {a.in, a.out, a.kernel, a.stride, a.pad, a.dilation})
        if (size >= kMostLastCount) return false;
      if (a.in * a.stride + a.kernel * a.dilation + a.pad >= kMostLastCount) return false;
      if (source_step_[i] > kMostBoxStep) return false;
    }
    const std::int64_t most = std::max(p_.in_channels, p_.out_channels) * kernel_taps(p_);
    if (most >= kMostLastCount || p_.batch >= kMostLastCount || kernel_taps(p_) > 4 * kMostLastPairs) return false;
    if (tile_.alternates && !stores()) return false;
    if (tile_.transposes && !can_transpose()) return false;
    if (tile_.turned) {
      const std::int64_t step = *std::max_element(result_step_.begin(), result_step_.end());
      if (result_strides().w != 1 || result_strides().c == 1 || step > kMostTurnedStep) return false;
    }
    // Chunks end with their group: a NaN of the next one would meet zeros.
    return p_.groups == 1 || source_channels() % (tile_.exact ? kExactChannels : chunk()) == 0;
  }

  bool stores() const {
    if (tile_.runs) return stores_runs();
    if (tile_.weight_rows) return reads_rows_of_weight() && (!tile_.row_boxes || stores_boxes_of_rows());
    return tile_.planes ? lies_in_planes() : tile_.to_planes ? stores_planes() : stores_boxes();
  }
  // Whether the results of all phases of the width in one channel are a run. Each phase has as many taps: one that it lacks would
  // be a zero, which makes a NaN of another's.
  bool stores_runs() const {
    const Axis &d = axes_[0], &h = axes_[1], &w = axes_[2];
    const Strides& r = result_strides();
    if (!forward_ || w.stride == 1 || w.dilation != 1 || w.kernel % w.stride != 0 || d.stride * h.stride != 1) return false;
    return run_phases() > 0 && r.w == 1 && r.c != 1 && w.pad < kMostLastCount / 2;
  }
  // Of tiles of runs: phases of a set, as few sets as columns leave room for, or 0; and channels of a tile, an even number where
  // phases are odd.
  std::int64_t run_phases() const {
    const std::int64_t step = axes_[2].stride;
    for (std::int64_t sets = 1; sets <= kMostLastSets; ++sets)
      if (step % sets == 0 && step / sets * (step / sets % 2 + 1) <= tile_.columns) return step / sets;
    return 0;
  }
  std::int64_t run_channels() const {
    const std::int64_t phases = run_phases(), whole = phases % 2 + 1;
    return std::min(ceil_div(result_channels(), whole), tile_.columns / phases / whole) * whole;
  }

  // Whether pieces of results are boxes: they end with the channels of a pixel, or, where columns are taps too and pixels of a
  // row follow one another, with those of a row of taps. Rows and pixels of all phases are there.
  bool stores_boxes() const {
    const Strides& r = result_strides();
    const std::int64_t piece = kLastPieceRow / element_, steps = r.n | r.d | r.h | r.w;
    if (r.c != 1 || !aligned_ || steps * element_ % 16 != 0 || r.n < 0 || r.d < 0 || r.h < 0 || r.w <= 0) return false;
    // One element repeats on an axis of more.
    if ((r.n == 0 && p_.batch > 1) || (r.d == 0 && result_size_[0] > 1) || (r.h == 0 && result_size_[1] > 1)) return false;
    const bool rows = is_flat() && p_.groups == 1 && r.w == result_channels() && result_step_[2] * r.w % piece == 0;
    if (result_channels() % piece != 0 && !rows) return false;
    if (result_size_[1] % result_step_[1] != 0 || result_size_[2] % result_step_[2] != 0) return false;
    const std::int64_t planes = p_.batch * result_size_[0];
    if (p_.batch > 1 && result_size_[0] > 1 && r.n != result_size_[0] * r.d) return false;
    return planes < kMostLastCount &&
           std::max({r.n, r.d, r.h * result_step_[1], r.w * result_step_[2]}) * element_ < kMostBoxBytes;
  }
  // The same of a tile's positions: samples and planes of a box follow one another, and planes end with their sample.
  bool stores_box(std::int64_t planes, std::int64_t samples) const {
    if (samples > 1 && result_size_[0] > 1) return false;
    return planes == 1 || (result_step_[0] == 1 && positions_[0] % planes == 0);
  }

  // Whether axes of so many elements can be described behind one that is dense.
  bool is_box(std::int64_t stride, std::int64_t size) const {
    return size == 1 || (stride > 0 && stride * element_ % 16 == 0 && stride * element_ < kMostBoxBytes);
  }
  // Whether results lie in planes, and the tile's phases are those of the width.
  bool stores_planes() const {
    const Strides& r = result_strides();
    const std::int64_t channels = result_channels(), step = result_step_[2];
    if (r.w != 1 || r.c == 1 || tile_.row_phases != step || result_size_[2] < step) return false;
    // Tiles of some rows of phases are for planes whose rows are no whole sectors, and sets end with a row.
    const std::int64_t rows = tile_.phases / tile_.row_phases, high = std::min(result_step_[1], result_size_[1]);
    if (high % rows != 0 || (rows > 1 && result_size_[2] * element_ % kSector == 0)) return false;
    if (channels % 8 != 0) return false;                                         // lanes read the bias in eights
    const std::int64_t part = tile_.columns / last_planes_parts(int(element_));  // ends with its group
    return p_.groups == 1 || channels % part == 0;
  }
  // Whether those are stored as boxes: planes of whole vectors.
  bool stores_boxes_of_planes() const {
    const Strides& r = result_strides();
    const Triple& sizes = result_size_;
    // Stores of boxes cut a row behind its last vector, not behind its last element.
    return aligned_ && tile_.row_phases != 3 && tile_.row_phases == tile_.phases && sizes[2] * element_ % 16 == 0 &&
           is_box(r.h, sizes[1]) && is_box(r.d, sizes[0]) && is_box(r.c, result_channels() * p_.groups) &&
           is_box(r.n, p_.batch) && (!tile_.planes || run_of_planes() > 0);
  }
  // The same of tiles of rows of the weight: boxes have some channels, runs of 64 or 128 bytes.
  bool stores_boxes_of_rows() const {
    const std::int64_t taps = kernel_taps(p_);
    return p_.kernel_w == 2 && (taps == 4 || taps == 8) && stores_boxes_of_planes() && run_of_planes() * 4 % 64 == 0 &&
           (p_.groups == 1 || result_channels() % (tile_.columns / taps) == 0);
  }
  // Whether x lies in planes of whole vectors, and each pixel has results of its own.
  bool has_planes() const {
    const Strides& x = p_.x;
    if (!forward_ || !aligned_ || !is_equal()) return false;
    if ((p_.in_w > 1 && x.w != 1) || (p_.in_h > 1 && x.h != p_.in_w) || (p_.in_d > 1 && x.d != p_.in_h * p_.in_w)) return false;
    return is_box(x.c, p_.in_channels) && is_box(x.n, p_.batch);
  }
  // And whether its results lie so.
  bool lies_in_planes() const { return has_planes() && stores_planes(); }
  // Whether a row of the weight is whole vectors and has all taps of a channel one after another, two of a row of taps together.
  bool reads_rows_of_weight() const {
    const Strides &r = result_strides(), &w = p_.w;
    if (element_ != 2 || !has_planes() || r.w != 1 || r.c == 1 || p_.kernel_w % 2 != 0) return false;
    const std::int64_t sizes[] = {p_.kernel_w, p_.kernel_h, p_.kernel_d}, steps[] = {w.w, w.h, w.d};
    std::int64_t taps = 1;
    for (int i = 0; i < 3; taps *= sizes[i++])
      if (sizes[i] > 1 && steps[i] != taps) return false;
    return (result_channels() == 1 || w.c == taps) && is_box(w.n, p_.in_channels);
  }
  // Whether boxes of some channels of the source can be described, pixels of a row innermost.
  bool can_transpose() const {
    const Strides& s = source_strides();
    const Triple& sizes = source_size_;
    if (!aligned_ || folded_ || s.w != 1 || s.c == 1) return false;
    for (const std::int64_t step : source_step_)
      if (step != 1) return false;
    return is_box(s.h, sizes[1]) && is_box(s.d, sizes[0]) && is_box(s.c, source_channels() * p_.groups) && is_box(s.n, p_.batch);
  }
  // Pixels whose results are stored as one row: of 128 or 64 bytes, else of those that fill most of 64 and are stored fastest: a
  // box takes 1.3 cycles for each of its rows and 0.5 for each 16 bytes (H200: rows of 32 bytes at 2.5 TB/s, of 128 at 3.5). 0:
  // none make whole sectors, of which parts are stored 2.5 times as slowly (rows of 112 bytes, 294 us where tiles with other ends
  // take 179).
  std::int64_t run_of_planes() const {
    const std::int64_t phases = tile_.weight_rows ? p_.kernel_w : tile_.row_phases, pixel = phases * element_;
    for (const std::int64_t row : {128, 64})
      if (p_.in_w % (row / pixel) == 0) return row / pixel;
    std::int64_t best = 0;
    double most = 0;
    for (std::int64_t run = 1; run <= 64 && run * phases <= kMostBox; ++run) {
      const std::int64_t kept = 64 / run * run;  // of 64, from where the next box of x begins: with a vector
      if (p_.in_w % run != 0 || run * pixel % kSector != 0 || kept * element_ % 16 != 0) continue;
      const double row = double(run * pixel), rate = row / (1.3 + row / 32);
      if (double(kept) * rate >= most) best = run, most = double(kept) * rate;
    }
    return best;
  }

  // Kernel and stride are equal, and nothing is cut or added.
  bool is_equal() const {
    for (const Axis& a : axes_)
      if (a.kernel != a.stride || a.dilation != 1 || a.pad != 0 || a.out != a.in * a.stride) return false;
    return true;
  }
  // All phases read one position: columns are taps times channels.
  bool is_flat() const {
    if (tile_.weight_rows) return is_equal();
    if (!forward_ || result_strides().c != 1 || tile_.phases > 1 || tile_.runs || result_channels() % (16 / element_) != 0)
      return false;
    return is_equal();
  }

  const Problem p_;
  const LastTileSize tile_;
  const std::int64_t element_, chunk_bytes_;
  const bool forward_;
  const bool aligned_;
  const Axis axes_[3];
  bool folded_ = false, counted_ = false;
  std::int64_t first_run_ = 0;  // the number of the first position of tiles of runs
  Triple positions_, source_step_, result_step_, source_size_, result_size_;
};

}  // namespace
}  // namespace upfold::cuda
