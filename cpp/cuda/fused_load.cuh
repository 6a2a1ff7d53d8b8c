// How the fused method's blocks bring x into shared memory: asynchronous copies of its rows as they lie, and their turning into
// the patch, where 16 bytes hold the channels of one pixel. The loaders of a block (Tile::kLoaders) call these together.
#pragma once

#include "fused_store.cuh"

namespace upfold::cuda {

template <typename Value>
constexpr int kVectorOf = kWordBytes / int(sizeof(Value));  // channels in 16 bytes

// The number of this thread among those that load.
template <typename Tile>
UPFOLD_DEVICE std::int32_t loader_of() {
  return std::int32_t(threadIdx.x) - Tile::kFirstLoader;
}

// The pixel of the patch where unit number `unit` has displacement (low, low, low).
UPFOLD_DEVICE std::int32_t patch_pixel(const FusedJob& job, std::int32_t unit) {
  if (job.flat) return unit;
  std::int32_t at[3];
#pragma unroll
  for (int i = 2; i >= 0; --i) at[i] = unit & (job.axis[i].tile - 1), unit >>= job.axis[i].tile_log;
  std::int32_t pixel = unit;
#pragma unroll
  for (int i = 0; i < 3; ++i) pixel = pixel * std::int32_t(job.axis[i].patch.value) + at[i];
  return pixel;
}

UPFOLD_DEVICE std::uint32_t word_of(const __half* v) {
  return std::uint32_t(__half_as_ushort(v[0])) | std::uint32_t(__half_as_ushort(v[1])) << 16;
}
UPFOLD_DEVICE std::uint32_t word_of(const __nv_bfloat16* v) {
#if __CUDA_ARCH__ >= 800
  return std::uint32_t(__bfloat16_as_ushort(v[0])) | std::uint32_t(__bfloat16_as_ushort(v[1])) << 16;
#else  // older toolkits name the conversion for these devices only, and no other device runs this kernel
  (void)v;
  return 0;
#endif
}
UPFOLD_DEVICE std::uint32_t word_of(const float* v) { return to_tf32(*v); }

template <typename Value>
UPFOLD_DEVICE uint4 pack_vector(const Value (&v)[kVectorOf<Value>]) {
  constexpr int kStep = 4 / int(sizeof(Value));
  return {word_of(v), word_of(v + kStep), word_of(v + 2 * kStep), word_of(v + 3 * kStep)};
}

template <typename Tile>
UPFOLD_DEVICE RawColumn raw_column(const FusedJob& job, const FusedPlace& place, std::int32_t column, std::int32_t size) {
  std::int32_t n, at[3];
  bool inside = true;
  RawColumn found;
  if (job.flat) {
    const std::int32_t first = column * (job.raw.dense ? 1 : job.raw.grain / size);
    const UnitAt unit = unit_at<Tile>(job, place, first);
    inside = unit.live;
    n = unit.n;
#pragma unroll
    for (int i = 0; i < 3; ++i) at[i] = unit.at[i] + job.axis[i].low;
    found.to = first * (job.raw.dense ? kWordBytes : size);
  } else {
    std::uint32_t rest = std::uint32_t(column);
    const std::int32_t w = std::int32_t(take(job.raw.row_columns, rest)) * (job.raw.dense ? 1 : job.raw.grain / size);
    found.to = job.raw.dense ? column * kWordBytes : (std::int32_t(rest) * job.raw.span + w) * size;
    at[2] = place.first[2] + job.axis[2].low - job.raw.skew + w;
#pragma unroll
    for (int i = 1; i >= 0; --i) at[i] = place.first[i] + job.axis[i].low + std::int32_t(take(job.axis[i].patch, rest));
    n = place.first_n + std::int32_t(rest);
    inside = n < job.batch;
  }
  found.from = n * job.x_n;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    inside = inside && std::uint32_t(at[i]) < std::uint32_t(job.axis[i].in);
    found.from += at[i] * job.x_axis[i];
  }
  if (!inside) found.from = -1;
  return found;
}

// Copies one chunk of raw x; warps take its channels (or vectors) in turn, lanes the columns.
template <typename Value, typename Tile, int kGrain>
UPFOLD_DEVICE void copy_raw_by(const FusedJob& job, const RawColumn* columns, const Value* x, std::int32_t left,
                               unsigned char* raw) {
  constexpr int kVector = kVectorOf<Value>;
  const std::int32_t tid = loader_of<Tile>(), warp = tid / 32, lane = tid % 32;
  constexpr std::int32_t kWarps = Tile::kLoaders / 32;
  const std::int32_t step = job.raw.dense ? kVector : 1, rows = job.raw.dense ? Tile::kVectors : Tile::kVectors * kVector;
  const std::int32_t together = rows < kWarps ? rows : kWarps;  // rows that warps copy at a time
  for (std::int32_t c = lane + 32 * (warp / together); c < job.raw.columns; c += 32 * (kWarps / together)) {
    const RawColumn column = columns[c];
    const Value* from = x + (column.from < 0 ? 0 : column.from) + (warp % together * step) * job.x_c;
    unsigned char* to = raw + warp % together * job.raw.pitch + column.to;
    for (std::int32_t row = warp % together; row < rows; row += together) {
      const bool live = column.from >= 0 && row * step < left;
      if constexpr (kGrain >= 4) {
        copy_async<kGrain>(shared_address(to), live ? from : x, live);
      } else {
        *reinterpret_cast<Value*>(to) = live ? *from : Narrow<Value>::from(0.0f);
      }
      from += together * step * job.x_c, to += together * job.raw.pitch;
    }
  }
}

