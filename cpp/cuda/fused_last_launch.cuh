// The kernels of the fused method whose channels are innermost, for one type, and their launches.
#pragma once

#include "fused_last_kernel.cuh"
#include "fused_last_pack.cuh"

namespace upfold::cuda {

// A tile's index, its kM, kSub8, kPhases, kBlocks, kVectors.
#define UPFOLD_LAST_TILES(DO, Value) \
  DO(0, Value, 2, 16, 1, 1, 8)       \
  DO(1, Value, 1, 32, 1, 1, 8)       \
  DO(2, Value, 1, 8, 4, 1, 8)        \
  DO(3, Value, 1, 16, 1, 2, 8)       \
  DO(4, Value, 2, 8, 1, 2, 8)        \
  DO(5, Value, 2, 4, 1, 2, 4)        \
  DO(6, Value, 2, 4, 1, 2, 8)        \
  DO(7, Value, 1, 8, 2, 2, 8)        \
  DO(8, Value, 2, 4, 4, 1, 8)

// Turned ones: the last says whether both warpgroups take the same positions.
#define UPFOLD_LAST_TURNED_TILES(DO, Value) \
  DO(9, Value, 2, 16, 1, 1, 8, true)        \
  DO(10, Value, 2, 8, 1, 2, 8, true)        \
  DO(11, Value, 2, 8, 1, 2, 8, false)       \
  DO(12, Value, 1, 16, 2, 1, 8, true)       \
  DO(13, Value, 2, 8, 2, 1, 8, true)        \
  DO(14, Value, 1, 8, 2, 2, 8, false)       \
  DO(15, Value, 1, 8, 4, 1, 8, true)        \
  DO(16, Value, 1, 8, 4, 1, 8, false)       \
  DO(17, Value, 2, 8, 1, 2, 4, false)
constexpr int kFirstTurned = 9;

// Of warpgroups that alternate: kM, kSub8, kPhases, kVectors.
#define UPFOLD_LAST_ALTERNATING_TILES(DO, Value) \
  DO(18, Value, 2, 16, 1, 8)                     \
  DO(19, Value, 1, 32, 1, 8)                     \
  DO(20, Value, 2, 8, 2, 8)                      \
  DO(21, Value, 4, 8, 1, 8)
// Of those that read planes: kM, kSub8, kPhases.
#define UPFOLD_LAST_PLANES_TILES(DO, Value) \
  DO(22, Value, 1, 16, 2)                   \
  DO(23, Value, 2, 8, 2)                    \
  DO(24, Value, 4, 4, 2)                    \
  DO(25, Value, 1, 8, 4)
// And those that store planes: kM, kSub8, kPhases, kVectors, and the phases of a row where these are fewer; warpgroups where
// these are more than two.
#define UPFOLD_LAST_TO_PLANES_TILES(DO, Value) \
  DO(26, Value, 4, 4, 1, 8)                    \
  DO(27, Value, 4, 8, 1, 8)                    \
  DO(28, Value, 2, 16, 1, 8)                   \
  DO(29, Value, 2, 8, 2, 8)                    \
  DO(30, Value, 4, 4, 2, 8)                    \
  DO(31, Value, 1, 8, 3, 8)                    \
  DO(32, Value, 1, 8, 4, 8)                    \
  DO(33, Value, 1, 8, 4, 8, 2)                 \
  DO(34, Value, 2, 8, 2, 8, 2, 3)
// And those that transpose planes first: the same.
#define UPFOLD_LAST_TRANSPOSING_TILES(DO, Value) \
  DO(35, Value, 4, 4, 1, 4)                      \
  DO(36, Value, 2, 8, 2, 8)                      \
  DO(37, Value, 4, 4, 2, 8)
// Of three warpgroups that alternate, with half as many sums each, for sets that are whole alone: to planes, and to channels that
// are innermost.
#define UPFOLD_LAST_WHOLE_TILES(DO, Value) DO(38, Value, 1, 4, 4, 8, 4, 3)
#define UPFOLD_LAST_WHOLE_BOXES_TILES(DO, Value) DO(39, Value, 1, 16, 1, 8, 3)
// And those of float32 in full (LastExact), upright and turned.
#define UPFOLD_LAST_EXACT_TILES(DO, Value) \
  DO(40, Value, 1, 16, 1, 1, 8)            \
  DO(41, Value, 2, 8, 1, 1, 8)             \
  DO(42, Value, 1, 8, 2, 1, 8)             \
  DO(43, Value, 1, 8, 4, 1, 8)             \
  DO(44, Value, 1, 8, 1, 2, 8)
#define UPFOLD_LAST_EXACT_TURNED_TILES(DO, Value) \
  DO(45, Value, 1, 16, 1, 1, 8, true)             \
  DO(46, Value, 2, 8, 1, 1, 8, false)             \
  DO(47, Value, 1, 8, 2, 1, 8, true)              \
  DO(48, Value, 1, 8, 4, 1, 8, true)
// Of runs: kM, kSub8.
#define UPFOLD_LAST_RUNS_TILES(DO, Value) \
  DO(49, Value, 2, 16)                    \
  DO(50, Value, 2, 20)                    \
  DO(51, Value, 1, 16)
// Of rows of the weight: the same, and whether the copy engine stores.
#define UPFOLD_LAST_WEIGHT_ROWS_TILES(DO, Value) \
  DO(52, Value, 2, 16, true)                     \
  DO(53, Value, 1, 16, true)                     \
  DO(54, Value, 2, 16, false)                    \
  DO(55, Value, 1, 16, false)
// And of planes as they lie, of three warpgroups, for weights that stay.
#define UPFOLD_LAST_PLANES_OF_THREE_TILES(DO, Value) DO(56, Value, 1, 8, 2, 3)
constexpr int kFirstAlternating = 18, kFirstTransposing = 35, kFirstWhole = 38, kFirstExact = 40, kFirstRuns = 49;
constexpr int kFirstWeightRows = 52, kFirstOfThree = 56;

#define UPFOLD_INSTANTIATE_LAST_KERNEL_OF(kPlanes, weights, Value, ...)                                                      \
  template __global__ void fused_last_kernel<Value, __VA_ARGS__, kPlanes, LastWeights::weights>(                             \
      const __grid_constant__ LastJob, const __grid_constant__ BoxMap, const __grid_constant__ BoxMap, const unsigned char*, \
      const Value*, Value*);
#define UPFOLD_INSTANTIATE_LAST_KERNEL(index, Value, ...)                         \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(false, kPacked, Value, LastTile<__VA_ARGS__>) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_TURNED_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastTurnedTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_LYING_KERNEL(index, Value, ...)                     \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(false, kByResult, Value, LastTile<__VA_ARGS__>) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(false, kByReduction, Value, LastTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_ALTERNATING_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(false, kPacked, Value, LastAlternatingTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_PLANES_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastPlanesTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_TO_PLANES_KERNEL(index, Value, ...)                      \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastToPlanesTile<__VA_ARGS__>) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastWholeTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_WHOLE_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastWholeTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_WHOLE_BOXES_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(false, kPacked, Value, LastWholeBoxesTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_IN_TURN_KERNEL(kPlanes, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(kPlanes, kPacked, Value, LastInTurn<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_TRANSPOSING_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastTransposingTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_TRANSPOSING(Value) \
  UPFOLD_LAST_TRANSPOSING_TILES(UPFOLD_INSTANTIATE_LAST_TRANSPOSING_KERNEL, Value)
#define UPFOLD_INSTANTIATE_LAST_WHOLE(Value)                           \
  UPFOLD_LAST_WHOLE_TILES(UPFOLD_INSTANTIATE_LAST_WHOLE_KERNEL, Value) \
  UPFOLD_LAST_WHOLE_BOXES_TILES(UPFOLD_INSTANTIATE_LAST_WHOLE_BOXES_KERNEL, Value)
#define UPFOLD_INSTANTIATE_LAST_TO_PLANES(Value)                                    \
  UPFOLD_LAST_TO_PLANES_TILES(UPFOLD_INSTANTIATE_LAST_TO_PLANES_KERNEL, Value)      \
  UPFOLD_INSTANTIATE_LAST_IN_TURN_KERNEL(true, Value, LastToPlanesTile<2, 8, 2, 8>) \
  UPFOLD_INSTANTIATE_LAST_IN_TURN_KERNEL(true, Value, LastToPlanesTile<4, 4, 2, 8>)
#define UPFOLD_INSTANTIATE_LAST_SHARING_KERNEL(kPlanes, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(kPlanes, kPacked, Value, LastSharing<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_PLANES(Value)                                     \
  UPFOLD_LAST_PLANES_TILES(UPFOLD_INSTANTIATE_LAST_PLANES_KERNEL, Value)          \
  UPFOLD_LAST_PLANES_OF_THREE_TILES(UPFOLD_INSTANTIATE_LAST_PLANES_KERNEL, Value) \
  UPFOLD_INSTANTIATE_LAST_SHARING_KERNEL(true, Value, LastPlanesTile<1, 16, 2>)   \
  UPFOLD_INSTANTIATE_LAST_SHARING_KERNEL(true, Value, LastPlanesTile<2, 8, 2>)
#define UPFOLD_INSTANTIATE_LAST_ALTERNATING(Value)                                      \
  UPFOLD_LAST_ALTERNATING_TILES(UPFOLD_INSTANTIATE_LAST_ALTERNATING_KERNEL, Value)      \
  UPFOLD_INSTANTIATE_LAST_IN_TURN_KERNEL(false, Value, LastAlternatingTile<2, 8, 2, 8>) \
  UPFOLD_INSTANTIATE_LAST_SHARING_KERNEL(false, Value, LastAlternatingTile<2, 16, 1, 8>)
#define UPFOLD_INSTANTIATE_LAST_LYING(Value) UPFOLD_LAST_TILES(UPFOLD_INSTANTIATE_LAST_LYING_KERNEL, Value)
#define UPFOLD_INSTANTIATE_LAST_TURNED(Value)                                               \
  UPFOLD_LAST_TURNED_TILES(UPFOLD_INSTANTIATE_LAST_TURNED_KERNEL, Value)                    \
  UPFOLD_INSTANTIATE_LAST_IN_TURN_KERNEL(true, Value, LastTurnedTile<1, 16, 2, 1, 8, true>) \
  UPFOLD_INSTANTIATE_LAST_IN_TURN_KERNEL(true, Value, LastTurnedTile<2, 8, 2, 1, 8, true>)  \
  UPFOLD_INSTANTIATE_LAST_IN_TURN_KERNEL(true, Value, LastTurnedTile<1, 8, 2, 2, 8, false>)
#define UPFOLD_INSTANTIATE_LAST_EXACT_KERNEL(index, Value, ...)                              \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(false, kPacked, Value, LastExact<LastTile<__VA_ARGS__>>) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastExact<LastTile<__VA_ARGS__>>)
#define UPFOLD_INSTANTIATE_LAST_EXACT_TURNED_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastExact<LastTurnedTile<__VA_ARGS__>>)
#define UPFOLD_INSTANTIATE_LAST_EXACT(Value)                           \
  UPFOLD_LAST_EXACT_TILES(UPFOLD_INSTANTIATE_LAST_EXACT_KERNEL, Value) \
  UPFOLD_LAST_EXACT_TURNED_TILES(UPFOLD_INSTANTIATE_LAST_EXACT_TURNED_KERNEL, Value)
#define UPFOLD_INSTANTIATE_LAST_RUNS_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(true, kPacked, Value, LastRunsTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_RUNS(Value)                                \
  UPFOLD_LAST_RUNS_TILES(UPFOLD_INSTANTIATE_LAST_RUNS_KERNEL, Value)       \
  UPFOLD_INSTANTIATE_LAST_SHARING_KERNEL(true, Value, LastRunsTile<2, 16>) \
  UPFOLD_INSTANTIATE_LAST_SHARING_KERNEL(true, Value, LastRunsTile<2, 20>)
#define UPFOLD_INSTANTIATE_LAST_WEIGHT_ROWS_KERNEL(index, Value, ...) \
  UPFOLD_INSTANTIATE_LAST_KERNEL_OF(false, kByResult, Value, LastWeightRowsTile<__VA_ARGS__>)
#define UPFOLD_INSTANTIATE_LAST_WEIGHT_ROWS(Value) \
  UPFOLD_LAST_WEIGHT_ROWS_TILES(UPFOLD_INSTANTIATE_LAST_WEIGHT_ROWS_KERNEL, Value)
#define UPFOLD_INSTANTIATE_LAST_PACK(Value, Bits, kTurned)                                                                    \
  template __global__ void fused_last_pack_kernel<Value, kTurned>(const __grid_constant__ LastPackJob, const Value*, uint4*); \
  template __global__ void fused_last_pack_both_kernel<Value, Bits, kTurned>(                                                 \
      const __grid_constant__ LastPackJob, const Value*, uint4*, std::uint32_t, const __grid_constant__ LastSourceJob,        \
      const Bits*, uint4*);
#define UPFOLD_INSTANTIATE_LAST(Value, Bits)               \
  UPFOLD_LAST_TILES(UPFOLD_INSTANTIATE_LAST_KERNEL, Value) \
  UPFOLD_INSTANTIATE_LAST_PACK(Value, Bits, false)         \
  UPFOLD_INSTANTIATE_LAST_PACK(Value, Bits, true)
#define UPFOLD_INSTANTIATE_LAST_SOURCE(Bits) \
  template __global__ void fused_last_source_kernel<Bits>(const __grid_constant__ LastSourceJob, const Bits*, uint4*);

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>
#include <cstring>
#include <numeric>

#include "fused_last_plan.h"

namespace upfold::cuda {

inline unsigned last_pack_blocks(const LastPlan& plan) {
  return plan.pack.blocks > 0 ? plan.pack.blocks : (plan.pack.count + kLastPackThreads - 1) / kLastPackThreads;
}

template <typename Value>
void pack_last(const Launch& launch, const LastPlan& plan, const void* w, void* packed) {
  if (plan.pack.count == 0) return;
  const auto kernel = plan.pack.blocks > 0 ? fused_last_pack_kernel<Value, true> : fused_last_pack_kernel<Value, false>;
  launch_in_turn("fused", kernel, launch, last_pack_blocks(plan), kLastPackThreads, plan.pack, static_cast<const Value*>(w),
                 static_cast<uint4*>(packed));
}

struct LastOperands {
  const void *source, *w, *bias;
  void* result;
  void *packed, *packed_source;
  bool is_packed;
};

// What is packed ahead of the kernel that multiplies: the weight where `packs`, and some samples of the source where they do not
// lie in boxes. Where the products find the source.
template <typename Value>
const void* pack_operands(const Launch& launch, const LastPlan& plan, const LastOperands& operands, const Value* from,
                          std::int64_t samples, bool packs) {
  if (plan.source_bytes == 0) {
    if (packs) pack_last<Value>(launch, plan, operands.w, operands.packed);
    return from;
  }
  using Bits = Word<sizeof(Value)>;
  const LastSourceJob job = source_at(plan.source_pack, from, samples);
  const unsigned blocks = unsigned(source_blocks(job));
  const auto bits = reinterpret_cast<const Bits*>(from);
  const auto to = static_cast<uint4*>(operands.packed_source);
  if (packs) {
    const unsigned weight_blocks = last_pack_blocks(plan);
    const auto kernel =
        plan.pack.blocks > 0 ? fused_last_pack_both_kernel<Value, Bits, true> : fused_last_pack_both_kernel<Value, Bits, false>;
    launch_in_turn("fused", kernel, launch, weight_blocks + blocks, kSourceThreads, plan.pack,
                   static_cast<const Value*>(operands.w), static_cast<uint4*>(operands.packed), weight_blocks, job, bits, to);
  } else {
    launch_in_turn("fused", fused_last_source_kernel<Bits>, launch, blocks, kSourceThreads, job, bits, to);
  }
  return to;
}

// What the kernels that multiply take beside the plan: the launch's part of the job, and where the source
// and the weights, or the result, lie.
struct LastLaunch {
  LastJob job;
  BoxMap source, other;
};

template <typename Value, typename Tile, bool kPlanes, LastWeights kWeights = LastWeights::kPacked>
void run_last_tile(const Launch& launch, const LastPlan& plan, const LastLaunch& part, const LastOperands& operands) {
  if constexpr (kHasInTurn<Tile>) {
    if (part.job.in_turn) return run_last_tile<Value, LastInTurn<Tile>, kPlanes, kWeights>(launch, plan, part, operands);
  }
  if constexpr (kHasSharing<Tile>) {
    if (part.job.sharers > 1) return run_last_tile<Value, LastSharing<Tile>, kPlanes, kWeights>(launch, plan, part, operands);
  }
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, launch.device), "cudaDeviceGetAttribute");
  // Blocks that split a reduction have one tile each; those that keep their weights take tiles of the same ones.
  const LastJob& job = part.job;
  const unsigned splits = job.splits.value, slabs = job.resident ? job.sets.value * job.groups.value * job.column_tiles.value : 1;
  unsigned at_once = std::max(unsigned(count * Tile::kBlocks) / slabs, 1u) * slabs;
  constexpr unsigned sharers = Tile::kShares ? 2 : 1;
  at_once /= sharers;
  // Blocks take every so many tiles: so of all sets, where these differ.
  while (plan.mixes && std::gcd(at_once, job.sets.value) > 1) --at_once;
  const unsigned most = splits > 1 ? job.tiles : at_once * sharers;
  const Grid grid{std::min(job.tiles, most), Tile::kThreads, plan.shared_bytes, true, splits * sharers};
  launch_grid("fused", fused_last_kernel<Value, Tile, kPlanes, kWeights>, launch, grid, part.job, part.source, part.other,
              static_cast<const unsigned char*>(operands.packed), static_cast<const Value*>(operands.bias),
              static_cast<Value*>(operands.result));
}

