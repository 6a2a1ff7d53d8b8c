// What module_tiles.cpp calls of the fused method for few channels and for small maps: tiles that read operands as they lie. The
// forward takes one launch and no workspace.
#pragma once

#include "api.h"

namespace upfold::cuda {

// Tile choices of the fused method whose columns stay in shared memory: warpgroups of a block.
std::vector<int> fused_columns_tiles();
// Whether choice number `config` runs this problem on the device (kConvTranspose of float16, bfloat16, or float32 rounded to
// TF32, with few taps times output channels, on compute capability 9.0); `alignment` bytes, at most 16, divide the address of x.
bool fused_columns_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct ColumnsPlan;
// What a choice launches: blocks, and how many of a multiprocessor; walks of a block, steps of one, products of 32 bytes of
// channels in a step, and turns in which its threads store; bytes of x that all copy.
struct FusedColumnsWork {
  std::int64_t blocks, resident, walks, steps, products, turns, copied;
};
// The transposed convolution of few output channels in one launch, bias and activation included, without a workspace. Planned
// once, then the same for any operands and by any thread.
class FusedColumnsCall {
 public:
  FusedColumnsCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedColumnsWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Problem problem_;
  std::shared_ptr<const ColumnsPlan> plan_;  // null: nothing to do
};

// Tile choices of the fused method whose rows are units and whose columns are pairs of a channel and a phase: columns of a block.
std::vector<int> fused_units_tiles();
// Whether choice number `config` runs this problem on the device (kConvTranspose of float16, bfloat16, or float32 rounded to
// TF32, whose kernel is a multiple of its stride, on compute capability 9.0).
bool fused_units_fits(int device, const Problem& p, int config);
struct UnitsPlan;
// What a choice launches: blocks, and how many of a multiprocessor; tiles of 64 places of a block, vectors that each of its
// threads fills in, and products of a tile.
struct FusedUnitsWork {
  std::int64_t blocks, resident, tiles, filled, products;
};
// The transposed convolution of few input channels and a long stride in one launch, bias and activation included, without a
// workspace. Planned once, then the same for any operands and by any thread.
class FusedUnitsCall {
 public:
  FusedUnitsCall(int device, const Problem& p, int config);
  FusedUnitsWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Problem problem_;
  std::shared_ptr<const UnitsPlan> plan_;  // null: nothing to do
};

// Tile choices of the fused method of whole maps: columns of a tile.
std::vector<int> fused_maps_tiles();
// Whether choice number `config` runs this problem on the device (kConvTranspose of float16 or bfloat16, whose kernel is a
// multiple of its stride, with maps of few pixels that lie in planes, on compute capability 9.0); `alignment` bytes, at most 16,
// divide the addresses of x, w and y.
bool fused_maps_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct MapsPlan;
// What a choice launches: tiles; chunks of channels of one, bytes that are copied for each, positions of outputs, and cycles of a
// chunk's products.
struct FusedMapsWork {
  std::int64_t tiles, chunks, copied, positions, cycles;
};
// The transposed convolution of small maps in one launch, bias and activation included, without a workspace. Planned once, then
// the same for any operands and by any thread.
class FusedMapsCall {
 public:
  FusedMapsCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedMapsWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Problem problem_;
  std::shared_ptr<const MapsPlan> plan_;  // null: nothing to do
};

// Tile choices of the fused method of heads: pixels of a row, at the most.
std::vector<int> fused_heads_tiles();
// Whether choice number `config` runs this problem on the device (kConvTranspose of one to four channels from planes, kernel 4
// and stride 2 on two axes, on compute capability 9.0); `alignment` bytes, at most 16, divide the addresses of x, w and y.
bool fused_heads_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct HeadsPlan;
// What a choice launches: blocks, warps of one, runs that a warp takes in turn, units of a run, products of a unit, and bytes of
// a row of x.
struct FusedHeadsWork {
  std::int64_t blocks, warps, turns, units, products, row_bytes;
};
// The transposed convolution of heads in one launch, bias and activation included, without a workspace. Planned once, then the
// same for any operands and by any thread.
class FusedHeadsCall {
 public:
  FusedHeadsCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedHeadsWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Problem problem_;
  std::shared_ptr<const HeadsPlan> plan_;  // null: nothing to do
};

// Tile choices of the fused method for maps of one pixel: columns of a block, which are pairs of a channel and a tap.
std::vector<int> fused_point_tiles();
// Whether choice number `config` runs this problem on the device (kConvTranspose of float32, float16 or bfloat16, from one pixel
// to outputs that all have a tap, with a weight whose rows are dense); `alignment` bytes, at most 16, divide the address of w.
bool fused_point_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct PointPlan;
// What a choice launches: blocks, channels of x that each loads, in whole steps, and samples of one.
struct FusedPointWork {
  std::int64_t blocks, rows, samples;
};
// The transposed convolution of maps of one pixel in one launch, bias and activation included, without a workspace. Planned once,
// then the same for any operands and by any thread.
class FusedPointCall {
 public:
  FusedPointCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedPointWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_;
  Dtype dtype_;
  std::shared_ptr<const PointPlan> plan_;  // null: nothing to do
};

// Tile choices of the gradient of the input of maps of one pixel: rows of the weight of a block.
std::vector<int> fused_point_input_tiles();
// Whether choice number `config` runs this problem on the device (kConv of float32, float16 or bfloat16, to one pixel, with a
// weight whose rows are dense); `alignment` bytes, at most 16, divide the address of w.
bool fused_point_input_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct PointInputPlan;
// The gradient in one launch, without a workspace. Planned once, then the same for any operands and by any thread.
class FusedPointInputCall {
 public:
  FusedPointInputCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedPointWork work() const;  // blocks, rows of the weight and samples of one
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_;
  Dtype dtype_;
  std::shared_ptr<const PointInputPlan> plan_;
};

// Tile choices of the gradient of the input by taps that are laid out in shared memory: rows and pixels of a tile.
std::vector<std::pair<int, int>> fused_laid_tiles();
// Whether choice number `config` runs this problem on the device (kConv of float32 rounded to TF32, float16 or bfloat16, of one
// group, with a kernel two or four taps wide, of a power of two in all, and rows of y that follow one another, on compute
// capability 9.0); `alignment` bytes, at most 16, divide the addresses of x, w and y.
bool fused_laid_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct LaidPlan;
// What a choice launches: tiles, chunks of one, parts of the reduction, stages.
struct FusedLaidWork {
  std::int64_t tiles, chunks, splits, stages;
  bool beside;  // whether taps may lie beside the plane and pixels are laid out one by one
};
// The gradient in one launch, with nothing packed and without a workspace. Planned once, then the same for any operands and by
// any thread.
class FusedLaidCall {
 public:
  FusedLaidCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedLaidWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  Dtype dtype_;
  std::shared_ptr<const LaidPlan> plan_;
};

// Tile choices of the fused method's gradients of small layers: blocks that a multiprocessor has at once.
std::vector<int> fused_small_tiles();
// Whether choice number `config` runs this problem (kConv, kConvTransposeWeight of float32 rounded to TF32, float16 or bfloat16,
// on compute capability 8.0 and newer): one group, no padding, a kernel as long as its stride that is two along the width, and
// pixels that lie next to one another, of whole vectors of 8 bytes a row; `alignment` bytes, at most 16, divide all addresses.
bool fused_small_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct SmallPlan;
// What a choice launches: blocks, and steps of the reduction of a warp.
struct FusedSmallWork {
  std::int64_t blocks, steps;
};
// The gradient in one launch, without a workspace. Planned once, then the same for any operands and by any thread.
class FusedSmallCall {
 public:
  FusedSmallCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedSmallWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  bool input_;
  Dtype dtype_;
  std::shared_ptr<const SmallPlan> plan_;
};

// Tile choices of the fused method for windows: channels of the result that a block has.
std::vector<int> fused_window_tiles();
// Whether choice number `config` runs this problem (kConvTranspose and kConv of float32 rounded to TF32, float16 or bfloat16, on
// compute capability 8.0 and newer): strides of 1, rows whose elements follow one another, and a patch and a tile's weight that
// have room in shared memory; `alignment` bytes, at most 16, divide all addresses.
bool fused_window_fits(int device, const Problem& p, int config, std::int64_t alignment);
struct WindowPlan;
// What a choice launches: blocks, one of a multiprocessor at a time; of a block, pixels times chunks of channels that it loads,
// taps times chunks of which it lays out the weight, and those that a warp multiplies.
struct FusedWindowWork {
  std::int64_t blocks, loaded, laid, steps;
};
// The transposed convolution, bias and activation included, or the gradient of its input, in one launch, without a workspace.
// Planned once, then the same for any operands and by any thread.
class FusedWindowCall {
 public:
  FusedWindowCall(int device, const Problem& p, int config, std::int64_t alignment);
  FusedWindowWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_, config_;
  std::int64_t alignment_;
  Problem problem_;
  std::shared_ptr<const WindowPlan> plan_;  // null: nothing to do
};

struct GroupsPlan;
// What the call launches: tiles, blocks; of a tile the loads of y and the products of eight input channels; turns in which a
// block lays out its weight; output channels of a product's tile.
struct FusedGroupsWork {
  std::int64_t tiles, blocks, loads, products, packs, channels;
};
// The gradient of the input or of the weight of layers with few channels in a group (kConv, kConvTransposeWeight of float16,
// bfloat16, or float32 rounded to TF32, on compute capability 8.0 and newer): at most 32, and 64 input channels for the weight's,
// which wants x in rows of whole vectors where there are more than 16. Planned once, then the same for any operands and by any
// thread.
class FusedGroupsCall {
 public:
  // `alignment` bytes, at most 16, divide the address of y; the partial sums stay below the cap.
  FusedGroupsCall(int device, const Problem& p, std::int64_t alignment, std::int64_t workspace_cap);
  std::int64_t workspace_bytes() const;  // -1: they do not run this problem under this cap
  FusedGroupsWork work() const;
  void run(const FusedOperands& operands, std::uintptr_t stream) const;

 private:
  int device_;
  std::int64_t alignment_;
  Problem problem_;
  std::shared_ptr<const GroupsPlan> plan_;  // null: it does not run
};

}  // namespace upfold::cuda
