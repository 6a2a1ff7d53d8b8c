// The fused gradient of the weight where the copy engine brings the operands, box by box (compute capability 9.0). Its products
// are those of fused_weight_kernel.cuh. A step is some pieces, each a run of neighbouring pixels of one row of x, all of the same
// width: x of a piece is some boxes, [pixels][channel][pixel], swizzled where the last are more than a vector; y of a piece and a
// plane is one, [output channel][column], from the first pixel's first column on. Boxes end in zeros outside x and y, and float32
// is rounded to TF32 on the way, so that the warps that multiply have nothing else to do. One warp begins all copies.
//
// Boxes begin at multiples of 16 bytes, and rows of y need not. Where those that a row of x meets are whole vectors together they
// are *joined*: one row to the copy engine, in which a box begins up to a vector early. Where rows of x are a vector or two, maps
// are *merged*: one row of y, and one of x with zeros behind each of its rows, so that a piece is some rows and all taps of the
// height read one box. Either way pixels that there are none of meet columns of the next row, which are cut (kCuts).
//
// Where kernel and stride are equal a block's rows are every element of y once, and their products with ones the sums of its
// channels: the gradient of the bias (kSums, of 16-bit values, whose products with ones are exact).
#pragma once

#include "fused_weight_boxes_copy.cuh"
#include "lanes.cuh"

namespace upfold::cuda {

constexpr int kOnesColumns8 = 2;  // of a product with ones, all columns of which are the same
// Two vectors of ones of 16-bit values in as many columns, as a product reads them.
struct FusedWeightOnes {
  alignas(128) std::uint32_t words[2 * kOnesColumns8 * 8 * 4];
};

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile, int kReads, bool kSums>
struct FusedWeightBoxBlock : FusedWeightBoxCopies<Value, Tile> {
  using Base = FusedWeightBoxCopies<Value, Tile>;
  using Base::job, Base::boxes, Base::place, Base::memory, Base::barriers, Base::kSize, Base::kVector;
  using Sums = FusedWeightSums<Tile>;
  using RowSums = float[Tile::kTaps * kOnesColumns8][4];
  using Rows = FusedWeightRows<Tile>;
  FusedWeightOnes* ones;  // where kSums

  static constexpr std::int32_t kLanePixels = kSize == 2 ? 2 : 1;
  // The output channel of a lane's first row: where pairs of words are read, half a warp at a time, the rows of a half are two
  // apart, so that they lie in different banks at a distance of four words modulo 32.
  static __device__ __forceinline__ std::int32_t own_row() {
    const std::int32_t row = std::int32_t(threadIdx.x % 32 / 4);
    return kReads == kPairs ? row % 4 * 2 + row / 4 : row;
  }
  // Which of two units that read fours this is.
  static __device__ __forceinline__ std::int32_t half_of(std::int32_t unit) { return kReads == kFours ? unit % 2 : 0; }
  // Rows of sums from a unit's first to a lane's first, and from those to the ones below.
  static constexpr std::int32_t kUnitRows = Tile::kTaps * kPlaneChannels, kBelow = kReads == kFours ? kUnitRows : 8;
  __device__ __forceinline__ std::int32_t sums_row() const {
    return own_row() + half_of(place.first_unit + std::int32_t(threadIdx.x / 32)) * (8 - kUnitRows);
  }
  // Bytes from a stage to the lane's first column: its unit, its row, its pixel.
  __device__ __forceinline__ std::int32_t own_column() const {
    const std::int32_t lane = std::int32_t(threadIdx.x % 32), unit = place.first_unit + std::int32_t(threadIdx.x / 32);
    std::uint32_t plane = std::uint32_t(unit);
    std::uint32_t row_of_taps = take(job.tap_units, plane);
    const std::int32_t half = half_of(unit);
    std::int32_t tap = (std::int32_t(take(boxes.row_units, row_of_taps)) - half) * Tile::kTaps * job.dilation[2];
    tap += std::int32_t(row_of_taps) * boxes.tap_row;
    std::int32_t in_block = std::int32_t(plane) - place.first_plane;
    if (unit >= job.units) in_block = 0, tap = 0;  // nothing is kept of it
    std::uint32_t kd = take(job.row_taps, plane);
    const std::int32_t shift = this->shift_of(std::int32_t(take(job.kernel_h, kd)));
    return job.y_at + (in_block * std::int32_t(job.rows.value) * kPlaneChannels + own_row() + 8 * half) * job.pitch +
           (shift + lane % 4 * job.stride[2] * kLanePixels + tap) * kSize;
  }

