// The kernels of the fused gradient of the weight whose channels are innermost, for one type, and their launches.
#pragma once

#include "fused_last_source.cuh"
#include "fused_weight_last_float.cuh"
#include "fused_weight_last_kernel.cuh"
#include "fused_weight_last_sum.cuh"

namespace upfold::cuda {

// Packs x by as many blocks as are said, and y by the others (fused_last_source.cuh), either of which may be none. kSquares: of
// y.
template <typename Bits, bool kSquares>
__global__ void __launch_bounds__(kSourceThreads)
    fused_weight_last_pack_kernel(std::uint32_t x_blocks, const __grid_constant__ LastSourceJob x_job, const Bits* __restrict__ x,
                                  uint4* __restrict__ x_packed, const __grid_constant__ LastSourceJob y_job,
                                  const Bits* __restrict__ y, uint4* __restrict__ y_packed) {
  __shared__ uint4 memory[kSourceVectors];
  take_turn();
  if (blockIdx.x < x_blocks) {
    pack_source(x_job, blockIdx.x, x, x_packed, memory);
  } else {
    pack_source<Bits, kSquares>(y_job, blockIdx.x - x_blocks, y, y_packed, memory);
  }
}

// A tile's index, its kRowGroups, kFirst8, kSecond8.
#define UPFOLD_WEIGHT_LAST_TILES(DO, Value) \
  DO(0, Value, 2, 32, 0)                    \
  DO(1, Value, 2, 16, 16)                   \
  DO(2, Value, 1, 32, 0)                    \
  DO(3, Value, 1, 24, 24)                   \
  DO(4, Value, 1, 24, 16)                   \
  DO(5, Value, 2, 24, 24)                   \
  DO(6, Value, 2, 16, 0)                    \
  DO(7, Value, 1, 16, 0)
// Of float32: its index, kRowGroups, kUnits.
#define UPFOLD_WEIGHT_LAST_FLOAT_TILES(DO) DO(8, 2, 4) DO(9, 1, 8)

#define UPFOLD_INSTANTIATE_WEIGHT_LAST_KERNEL(index, Value, ...)                                       \
  template __global__ void fused_weight_last_kernel<Value, WeightLastTile<__VA_ARGS__>, false>(        \
      const __grid_constant__ WeightLastJob, const __grid_constant__ WeightLastMaps, float4*, Value*); \
  template __global__ void fused_weight_last_kernel<Value, WeightLastTile<__VA_ARGS__>, true>(         \
      const __grid_constant__ WeightLastJob, const __grid_constant__ WeightLastMaps, float4*, Value*);
#define UPFOLD_INSTANTIATE_WEIGHT_LAST_FLOAT_KERNEL(index, ...)                              \
  template __global__ void fused_weight_last_float_kernel<WeightLastFloatTile<__VA_ARGS__>>( \
      const __grid_constant__ WeightLastJob, const __grid_constant__ WeightLastMaps, float4*, float*);
#define UPFOLD_INSTANTIATE_WEIGHT_LAST_SUM(Value)                                                                              \
  template __global__ void fused_weight_last_sum_kernel<Value, false>(const __grid_constant__ WeightLastSumJob, const float4*, \
                                                                      Value*);                                                 \
  template __global__ void fused_weight_last_sum_kernel<Value, true>(const __grid_constant__ WeightLastSumJob, const float4*,  \
                                                                     Value*);                                                  \
  template __global__ void fused_weight_last_rows_kernel<Value>(const __grid_constant__ WeightLastSumJob, const float4*, Value*);
#define UPFOLD_INSTANTIATE_WEIGHT_LAST_PACK(Bits, kSquares)                                                             \
  template __global__ void fused_weight_last_pack_kernel<Bits, kSquares>(                                               \
      std::uint32_t, const __grid_constant__ LastSourceJob, const Bits*, uint4*, const __grid_constant__ LastSourceJob, \
      const Bits*, uint4*);
#define UPFOLD_INSTANTIATE_WEIGHT_LAST(Value)                            \
  UPFOLD_WEIGHT_LAST_TILES(UPFOLD_INSTANTIATE_WEIGHT_LAST_KERNEL, Value) \
  UPFOLD_INSTANTIATE_WEIGHT_LAST_SUM(Value)

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include <algorithm>

#include "fused_weight_last_plan.h"

namespace upfold::cuda {

// Some samples of an operand: as they lie, or where they are to be packed, and by how many blocks.
template <typename Value>
struct WeightLastSamples {
  using Bits = Word<sizeof(Value)>;
  LastSourceJob job = {};
  const Bits* from;
  uint4* to = nullptr;
  unsigned blocks = 0;

