// The planner of the fused method by boxes of channels; host code, for one source.
#pragma once

#include "fused_last_alternate.cuh"
#include "fused_last_pack_plan.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kLastStageBytes = 16 << 10;  // of weights that one copy brings, where pairs are small
constexpr std::int64_t kLastAimBlocks = 132;        // where the reduction can be split
constexpr double kLeastSplit = 8;                   // products of a part of the reduction
// Cycles (H200): of a product over those that it takes by itself, and of one beside them; of blocks that wait for each other, and
// of 16 bytes of sums that a thread has from another block.
constexpr double kSplitProduct = 1.3, kSplitPair = 60, kSplitWait = 2000, kSplitSum = 20;
constexpr double kLeastKeeping = 0.9;               // of the blocks at once, where each keeps its weights
constexpr std::int64_t kLeastAhead = 3;             // patches beside weights that stay
constexpr std::int64_t kLeastSharing = 3;           // tiles of a block, where pairs of blocks share weights
constexpr std::int64_t kLeastTransposedStages = 4;  // of weights, before planes are copied further ahead
constexpr std::int64_t kMostSplits = 8;             // blocks of a cluster
// Clusters come from groups of neighbouring multiprocessors: of an H200 at least so many of so many. Sixteen clusters of eight
// took two turns.
constexpr std::int64_t kGroupBlocks = 16, kGroups = 7;

// Lanes that exchange results take a tenth more time in large ones, which packing small weights does not: bytes of results up to
// which weights are copied as they lie, beside as many times their own (H200: k2 s2 of 33 MB 42 us packed and 46 as they lie, of
// 17 MB with weights of 4 MB 39 and 36; k4 s2 of 17 MB 54 and 51).
constexpr std::int64_t kMostLyingResults = 24 << 20, kMostLyingTimes = 4;

class LastPlanner : LastAlternator {
 public:
  LastPlanner(const Problem& p, const LastTileSize& tile, std::int64_t shared_bytes, std::int64_t alignment, std::int64_t cap)
      : LastAlternator(p, tile, shared_bytes, alignment % 16 == 0), cap_(cap) {}

  // `within_cap`: tiles of no more samples than are packed together under the cap, which some problems have none of.
  LastPlan plan(bool within_cap) {
    plan_.possible = sizes() && list_pairs() && choose(within_cap) && tables() && buffers() && weights();
    return plan_;
  }

 private:
  const std::int64_t cap_;

  bool choose(bool within_cap) {
    if (within_cap && !tile_.planes && !tile_.transposes && !lies_in_boxes()) {
      const std::int64_t sample = std::max<std::int64_t>(1, sample_bytes());
      most_samples_ = std::max<std::int64_t>(1, (cap_ - 16 * weight_vectors()) / sample);
    }
    return LastAlternator::choose();
  }
  std::int64_t columns() const { return result_channels() * (plan_.job.flat ? kernel_taps(p_) : 1); }
  std::int64_t column_tiles() const { return ceil_div(columns(), tile_.runs ? run_channels() : std::int64_t(tile_.columns)); }
  std::int64_t chunks() const { return ceil_div(source_values(), chunk()); }
  // Of the packed weight; of a pixel of the packed source, and bytes of one sample.
  std::int64_t weight_vectors() const {
    return p_.groups * column_tiles() * chunks() * std::int64_t(pairs_.size()) * tile_.columns * tile_.vectors;
  }
  std::int64_t pixel_vectors() const { return ceil_div(source_values() * p_.groups * element_, std::int64_t(16)); }
  std::int64_t sample_bytes() const { return 16 * pixel_vectors() * source_size_[0] * source_size_[1] * packed_row(); }

