// The planner of the fused method whose columns stay in shared memory; host code, for one source.
#pragma once

#include <algorithm>

#include "fused_columns_plan.h"

namespace upfold::cuda {
namespace {

constexpr int kColumnGroups[] = {2, 4, 6, 8, 16};  // of eight columns
// More channels fill products of other tiles.
constexpr std::int64_t kMostColumnChannels = 24;
constexpr std::int64_t kMostColumns = 128, kMostColumnTiles = 3, kMostColumnCount = std::int64_t(1) << 30, kStageUnit = 16 << 10;
// In cycles (H200): what a block takes before its first product; a chunk of a step, a step beside, and a turn of its stores; and
// bytes of x that a multiprocessor gets in one.
constexpr double kColumnStart = 3500, kColumnChunk = 450, kColumnStep = 350, kColumnTurn = 120, kColumnBytes = 19;
constexpr double kColumnShare = 0.2;  // of its time that a block beside another takes longer

class ColumnsPlanner {
 public:
  ColumnsPlanner(const Problem& p, int warpgroups, const SharedMemory& shared, std::int64_t alignment, int multiprocessors)
      : p_(p), warpgroups_(warpgroups), shared_(shared), multiprocessors_(multiprocessors), size_(element_bytes(p.dtype)) {
    aligned_ = alignment % 16 == 0;
  }

  ColumnsPlan plan() {
    if (!aligned_ || !choose_layout() || !choose_columns() || !axes()) return {};
    for (std::int64_t parts = 1; parts <= 16; ++parts) {
      for (int blocks = columns_blocks(n8_, warpgroups_); blocks >= 1; --blocks) try_cut(parts, blocks);
    }
    return best_;
  }

 private:
  const Problem& p_;
  const int warpgroups_;
  const SharedMemory shared_;
  const std::int64_t multiprocessors_, size_;
  bool aligned_ = false, last_ = false, flat_ = false;
  int n8_ = 0;
  std::int64_t line_ = 0, chunk_ = 0, lines_ = 0;  // pixels of a line, channels of a chunk, lines of a step
  ColumnsPlan best_, now_;

  // Bytes from one element of an axis to the next; any of an axis that is never stepped.
  static std::int64_t bytes_of(std::int64_t size, std::int64_t stride, std::int64_t element) {
    return size == 1 ? 16 : stride * element;
  }
  bool lies_in_boxes() const {
    const std::int64_t sizes[] = {p_.batch, last_ ? 1 : p_.in_channels, flat_ ? 1 : p_.in_h, last_ ? p_.in_w : 1};
    const std::int64_t strides[] = {p_.x.n, p_.x.c, p_.x.h, p_.x.w};
    for (int i = 0; i < 4; ++i) {
      const std::int64_t bytes = bytes_of(sizes[i], strides[i], size_);
      if (bytes <= 0 || bytes % 16 != 0 || bytes >= std::int64_t(1) << 40) return false;
    }
    return true;
  }

  bool choose_layout() {
    const std::int64_t counts[] = {p_.batch, p_.in_channels, p_.out_channels, p_.in_h * p_.in_w, p_.out_h, p_.out_w, p_.kernel_h};
    for (const std::int64_t count : counts)
      if (count >= kMostColumnCount) return false;
    const bool deep = p_.in_d * p_.out_d * p_.kernel_d != 1 || p_.pad_d != 0;
    if (deep || p_.dilation_h * p_.dilation_w != 1 || p_.in_h * p_.in_w == 0) return false;
    last_ = p_.x.c == 1 && p_.in_w > 1 && p_.x.w != 1;
    if (!last_ && p_.x.w != 1) return false;
    line_ = !last_ && size_ == 2 ? 64 : 32, chunk_ = 128 / size_, lines_ = warpgroups_ * 128 / line_;
    // Zeros stand for channels behind the last, but those of a neighbouring group would not.
    if (p_.groups > 1 && in_channels_per_group(p_) % chunk_ != 0) return false;
    const bool run = p_.x.h == p_.in_w * (last_ ? p_.x.w : 1);
    flat_ = run && line_ % p_.in_w == 0 && (last_ || p_.in_w * size_ % 16 == 0);
    return lies_in_boxes();
  }

  bool choose_columns() {
    const std::int64_t taps = p_.kernel_h * p_.kernel_w, all = out_channels_per_group(p_);
    if (taps > kMostColumns || all > kMostColumnChannels) return false;
    const std::int64_t tiles = ceil_div(all, kMostColumns / taps), channels = ceil_div(all, tiles);
    if (tiles > kMostColumnTiles || (warpgroups_ == 2 && channels * taps > 48)) return false;
    for (const int n8 : kColumnGroups) {
      n8_ = n8;
      if (8 * n8 >= channels * taps) break;
    }
    ColumnsJob& job = now_.job;
    job.pixels_floats = std::int32_t(ceil_div(channels * taps, std::int64_t(8)) * 8 * kColumnPitch);
    job.channels = std::int32_t(channels), job.columns = std::int32_t(channels * taps);
    job.channel_tiles = make_divisor(tiles), job.combinations = make_divisor(tiles * p_.groups);
    job.ic = std::int32_t(in_channels_per_group(p_)), job.oc = std::int32_t(all);
    job.chunks = std::int32_t(ceil_div(in_channels_per_group(p_), chunk_));
    job.weight_bytes = job.chunks * 128 * 8 * n8_;
    now_.last = last_, now_.n8 = n8_;
    return in_channels_per_group(p_) <= 4096 && tiles * p_.groups <= 1024;
  }

