#include "gemm_plan.h"

#include <algorithm>

namespace upfold::cuda {
namespace {

constexpr std::int64_t kRowMultiple = 8;  // elements, of the distance of column rows: 16 bytes for every type
// TF32 products want operands whose summed index is the fastest: below this depth a copy of x to that layout does not pay.
constexpr std::int64_t kLeastDepth = 64;
// What decides whether a copy of the weight to that layout pays, measured on an H200: from kDeepProduct on it saves a quarter of
// the product, from this depth on large products gain.
constexpr std::int64_t kHalfDeep = 64;
constexpr double kLargeProduct = 80e-6, kWorthwhile = 0.15;     // seconds; share of the product
constexpr double kFlops = 200e12, kBytes = 3.5e12;              // of a product as it is
constexpr double kCopyStart = 2.5e-6, kCopyBytes = 2.5e12 / 2;  // of the copy, which reads and writes
constexpr std::int64_t kLeastChannels = 16;                     // fewer make a product too flat
constexpr std::int64_t kTile = 128, kBusy = 64;  // rows and columns of a product's tile; tiles that keep a device busy
constexpr std::int64_t kLargeSample = 24 << 20;  // bytes of x and columns of a sample
constexpr std::int64_t kLeastSum = 512;          // pixels of a part of a sum
constexpr std::int64_t kLeastRows = 8;           // fewer recompute too much halo

std::int64_t padded(std::int64_t pixels) { return (pixels + kRowMultiple - 1) / kRowMultiple * kRowMultiple; }

constexpr std::int64_t kMostOuter = std::int64_t(1) << 30;  // positions and blocks of the outer product, elements of windows
                                                            // and of results that are finished by themselves
constexpr std::int64_t kNever = std::int64_t(1) << 60;      // bytes beyond every cap

struct Axes {
  Axis axis[3];
};
Axes axes_of(const Problem& p) { return {{axis_d(p), axis_h(p), axis_w(p)}}; }

// The outermost axis with more than one position: blocks are cut along it, so that their pixels stay one run.
int split_axis(const Axes& axes) {
  for (int i = 0; i < 3; ++i) {
    if (axes.axis[i].in > 1 || axes.axis[i].out > 1) return i;
  }
  return 2;
}

// The inputs from which some tap reaches one of `out`; may be empty.
Range reaching(const Axis& a, const Range& out) {
  const std::int64_t first = ceil_div(out.begin + a.pad - a.dilation * (a.kernel - 1), a.stride);
  const std::int64_t last = floor_div(out.end - 1 + a.pad, a.stride);
  const std::int64_t begin = std::min(std::max<std::int64_t>(first, 0), a.in);
  return {begin, std::max(begin, std::min(last + 1, a.in))};
}

// How many samples, output channels and positions of the split axis a block takes.
struct Blocking {
  std::int64_t samples, channels, rows;
};

class Planner {
 public:
  Planner(const Problem& p, const Window& window, const GemmOptions& options, std::int64_t cublas_bytes)
      : p_(window.taps > 0 ? window.reduced : p), options_(options), axes_(axes_of(p_)) {
    split_ = split_axis(axes_);
    over_outputs_ = p_.op == Operator::kConvTranspose;
    positions_ = over_outputs_ ? axes_.axis[split_].out : axes_.axis[split_].in;
    plane_ = in_pixels(p_) / axes_.axis[split_].in;
    plan_ = {};
    plan_.window = window;
    plan_.cublas_bytes = aligned(std::min(cublas_bytes, options.workspace_cap / 4));
    x_ = pixel_matrix(p.x, p.in_channels, p.in_d, p.in_h, p.in_w);
    plan_.to_result = !windowed() && product_is_result();
    plan_.finishes = plan_.to_result && (options.has_bias || p_.activation != Activation::kNone);
    plan_.outer = !windowed() && outer_product();
    plan_.column_dtype = over_outputs_ && (plan_.outer || !columns_are_exact()) ? sum_dtype(p.dtype) : p.dtype;
    plan_.tap_rows = !windowed() && over_outputs_ && !options.atomic && !weight_is_matrix(p_) && weight_is_tap_matrix(p_);
    plan_.repack_weight = !windowed() && p.op != Operator::kConvTransposeWeight && !plan_.tap_rows && !weight_is_matrix(p_);
    plan_.deep_weight = !windowed() && deep_weight_pays();
  }