  bool tables() {
    LastJob& job = plan_.job;
    std::vector<std::size_t> ends;
    halo_of(best_.level, ends);
    const Triple patch = best_.patch();
    plan_.patches = std::int64_t(ends.size());
    job.in_turn = tile_.in_turn && order_in_turn(ends);
    std::size_t begin = 0;
    std::int64_t set = 0;
    for (std::size_t q = 0; q < ends.size(); ++q) {
      for (; set < pairs_[begin].set; ++set) job.first_patch[set + 1] = std::uint16_t(q);
      Triple low;
      for (int i = 0; i < 3; ++i) {
        low[i] = range(begin, ends[q], i).first;
        job.patch[q + 1].at[i] = std::int16_t(low[i] * source_step_[i] + (folded_ ? 0 : pairs_[begin].origin[i]));
      }
      if (folded_) {
        job.patch[q + 1].at[0] = std::int16_t(pairs_[begin].origin[1]);
        job.patch[q + 1].channel = std::int16_t(pairs_[begin].origin[2]);
      }
      job.patch[q + 1].end = std::uint16_t(ends[q]);
      for (std::size_t i = begin; i < ends[q]; ++i) {
        const Pair& pair = pairs_[i];
        const std::int64_t row =
            ((pair.shift[0] - low[0]) * patch[1] + pair.shift[1] - low[1]) * patch[2] + pair.shift[2] - low[2];
        job.pair[i] = std::uint32_t(row) | std::uint32_t(pair.phase) << 16 | std::uint32_t(pair.tap) << 20;
        plan_.pack.taps[i] = std::uint16_t(pair.tap);
      }
      begin = ends[q];
    }
    for (; set < sets_; ++set) job.first_patch[set + 1] = std::uint16_t(ends.size());
    plan_.patch_copied = tile_.transposes ? slice_bytes(best_) * tile_.vectors / kLastSliceVectors : best_.rows * chunk_bytes_;
    for (int product = 0; product < tile_.products; ++product) job.rows[product] = std::int16_t(row_of(first_position(product)));
    const bool stacked = !best_.is_dense() && (best_.box[2] == 8 || best_.beside > 1);
    job.group_pitch = std::int32_t(stacked ? patch[2] : 8);
    return positions();
  }
  // The pairs of each patch, one of each phase in turn, if all phases have as many of them in each.
  bool order_in_turn(const std::vector<std::size_t>& ends) {
    std::vector<Pair> ordered;
    std::size_t begin = 0;
    for (const std::size_t end : ends) {
      std::vector<std::vector<Pair>> of_phase(static_cast<std::size_t>(tile_.phases));
      for (std::size_t i = begin; i < end; ++i) of_phase[std::size_t(pairs_[i].phase)].push_back(pairs_[i]);
      for (const std::vector<Pair>& pairs : of_phase)
        if (pairs.size() != of_phase[0].size()) return false;
      for (std::size_t turn = 0; turn < of_phase[0].size(); ++turn)
        for (const std::vector<Pair>& pairs : of_phase) ordered.push_back(pairs[turn]);
      begin = end;
    }
    pairs_ = ordered;
    return true;
  }
  // Of products beside one another each has eight positions of a row, one above the other.
  std::int64_t first_position(std::int64_t product) const {
    return product / best_.beside * best_.beside * tile_.product + product % best_.beside * 8;
  }
  // The row of the patch where a position of the tile lies.
  std::int64_t row_of(std::int64_t number) const {
    if (best_.is_dense()) return number;
    const Triple patch = best_.patch(), &box = best_.box;
    const std::int64_t w = number % box[2], h = number / box[2] % box[1], d = number / box[2] / box[1] % box[0];
    return ((number / box[2] / box[1] / box[0] * patch[0] + d) * patch[1] + h) * patch[2] + w;
  }

  bool positions() {
    LastJob& job = plan_.job;
    std::int64_t tiles = 1;  // of as many samples as a tile has
    job.tile_n = make_divisor(best_.samples);
    for (int i = 0; i < 3; ++i) {
      const std::int64_t along = ceil_div(positions_[i], best_.box[i]);
      job.axis[i] = {make_divisor(best_.box[i]), make_divisor(along), std::int32_t(source_step_[i]),
                     std::int32_t(result_step_[i]), std::int32_t(result_size_[i])};
      tiles *= along;
    }
    tiles *= column_tiles() * sets_ * p_.groups;
    job.column_tiles = make_divisor(column_tiles()), job.sets = make_divisor(sets_), job.groups = make_divisor(p_.groups);
    job.channels = make_divisor(result_channels());
    job.kernel_h = make_divisor(p_.kernel_h), job.kernel_w = make_divisor(p_.kernel_w);
    job.batch = std::int32_t(p_.batch), job.columns = std::int32_t(columns());
    job.chunks = std::int32_t(chunks()), job.pairs = std::int32_t(pairs_.size());
    job.source_channels = std::int32_t(source_values());
    const Strides& r = result_strides();
    job.y_n = r.n, job.y_c = r.c, job.y_axis[0] = r.d, job.y_axis[1] = r.h, job.y_axis[2] = r.w;
    job.wide = ((r.n | r.d | r.h | r.w | result_channels()) * element_) % 16 == 0;
    job.activation = forward_ ? p_.activation : Activation::kNone, job.slope = p_.activation_slope;
    if (tile_.turned) store_turned();
    if (r.c != 1 && !tile_.turned && !tile_.to_planes && !tile_.runs) job.joined = joined();
    // Float32 of one phase too: two rows of 16 results of a warp are less than four of eight.
    if (job.joined == 1 && r.w == 1 && (result_step_[2] > 1 || element_ == 4)) job.staged = staged();
    job.paired = job.joined == 1 && element_ == 2 && result_step_[2] == 1 && r.w == 1 && best_.box[2] % 2 == 0 &&
                 (r.n | r.c | r.d | r.h) % 2 == 0;
    plan_.tiles_of_samples = tiles;
    const std::int64_t all = tiles * ceil_div(p_.batch, best_.samples);
    return all * kLastAimBlocks < kMostLastCount && split(all);
  }