  WeightLastSamples(const WeightLastOperand& operand, const Value* own, std::int64_t samples, void* packed)
      : from(reinterpret_cast<const Bits*>(own)) {
    if (operand.packed_bytes == 0) return;
    job = source_at(operand.pack, own, samples), to = static_cast<uint4*>(packed);
    blocks = unsigned(source_blocks(job));
  }
  const void* address() const { return to != nullptr ? static_cast<const void*>(to) : from; }
};

// What is packed, in one launch.
template <typename Value>
void pack_samples(const Launch& launch, const WeightLastSamples<Value>& x, const WeightLastSamples<Value>& y) {
  using Bits = typename WeightLastSamples<Value>::Bits;
  if (x.blocks + y.blocks == 0) return;
  constexpr bool kCanBeSquares = sizeof(Bits) == 2;
  const auto plain = fused_weight_last_pack_kernel<Bits, false>, squares = fused_weight_last_pack_kernel<Bits, kCanBeSquares>;
  const auto kernel = y.job.squares ? squares : plain;
  launch_in_turn("fused", kernel, launch, x.blocks + y.blocks, kSourceThreads, x.blocks, x.job, x.from, x.to, y.job, y.from,
                 y.to);
}

inline BoxMap describe_samples(const WeightLastOperand& operand, std::size_t number, std::int64_t samples, const void* address) {
  BoxTensor boxes = operand.boxes[number];
  boxes.sizes[4] = operand.sample_size * samples;
  return describe_boxes(boxes, static_cast<const unsigned char*>(address) + operand.at[number]);
}

template <typename Value>
void run_weight_last_tile(const Launch& launch, const WeightLastPlan& plan, const WeightLastJob& job, int config,
                          const WeightLastMaps& maps, void* partial, Value* w) {
  const Grid grid{unsigned(plan.tiles * plan.parts), plan.threads, plan.shared_bytes, true, job.cluster.value};
#define UPFOLD_RUN(index, type, ...)                                                                              \
  if (config == index) {                                                                                          \
    using Tile = WeightLastTile<__VA_ARGS__>;                                                                     \
    const auto kernel =                                                                                           \
        plan.planes ? fused_weight_last_kernel<Value, Tile, true> : fused_weight_last_kernel<Value, Tile, false>; \
    launch_grid("fused", kernel, launch, grid, job, maps, static_cast<float4*>(partial), w);                      \
  }
#define UPFOLD_RUN_FLOAT(index, ...)                                                                                \
  if (config == index)                                                                                              \
    launch_grid("fused", fused_weight_last_float_kernel<WeightLastFloatTile<__VA_ARGS__>>, launch, grid, job, maps, \
                static_cast<float4*>(partial), w);
  if constexpr (sizeof(Value) == 2) {
    UPFOLD_WEIGHT_LAST_TILES(UPFOLD_RUN, Value)
  } else {
    UPFOLD_WEIGHT_LAST_FLOAT_TILES(UPFOLD_RUN_FLOAT)
  }
#undef UPFOLD_RUN
#undef UPFOLD_RUN_FLOAT
}

template <typename Value>
void run_weight_last(const Launch& launch, const WeightLastPlan& plan, std::int64_t batch, int config,
                     const FusedOperands& operands) {
  const auto x = static_cast<const Value*>(operands.x), y = static_cast<const Value*>(operands.y);
  const auto w = static_cast<Value*>(const_cast<void*>(operands.w));
  const bool paired = reinterpret_cast<std::uintptr_t>(w) % (2 * sizeof(Value)) == 0;
  require(!plan.job.squares || reinterpret_cast<std::uintptr_t>(w) % 16 == 0, "w = ", reinterpret_cast<std::uintptr_t>(w),
          "; its gradient is stored by 16 bytes, of which its address must be a multiple");
  unsigned char* const workspace = static_cast<unsigned char*>(operands.workspace);
  unsigned char* const x_packed = workspace + plan.partial_bytes;
  unsigned char* const y_packed = x_packed + plan.x.packed_bytes;
  WeightLastJob job = plan.job;
  job.paired = job.paired && paired;
  job.is_followed = plan.launches == 1 && !job.whole;
  for (std::int64_t number = 0; number < plan.launches; ++number) {
    const std::int64_t n = number * plan.batch, samples = std::min(plan.batch, batch - n);
    const WeightLastSamples<Value> x_part(plan.x, x + n * plan.x.sample, samples, x_packed);
    const WeightLastSamples<Value> y_part(plan.y, y + n * plan.y.sample, samples, y_packed);
    pack_samples(launch, x_part, y_part);
    WeightLastMaps maps;
    maps.x = describe_samples(plan.x, 0, samples, x_part.address());
    for (std::size_t i = 0; i < kMostWeightMaps - 1; ++i)
      maps.y[i] = i < plan.y.boxes.size() ? describe_samples(plan.y, i, samples, y_part.address()) : maps.x;
    job.adds = number > 0;
    run_weight_last_tile<Value>(launch, plan, job, config, maps, workspace, w);
  }
  if (plan.job.whole) return;
  WeightLastSumJob sum = plan.sum;
  sum.paired = sum.paired && paired;
  const auto kernel = !sum.tap_order      ? fused_weight_last_rows_kernel<Value>
                      : sum.share_log > 0 ? fused_weight_last_sum_kernel<Value, true>
                                          : fused_weight_last_sum_kernel<Value, false>;
  launch_in_turn("fused", kernel, launch, plan.sum_blocks, kWeightSumThreads, sum, reinterpret_cast<const float4*>(workspace), w);
}

// Whether the kernels were compiled with the instructions of warpgroups: elsewhere they are empty.
template <typename Value>
bool has_weight_last_kernels() {
  cudaFuncAttributes found;
  const auto kernel = fused_weight_last_kernel<Value, WeightLastTile<2, 32, 0>, false>;
  check(cudaFuncGetAttributes(&found, reinterpret_cast<const void*>(kernel)), "kernel attributes");
  return found.sharedSizeBytes > 0;
}

}  // namespace upfold::cuda
#endif
