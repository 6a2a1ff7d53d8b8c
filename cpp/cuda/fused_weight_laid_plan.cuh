// The planner of the gradient of the weight by taps that are laid out; host code, for one source.
#pragma once

#include <algorithm>
#include <numeric>

#include "clusters.h"
#include "fused_weight_laid_plan.h"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kMostWeightLaidCount = std::int64_t(1) << 30;
constexpr std::int64_t kMostPieceBytes = 512,
                       kPieceAlignment = 32;        // of a channel: 256 values of a box, 128 bytes of all channels
constexpr std::int64_t kMostPieces = 4;             // of the longest run, or twice as many as it must have
constexpr std::int64_t kMostWeightLaidPieces = 16;  // of a chunk, whose boxes a thread begins
// Of a plane's chunks what must be of its pixels, in a hundred, for planes to be runs.
constexpr std::int64_t kLeastOfRun = 90;
// Packed vectors of a multiprocessor from which on threads that have some of them take less time (H200s, runs of their own: a
// call that packs 26 MB 82 -> 78 us, one of 2 MB 26.8 -> 29.2).
constexpr std::int64_t kManyVectors = 4096;
constexpr std::int64_t kLeastWeightLaidPart = 4;  // chunks, where there are some
constexpr std::int64_t kMostWeightLaidClusters = 64;
// What parts are weighed by, in cycles: a chunk's products, times those of the tensor cores, or bytes that a multiprocessor gets
// in one; times as long with two stages, and where pixels are laid out together; a tile beside its chunks; bytes of the others'
// sums that a block of a cluster gets in one; a launch that adds the sums of clusters, bytes of these that the device moves in
// one, and what each cluster costs a thread that adds. By the tiles of 12 layers, with clusters of every size (H200), what is
// chosen takes 0.2 % longer than the fastest.
constexpr double kChunkProducts = 1.3, kLoadedBytes = 33, kTwoLaidStages = 1.3, kTogether = 1.2, kTileCycles = 8000,
                 kClusterBytes = 15, kSumCycles = 2000, kSumBytes = 3500, kSumPartCycles = 200;

struct WeightLaidTileSize {
  std::int64_t rows, columns;
};

class WeightLaidPlanner {
 public:
  WeightLaidPlanner(const Problem& p, const WeightLaidTileSize& tile, std::int64_t most_shared, std::int64_t multiprocessors,
                    std::int64_t alignment, std::int64_t cap)
      : p_(p),
        tile_(tile),
        most_shared_(most_shared),
        multiprocessors_(multiprocessors),
        cap_(cap),
        aligned_(alignment % 16 == 0),
        plane_(p.in_h * p.in_w),
        pixels_(p.batch * p.in_d * plane_),
        columns_(p.out_channels * kernel_taps(p)) {}

  WeightLaidPlan plan() {
    plan_.possible =
        aligned_ && is_small() && has_segments() && y_lies_in_rows() && w_lies_in_rows() && reads_x() && buffers() && cut();
    return plan_;
  }

 private:
  const Problem& p_;
  const WeightLaidTileSize tile_;
  const std::int64_t most_shared_, multiprocessors_, cap_;
  const bool aligned_;
  const std::int64_t plane_, pixels_, columns_;  // of x's planes, of x; of the product
  WeightLaidPlan plan_;
  std::int64_t chunks_ = 0;

  bool is_small() const {
    for (const std::int64_t count : {p_.in_channels, p_.out_h * p_.out_w * 2, pixels_, columns_})
      if (count >= kMostWeightLaidCount / 2) return false;
    return p_.groups == 1 && p_.dilation_h == 1 && p_.dilation_w == 1 && p_.kernel_d == 1 && p_.stride_d == 1 && p_.pad_d == 0 &&
           p_.in_d == p_.out_d && p_.stride_h <= 16;
  }

