// What the copy engine brings of the fused gradient of the weight by boxes (fused_weight_boxes.cuh): the job, and the warp that
// begins all copies.
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

#if UPFOLD_WARPGROUPS
template <typename Value, typename Tile>
struct FusedWeightBoxCopies {
  const FusedWeightJob& job;
  const FusedWeightBoxes& boxes;
  const FusedWeightPlace& place;
  const BoxMap &x, &y;
  unsigned char* memory;  // the first stage
  FusedWeightBoxBarriers& barriers;

  static constexpr std::int32_t kSize = sizeof(Value), kVector = 16 / kSize;

  // Elements from a box's first column to that of its first pixel and tap, of a tap of the height.
  __device__ __forceinline__ std::int32_t shift_of(std::int32_t kh) const {
    return boxes.y_row > 0 ? (kh * boxes.y_row & (boxes.y_align - 1)) : job.shift / kSize;
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
};
#endif

}  // namespace upfold::cuda
