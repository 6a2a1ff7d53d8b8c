// What the CUDA module offers: a Problem, device pointers, a device and a stream in, nothing of Python or torch. Every function
// only enqueues work on the stream, allocates nothing, and throws on a refused call; the same input gives the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../columns.h"
#include "../problem.h"

namespace upfold::cuda {

inline std::int64_t element_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
      return 2;
    case Dtype::kFloat32:
      return 4;
    case Dtype::kFloat64:
    case Dtype::kComplex64:
      return 8;
    default:
      return 16;
  }
}

// Of the type that sums are kept in.
inline std::int64_t sum_bytes(Dtype dtype) { return element_bytes(dtype) < 4 ? 4 : element_bytes(dtype); }

// Where a call runs. The device is set for the call and restored after it; `stream` is a cudaStream_t of that device.
struct Launch {
  std::int32_t device;
  std::uintptr_t stream;
};

// y[n, oc, out] = activation(sum of the columns that reach it + bias[oc]), in gather form: each output has one writer and sums
// its taps in ascending order, in float32 for 16-bit types and in the type itself otherwise. `bias` may be null. `column_dtype`
// is the Problem's dtype, or float32 when that is a 16-bit type. Uses p.y strides; p.x and p.w are ignored.
void col2im(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns,
            const void* bias, void* y);

// The rows of columns in any order: elements between the rows of neighbouring channels, and of neighbouring taps on each axis.
struct ColumnStrides {
  std::int64_t channel, tap_d, tap_h, tap_w;
};
ColumnStrides dense_strides(const Problem& p, const ColumnBlock& block);  // the order that ColumnBlock describes
void col2im(const Launch& launch, const Problem& p, const ColumnBlock& block, const ColumnStrides& strides, Dtype column_dtype,
            const void* columns, const void* bias, void* y);

// columns = the patches of y (0 where a tap falls outside), the adjoint of col2im; fills the whole block.
void im2col(const Launch& launch, const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y, void* columns);

// The same sums by atomic additions, one for each column, in an order that changes from run to run; columns have the type of the
// sums (float32 for a 16-bit problem). `staging` holds one float32 for each output of the block when the problem is 16-bit, and
// is not used otherwise. The block's outputs are set by this call alone.
struct ScatterOperands {
  const void* columns;
  const void* bias;  // (out_channels), dense, or null
  void* y;
  void* staging;
};
void col2im_atomic(const Launch& launch, const Problem& p, const ColumnBlock& block, const ScatterOperands& operands);

// Row r lies at r * from_row, and goes to r * to_row; distances in elements.
struct Rows {
  std::int64_t rows, columns, from_row, to_row;
};
// Rows of a real type as they are, or their ReLU, which leaves NaN: what a concatenation takes beside results of ours. Less than
// 2^31 accesses, of 16 bytes where distances and addresses allow it, else of an element.
void copy_rows(const Launch& launch, Dtype dtype, const Rows& rows, bool relu, const void* from, void* to);

// What the product of the forward makes: columns of every tap, or, where taps follow one another along w, their sums over windows
// of x, laid out apart or as residues (gemm_window.h). kBest chooses; a form that cannot be falls back to columns.
enum class GemmForm : std::int32_t { kBest, kColumns, kWindows, kResidues };

struct GemmOptions {
  std::int64_t workspace_cap;  // bytes; no call takes more
  std::int64_t chunk_bytes;    // what a block of columns aims at, 0: the cap
  bool allow_tf32;             // float32 operands may be rounded to TF32
  bool atomic;                 // col2im by atomic additions
  bool has_bias;               // of every call
  GemmForm form;
  bool given_columns = false;   // those of y are another call's: none are made, and there is no room for them
  std::int64_t alignment = 16;  // bytes that divide the addresses of x, w and y, at most 16
};
struct GemmOperands {
  void* x;
  void* w;
  const void* bias;  // (out_channels), dense, or null
  void* y;
  void* workspace;           // workspace_bytes() of the call, aligned to 256
  void* columns = nullptr;   // where they are given
  void* products = nullptr;  // what cuBLAS works in, elsewhere than at the workspace's begin
};

// Creates what the device needs for `gemm` on this thread (a cuBLAS handle). A first call inside a stream capture needs no
// preparation either; a prepared one allocates nothing.
void gemm_prepare(int device);
struct GemmPlan;
// GEMM + col2im for p.op = kConvTranspose (bias and activation in the same pass), im2col + GEMM for its adjoints. Deterministic
// unless `atomic`. 16-bit problems sum in float32 and round once. Planned once, then the same for any operands and by any thread.
class GemmCall {
 public:
  GemmCall(int device, const Problem& p, const GemmOptions& options);
  // What a call needs, or -1 where the cap does not hold the smallest block.
  std::int64_t workspace_bytes() const;
  void run(const GemmOperands& operands, std::uintptr_t stream) const;
  const GemmPlan* plan() const { return plan_.get(); }

