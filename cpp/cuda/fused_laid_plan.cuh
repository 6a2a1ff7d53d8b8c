// The planner of the gradient of the input by taps that are laid out; host code, for one source.
#pragma once

#include <algorithm>
#include <numeric>

#include "clusters.h"
#include "fused_laid_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostLaidCount = std::int64_t(1) << 30;
constexpr std::int64_t kMostLaidSlots = 32;  // a lane has one
constexpr std::int64_t kMostLaidKernel = 16;
constexpr std::int64_t kLeastLaidPart = 6;  // chunks of a part of the reduction
constexpr std::int64_t kMostBoxValues = 256;

// What a tile takes: the same for all its kernels of a type.
struct LaidTileSize {
  std::int64_t rows, pixels;
};

class LaidPlanner {
 public:
  LaidPlanner(const Problem& p, const LaidTileSize& tile, std::int64_t most_shared, std::int64_t multiprocessors,
              std::int64_t alignment)
      : p_(p),
        tile_(tile),
        most_shared_(most_shared),
        multiprocessors_(multiprocessors),
        aligned_(alignment % 16 == 0),
        element_(element_bytes(p.dtype)),
        taps_(kernel_taps(p)) {}

  LaidPlan plan() {
    plan_.possible = aligned_ && is_small() && has_segments() && lies_in_rows() && lies_in_boxes() && cut() && buffers();
    return plan_;
  }

 private:
  const Problem& p_;
  const LaidTileSize tile_;
  const std::int64_t most_shared_, multiprocessors_;
  const bool aligned_;
  const std::int64_t element_, taps_;
  LaidPlan plan_;
  std::int64_t step_ = 0;  // pixels of a tile

  bool is_small() const {
    for (const std::int64_t count :
         {p_.batch, p_.in_channels, p_.out_channels, p_.in_h, p_.in_w, p_.out_h * p_.out_w * element_, p_.batch * in_pixels(p_)})
      if (count >= kMostLaidCount / 2) return false;
    return p_.groups == 1 && p_.dilation_h == 1 && p_.dilation_w == 1 && p_.pad_h < kMostLaidKernel &&
           p_.pad_w < kMostLaidKernel && p_.kernel_d == 1 && p_.stride_d == 1 && p_.pad_d == 0 && p_.in_d == p_.out_d &&
           p_.kernel_h <= kMostLaidKernel && p_.stride_h <= kMostLaidKernel && p_.stride_w <= kMostLaidKernel;
  }

  // Whole taps of a channel in half a chunk, whole halves of all channels, and segments that kernels know.
  bool has_segments() {
    const bool inside = p_.pad_h == 0 && p_.pad_w == 0 && p_.stride_w == p_.kernel_w && p_.out_w % p_.kernel_w == 0 &&
                        (p_.in_w - 1) * p_.stride_w + p_.kernel_w <= p_.out_w &&
                        (p_.in_h - 1) * p_.stride_h + p_.kernel_h <= p_.out_h;
    // Two pixels have an aligned vector, the value ahead of it and the one behind; floats for four warps that have as many.
    const bool paired = p_.stride_w == 2 && p_.pad_w == 1 && p_.in_w % 2 == 0 && p_.out_w == 2 * p_.in_w;
    const bool together = paired && (element_ == 2 || tile_.pixels % 128 == 0);
    plan_.edges = inside ? kLaidInside : together ? kLaidPairs : kLaidBeside, plan_.kernel = int(p_.kernel_w);
    if (p_.kernel_h != p_.kernel_w) return false;
    if (inside ? p_.kernel_w != 2 && p_.kernel_w != 4 : p_.kernel_w != 4 || (element_ == 2 && !paired)) return false;
    const std::int64_t half = 64 / element_;
    return half % taps_ == 0 && p_.out_channels % (2 * (half / taps_)) == 0;
  }

