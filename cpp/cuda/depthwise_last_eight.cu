// The depthwise method, the adjoint in x for channels_last tensors of float32, of strides of eight and kernels of two strides. A
// block owns sixteen channels, kOwned columns of x and a part of the steps down them. Lanes of a warp are the phases of the W
// axis, for four vectors of channels; a warp has one unit of that axis and half of the phases of the H axis, whose taps its
// threads keep in registers, so that every vector of y is read by one thread. A step is a unit of the H axis: it finishes a row
// of x, of which lanes add up what the phases have, and the block what its warps have, for kBatch rows at a time.
#include "depthwise_last.cuh"
#include "depthwise_weight.cuh"

namespace upfold::cuda {

constexpr int kEight = 8, kC = 4, kHalf = kEight / 2;
constexpr int kUnits = 8, kOwned = kUnits - 1;  // of a block; columns of x that lie in two of these
constexpr int kEightThreads = 2 * kUnits * 32, kEightChannels = 4 * kC, kBatch = 4;

struct EightJob {
  DepthwiseJob problem;
  Divisor groups, rows, column_blocks, depth;  // as of DepthwiseLastJob
  std::uint32_t steps, length;
};

// What the warps of a block have for rows of x: of a unit, a half of the phases, the column of the unit and the one before.
using EightShares = float[kBatch][kUnits][2][2][kEightChannels];

// What a thread reads, and the block's columns.
struct EightWalk {
  std::int32_t ih, iw, oh, rows, out_count;
  std::int32_t of, to;
  bool there;
};

UPFOLD_DEVICE EightWalk eight_walk(const EightJob& job, std::uint32_t at, std::uint32_t end, std::int32_t channel,
                                   std::int32_t unit, std::int32_t phase_h, std::int32_t phase) {
  const DepthwiseJob& p = job.problem;
  std::uint32_t rest = at;
  EightWalk walk;
  walk.ih = std::int32_t(take(job.rows, rest)), walk.iw = std::int32_t(take(job.column_blocks, rest)) * kOwned;
  const std::int32_t id = std::int32_t(take(job.depth, rest)), n = std::int32_t(rest), od = id - p.axis[0].pad;
  walk.rows = min(std::int32_t(job.rows.value) - walk.ih, std::int32_t(end - at));
  walk.oh = walk.ih * kEight - p.axis[1].pad + phase_h;
  const std::int32_t ow = (walk.iw + unit) * kEight - p.axis[2].pad + phase;
  walk.there = inside(ow, p.axis[2].out_count) && walk.iw + unit <= p.axis[2].in_end;
  walk.out_count = inside(od, p.axis[0].out_count) ? p.axis[1].out_count : 0;
  walk.of = n * p.y.n + channel + od * p.y.axis[0] + walk.oh * p.y.axis[1] + ow * p.y.axis[2];
  walk.to = n * p.x.n + id * p.x.axis[0] + walk.ih * p.x.axis[1] + walk.iw * p.x.axis[2];
  return walk;
}

// Adds up `rows` rows of a batch.
UPFOLD_DEVICE void store_batch(const EightJob& job, const EightShares& shares, const EightWalk& walk, std::int32_t first,
                               std::int32_t rows, std::int32_t channel, float* x) {
  static_assert(kEightThreads == kBatch * kUnits * kEightChannels, "an element of x for every thread");
  const std::int32_t c = std::int32_t(threadIdx.x) % kEightChannels, column = std::int32_t(threadIdx.x) / kEightChannels % kUnits;
  const std::int32_t row = std::int32_t(threadIdx.x) / (kEightChannels * kUnits);
  if (row >= rows || column >= kOwned || walk.iw + column >= job.problem.axis[2].in_end) return;
  const float sum = (shares[row][column][0][0][c] + shares[row][column][1][0][c]) +
                    (shares[row][column + 1][0][1][c] + shares[row][column + 1][1][1][c]);
  const DepthwiseStrides& s = job.problem.x;
  x[walk.to + channel + c + (first + row) * s.axis[1] + column * s.axis[2]] = sum;
}

__global__ void __launch_bounds__(kEightThreads, 1)
    depthwise_last_eight_kernel(const EightJob job, const float* __restrict__ y, const float* __restrict__ w,
                                float* __restrict__ x) {
  take_turn();
  __shared__ EightShares shares[2];
  const DepthwiseJob& p = job.problem;
  const std::int32_t lane = std::int32_t(threadIdx.x) % 32, warp = std::int32_t(threadIdx.x) / 32;
  const std::int32_t phase = lane % kEight, vector = lane / kEight, unit = warp % kUnits, half = warp / kUnits;
  std::uint32_t part = blockIdx.x;
  const std::int32_t channel = std::int32_t(take(job.groups, part)) * kEightChannels, own = channel + vector * kC;
  const std::uint32_t begin = part * job.length, end = min(job.steps, begin + job.length);
  float taps[kHalf][2][2][kC];
#pragma unroll
  for (int i = 0; i < kHalf * 4 * kC; ++i) {
    const int c = i % kC, m = i / kC % 2, mh = i / (kC * 2) % 2, ph = i / (kC * 4);
    taps[ph][mh][m][c] =
        widen(w[(own + c) * p.w.n + (half * kHalf + ph + mh * kEight) * p.w.axis[1] + (phase + m * kEight) * p.w.axis[2]]);
  }
  std::int32_t batch = 0;
#pragma unroll 1
  for (std::uint32_t at = begin; at < end;) {
    const EightWalk walk = eight_walk(job, at, end, own, unit, half * kHalf, phase);
    at += std::uint32_t(walk.rows);
    const float* of = y + walk.of;
    std::int32_t oh = walk.oh;
    LaneVector<float, kC> next[kHalf];
#pragma unroll
    for (int ph = 0; ph < kHalf; ++ph) next[ph].load(of + ph * p.y.axis[1], walk.there && inside(oh + ph, walk.out_count));
    float below[2 * kC] = {};  // of the row that the next step finishes
#pragma unroll 1
    for (std::int32_t step = 0; step <= walk.rows; ++step) {
      of += kEight * p.y.axis[1], oh += kEight;
      float done[2 * kC];
#pragma unroll
      for (int i = 0; i < 2 * kC; ++i) done[i] = below[i], below[i] = 0.0f;
#pragma unroll
      for (int ph = 0; ph < kHalf; ++ph) {
        float four[kC];
        next[ph].widen(four);
        const bool there = walk.there && inside(oh + ph, walk.out_count) && step < walk.rows;
        next[ph].load(of + ph * p.y.axis[1], there);
#pragma unroll
        for (int i = 0; i < 2 * kC; ++i) {
          add_product(done[i], four[i % kC], taps[ph][1][i / kC][i % kC]);
          add_product(below[i], four[i % kC], taps[ph][0][i / kC][i % kC]);
        }
      }
      if (step == 0) continue;
      add_halves<kHalf>(done);  // lane `phase` has element `phase`
      const std::int32_t row = (step - 1) % kBatch;
      shares[batch % 2][row][unit][half][phase / kC][vector * kC + phase % kC] = done[0];
      if (row + 1 < kBatch && step < walk.rows) continue;
      __syncthreads();  // the batch is complete, and the one before has been read
      store_batch(job, shares[batch % 2], walk, step - 1 - row, row + 1, channel, x);
      ++batch;
    }
  }
}

}  // namespace upfold::cuda