  static ColumnsAxis axis_of(const Axis& a) {
    return {
        std::int32_t(a.in),     std::int32_t(a.out),   std::int32_t(a.kernel), std::int32_t(a.stride), std::int32_t(a.pad), 0, {},
        make_divisor(a.stride), make_divisor(a.kernel)};
  }
  bool axes() {
    ColumnsJob& job = now_.job;
    const Axis h = axis_h(p_), w = axis_w(p_);
    for (const Axis& a : {h, w})
      if (a.stride >= 1 << 15 || a.pad >= 1 << 15 || a.kernel > kMostColumns) return false;
    job.h = axis_of(h), job.w = axis_of(w);
    job.y_n = p_.y.n, job.y_c = p_.y.c, job.y_h = p_.y.h, job.y_w = p_.y.w;
    job.w_ic = p_.w.n, job.w_oc = p_.w.c, job.w_h = p_.w.h, job.w_w = p_.w.w;
    job.activation = p_.activation, job.slope = p_.activation_slope;
    job.align = std::int32_t(last_ ? 1 : 16 / size_);
    job.four = p_.stride_h == 2 && p_.stride_w == 2 && p_.kernel_h == 4 && p_.kernel_w == 4;
    job.pixels = p_.y.c == 1 && p_.y.w == 3 && job.channels == 3;
    job.paired = (job.pixels || (p_.y.w == 1 && p_.y.c % 2 == 0)) && (p_.y.n | p_.y.h) % 2 == 0;
    describe();
    return true;
  }

  void describe() {
    BoxTensor& x = now_.x;
    const std::int64_t pixels = flat_ ? p_.in_h * p_.in_w : p_.in_w, rows = flat_ ? 1 : p_.in_h;
    const std::int64_t row = bytes_of(rows, p_.x.h, size_), sample = bytes_of(p_.batch, p_.x.n, size_);
    if (last_) {
      x = {p_.dtype, {p_.in_channels, pixels, rows, p_.batch, 1}, {bytes_of(p_.in_w, p_.x.w, size_), row, sample, 16}, {}, 128,
           256};
      x.box[0] = std::int32_t(chunk_), x.box[1] = std::int32_t(line_);
    } else {
      x = {p_.dtype,
           {pixels, p_.in_channels, rows, p_.batch, 1},
           {bytes_of(p_.in_channels, p_.x.c, size_), row, sample, 16},
           {},
           128,
           256};
      x.box[0] = std::int32_t(line_), x.box[1] = std::int32_t(chunk_);
    }
    x.box[2] = x.box[3] = x.box[4] = 1;
  }

  // Walks of a part of the width and some rows, so many blocks to a multiprocessor; kept where it is the fastest so far.
  void try_cut(std::int64_t parts, int blocks) {
    ColumnsJob& job = now_.job;
    if (parts > 1 && (flat_ || ceil_div(p_.out_w, parts) < 2 * line_)) return;
    job.w.span = std::int32_t(ceil_div(ceil_div(p_.out_w, parts), std::int64_t(2)) * 2);
    job.w.parts = make_divisor(ceil_div(p_.out_w, job.w.span));
    const std::int64_t units = ceil_div(p_.out_h + p_.pad_h, p_.stride_h);
    std::int64_t before = 0;
    for (std::int64_t parts_h = 1; parts_h <= units; ++parts_h) {
      const std::int64_t each = ceil_div(units, parts_h);
      if (each == before) continue;
      before = each;
      job.h.span = std::int32_t(each * p_.stride_h);
      job.h.parts = make_divisor(ceil_div(units, each));
      try_walks(blocks);
      if (p_.batch * parts_h * job.w.parts.value > 16 * blocks * multiprocessors_) break;
    }
  }