  GemmPlan plan() {
    if (plan_.to_result) {
      const std::int64_t results = p_.batch * p_.out_channels * kernel_taps(p_);
      plan_.columns_at = plan_.cublas_bytes;
      plan_.total_bytes = plan_.cublas_bytes + (plan_.finishes ? aligned(results * element_bytes(sum_dtype(p_.dtype))) : 0);
      plan_.possible = plan_.total_bytes <= options_.workspace_cap;
      if (plan_.possible || !plan_.finishes) return plan_;
      plan_.to_result = plan_.finishes = false;
    }
    // The aim counts what moves with a block; the rest of the workspace stays as it is.
    const std::int64_t fixed = plan_.cublas_bytes + weight_bytes(),
                       aim = options_.chunk_bytes > 0 ? fixed + options_.chunk_bytes : options_.workspace_cap;
    const Blocking blocking = choose(std::min(aim, options_.workspace_cap));
    if (plan_.tap_rows && blocking.channels < p_.out_channels) {  // channels of a block would lie apart
      plan_.tap_rows = false, plan_.repack_weight = true;
      return plan();
    }
    plan_.possible = total(blocking) <= options_.workspace_cap;
    lay_out(blocking, plan_);
    if (plan_.possible) list(blocking);
    return plan_;
  }

 private:
  bool windowed() const { return plan_.window.taps > 0; }
  bool planar_x() const { return x_.regular && !x_.channels_fastest && x_.step == 1; }
  bool tf32() const { return options_.allow_tf32 && p_.dtype == Dtype::kFloat32; }

  // At most one tap reaches an output and nothing is added to it: a rounded column is the rounded output.
  bool columns_are_exact() const {
    if (options_.atomic || options_.has_bias) return false;
    if (p_.activation != Activation::kNone && p_.activation != Activation::kRelu) return false;
    for (const Axis& a : axes_.axis) {
      if (a.kernel > a.stride || (a.kernel > 1 && a.dilation != 1)) return false;
    }
    return true;
  }

  // One pixel whose taps are the outputs in order; what is added to real ones is added in a pass of its own.
  bool product_is_result() const {
    const bool complex = p_.dtype == Dtype::kComplex64 || p_.dtype == Dtype::kComplex128;
    if (!over_outputs_ || options_.atomic) return false;
    const bool adds = options_.has_bias || p_.activation != Activation::kNone;
    if (adds && (complex || p_.batch * p_.out_channels * kernel_taps(p_) >= kMostOuter)) return false;
    for (const Axis& a : axes_.axis) {
      if (a.in != 1 || a.pad != 0 || a.out != a.kernel) return false;
    }
    const std::int64_t taps = kernel_taps(p_);
    const bool taps_dense = (p_.kernel_w == 1 || p_.y.w == 1) && (p_.kernel_h == 1 || p_.y.h == p_.kernel_w) &&
                            (p_.kernel_d == 1 || p_.y.d == p_.kernel_h * p_.kernel_w);
    const bool planes = weight_is_matrix(p_) && taps_dense && (p_.out_channels == 1 || p_.y.c == taps);
    const bool pixels = weight_is_tap_matrix(p_) && is_tap_matrix(p_, p_.y, p_.out_channels);
    return (planes || pixels) && (p_.batch == 1 || p_.y.n >= p_.out_channels * taps) && (p_.in_channels == 1 || p_.x.c == 1) &&
           (p_.batch == 1 || p_.x.n >= p_.in_channels);
  }