  // Neighbouring phases of the width whose results are one aligned vector, as far as steps say.
  std::int32_t joined() const {
    const Strides& r = result_strides();
    const std::int64_t phases = forward_ ? std::min(p_.stride_w, p_.out_w) : 1, steps = r.n | r.c | r.d | r.h;
    for (const std::int64_t join : {4, 2}) {
      const bool whole = tile_.phases % join == 0 && phases % join == 0 && p_.stride_w % join == 0;
      if (whole && r.w == 1 && steps % join == 0 && join * element_ <= 16) return std::int32_t(join);
    }
    return 1;
  }

  // Phases of a set that lie in one row.
  std::int32_t staged() const {
    const std::int64_t in_row = row_phases_ % tile_.phases == 0 ? tile_.phases : row_phases_;
    return std::int32_t(in_row == 4 || in_row == 2 ? in_row : 1);
  }

  // How turned tiles store.
  void store_turned() {
    LastJob& job = plan_.job;
    const Strides& r = result_strides();
    const std::int64_t step = result_step_[2], steps = r.n | r.c | r.d | r.h;
    while ((2 << job.beside) <= best_.beside) ++job.beside;
    job.eights = best_.box[2] % 8 == 0;
    const std::int64_t phases = forward_ ? std::min(p_.stride_w, p_.out_w) : 1;  // of a row
    job.joins = 1;
    for (const std::int64_t joins : {tile_.phases, 2})
      if (phases == step && step % joins == 0 && tile_.phases % joins == 0 && joins > job.joins) job.joins = std::int8_t(joins);
    if (phases == 3 && step == 3 && tile_.phases == 4) job.joins = 3;
    // As many as lie together: of some positions of a row, or of one.
    const std::int64_t neighbours = job.joins * (step == job.joins ? std::min<std::int64_t>(8, best_.box[2] & -best_.box[2]) : 1);
    job.vector = 8;
    while (neighbours % job.vector != 0 || steps % job.vector != 0) job.vector /= 2;
  }

  // Parts of the reduction, where tiles leave multiprocessors idle, and what their blocks wait for each other is less than what
  // their products gain. Constants of one device: the sums are the same on every one.
  bool split(std::int64_t tiles) {
    LastJob& job = plan_.job;
    const double products = double(pairs_.size()) / double(sets_);  // of a chunk
    const std::int64_t least = std::max<std::int64_t>(1, std::int64_t(kLeastSplit / products));
    const std::int64_t most = tile_.alternates ? 1 : std::min(kMostSplits, job.chunks / least);
    std::int64_t splits = 1;
    for (std::int64_t s = 2; s <= most; ++s) {
      if (tiles * s > blocks_at_once(s)) break;
      if (split_cycles(tiles, s, products) < split_cycles(tiles, splits, products)) splits = s;
    }
    job.split_chunks = std::int32_t(ceil_div(job.chunks, splits));
    splits = ceil_div(job.chunks, job.split_chunks);
    job.splits = make_divisor(splits);
    plan_.tiles_of_samples *= splits;
    job.tiles = std::uint32_t(tiles * splits);
    return true;
  }
  std::int64_t blocks_at_once(std::int64_t splits) const {
    return splits <= 2 ? kLastAimBlocks * tile_.blocks : kGroupBlocks * tile_.blocks / splits * splits * kGroups;
  }
  std::int64_t sums_of_tile() const { return std::int64_t(tile_.columns) * tile_.phases * tile_rows(); }
  double split_cycles(std::int64_t tiles, std::int64_t splits, double products) const {
    const std::int64_t chunks = ceil_div(std::int64_t(plan_.job.chunks), splits), blocks = tiles * splits;
    const double pair = double(tile_rows() * tile_.columns * chunk_bytes_) / 4096 * kSplitProduct + kSplitPair;
    const double turns = double(ceil_div(blocks, kLastAimBlocks));  // of blocks that a multiprocessor has in all
    const double sums = splits == 1 ? 0 : kSplitWait + kSplitSum * double(sums_of_tile()) / 1024;
    return turns * (double(chunks) * products * pair + sums);
  }

