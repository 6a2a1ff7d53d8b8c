// The products of the fused method's phase tiles: how a lane reads x as fragments of the tensor cores, and the loops over a
// chunk.
#pragma once

#include "fused_phases_store.cuh"

namespace upfold::cuda {

// A value as TF32 and, in full float32, what that leaves as such.
template <bool kExact>
UPFOLD_DEVICE void split(std::uint32_t& high, std::uint32_t& low, std::uint32_t word) {
  high = near_tf32_in_place(word);
  if constexpr (kExact) {
    const float v = __uint_as_float(word), rest = v - __uint_as_float(high);
    low = near_tf32_in_place(__float_as_uint(fabsf(rest) <= fabsf(v) ? rest : 0.0f));
  }
}

// The inputs of a lane's four neighbouring units in its channels of both slots (one, where slots are shifts), and as many before
// them as kShifts shifts reach: words[part][4 + unit - shift][slot]. Rounding here, where each value serves all products of a
// step, takes fewer instructions than once in shared memory, from where a value is read about three times.
template <typename Block, int kShifts, bool kFolded>
struct PhaseWindow {
  static constexpr int kSlots = kFolded ? 1 : 2, kLeast = kShifts == 1 ? 4 : kShifts == 2 ? 3 : 0;
  using Words = std::uint32_t[2 * kWindowUnits][kSlots];
  Words words[Block::kParts];

  // `at` is the first unit's input without a shift, in the lane's first channel.
  __device__ __forceinline__ void read(const unsigned char* at, const PhaseJob& job) {
    if constexpr (Block::Tile::kLast) {
#pragma unroll
      for (int i = 5 - kShifts; i < 2 * kWindowUnits; ++i) read_both(i, at + (i - 4) * job.input_step);
    } else {
#pragma unroll
      for (int slot = 0; slot < kSlots; ++slot) {
        const unsigned char* const own = at + slot * Block::kSlotChannels * job.channel_step;
        if constexpr (Block::kSize == 4) {
          read_words(slot, own);
        } else {
          read_pairs(words[0], slot, own, own + job.channel_step);
        }
      }
    }
  }
  // Where channels are neighbours, so are the lane's of both slots.
  __device__ __forceinline__ void read_both(int i, const unsigned char* at) {
    const uint2 both = *reinterpret_cast<const uint2*>(at);
    words[0][i][0] = Block::kSize == 4 ? near_tf32_in_place(both.x) : both.x;
    words[0][i][kSlots - 1] = Block::kSize == 4 ? near_tf32_in_place(both.y) : both.y;
  }
  __device__ __forceinline__ void read_words(int slot, const unsigned char* at) {
    put_four(4, slot, load_shared(shared_address(at)));
    if constexpr (kLeast == 3) put(3, slot, *reinterpret_cast<const std::uint32_t*>(at - 4));
    if constexpr (kLeast == 0) put_four(0, slot, load_shared(shared_address(at - 16)));
  }
  __device__ __forceinline__ void put_four(int first, int slot, const uint4& v) {
    put(first, slot, v.x), put(first + 1, slot, v.y), put(first + 2, slot, v.z), put(first + 3, slot, v.w);
  }
  __device__ __forceinline__ void put(int at, int slot, std::uint32_t word) {
    if constexpr (Block::kParts == 2) split<true>(words[0][at][slot], words[1][at][slot], word);
    if constexpr (Block::kParts == 1) words[0][at][slot] = near_tf32(word);
  }
  // Two channels of 16 bits as one word.
  static __device__ __forceinline__ void read_pairs(Words& to, int slot, const unsigned char* first,
                                                    const unsigned char* second) {
    pair_up(to, 4, slot, *reinterpret_cast<const uint2*>(first), *reinterpret_cast<const uint2*>(second));
    if constexpr (kLeast == 3)
      to[3][slot] = __byte_perm(*reinterpret_cast<const std::uint32_t*>(first - 4),
                                *reinterpret_cast<const std::uint32_t*>(second - 4), 0x7632);
    if constexpr (kLeast == 0)
      pair_up(to, 0, slot, *reinterpret_cast<const uint2*>(first - 8), *reinterpret_cast<const uint2*>(second - 8));
  }
  static __device__ __forceinline__ void pair_up(Words& to, int at, int slot, const uint2& first, const uint2& second) {
    to[at][slot] = __byte_perm(first.x, second.x, 0x5410), to[at + 1][slot] = __byte_perm(first.x, second.x, 0x7632);
    to[at + 2][slot] = __byte_perm(first.y, second.y, 0x5410), to[at + 3][slot] = __byte_perm(first.y, second.y, 0x7632);
  }
};

// A lane's share of both slots of the four products of a warp: words[part][product][slot].
template <typename Block>
struct PhaseInputsOfSlice {
  std::uint32_t words[Block::kParts][kWindowUnits][2];

