// The planner of the fused method of whole maps; host code, for one source.
#pragma once

#include <algorithm>

#include "fused_maps_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostMapsCount = std::int64_t(1) << 30;
constexpr std::int64_t kLeastMapsChannels = 16;  // fewer fill little of one

// What a tile takes: the same for all its kernels.
struct MapsTileSize {
  bool by_lanes;
  std::int64_t pixels, columns, channels, stage_bytes, sum_bytes;  // channels of a stage
};
template <bool kBeside, int kN8, bool kByLanes>
constexpr MapsTileSize maps_size_of() {
  using Tile = MapsTile<__half, kBeside, 1, kN8, kByLanes>;
  return {kByLanes, Tile::kPixels, Tile::kColumns, Tile::kChunk, Tile::kStageBytes, Tile::kSumBytes};
}

class MapsPlanner {
 public:
  MapsPlanner(const Problem& p, const MapsTileSize& tile, std::int64_t most_shared, std::int64_t alignment)
      : p_(p), tile_(tile), most_shared_(most_shared), aligned_(alignment % 16 == 0), axes_{axis_d(p), axis_h(p), axis_w(p)} {}

  MapsPlan plan() {
    plan_.possible = aligned_ && is_small() && has_equal_phases() && lies_in_boxes() && cut() && stores() && stages();
    if (plan_.possible) list_results();
    return plan_;
  }

 private:
  const Problem& p_;
  const MapsTileSize tile_;
  const std::int64_t most_shared_;
  const bool aligned_;
  const Axis axes_[3];
  MapsPlan plan_;

  std::int64_t columns() const { return out_channels_per_group(p_) * kernel_taps(p_); }

  bool is_small() const {
    for (const std::int64_t count : {p_.batch, p_.in_channels, p_.out_channels, columns(), p_.out_d, p_.out_h, p_.out_w})
      if (count >= kMostMapsCount) return false;
    for (const Axis& a : axes_)
      if (a.in > tile_.pixels || a.kernel > kMapsRows || a.stride > kMapsRows || a.pad > kMapsRows) return false;
    const std::int64_t pixels = in_pixels(p_);
    const std::int64_t unit = tile_.by_lanes ? 8 : 16;
    if (pixels > tile_.pixels || pixels % unit != 0 || in_channels_per_group(p_) < kLeastMapsChannels) return false;
    // Zeros stand for channels behind the last, but those of a neighbouring group would not.
    return p_.groups == 1 || in_channels_per_group(p_) % tile_.channels == 0;
  }

  // As many taps for each output of a position, and whole channels in the rows of a warp.
  bool has_equal_phases() {
    std::int64_t each = 1;
    for (const Axis& a : axes_) {
      if (a.dilation != 1 || a.kernel % a.stride != 0) return false;
      each *= a.kernel / a.stride;
    }
    plan_.each = int(each);
    return (each == 1 || each == 2 || each == 4) && kMapsRows % kernel_taps(p_) == 0;
  }

  // Pixels of a channel follow one another, and taps and channels of w, in whole vectors.
  bool lies_in_boxes() const {
    const Strides &x = p_.x, &w = p_.w;
    const bool run = (p_.in_w == 1 || x.w == 1) && (p_.in_h == 1 || x.h == p_.in_w) && (p_.in_d == 1 || x.d == p_.in_h * p_.in_w);
    const bool taps = (p_.kernel_w == 1 || w.w == 1) && (p_.kernel_h == 1 || w.h == p_.kernel_w) &&
                      (p_.kernel_d == 1 || w.d == p_.kernel_h * p_.kernel_w);
    if (!run || !taps || (out_channels_per_group(p_) > 1 && w.c != kernel_taps(p_)) || columns() % 8 != 0) return false;
    for (const std::int64_t stride : {x.c, w.n})
      if (stride <= 0 || stride % 8 != 0 || stride >= kMostMapsCount) return false;
    if (tile_.by_lanes && x.c >= kMostMapsCount / tile_.channels) return false;  // bytes of a stage are counted in 32 bits
    return p_.batch == 1 || (x.n > 0 && x.n % 8 == 0 && x.n < kMostMapsCount / tile_.pixels);
  }

  bool cut() {
    MapsJob& job = plan_.job;
    const std::int64_t pixels = in_pixels(p_);
    std::int64_t segment = 64, positions = 1;
    while (!tile_.by_lanes && pixels % segment != 0) segment /= 2;
    for (int i = 0; i < 3; ++i) {
      const Axis& a = axes_[i];
      job.grid[i] = make_divisor(ceil_div(a.out, a.stride));
      job.in[i] = std::int32_t(a.in), job.out[i] = std::int32_t(a.out), job.stride[i] = std::int32_t(a.stride);
      positions *= job.grid[i].value;
      if (positions > tile_.pixels) return false;
    }
    const std::int64_t samples = std::min(tile_.pixels / std::max(pixels, positions), p_.batch);
    const std::int64_t column_tiles = ceil_div(columns(), tile_.columns), sample_tiles = ceil_div(p_.batch, samples);
    if (column_tiles * sample_tiles >= kMostMapsCount / p_.groups) return false;
    job.column_tiles = make_divisor(column_tiles), job.sample_tiles = make_divisor(sample_tiles);
    job.columns_first = column_tiles < sample_tiles;  // tiles of one time share the more of x and w
    job.tiles = std::uint32_t(column_tiles * sample_tiles * p_.groups);
    job.batch = std::int32_t(p_.batch), job.columns = std::int32_t(columns());
    job.ic = std::int32_t(in_channels_per_group(p_)), job.oc = std::int32_t(out_channels_per_group(p_));
    job.chunks = std::int32_t(ceil_div(job.ic, tile_.channels)), job.samples = std::int32_t(samples);
    job.segment = std::int32_t(segment), job.vector_pitch = std::int32_t(tile_.channels * segment / 8);
    job.vectors = make_divisor(ceil_div(pixels, 8)), job.sample_vectors = make_divisor(ceil_div(pixels, 8) * tile_.channels);
    job.x_n = p_.x.n, job.x_c = p_.x.c, plan_.by_lanes = tile_.by_lanes;
    job.swizzle = segment == 64 ? 1 : segment == 32 ? 2 : 3, job.positions = std::int32_t(positions * samples);
    job.taps = make_divisor(kernel_taps(p_));
    describe(pixels, segment);
    return true;
  }

