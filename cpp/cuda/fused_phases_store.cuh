// The results of a box of the fused method's phase tiles: staged in the order of y, then stored in runs.
#pragma once

#include "fused_phases_load.cuh"

namespace upfold::cuda {

template <typename Value_, bool kExact, typename Tile_>
struct PhaseResults : PhaseInputs<Value_, kExact, Tile_> {
  using Base = PhaseInputs<Value_, kExact, Tile_>;
  using typename Base::Box;
  using typename Base::Tile;
  using typename Base::Value;
  using Sums = float[Tile_::kM16][Tile_::kN8][4];
  using Base::are_apart, Base::Base, Base::box_at, Base::job, Base::kNowhere, Base::kSize, Base::kVector, Base::memory,
      Base::pattern, Base::pixel, Base::pixels, Base::run_lines, Base::runs, Base::skews, Base::staged, Base::staged_pixel,
      Base::tables, Base::window;

  // Sums begin with the bias, so that it costs no addition; but in full float32 with nothing, as tensor cores cut off what they
  // add to it. Of warps that split the reduction the first has it.
  static constexpr bool kBiasFirst = !kExact;
  __device__ __forceinline__ const PhaseRow* rows_of(std::int32_t warp_m) const {
    return tables().rows + warp_m * Tile::kM16 * 16 + std::int32_t(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ void begin(Sums& sums, std::int32_t warp_m, std::int32_t warp_k) const {
    const PhaseRow* const rows = rows_of(warp_m);
#pragma unroll
    for (int i = 0; i < 2 * Tile::kM16; ++i) {
      const float bias = kBiasFirst && warp_k == 0 ? rows[i * 8].bias : 0.0f;
#pragma unroll
      for (int j = 0; j < Tile::kN8; ++j) sums[i / 2][j][i % 2 * 2] = sums[i / 2][j][i % 2 * 2 + 1] = bias;
    }
  }

  // The sums of a box as results, in the order of y: as many elements behind a multiple of 16 bytes as in y.
  __device__ __forceinline__ void put(Sums& sums, std::int32_t warp_m, std::int32_t warp_n) const {
    const PhaseRow* const rows = rows_of(warp_m);
    if constexpr (!kBiasFirst) {
#pragma unroll
      for (int i = 0; i < 2 * Tile::kM16; ++i) {
        const float bias = rows[i * 8].bias;
#pragma unroll
        for (int j = 0; j < Tile::kN8; ++j) sums[i / 2][j][i % 2 * 2] += bias, sums[i / 2][j][i % 2 * 2 + 1] += bias;
      }
    }
    if (job.activation != Activation::kNone) {
#pragma unroll
      for (int i = 0; i < 4 * Tile::kM16 * Tile::kN8; ++i) {
        float& sum = sums[i / 4 / Tile::kN8][i / 4 % Tile::kN8][i % 4];
        sum = finish(job.activation, job.slope, sum);
      }
    }
    if constexpr (!Tile::kLast && Tile::kWarpsM == 1) {
      if (job.lane_runs) return put_runs(sums, rows, warp_n);
    }
    window() ? put_columns<true>(sums, rows, warp_n) : put_columns<false>(sums, rows, warp_n);
  }
  // Where a lane's four units in all phases, one in each group of 16 rows, are one run of y: two results at a time.
  __device__ __forceinline__ void put_runs(const Sums& sums, const PhaseRow* rows, std::int32_t warp_n) const {
    const std::int32_t* const columns = tables().columns + warp_n * 8 + std::int32_t(threadIdx.x) % 4 * 2;
    const std::int32_t column[2] = {columns[0], columns[1]}, line[2] = {rows[0].to, rows[8].to};
    unsigned char* const bytes = reinterpret_cast<unsigned char*>(staged());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (line[i / 2] < 0 || column[i % 2] < 0) continue;
      Value* const to = reinterpret_cast<Value*>(bytes + (line[i / 2] + column[i % 2]));
      const auto result = [&](int at) { return sums[at % Tile::kM16][at / Tile::kM16][i]; };
#pragma unroll
      for (int at = 0; at < Tile::kM16 * kWindowUnits; at += 2) store_neighbours(to + at, result(at), result(at + 1));
    }
  }
  template <bool kInWindow>
  __device__ __forceinline__ void put_columns(const Sums& sums, const PhaseRow* rows, std::int32_t warp_n) const {
    const std::int32_t* const columns =
        tables().columns + warp_n * (kInWindow ? 8 : 8 * Tile::kN8) + std::int32_t(threadIdx.x) % 4 * 2;
    const std::int32_t unit_bytes = job.axis[2].stride * staged_pixel() * kSize;
    std::int32_t to[Tile::kN8][2];
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) to[j][e] = kInWindow ? columns[e] + j * unit_bytes : columns[j * 8 + e];
    }
    const bool exists[2] = {columns[0] >= 0, columns[1] >= 0};
    std::int32_t row_to[2 * Tile::kM16];  // all at once: behind a store each would be waited for
#pragma unroll
    for (int i = 0; i < 2 * Tile::kM16; ++i) row_to[i] = rows[i * 8].to;
    unsigned char* const bytes = reinterpret_cast<unsigned char*>(staged());
#pragma unroll
    for (int i = 0; i < 2 * Tile::kM16; ++i) {
      if (row_to[i] < 0) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int j = 0; j < Tile::kN8; ++j) {
          const Value v = Narrow<Value>::from(sums[i / 2][j][i % 2 * 2 + e]);
          if (kInWindow ? exists[e] : to[j][e] >= 0) *reinterpret_cast<Value*>(bytes + row_to[i] + to[j][e]) = v;
        }
      }
    }
  }

  // Where a line of units of a box begins in y beside its channel and phases, and its outputs of the axes of depth and height.
  struct BoxLine {
    std::int64_t y;
    std::int32_t d, h;
  };
  __device__ __forceinline__ BoxLine box_line(const Box& box, std::uint32_t number) const {
    const std::int32_t h = (std::int32_t(take(job.box_h, number)) + box.unit[1]) * job.axis[1].stride;
    const std::int32_t d = (std::int32_t(take(job.box_d, number)) + box.unit[0]) * job.axis[0].stride;
    const std::int32_t n = box.n + std::int32_t(number);
    const std::int64_t w = std::int64_t(box.unit[2] * job.axis[2].stride - job.axis[2].pad) * job.y_axis[2];
    return {n * job.y_n + d * job.y_axis[0] + h * job.y_axis[1] + w, d, n < job.batch ? h : kNoLine};
  }

  // What depends on the box: its runs, and where its units are staged. What a line and a row of units lie behind multiples of 16
  // bytes in y, a result lies behind its place of the staged.
  __device__ __forceinline__ void make_runs(std::uint32_t number_of_box, const Value* y) const {
    PhaseTables<Tile>& own = tables();
    const std::uint64_t first = reinterpret_cast<std::uintptr_t>(y);
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.run_count; i += Tile::kThreads) {
      std::uint32_t number = std::uint32_t(i);
      const std::int32_t in_line = std::int32_t(take(job.box_lines, number));
      const BoxLine in_box = box_line(box_at(number_of_box), std::uint32_t(in_line));
      const PhaseLine line = own.lines[std::int32_t(number) * pixel()];
      const bool inside = std::uint32_t(line.d + in_box.d) < std::uint32_t(job.axis[0].out) &&
                          std::uint32_t(line.h + in_box.h) < std::uint32_t(job.axis[1].out);
      const std::int32_t skews = skew_of(line.y) + skew_of(in_box.y + std::int64_t(first / kSize));
      const std::int32_t skew = std::int32_t(std::uint32_t(line.y + in_box.y + std::int64_t(first / kSize)) & job.run_skews);
      const std::int32_t to = std::int32_t(number) * job.staged_line + in_line * job.staged_pitch + skews - skew;
      const bool is_staged = std::int32_t(number) < run_lines();
      const std::uint32_t constant = pixels() ? offset_of(pattern() + line.channel) : word_of(line.bias);
      const std::int32_t behind = are_apart() ? min(pixel(), job.oc - line.channel) * kSize : skew * kSize;
      runs()[i] =
          PhaseRun{first + std::uint64_t((line.y + in_box.y - skew) * kSize), is_staged ? offset_of(staged() + to) : constant,
                   inside        ? behind
                   : are_apart() ? 0
                                 : kNoRun};
    }
    const std::int32_t each = window() ? kWindowUnits : 1;
    // By the last threads first: the first ones had runs.
    for (std::int32_t i = Tile::kThreads - 1 - std::int32_t(threadIdx.x); i < Tile::kUnits / each; i += Tile::kThreads) {
      std::uint32_t rest = std::uint32_t(i * each);
      const std::int32_t unit = std::int32_t(take(job.grid_w, rest));
      const bool exists = rest < job.box_lines.value;
      const std::int32_t to = std::int32_t(rest) * job.staged_pitch + unit * job.axis[2].stride * staged_pixel();
      own.columns[i] =
          exists ? (to + skew_of(box_line(box_at(number_of_box), rest).y + std::int64_t(first / kSize))) * kSize : kNowhere;
    }
  }
  __device__ __forceinline__ std::int32_t skew_of(std::int64_t y) const { return std::int32_t(std::uint32_t(y) & skews()); }
  __device__ __forceinline__ std::uint32_t offset_of(const Value* at) const {
    return std::uint32_t(reinterpret_cast<const unsigned char*>(at) - memory);
  }
  // A constant result, as often as a word holds it.
  static __device__ __forceinline__ std::uint32_t word_of(float result) {
    const Value constant = Narrow<Value>::from(result);
    if constexpr (kSize == 4) return *reinterpret_cast<const std::uint32_t*>(&constant);
    return *reinterpret_cast<const std::uint16_t*>(&constant) * 0x10001u;
  }

  // Positions of phases without a tap hold the bias: everything does, before the results come.
  __device__ __forceinline__ void fill_staged(std::uint32_t number_of_box, const Value* y) const {
    if (pixels()) return fill_pixels(box_at(number_of_box), y);
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.lines * job.staged_line; i += Tile::kThreads)
      staged()[i] = Narrow<Value>::from(tables().lines[i / job.staged_line].bias);
  }
  __device__ __forceinline__ void fill_pixels(const Box& box, const Value* y) const {
    const std::int32_t outputs = job.axis[2].box * job.axis[2].stride, box_lines = std::int32_t(job.box_lines.value);
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.lines * box_lines * outputs; i += Tile::kThreads) {
      const std::int32_t in_pixel = i % pixel(), in_run = i / pixel() % outputs, run = i / pixel() / outputs;
      const std::int32_t number = run / box_lines, in_line = run % box_lines;
      const PhaseLine line = tables().lines[number * pixel()];
      if (line.channel + in_pixel >= job.oc) continue;
      const std::int64_t first =
          box_line(box, std::uint32_t(in_line)).y + std::int64_t(reinterpret_cast<std::uintptr_t>(y) / kSize);
      const std::int32_t at = number * job.staged_line + in_line * job.staged_pitch + skew_of(line.y) + skew_of(first);
      staged()[at + in_run * staged_pixel() + in_pixel] = pattern()[line.channel + in_pixel];
    }
  }

  // Elements of a run that exist, or outputs where those lie apart, counted from its unit's first.
  struct Reach {
    std::int32_t low, high;
  };
  __device__ __forceinline__ Reach reach_of(std::uint32_t number_of_box) const {
    const PhaseAxis& w = job.axis[2];
    const std::int32_t unit = std::int32_t(take(w.tiles, number_of_box)) * w.box + w.first_unit;
    const std::int32_t first = unit * w.stride - w.pad, length = w.box * w.stride, each = job.joined ? pixel() : 1;
    return {(first < 0 ? -first : 0) * each, (w.out - first < length ? w.out - first : length) * each};
  }

  // Threads take the vectors of all runs with results, or of those that are the bias, and store those that are whole: each keeps
  // to one vector of some runs, so that little is counted from one to the next; where runs are longer than a block, to some.
  template <bool kStaged>
  __device__ __forceinline__ void store_vectors(const Reach& reach) const {
    constexpr int kTogether = 4;
    const std::int32_t staged_runs = run_lines() * std::int32_t(job.box_lines.value), step = job.run_rows;
    const PhaseRun* const own = kStaged ? runs() : runs() + staged_runs;
    const std::int32_t last = (kStaged ? staged_runs : job.run_count - staged_runs) - 1;
    std::uint32_t first = threadIdx.x;
    std::int32_t vector = std::int32_t(threadIdx.x);
    if (job.run_vectors.value <= Tile::kThreads)
      vector = std::int32_t(take(job.run_vectors, first));
    else
      first = 0;
    // Bytes at which a whole vector may begin, behind the first of the box.
    const std::int32_t low = reach.low * kSize, begins = (reach.high - reach.low - kVector) * kSize;
    if (begins < 0 || std::int32_t(first) >= step) return;
#pragma unroll 1
    for (; vector < std::int32_t(job.run_vectors.value); vector += Tile::kThreads) {
      const std::int32_t bytes = 16 * vector;
#pragma unroll 1
      for (std::int32_t number = std::int32_t(first); number <= last; number += kTogether * step) {
        std::uint64_t to[kTogether];
        uint4 values[kTogether];
        bool whole[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const std::int32_t at = number + u * step;
          const PhaseRun run = own[min(at, last)];
          whole[u] = at <= last && std::uint32_t(bytes - run.skew - low) <= std::uint32_t(begins);
          to[u] = run.y + std::uint32_t(bytes);
          if constexpr (!kStaged) values[u] = constants(run, bytes, whole[u]);
          if (kStaged && whole[u]) values[u] = *reinterpret_cast<const uint4*>(memory + (run.staged + std::uint32_t(bytes)));
        }
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          if (whole[u]) store_global(reinterpret_cast<void*>(to[u]), values[u]);
        }
      }
    }
  }
  // The constant results of a vector `bytes` behind that of a run's first.
  __device__ __forceinline__ uint4 constants(const PhaseRun& run, std::int32_t bytes, bool exists) const {
    if (!pixels() || !exists) return make_uint4(run.staged, run.staged, run.staged, run.staged);
    const std::uint16_t* const halves = reinterpret_cast<const std::uint16_t*>(pattern());
    const std::int32_t first = (bytes - run.skew) / kSize;
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kSize == 4) words[i] = reinterpret_cast<const std::uint32_t*>(halves)[(first + i) % pixel()];
      if constexpr (kSize == 2)
        words[i] = halves[(first + 2 * i) % pixel()] | std::uint32_t(halves[(first + 2 * i + 1) % pixel()]) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  // And outputs of the vectors at each end of a run, of which only some are the box's: before the first multiple of a vector, and
  // from the last one on; kEach at a time.
  template <int kEach>
  __device__ __forceinline__ void store_ends(const Reach& reach) const {
    constexpr std::int32_t kShares = kVector / kEach;
    const std::int32_t staged_runs = run_lines() * std::int32_t(job.box_lines.value);
    for (std::int32_t i = std::int32_t(threadIdx.x); i < job.run_count * kShares; i += Tile::kThreads) {
      const PhaseRun run = runs()[i / kShares];
      if (run.skew == kNoRun) continue;
      const std::int32_t skew = run.skew / kSize, low = skew + reach.low, high = skew + reach.high;
      const std::int32_t whole = (low + kVector - 1) & -kVector, left = whole - kVector + i % kShares * kEach;
      const std::int32_t right = max(high & -kVector, whole) + i % kShares * kEach;
      const bool staged = i < staged_runs * kShares;
      if (left >= low && left < high) put_end<kEach>(run, staged, left);
      if (right < high) put_end<kEach>(run, staged, right);
    }
  }
  template <typename Two>
  static __device__ __forceinline__ void put_two(Value* to, const unsigned char* from, bool is_staged, Two two) {
    if (is_staged) two = *reinterpret_cast<const Two*>(from);
    *reinterpret_cast<Two*>(to) = two;
  }
  // Elements of a run from `at` on: one, or two, which are neighbours and no channels.
  template <int kEach>
  __device__ __forceinline__ void put_end(const PhaseRun& run, bool is_staged, std::int32_t at) const {
    Value* const to = reinterpret_cast<Value*>(run.y) + at;
    const unsigned char* const from = memory + (run.staged + std::uint32_t(at * kSize));
    if constexpr (kEach == 2 && kSize == 2) {
      put_two(to, from, is_staged, run.staged);
    } else if constexpr (kEach == 2) {
      put_two(to, from, is_staged, make_uint2(run.staged, run.staged));
    } else {
      Value result = *reinterpret_cast<const Value*>(&run.staged);
      if (is_staged) result = *reinterpret_cast<const Value*>(from);
      if (!is_staged && pixels()) result = pattern()[(at - run.skew / kSize) % pixel()];
      *to = result;
    }
  }
  __device__ __forceinline__ void store(std::uint32_t number_of_box) const {
    const Reach reach = reach_of(number_of_box);
    if (are_apart()) return store_apart(reach);
    store_vectors<true>(reach);
    if (job.empty_lines > 0) store_vectors<false>(reach);
    if constexpr (!Tile::kLast) {
      if (job.pairs) return store_ends<2>(reach);
    }
    store_ends<1>(reach);
  }

  // The same where outputs lie apart: threads take pieces of their channels, some at a time.
  __device__ __forceinline__ void store_apart(const Reach& reach) const {
    if (job.piece == 16) return store_pieces<uint4>(reach);
    if (job.piece == 8) return store_pieces<uint2>(reach);
    if (kSize == 4 || job.piece == 4) return store_pieces<std::uint32_t>(reach);
    if constexpr (kSize == 2) store_pieces<std::uint16_t>(reach);
  }
  template <typename Piece>
  __device__ __forceinline__ void store_pieces(const Reach& reach) const {
    constexpr int kTogether = 4;
    const std::int32_t count = job.run_count * std::int32_t(job.run_vectors.value);
    const std::int32_t staged_runs = run_lines() * std::int32_t(job.box_lines.value);
    const std::int32_t pixel_bytes = staged_pixel() * kSize;
    const std::int64_t step = job.y_axis[2] * kSize;
    for (std::int32_t first = std::int32_t(threadIdx.x); first < count; first += kTogether * Tile::kThreads) {
      std::uint64_t to[kTogether];
      Piece pieces[kTogether];
      bool exists[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        std::uint32_t number = std::uint32_t(min(first + u * Tile::kThreads, count - 1));
        const std::int32_t in_pixel = std::int32_t(take(job.pixel_pieces, number) * sizeof(Piece));
        const std::int32_t output = std::int32_t(take(job.run_outputs, number));
        const PhaseRun run = runs()[number];
        const std::int32_t at = in_pixel + (std::int32_t(number) < staged_runs ? output * pixel_bytes : 0);
        exists[u] = first + u * Tile::kThreads < count && in_pixel < run.skew && output >= reach.low && output < reach.high;
        to[u] = run.y + std::uint64_t(output * step + in_pixel);
        if (exists[u]) pieces[u] = *reinterpret_cast<const Piece*>(memory + (run.staged + std::uint32_t(at)));
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (exists[u]) *reinterpret_cast<Piece*>(to[u]) = pieces[u];
      }
    }
  }
};

}  // namespace upfold::cuda
