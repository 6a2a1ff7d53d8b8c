// How the patch of y comes into shared memory, for the fused gradients of groups.
#pragma once

#include "fused_groups.cuh"

namespace upfold::cuda {

template <typename Tile>
struct GroupsPatch {
  using Value = typename Tile::Value;
  static constexpr int kEach = Tile::kEach;
  static constexpr int kTogether = 2;  // reads of a thread that are on their way together

  const GroupsJob& job;
  const Value* sample;  // first channel of the group
  std::int32_t od, oh, ow;
  unsigned char* patch;

  __device__ __forceinline__ GroupsPatch(const GroupsJob& of, const Value* y, const GroupsPlace& place, unsigned char* to)
      : job(of),
        sample(y + place.n * of.y_n + place.group * of.oc * of.y_c),
        od(place.id * of.d.stride - of.d.pad),
        oh(place.ih * of.h.stride - of.h.pad),
        ow(place.iw * of.w.stride - of.w.pad - of.lead),
        patch(to) {}

  // One read: up to two columns of a vector of channels.
  struct Read {
    std::uint32_t words[kEach];  // a pair of columns of each channel, or a column; or the vector itself
    std::int32_t row, column, vector;
  };

  __device__ __forceinline__ void begin(std::uint32_t number, Read& read) const {
    const std::int32_t column = std::int32_t(take(job.row_reads, number)), row = std::int32_t(take(job.patch_rows, number));
    std::uint32_t plane = std::uint32_t(row);
    const std::int32_t in_plane = std::int32_t(take(job.plane_rows, plane));
    read.row = row, read.vector = std::int32_t(number);
    read.column = job.reads == GroupsReads::kPairs ? 2 * column : column;
    const std::int32_t d = od + std::int32_t(plane) * job.d.dilation, h = oh + in_plane * job.row_step, w = ow + read.column;
    const bool exists = std::uint32_t(d) < std::uint32_t(job.d.out) && std::uint32_t(h) < std::uint32_t(job.h.out) &&
                        std::uint32_t(w) < std::uint32_t(job.w.out);
    const std::int32_t channel = read.vector * kEach, channels = exists ? job.oc - channel : 0;
    const Value* from = sample;
    if (exists) from += channel * job.y_c + d * job.y_d + h * job.y_h + w * job.y_w;
    if (job.reads == GroupsReads::kVectors) {
      uint4 v = {0, 0, 0, 0};
      if (channels > 0) v = __ldg(reinterpret_cast<const uint4*>(from));
      read.words[0] = v.x, read.words[1] = v.y, read.words[2] = v.z, read.words[3] = v.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if constexpr (Tile::kSize == 4) {
        read.words[i] = __float_as_uint(load_or_zero(from, i < channels));
      } else if (job.reads == GroupsReads::kPairs) {
        read.words[i] = __float_as_uint(load_or_zero(reinterpret_cast<const float*>(from), i < channels));
      } else {
        const Value v = load_or_zero(from, i < channels);
        read.words[i] = *reinterpret_cast<const std::uint16_t*>(&v);
      }
      from += job.y_c;
    }
  }

  __device__ __forceinline__ void put(std::int32_t row, std::int32_t column, std::int32_t vector, const uint4& v) const {
    std::uint32_t position = std::uint32_t(column);
    const std::int32_t residue = std::int32_t(take(job.stride_w, position));
    const std::int32_t at = vector * job.vector_stride + row * job.row_vectors + residue * job.residue_vectors;
    *reinterpret_cast<uint4*>(patch + (at + std::int32_t(position)) * 16) = v;
  }
  __device__ __forceinline__ void end(const Read& read) const {
    const std::uint32_t(&words)[kEach] = read.words;
    if constexpr (Tile::kSize == 4) {
      const uint4 v = {near_tf32(words[0]), near_tf32(words[1]), near_tf32(words[2]), near_tf32(words[3])};
      put(read.row, read.column, read.vector, v);
    } else {
      if (job.reads == GroupsReads::kVectors) {
        put(read.row, read.column, read.vector, {words[0], words[1], words[2], words[3]});
        return;
      }
      std::uint32_t low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
        high[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
      }
      put(read.row, read.column, read.vector, {low[0], low[1], low[2], low[3]});
      if (job.reads == GroupsReads::kPairs) put(read.row, read.column + 1, read.vector, {high[0], high[1], high[2], high[3]});
    }
  }

  // All of it, by all threads of the block.
  __device__ __forceinline__ void load() const {
    const std::uint32_t count = Tile::kVectors * job.patch_rows.value * job.row_reads.value;
#pragma unroll 1
    for (std::uint32_t first = threadIdx.x; first < count; first += kTogether * kGroupsThreads) {
      Read reads[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (i == 0 || first + i * kGroupsThreads < count) begin(first + i * kGroupsThreads, reads[i]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (i == 0 || first + i * kGroupsThreads < count) end(reads[i]);
    }
  }
};

}  // namespace upfold::cuda