// Turned tiles, those whose warpgroups alternate, and weights that lie, which are compiled by themselves.
template <typename Value>
void run_last_turned(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                     const LastOperands& operands);
template <typename Value>
void run_last_alternating(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                          const LastOperands& operands);
template <typename Value>
void run_last_transposing(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                          const LastOperands& operands);
template <typename Value>
void run_last_runs(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part, const LastOperands& operands);
template <typename Value>
void run_last_weight_rows(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part,
                          const LastOperands& operands);
void run_last_exact(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part, const LastOperands& operands);
template <typename Value>
void run_last_lying(const Launch& launch, const LastPlan& plan, int config, const LastLaunch& part, const LastOperands& operands);

template <typename Value>
void run_last(const Launch& launch, const LastPlan& plan, int config, const LastOperands& operands) {
  const bool packs = !operands.is_packed && plan.pack.count > 0;
  const auto from = static_cast<const Value*>(operands.source);
  LastOperands own = operands;
  LastLaunch part{plan.job, {}, {}};
  LastJob& job = part.job;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(operands.result);
  job.wide = job.wide && address % 16 == 0;
  if (job.joined > 1 && address % (job.joined * sizeof(Value)) != 0) job.joined = 1;
  job.paired = job.paired && address % 4 == 0;
  while (job.unit > std::int8_t(sizeof(Value)) && address % job.unit != 0) job.unit /= 2;
  while (job.vector > 1 && address % (job.vector * sizeof(Value)) != 0) job.vector /= 2;
  const std::int64_t batch = plan.job.batch, tile_n = job.tile_n.value;
  for (std::int64_t n = 0; n < batch; n += plan.batch) {
    job.batch = std::int32_t(std::min(plan.batch, batch - n));
    job.tiles = std::uint32_t(plan.tiles_of_samples * ((job.batch + tile_n - 1) / tile_n));
    const std::uint32_t slabs = job.column_tiles.value * job.sets.value * job.groups.value;
    if (job.sharers > 1 && job.tiles / slabs % 2 != 0) {
      // Of runs, some more tiles, of samples that nobody has; others are of fewer samples than were planned.
      job.runs.channels > 0 ? job.tiles += slabs : job.sharers = 1;
    }
    own.result = static_cast<Value*>(operands.result) + n * job.y_n;
    const bool packs_weight = n == 0 && packs;
    job.follows_packing = packs_weight || plan.source_bytes > 0;
    part.source = describe_boxes(
        plan.source, pack_operands<Value>(launch, plan, operands, from + n * plan.source_pack.n, job.batch, packs_weight));
    if ((config >= kFirstAlternating && config < kFirstExact) || config >= kFirstOfThree) {
      if (!job.loose) {
        BoxTensor result = plan.result;  // of this launch's samples
        result.sizes[4] = plan.result.sizes[4] / batch * job.batch;
        part.other = describe_boxes(result, own.result);
      }
      const bool transposes = config >= kFirstTransposing && config < kFirstWhole;
      transposes ? run_last_transposing<Value>(launch, plan, config, part, own)
                 : run_last_alternating<Value>(launch, plan, config, part, own);
      continue;
    }
    if constexpr (sizeof(Value) == 2) {
      if (config >= kFirstWeightRows) {
        const BoxMap weights = describe_boxes(plan.lying, operands.w);
        std::memcpy(reinterpret_cast<char*>(&part.job) + kLastThird, &weights, sizeof(weights));
        if (!job.loose) part.other = describe_boxes(plan.result, own.result);
        run_last_weight_rows<Value>(launch, plan, config, part, own);
        continue;
      }
    }
    if (config >= kFirstRuns) {
      run_last_runs<Value>(launch, plan, config, part, own);
      continue;
    }
    if constexpr (sizeof(Value) == 4) {
      if (config >= kFirstExact) {
        run_last_exact(launch, plan, config, part, own);
        continue;
      }
    }
    if constexpr (sizeof(Value) == 2) {
      if (plan.weights != LastWeights::kPacked) {
        part.other = describe_boxes(plan.lying, operands.w);
        run_last_lying<Value>(launch, plan, config, part, own);
        continue;
      }
    }
#define UPFOLD_RUN(index, type, ...)                                                                                 \
  if (config == index && job.joined > 0) run_last_tile<Value, LastTile<__VA_ARGS__>, true>(launch, plan, part, own); \
  if (config == index && job.joined == 0) run_last_tile<Value, LastTile<__VA_ARGS__>, false>(launch, plan, part, own);
    UPFOLD_LAST_TILES(UPFOLD_RUN, Value)
#undef UPFOLD_RUN
    if (config >= kFirstTurned) run_last_turned<Value>(launch, plan, config, part, own);
  }
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_last_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_last_kernel<Value, LastTile<2, 16, 1, 1, 8>, false, LastWeights::kPacked>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