  bool outer_product() const {
    const bool real = p_.dtype != Dtype::kComplex64 && p_.dtype != Dtype::kComplex128;
    if (!over_outputs_ || plan_.to_result || !real || p_.in_channels != p_.groups || p_.groups == 1 || !planar_x()) return false;
    const std::int64_t pixels = p_.batch * in_pixels(p_);
    return pixels < kMostOuter && (pixels / 256 + 1) * p_.in_channels < kMostOuter;
  }

  bool deep_weight_pays() const {
    const std::int64_t depth = in_channels_per_group(p_), rows = out_channels_per_group(p_) * kernel_taps(p_);
    if (!over_outputs_ || !tf32() || plan_.to_result || plan_.outer || depth * 4 % 16 != 0) return false;
    if (plan_.repack_weight || plan_.tap_rows) return false;
    // An x that is copied takes the summed index to the front itself.
    if (!planar_x() || !rows_aligned() || (in_pixels(p_) < kSmallMap && p_.batch > 1)) return false;
    const double pixels = double(p_.batch) * double(in_pixels(p_)), weight = 4.0 * double(p_.in_channels) * double(rows);
    const double flops = 2.0 * pixels * double(p_.in_channels) * double(rows);
    const double bytes = 4.0 * pixels * double(p_.in_channels + rows * p_.groups);
    const double product = std::max(flops / kFlops, bytes / kBytes), copy = kCopyStart + weight / kCopyBytes;
    return copy < kWorthwhile * product && (depth >= kDeepProduct || (depth >= kHalfDeep && product > kLargeProduct));
  }

  // Tensor cores want rows of x that begin at multiples of 16 bytes.
  bool rows_aligned() const { return rows_aligned(x_); }
  bool rows_aligned(const PixelMatrix& m) const {
    const std::int64_t size = element_bytes(p_.dtype);
    return (m.channels_fastest ? m.step : m.channel) * size % 16 == 0 && m.sample * size % 16 == 0;
  }

  // One tap of stride 1 without padding, bias or activation: columns are the pixels of y, which lie where a product wants them.
  bool y_is_columns() const {
    for (const Axis& a : axes_.axis) {
      if (a.kernel != 1 || a.stride != 1 || a.pad != 0 || a.out != a.in) return false;
    }
    if (over_outputs_ && (options_.atomic || options_.has_bias || p_.activation != Activation::kNone)) return false;
    const PixelMatrix y = pixel_matrix(p_.y, p_.out_channels, p_.out_d, p_.out_h, p_.out_w);
    return y.regular && !y.channels_fastest && y.step == 1 && (p_.dtype == Dtype::kFloat64 || rows_aligned(y));
  }

  std::int64_t weight_bytes() const {
    if (!plan_.repack_weight && !plan_.deep_weight) return 0;
    return aligned(p_.in_channels * out_channels_per_group(p_) * kernel_taps(p_) * element_bytes(p_.dtype));
  }

  std::int64_t in_positions(std::int64_t rows) const {
    const Axis& a = axes_.axis[split_];
    if (rows >= positions_) return a.in;
    if (!over_outputs_) return rows;
    return std::min((rows - 1 + a.dilation * (a.kernel - 1)) / a.stride + 1, a.in);
  }

  // The gradient of the weight sums over samples, which one product cannot where they lie apart: x would be copied first. Parts
  // with a sum each spare the copy where the weight is smaller than x, and fill the device where the result is small.
  std::int64_t parts_of(const Blocking& b, std::int64_t pixels) const {
    const std::int64_t per_group = out_channels_per_group(p_), rows = std::min(b.channels, per_group) * kernel_taps(p_);
    if (p_.op != Operator::kConvTransposeWeight || b.samples == 1 || b.rows < positions_) return 0;
    if (pixels < std::max(2 * rows, kLeastSum)) return 0;
    const std::int64_t depth = in_channels_per_group(p_), tiles = ceil_div(rows, kTile) * ceil_div(depth, kTile) * p_.groups;
    if (tiles * b.samples >= kBusy) return 1;
    // Samples then follow one another, which small ones do not repay.
    if ((rows + depth) * p_.groups * pixels * element_bytes(p_.dtype) < kLargeSample) return 0;
    const std::int64_t most = std::min({ceil_div(2 * kBusy, tiles), pixels / (2 * rows), pixels / kLeastSum});
    for (std::int64_t parts = most; parts > 1; --parts) {
      if (pixels % (parts * kRowMultiple) == 0) return 2 * parts * tiles >= kBusy ? parts : 0;
    }
    return 0;
  }