  // Patches and weights each as far ahead as the other, in pairs.
  bool buffers() {
    LastJob& job = plan_.job;
    const std::int64_t box = best_.rows * chunk_bytes_;
    job.box_bytes = std::int32_t(box);
    job.patch_bytes = std::int32_t(round_up(std::max(box, best_.is_dense() ? tile_rows() * chunk_bytes_ : 0)));
    const double pairs_of_patch = double(pairs_.size()) / double(std::max<std::int64_t>(1, plan_.patches));
    const std::int64_t most_pairs = std::max<std::int64_t>(1, kLastStageBytes / pair_bytes());
    job.stage_pairs = std::int32_t(std::min<std::int64_t>(most_pairs, std::max<std::int64_t>(1, std::int64_t(pairs_of_patch))));
    if (tile_.planes || (tile_.to_planes && !tile_.transposes && has_whole_sets())) job.stage_pairs = tile_.phases;
    if (job.in_turn) job.stage_pairs = tile_.phases;
    const std::int64_t stage = job.stage_pairs * pair_bytes();
    for (std::int64_t set = 0; set < sets_; ++set) job.set_stages[set] = std::uint16_t(stages_of(set) / job.chunks);
    std::int64_t patches = 2, stages = 2;
    const std::int64_t slices_of_patch = tile_.transposes ? tile_.vectors / kLastSliceVectors : 0;
    job.slices = tile_.transposes ? kLeastSlices : 0, job.slice_bytes = std::int32_t(slice_bytes(best_));
    std::int64_t most = most_shared_ - job.slices * job.slice_bytes;
    if (patches * job.patch_bytes + stages * stage > most) return false;
    // A block that takes every so many tiles keeps its columns, its set and its group, and so their weights.
    const std::int64_t slabs = sets_ * p_.groups * job.column_tiles.value, at_once = kLastAimBlocks * tile_.blocks;
    const std::int64_t blocks = at_once / slabs * slabs;
    const bool keeps = job.splits.value == 1 && are_sets_alike() &&
                       (slabs == 1 || (job.tiles > blocks && double(blocks) >= kLeastKeeping * double(at_once)));
    const std::int64_t kept = keeps ? stages_of(0) : kMostLastStages + 1;
    const std::int64_t ahead = tile_.transposes ? 2 : kLeastAhead;
    job.resident = kept <= kMostLastStages && ahead * job.patch_bytes + kept * stage <= most;
    plan_.mixes = !job.resident && job.splits.value == 1 && !are_sets_alike();
    if (job.resident) stages = kept;
    if (tile_.transposes) {
      while (!job.resident && stages < kLeastTransposedStages && patches * job.patch_bytes + (stages + 1) * stage <= most)
        ++stages;
      while (job.slices < 2 * slices_of_patch && patches * job.patch_bytes + stages * stage + job.slice_bytes <= most)
        ++job.slices, most -= job.slice_bytes;
    }
    for (bool grown = true; grown;) {
      const std::int64_t left = most - patches * job.patch_bytes - stages * stage;
      const bool can_patch = left >= job.patch_bytes && patches < kMostLastBuffers;
      const bool can_stage = left >= stage && stages < kMostLastBuffers && !job.resident;
      const bool wants_patch = double(patches) * pairs_of_patch <= double(stages * job.stage_pairs);
      grown = can_patch || can_stage;
      if (!grown) break;
      (can_patch && (wants_patch || !can_stage)) ? ++patches : ++stages;
    }
    job.patches = std::int32_t(patches), job.stages = std::int32_t(stages);
    if (tile_.alternates && !alternate()) return false;
    const bool shares = tile_.shares && (job.whole || tile_.runs) && !job.resident && job.tiles >= kLeastSharing * at_once;
    job.sharers = shares && (job.tiles / slabs % 2 == 0 || tile_.runs) ? 2 : 1;
    if (job.splits.value > 1 && 4 * sums_of_tile() > patches * job.patch_bytes + stages * stage) return false;
    job.first_slice = std::int32_t(patches * job.patch_bytes + stages * stage + staged_bytes());
    plan_.shared_bytes =
        int(patches * job.patch_bytes + stages * stage + kLastAlignment + staged_bytes() + job.slices * job.slice_bytes);
    return true;
  }
  bool weights() {
    const LastJob& job = plan_.job;
    LastPackJob& pack = plan_.pack;
    pack.pairs = make_divisor(std::max(1, job.pairs)), pack.columns = make_divisor(tile_.columns);
    pack.vectors = make_divisor(tile_.vectors), pack.chunks = make_divisor(job.chunks), pack.column_tiles = job.column_tiles;
    pack.channels = job.channels, pack.kernel_h = job.kernel_h, pack.kernel_w = job.kernel_w;
    const std::int64_t count = weight_vectors();
    pack.count = std::uint32_t(count), pack.all_columns = job.columns, pack.flat = job.flat,
    pack.in_order = tile_.turned || tile_.to_planes || tile_.runs || (tile_.alternates && element_ == 2),
    pack.spread = tile_.planes && element_ == 4, pack.exact = tile_.exact;
    pack.result_channels = std::int32_t(result_channels()), pack.source_channels = std::int32_t(source_channels());
    pack.w_source = forward_ ? p_.w.n : p_.w.c, pack.w_result = forward_ ? p_.w.c : p_.w.n;
    pack.by_channel = job.flat || pack.w_result == 1 || tile_.runs;
    pack.runs = job.runs;
    pack.w_group = in_channels_per_group(p_) * p_.w.n;
    pack.w_axis[0] = p_.w.d, pack.w_axis[1] = p_.w.h, pack.w_axis[2] = p_.w.w;
    if (count >= kMostLastCount) return false;
    if (lie()) {
      pack.count = 0;
    } else {
      plan_.packed_bytes = 16 * count;
      if (aligned_) LastPackPlanner(p_, pack, element_, tile_.exact ? kExactChannels : chunk()).plan();
    }
    return source();
  }