  void describe(std::int64_t pixels, std::int64_t segment) {
    const std::int64_t sample = p_.batch == 1 ? 16 : p_.x.n * 2;
    plan_.x = {p_.dtype, {segment, p_.in_channels, pixels / segment, p_.batch, 1}, {p_.x.c * 2, segment * 2, sample, 16}, {}, 0,
               128};
    BoxTensor& x = plan_.x;
    x.box[0] = std::int32_t(segment), x.box[1] = std::int32_t(tile_.channels), x.box[2] = std::int32_t(pixels / segment);
    x.box[3] = plan_.job.samples, x.box[4] = 1, x.swizzle = std::int32_t(segment * 2);
    plan_.w = {p_.dtype, {columns(), p_.in_channels, 1, 1, 1}, {p_.w.n * 2, 16, 16, 16}, {}, 128, 128};
    BoxTensor& w = plan_.w;
    w.box[0] = 64, w.box[1] = std::int32_t(tile_.channels), w.box[2] = w.box[3] = w.box[4] = 1;
  }

  // The entries of the rows: channels, then outputs of a position, then taps of each.
  void list_results() {
    MapsJob& job = plan_.job;
    const std::int64_t outputs[] = {p_.stride_d, p_.stride_h, p_.stride_w}, taps = kernel_taps(p_);
    std::int64_t entry = 0, result = 0;
    for (std::int64_t channel = 0; channel < kMapsRows / taps; ++channel) {
      for (std::int64_t number = 0; number < outputs[0] * outputs[1] * outputs[2]; ++number, ++result) {
        const std::int64_t phase[] = {number / outputs[2] / outputs[1], number / outputs[2] % outputs[1], number % outputs[2]};
        job.channel[result] = std::int8_t(channel);
        job.result[result] = std::int32_t(channel * p_.y.c + phase[0] * p_.y.d + phase[1] * p_.y.h + phase[2] * p_.y.w);
        for (int i = 0; i < 3; ++i) job.phase[result][i] = std::int8_t(phase[i]);
        for (std::int64_t tap = 0; tap < taps; ++tap) {
          const std::int64_t at[] = {tap / p_.kernel_w / p_.kernel_h, tap / p_.kernel_w % p_.kernel_h, tap % p_.kernel_w};
          std::int64_t shift[3];
          bool reaches = true;
          for (int i = 0; i < 3; ++i) {
            const std::int64_t reach = phase[i] + axes_[i].pad - at[i];
            reaches = reaches && reach % axes_[i].stride == 0;
            shift[i] = floor_div(reach, axes_[i].stride);
          }
          if (!reaches) continue;
          job.shift[entry] = 0;
          for (int i = 0; i < 3; ++i) job.shift[entry] |= std::uint32_t(std::uint8_t(shift[i])) << 8 * i;
          job.entry[channel * taps + tap] = std::int8_t(entry++);
        }
      }
    }
  }

  bool stores() {
    MapsJob& job = plan_.job;
    const Strides& y = p_.y;
    job.y_n = y.n, job.y_c = y.c, job.y_axis[0] = y.d, job.y_axis[1] = y.h, job.y_axis[2] = y.w;
    job.activation = p_.activation, job.slope = p_.activation_slope;
    job.whole = true;
    for (const Axis& a : axes_) job.whole = job.whole && a.out % a.stride == 0;
    std::int64_t reach = job.samples * std::abs(y.n) + kMapsRows * std::abs(y.c);
    for (int i = 0; i < 3; ++i) reach += std::abs(job.y_axis[i]) * (axes_[i].out + axes_[i].stride);
    job.joined = 1;
    for (const std::int32_t joined : {8, 4, 2}) {
      const bool whole = p_.stride_w % joined == 0 && p_.out_w % joined == 0 && kMapsRows / plan_.each >= joined;
      if (y.w == 1 && whole && (y.n | y.c | y.d | y.h) % joined == 0) job.joined = std::max(job.joined, joined);
    }
    return reach < kMostMapsCount;
  }

  bool stages() {
    const std::int64_t fixed =
        tile_.sum_bytes + kMapsAlignment + plan_.job.positions * std::int64_t(2 * sizeof(MapsTaps) + sizeof(MapsPosition));
    const std::int64_t most = (most_shared_ - std::int64_t(sizeof(MapsBarriers)) - fixed) / tile_.stage_bytes;
    plan_.job.stages = std::int32_t(std::min<std::int64_t>(most, kMostMapsStages));
    plan_.shared_bytes = int(fixed + plan_.job.stages * tile_.stage_bytes);
    return most >= 2;
  }
};

}  // namespace
}  // namespace upfold::cuda
