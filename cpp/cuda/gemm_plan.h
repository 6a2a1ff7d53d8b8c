// How one call of `gemm` is cut into blocks of columns, and where everything lies in its workspace: a pure function of the
// problem, the options and the size of cuBLAS's own workspace, which what is chosen then makes smaller.
#pragma once

#include <memory>
#include <vector>

#include "../columns.h"
#include "../problem.h"
#include "api.h"
#include "gemm_layout.h"
#include "gemm_window.h"
#include "to_planes.h"

namespace upfold::cuda {

class ChosenProducts;

// What decides how operands are laid out: pixels of a sample below which samples are joined into one product, and input channels
// from which a TF32 product gains by a copy of the weight with the summed index in front.
constexpr std::int64_t kSmallMap = 256, kDeepProduct = 256;

// Bytes of a part of the workspace, rounded up so that the next one is aligned.
inline std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

inline bool is_narrow(Dtype dtype) { return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16; }
inline Dtype sum_dtype(Dtype dtype) { return is_narrow(dtype) ? Dtype::kFloat32 : dtype; }

// One block: a range of output channels (whole groups, or a part of one), of samples, and of the split axis.
struct GemmBlock {
  ColumnBlock columns;
  std::int64_t samples, pixels;  // input positions of one sample
  std::int64_t first_group, groups;
  std::int64_t first_row, rows;    // of the weight's (oc, tap) axis, in every group of the block
  bool first_of_sum, last_of_sum;  // of the blocks that add to the same part of the result
};

struct GemmPlan {
  Window window;       // of x, where the product runs over windows; blocks are those of `window.reduced` then
  bool possible;       // false: not even the smallest block fits the cap
  Dtype column_dtype;  // of the column matrix
  Dtype stage_dtype;   // the result's where one product has all of its sum, else the compute type
  bool to_result;      // the product is the result: no blocks, no columns
  bool finishes;       // but for bias and activation: it goes through the workspace then, as columns do
  bool outer;          // a group has one input channel: columns are an outer product, which cuBLAS is slow at
  bool tap_rows;       // the weight lies as (in_channels, taps, out_channels), and rows of columns in that order; of whole blocks
  bool repack_weight;  // to (in_channels, out_channels / groups, taps), dense
  bool deep_weight;    // or to (out_channels / groups, taps, in_channels) in every group
  bool copy_x;         // blocks of x go through [channel][sample][pixel] in the workspace
  bool deep_x;         // or through [sample][pixel][channel]
  bool stage;          // the result is made in the workspace, in `stage_dtype`
  bool columns_are_y;  // one tap, nothing added: y lies as the columns would
  bool flat;           // a block is one product for all its samples
  std::int64_t parts;  // of the pixels of a sample, each with a sum of its own in the workspace; 0: one sum
  // Byte offsets into the workspace; cuBLAS has [0, cublas_bytes).
  std::int64_t cublas_bytes, weight_at, x_at, columns_at, stage_at, parts_at, total_bytes;
  std::vector<GemmBlock> blocks;
  // A gradient's y whose channels are innermost goes through planes in the workspace, at `planes_at`; `y` is how it lies there.
  bool to_planes;
  Pixels pixels;
  Strides y;
  std::int64_t planes_at;
  // How cuBLASLt runs its products; null, or not for all of them: cuBLAS does.
  std::shared_ptr<const ChosenProducts> chosen;
  // Channels are innermost throughout, and columns rows of them (im2row.h), or the pixels of y; there are no blocks.
  bool by_rows;
};

// `cublas_bytes`: what cuBLAS may take beside the rest, at most a quarter of the cap. `window`: without taps, none.
GemmPlan plan_blocks(const Problem& p, const Window& window, const GemmOptions& options, std::int64_t cublas_bytes);
GemmPlan plan_gemm(const Problem& p, const GemmOptions& options, std::int64_t cublas_bytes);
// Leaves cuBLAS `need` bytes; the other parts of the workspace move.
void take_cublas_bytes(GemmPlan& plan, std::int64_t need);

}  // namespace upfold::cuda
