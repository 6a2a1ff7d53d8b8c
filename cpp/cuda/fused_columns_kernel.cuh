// The kernel of the fused method whose columns stay in shared memory.
#pragma once

#include "fused_columns_multiply.cuh"
#include "fused_columns_sum.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
template <typename Tile>
struct ColumnsBlock {
  using Value = typename Tile::Value;
  using Products = ColumnsProducts<Tile>;

  const ColumnsJob& job;
  ColumnsBarriers& barriers;
  unsigned char* memory;
  std::int32_t group, channel, channels;  // the first of the tile in the group, and how many it has
  std::uint32_t first_walk, next_walk;
  SharedAddress of_barriers, of_memory;

  __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) const { return of_barriers.of(&barrier); }
  __device__ __forceinline__ std::uint32_t stage(std::uint32_t number) const {
    return of_memory.first + number * Tile::kStageBytes;
  }
  __device__ __forceinline__ uint4* weights() const { return reinterpret_cast<uint4*>(memory + job.stages * Tile::kStageBytes); }
  __device__ __forceinline__ float* columns() const {
    return reinterpret_cast<float*>(memory + job.stages * Tile::kStageBytes + job.weight_bytes);
  }
  __device__ __forceinline__ ColumnsWalk walk(std::uint32_t number) const {
    const std::int32_t part_w = std::int32_t(take(job.w.parts, number)), part_h = std::int32_t(take(job.h.parts, number));
    return columns_walk(job, std::int32_t(number), part_h, part_w);
  }
  static __device__ __forceinline__ std::int32_t steps(const ColumnsWalk& walk) {
    return walk.lines == 0 ? 1 : (walk.lines + Tile::kLines - 1) / Tile::kLines;
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.full[i]), 1);
      for (int i = 0; i < job.stages; ++i) barrier_make(address(barriers.empty[i]), Tile::kWorkers / 32);
      for (int i = 0; i < 2; ++i) barrier_make(address(barriers.written[i]), Tile::kWorkers / 32);
      for (int i = 0; i < 2; ++i) barrier_make(address(barriers.summed[i]), Tile::kWorkers / 32);
      barrier_make(address(barriers.weight), 1);
      barriers_made();
    }
    __syncthreads();  // barriers are made
  }

  __device__ __forceinline__ const Value* raw_weight(const Value* w) const { return w + std::int64_t(group) * job.ic * job.w_ic; }
  // One thread, before the kernels ahead have ended.
  __device__ __forceinline__ void ask(const Value* w) const {
    if (job.raw_bytes > 0) ask_for_bulk(raw_weight(w), std::uint32_t(job.raw_bytes));
  }
  // One thread: the lines of all steps in order, for each chunk of channels.
  __device__ __forceinline__ void copy(const BoxMap& x, const Value* w) const {
    if (job.raw_bytes > 0) {
      barrier_arrive_expecting(address(barriers.weight), std::uint32_t(job.raw_bytes));
      copy_bulk(shared_address(columns()), raw_weight(w), std::uint32_t(job.raw_bytes), address(barriers.weight));
    }
    Ring ring(job.stages);
    for (std::uint32_t number = first_walk; number < job.walks; number += next_walk) {
      const ColumnsWalk own = walk(number);
      for (std::int32_t first = 0; first < steps(own) * Tile::kLines; first += Tile::kLines) {
        const std::int32_t lines = own.lines - first < Tile::kLines ? own.lines - first : Tile::kLines;
        for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk, ring.next()) {
          const std::uint32_t full = address(barriers.full[ring.at]);
          barrier_wait(address(barriers.empty[ring.at]), ring.parity ^ 1);
          barrier_arrive_expecting(full, std::uint32_t(lines * Tile::kLineBytes));
          for (std::int32_t i = 0; i < lines; ++i)
            copy_line(x, own, first + i, group * job.ic + chunk * Tile::kChunk, stage(ring.at) + i * Tile::kLineBytes, full);
        }
      }
    }
  }
  __device__ __forceinline__ void copy_line(const BoxMap& x, const ColumnsWalk& own, std::int32_t line, std::int32_t from,
                                            std::uint32_t to, std::uint32_t full) const {
    std::int32_t iw = 0, ih = 0;
    if (job.row_lines == 0) {
      iw = (own.first_ih + line * job.line_rows) * job.w.in;
    } else {
      std::uint32_t row = std::uint32_t(line);
      iw = own.first_iw + std::int32_t(take(job.lines_of_row, row)) * Tile::kLine, ih = own.first_ih + std::int32_t(row);
    }
    if constexpr (Tile::kLast) {
      copy_box(to, x, {from, iw, ih, own.n, 0}, full);
    } else {
      copy_box(to, x, {iw, from, ih, own.n, 0}, full);
    }
  }

  // Which channel of x element `element` of a vector of the weight belongs to: in the order in which products get x.
  static __device__ __forceinline__ std::int32_t channel_of(std::int32_t vector, std::int32_t element) {
    constexpr std::int32_t kVector = 16 / Tile::kSize;
    return Products::kRegisters ? vector / 2 * 8 + 2 * element + vector % 2 : vector * kVector + element;
  }
  static __device__ __forceinline__ float rounded(float v) { return __uint_as_float(to_tf32(v)); }
  static __device__ __forceinline__ __half rounded(__half v) { return v; }
  static __device__ __forceinline__ __nv_bfloat16 rounded(__nv_bfloat16 v) { return v; }

  // The weights of x's channels from `from` on, `step` elements apart, in their places.
  template <typename Address>
  __device__ __forceinline__ void put(std::int32_t place, bool exists, Address from, std::int64_t step) const {
    constexpr int kVector = 16 / Tile::kSize;
    struct alignas(16) {
      Value v[kVector];
    } values;
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const std::int32_t ic = channel_of(place / Tile::kN, e);
      values.v[e] = from[(exists && ic < job.ic ? ic : 0) * step];  // begun before any is asked for
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const bool is_there = exists && channel_of(place / Tile::kN, e) < job.ic;
      values.v[e] = is_there ? rounded(values.v[e]) : Narrow<Value>::from(0.0f);
    }
    weights()[place] = *reinterpret_cast<const uint4*>(&values);
  }

  // All but the copying warp: neighbouring threads have neighbouring columns, which lie together in w, and in what is copied of
  // it first.
  __device__ __forceinline__ void lay_out(const Value* w) const {
    const std::int32_t count = job.chunks * 8 * Tile::kN, taps = job.h.kernel * job.w.kernel;
    if (job.raw_bytes > 0) {
      barrier_wait(address(barriers.weight), 0);
      const Value* const own = reinterpret_cast<const Value*>(columns()) + channel * taps;
#pragma unroll 2
      for (std::int32_t i = std::int32_t(threadIdx.x); i < count; i += 2 * Tile::kWorkers) {
        const std::int32_t column = i % Tile::kN;
        const bool exists = column < channels * taps;
        put(i, exists, own + (exists ? column : 0), job.oc * taps);
      }
    } else {
      const Value* const own = w + std::int64_t(group) * job.ic * job.w_ic + channel * job.w_oc;
#pragma unroll 2
      for (std::int32_t i = std::int32_t(threadIdx.x); i < count; i += 2 * Tile::kWorkers) {
        std::uint32_t rest = std::uint32_t(i % Tile::kN);
        const std::uint32_t kw = take(job.w.kernels, rest), kh = take(job.h.kernels, rest);
        const bool exists = std::int32_t(rest) < channels;
        put(i, exists, exists ? own + std::int32_t(rest) * job.w_oc + kh * job.w_h + kw * job.w_w : own, job.w_ic);
      }
    }
    publish_to_products();
    meet<1, 2 * Tile::kWorkers>();  // the weights are there, and nobody reads what was copied of w
  }

  __device__ __forceinline__ void sum(const ColumnsWalk& own, std::int32_t begin, std::int32_t end, const Value* bias,
                                      Value* y) const {
    const std::int64_t first = std::int64_t(group) * job.oc + channel;
    const ColumnsOutputs<Tile> outputs{
        job, own, columns(), bias == nullptr ? nullptr : bias + first, y + own.n * job.y_n + first * job.y_c, channels};
    if (!job.four) return outputs.run(begin, end);
    if (job.w.pad % 2 != 0) return sum_pairs<true>(outputs, begin, end);
    sum_pairs<false>(outputs, begin, end);
  }
  template <bool kOdd>
  static __device__ __forceinline__ void sum_pairs(const ColumnsOutputs<Tile>& outputs, std::int32_t begin, std::int32_t end) {
    const ColumnsJob& job = outputs.job;
    if (job.pixels && job.paired) return ColumnsPairs<Tile, kOdd, true>{outputs, job}.run(begin, end);
    ColumnsPairs<Tile, kOdd, false>{outputs, job}.run(begin, end);
  }

  __device__ __forceinline__ void arrive_warp(const std::uint64_t& barrier) const {
    __syncwarp();  // what all lanes did is done
    if (threadIdx.x % 32 == 0) barrier_arrive(address(barrier));
  }

  // Workers: the columns of all steps in order. The ring has room for two steps beside what outputs still want.
  __device__ __forceinline__ void multiply() const {
    Ring ring(job.stages), turn(2);
    for (std::uint32_t number = first_walk; number < job.walks; number += next_walk) {
      const ColumnsWalk own = walk(number);
      for (std::int32_t first = 0; first < steps(own) * Tile::kLines; first += Tile::kLines, turn.next()) {
        typename Products::Sums sums = {};
        for (std::int32_t chunk = 0; chunk < job.chunks; ++chunk, ring.next()) {
          barrier_wait(address(barriers.full[ring.at]), ring.parity);
          Products::add(sums, stage(ring.at), shared_address(weights()) + chunk * Tile::kWeightBytes);
          if (threadIdx.x % 32 == 0) barrier_arrive(address(barriers.empty[ring.at]));
        }
#pragma unroll
        for (int i = 0; i < 8 * Tile::kN8; ++i) pin(sums[i / 4 / Tile::kN8][i / 4 % Tile::kN8][i % 4]);
        barrier_wait(address(barriers.summed[turn.at]), turn.parity ^ 1);
        // A walk begins the ring anew: the last step of the walk before must be summed too.
        if (first == 0 && number != first_walk) barrier_wait(address(barriers.summed[turn.at ^ 1]), turn.parity ^ turn.at ^ 1);
        Products::write(job, own, first, columns(), sums);
        arrive_warp(barriers.written[turn.at]);
      }
    }
  }

  // The other workers: the outputs of all steps in order.
  __device__ __forceinline__ void sum_steps(const Value* bias, Value* y) const {
    Ring turn(2);
    for (std::uint32_t number = first_walk; number < job.walks; number += next_walk) {
      const ColumnsWalk own = walk(number);
      std::int32_t begin = own.first_oh;
      for (std::int32_t first = 0; first < steps(own) * Tile::kLines; first += Tile::kLines, turn.next()) {
        const std::int32_t end = outputs_of_rows(job, own, rows_of_lines(job, own, first + Tile::kLines));
        barrier_wait(address(barriers.written[turn.at]), turn.parity);
        if (end > begin) sum(own, begin, end, bias, y), begin = end;
        arrive_warp(barriers.summed[turn.at]);
      }
    }
  }
};
#endif