  bool whole(const Blocking& b) const { return b.rows >= positions_; }
  // For windows: the weight and x go through the workspace, and what a gradient sums is staged.
  void lay_out_windows(const Blocking& b, GemmPlan& plan) const {
    const Window& window = plan.window;
    const std::int64_t size = element_bytes(p_.dtype), sum_size = element_bytes(sum_dtype(p_.dtype));
    const std::int64_t joined = padded(plane_ * in_positions(b.rows) * b.samples);
    const bool has_weight = p_.op != Operator::kConvTransposeWeight, has_x = p_.op != Operator::kConv;
    plan.flat = plan.copy_x = true;
    plan.weight_at = plan.cublas_bytes;
    plan.x_at = plan.weight_at + (has_weight ? aligned(window_weight_elements(window) * size) : 0);
    const std::int64_t pixels = has_x ? window_pixel_elements(window, joined * window.residues) : 0;
    plan.columns_at = plan.x_at + aligned(pixels * size);
    plan.stage_at = plan.columns_at + aligned(p_.out_channels * kernel_taps(p_) * joined * element_bytes(plan.column_dtype));
    plan.total_bytes = plan.stage_at;
    if (!has_x) plan.total_bytes += aligned(p_.in_channels * window.taps * joined * sum_size);
    if (!has_weight) plan.total_bytes += aligned(window_weight_elements(window) * sum_size);
    if (pixels >= kMostOuter) plan.total_bytes = kNever;  // more than the copies count
  }

  // What depends on the blocking: how x is read or written, and the sizes of the parts.
  void lay_out(const Blocking& b, GemmPlan& plan) const {
    if (windowed()) return lay_out_windows(b, plan);
    const std::int64_t size = element_bytes(p_.dtype), sum_size = element_bytes(sum_dtype(p_.dtype));
    const std::int64_t pixels = plane_ * in_positions(b.rows), joined = padded(pixels * b.samples);
    const bool read = p_.op != Operator::kConv;
    // A copy costs less than what is lost without aligned rows.
    const bool aligned_rows = !(is_narrow(p_.dtype) || options_.allow_tf32) || plan.outer || rows_aligned();
    const bool in_place = x_.regular && aligned_rows;
    const bool joins = b.samples == 1 || (whole(b) && (x_.channels_fastest || x_.step == 0) && x_.sample == x_.step * pixels);
    plan.parts = in_place && !joins ? parts_of(b, pixels) : 0;
    const bool sums_pixels = p_.op == Operator::kConvTransposeWeight && plan.parts == 0;
    const bool must_join = !plan.outer && (sums_pixels || pixels < kSmallMap);
    plan.flat = joins || must_join || !in_place;
    const bool copies = !in_place || (plan.flat && !joins);
    plan.copy_x = read && copies;
    plan.deep_x = plan.copy_x && over_outputs_ && tf32() && planar_x() && in_channels_per_group(p_) >= kLeastDepth &&
                  in_channels_per_group(p_) * size % 16 == 0;
    const std::int64_t per_group = out_channels_per_group(p_);
    const bool splits_group = b.channels < per_group;
    const bool many_pixels = b.samples < p_.batch || b.rows < positions_;
    if (p_.op == Operator::kConv) {
      plan.stage = copies || (splits_group && is_narrow(p_.dtype));
      plan.flat = plan.flat || plan.stage;
      plan.stage_dtype = splits_group ? sum_dtype(p_.dtype) : p_.dtype;
    } else if (p_.op == Operator::kConvTransposeWeight) {
      // Sums of parts are made in the type of the sums, and of dense matrices.
      const bool apart = is_narrow(p_.dtype) || splits_group || p_.w.n != per_group * kernel_taps(p_);
      plan.stage = !weight_is_matrix(p_) || (many_pixels && is_narrow(p_.dtype)) || (plan.parts > 0 && apart);
      plan.stage_dtype = many_pixels || plan.parts > 0 ? sum_dtype(p_.dtype) : p_.dtype;
    }
    const std::int64_t groups = std::max<std::int64_t>(b.channels / per_group, 1), channels = p_.in_channels / p_.groups * groups;
    const std::int64_t row = plan.flat ? joined : padded(pixels) * b.samples;
    const std::int64_t taps = kernel_taps(p_);
    plan.weight_at = plan.cublas_bytes;
    plan.x_at = plan.weight_at + weight_bytes();
    plan.columns_at = plan.x_at + (plan.copy_x ? aligned(p_.in_channels * joined * size) : 0);
    const bool uncut = !many_pixels && b.channels == p_.out_channels && (b.samples == 1 || !plan.flat);
    plan.columns_are_y = uncut && !plan.outer && !plan.copy_x && (p_.op != Operator::kConv || !plan.stage) && y_is_columns();
    const std::int64_t columns = plan.columns_are_y || options_.given_columns ? 0 : b.channels * taps * row;
    plan.stage_at = plan.columns_at + aligned(columns * element_bytes(plan.column_dtype));
    std::int64_t staged = 0;
    if (plan.stage) staged = p_.op == Operator::kConv ? channels * joined : channels * std::min(b.channels, per_group) * taps;
    // The atomic col2im of a 16-bit problem sums in float32.
    if (options_.atomic && over_outputs_ && is_narrow(p_.dtype)) {
      plan.stage_dtype = sum_dtype(p_.dtype);
      staged = b.samples * b.channels * b.rows * (out_pixels(p_) / axes_.axis[split_].out);
    }
    plan.parts_at = plan.stage_at + aligned(staged * element_bytes(plan.stage_dtype));
    const std::int64_t of_part = channels * std::min(b.channels, per_group) * taps;
    plan.total_bytes = plan.parts_at + aligned(plan.parts * b.samples * of_part * sum_size);
  }

