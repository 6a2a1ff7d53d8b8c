// What the CPU module offers: pointers, a Problem and a thread count in, nothing of Python or torch. All functions are pure in
// their arguments, thread-safe, and deterministic: the same input gives the same bits for any number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../columns.h"
#include "../problem.h"

namespace upfold::cpu {

// Element type of a column matrix. 16-bit problems use float32 columns inside `gemm`, and their own dtype in fold/unfold, so it
// is named beside the Problem.
//
// y[n, oc, out] = activation(bias[oc] + sum of the columns that reach it). `bias` may be null. Sums are taken in float32 for
// 16-bit types, in the type itself otherwise, over the taps in ascending order. Uses p.y strides; p.x and p.w are ignored.
void col2im(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns, const void* bias, void* y,
            int threads);

// columns = the patches of y (0 where a tap falls outside), the adjoint of col2im. Uses p.y strides; fills the whole block.
void im2col(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y, void* columns, int threads);

// The direct method: loops over the taps of each phase, no column matrix. p.op says which of x, w, y is written; bias and
// p.activation are used by kConvTranspose only. `workspace` holds direct_workspace_bytes(p, threads) bytes, aligned to 64.
struct Operands {
  void* x;
  void* w;
  const void* bias;  // (out_channels), dense, or null
  void* y;
  void* workspace;
};
std::int64_t direct_workspace_bytes(const Problem& p, int threads);
void direct(const Problem& p, const Operands& operands, int threads);

// The fused method, for float32 and 16-bit types; operands and workspace as above.
// fused_workspace_bytes is -1 where a tile of the input would not fit a thread's scratch.
std::int64_t fused_workspace_bytes(const Problem& p, int threads);
void fused(const Problem& p, const Operands& operands, int threads);

// A weight of kConvTranspose may be packed once for many calls, of other sizes of x too. What the copy's layout hangs on, equal
// for two problems exactly where a copy made for one serves the other; the first entry is its bytes, aligned to 64.
std::vector<std::int64_t> fused_packing(const Problem& p, int threads);
void fused_pack(const Problem& p, const void* w, void* packed, int threads);
// As fused(), with the copy for the workspace; w is read where it holds Inf or NaN.
void fused_packed(const Problem& p, const Operands& operands, int threads);

// The instruction set in use: "avx512", "avx2" or "portable". UPFOLD_CPU_ISA lowers it.
std::string instruction_set();

// "openmp" or "std::thread".
std::string threading();

}  // namespace upfold::cpu
