// How the patch of y comes into shared memory, for the fused gradients of groups.
#pragma once

#include "fused_groups.cuh"

namespace upfold::cuda {

// What all tiles have in common, by all threads of the block.
template <typename Tile>
UPFOLD_DEVICE void describe_lines(const GroupsJob& job, GroupsLine* lines) {
  for (std::uint32_t i = threadIdx.x; i < Tile::kVectors * job.patch_rows.value; i += kGroupsThreads) {
    std::uint32_t vector = i;
    const std::int32_t row = std::int32_t(take(job.patch_rows, vector));
    std::uint32_t plane = std::uint32_t(row);
    const std::int32_t h = std::int32_t(take(job.plane_rows, plane)) * job.row_step, d = std::int32_t(plane) * job.d.dilation;
    const std::int32_t channel = std::int32_t(vector) * Tile::kEach;
    lines[i] = {channel * job.y_c + d * job.y_d + h * job.y_h,
                std::int32_t(vector) * job.vector_stride + row * job.row_vectors,
                d,
                h,
                job.oc - channel,
                {}};
  }
}

// kBytes: that a thread has asked for at a time.
template <typename Tile, int kBytes>
struct GroupsPatch {
  using Value = typename Tile::Value;
  static constexpr int kEach = Tile::kEach;
  static constexpr int kTogether = kBytes / (4 * kEach);  // reads

  const GroupsJob& job;
  const GroupsLine* lines;
  const Value* first;  // the tile's first position, which may not exist
  std::int32_t od, oh, ow;
  uint4* patch;

  __device__ __forceinline__ GroupsPatch(const GroupsJob& of, const GroupsLine* all, const Value* y, const GroupsPlace& place,
                                         unsigned char* to)
      : job(of),
        lines(all),
        od(place.id * of.d.stride - of.d.pad),
        oh(place.ih * of.h.stride - of.h.pad),
        ow(place.iw * of.w.stride - of.w.pad - of.lead),
        patch(reinterpret_cast<uint4*>(to)) {
    const std::int64_t offset =
        std::int64_t(place.group * of.oc) * of.y_c + std::int64_t(od) * of.y_d + std::int64_t(oh) * of.y_h;
    first = y + (place.n * of.y_n + offset + std::int64_t(ow) * of.y_w);
  }

  // One read: up to two columns of a vector of channels.
  struct Read {
    std::uint32_t words[kEach];  // a pair of columns of each channel, or a column; or the vector itself
    std::int32_t to;             // of the row, in vectors
  };

  __device__ __forceinline__ std::int32_t position_of(std::int32_t column) const {
    std::uint32_t position = std::uint32_t(column);
    const std::int32_t residue = std::int32_t(take(job.stride_w, position));
    return residue * job.residue_vectors + std::int32_t(position);
  }

  template <GroupsReads kReads, bool kWhole>
  __device__ __forceinline__ void begin(Read& read, const GroupsLine& line, const Value* column, bool live) const {
    const bool exists = bool(int(live) & int(std::uint32_t(od + line.d) < std::uint32_t(job.d.out)) &
                             int(std::uint32_t(oh + line.h) < std::uint32_t(job.h.out)));
    const std::int32_t channels = exists ? line.channels : 0;
    const Value* from = column + line.from;
    read.to = line.to;
    if constexpr (kReads == GroupsReads::kVectors) {
      uint4 v = {0, 0, 0, 0};
      if (exists) v = __ldg(reinterpret_cast<const uint4*>(from));
      read.words[0] = v.x, read.words[1] = v.y, read.words[2] = v.z, read.words[3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i, from += job.y_c) {
        const bool wanted = kWhole ? exists : i < channels;
        if constexpr (Tile::kSize == 4) {
          read.words[i] = __float_as_uint(load_or_zero(from, wanted));
        } else if constexpr (kReads == GroupsReads::kPairs) {
          read.words[i] = __float_as_uint(load_or_zero(reinterpret_cast<const float*>(from), wanted));
        } else {
          const Value v = load_or_zero(from, wanted);
          read.words[i] = *reinterpret_cast<const std::uint16_t*>(&v);
        }
      }
    }
  }

  template <GroupsReads kReads>
  __device__ __forceinline__ void end(const Read& read, const std::int32_t (&places)[2]) const {
    const std::uint32_t(&words)[kEach] = read.words;
    uint4* const to = patch + read.to;
    if constexpr (Tile::kSize == 4) {
      to[places[0]] = {near_tf32(words[0]), near_tf32(words[1]), near_tf32(words[2]), near_tf32(words[3])};
    } else if constexpr (kReads == GroupsReads::kVectors) {
      to[places[0]] = {words[0], words[1], words[2], words[3]};
    } else {
      std::uint32_t low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
        high[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
      }
      to[places[0]] = {low[0], low[1], low[2], low[3]};
      if (kReads == GroupsReads::kPairs) to[places[1]] = {high[0], high[1], high[2], high[3]};
    }
  }

  // Warps that share a row keep to their columns, and take a row and every `step`th one behind it.
  template <GroupsReads kReads, bool kWhole>
  __device__ __forceinline__ void bring() const {
    // Vectors of a position lie side by side, and are read by neighbouring lanes; else each has lines of its own.
    constexpr std::int32_t kSide = kReads == GroupsReads::kVectors ? Tile::kVectors : 1;
    const std::int32_t count = Tile::kVectors / kSide * std::int32_t(job.patch_rows.value);
    std::uint32_t rest = std::uint32_t(own_warp());
    const std::int32_t warp = std::int32_t(take(job.row_warps, rest)), own = std::int32_t(rest);
    const std::int32_t step = kGroupsWarps / std::int32_t(job.row_warps.value), lane = std::int32_t(threadIdx.x) % 32;
    if (own >= step) return;
#pragma unroll 1
    for (std::int32_t read = 32 * warp; read < job.row_reads; read += 32 * std::int32_t(job.row_warps.value)) {
      const std::int32_t column = (read + lane) / kSide * (kReads == GroupsReads::kPairs ? 2 : 1), side = (read + lane) % kSide;
      const bool stored = read + lane < job.row_reads, live = stored && std::uint32_t(ow + column) < std::uint32_t(job.w.out);
      const Value* const from = first + (std::int64_t(column) * job.y_w + side * kEach);
      const std::int32_t places[2] = {side * job.vector_stride + position_of(column), position_of(column + 1)};
      const bool whole = side * kEach < job.oc;
#pragma unroll 1
      for (std::int32_t line = own; line < count; line += kTogether * step) {
        Read reads[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const std::int32_t at = line + i * step;
          begin<kReads, kWhole>(reads[i], lines[at < count ? at : line], from, live && whole);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
          if (stored && (i == 0 || line + i * step < count)) end<kReads>(reads[i], places);
      }
    }
  }
  // All of it, by all threads of the block.
  __device__ __forceinline__ void bring() const {
    if (job.reads == GroupsReads::kVectors) return bring<GroupsReads::kVectors, true>();
    if constexpr (Tile::kSize == 2) {
      if (job.reads == GroupsReads::kPairs && job.whole) return bring<GroupsReads::kPairs, true>();
      if (job.reads == GroupsReads::kPairs) return bring<GroupsReads::kPairs, false>();
    } else {
      if (job.whole) return bring<GroupsReads::kElements, true>();
    }
    bring<GroupsReads::kElements, false>();
  }
};

}  // namespace upfold::cuda