  __device__ __forceinline__ void make_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBoxMostStages; ++i) {
        barrier_make(shared_address(&barriers.full[i]), 1);
        barrier_make(shared_address(&barriers.empty[i]), Tile::kWarps * (Tile::kShares ? 2 : 1));
      }
      barriers_made();
    }
    if constexpr (kSums) {
      constexpr std::uint32_t kWords = sizeof(FusedWeightOnes) / 4;
      for (std::uint32_t i = threadIdx.x; i < kWords; i += Tile::kThreads) ones->words[i] = PairOfOnes<Value>::kBits;
      publish_to_products();
    }
    __syncthreads();                              // the barriers are there, and ones
    if constexpr (Tile::kShares) meet_cluster();  // those of the other block too
  }

  // The products of all taps, and those of their rows with ones.
  template <int kTap = 0>
  static __device__ __forceinline__ void add_ones(RowSums& row_sums, const Rows& rows, std::uint64_t ones) {
    WarpgroupRows<Value, kOnesColumns8, kTap * kOnesColumns8>::add(row_sums, rows[kTap], ones);
    if constexpr (kTap + 1 < Tile::kTaps) add_ones<kTap + 1>(row_sums, rows, ones);
  }
  static __device__ __forceinline__ void multiply(Sums& sums, RowSums& row_sums, const Rows& rows, std::uint64_t x,
                                                  std::uint64_t ones) {
    warpgroup_begin();
    add_taps<Value, Tile>(sums, rows, x);
    if constexpr (kSums) add_ones(row_sums, rows, ones);
    warpgroup_commit();
  }

  __device__ __forceinline__ void read(Rows& rows, std::int32_t at) const {
    const unsigned char *const first = memory + at, *const second = first + boxes.second;
    if constexpr (kReads == kFours) {
      read_fours<Tile, 0>(job, first, rows);
      read_fours<Tile, 2>(job, second, rows);
    } else {
      const std::int32_t below = 8 * job.pitch;
      read_word<Value, Tile, kReads, 0>(job, first, rows);
      read_word<Value, Tile, kReads, 1>(job, first + below, rows);
      read_word<Value, Tile, kReads, 2>(job, second, rows);
      read_word<Value, Tile, kReads, 3>(job, second + below, rows);
    }
  }

  // Leaves of a product's rows what pixels of x there are for; `pixel` is its first one, in its row.
  __device__ __forceinline__ void cut_rows(Rows& rows, std::int32_t pixel) const {
    const std::int32_t left = job.in_w - pixel - std::int32_t(threadIdx.x % 4) * kLanePixels;
#pragma unroll
    for (int i = 0; i < 4 * Tile::kTaps; ++i) {
      const std::int32_t live = i % 4 < 2 ? left : left - boxes.second_pixel;
      rows[i / 4][i % 4] &= live >= kLanePixels ? ~0u : live > 0 ? 0xffffu : 0u;
    }
  }
  __device__ __forceinline__ std::int32_t next_pixel(std::int32_t pixel) const {
    return pixel + 2 * kVector == boxes.row_pixels ? 0 : pixel + 2 * kVector;
  }

  // Where the rows of a product and their pixels of x lie, and which product of which step it is.
  struct Cursor {
    std::int32_t y;   // bytes from the first stage
    std::uint32_t x;  // the low half of the descriptor
    std::int32_t in_step, in_piece, in_box;
    std::uint32_t step;
    FusedWeightRing ring;
    std::uint32_t read;  // the barrier of the stage that is read but for products that run, else 0
  };
  // The first product of the step in the cursor's stage, whose copies it waits for.
  __device__ __forceinline__ void begin_step(const SharedAddress& of_barriers, std::int32_t own, std::uint32_t first,
                                             Cursor& at) const {
    barrier_wait(of_barriers.of(&barriers.full[at.ring.at]), std::uint32_t(at.ring.parity));
    const std::int32_t stage = at.ring.at * job.stage_bytes;
    at.y = own + stage, at.x = first + std::uint32_t(stage) / 16;
    at.in_step = at.in_piece = at.in_box = 0;
  }
  // To the next product; behind the last one of all it stays.
  __device__ __forceinline__ void advance(const SharedAddress& of_barriers, std::int32_t own, std::uint32_t first,
                                          Cursor& at) const {
    if (++at.in_step == job.products) {
      at.read = of_barriers.of(&barriers.empty[at.ring.at]);
      if (++at.step == place.end) return;
      at.ring.next(job.stages);
      return begin_step(of_barriers, own, first, at);
    }
    const bool piece_ends = ++at.in_piece == boxes.piece_products, box_ends = ++at.in_box == boxes.box_products;
    at.in_piece = piece_ends ? 0 : at.in_piece, at.in_box = box_ends ? 0 : at.in_box;
    at.x += std::uint32_t(box_ends ? boxes.x_turn : boxes.x_next);
    at.y += piece_ends ? boxes.y_turn : boxes.y_next;
  }

  // A stage is read: here, and for the block that has it filled too.
  static __device__ __forceinline__ void release(std::uint32_t empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    if constexpr (Tile::kShares) {
      if (threadIdx.x % 32 == 1) barrier_arrive_at(empty, blockIdx.x % 2 ^ 1);
    }
  }

  // A product begins before the one ahead of it has ended, which then gives back the rows that the next one gets. All of them are
  // set before the first one begins: the compiler would let one end ahead of what is written beside it.
  __device__ __forceinline__ void accumulate(Sums& sums, RowSums& row_sums) const {
    pin_all(sums, row_sums);
    if (place.begin >= place.end) return;  // of a part without steps, which may begin behind the last one of all
    const std::int32_t own = own_column();
    std::uint64_t of_ones = 0;
    if constexpr (kSums) of_ones = matrix_descriptor(in_descriptor(shared_address(ones)), kOnesColumns8 * 8, 8);
    const std::uint32_t first = std::uint32_t(boxes.x_layout) + in_descriptor(shared_address(memory)),
                        layout = boxes.x_layout >> 32;
    const SharedAddress of_barriers(&barriers);
    // Where rows are cut, of the product whose rows are there.
    std::int32_t pixel = 0;
    if constexpr (Tile::kCuts) {
      std::uint32_t piece = place.begin * job.rows.value;
      pixel = std::int32_t(take(job.chunks, piece)) * boxes.width % boxes.row_pixels;
    }
    Cursor at{0, 0, 0, 0, 0, place.begin, {0, 0}, 0};
    begin_step(of_barriers, own, first, at);
    Rows rows[2];
    read(rows[0], at.y);
    if constexpr (Tile::kCuts) cut_rows(rows[0], pixel);
#pragma unroll
    for (int i = 0; i < 4 * Tile::kTaps; ++i) rows[1][i / 4][i % 4] = rows[0][i / 4][i % 4];
    const auto turn = [&](const Rows& now, Rows& next) {
      const std::uint32_t read_before = at.read;
      multiply(sums, row_sums, now, std::uint64_t(layout) << 32 | at.x, of_ones);
      warpgroup_wait<1>();
      keep_rows<Tile>(next);
      if (read_before != 0) release(read_before);
      at.read = 0;
      advance(of_barriers, own, first, at);
      read(next, at.y);
      if constexpr (Tile::kCuts) pixel = next_pixel(pixel), cut_rows(next, pixel);
    };
    std::uint32_t left = (place.end - place.begin) * std::uint32_t(job.products);
#pragma unroll 1
    for (; left > 1; left -= 2) {
      turn(rows[0], rows[1]);
      turn(rows[1], rows[0]);
    }
    if (left > 0) turn(rows[0], rows[1]);
    warpgroup_wait<0>();
    release(at.read);
    pin_all(sums, row_sums);
  }
  static __device__ __forceinline__ void pin_all(Sums& sums, RowSums& row_sums) {
    pin_sums<Tile>(sums);
    if constexpr (kSums) {
#pragma unroll
      for (int i = 0; i < Tile::kTaps * kOnesColumns8 * 4; ++i) pin(row_sums[i / 4][i % 4]);
    }
  }

  // Of kParts parts, whose blocks are a cluster: each puts its sums where its stages were, adds some columns of all up, in their
  // order, and stores those.
  template <int kParts>
  __device__ __forceinline__ void store_together(const Sums& sums, float* __restrict__ partial) const {
    constexpr std::uint32_t kColumns = Tile::kTaps * Tile::kColumns8, kStoring = 32 * Tile::kWarps;
    constexpr std::uint32_t kOwn = (kColumns + kParts - 1) / kParts;
    meet<1, int(kStoring)>();  // all products have read what the sums overwrite
    float4* const own = reinterpret_cast<float4*>(memory) + threadIdx.x;
#pragma unroll
    for (std::uint32_t i = 0; i < kColumns; ++i) own[i * kStoring] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
    meet_cluster();  // the sums of all are there
    const std::uint32_t first = shared_address(own), begin = place.part % kParts * kOwn;
    float* const to = own_sums<Tile>(job, place, place.part / kParts, sums_row(), partial);
#pragma unroll 4
    for (std::uint32_t i = begin; i < begin + kOwn; ++i) {
      if (i >= kColumns || to == nullptr) continue;
      float4 sum = load_of_block(first + i * kStoring * 16, 0);
#pragma unroll
      for (std::uint32_t block = 1; block < kParts; ++block) {
        const float4 v = load_of_block(first + i * kStoring * 16, block);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
      }
      store_sums_of(job, place, int(i / Tile::kColumns8), int(i % Tile::kColumns8), to, kBelow, sum);
    }
    leave_cluster();
    await_cluster();  // a block stays while others read its sums
  }
  __device__ __forceinline__ void store(const Sums& sums, float* __restrict__ partial) const {
    if constexpr (Tile::kAdds) {
      job.together.value == 2 ? store_together<2>(sums, partial) : store_together<4>(sums, partial);
    } else {
      store_sums<Tile>(job, place, sums, sums_row(), partial, kBelow);
    }
  }

  // [part][group][unit][tap][output channel of the plane], once for all tiles of input channels.
  __device__ __forceinline__ void store_row_sums(const RowSums& row_sums, float* __restrict__ to) const {
    const std::int32_t unit = place.first_unit + std::int32_t(threadIdx.x / 32);
    if (unit >= job.units || place.first_channel > 0 || threadIdx.x % 4 != 0) return;
    const std::int64_t group = std::int64_t(place.part) * job.groups.value + place.group;
    float* const own = to + (group * job.units + unit) * kUnitRows + sums_row();
#pragma unroll
    for (int i = 0; i < Tile::kTaps; ++i) {
      own[i * kPlaneChannels] = row_sums[i * kOnesColumns8][0];
      own[i * kPlaneChannels + kBelow] = row_sums[i * kOnesColumns8][2];
    }
  }

  __device__ __forceinline__ void run(float* __restrict__ partial, float* __restrict__ row_partial) const {
    make_barriers();
    if (threadIdx.x >= 32 * Tile::kWarps) {
      if constexpr (Tile::kSharesRegisters) give_registers_back<Tile::kCopyRegisters>();
      if (threadIdx.x < 32 * Tile::kWarps + 32) {
        take_turn();  // who stores sums waits for copies
        this->copy_steps();
      }
    } else {
      if constexpr (Tile::kSharesRegisters) take_registers<Tile::kMultiplyRegisters>();
      Sums sums = {};
      RowSums row_sums = {};
      accumulate(sums, row_sums);
      store(sums, partial);
      if constexpr (kSums) store_row_sums(row_sums, row_partial);
      if constexpr (Tile::kShares) meet_cluster();  // a block stays while the other says what it has read
    }
  }
};
#endif

template <typename Value, typename Tile, int kReads, bool kSums>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    fused_weight_box_kernel(const __grid_constant__ FusedWeightJob job, const __grid_constant__ FusedWeightBoxes boxes,
                            const __grid_constant__ BoxMap x, const __grid_constant__ BoxMap y, float* __restrict__ partial,
                            float* __restrict__ row_partial) {
#if UPFOLD_WARPGROUPS
  extern __shared__ uint4 memory[];
  __shared__ FusedWeightBoxBarriers barriers;
  FusedWeightOnes* ones = nullptr;
  if constexpr (kSums) {
    __shared__ FusedWeightOnes own_ones;
    ones = &own_ones;
  }
  if (threadIdx.x == 32 * Tile::kWarps) expect_boxes(x), expect_boxes(y);
  unsigned char* const first = reinterpret_cast<unsigned char*>(memory) + (0 - shared_address(memory)) % kBoxAlignment;
  const FusedWeightPlace place(job, Tile::kChannels, Tile::kWarps);
  const FusedWeightBoxBlock<Value, Tile, kReads, kSums> block{{job, boxes, place, x, y, first, barriers}, ones};
  block.run(partial, row_partial);
#endif
}

}  // namespace upfold::cuda