  // Of a slice of a window. A product wants its slots in neighbouring registers: what is in two of a folded slice's comes to one
  // of them by an operation with a zero that the compiler does not know; of moves it makes one for each product.
  template <int kShifts, bool kFolded>
  __device__ __forceinline__ void choose(const PhaseWindow<Block, kShifts, kFolded>& window, int slice, std::uint32_t zero) {
#pragma unroll
    for (int part = 0; part < Block::kParts; ++part) {
#pragma unroll
      for (int j = 0; j < kWindowUnits; ++j) {
        const int at = 4 + j - (kFolded ? 2 * slice : slice);
        words[part][j][0] = window.words[part][at][0];
        words[part][j][1] = kFolded ? window.words[part][at - 1][0] ^ zero : window.words[part][at][kFolded ? 0 : 1];
      }
    }
  }
  // Of products of eight neighbouring units; `columns` is where each begins. Where channels are neighbours both slots are.
  __device__ __forceinline__ void read_dense(const unsigned char* at, const std::int32_t (&columns)[kWindowUnits]) {
#pragma unroll
    for (int j = 0; j < kWindowUnits; ++j) {
      const uint2 both = *reinterpret_cast<const uint2*>(at + columns[j]);
      if constexpr (Block::kSize == 4) {
        split<Block::kParts == 2>(words[0][j][0], words[Block::kParts - 1][j][0], both.x);
        split<Block::kParts == 2>(words[0][j][1], words[Block::kParts - 1][j][1], both.y);
      } else {
        words[0][j][0] = both.x, words[0][j][1] = both.y;
      }
    }
  }
  // And, in 16-bit types, of two shifts.
  __device__ __forceinline__ void read_folded(const unsigned char* at, const std::int32_t (&columns)[kWindowUnits],
                                              std::int32_t input_step) {
#pragma unroll
    for (int j = 0; j < kWindowUnits; ++j) {
      words[0][j][0] = *reinterpret_cast<const std::uint32_t*>(at + columns[j]);
      words[0][j][1] = *reinterpret_cast<const std::uint32_t*>(at + columns[j] - input_step);
    }
  }
  // Value by value, where inputs are neighbours.
  __device__ __forceinline__ void read(const unsigned char* at, const std::int32_t (&columns)[kWindowUnits],
                                       const PhaseJob& job) {
#pragma unroll
    for (int j = 0; j < kWindowUnits; ++j) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const unsigned char* const own = at + columns[j] + slot * Block::kSlotChannels * job.channel_step;
        if constexpr (Block::kSize == 4) {
          split<Block::kParts == 2>(words[0][j][slot], words[Block::kParts - 1][j][slot],
                                    *reinterpret_cast<const std::uint32_t*>(own));
        } else {
          words[0][j][slot] = *reinterpret_cast<const std::uint16_t*>(own) |
                              std::uint32_t(*reinterpret_cast<const std::uint16_t*>(own + job.channel_step)) << 16;
        }
      }
    }
  }
};

