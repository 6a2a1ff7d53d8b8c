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

#include "fused_weight_box_tiles.cuh"
#include "fused_weight_kernel.cuh"

namespace upfold::cuda {

constexpr int kBoxMostStages = 8;
constexpr int kBoxAlignment = 1024;  // bytes; of a stage: rows of 128 bytes change their vectors' places in groups of eight

// Beside the job, in which a row is a piece, and a stage holds y behind x as [plane][piece][channel][column].
struct FusedWeightBoxes {
  Divisor piece_copies, channel_boxes;  // boxes of a piece: its planes' and those of x; boxes of the same pixels of x
  std::uint64_t x_layout;               // the descriptor of x in a stage, without its address
  std::int32_t width, box_width;        // pixels of a piece, of a box
  std::int32_t row;                     // pixels of a row of x where its rows are one run of pixels, else 0
  // Where the rows of y that a row of x meets are one to the copy engine (joined), elements from that of a tap of the height to
  // that of the next one, else 0; the same where maps are (merged), whose taps of the height are units of one plane.
  std::int32_t y_row, tap_row, y_align;  // y_align: elements, of which boxes of joined rows begin at multiples; a power of two
  Divisor row_units;                     // units of a row of taps
  std::int32_t y_piece;                  // elements of y from piece to piece of a row
  // Where rows are cut: pixels after which their number begins anew, and from a product's first vector to its second.
  std::int32_t row_pixels, second_pixel;
  std::int32_t piece_products, box_products;
  std::int32_t box_channels;
  std::int32_t x_box, x_bytes, y_box, y_bytes;  // bytes of a box; from the same pixels' first to the next, from piece to piece
  // From a product to the next one, and to the first one of the next piece or box: y in bytes, x in 16 bytes.
  std::int32_t y_next, y_turn, x_next, x_turn;
  std::int32_t second;  // bytes in y from a product's first vector of pixels to its second
};

struct FusedWeightBoxBarriers {
  std::uint64_t full[kBoxMostStages], empty[kBoxMostStages];
};

constexpr int kOnesColumns8 = 2;  // of a product with ones, all columns of which are the same
// Two vectors of ones of 16-bit values in as many columns, as a product reads them.
struct FusedWeightOnes {
  alignas(128) std::uint32_t words[2 * kOnesColumns8 * 8 * 4];
};
template <typename Value>
struct PairOfOnes {
  static constexpr std::uint32_t kBits = 0x3c003c00;
};
template <>
struct PairOfOnes<__nv_bfloat16> {
  static constexpr std::uint32_t kBits = 0x3f803f80;
};

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile, int kReads, bool kSums>
struct FusedWeightBoxBlock {
  using Sums = FusedWeightSums<Tile>;
  using RowSums = float[Tile::kTaps * kOnesColumns8][4];
  using Rows = FusedWeightRows<Tile>;
  const FusedWeightJob& job;
  const FusedWeightBoxes& boxes;
  const FusedWeightPlace& place;
  const BoxMap &x, &y;
  unsigned char* memory;  // the first stage
  FusedWeightBoxBarriers& barriers;
  FusedWeightOnes* ones;  // where kSums

  static constexpr std::int32_t kSize = sizeof(Value), kVector = 16 / kSize, kLanePixels = kSize == 2 ? 2 : 1;
  // Elements from a box's first column to that of its first pixel and tap, of a tap of the height.
  __device__ __forceinline__ std::int32_t shift_of(std::int32_t kh) const {
    return boxes.y_row > 0 ? (kh * boxes.y_row & (boxes.y_align - 1)) : job.shift / kSize;
  }

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
    const std::int32_t shift = shift_of(std::int32_t(take(job.kernel_h, kd)));
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

  // What is left of the channels behind copy number `which` of a piece. Where there are none, nothing is copied and what the
  // stage held before is multiplied, for sums that nobody reads: zeros take the copy engine longer than anything else.
  __device__ __forceinline__ std::int32_t channels_of(std::uint32_t which) const {
    if (which >= std::uint32_t(job.block_planes)) {
      std::uint32_t box = which - std::uint32_t(job.block_planes);
      return job.in_channels - place.first_channel - std::int32_t(take(boxes.channel_boxes, box)) * boxes.box_channels;
    }
    return job.out_channels - std::int32_t(divide(job.row_taps, std::uint32_t(place.first_plane) + which)) * kPlaneChannels;
  }