  std::int64_t total(const Blocking& b) const {
    GemmPlan trial = plan_;
    lay_out(b, trial);
    return trial.total_bytes;
  }

  std::int64_t fewer_channels(std::int64_t channels) const {
    const std::int64_t per_group = out_channels_per_group(p_);
    if (channels > per_group) return std::max<std::int64_t>(1, channels / per_group / 2) * per_group;
    return (channels + 1) / 2;
  }

  Blocking choose(std::int64_t budget) const {
    Blocking b{p_.batch, p_.out_channels, positions_};
    const auto over = [&] { return total(b) > budget; };
    while (b.samples > 1 && over()) b.samples = (b.samples + 1) / 2;
    const std::int64_t least = std::min(kLeastChannels, p_.out_channels);
    // A product over windows has all channels in one matrix, and lays its rows of x out whole.
    if (windowed()) {
      while (split_ < 2 && b.rows > 1 && over()) b.rows = (b.rows + 1) / 2;
      return b;
    }
    // A convolution sums over output channels: cutting them inside a group costs a pass over the sum, so rows go first.
    if (p_.op == Operator::kConv) {
      while (b.channels > out_channels_per_group(p_) && over()) b.channels = fewer_channels(b.channels);
    } else {
      while (b.channels > least && over()) b.channels = fewer_channels(b.channels);
    }
    while (b.rows > kLeastRows && over()) b.rows = (b.rows + 1) / 2;
    while (b.channels > 1 && over()) b.channels = fewer_channels(b.channels);
    while (b.rows > 1 && over()) b.rows = (b.rows + 1) / 2;
    return b;
  }