 private:
  int device_;
  Problem problem_;
  GemmOptions options_;
  std::shared_ptr<const GemmPlan> plan_;  // null: nothing to do
};

struct DirectOperands {
  void* x;
  void* w;
  const void* bias;  // (out_channels), dense, or null
  void* y;
  void* workspace;  // direct_workspace_bytes() bytes, aligned to 256
};
// Tile choices of the direct method: result channels and positions of one block, for kConvTranspose and kConv.
struct DirectTile {
  int channels, pixels;
};
std::vector<DirectTile> direct_tiles();
// Whether choice number `config` runs this problem; kConvTransposeWeight has choices of its own (direct_weight.cu).
bool direct_fits(const Problem& p, int config);
std::int64_t direct_workspace_bytes(const Problem& p, int config);
// What choice number `config` launches for kConvTranspose and kConv: blocks, and steps of the reduction of each.
struct DirectWork {
  std::int64_t blocks, steps;
};
DirectWork direct_work(const Problem& p, int config);
// The direct method for p.op, without a column matrix; bias and activation are used by kConvTranspose only.
void direct(const Launch& launch, const Problem& p, const DirectOperands& operands, int config);

struct DepthwiseOperands {
  void* x;
  void* w;
  const void* bias;  // (out_channels), dense, or null
  void* y;
  void* workspace;  // depthwise_workspace_bytes() bytes, aligned to 256
};
// One input channel in each group, of float32, float16 or bfloat16. Choice 0 is for the usual kernels, choice 1 takes every one.
bool depthwise_fits(const Problem& p, int config);
std::int64_t depthwise_workspace_bytes(const Problem& p, int config);
// The depthwise method for p.op; bias and activation are used by kConvTranspose only.
void depthwise(const Launch& launch, const Problem& p, const DepthwiseOperands& operands, int config);

struct FusedOperands {
  const void* x;
  const void* w;
  const void* bias;  // (out_channels), dense, or null
  void* y;
  void* workspace;  // FusedCall::workspace_bytes() bytes, aligned to 256; less by packed_bytes() where `packed` is given
  // What FusedCall::pack made of w: packed_bytes() bytes, aligned to 256; w is not read then. Null: the call packs w itself.
  void* packed = nullptr;
};
// Tile choices of the fused method: output channels, phases of height and width, units, vectors of 16 bytes of input channels in
// one step, and threads of one block; and blocks of a multiprocessor. Where kernel and stride are equal, a tile without phases
// has output channels times taps. Tiles of warpgroups (compute capability 9.0 alone) also name the products of one row of units,
// the groups of 8 units of each; those whose rows are pixels the bytes of the sums that they stage; elsewhere these are 0. Tiles
// whose rows are pairs of a channel and a phase have as many rows as channels.
struct FusedTileSize {
  int channels, phases_h, phases_w, units, vectors, threads, blocks;
  int products, product_groups, staged_bytes;
  bool pixels, whole, packed_inputs;  // whole: only where every shift has a tap in every phase
  bool phase_rows = false;
};
std::vector<FusedTileSize> fused_tiles();
// Whether choice number `config` runs this problem on the device (kConvTranspose of float16, bfloat16, or float32, which is
// rounded to TF32 unless it has to be `exact`); `alignment` bytes, at most 16, divide the address of x.
bool fused_fits(int device, const Problem& p, int config, std::int64_t alignment, bool exact);
struct FusedPlan;
struct PhasePlan;
// What a choice launches: tiles, of a part of the reduction each; steps of the reduction in one; inputs that a tile reads, and
// parts that the reduction is cut into. Of rows that are pairs of a channel and a phase: tiles, products of each group of rows
// and units, copies, and blocks. All 0 where kernel and stride are equal.
struct FusedWork {
  std::int64_t tiles, steps, patch, parts;
};
// The transposed convolution in one pass on tensor cores (compute capability 8.0 and newer), bias and activation included.
// Planned once, then the same for any operands and by any thread.
class FusedCall {
 public:
  // Where the copy of x that some choices make is beyond the cap, the samples run in parts.
  FusedCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap, bool exact);
  std::int64_t workspace_bytes() const;
  FusedWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

  // A weight may be packed once for many calls, of other sizes of x too: the bytes of that copy, 0 where the kernels read w as it
  // lies; what its layout hangs on, equal for two calls exactly where a copy made by one serves the other; and the packing.
  std::int64_t packed_bytes() const;
  std::vector<std::int64_t> packing() const;
  void pack(const void* w, void* packed, std::uintptr_t stream) const;

 private:
  int device_, config_;
  std::int64_t alignment_;
  bool exact_;
  Problem problem_;
  std::shared_ptr<const FusedPlan> plan_;  // null: nothing to do, nothing to plan, or
  std::shared_ptr<const PhasePlan> phases_;
};