template <typename Value_, bool kExact, typename Tile_>
struct PhaseBlock : PhaseResults<Value_, kExact, Tile_> {
  using Base = PhaseResults<Value_, kExact, Tile_>;
  using Base::Base, Base::dense, Base::fragment_vectors, Base::job, Base::kParts, Base::kSize, Base::kSlotChannels,
      Base::lane_channel, Base::reduced, Base::set_steps, Base::steps, Base::weight, Base::window;
  using typename Base::Sums;
  using typename Base::Tile;
  using typename Base::Value;
  using SliceInputs = PhaseInputsOfSlice<PhaseBlock>;

  // Where this lane's units begin in x, in its first channel of a step: the first of its four, or one of each product.
  __device__ __forceinline__ void find_units(std::int32_t (&columns)[Tile::kN8], std::int32_t warp_n) const {
    const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
      columns[j] = 0;
      if (j > 0 && window()) continue;
      const std::int32_t column = warp_n * Tile::kN8 * 8 + (window() ? lane / 4 * kWindowUnits : j * 8 + lane / 4);
      std::uint32_t rest = std::uint32_t(column);
      const std::int32_t unit = std::int32_t(take(job.grid_w, rest));
      if (rest >= job.box_lines.value) rest = 0;
      const std::uint32_t h = take(job.box_h, rest), d = take(job.box_d, rest);
      const std::uint32_t line = (rest * job.in_d.value + d) * job.in_h.value + h;
      columns[j] = std::int32_t(line) * job.line_step + (unit + job.skew + job.axis[2].most_shift) * job.input_step +
                   lane_channel() * job.channel_step;
    }
  }

  // A fragment and, in full float32, what its rounding leaves, which lies behind it or (kSplits, perhaps) is made here.
  template <bool kSplits>
  __device__ __forceinline__ void load(std::uint32_t (&high)[4], std::uint32_t (&low)[4], const uint4* from) const {
    const uint4 v = *from;
    high[0] = v.x, high[1] = v.y, high[2] = v.z, high[3] = v.w;
    if constexpr (kExact) {
      if (kSplits && job.weight_parts == 1) {
#pragma unroll
        for (int e = 0; e < 4; ++e) split<true>(high[e], low[e], high[e]);
      } else {
        const uint4 rest = from[32];
        low[0] = rest.x, low[1] = rest.y, low[2] = rest.z, low[3] = rest.w;
      }
    }
  }

  // Adds the products of 16 rows, whose fragment lies at `a`. In full float32 the small products come first.
  template <bool kSplits = false>
  __device__ __forceinline__ void add(float (&sums)[Tile::kN8][4], const uint4* a, const SliceInputs& b) const {
    std::uint32_t high[4], low[4];
    load<kSplits>(high, low, a);
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
      if constexpr (kExact) {
        // Tensor cores cut off what they add up: each slice has its own sum, which is added with rounding to nearest.
        float part[4] = {};
        TensorCore<float>::add(part, low, b.words[0][j][0], b.words[0][j][1]);
        TensorCore<float>::add(part, high, b.words[kParts - 1][j][0], b.words[kParts - 1][j][1]);
        TensorCore<float>::add(part, high, b.words[0][j][0], b.words[0][j][1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[j][e] += part[e];
      } else {
        TensorCore<Value>::add(sums[j], high, b.words[0][j][0], b.words[0][j][1]);
      }
    }
  }
  // The same of the first slot alone.
  __device__ __forceinline__ void add_first(float (&sums)[Tile::kN8][4], const uint4* a, const SliceInputs& b) const {
    std::uint32_t words[4], low[4];
    load<false>(words, low, a);
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) HalfTensorCore<Value>::add(sums[j], words, b.words[0][j][0]);
  }
  // The same of two slices, with one sum: half of the additions.
  __device__ __forceinline__ void add_both(float (&sums)[Tile::kN8][4], const uint4* a, const uint4* next_a, const SliceInputs& b,
                                           const SliceInputs& next) const {
    std::uint32_t high[2][4], low[2][4];
    load<false>(high[0], low[0], a), load<false>(high[1], low[1], next_a);
#pragma unroll
    for (int j = 0; j < Tile::kN8; ++j) {
      float part[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto& words = i == 0 ? b.words : next.words;
        TensorCore<float>::add(part, low[i], words[0][j][0], words[0][j][1]);
        TensorCore<float>::add(part, high[i], words[kParts - 1][j][0], words[kParts - 1][j][1]);
      }
      TensorCore<float>::add(part, high[0], b.words[0][j][0], b.words[0][j][1]);
      TensorCore<float>::add(part, high[1], next.words[0][j][0], next.words[0][j][1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] += part[e];
    }
  }

  // Of one step: the slices of a window, for this warp's groups of 16 rows that have taps there. `a` is its first fragment.
  template <int kShifts, bool kFolded>
  __device__ __forceinline__ void add_window(Sums& sums, const uint4* a, const unsigned char* at, std::int32_t warp_m) const {
    constexpr int kSlices = kFolded ? kShifts / 2 : kShifts;
    constexpr std::int32_t kFragment = kFragmentBytes / 16 * kParts, kSlice = Tile::kGroups * kFragment;
    PhaseWindow<PhaseBlock, kShifts, kFolded> window;
    window.read(at, job);
    SliceInputs inputs[kSlices];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) inputs[s].choose(window, s, job.zero);
#pragma unroll
    for (int m = 0; m < Tile::kM16; ++m) {
      const auto has = [&](int shift) { return (job.shift_groups[shift] >> (warp_m * Tile::kM16 + m) & 1) != 0; };
      const uint4* const own = a + m * kFragment;
      if constexpr (kExact && kSlices == 2) {
        if (has(0) && has(1)) {
          add_both(sums[m], own, own + kSlice, inputs[0], inputs[1]);
          continue;
        }
      }
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        if constexpr (kFolded) {
          // No class has the second shift alone.
          if (has(2 * s + 1)) {
            add(sums[m], own + s * kSlice, inputs[s]);
          } else if (has(2 * s)) {
            add_first(sums[m], own + s * kSlice, inputs[s]);
          }
        } else if (has(s)) {
          add(sums[m], own + s * kSlice, inputs[s]);
        }
      }
    }
  }
  // The same of any shifts, where inputs or channels are neighbours in shared memory.
  template <bool kDense>
  __device__ __forceinline__ void add_shifts(Sums& sums, const uint4* a, const unsigned char* x,
                                             const std::int32_t (&columns)[Tile::kN8], std::int32_t warp_m) const {
    for (std::int32_t s = 0; s < job.width_shifts; ++s, a += Tile::kGroups * fragment_vectors()) {
      const std::uint32_t groups = job.shift_groups[s] >> (warp_m * Tile::kM16);
      if ((groups & ((1u << Tile::kM16) - 1)) == 0) continue;
      SliceInputs inputs;
      const unsigned char* const at = x - job.all_shifts[s] * job.input_step;
      if constexpr (kDense) inputs.read_dense(at, columns);
      if constexpr (!kDense) inputs.read(at, columns, job);
#pragma unroll
      for (int m = 0; m < Tile::kM16; ++m) {
        if ((groups >> m & 1) != 0) add<true>(sums[m], a + m * fragment_vectors(), inputs);
      }
    }
  }
  // The same of both shifts of a folded slice, where channels are neighbours.
  __device__ __forceinline__ void add_folded(Sums& sums, const uint4* a, const unsigned char* x,
                                             const std::int32_t (&columns)[Tile::kN8], std::int32_t warp_m) const {
    SliceInputs inputs;
    inputs.read_folded(x, columns, job.input_step);
#pragma unroll
    for (int m = 0; m < Tile::kM16; ++m) {
      const std::int32_t group = warp_m * Tile::kM16 + m;
      if ((job.shift_groups[1] >> group & 1) != 0) {
        add(sums[m], a + m * fragment_vectors(), inputs);
      } else if ((job.shift_groups[0] >> group & 1) != 0) {
        add_first(sums[m], a + m * fragment_vectors(), inputs);
      }
    }
  }

  template <typename Step>
  __device__ __forceinline__ void for_steps(std::int32_t chunk, std::int32_t warp_m, std::int32_t warp_k, Step step) const {
    const std::int32_t count = set_steps(), vectors = std::int32_t(job.slices.value) * Tile::kGroups * fragment_vectors();
    const uint4* a =
        weight() + (chunk * count + warp_k) * vectors + warp_m * Tile::kM16 * fragment_vectors() + std::int32_t(threadIdx.x) % 32;
    const PhaseStep* at = steps() + warp_k;
#pragma unroll 2
    for (std::int32_t i = warp_k; i < count; i += Tile::kWarpsK, a += Tile::kWarpsK * vectors, at += Tile::kWarpsK)
      step(a, at->from);
  }
  __device__ __forceinline__ void multiply(Sums& sums, const unsigned char* x, std::int32_t chunk,
                                           const std::int32_t (&columns)[Tile::kN8], std::int32_t warp_m,
                                           std::int32_t warp_k) const {
    const unsigned char* const own = x + columns[0];
    if (dense() && job.folded) {
      if constexpr (kSize == 2)
        for_steps(chunk, warp_m, warp_k,
                  [&](const uint4* a, std::int32_t from) { add_folded(sums, a, x + from, columns, warp_m); });
    } else if (dense() && !window()) {
      for_steps(chunk, warp_m, warp_k,
                [&](const uint4* a, std::int32_t from) { add_shifts<true>(sums, a, x + from, columns, warp_m); });
    } else if (!window()) {
      for_steps(chunk, warp_m, warp_k,
                [&](const uint4* a, std::int32_t from) { add_shifts<false>(sums, a, x + from, columns, warp_m); });
    } else if constexpr (!Tile::kLast || (!kExact && Tile::kGroups == 1)) {
      multiply_windows(sums, own, chunk, warp_m, warp_k);
    }
  }
  __device__ __forceinline__ void multiply_windows(Sums& sums, const unsigned char* own, std::int32_t chunk, std::int32_t warp_m,
                                                   std::int32_t warp_k) const {
    if (kSize == 2 && job.folded) {
      if constexpr (kSize == 2 && !Tile::kLast)
        for_steps(chunk, warp_m, warp_k,
                  [&](const uint4* a, std::int32_t from) { add_window<2, true>(sums, a, own + from, warp_m); });
    } else if (job.width_shifts <= 2) {
      for_steps(chunk, warp_m, warp_k,
                [&](const uint4* a, std::int32_t from) { add_window<2, false>(sums, a, own + from, warp_m); });
    } else {
      for_steps(chunk, warp_m, warp_k,
                [&](const uint4* a, std::int32_t from) { add_window<kMostWindowShifts, false>(sums, a, own + from, warp_m); });
    }
  }

  // Adds the sums of the warps that share a tile and split the reduction, in their order; true for the first of them.
  __device__ __forceinline__ bool reduce(Sums& sums, std::int32_t warp_mn, std::int32_t warp_k) const {
    if constexpr (Tile::kWarpsK > 1) {
      constexpr int kOwn = Tile::kM16 * Tile::kN8, kTiles = Tile::kWarpsM * Tile::kWarpsN;
      const std::int32_t lane = std::int32_t(threadIdx.x) % 32;
      if (warp_k > 0) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float(&s)[4] = sums[i / Tile::kN8][i % Tile::kN8];
          reduced()[(((warp_k - 1) * kTiles + warp_mn) * kOwn + i) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
        }
      }
      __syncthreads();  // partial sums are complete
      if (warp_k > 0) return false;
#pragma unroll
      for (int k = 0; k < Tile::kWarpsK - 1; ++k) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const float4 v = reduced()[((k * kTiles + warp_mn) * kOwn + i) * 32 + lane];
          float(&s)[4] = sums[i / Tile::kN8][i % Tile::kN8];
          s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
        }
      }
    }
    return true;
  }
};

}  // namespace upfold::cuda