// Elsewhere an empty kernel, which has no shared memory of its own: by that the host knows.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_columns_kernel(const __grid_constant__ ColumnsJob job, const __grid_constant__ BoxMap x,
                         const typename Tile::Value* __restrict__ w, const typename Tile::Value* __restrict__ bias,
                         typename Tile::Value* __restrict__ y) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ ColumnsBarriers barriers;
  if (threadIdx.x == 2 * Tile::kWorkers) expect_boxes(x);
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kColumnAlignment;
  std::uint32_t walk = blockIdx.x, group = take(job.combinations, walk);
  const std::int32_t channel = std::int32_t(take(job.channel_tiles, group)) * job.channels;
  const std::int32_t channels = job.oc - channel < job.channels ? job.oc - channel : job.channels;
  const ColumnsBlock<Tile> block{job,
                                 barriers,
                                 first,
                                 std::int32_t(group),
                                 channel,
                                 channels,
                                 walk,
                                 gridDim.x / job.combinations.value,
                                 SharedAddress(&barriers),
                                 SharedAddress(first)};
  block.make_barriers();
  if (threadIdx.x == 2 * Tile::kWorkers) block.ask(w);
  take_turn();
  if (threadIdx.x >= 2 * Tile::kWorkers) {
    if (threadIdx.x == 2 * Tile::kWorkers) block.copy(x, w);
    return;
  }
  block.lay_out(w);
  if (threadIdx.x < Tile::kWorkers) return block.multiply();
  block.sum_steps(bias, y);
#endif
}

}  // namespace upfold::cuda