  // Whole windows of words, or those of two pixels that share an aligned vector.
  bool has_segments() {
    const bool inside = p_.pad_h == 0 && p_.pad_w == 0 && p_.stride_w == p_.kernel_w && p_.out_w % p_.kernel_w == 0 &&
                        (p_.in_w - 1) * p_.stride_w + p_.kernel_w <= p_.out_w &&
                        (p_.in_h - 1) * p_.stride_h + p_.kernel_h <= p_.out_h;
    const bool paired = p_.kernel_w == 4 && p_.stride_h == 2 && p_.stride_w == 2 && p_.pad_h == 1 && p_.pad_w == 1 &&
                        p_.in_w % 2 == 0 && p_.out_w == 2 * p_.in_w && p_.out_h == 2 * p_.in_h;
    plan_.paired = paired, plan_.kernel = int(p_.kernel_w);
    return p_.kernel_h == p_.kernel_w && (p_.kernel_w == 2 || p_.kernel_w == 4) && (inside || paired);
  }

  bool y_lies_in_rows() const {
    const Strides& y = p_.y;
    if ((p_.out_w > 1 && y.w != 1) || (p_.out_h > 1 && y.h != p_.out_w) || p_.out_h * p_.out_w % 8 != 0) return false;
    const std::int64_t most = std::int64_t(1) << 39, steps[] = {y.c, y.d, y.n}, counts[] = {p_.out_channels, p_.out_d, p_.batch};
    for (int i = 0; i < 3; ++i)
      if (counts[i] > 1 && (steps[i] < p_.out_h * p_.out_w || steps[i] % 8 != 0 || steps[i] >= most)) return false;
    return true;
  }
  bool w_lies_in_rows() const {
    const Strides& w = p_.w;
    const bool taps = w.w == 1 && w.h == p_.kernel_w && (p_.out_channels == 1 || w.c == kernel_taps(p_));
    return taps && columns_ % 8 == 0 && (p_.in_channels == 1 || (w.n >= columns_ && w.n % 8 == 0));
  }