  // Of y' rows that follow one another, of whole vectors in all of a plane; of x' pixels that do.
  bool lies_in_rows() const {
    const Strides &x = p_.x, &y = p_.y;
    const std::int64_t plane = p_.out_h * p_.out_w * element_;
    if ((p_.out_w > 1 && y.w != 1) || (p_.out_h > 1 && y.h != p_.out_w) || plane % 16 != 0) return false;
    if ((p_.in_w > 1 && x.w != 1) || (p_.in_h > 1 && x.h != p_.in_w)) return false;
    const std::int64_t steps[] = {y.n, y.c, y.d, x.n, x.c, x.d};
    for (const std::int64_t step : steps)
      if (step < 0) return false;
    // What a lane has copied is counted in 32 bits from the tile's first plane on.
    const std::int64_t reach = kMostLaidSlots * std::max(y.n, y.d) + 64 * y.c + p_.out_h * p_.out_w;
    if (reach * element_ >= std::int64_t(1) << 32 || (p_.batch > 1 && y.n < (p_.in_d - 1) * y.d)) return false;
    return (y.n | y.c | y.d) * element_ % 16 == 0;
  }
  // The weight is rows of whole vectors, channels and their taps in order.
  bool lies_in_boxes() {
    const Strides& w = p_.w;
    const std::int64_t columns = p_.out_channels * taps_, row = p_.in_channels > 1 ? w.n * element_ : 16;
    const bool taps = (p_.kernel_w == 1 || w.w == 1) && (p_.kernel_h == 1 || w.h == p_.kernel_w);
    if (!taps || (p_.out_channels > 1 && w.c != taps_) || row <= 0 || row % 16 != 0 || row >= kMostLaidCount) return false;
    if (columns >= kMostLaidCount) return false;
    plan_.w = {p_.dtype, {columns, p_.in_channels, 1, 1, 1}, {row, 16, 16, 16}, {}, 128, 256};
    BoxTensor& box = plan_.w;
    box.box[0] = std::int32_t(128 / element_), box.box[1] = std::int32_t(tile_.rows), box.box[2] = box.box[3] = box.box[4] = 1;
    return true;
  }

  // Parts of the reduction of so many tiles; chunks that are multiplied one after another.
  struct Parts {
    std::int64_t splits, chunks, cost;
  };
  Parts parts_of(std::int64_t chunks, std::int64_t tiles) const {
    Parts parts{1, chunks, chunks * ceil_div(tiles, multiprocessors_)};
    for (const ClustersAtOnce& clusters : kClustersAtOnce) {
      const std::int64_t own = ceil_div(chunks, clusters.blocks);
      const bool runs = tiles <= clusters.count * multiprocessors_ / 132 && ceil_div(chunks, own) == clusters.blocks;
      if (runs && own >= kLeastLaidPart && own < parts.cost) parts = {clusters.blocks, own, own};
    }
    return parts;
  }
  // Neighbouring pixels of tiles of `pixels` that are an aligned vector of x.
  std::int64_t vector_of(std::int64_t pixels) const {
    const std::int64_t steps = p_.in_h * p_.in_w | p_.x.n | p_.x.d | p_.x.c | pixels;
    std::int64_t vector = 16 / element_;
    while (steps % vector != 0) vector /= 2;
    return vector;
  }

  bool cut() {
    LaidJob& job = plan_.job;
    const std::int64_t pixels = p_.batch * in_pixels(p_), chunks = p_.out_channels * taps_ * element_ / 128;
    const std::int64_t row_tiles = ceil_div(p_.in_channels, tile_.rows);
    Parts parts = parts_of(chunks, row_tiles * ceil_div(pixels, tile_.pixels));
    step_ = tile_.pixels, job.vector = std::int32_t(vector_of(p_.in_h * p_.in_w));
    // Whole rows of pixels meet whole rows of y', of which nothing is copied twice.
    const std::int64_t rows = tile_.pixels / p_.in_w * p_.in_w;
    if (rows > 0 && vector_of(rows) >= job.vector) {
      const Parts own = parts_of(chunks, row_tiles * ceil_div(pixels, rows));
      if (own.cost <= parts.cost) parts = own, step_ = rows;
    }
    const std::int64_t tiles = row_tiles * ceil_div(pixels, step_), splits = parts.splits, part = parts.chunks;
    if (tiles * splits >= kMostLaidCount) return false;
    job.row_tiles = make_divisor(row_tiles), job.splits = make_divisor(splits), job.tiles = std::uint32_t(tiles * splits);
    job.rows = std::int32_t(p_.in_channels), job.pixels = std::int32_t(pixels), job.chunks = std::int32_t(chunks);
    job.step = std::int32_t(step_);
    job.part_chunks = std::int32_t(part), job.channels = std::int32_t(64 / element_ / taps_);
    job.plane = make_divisor(p_.in_h * p_.in_w), job.row = make_divisor(p_.in_w), job.depth = make_divisor(p_.in_d);
    job.stride_h = std::int32_t(p_.stride_h), job.stride_w = std::int32_t(p_.stride_w), job.pad_h = std::int32_t(p_.pad_h);
    job.pad_w = std::int32_t(p_.pad_w), job.kernel_h = std::int32_t(p_.kernel_h), job.out_h = std::int32_t(p_.out_h);
    job.out_w = std::int32_t(p_.out_w), job.row_bytes = std::int32_t(p_.out_w * element_);
    job.y_n = p_.y.n * element_, job.y_d = p_.y.d * element_, job.y_c = p_.y.c * element_;
    job.x_n = p_.x.n, job.x_d = p_.x.d, job.x_c = p_.x.c;
    return true;
  }

