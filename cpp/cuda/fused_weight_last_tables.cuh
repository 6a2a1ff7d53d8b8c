// What the planner of the fused gradient of the weight whose channels are innermost tells the kernels; host code, for one source.
#pragma once

#include "fused_weight_last_plan.cuh"

namespace upfold::cuda {
namespace {

inline bool WeightLastPlanner::tables() {
  const Cut& cut = best_;
  const WeightArrangement a = arrange(cut.level, cut.axis, cut.set_chunks);
  WeightLastJob& job = plan_.job;
  const std::int64_t rows = rows_of(cut), whole = ceil_div(rows, 16) * 16;
  job.sets = make_divisor(std::int64_t(a.sets.size())), job.channel_sets = make_divisor(ceil_div(chunks_, cut.set_chunks));
  job.channel_tiles = make_divisor(channel_tiles_);
  plan_.tiles = std::int64_t(job.sets.value) * job.channel_sets.value * channel_tiles_ * p_.groups;
  if (plan_.tiles >= kMostWeightCount) return false;
  job.tiles = make_divisor(plan_.tiles);
  job.in_channels = std::int32_t(in_channels_), job.out_channels = std::int32_t(out_channels_);
  job.block_channels = std::int32_t(block_channels_), job.x_boxes = std::int32_t(x_boxes());
  job.row_channels = std::int32_t(row_channels_), job.width = std::int32_t(width_);
  job.set_channels = std::int32_t(cut.set_chunks * width_);
  plan_.planes = planes_;
  job.x_box = std::int32_t(rows * x_bytes()), job.x_pitch = std::int32_t(round_up(whole * x_room()));
  job.y_box = std::int32_t(patch_rows(a, cut) * y_bytes());
  job.y_pitch = std::int32_t(round_up(a.single ? whole * y_bytes() : job.y_box));
  job.y_at = job.x_boxes * job.x_pitch, job.stage_bytes = std::int32_t(stage_bytes(a, cut));
  job.stages = std::int32_t(std::min<std::int64_t>(kWeightLastStages, most_shared_ / job.stage_bytes));
  plan_.threads = unsigned(tile_.threads);
  plan_.shared_bytes = job.stages * job.stage_bytes + kWeightLastAlignment;
  job.steps = std::int32_t(whole / 16), job.tail = std::int32_t(rows), job.rows = std::int32_t(whole);
  // Kinds of swizzle, distances of groups of eight rows, and of x's columns beyond a row's: there are none, and a row of 32
  // channels stands for two.
  const auto kind = [](std::int64_t bytes) { return bytes == 128 ? std::uint32_t(1) << 30 : std::uint32_t(2) << 30; };
  const std::int64_t x_units = x_room() / 16, y_units = y_bytes() / 16;
  const std::int64_t apart = a.single || cut.box[0] > 8 ? 8 : patch_size(a, cut, 0);
  job.x_high = kind(x_room()) | std::uint32_t(8 * x_units), job.y_high = kind(y_bytes()) | std::uint32_t(apart * y_units);
  job.x_step = planes_ ? 2 : std::uint32_t(16 * x_units), job.y_apart = std::uint32_t(apart * y_units);
  for (std::int64_t step = 0; step < job.steps; ++step) job.y_step[step] = std::uint16_t(row_of(a, cut, 16 * step) * y_units);
  for (int i = 0; i < 4; ++i) job.box[i] = std::int32_t(cut.box[i]);
  for (int i = 0; i < 3; ++i) job.along[i] = make_divisor(ceil_div(positions_[i], cut.box[i]));
  std::copy(a.places.begin(), a.places.end(), plan_.sum.place);
  plan_.sum.set_chunks = make_divisor(cut.set_chunks);
  for (int i = 0; i < 3; ++i) halo_[i] = a.halo[std::size_t(i)];
  describe();
  squares_ ? list_square_atoms(a) : list_atoms(a);
  return columns(a);
}

// In what order a block stores its columns: neighbours of w one after another. Without it w is stored by the launch that adds
// parts up: taps along w that lie in the channels must be whole atoms, and those of a channel set in all sets the same.
inline void WeightLastPlanner::list_atoms(const WeightArrangement& a) {
  WeightLastJob& job = plan_.job;
  const std::int64_t channels = out_channels_per_group(p_), atoms = 8 * tile_.set_columns8() / width_;
  const std::int64_t sets = std::int64_t(a.sets.size()), set_channels = a.set_chunks * width_;
  job.fold = make_divisor(channels), job.w_n = p_.w.n, job.w_c = p_.w.c, job.w_w = p_.w.w;
  while (16 << job.atom_log <= width_) ++job.atom_log;
  const bool tap_order = taps_are_neighbours();
  const bool even = channels % 2 == 0 && (p_.w.d | p_.w.h | p_.w.w | p_.w.n) % 2 == 0;
  job.paired = !tap_order && even;
  stores_ = sets * atoms <= kMostWeightAtoms;
  if (folded_ > 1) stores_ = stores_ && channels % width_ == 0 && (job.channel_sets.value == 1 || channels % set_channels == 0);
  if (!stores_) return;
  struct Column {
    std::int64_t set, channel, tap, offset, atom, chunk;
  };
  std::vector<Column> columns;
  for (std::int64_t tap = 0; tap < kernel_taps(p_) / folded_; ++tap) {
    for (std::int64_t chunk = 0; chunk < a.set_chunks; ++chunk) {
      const std::int64_t column8 = a.places[std::size_t(tap * a.set_chunks + chunk)], in_set = column8 % tile_.set_columns8();
      const std::int64_t first = chunk * width_, along = first / channels, channel = first % channels;
      const std::int64_t w = folded_ > 1 ? along : tap % p_.kernel_w, rest = folded_ > 1 ? tap : tap / p_.kernel_w;
      const std::int64_t offset = w * p_.w.w + rest % p_.kernel_h * p_.w.h + rest / p_.kernel_h * p_.w.d + channel * p_.w.c;
      columns.push_back({column8 / tile_.set_columns8(), channel, rest * p_.kernel_w + w, offset, in_set * 8 / width_, chunk});
    }
  }
  const auto key = [&](const Column& c) {
    return tap_order ? std::array<std::int64_t, 3>{c.set, c.channel, c.tap}
                     : std::array<std::int64_t, 3>{c.set, c.tap, c.channel};
  };
  std::sort(columns.begin(), columns.end(), [&](const Column& a, const Column& b) { return key(a) < key(b); });
  std::int64_t set = -1, at = 0, first = 0;
  // Sectors of a row of w that are stored at a time, and whether they are whole; elsewhere they cost more.
  std::set<std::int64_t> sectors;
  std::int64_t values = 0;
  double cycles = 0;  // of a row of all sets
  const auto count_sectors = [&] {
    const bool are_whole = values * element_ >= std::int64_t(sectors.size()) * 32;
    cycles += double(sectors.size()) * (are_whole ? kWeightSectorCycles : kWeightCutSectorCycles);
    sectors.clear(), values = 0;
  };
  for (std::size_t i = 0; i < columns.size(); ++i, ++at) {
    const Column& c = columns[i];
    const bool follows = tap_order && i > 0 && columns[i - 1].set == c.set && columns[i - 1].channel == c.channel;
    if (c.set != set) set = c.set, at = 0;
    if (!follows) first = at;
    WeightLastAtom* const own = job.atom + set * atoms;
    own[at] = {std::uint32_t(c.offset), std::uint8_t(first), 0, std::uint8_t(c.atom), std::uint8_t(c.chunk)};
    for (std::int64_t j = first; j <= at; ++j) own[j].count = std::uint8_t(at - first + 1);
    const std::int64_t valid = std::min(width_, channels - c.channel);
    if (!follows) count_sectors();
    for (std::int64_t oc = 0; oc < valid; ++oc) sectors.insert((c.offset + oc * p_.w.c) * element_ / 32);
    values += valid;
    stores_ = stores_ && c.offset < std::int64_t(1) << 31 && c.chunk < 256;
  }
  count_sectors();
  plan_.store_cycles = cycles / double(sets) * double(std::min(block_channels_, in_channels_));
}

// The same of squares: the four atoms of a set's 16 output channels, by their tap of the kernel of two.
inline void WeightLastPlanner::list_square_atoms(const WeightArrangement& a) {
  WeightLastJob& job = plan_.job;
  const std::int64_t sets = std::int64_t(a.sets.size()), columns8 = tile_.set_columns8();
  job.w_n = p_.w.n, job.w_c = p_.w.c, job.fold = make_divisor(1);
  stores_ = sets == a.set_chunks && 4 * sets <= kMostWeightAtoms;
  for (std::int64_t set = 0; set < sets && stores_; ++set) {
    for (std::int64_t tap = 0; tap < 4; ++tap) {
      const std::int64_t column8 = a.places[std::size_t(tap * a.set_chunks + set)];
      stores_ = stores_ && column8 / columns8 == set;
      const auto offset = std::uint32_t(set * kSquareChannels * p_.w.c);
      job.atom[set * 4 + tap] = {offset, 0, 4, std::uint8_t(column8 % columns8 * 8 / width_), std::uint8_t(set)};
    }
  }
  const double sectors = double(4 * chunks_ * width_ * element_) / 32 / double(sets * job.channel_sets.value);
  plan_.store_cycles = sectors * kWeightSectorCycles * double(std::min(block_channels_, in_channels_));
}

// What instructions and boxes of every set read.
inline bool WeightLastPlanner::columns(const WeightArrangement& a) {
  const Cut& cut = best_;
  WeightLastJob& job = plan_.job;
  for (std::size_t i = 0; i < a.slots.size(); ++i) {
    const WeightSlot& slot = a.slots[i];
    const std::int64_t apart_atoms = a.single ? job.y_pitch / 16 : row_of(a, cut, slot.step) * (y_bytes() / 16);
    const std::int64_t first = slot.patch * (job.y_pitch / 16) + row_of(a, cut, slot.low) * (y_bytes() / 16);
    if (apart_atoms >= 1 << 14 || first >= 1 << 14) return false;
    job.slot[i] = std::uint32_t(apart_atoms << 16 | first);
  }
  std::size_t patches = 0;
  for (std::size_t set = 0; set < a.sets.size(); ++set) {
    for (const WeightSetPatch& patch : a.sets[set]) {
      const Tap& tap = taps_[a.firsts[patch.taps]];
      WeightLastPatch& to = job.patch[patches++];
      for (std::size_t i = 0; i < 3; ++i) to.at[i] = std::int16_t(a.lows[patch.taps][i]);
      to.map = std::uint16_t(tap.map), to.channel = std::int32_t(patch.chunk * width_ + tap.channel);
    }
    job.first_patch[set + 1] = std::uint16_t(patches);
  }
  return true;
}

// The boxes of x, and of y for every residue.
inline void WeightLastPlanner::describe() {
  const auto tensor = [&](std::int64_t channels, std::int64_t width, const std::int64_t(&steps)[4]) {
    BoxTensor result{p_.dtype, {channels, 1, 1, 1, 1}, {}, {std::int32_t(width), 1, 1, 1, 1}, std::int32_t(element_ * width),
                     256};
    for (int i = 0; i < 4; ++i) result.strides[i] = element_ * steps[i];
    for (int i = 0; i < 4; ++i) result.box[i + 1] = std::int32_t(best_.box[i]);
    return result;
  };
  BoxTensor x = tensor(p_.in_channels, row_channels_, x_step_);
  for (int i = 0; i < 4; ++i) x.sizes[i + 1] = positions_[i];
  if (planes_) {
    x = {p_.dtype, {p_.in_w, p_.in_h, p_.in_d, p_.in_channels, 1},
         {},       {kWeightPlanePixels, 1, 1, std::int32_t(row_channels_), 1},
         128,      256};
    for (std::size_t i = 0; i < 4; ++i) x.strides[i] = element_ * plane_steps()[i];
  }
  plan_.x.boxes = {x}, plan_.x.at = {0};
  const std::int64_t all = in_pixel_ && axes_[0].stride > 1 ? pixel_ * axes_[0].stride : out_channels_ * p_.groups;
  for (std::size_t m = 0; m < residues_.size(); ++m) {
    BoxTensor y = tensor(all, width_, y_step_);
    for (int i = 0; i < 4; ++i) y.sizes[i + 1] = y_sizes_[m][std::size_t(i)];
    for (int i = 0; i < 3; ++i) y.box[i + 1] += std::int32_t(halo_[i]);
    y.sizes[4] = positions_[3];
    plan_.y.boxes.push_back(y);
    plan_.y.at.push_back(element_ * (residues_[m][0] * pixel_ + residues_[m][1] * y_.h + residues_[m][2] * y_.d));
  }
}

// Samples of a launch: all, or, beside what is packed of them, as many as leave room for sums that keep a large device busy, to
// which each launch adds.
inline bool WeightLastPlanner::launches(std::int64_t part_bytes) {
  const std::int64_t sample = plan_.x.packed_bytes + plan_.y.packed_bytes;
  const std::int64_t wanted = std::max<std::int64_t>(1, kWeightMultiprocessors / plan_.tiles);
  const std::int64_t most = sample > 0 ? std::min<std::int64_t>(p_.batch, kMostWeightLaunches) : 1;
  std::int64_t best = 0;  // parts
  for (std::int64_t number = 1; number <= most && best < wanted; ++number) {
    const std::int64_t batch = ceil_div(p_.batch, number), launches = ceil_div(p_.batch, batch);
    const std::int64_t left = cap_ - sample * batch, parts = left < 0 ? 0 : left / part_bytes;
    if (parts > best) best = parts, plan_.batch = batch, plan_.launches = launches;
  }
  return best > 0;
}

// Parts: as many as keep the blocks of a large device busy in whole waves, which another launch adds up; or w is stored by
// blocks that have all of the reduction, or two of them half each.
inline bool WeightLastPlanner::split() {
  WeightLastJob& job = plan_.job;
  const std::int64_t part_bytes = plan_.tiles * sums_of_tile();
  if (!launches(part_bytes)) return false;
  plan_.x.packed_bytes *= plan_.batch, plan_.y.packed_bytes *= plan_.batch;
  const std::int64_t most =
      std::min((cap_ - plan_.x.packed_bytes - plan_.y.packed_bytes) / part_bytes, 1 + kMostWeightPartial / part_bytes);
  std::int64_t count = ceil_div(positions_[3] * plan_.batch, best_.box[3]);
  for (int i = 0; i < 3; ++i) count *= job.along[i].value;
  if (count >= kMostWeightCount) return false;
  double best = -1;
  const auto consider = [&](std::int64_t parts, std::int64_t length, bool whole) {
    const std::int64_t cluster = whole ? parts : 1;
    const double loop = double(length) * best_.cycles * (cluster > 1 ? kWeightApart : 1.0);
    double cost =
        (loop + (whole ? plan_.store_cycles / double(cluster) : 0)) / kWeightCyclesMicrosecond + kWeightBlockMicroseconds;
    if (cluster > 1) cost += kWeightMeetMicroseconds;
    cost *= double(ceil_div(plan_.tiles * parts, kWeightMultiprocessors));
    if (!whole) cost += kWeightSumMicroseconds + double(parts * part_bytes) / kWeightSumBytesMicrosecond;
    if (best >= 0 && cost >= best) return;
    best = cost, plan_.microseconds = cost, plan_.parts = parts, job.length = std::uint32_t(length);
    job.cluster = make_divisor(cluster), job.whole = whole, plan_.partial_bytes = whole ? 0 : parts * part_bytes;
  };
  for (std::int64_t parts = 1; parts <= std::min(std::max<std::int64_t>(most, kMostWeightCluster), count); ++parts) {
    if (parts > 1 && plan_.tiles * parts > std::max(4 * kWeightMultiprocessors, 2 * plan_.tiles)) break;
    const std::int64_t length = ceil_div(count, parts);
    if (ceil_div(count, length) != parts) continue;
    if (parts <= most) consider(parts, length, false);
    if (stores_ && plan_.launches == 1 && parts <= std::int64_t(kMostWeightCluster)) consider(parts, length, true);
  }
  job.count = std::uint32_t(count);
  if (job.whole) {
    plan_.shared_bytes = std::max(plan_.shared_bytes, int(sums_of_tile()) + kWeightLastAlignment);
  } else {
    plan_.store_cycles = 0;
  }
  return best >= 0 && plan_.tiles * plan_.parts < kMostWeightCount;
}

// What blocks of the sum have. Shares of the parts: until threads read theirs in one batch and warps keep a large device busy, or
// until there are so many that they hide each other's waits. Small weights are cut into more blocks, down to as many pieces as
// the threads of one have at a time.
inline void WeightLastPlanner::cut_sums() {
  WeightLastSumJob& job = plan_.sum;
  const std::int64_t taps = kernel_taps(p_), eights = ceil_div(out_channels_per_group(p_), std::int64_t(8));
  const std::int64_t rows = ceil_div(in_channels_, std::int64_t(16)), warps = rows * eights * taps * p_.groups;
  constexpr std::int64_t kBusyWarps = 8 * kWeightMultiprocessors, kManyWarps = 64 * kWeightMultiprocessors;
  const auto more_shares = [&] {
    const std::int64_t most = job.parts > std::int64_t(kPartBatch) << job.share_log ? kManyWarps : kBusyWarps;
    return job.share_log < kMostWeightShares && std::int64_t(2) << job.share_log <= job.parts && warps << job.share_log < most;
  };
  job.share_log = 0;
  while (more_shares()) ++job.share_log;
  job.lane_log = std::min(5, kWeightSumThreadsLog - job.share_log);
  std::int64_t own_taps = job.tap_order ? std::min<std::int64_t>(taps, kWeightPieces) : 1;
  std::int64_t own_eights = job.tap_order ? std::max<std::int64_t>(1, 8 / own_taps) : 1;
  const auto blocks = [&] {
    return rows * ceil_div(eights, own_eights) * ceil_div(taps, own_taps) * p_.groups << (5 - job.lane_log);
  };
  const auto too_large = [&] {
    const std::int64_t slots = std::int64_t(1) << std::max(0, job.lane_log + job.share_log - 5),
                       outputs = 8 * own_eights * own_taps;
    if ((slots << job.lane_log) / 2 * (outputs + 1) > kWeightSumFloats) return true;
    return own_eights * own_taps << (job.lane_log + job.share_log) > kWeightSumThreads && blocks() < 4 * kWeightMultiprocessors;
  };
  while (job.tap_order && too_large()) {
    if (job.lane_log > 3) {
      --job.lane_log;
    } else {
      own_taps > 1 ? own_taps = (own_taps + 1) / 2 : own_eights = (own_eights + 1) / 2;
    }
  }
  job.taps = make_divisor(own_taps), job.pieces = make_divisor(own_eights), job.outputs = make_divisor(8 * own_eights * own_taps);
  job.tap_blocks = make_divisor(ceil_div(taps, own_taps)), job.channel_blocks = make_divisor(ceil_div(eights, own_eights));
  job.row_blocks = make_divisor(rows);
}

inline bool WeightLastPlanner::sums() {
  if (plan_.job.whole) return true;
  WeightLastSumJob& job = plan_.sum;
  const std::int64_t taps = kernel_taps(p_), channels = out_channels_per_group(p_);
  job.tap_order = taps_are_neighbours();
  job.parts = std::int32_t(plan_.parts), job.part_tiles = plan_.tiles;
  cut_sums();
  job.kernel_w = make_divisor(p_.kernel_w), job.kernel_h = make_divisor(p_.kernel_h), job.folded = make_divisor(folded_);
  job.width = make_divisor(width_ / 8);
  job.in_channels = std::int32_t(in_channels_), job.out_channels = std::int32_t(channels), job.all_taps = std::int32_t(taps);
  job.sets = std::int32_t(plan_.job.sets.value), job.channel_sets = std::int32_t(plan_.job.channel_sets.value);
  job.channel_tiles = std::int32_t(channel_tiles_), job.set_columns8 = make_divisor(tile_.set_columns8());
  job.row_groups = tile_.row_groups;
  job.w_n = p_.w.n, job.w_c = p_.w.c, job.w_d = p_.w.d, job.w_h = p_.w.h, job.w_w = p_.w.w;
  const bool run = (p_.kernel_w == 1 || p_.w.w == 1) && (p_.kernel_h == 1 || p_.w.h == p_.kernel_w) &&
                   (p_.kernel_d == 1 || p_.w.d == p_.kernel_w * p_.kernel_h) && p_.w.c == taps;
  job.dense = job.tap_order && job.taps.value == taps && run;
  const bool even = job.tap_order ? channels * taps % 2 == 0 : channels % 2 == 0 && (p_.w.d | p_.w.h | p_.w.w) % 2 == 0;
  job.paired = even && p_.w.n % 2 == 0;
  const std::int64_t pieces = std::int64_t(job.row_blocks.value) * job.channel_blocks.value * job.tap_blocks.value * p_.groups;
  const std::int64_t blocks = pieces << (5 - job.lane_log), together = kWeightSumThreads >> (job.lane_log + job.share_log);
  job.all_pieces = std::uint32_t(pieces);
  plan_.sum_blocks = unsigned(job.tap_order ? blocks : ceil_div(blocks, together));
  return blocks < kMostWeightCount;
}

}  // namespace
}  // namespace upfold::cuda