#ifndef __CUDACC_RTC__
#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {

// In 16 bits the sums across lanes take as long as the reads, and the wide kernels of depthwise_input.cu are as fast (H200).
bool depthwise_last_eight_fits(const Problem& p) {
  return p.dtype == Dtype::kFloat32 && last_is(p, kEight, 2 * kEight, kEight, 2 * kEight) && p.kernel_d == 1 && p.stride_d == 1 &&
         depthwise_last_vectors(p) && p.in_channels % kEightChannels == 0;
}

bool depthwise_last_eight(const Launch& launch, const Problem& p, const DepthwiseOperands& operands) {
  EightJob job{};
  job.problem = depthwise_job(p);
  const std::int64_t groups = p.in_channels / kEightChannels, column_blocks = ceil_div(p.in_w, kOwned);
  const std::int64_t steps = p.in_h * column_blocks * p.in_d * p.batch;
  const std::int64_t wanted = std::max<std::int64_t>(1, kMultiprocessors / groups);
  const std::int64_t length = std::max(ceil_div(steps, wanted), std::min(p.in_h, kFewestSteps));
  job.groups = make_divisor(groups), job.rows = make_divisor(p.in_h), job.column_blocks = make_divisor(column_blocks);
  job.depth = make_divisor(p.in_d), job.steps = std::uint32_t(steps), job.length = std::uint32_t(length);
  const unsigned blocks = unsigned(groups * ceil_div(steps, length));
  launch_in_turn("depthwise", depthwise_last_eight_kernel, launch, blocks, kEightThreads, job,
                 static_cast<const float*>(operands.y), static_cast<const float*>(operands.w), static_cast<float*>(operands.x));
  return true;
}

}  // namespace upfold::cuda
#endif
