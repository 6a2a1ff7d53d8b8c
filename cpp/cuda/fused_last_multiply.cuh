// The products of a block of the fused method by boxes of channels, by its warpgroups.
#pragma once

#include "fused_last_block.cuh"
#include "fused_last_planes.cuh"

namespace upfold::cuda {

#if UPFOLD_WARPGROUPS
// How products name their operands.
template <typename Value, bool kByResult, bool kFromPlanes>
struct LastOperandsOf {
  using Type = Value;
};
template <typename Value>
struct LastOperandsOf<Value, true, false> {
  using Type = TurnedColumns<Value>;
};
template <typename Value>
struct LastOperandsOf<Value, false, true> {
  using Type = Turned<Value>;
};
template <typename Value>
struct LastOperandsOf<Value, true, true> {
  using Type = TurnedBoth<Value>;
};

template <typename Value, typename Tile, LastWeights kWeights>
struct LastProducts : LastBlock<Value, Tile, kWeights> {
  using Base = LastBlock<Value, Tile, kWeights>;
  using Base::job, Base::barriers, Base::address, Base::patch, Base::weight, Base::kRowUnits, Base::kChunk, Base::kByResult,
      Base::kBoxColumns, Base::kPixels;
  using Sums = float[Tile::kM][Tile::kPhases][Tile::kSub8][4];
  using Operands = typename LastOperandsOf<Value, kByResult, Tile::kFromPlanes && sizeof(Value) == 2>::Type;

  // Phases of one position whose weights follow one another are the columns of one product, which reads its rows once: products
  // of 64 columns each take all that shared memory gives.
  static constexpr int kMostEights = 32;
  static constexpr int kJoined = Tile::kPhases == 3 || Tile::kPhases * Tile::kSub8 > kMostEights ? 1 : Tile::kPhases;
  template <int kCount>
  static __device__ __forceinline__ float (&joined(Sums& sums, int m, int phase))[Tile::kSub8 * kCount][4] {
    return *reinterpret_cast<float(*)[Tile::kSub8 * kCount][4]>(&sums[m][phase]);
  }

  // The products of some pairs, whose first phase is known where this is compiled. Where `adds` is 0, the sums begin with them.
  template <int kCount>
  static __device__ __forceinline__ void add(Sums& sums, int phase, const std::uint64_t (&positions)[Tile::kM],
                                             std::uint32_t shift, std::uint64_t channels, std::uint32_t adds = 1) {
    constexpr std::uint32_t kStep = Tile::kFromPlanes ? 64 : 1;  // from vector to vector; of planes: rows of eight channels
#pragma unroll
    for (std::uint32_t k = 0; k < Tile::kVectors; k += 2) {
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m) {
        const std::uint64_t at = positions[m] + (shift * kRowUnits + k * kStep),
                            of = channels + k * (kByResult ? kBoxColumns : 1);
        WarpgroupCore<Operands, Tile::kSub8 * kCount, 1, 0>::add(joined<kCount>(sums, m, phase), Tile::kTurned ? of : at,
                                                                 Tile::kTurned ? at : of, k == 0 ? adds : 1);
      }
    }
  }

  template <int kPhase>
  __device__ __forceinline__ void add_pair(Sums& sums, std::uint32_t phase, const std::uint64_t (&positions)[Tile::kM],
                                           std::uint32_t shift, std::uint64_t channels) const {
    if constexpr (kPhase < Tile::kPhases) {
      if (Tile::kPhases > 1 && phase != kPhase) return add_pair<kPhase + 1>(sums, phase, positions, shift, channels);
      warpgroup_begin();
      add<1>(sums, kPhase, positions, shift, channels);
      warpgroup_commit();
    }
  }