template <typename Value, typename Tile>
UPFOLD_DEVICE void copy_raw(const FusedJob& job, const RawColumn* columns, const Value* x, std::int32_t left,
                            unsigned char* raw) {
  if (job.raw.grain == 16) return copy_raw_by<Value, Tile, 16>(job, columns, x, left, raw);
  if (job.raw.grain == 8) return copy_raw_by<Value, Tile, 8>(job, columns, x, left, raw);
  if (sizeof(Value) == 4 || job.raw.grain == 4) return copy_raw_by<Value, Tile, 4>(job, columns, x, left, raw);
  copy_raw_by<Value, Tile, 2>(job, columns, x, left, raw);
}

// Where a vector of a pixel lies in the patch: [vector][pixel], or [pixel][vector] with the vectors of a pixel in the order that
// products of warpgroups call a swizzle of 64 bytes: eight pixels in a row then lie in different banks, wherever they begin.
template <typename Tile>
UPFOLD_DEVICE std::int32_t patch_at(const FusedJob& job, std::int32_t vector, std::int32_t pixel) {
  if constexpr (!Tile::kSwizzled) return vector * job.patch_pitch + pixel;
  return pixel * Tile::kVectors + (vector ^ (pixel >> 1 & 3));
}

// Turns a chunk of raw x into the patch.
template <typename Value, typename Tile>
UPFOLD_DEVICE void turn(const FusedJob& job, const unsigned char* raw, uint4* patch) {
  constexpr int kVector = kVectorOf<Value>;
  const std::int32_t tid = loader_of<Tile>(), warp = tid / 32, lane = tid % 32;
  if (job.raw.dense) {
    for (std::int32_t i = tid; i < job.patch_pixels; i += Tile::kLoaders) {
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        Value values[kVector];
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(raw + v * job.raw.pitch + i * kWordBytes);
        patch[patch_at<Tile>(job, v, i)] = pack_vector(values);
      }
    }
    return;
  }
  const std::int32_t patch_w = job.flat ? job.patch_pixels : std::int32_t(job.axis[2].patch.value);
  if constexpr (sizeof(Value) == 2) {
    std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(patch);
    constexpr int kTogether = 4 / Tile::kVectors, kChannels = 8 * Tile::kVectors;  // groups in four matrices; lanes of one
#pragma unroll 2
    for (std::int32_t i = warp * kTogether; i < job.raw.groups; i += Tile::kLoaders / 32 * kTogether) {
      std::uint32_t rows[kTogether];
      std::int32_t firsts[kTogether], from = 0;
#pragma unroll
      for (int h = 0; h < kTogether; ++h) {
        rows[h] = std::uint32_t(i + h < job.raw.groups ? i + h : i);
        firsts[h] = std::int32_t(take(job.raw.row_groups, rows[h])) * 8;
        if (h == 0 || lane / kChannels == h) from = std::int32_t(rows[h]) * job.raw.span + firsts[h];
      }
      std::uint32_t pairs[4];
      load_turned_matrices(pairs, shared_address(raw + lane % kChannels * job.raw.pitch + from * 2));
#pragma unroll
      for (int h = 0; h < kTogether; ++h) {
        const std::int32_t w = firsts[h] + lane / 4 - job.raw.skew, pixel = std::int32_t(rows[h]) * patch_w + w;
        if (std::uint32_t(w) >= std::uint32_t(patch_w) || i + h >= job.raw.groups) continue;
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v)
          words[patch_at<Tile>(job, v, pixel) * 4 + lane % 4] = pairs[h * Tile::kVectors + v];
      }
    }
  } else {
    for (std::int32_t i = tid; i < job.raw.groups; i += Tile::kLoaders) {
      std::uint32_t row = std::uint32_t(i);
      const std::int32_t at = std::int32_t(take(job.raw.row_groups, row)), w = at - job.raw.skew;
      if (std::uint32_t(w) >= std::uint32_t(patch_w)) continue;
      const unsigned char* const from = raw + (std::int32_t(row) * job.raw.span + at) * 4;
      const std::int32_t pixel = std::int32_t(row) * patch_w + w;
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        Value values[kVector];
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[e] = *reinterpret_cast<const Value*>(from + (v * kVector + e) * job.raw.pitch);
        patch[patch_at<Tile>(job, v, pixel)] = pack_vector(values);
      }
    }
  }
}

}  // namespace upfold::cuda
