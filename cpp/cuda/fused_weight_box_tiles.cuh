// The tiles of the fused gradient of the weight whose operands the copy engine brings (fused_weight_boxes.cuh), and what else
// some of their kernels do.
#pragma once

namespace upfold::cuda {

// Taps of a unit, input channels of a block, its warpgroups that multiply, blocks of a multiprocessor.
template <int kTaps_, int kChannels_, int kWarpgroups_, int kBlocks_>
struct FusedWeightBoxTile {
  static constexpr int kTaps = kTaps_, kChannels = kChannels_, kBlocks = kBlocks_;
  static constexpr int kColumns8 = kChannels / 8, kWarps = 4 * kWarpgroups_;
  // Of the warp that copies, and of three idle ones beside it where it gives registers back: only a warpgroup does that.
  static constexpr bool kSharesRegisters = kBlocks == 1;
  static constexpr int kThreads = 32 * kWarps + (kSharesRegisters ? 128 : 32);
  static constexpr int kCopyRegisters = 40, kMultiplyRegisters = 232;
  static_assert(!kSharesRegisters || kWarpgroups_ == 2, "what a launch gives, shared out anew");
  static constexpr bool kShares = false, kCuts = false, kAdds = false;
};
// The same, where two blocks of a cluster, neighbouring tiles of input channels, share y: each has half of it copied to both.
template <typename Tile>
struct FusedWeightSharing : Tile {
  static constexpr bool kShares = true;
};
// The same, where columns behind a row of y are those of the next one: x has zeros there, which would make a NaN of a NaN.
template <typename Tile>
struct FusedWeightCutting : Tile {
  static constexpr bool kCuts = true;
};
// The same, where the blocks of a cluster, of parts of one tile, add their sums up. (In the kernels of all tiles the question
// whether they do took some of these 8 % longer.)
template <typename Tile>
struct FusedWeightAdding : Tile {
  static constexpr bool kAdds = true;
};
// Those of most channels, which there are both of: y is most of what their blocks read.
template <typename Tile>
constexpr bool kWeightIsWide = Tile::kChannels >= 128;

}  // namespace upfold::cuda
