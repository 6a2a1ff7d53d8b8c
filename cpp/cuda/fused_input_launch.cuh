// The tiles of the fused gradient of the input, and the launches of one of them: the weight is packed, then everything happens in
// one kernel, and a split reduction ends in another. Each type of values is compiled in a source of its own.
#pragma once

#include "fused_input_kernel.cuh"

// The tiles: kM, kN8, kTurn, kReads.
#define UPFOLD_INPUT_TILES(DO, Value)           \
  DO(0, Value, 1, 32, 4, InputReads::kFours)    \
  DO(1, Value, 1, 16, 4, InputReads::kFours)    \
  DO(2, Value, 2, 8, 4, InputReads::kFours)     \
  DO(3, Value, 1, 32, 4, InputReads::kRows)     \
  DO(4, Value, 2, 16, 2, InputReads::kRows)     \
  DO(5, Value, 1, 16, 4, InputReads::kRows)     \
  DO(6, Value, 1, 32, 3, InputReads::kThrees)   \
  DO(7, Value, 2, 16, 3, InputReads::kThrees)   \
  DO(8, Value, 2, 8, 3, InputReads::kThrees)    \
  DO(9, Value, 1, 32, 4, InputReads::kPairs)    \
  DO(10, Value, 1, 16, 4, InputReads::kPairs)   \
  DO(11, Value, 2, 8, 2, InputReads::kPairs)    \
  DO(12, Value, 1, 32, 2, InputReads::kSingles) \
  DO(13, Value, 1, 16, 2, InputReads::kSingles) \
  DO(14, Value, 2, 8, 1, InputReads::kSingles)  \
  DO(15, Value, 2, 16, 2, InputReads::kFours)   \
  DO(16, Value, 1, 32, 4, InputReads::kQuads)   \
  DO(17, Value, 1, 16, 4, InputReads::kQuads)

// Those whose weight is not packed.
#define UPFOLD_INPUT_WORD_TILES(DO, Value)    \
  DO(18, Value, 1, 32, 4, InputReads::kWords) \
  DO(19, Value, 1, 16, 4, InputReads::kWords) \
  DO(20, Value, 2, 8, 4, InputReads::kWords)
#define UPFOLD_INSTANTIATE_INPUT(index, Value, ...)                                                                           \
  template __global__ void fused_input_kernel<Value, InputTile<__VA_ARGS__>>(const __grid_constant__ InputJob, std::uint32_t, \
                                                                             const Value*, const uint4*, Value*, float4*);
// Those of floats that can store their results later (kInputHasLater): kM, kN8, kTurn, kReads.
#define UPFOLD_INSTANTIATE_INPUT_LATER(...)                                                   \
  template __global__ void fused_input_kernel<float, InputLaterTile<InputTile<__VA_ARGS__>>>( \
      const __grid_constant__ InputJob, std::uint32_t, const float*, const uint4*, float*, float4*);
#define UPFOLD_INSTANTIATE_INPUTS_LATER                        \
  UPFOLD_INSTANTIATE_INPUT_LATER(1, 32, 4, InputReads::kFours) \
  UPFOLD_INSTANTIATE_INPUT_LATER(1, 32, 4, InputReads::kPairs) \
  UPFOLD_INSTANTIATE_INPUT_LATER(2, 16, 2, InputReads::kFours) \
  UPFOLD_INSTANTIATE_INPUT_LATER(1, 32, 4, InputReads::kQuads) \
  UPFOLD_INSTANTIATE_INPUT_LATER(1, 32, 4, InputReads::kWords)
#define UPFOLD_INSTANTIATE_INPUT_SHAPE(Value, ...)                                                                     \
  template __global__ void fused_input_reduce_kernel<Value, InputShape<__VA_ARGS__>>(const __grid_constant__ InputJob, \
                                                                                     const float4*, Value*);