  // Begins one copy of a piece. Boxes begin at multiples of 16 bytes. In a run of rows a piece may so begin some pixels early and
  // end behind its row, where y has no columns: zeros. Beyond the last piece lies no sample: zeros.
  __device__ __forceinline__ void copy(std::uint32_t stage, std::uint32_t in_step, std::uint32_t piece, std::uint32_t which,
                                       std::uint32_t full) const {
    const std::int32_t chunk = std::int32_t(take(job.chunks, piece)), pixel = chunk * boxes.width;
    const std::int32_t ih = std::int32_t(take(job.in_h, piece)), id = std::int32_t(take(job.in_d, piece));
    const std::int32_t sample = std::int32_t(piece), in_run = ih * boxes.row + pixel,
                       early = boxes.row > 0 ? in_run % kVector : 0;
    if (which >= std::uint32_t(job.block_planes)) {
      std::uint32_t box = which - std::uint32_t(job.block_planes);
      const std::int32_t part = std::int32_t(take(boxes.channel_boxes, box));
      const std::int32_t channel = std::int32_t(place.group) * job.in_channels + place.first_channel + part * boxes.box_channels;
      const std::uint32_t boxes_before = in_step * std::uint32_t(boxes.piece_products / boxes.box_products) + box;
      const std::uint32_t to = stage + boxes_before * boxes.x_bytes + part * boxes.x_box;
      const std::int32_t first = in_run - early + std::int32_t(box) * boxes.box_width;
      copy_box(to, x, {first, channel, boxes.row > 0 ? 0 : ih, id, sample}, full);
      return;
    }
    std::uint32_t sixteen = std::uint32_t(place.first_plane) + which, kd = take(job.row_taps, sixteen);
    const std::int32_t kh = std::int32_t(take(job.kernel_h, kd));
    const std::int32_t channel = std::int32_t(place.group) * job.out_channels + std::int32_t(sixteen) * kPlaneChannels;
    const std::uint32_t to = stage + job.y_at + (which * job.rows.value + in_step) * boxes.y_bytes;
    const std::int32_t row = boxes.y_row > 0 ? ih : ih * job.stride[1] - job.pad[1] + kh * job.dilation[1];
    const std::int32_t at[5] = {kh * boxes.y_row + chunk * boxes.y_piece - early * job.stride[2] - job.pad[2] - shift_of(kh),
                                channel, row, id * job.stride[0] - job.pad[0] + std::int32_t(kd) * job.dilation[0], sample};
    if constexpr (Tile::kShares) {
      copy_box_to_blocks(to, y, at, full, 3);
    } else {
      copy_box(to, y, at, full);
    }
  }
  // Whether the other block of the cluster begins this copy for both.
  __device__ __forceinline__ bool is_brought(std::uint32_t in_step, std::uint32_t which) const {
    return Tile::kShares && which < std::uint32_t(job.block_planes) && (in_step + which + blockIdx.x) % 2 == 0;
  }