  GemmBlock block_of(const Range& n, const Range& oc, const Range& part) const {
    const std::int64_t per_group = out_channels_per_group(p_), taps = kernel_taps(p_);
    Range in[3], out[3];
    for (int i = 0; i < 3; ++i) in[i] = {0, axes_.axis[i].in}, out[i] = {0, axes_.axis[i].out};
    if (over_outputs_) {
      out[split_] = part;
      if (length(part) < positions_) in[split_] = reaching(axes_.axis[split_], part);
    } else {
      in[split_] = part;
    }
    GemmBlock block{};
    block.samples = length(n), block.pixels = length(in[0]) * length(in[1]) * length(in[2]);
    block.first_group = oc.begin / per_group, block.groups = std::max<std::int64_t>(length(oc) / per_group, 1);
    const bool part_of_group = length(oc) < per_group;
    block.first_row = part_of_group ? (oc.begin - block.first_group * per_group) * taps : 0;
    block.rows = (part_of_group ? length(oc) : per_group) * taps;
    const std::int64_t row = padded(plan_.flat ? block.samples * block.pixels : block.pixels);
    const std::int64_t sample = plan_.flat ? block.pixels : row * length(oc) * taps;
    block.columns = {n, oc, in[0], in[1], in[2], out[0], out[1], out[2], sample, row};
    return block;
  }

  // The result of `conv` is summed over the channel blocks of a group, that of `conv_transpose_weight` over samples and rows.
  void list(const Blocking& b) {
    const std::vector<Range> samples = cut(p_.batch, b.samples), parts = cut(positions_, b.rows), channels = channel_ranges(b);
    const bool weight = p_.op == Operator::kConvTransposeWeight;
    const std::int64_t per_group = out_channels_per_group(p_);
    const auto add = [&](const Range& n, const Range& part, const Range& oc) {
      GemmBlock block = block_of(n, oc, part);
      if (weight) {
        block.first_of_sum = n.begin == 0 && part.begin == 0;
        block.last_of_sum = n.end == p_.batch && part.end == positions_;
      } else {
        block.first_of_sum = oc.begin % per_group == 0;
        block.last_of_sum = oc.end % per_group == 0;
      }
      plan_.blocks.push_back(block);
    };
    if (weight) {
      for (const Range& oc : channels)
        for (const Range& n : samples)
          for (const Range& part : parts) add(n, part, oc);
      return;
    }
    for (const Range& n : samples)
      for (const Range& part : parts)
        for (const Range& oc : channels) add(n, part, oc);
  }

  static std::vector<Range> cut(std::int64_t size, std::int64_t step) {
    std::vector<Range> ranges;
    for (std::int64_t begin = 0; begin < size; begin += step) ranges.push_back({begin, std::min(begin + step, size)});
    return ranges;
  }

  // Runs of whole groups, or parts that stay inside one group.
  std::vector<Range> channel_ranges(const Blocking& b) const {
    const std::int64_t per_group = out_channels_per_group(p_);
    if (b.channels >= per_group) return cut(p_.out_channels, b.channels / per_group * per_group);
    std::vector<Range> ranges;
    for (std::int64_t group = 0; group < p_.groups; ++group) {
      for (const Range& r : cut(per_group, b.channels))
        ranges.push_back({group * per_group + r.begin, group * per_group + r.end});
    }
    return ranges;
  }

  const Problem p_;  // the reduced one where there are windows
  const GemmOptions& options_;
  Axes axes_;
  PixelMatrix x_;
  int split_;
  bool over_outputs_;
  std::int64_t positions_, plane_;
  GemmPlan plan_;
};

}  // namespace

GemmPlan plan_blocks(const Problem& p, const Window& window, const GemmOptions& options, std::int64_t cublas_bytes) {
  return Planner(p, window, options, cublas_bytes).plan();
}

void take_cublas_bytes(GemmPlan& plan, std::int64_t need) {
  const std::int64_t had = plan.cublas_bytes;
  plan.cublas_bytes = aligned(need);
  for (std::int64_t* at :
       {&plan.weight_at, &plan.x_at, &plan.columns_at, &plan.stage_at, &plan.parts_at, &plan.planes_at, &plan.total_bytes}) {
    if (*at >= had) *at += plan.cublas_bytes - had;  // else the plan has no such part
  }
}

}  // namespace upfold::cuda