  // Bytes of a channel that the tile from `first` on copies; -1: of more planes than lanes.
  std::int64_t copied(std::int64_t first) const {
    const std::int64_t plane = p_.in_h * p_.in_w, last = std::min<std::int64_t>(first + step_, plan_.job.pixels) - 1;
    if (last / plane - first / plane >= kMostLaidSlots) return -1;
    std::int64_t bytes = 0;
    for (std::int64_t at = first / plane; at <= last / plane; ++at) {
      const std::int64_t low = std::max(first - at * plane, std::int64_t(0)), high = std::min(last - at * plane, plane - 1);
      const std::int64_t top = low / p_.in_w * p_.stride_h - p_.pad_h,
                         end = high / p_.in_w * p_.stride_h - p_.pad_h + p_.kernel_h;
      const std::int64_t begin = std::max<std::int64_t>(top, 0) * p_.out_w * element_ / 16 * 16;
      const std::int64_t behind =
          ceil_div(std::max<std::int64_t>(std::min(end, p_.out_h), 0) * p_.out_w * element_, std::int64_t(16)) * 16;
      bytes += std::max<std::int64_t>(behind - begin, 0);
    }
    return bytes;
  }
  // Planes that a tile may have pixels of, where each is a row of a box.
  std::int64_t box_planes() const {
    const std::int64_t plane = p_.in_h * p_.in_w, farthest = std::int64_t(1) << 40;
    if (p_.in_d > 1 || p_.out_h * p_.out_w > kMostBoxValues || p_.y.c <= 0 || p_.y.n <= 0) return 0;
    if (p_.y.c * element_ >= farthest || p_.y.n * element_ >= farthest) return 0;
    const std::int64_t planes = step_ % plane == 0 ? step_ / plane : (step_ - 2) / plane + 2;
    return std::min(planes, p_.batch);
  }
  // The box of that many planes, of the channels of half a chunk: bytes of a buffer.
  std::int64_t box(std::int64_t planes) {
    LaidJob& job = plan_.job;
    const std::int64_t values = p_.out_h * p_.out_w, pitch = values * element_, alignment = 128;
    plan_.planes = {p_.dtype, {values, p_.out_channels, p_.batch, 1, 1}, {job.y_c, job.y_n, 16, 16}, {}, 16, 128};
    BoxTensor& box = plan_.planes;
    box.box[0] = std::int32_t(values), box.box[1] = job.channels, box.box[2] = std::int32_t(planes), box.box[3] = box.box[4] = 1;
    job.pitch = std::int32_t(pitch), job.slot_bytes = std::int32_t(pitch * job.channels);
    job.box_bytes = std::int32_t(planes * job.slot_bytes), job.margins = 1;
    job.margin = std::int32_t(ceil_div(pitch * (job.channels - 1) + kLaidMargin, alignment) * alignment);
    return ceil_div(std::int64_t(job.margin) + job.box_bytes, alignment) * alignment;
  }
  bool buffers() {
    LaidJob& job = plan_.job;
    const std::int64_t plane = p_.in_h * p_.in_w, tiles = ceil_div(std::int64_t(job.pixels), step_),
                       unlike = plane / std::gcd(plane, step_);
    std::int64_t most = 0;
    // After so many tiles others begin at the same pixels of a plane; none of them copies more.
    for (std::int64_t tile = 0; tile < std::min(tiles, unlike); ++tile) {
      const std::int64_t bytes = copied(tile * step_);
      if (bytes < 0) return false;
      most = std::max(most, bytes);
    }
    if (most == 0) return false;
    job.pitch = std::int32_t(most + kLaidMargin), job.margin = kLaidMargin, job.margins = job.channels;
    std::int64_t buffer = std::int64_t(job.pitch) * job.channels;
    if (const std::int64_t slots = box_planes(); slots > 1) buffer = box(slots);
    const std::int64_t stage = (tile_.rows + tile_.pixels) * 128;
    const std::int64_t left = most_shared_ - std::int64_t(sizeof(LaidBarriers)) - kLaidAlignment - kLaidMargin;
    job.stages = left >= 3 * stage + 4 * buffer ? 3 : 2;
    job.buffers = std::int32_t(std::min<std::int64_t>((left - job.stages * stage) / buffer, kMostLaidBuffers)) / 2 * 2;
    job.buffer_bytes = std::int32_t(buffer);
    if (left < job.stages * stage || job.buffers < 2) return false;
    const std::int64_t odd = element_ == 2 && job.vector == 1 ? 8 * kLaidOddBytes : 0;  // of the warps that multiply
    const std::int64_t sums = job.splits.value > 1 ? tile_.rows * tile_.pixels * 4 + odd : 0;
    plan_.shared_bytes = int(std::max(job.stages * stage + job.buffers * buffer + kLaidMargin, sums) + kLaidAlignment);
    return true;
  }
};

}  // namespace
}  // namespace upfold::cuda