  __device__ __forceinline__ void copy_steps() const {
    const std::uint32_t lane = threadIdx.x % 32, pieces = job.rows.value, copies = boxes.piece_copies.value * pieces;
    std::uint32_t bytes = 0;  // of a step
    for (std::uint32_t which = 0; which < boxes.piece_copies.value; ++which) {
      if (channels_of(which) > 0)
        bytes += std::uint32_t(which < std::uint32_t(job.block_planes) ? boxes.y_box : boxes.x_box) * pieces;
    }
    const SharedAddress of_barriers(&barriers), of_memory(memory);
    FusedWeightRing ring{0, 1};  // every stage is empty at first
#pragma unroll 1
    for (std::uint32_t step = place.begin; step < place.end; ++step, ring.next(job.stages)) {
      const std::uint32_t full = of_barriers.of(&barriers.full[ring.at]);
      barrier_wait(of_barriers.of(&barriers.empty[ring.at]), std::uint32_t(ring.parity));
      if (lane == 0) barrier_arrive_expecting(full, bytes);
      __syncwarp();  // the bytes are expected
#pragma unroll 1
      for (std::uint32_t i = lane; i < copies; i += 32) {
        std::uint32_t in_step = i;
        const std::uint32_t which = take(boxes.piece_copies, in_step);
        const std::uint32_t stage = of_memory.first + std::uint32_t(ring.at * job.stage_bytes);
        if (channels_of(which) > 0 && !is_brought(in_step, which)) copy(stage, in_step, step * pieces + in_step, which, full);
      }
      __syncwarp();  // nobody waits for the next stage while others copy
    }
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

  // Where the rows of a product and their pixels of x lie.
  struct Cursor {
    std::int32_t y;   // bytes from the first stage
    std::uint32_t x;  // the low half of the descriptor
    std::int32_t in_piece, in_box;
  };
  // To the next product of a step, with `left` behind it; y stays where there is none.
  __device__ __forceinline__ void advance(std::int32_t left, Cursor& at) const {
    const bool piece_ends = ++at.in_piece == boxes.piece_products, box_ends = ++at.in_box == boxes.box_products;
    at.in_piece = piece_ends ? 0 : at.in_piece, at.in_box = box_ends ? 0 : at.in_box;
    at.x += std::uint32_t(box_ends ? boxes.x_turn : boxes.x_next);
    at.y += left < 0 ? 0 : piece_ends ? boxes.y_turn : boxes.y_next;
  }

  // A stage is read: here, and for the block that has it filled too.
  static __device__ __forceinline__ void release(std::uint32_t empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    if constexpr (Tile::kShares) {
      if (threadIdx.x % 32 == 1) barrier_arrive_at(empty, blockIdx.x % 2 ^ 1);
    }
  }

  // The rows of the next product are asked for before one begins, and come while it runs. Between its beginning and its end
  // nothing may be written that a product reads: the compiler would let it end first.
  __device__ __forceinline__ void accumulate(Sums& sums, RowSums& row_sums) const {
    const std::int32_t own = own_column(), products = job.products;
    std::uint64_t of_ones = 0;
    if constexpr (kSums) of_ones = matrix_descriptor(in_descriptor(shared_address(ones)), kOnesColumns8 * 8, 8);
    const std::uint32_t first = std::uint32_t(boxes.x_layout) + in_descriptor(shared_address(memory)),
                        layout = boxes.x_layout >> 32;
    const SharedAddress of_barriers(&barriers);
    FusedWeightRing ring{0, 0};
    std::uint32_t piece = place.begin * job.rows.value;
    // Where rows are cut, of the product whose rows are there.
    std::int32_t pixel = Tile::kCuts ? std::int32_t(take(job.chunks, piece)) * boxes.width % boxes.row_pixels : 0;
#pragma unroll 1
    for (std::uint32_t step = place.begin; step < place.end; ++step, ring.next(job.stages)) {
      barrier_wait(of_barriers.of(&barriers.full[ring.at]), std::uint32_t(ring.parity));
      const std::int32_t stage = ring.at * job.stage_bytes;
      Cursor at{own + stage, first + std::uint32_t(stage) / 16, 0, 0};
      std::uint32_t x_own = at.x;
      Rows rows;
      read(rows, at.y);
      if constexpr (Tile::kCuts) cut_rows(rows, pixel);
      advance(products - 2, at);
#pragma unroll 1
      for (std::int32_t left = products; left > 0; --left) {
        Rows next;
        read(next, at.y);
        multiply(sums, row_sums, rows, std::uint64_t(layout) << 32 | x_own, of_ones);
        x_own = at.x;
        advance(left - 3, at);
        warpgroup_wait<0>();
        keep_rows<Tile>(rows);
#pragma unroll
        for (int i = 0; i < 4 * Tile::kTaps; ++i) rows[i / 4][i % 4] = next[i / 4][i % 4];
        if constexpr (Tile::kCuts) pixel = next_pixel(pixel), cut_rows(rows, pixel);
      }
      release(of_barriers.of(&barriers.empty[ring.at]));
    }
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
        copy_steps();
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
  const FusedWeightBoxBlock<Value, Tile, kReads, kSums> block{job, boxes, place, x, y, first, barriers, ones};
  block.run(partial, row_partial);
#endif
}

}  // namespace upfold::cuda