  // Of an exact tile: those of a chunk, whose large parts are the first half of its vectors. They begin with the small ones.
  using Part = float[Tile::kM][Tile::kSub8][4];
  static __device__ __forceinline__ void add_exact(Part& part, const std::uint64_t (&positions)[Tile::kM], std::uint32_t shift,
                                                   std::uint64_t channels) {
    constexpr std::uint32_t kHalf = Tile::kVectors / 2, kOf[3][2] = {{kHalf, 0}, {0, kHalf}, {0, 0}};
#pragma unroll
    for (std::uint32_t i = 0; i < 3 * kHalf; i += 2) {
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m) {
        const std::uint64_t at = positions[m] + (shift * kRowUnits + i % kHalf + kOf[i / kHalf][0]),
                            of = channels + (i % kHalf + kOf[i / kHalf][1]);
        WarpgroupCore<Operands, Tile::kSub8, 1, 0>::add(part[m], Tile::kTurned ? of : at, Tile::kTurned ? at : of, i > 0);
      }
    }
  }
  template <int kPhase>
  static __device__ __forceinline__ void add_part(Sums& sums, std::uint32_t phase, const Part& part) {
    if constexpr (kPhase < Tile::kPhases) {
      if (Tile::kPhases > 1 && phase != kPhase) return add_part<kPhase + 1>(sums, phase, part);
#pragma unroll
      for (int i = 0; i < Tile::kM * Tile::kSub8 * 4; ++i)
        sums[i / 4 / Tile::kSub8][kPhase][i / 4 % Tile::kSub8][i % 4] += part[i / 4 / Tile::kSub8][i / 4 % Tile::kSub8][i % 4];
    }
  }

  // The products of a chunk in all phases.
  __device__ __forceinline__ void add_whole(Sums& sums, const std::uint64_t (&positions)[Tile::kM], std::uint32_t shift,
                                            std::uint64_t channels, std::uint32_t adds) const {
    warpgroup_begin();
#pragma unroll
    for (int phase = 0; phase < Tile::kPhases; phase += kJoined)
      add<kJoined>(sums, phase, positions, shift, channels + std::uint32_t(phase * kLastPairBytes<Tile> / 16), adds);
    warpgroup_commit();
  }

  static __device__ __forceinline__ std::uint64_t descriptor(std::uint32_t at, std::uint32_t group_pitch) {
    return Tile::kVectors == 8 ? long_row_descriptor(at, group_pitch) : swizzled_descriptor(at, group_pitch);
  }

  static __device__ __forceinline__ std::uint64_t channels_descriptor(std::int32_t first) {
    if constexpr (kByResult) {
      return turned_columns_descriptor<kBoxColumns>(0, kChunk);
    } else {
      return descriptor(std::uint32_t(first) * kRowUnits, 8 * kRowUnits);
    }
  }

  // Of a warpgroup: its first product of the tile's positions, and its first channel.
  static __device__ __forceinline__ std::int32_t first_product(std::int32_t warpgroup) {
    return Tile::kProducts > Tile::kM ? warpgroup * Tile::kM : 0;
  }
  static __device__ __forceinline__ std::int32_t first_channel(std::int32_t warpgroup) {
    return Tile::kProducts > Tile::kM || Tile::kAlternates ? 0 : warpgroup * 64;
  }

  // Barriers of what the products before read; 0: none, or released.
  struct Used {
    std::uint32_t stage = 0, patch = 0;
    __device__ __forceinline__ void release(std::uint32_t leads) {
      if (leads && stage != 0) barrier_arrive(stage);
      if (leads && patch != 0) barrier_arrive(patch);
      stage = patch = 0;
    }
  };

  // How far a warpgroup has come, and what its operands' descriptions have in common.
  struct Reading {
    std::uint64_t positions[Tile::kM], channels;
    Ring buffer, stage;
    Used used;
    std::uint32_t leads = threadIdx.x % 32 == 0;  // known by a register, not asked for anew
    std::uint32_t shift = 0;                      // of all products of a tile, where they have one
    bool resident = false;                        // the weights are there, and stay
    // Of tiles that transpose the kernels are 2 to 4 % faster where lanes ask anew (H200).
    __device__ __forceinline__ void release() {
      used.release(Tile::kAlternates && !Tile::kTransposes ? leads : threadIdx.x % 32 == 0);
    }
  };
  __device__ __forceinline__ Reading begin(std::int32_t warpgroup) const {
    Reading at{{}, channels_descriptor(first_channel(warpgroup)), Ring(job.patches), Ring(job.stages), {}};
    hide(at.leads);
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) {
      const std::uint32_t row = std::uint32_t(job.rows[first_product(warpgroup) + m]);
      at.positions[m] = Tile::kFromPlanes ? turned_descriptor(std::uint32_t(m * kChunk * 8))
                                          : descriptor(row * kRowUnits, std::uint32_t(job.group_pitch) * kRowUnits);
    }
    return at;
  }

  // The products of chunks that are one stage of weights each, a pair of each phase (LastJob::whole): what stands between them is
  // more than half of their time. kBegins: the sums begin with the first of them.
  template <bool kBegins>
  __device__ __forceinline__ void multiply_whole(Sums& sums, const LastPlace& place, Reading& at) const {
#pragma unroll 1
    for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk, at.buffer.next(), at.stage.next()) {
      barrier_wait(address(barriers.patch_full[at.buffer.at]), at.buffer.parity);
      if (!at.resident) barrier_wait(address(barriers.full[at.stage.at]), at.stage.parity);
      std::uint64_t positions[Tile::kM];
#pragma unroll
      for (int m = 0; m < Tile::kM; ++m) positions[m] = at.positions[m] + in_descriptor(patch(at.buffer.at));
      add_whole(sums, positions, at.shift, at.channels + in_descriptor(weight(at.stage.at)), !kBegins || chunk > 0);
      warpgroup_wait<1>();
      at.release();
      at.used = {job.resident ? 0 : address(barriers.empty[at.stage.at]), address(barriers.patch_empty[at.buffer.at])};
    }
  }

  // The same of planes of floats, whose rows come from registers, a step of eight channels of one or two products at a time. A
  // warpgroup hands no product over while the one before the last has not begun, and rows that are read only then come too late
  // (one warpgroup alone, H200, products of 64 x 128: 76 to 85 cycles each where those read two steps ahead take 64 to 66). Of
  // eight channels of a step a lane has two neighbours (LastPackJob::spread), so that no two lanes meet in a bank.
  static constexpr int kStepProducts = Tile::kM < 2 ? Tile::kM : 2, kStepsOfEight = Tile::kM / kStepProducts;
  static constexpr int kSteps = 4 * kStepsOfEight, kRowSets = 4, kAhead = 2;
  static_assert(kSteps % kRowSets == 0, "each step of a chunk has registers of its own");
  using Rows = std::uint32_t[kRowSets][kStepProducts][4];
  static __device__ __forceinline__ void read_rows(Rows& rows, const unsigned char* patch, const std::uint32_t (&own)[2],
                                                   int step) {
#pragma unroll
    for (int m = 0; m < kStepProducts; ++m) {
      const int product = step % kStepsOfEight * kStepProducts + m;
#pragma unroll
      for (int channel = 0; channel < 2; ++channel) {
        const uint2 two = *reinterpret_cast<const uint2*>(patch + own[channel] + product * 64 * kChunk * int(sizeof(Value)) +
                                                          step / kStepsOfEight * 8 * 128);
        rows[step % kRowSets][m][channel * 2] = two.x, rows[step % kRowSets][m][channel * 2 + 1] = two.y;
      }
    }
  }
  __device__ __forceinline__ void add_rows(Sums& sums, const Rows& rows, std::uint64_t channels, int step) const {
    warpgroup_begin();
#pragma unroll
    for (int phase = 0; phase < Tile::kPhases; phase += kJoined) {
      const std::uint64_t of = channels + std::uint32_t(phase * kLastPairBytes<Tile> / 16 + step / kStepsOfEight * 2);
#pragma unroll
      for (int m = 0; m < kStepProducts; ++m)
        WarpgroupRows<Value, Tile::kSub8 * kJoined, 0>::add(
            joined<kJoined>(sums, step % kStepsOfEight * kStepProducts + m, phase), rows[step % kRowSets][m], of);
    }
    warpgroup_commit();
  }
  // Where a lane's words of a product lie, of its first and of its second channel of eight. Its two rows are neighbouring pixels,
  // so that they are one load, and their results one store (LastPlanesValues::own_pixel). Known by registers: found anew for each
  // chunk they took a sixth of its time (H200).
  static __device__ __forceinline__ void place_rows(std::uint32_t (&own)[2]) {
    const std::int32_t pixel = LastPlanesValues<Value, Tile>::own_pixel(), in_row = pixel % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t channel = std::int32_t(threadIdx.x) % 4 * 2 + i;
      own[i] = std::uint32_t(pixel / 32 * kChunk * 128 + channel * 128 + ((in_row / 4) ^ channel) * 16 + in_row % 4 * 4);
      hide(own[i]);
    }
  }
  __device__ __forceinline__ void await_rows(const Reading& at) const {
    barrier_wait(address(barriers.patch_full[at.buffer.at]), at.buffer.parity);
    if (!at.resident) barrier_wait(address(barriers.full[at.stage.at]), at.stage.parity);
  }
  __device__ __forceinline__ const unsigned char* rows_of_patch(const Reading& at) const {
    return this->memory + at.buffer.at * std::uint32_t(job.patch_bytes);
  }
  // Another warpgroup has its turn while the last products run.
  __device__ __forceinline__ void multiply_rows(Sums& sums, const LastPlace& place, const std::uint32_t (&own)[2], Reading& at,
                                                std::uint32_t next_turn) const {
    Rows rows;
    await_rows(at);
    const unsigned char* from = rows_of_patch(at);
#pragma unroll
    for (int step = 0; step < kAhead; ++step) read_rows(rows, from, own, step);
#pragma unroll 1
    for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk) {
      const std::uint64_t channels = at.channels + in_descriptor(weight(at.stage.at));
      const std::uint32_t patch_empty = address(barriers.patch_empty[at.buffer.at]);
      const std::uint32_t stage_empty = job.resident ? 0 : address(barriers.empty[at.stage.at]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        add_rows(sums, rows, channels, step);
        // Products begin when all their rows have come. An arrival ahead of them would not wait for reads that are under way, and
        // the copy engine may be sooner than those.
        if (step == kSteps - 1 && at.leads) barrier_arrive(patch_empty);
        warpgroup_wait<kRowSets - kAhead>();  // of these rows those that are read next take the place
        if (step == kRowSets - kAhead - 1) at.release();
        if (step == kSteps - kAhead) {
          at.buffer.next(), at.stage.next();
          if (chunk + 1 < place.chunks) await_rows(at), from = rows_of_patch(at);  // else what is read is of no use
        }
        read_rows(rows, from, own, (step + kAhead) % kSteps);
      }
      at.used.stage = stage_empty;
    }
    if (at.leads) barrier_arrive(next_turn);
    warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < kRowSets * kStepProducts * 4; ++i) keep(rows[i / 4 / kStepProducts][i / 4 % kStepProducts][i % 4]);
  }

  __device__ __forceinline__ void await_patch(const Reading& at, std::uint64_t (&positions)[Tile::kM]) const {
    barrier_wait(address(barriers.patch_full[at.buffer.at]), at.buffer.parity);
#pragma unroll
    for (int m = 0; m < Tile::kM; ++m) positions[m] = at.positions[m] + in_descriptor(patch(at.buffer.at));
  }

  // The products of pairs that take turns, a stage at a time. Where each pair is asked for its phase, what stands between
  // products takes longer than they do: of pose 256 in bfloat16 366 cycles a pair for 256 (H200).
  __device__ __forceinline__ void multiply_in_turn(Sums& sums, const LastPlace& place, Reading& at) const {
    Ring &buffer = at.buffer, &stage = at.stage;
    for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk) {
      for (std::int32_t q = job.first_patch[place.set] + 1; q <= job.first_patch[place.set + 1]; ++q, buffer.next()) {
        std::int32_t pair = job.patch[q - 1].end;
        const std::int32_t end = job.patch[q].end;
        std::uint64_t positions[Tile::kM];
        await_patch(at, positions);
#pragma unroll 1
        for (; pair < end; stage.next()) {
          std::uint32_t shifts[Tile::kPhases];
#pragma unroll
          for (int phase = 0; phase < Tile::kPhases; ++phase) shifts[phase] = rows_of_pair(job.pair[pair + phase]);
          if (!Tile::kAlternates || !at.resident) barrier_wait(address(barriers.full[stage.at]), stage.parity);
          const std::uint64_t channels = at.channels + in_descriptor(weight(stage.at));
          warpgroup_begin();
#pragma unroll
          for (int phase = 0; phase < Tile::kPhases; ++phase)
            add<1>(sums, phase, positions, shifts[phase], channels + std::uint32_t(phase * kLastPairBytes<Tile> / 16));
          warpgroup_commit();
          warpgroup_wait<1>();
          at.release();
          pair += Tile::kPhases;
          if (!job.resident) at.used.stage = address(barriers.empty[stage.at]);
          if (pair >= end) at.used.patch = address(barriers.patch_empty[buffer.at]);
        }
      }
    }
  }

  // Each pair is a group of products of its own, committed where it is issued (a commit behind a branch would wait for all before
  // it), and one more may be unfinished.
  __device__ __forceinline__ void multiply_pairs(Sums& sums, const LastPlace& place, std::int32_t chunks, Reading& at) const {
    Ring &buffer = at.buffer, &stage = at.stage;
    for (std::int32_t chunk = 0; chunk < chunks; ++chunk) {
      for (std::int32_t q = job.first_patch[place.set] + 1; q <= job.first_patch[place.set + 1]; ++q, buffer.next()) {
        std::int32_t pair = job.patch[q - 1].end;
        const std::int32_t end = job.patch[q].end;
        std::uint64_t positions[Tile::kM];
        await_patch(at, positions);
        for (; pair < end; stage.next()) {
          const std::int32_t until = end - pair < job.stage_pairs ? end : pair + job.stage_pairs;
          if (!Tile::kAlternates || !at.resident) barrier_wait(address(barriers.full[stage.at]), stage.parity);
          std::uint64_t channels = at.channels + in_descriptor(weight(stage.at));
#pragma unroll 1
          do {
            const std::uint32_t entry = job.pair[pair];
            add_pair<0>(sums, phase_of_pair(entry), positions, rows_of_pair(entry), channels);
            channels += kLastPairBytes<Tile> / 16;
            warpgroup_wait<1>();
            at.release();
          } while (++pair < until);
          if (!job.resident) at.used.stage = address(barriers.empty[stage.at]);
          if (pair == end) at.used.patch = address(barriers.patch_empty[buffer.at]);
        }
      }
    }
  }

  // The same of exact tiles: while a warpgroup adds what it has, the products of the other one run.
  __device__ __forceinline__ void multiply_exact(Sums& sums, const LastPlace& place, Reading& at) const {
    Ring &buffer = at.buffer, &stage = at.stage;
    for (std::int32_t chunk = 0; chunk < place.chunks; ++chunk) {
      for (std::int32_t q = job.first_patch[place.set] + 1; q <= job.first_patch[place.set + 1]; ++q, buffer.next()) {
        std::int32_t pair = job.patch[q - 1].end;
        const std::int32_t end = job.patch[q].end;
        std::uint64_t positions[Tile::kM];
        await_patch(at, positions);
        for (; pair < end; stage.next()) {
          const std::int32_t until = end - pair < job.stage_pairs ? end : pair + job.stage_pairs;
          barrier_wait(address(barriers.full[stage.at]), stage.parity);
          std::uint64_t channels = at.channels + in_descriptor(weight(stage.at));
#pragma unroll 1
          do {
            const std::uint32_t entry = job.pair[pair];
            Part part;
            warpgroup_begin();
            add_exact(part, positions, rows_of_pair(entry), channels);
            warpgroup_commit();
            channels += kLastPairBytes<Tile> / 16;
            warpgroup_wait<0>();
#pragma unroll
            for (int i = 0; i < Tile::kM * Tile::kSub8 * 4; ++i) pin(part[i / 4 / Tile::kSub8][i / 4 % Tile::kSub8][i % 4]);
            if (++pair == until) {
              if (!job.resident) at.used.stage = address(barriers.empty[stage.at]);
              if (pair == end) at.used.patch = address(barriers.patch_empty[buffer.at]);
              at.release();
            }
            add_part<0>(sums, phase_of_pair(entry), part);
          } while (pair < until);
        }
      }
    }
  }
};
#endif

}  // namespace upfold::cuda