// In namespace upfold::cuda, once for each type.
#define UPFOLD_INSTANTIATE_INPUTS(Value)                                                                                \
  UPFOLD_INPUT_TILES(UPFOLD_INSTANTIATE_INPUT, Value)                                                                   \
  UPFOLD_INPUT_WORD_TILES(UPFOLD_INSTANTIATE_INPUT, Value)                                                              \
  UPFOLD_INSTANTIATE_INPUT_SHAPE(Value, 1, 32)                                                                          \
  UPFOLD_INSTANTIATE_INPUT_SHAPE(Value, 2, 16)                                                                          \
  UPFOLD_INSTANTIATE_INPUT_SHAPE(Value, 1, 16)                                                                          \
  UPFOLD_INSTANTIATE_INPUT_SHAPE(Value, 2, 8)                                                                           \
  template __global__ void fused_input_pack_kernel<Value>(const __grid_constant__ InputJob, std::int32_t, std::int32_t, \
                                                          const Value*, uint4*);

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "boxes.h"
#include "fused_input_plan.h"

namespace upfold::cuda {

template <typename Value, typename Tile>
void run_input_tile(const Launch& launch, const InputPlan& plan, const FusedInputOperands& operands) {
  if constexpr (kInputHasLater<Tile> && sizeof(Value) == 4 && !Tile::kLater) {
    if (plan.job.later > 0) return run_input_tile<Value, InputLaterTile<Tile>>(launch, plan, operands);
  }
  const auto* const y = static_cast<const Value*>(operands.y);
  auto* const x = static_cast<Value*>(operands.x);
  auto* const packed = static_cast<uint4*>(operands.workspace);
  auto* const partial = reinterpret_cast<float4*>(static_cast<unsigned char*>(operands.workspace) + plan.packed_bytes);
  InputJob job = plan.job;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(x);
  job.wide = job.wide && address % (2 * sizeof(Value)) == 0;
  if (address % (std::size_t(job.together) * sizeof(Value)) != 0) job.together = job.wide ? 2 : 1;
  if constexpr (Tile::kLater) {
    // So many pieces in a turn that all are stored when a tile of all chunks ends.
    const std::int32_t pieces = Tile::kChannels / Tile::kLaterParts * (Tile::kPixels / 2 / job.together) / 128;
    const std::int32_t turns = job.chunks * (job.steps / Tile::kTurn);
    job.later = (pieces + turns - 1) / turns;
  }
  if constexpr (Tile::kOfWords) {
    job.weight = describe_boxes(plan.weight, operands.w);
  } else {
    launch_grid("fused", fused_input_pack_kernel<Value>, launch, Grid{plan.pack_blocks, 256, plan.pack_bytes, true}, job,
                Tile::kN8, plan.pack_pitch, static_cast<const Value*>(operands.w), packed);
  }
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, launch.device), "cudaDeviceGetAttribute");
  unsigned blocks = unsigned(multiprocessors);
  if (job.resident) blocks = std::max(blocks / unsigned(plan.combinations), 1u) * unsigned(plan.combinations);
  blocks = job.clustered ? plan.blocks : std::min(plan.blocks, blocks);  // a cluster has one tile
  launch_grid("fused", fused_input_kernel<Value, Tile>, launch,
              Grid{blocks, Tile::kBlockThreads, plan.shared_bytes, true, job.clustered ? job.splits.value : 1}, job, plan.blocks,
              y, packed, x, partial);
  if (plan.blocks == job.whole || job.clustered) return;
  const unsigned split_tiles = (plan.blocks - job.whole) / job.splits.value;
  launch_in_turn("fused", fused_input_reduce_kernel<Value, InputShape<Tile::kM, Tile::kN8>>, launch,
                 split_tiles * unsigned(Tile::kM * Tile::kN8), Tile::kThreads, job, partial, x);
}

#define UPFOLD_RUN_INPUT(index, Value, ...) \
  if (config == index) return run_input_tile<Value, InputTile<__VA_ARGS__>>(launch, plan, operands);
// For each type in the source that compiles its kernels.
template <typename Value>
void run_input(const Launch& launch, const InputPlan& plan, const FusedInputOperands& operands, int config) {
  UPFOLD_INPUT_TILES(UPFOLD_RUN_INPUT, Value)
  UPFOLD_INPUT_WORD_TILES(UPFOLD_RUN_INPUT, Value)
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_input_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_input_kernel<Value, InputTile<1, 32, 4, InputReads::kFours>>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