  // Boxes of 64 pixels: of planes as they lie, of such that are packed in rows of whole vectors, or of all planes in a row.
  bool reads_x() {
    const Strides& x = p_.x;
    if ((p_.in_w > 1 && x.w != 1) || (p_.in_h > 1 && x.h != p_.in_w)) return false;
    const std::int64_t most = std::int64_t(1) << 39, steps[] = {x.c, x.d, x.n}, counts[] = {p_.in_channels, p_.in_d, p_.batch};
    bool lies = plane_ % 8 == 0, fours = plane_ % 4 == 0;
    for (int i = 0; i < 3; ++i) {
      if (counts[i] > 1 && steps[i] < 0) return false;
      fours = fours && (counts[i] == 1 || steps[i] % 4 == 0);
      lies = lies && (counts[i] == 1 || (steps[i] >= plane_ && steps[i] % 8 == 0 && steps[i] < most));
    }
    WeightLaidJob& job = plan_.job;
    BoxTensor& box = plan_.x;
    const std::int64_t run_chunks = ceil_div(plane_, std::int64_t(kWeightLaidPixels));
    if (plane_ * 100 >= run_chunks * kWeightLaidPixels * kLeastOfRun) {
      const std::int64_t row = ceil_div(plane_, std::int64_t(8));
      const auto step = [&](int axis) { return counts[axis] == 1 ? std::int64_t(16) : steps[axis] * 2; };
      box = {p_.dtype, {plane_, p_.in_channels, p_.in_d, p_.batch, 1}, {step(0), step(1), step(2), 16}, {}, 128, 128};
      if (!lies && !pad_planes(row)) return false;
      job.run_pixels = std::int32_t(plane_), chunks_ = run_chunks * p_.in_d * p_.batch;
      job.run_chunks = make_divisor(run_chunks);
    } else {
      const std::int64_t row = ceil_div(pixels_, std::int64_t(8));
      if (row * p_.in_channels >= kMostWeightLaidCount) return false;
      plan_.packed_bytes = ceil_div(row * p_.in_channels * 16, std::int64_t(256)) * 256;
      plan_.pack = {make_divisor(row),
                    make_divisor(plane_),
                    make_divisor(p_.in_d),
                    std::uint32_t(row * p_.in_channels),
                    std::int32_t(pixels_),
                    x.n,
                    x.c,
                    x.d,
                    0};
      plan_.pack.end = (p_.batch - 1) * x.n + (p_.in_channels - 1) * x.c + (p_.in_d - 1) * x.d + plane_;
      plan_.packs_fours = fours && row * p_.in_channels >= kManyVectors * multiprocessors_;
      box = {p_.dtype, {row * 8, p_.in_channels, 1, 1, 1}, {row * 16, 16, 16, 16}, {}, 128, 128};
      chunks_ = ceil_div(pixels_, std::int64_t(kWeightLaidPixels));
      job.run_pixels = std::int32_t(pixels_), job.run_chunks = make_divisor(chunks_);
    }
    box.box[0] = kWeightLaidPixels, box.box[1] = std::int32_t(tile_.rows), box.box[2] = box.box[3] = box.box[4] = 1;
    if (plan_.packed_bytes > cap_) return false;
    job.rows = std::int32_t(p_.in_channels), job.columns = std::int32_t(columns_), job.channels = std::int32_t(p_.out_channels);
    job.chunks = std::int32_t(chunks_);
    job.plane = make_divisor(plane_), job.row = make_divisor(p_.in_w), job.depth = make_divisor(p_.in_d);
    job.stride_h = std::int32_t(p_.stride_h), job.stride_w = std::int32_t(p_.stride_w), job.pad = std::int32_t(p_.pad_w);
    job.kernel = std::int32_t(p_.kernel_w), job.out_w = std::int32_t(p_.out_w);
    job.row_bytes = std::int32_t(p_.out_w * 2), job.w_n = p_.in_channels > 1 ? p_.w.n : columns_;
    return true;
  }

  // Each plane of x in a row of `row` vectors.
  bool pad_planes(std::int64_t row) {
    const std::int64_t sample = row * p_.in_d * p_.in_channels;
    if (sample * p_.batch >= kMostWeightLaidCount) return false;
    plan_.packed_bytes = ceil_div(sample * p_.batch * 16, std::int64_t(256)) * 256;
    plan_.pad = weight_pack_job(p_.batch, p_.x, p_.in_channels, {plane_, 1, p_.in_d}, row);
    const std::int64_t strides[] = {row * p_.in_d, row, sample, 1};
    for (int i = 0; i < 4; ++i) plan_.x.strides[i] = 16 * strides[i];
    return true;
  }

  // What the pixels from `low` to `high` of a plane meet of it, in bytes from its first value on, as the device finds it.
  struct Reach {
    std::int64_t begin, end;
  };
  Reach reach(std::int64_t low, std::int64_t high) const {
    const std::int64_t left = low % p_.in_w * p_.stride_w - p_.pad_w,
                       right = high % p_.in_w * p_.stride_w - p_.pad_w + p_.kernel_w;
    const std::int64_t top = low / p_.in_w * p_.stride_h - p_.pad_h,
                       bottom = high / p_.in_w * p_.stride_h - p_.pad_h + p_.kernel_h - 1, row = p_.out_w * 2;
    return {(top * row + left * 2) & ~std::int64_t(15), bottom * row + right * 2};
  }
  // Calls use(begin, end) for each plane of a chunk of `count` pixels from pixel `first` of a plane on.
  template <typename Use>
  void each_plane(std::int64_t first, std::int64_t count, Use use) const {
    const std::int64_t last = first + count - 1;
    for (std::int64_t plane = 0; plane <= last / plane_; ++plane)
      use(reach(std::max(first - plane * plane_, std::int64_t(0)), std::min(last - plane * plane_, plane_ - 1)));
  }
  // The same for all chunks that begin unlike, which are at most so many: behind them others begin at the same pixels of a plane.
  template <typename Use>
  void each_chunk(Use use) const {
    const WeightLaidJob& job = plan_.job;
    const std::int64_t unlike =
        std::min(std::int64_t(job.run_chunks.value), plane_ / std::gcd(plane_, std::int64_t(kWeightLaidPixels)));
    for (std::int64_t chunk = 0; chunk < unlike; ++chunk) {
      const std::int64_t first = chunk * kWeightLaidPixels;
      use(first % plane_, std::min<std::int64_t>(kWeightLaidPixels, job.run_pixels - first));
    }
  }