  void try_walks(int blocks) {
    ColumnsJob& job = now_.job;
    widen_lines();
    std::int64_t rows = 0, lines = 0, all = 0;
    for (std::int32_t part = 0; part < std::int32_t(job.h.parts.value); ++part) {
      const ColumnsWalk walk = columns_walk(job, 0, part, 0);
      rows = std::max<std::int64_t>(rows, walk.rows), lines = std::max<std::int64_t>(lines, walk.lines), all += walk.lines;
    }
    if (!fit_shared(blocks, rows)) return;
    const std::int64_t combinations = job.combinations.value, parts = p_.batch * job.w.parts.value;
    if (parts * job.h.parts.value >= kMostColumnCount / 1024) return;
    job.walks = std::uint32_t(parts * job.h.parts.value);
    FusedColumnsWork& work = now_.work;
    const std::int64_t slots = std::max<std::int64_t>(1, multiprocessors_ * blocks / combinations);
    const std::int64_t each = std::min<std::int64_t>(job.walks, slots);
    work.blocks = each * combinations, work.resident = std::min<std::int64_t>(blocks, ceil_div(work.blocks, multiprocessors_));
    work.walks = ceil_div(job.walks, each), work.steps = std::max<std::int64_t>(1, ceil_div(lines, lines_));
    work.products = job.chunks * 4;
    const std::int64_t outputs = job.h.span * std::int64_t(job.w.span) / (job.four ? 4 : 1) * job.channels;
    work.turns = ceil_div(ceil_div(outputs, work.steps), std::int64_t(warpgroups_) * 128);
    work.copied = parts * all * combinations * job.chunks * 128 * (last_ ? line_ : chunk_);
    now_.cycles = cycles();
    now_.possible = true;
    if (!best_.possible || now_.cycles < best_.cycles) best_ = now_;
  }

  double cycles() const {
    const FusedColumnsWork& work = now_.work;
    const double step = std::max(double(now_.job.chunks) * kColumnChunk, double(work.turns) * kColumnTurn) + kColumnStep;
    const double alone = double(work.walks * work.steps) * step * (1 + kColumnShare * double(work.resident - 1));
    const double memory = double(work.copied) / double(work.blocks) * double(work.resident) / kColumnBytes;
    return kColumnStart + std::max(alone, memory) + 0.3 * std::min(alone, memory);
  }

  // What a line is of, and a row of the ring.
  void widen_lines() {
    ColumnsJob& job = now_.job;
    job.line_rows = std::int32_t(flat_ ? line_ / p_.in_w : 0), job.row_lines = 0, job.pitch = std::int32_t(p_.in_w);
    job.lines_of_row = make_divisor(1);
    if (flat_) return;
    std::int64_t lines = 1;
    for (std::int32_t part = 0; part < std::int32_t(job.w.parts.value); ++part) {
      const std::int32_t end = std::min(job.w.out, (part + 1) * job.w.span);
      std::int64_t first = part == 0 ? 0 : first_column_input(job.w, part * job.w.span);
      first = first / job.align * job.align;
      const std::int64_t last = job.w.parts.value == 1 ? p_.in_w - 1 : last_column_input(job.w, end - 1);
      lines = std::max(lines, ceil_div(last - first + 1, line_));
    }
    job.row_lines = std::int32_t(lines), job.lines_of_row = make_divisor(lines), job.pitch = std::int32_t(lines * line_);
  }

  // Rows that outputs still want, and those of two steps beside them.
  std::int64_t ring_rows(std::int64_t rows) const {
    const ColumnsJob& job = now_.job;
    const std::int64_t keep = (p_.kernel_h - 1) / p_.stride_h, lines = 2 * lines_;
    if (flat_) return std::min(keep + lines * job.line_rows, ceil_div(rows, job.line_rows) * job.line_rows);
    const bool whole = lines_ % job.row_lines == 0;
    const std::int64_t own = job.row_lines % lines_ == 0 ? 2 : ceil_div(lines, job.row_lines) + (whole ? 0 : 1);
    return std::min(rows, keep + own);
  }

  bool fit_shared(int blocks, std::int64_t rows) {
    ColumnsJob& job = now_.job;
    std::int64_t ring = std::max<std::int64_t>(1, ring_rows(rows));
    if (flat_) ring = ceil_div(ring, job.line_rows) * job.line_rows;
    job.ring = make_divisor(ring);
    const std::int64_t pixels = ceil_div(ring * job.pitch, std::int64_t(kColumnPixels));
    if (pixels > kMostColumnCount / 1024) return false;
    const std::int64_t columns = pixels * job.pixels_floats * 4, fixed = job.weight_bytes + columns;
    const std::int64_t taps = p_.kernel_h * p_.kernel_w, raw = job.ic * job.oc * taps * size_;
    const bool dense = p_.w.w == 1 && p_.w.h == p_.kernel_w && p_.w.c == taps && p_.w.n == job.oc * taps;
    job.raw_bytes = dense && raw % 16 == 0 && raw <= columns ? std::int32_t(raw) : 0;
    const std::int64_t each = blocks == 1 ? shared_.of_block : shared_.of_multiprocessor / blocks - (1 << 10);
    const std::int64_t left = each - fixed - kColumnAlignment - std::int64_t(sizeof(ColumnsBarriers));
    const std::int64_t stage = kStageUnit * warpgroups_;
    job.stages = std::int32_t(std::min<std::int64_t>(kMostColumnStages, left / stage));
    now_.shared_bytes = int(fixed + job.stages * stage + kColumnAlignment);
    return left >= 2 * stage;
  }
};

}  // namespace
}  // namespace upfold::cuda