  // Whether weights are multiplied as they lie, in boxes: their channels are innermost, and lanes exchange whole vectors.
  bool lie() {
    const LastJob& job = plan_.job;
    const Strides& w = p_.w;
    if (tile_.weight_rows) return true;
    if (element_ != 2 || tile_.turned || tile_.alternates || result_strides().c != 1 || !job.wide || !aligned_ || w.c != 1)
      return false;
    const std::int64_t columns = out_channels_per_group(p_), pixels = result_size_[0] * result_size_[1] * result_size_[2];
    const std::int64_t results = p_.batch * pixels * result_channels() * p_.groups * element_;
    if (results > kMostLyingResults + kMostLyingTimes * p_.in_channels * columns * kernel_taps(p_) * element_) return false;
    const std::int64_t strides[] = {w.w, w.h, w.d, w.n}, sizes[] = {p_.kernel_w, p_.kernel_h, p_.kernel_d, p_.in_channels};
    std::int64_t dense = columns;
    for (int i = 0; i < 4; ++i) {
      if (sizes[i] > 1 && (strides[i] < 1 || strides[i] * element_ % 16 != 0 || strides[i] >= kMostLastCount)) return false;
      if (job.flat && i < 3 && sizes[i] > 1 && strides[i] != dense) return false;  // columns are taps times channels
      dense *= sizes[i];
    }
    BoxTensor& tensor = plan_.lying;
    tensor = {p_.dtype, {columns, sizes[0], sizes[1], sizes[2], sizes[3]}, {}, {1, 1, 1, 1, 1}, 0, 256};
    if (job.flat) tensor.sizes[0] = job.columns, tensor.sizes[1] = tensor.sizes[2] = tensor.sizes[3] = 1;
    for (int i = 0; i < 4; ++i) tensor.strides[i] = tensor.sizes[i + 1] > 1 ? strides[i] * element_ : 16;
    plan_.weights = forward_ ? LastWeights::kByResult : LastWeights::kByReduction;
    tensor.box[0] = std::int32_t(forward_ ? std::min(tile_.columns, 64) : chunk());
    tensor.box[4] = std::int32_t(forward_ ? chunk() : tile_.columns);
    tensor.swizzle = std::int32_t(tensor.box[0] * element_);
    return true;
  }