  bool buffers() {
    WeightLaidJob& job = plan_.job;
    const std::int64_t channels = tile_.columns / kernel_taps(p_);
    std::int64_t longest = 0, most = 0;
    each_chunk([&](std::int64_t first, std::int64_t count) {
      each_plane(first, count, [&](const Reach& own) { longest = std::max(longest, own.end - own.begin); });
    });
    const std::int64_t left = most_shared_ - std::int64_t(sizeof(WeightLaidBarriers)) -
                              kMostWeightLaidBuffers * std::int64_t(sizeof(WeightLaidPlaces)) - kWeightLaidAlignment;
    const std::int64_t stage = tile_.rows * 128 + kWeightLaidPixels * tile_.columns * 2;
    // Pieces as long as can be, or such that three chunks have room beside as many stages.
    std::int64_t piece = 0;
    const std::int64_t fewest = ceil_div(longest, kMostPieceBytes);
    for (std::int64_t count = fewest; count <= std::max(2 * fewest, kMostPieces); ++count) {
      const std::int64_t own = ceil_div(ceil_div(longest, count), kPieceAlignment) * kPieceAlignment;
      std::int64_t own_most = 0;
      each_chunk([&](std::int64_t first, std::int64_t pixels) {
        std::int64_t pieces = 0;
        each_plane(first, pixels, [&](const Reach& reach) { pieces += ceil_div(reach.end - reach.begin, own); });
        own_most = std::max(own_most, pieces);
      });
      const bool three = left >= 3 * stage + 3 * own_most * channels * own && own_most <= kMostWeightLaidPieces;
      if (piece == 0 || three) piece = own, most = own_most;
      if (three) break;
    }
    if (most > kMostWeightLaidPieces) return false;
    const std::int64_t bytes = channels * piece, buffer = most * bytes;
    job.stages = left >= 3 * stage + 2 * buffer ? 3 : 2;
    const std::int64_t room = left - job.stages * stage;
    if (room < 2 * buffer) return false;
    job.buffers = std::int32_t(std::min<std::int64_t>(room / buffer, kMostWeightLaidBuffers));
    const Reach whole = reach(0, plane_ - 1);
    job.plane_begin = std::int32_t(whole.begin), job.plane_pieces = std::int32_t(ceil_div(whole.end - whole.begin, piece));
    job.piece = make_divisor(piece), job.piece_bytes = std::int32_t(bytes), job.buffer_bytes = std::int32_t(buffer);
    BoxTensor& box = plan_.y;
    const auto step = [](std::int64_t count, std::int64_t stride) { return count == 1 ? std::int64_t(16) : stride * 2; };
    box = {p_.dtype,
           {p_.out_h * p_.out_w, p_.out_channels, p_.out_d, p_.batch, 1},
           {step(p_.out_channels, p_.y.c), step(p_.out_d, p_.y.d), step(p_.batch, p_.y.n), 16},
           {},
           16,
           128};
    box.box[0] = std::int32_t(piece / 2), box.box[1] = std::int32_t(channels), box.box[2] = box.box[3] = box.box[4] = 1;
    const std::int64_t sums = tile_.rows * tile_.columns * 4;
    plan_.shared_bytes = int(std::max(job.stages * stage + job.buffers * buffer, sums) + kWeightLaidAlignment);
    return sums <= left;
  }