struct FusedInputOperands {
  const void* y;
  const void* w;
  void* x;
  void* workspace;  // FusedInputCall::workspace_bytes() bytes, aligned to 256
};
// Tile choices of the fused gradient of the input: pixels and input channels of one block, and how it reads taps (InputReads).
struct FusedInputTile {
  int pixels, channels, reads;
};
std::vector<FusedInputTile> fused_input_tiles();
// Whether choice number `config` runs this problem on the device (kConv of float16, bfloat16, or float32 rounded to TF32, with
// y's rows in order, on compute capability 9.0); `alignment` bytes, at most 16, divide the address of y.
bool fused_input_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct InputPlan;
// What a choice launches: tiles, and others whose reduction is cut into so many parts; steps of the reduction of a tile; bytes
// of y that it copies, in runs of `grain`; whether a block keeps its weights, stores results while it multiplies the next, and
// adds its parts in a cluster.
struct FusedInputWork {
  std::int64_t whole, split, parts, steps, copied, grain;
  bool resident, later, clustered;
};
// The gradient of the input in one pass. Planned once, then the same for any operands and by any thread.
class FusedInputCall {
 public:
  FusedInputCall(int device, const Problem& p, int config, std::int64_t alignment);
  std::int64_t workspace_bytes() const;
  FusedInputWork work() const;
  void run(const FusedInputOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  std::int64_t alignment_;
  Problem problem_;
  std::shared_ptr<const InputPlan> plan_;  // null: nothing to do
};

// Tile choices of the fused method by boxes of channels, which are packed where they are not innermost: positions, columns of a
// product, phases and vectors of 16 bytes of channels of one block, and blocks of a multiprocessor.
struct FusedLastTile {
  int rows, columns, phases, blocks, vectors;
};
std::vector<FusedLastTile> fused_last_tiles();
// Whether choice number `config` runs this problem on the device (kConvTranspose and kConv of float16, bfloat16, or float32
// rounded to TF32, on compute capability 9.0); `alignment` bytes, at most 16, divide the address of what it reads.
bool fused_last_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct LastPlan;
// What a choice launches: tiles; products of 64 positions in each warpgroup's share of a tile, and bytes of the source that it
// copies, on average; whether the weights stay; in how many parts the reduction is split, each a tile of its own; bytes of the
// weights and of the source that are packed first; whether lanes store results in planes that the copy engine cannot store; and
// how many blocks share the weights that they copy.
struct FusedLastWork {
  std::int64_t tiles;
  double products, copied;
  bool resident;
  std::int64_t splits, packed, source;
  bool loose;
  std::int64_t sharers;
};
// The transposed convolution, bias and activation included, or the gradient of its input, in one pass. Planned once, then the
// same for any operands and by any thread.
class FusedLastCall {
 public:
  // Where the copy of the source that it may need is beyond the cap, the samples run in parts.
  FusedLastCall(int device, const Problem& p, int config, std::int64_t alignment, std::int64_t workspace_cap);
  std::int64_t workspace_bytes() const;
  FusedLastWork work() const;
  // Of the gradient x is what is read, y, and y what is written, x.
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

  // As of FusedCall.
  std::int64_t packed_bytes() const;
  std::vector<std::int64_t> packing() const;
  void pack(const void* w, void* packed, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Problem problem_;
  std::shared_ptr<const LastPlan> plan_;  // null: nothing to do
};

struct Device {
  std::string name;
  int major, minor;
  int multiprocessors;
  std::int64_t memory_bytes;
};

// What the module was built for and what it finds on this machine; never throws, works with no driver.
struct Info {
  int compiled_version;       // 1000 * major + 10 * minor, of the toolkit
  std::string architectures;  // as given to nvcc, separated by blanks
  int runtime_version;        // of the static runtime inside the module
  int driver_version;         // newest CUDA that the driver speaks, 0 with no driver
  std::string driver_floor;   // oldest driver branch that loads this module
  std::vector<Device> devices;
  std::string no_device_reason;  // empty when there are devices
};
Info info();

}  // namespace upfold::cuda