  // The source, or what is packed of it: as many samples at a time as the cap leaves room for.
  bool source() {
    plan_.batch = p_.batch;
    Strides s = source_strides();
    if (tile_.planes || tile_.transposes) return true;
    if (!lies_in_boxes()) {
      const std::int64_t vectors = pixel_vectors();
      const std::int64_t rows = source_size_[0] * source_size_[1], pixels = rows * source_size_[2], packed = rows * packed_row();
      const std::int64_t left = cap_ - plan_.packed_bytes, sample = sample_bytes(), parts = best_.samples;
      plan_.batch = std::min(p_.batch, std::max<std::int64_t>(1, left / sample / parts) * parts);
      plan_.source_bytes = plan_.batch * sample;
      pack_source(s, vectors, pixels);
      s.c = 1, s.w = vectors * 16 / element_, s.h = s.w * packed_row(), s.d = s.h * source_size_[1], s.n = s.d * source_size_[0];
      if (packed >= kMostLastCount || plan_.batch * packed >= kMostLastCount) return false;
    }
    describe_source(s);
    return true;
  }
  void pack_source(const Strides& s, std::int64_t vectors, std::int64_t pixels) {
    LastSourceJob& job = plan_.source_pack;
    job = source_job(s, source_channels() * p_.groups, vectors, pixels, source_size_[2], source_size_[1]);
    job.gap = std::uint32_t(packed_row() - source_size_[2]);
    if (tile_.exact) split_source(job);
    quicken_source(job, s, plan_.batch, element_);
  }

  void describe_source(const Strides& s) {
    BoxTensor& tensor = plan_.source;
    const std::int64_t channels = source_values() * p_.groups;
    tensor = {p_.dtype,
              {channels, counted_ ? source_size_[1] * packed_row() : source_size_[2], counted_ ? 1 : source_size_[1],
               source_size_[0], plan_.batch},
              {s.w, s.h, s.d, s.n},
              {std::int32_t(chunk()), 1, 1, 1, std::int32_t(best_.samples)},
              std::int32_t(chunk_bytes_),
              256};
    for (std::int64_t& stride : tensor.strides)  // 0: of one element, never stepped
      stride = stride == 0 ? ceil_div(channels * element_, std::int64_t(16)) * 16 : stride * element_;
    const Triple patch = best_.patch();
    for (int i = 0; i < 3; ++i) {
      tensor.steps[3 - i] = std::int32_t(source_step_[i]);
      tensor.box[3 - i] = std::int32_t((patch[i] - 1) * source_step_[i] + 1);
    }
    if (folded_) fold(tensor, patch);
    check_box();
  }
  void fold(BoxTensor& tensor, const Triple& patch) {
    const std::int64_t pixel = tensor.strides[0], row = tensor.strides[1], w = p_.stride_w, h = p_.stride_h;
    plan_.job.folded = std::int32_t(pixel / element_);
    const std::int64_t sizes[] = {w * pixel / element_, p_.out_w / w, p_.out_h / h, h};
    std::copy(sizes, sizes + 4, tensor.sizes);
    tensor.strides[0] = w * pixel, tensor.strides[1] = h * row, tensor.strides[2] = row;
    tensor.box[1] = std::int32_t(patch[2]), tensor.box[2] = std::int32_t(patch[1]), tensor.box[3] = 1;
  }
  // A block waits for the bytes that it expects: of other ones for ever.
  void check_box() const {
    std::int64_t bytes = element_;
    for (int i = 0; i < 5; ++i) bytes *= ceil_div(std::int64_t(plan_.source.box[i]), std::int64_t(plan_.source.steps[i]));
    require(bytes == plan_.job.box_bytes, "a box of the source has ", bytes, " bytes where ", plan_.job.box_bytes,
            " are awaited");
  }
};

}  // namespace
}  // namespace upfold::cuda