  // The parts that take least.
  bool cut() {
    WeightLaidJob& job = plan_.job;
    const std::int64_t row_tiles = ceil_div(p_.in_channels, tile_.rows), column_tiles = ceil_div(columns_, tile_.columns);
    plan_.tiles = row_tiles * column_tiles;
    const double products = 2 * double(tile_.rows / 64 * tile_.columns);
    const double loads = double(tile_.rows * 128 + job.buffer_bytes) / kLoadedBytes;
    const double slower = (job.stages == 2 ? kTwoLaidStages : 1.0) * (plan_.paired ? kTogether : 1.0);
    const double chunk = std::max(kChunkProducts * products, loads) * slower;
    std::int64_t splits = 0;
    double least = 0;
    const auto weigh = [&](std::int64_t blocks, std::int64_t at_once) {
      for (std::int64_t clusters = 1; clusters <= kMostWeightLaidClusters; ++clusters) {
        const std::int64_t parts = blocks * clusters, own = ceil_div(chunks_, parts);
        const std::int64_t bytes = clusters > 1 ? clusters * p_.in_channels * columns_ * 4 : 0;
        if (parts > 1 && (own < kLeastWeightLaidPart || ceil_div(chunks_, own) != parts)) continue;
        if (bytes + plan_.packed_bytes > cap_ || plan_.tiles * parts >= kMostWeightLaidCount) return;
        const double others = double(tile_.rows * tile_.columns * 4 * (blocks - 1)) / double(blocks);  // bytes
        double cycles = double(own) * chunk + kTileCycles + others / kClusterBytes;
        cycles *= double(ceil_div(plan_.tiles * clusters, std::max<std::int64_t>(at_once, 1)));
        if (clusters > 1) cycles += kSumCycles + double(bytes) * 2 / kSumBytes + double(clusters) * kSumPartCycles;
        if (splits > 0 && cycles >= least) continue;
        least = cycles, splits = blocks, plan_.clusters = clusters, plan_.partial_bytes = bytes;
        job.part_chunks = std::int32_t(own);
      }
    };
    weigh(1, multiprocessors_);
    for (const ClustersAtOnce& known : kClustersAtOnce) weigh(known.blocks, known.count * multiprocessors_ / 132);
    if (splits == 0) return false;
    job.splits = make_divisor(splits), job.row_tiles = make_divisor(row_tiles), job.column_tiles = make_divisor(column_tiles);
    const std::int64_t fours = plan_.clusters > 1 ? p_.in_channels * columns_ / 4 : 0;
    job.parts = std::int32_t(splits * plan_.clusters);
    const std::int64_t pitch = column_tiles * (tile_.columns / kernel_taps(p_)),
                       bytes = ceil_div(job.parts * 2 * pitch * 4, std::int64_t(256)) * 256;
    plan_.sum = {make_divisor(columns_ / 4), std::uint32_t(fours), std::int32_t(plan_.clusters), job.w_n, 0, 0, 0};
    // Whether the windows of pixels are every element of y once.
    const bool sums = !plan_.paired && p_.stride_h == p_.kernel_h && p_.out_h == p_.in_h * p_.stride_h &&
                      p_.out_w == p_.in_w * p_.stride_w && plan_.partial_bytes + plan_.packed_bytes + bytes <= cap_;
    if (sums) {
      plan_.row_sums_bytes = bytes, job.sum_pitch = std::int32_t(pitch);
      plan_.sum.sum_rows = 2 * job.parts, plan_.sum.sum_pitch = job.sum_pitch, plan_.sum.channels = job.channels;
    }
    return fours < kMostWeightLaidCount;
  }
};

}  // namespace
}  // namespace upfold::cuda
