// A program without torch and Python that runs every kernel of api.h on random geometry between guard bands and compares with
// loops on the host: for compute-sanitizer, which sees nothing inside a caching allocator's segments.
//
//   smoke [seconds] [seed] [small|any] [tell]
//
// With `small` no product is large, or of a type, for cuBLAS's kernels of clusters, under which racecheck breaks off, and blocks
// of warpgroups are left out, of whose barriers it knows nothing. With `tell` each run is named ahead of it, on standard error:
// the last one is where a sanitizer takes its time.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "../error.h"
#include "api.h"
#include "fused_api.h"
#include "fused_weight.h"
#include "fused_weight_laid.h"
#include "fused_weight_last.h"
#include "launch.cuh"
#include "smoke_memory.h"
#include "smoke_moves.h"

namespace upfold::cuda {
namespace {

Problem random_problem(Random& random, bool small) {
  Problem p{};
  // Enough to fill a device, as some launches want; sums pass what 16 bits count.
  const bool large = !small && pick(random, {0, 0, 0, 0, 0, 0, 0, 1}) != 0;
  const bool head = !small && !large && pick(random, {0, 0, 0, 0, 0, 0, 0, 1}) != 0;      // the last layer of a generator
  const bool one_pixel = !large && !head && pick(random, {0, 0, 0, 0, 0, 0, 0, 1}) != 0;  // the first layer of a generator
  // A weight that is packed in whole lines (fused_last_pack_plan.cuh), of channels that fill no tile.
  const bool deep = !small && !large && !head && !one_pixel && pick(random, {0, 0, 0, 0, 0, 1}) != 0;
  const bool equal = !large && !head && !one_pixel && !deep && pick(random, {0, 0, 0, 0, 0, 0, 1}) != 0;  // a U-Net's
  for (;;) {
    p.dtype = Dtype(large ? 0 : pick(random, {0, 0, 1, 2, 3})), p.activation = Activation::kNone;
    p.batch = pick(random, {1, 2, 5, large ? 60 : 33}), p.groups = pick(random, {1, 1, 2, 3});
    p.in_channels = p.groups * pick(random, {1, 3, 8, 20, 70}), p.out_channels = p.groups * pick(random, {1, 2, 9, 40, 130});
    const bool lanes = !large && !head && !deep && pick(random, {0, 0, 0, 1}) != 0;  // depthwise, in vectors of channels
    if (lanes) p.groups = p.in_channels = p.out_channels = pick(random, {4, 16, 20, 36});
    if (deep) p.groups = 1, p.in_channels = pick(random, {520, 1032, 1032}), p.out_channels = pick(random, {132, 260, 1032});
    std::int64_t* const in[] = {&p.in_d, &p.in_h, &p.in_w};
    std::int64_t* const out[] = {&p.out_d, &p.out_h, &p.out_w};
    std::int64_t* const kernel[] = {&p.kernel_d, &p.kernel_h, &p.kernel_w};
    std::int64_t* const stride[] = {&p.stride_d, &p.stride_h, &p.stride_w};
    std::int64_t* const pad[] = {&p.pad_d, &p.pad_h, &p.pad_w};
    std::int64_t* const dilation[] = {&p.dilation_d, &p.dilation_h, &p.dilation_w};
    if (head) p.groups = 1, p.in_channels = pick(random, {16, 48, 64}), p.out_channels = pick(random, {1, 3, 4});
    const std::int64_t axes = head ? 2 : pick(random, {1, 2, 2, 3});
    // A stride whose kernel is twice as long, as most decoders have.
    const std::int64_t doubled = head ? 2 : pick(random, {0, 0, 2, 8});
    bool possible = true;
    for (int i = 0; i < 3; ++i) {
      const bool used = i >= 3 - axes;
      *in[i] = used ? pick(random, {1, 2, 5, i == 2 ? 37 : 8, i == 2 ? 120 : 3, i == 2 ? 16 : 4}) : 1,
      *kernel[i] = used ? pick(random, {1, 2, 3, 4, 6}) : 1;
      *stride[i] = used ? pick(random, {1, 2, 2, 3, 5}) : 1, *dilation[i] = used ? pick(random, {1, 1, 2, 3}) : 1;
      *pad[i] = used ? pick(random, {0, 0, 1, 2, 5}) : 0;
      if (used && doubled != 0) *stride[i] = doubled, *kernel[i] = 2 * doubled, *dilation[i] = 1, *pad[i] = doubled / 2;
      if (head && i == 2) *in[i] = pick(random, {8, 16, 24, 40}), *pad[i] = pick(random, {0, 1, 1, 2, 3});
      if (one_pixel) *in[i] = *dilation[i] = 1, *pad[i] = 0;
      if (equal) *stride[i] = *kernel[i] = i == 2 ? 2 : used ? pick(random, {1, 2, 3}) : 1, *pad[i] = 0, *dilation[i] = 1;
      if (equal && i == 2) *in[i] = pick(random, {4, 6, 8, 20});
      if (deep) *in[i] = std::min<std::int64_t>(*in[i], 5);
      *out[i] = (*in[i] - 1) * *stride[i] - 2 * *pad[i] + *dilation[i] * (*kernel[i] - 1) + 1;
      *out[i] += used ? pick(random, {0, 0, *stride[i] - 1}) : 0;
      possible = possible && *out[i] >= 1;
    }
    const std::int64_t columns = p.batch * in_pixels(p) * p.out_channels * kernel_taps(p);
    const std::int64_t weight = p.in_channels * out_channels_per_group(p) * kernel_taps(p) * element_bytes(p.dtype);
    if (deep && (weight < 9 << 19 || weight > 12 << 20)) continue;
    // Sums of so many products stay within what 16 bits count.
    if (deep && element_bytes(p.dtype) == 2 && std::max(p.in_channels, p.out_channels) * kernel_taps(p) > 3500) continue;
    if (!possible || columns > (large ? 2000000 : 100000) || columns < (large ? 500000 : 0)) continue;
    const bool last = lanes && pick(random, {0, 1, 1}) != 0;
    p.x = dense(p.in_channels, p.in_d, p.in_h, p.in_w, last || pick(random, {0, 0, 1}) != 0);
    p.w = dense(out_channels_per_group(p), p.kernel_d, p.kernel_h, p.kernel_w, pick(random, {0, 0, 1}) != 0);
    p.y = dense(p.out_channels, p.out_d, p.out_h, p.out_w, last || pick(random, {0, 0, 1}) != 0);
    return p;
  }
}

// Calls body(offset in x, offset in w, offset in y) for every product of the problem.
template <typename Body>
void products(const Problem& p, Body body) {
  const std::int64_t per_in = in_channels_per_group(p), per_out = out_channels_per_group(p);
  const auto each = [](std::int64_t count, auto inner) {
    for (std::int64_t i = 0; i < count; ++i) inner(i);
  };
  const Axis d = axis_d(p), h = axis_h(p), w = axis_w(p);
  const auto row = [&](std::int64_t x, std::int64_t weight, std::int64_t y) {
    each(w.in, [&](std::int64_t iw) {
      each(w.kernel, [&](std::int64_t kw) {
        const std::int64_t ow = output_of(w, iw, kw);
        if (ow >= 0 && ow < w.out) body(x + iw * p.x.w, weight + kw * p.w.w, y + ow * p.y.w);
      });
    });
  };
  const auto plane = [&](std::int64_t x, std::int64_t weight, std::int64_t y) {
    each(h.in, [&](std::int64_t ih) {
      each(h.kernel, [&](std::int64_t kh) {
        const std::int64_t oh = output_of(h, ih, kh);
        if (oh >= 0 && oh < h.out) row(x + ih * p.x.h, weight + kh * p.w.h, y + oh * p.y.h);
      });
    });
  };
  const auto volume = [&](std::int64_t x, std::int64_t weight, std::int64_t y) {
    each(d.in, [&](std::int64_t id) {
      each(d.kernel, [&](std::int64_t kd) {
        const std::int64_t od = output_of(d, id, kd);
        if (od >= 0 && od < d.out) plane(x + id * p.x.d, weight + kd * p.w.d, y + od * p.y.d);
      });
    });
  };
  each(p.batch, [&](std::int64_t n) {
    each(p.in_channels, [&](std::int64_t ic) {
      each(per_out, [&](std::int64_t oc) {
        volume(n * p.x.n + ic * p.x.c, ic * p.w.n + oc * p.w.c, n * p.y.n + (ic / per_in * per_out + oc) * p.y.c);
      });
    });
  });
}

void tell(std::FILE* to, const std::string& name, const Problem& p, const char* what) {
  const auto size = [](std::int64_t d, std::int64_t h, std::int64_t w) { return concat(d, "x", h, "x", w); };
  const std::string text =
      concat(name, " of operator ", int(p.op), ", type ", int(p.dtype), ": ", what, "; batch ", p.batch, ", channels ",
             p.in_channels, " -> ", p.out_channels, ", groups ", p.groups, ", in ", size(p.in_d, p.in_h, p.in_w), ", out ",
             size(p.out_d, p.out_h, p.out_w), ", kernel ", size(p.kernel_d, p.kernel_h, p.kernel_w), ", stride ",
             size(p.stride_d, p.stride_h, p.stride_w), ", padding ", size(p.pad_d, p.pad_h, p.pad_w), ", dilation ",
             size(p.dilation_d, p.dilation_h, p.dilation_w), ", channels are ", p.x.c, ", ", p.w.c, " and ", p.y.c, " apart\n");
  std::fputs(text.c_str(), to);
}

// Runs `call` on fresh buffers and compares the operand that the operator writes with loops on the host, bit for bit: sums of
// products of -1, 0 and 1 are exact.
template <typename Function>
void compare(const std::string& name, const Problem& p, bool has_bias, Random& random, std::int64_t workspace_bytes, Tally& tally,
             Function call) {
  const std::int64_t counts[3] = {p.batch * p.in_channels * in_pixels(p),
                                  p.in_channels * out_channels_per_group(p) * kernel_taps(p),
                                  p.batch * p.out_channels * out_pixels(p)};
  const int written = p.op == Operator::kConvTranspose ? 2 : p.op == Operator::kConv ? 0 : 1;
  std::vector<float> values[3] = {integers(random, counts[0]), integers(random, counts[1]), integers(random, counts[2])};
  std::vector<float> bias = integers(random, p.out_channels);
  if (!has_bias) std::fill(bias.begin(), bias.end(), 0.0f);
  Buffer x(counts[0], p.dtype), w(counts[1], p.dtype), y(counts[2], p.dtype), b(p.out_channels, p.dtype);
  Buffer workspace(ceil_div(workspace_bytes, 4), Dtype::kFloat32);
  Buffer* const buffers[3] = {&x, &w, &y};
  for (int i = 0; i < 3; ++i) {
    if (i != written) buffers[i]->upload(values[i]);
  }
  b.upload(bias);
  std::vector<float>& expected = values[written];
  for (float& value : expected) value = 0.0f;
  products(p, [&](std::int64_t ix, std::int64_t iw, std::int64_t iy) {
    const std::size_t at[3] = {std::size_t(ix), std::size_t(iw), std::size_t(iy)};
    expected[at[written]] += values[(written + 1) % 3][at[(written + 1) % 3]] * values[(written + 2) % 3][at[(written + 2) % 3]];
  });
  if (p.op == Operator::kConvTranspose) {
    for (std::int64_t n = 0; n < p.batch; ++n)
      for (std::int64_t oc = 0; oc < p.out_channels; ++oc)
        for (std::int64_t i = 0; i < out_pixels(p); ++i) {
          const std::int64_t step = p.y.c == 1 && p.out_channels > 1 ? p.out_channels : 1;
          expected[std::size_t(n * p.y.n + oc * p.y.c + i * step)] += bias[std::size_t(oc)];
        }
  }
  if (tally.tells) tell(stderr, name, p, "begins");
  call(x.data(), w.data(), has_bias ? b.data() : nullptr, y.data(), workspace.data());
  check(cudaDeviceSynchronize(), name.c_str());
  const std::vector<float> got = buffers[written]->download();
  const bool same = got == expected;
  const bool held = x.guards_hold() && w.guards_hold() && y.guards_hold() && b.guards_hold() && workspace.guards_hold();
  ++tally.runs;
  if (same && held) return;
  ++tally.failures;
  tell(stdout, name, p, same ? "a guard band was written" : "wrong values");
}

// On warpgroups alone, of whose barriers racecheck knows nothing.
void run_fused_input(const Problem& p, Random& random, Tally& tally) {
  for (int config = 0; config < int(fused_input_tiles().size()); ++config) {
    const std::int64_t alignment = pick(random, {4, 16});  // of a buffer, and less
    if (!fused_input_fits(0, p, config, alignment)) continue;
    const FusedInputCall fused(0, p, config, alignment);
    compare(concat("fused_input ", config), p, false, random, fused.workspace_bytes(), tally,
            [&](void* x, void* w, void*, void* y, void* space) { fused.run({y, w, x, space}, 0); });
  }
}

void run_fused_last(const Problem& p, bool has_bias, Random& random, Tally& tally) {
  const bool forward = p.op == Operator::kConvTranspose;
  for (int config = 0; config < int(fused_last_tiles().size()); ++config) {
    const std::int64_t alignment = pick(random, {element_bytes(p.dtype), 16}), cap = pick(random, {64 << 20, 1 << 20});
    if (!fused_last_fits(0, p, config, alignment) || pick(random, {0, 1, 2}) != 0) continue;
    const FusedLastCall fused(0, p, config, alignment, cap);
    compare(
        concat("fused_last ", config), p, has_bias, random, fused.workspace_bytes(), tally,
        [&](void* x, void* w, void* b, void* y, void* space) { fused.run({forward ? x : y, w, b, forward ? y : x, space}, 0); });
  }
}

// The calls that need no workspace and whose plans depend on the alignment.
template <typename Call, typename Tiles, typename Fits>
void run_aligned(const char* name, const Tiles& tiles, const Fits& fits, const Problem& p, bool has_bias, Random& random,
                 Tally& tally) {
  for (int config = 0; config < int(tiles.size()); ++config) {
    if (!fits(0, p, config, 16)) continue;
    const Call fused(0, p, config, 16);
    compare(concat(name, " ", config), p, has_bias, random, 0, tally,
            [&](void* x, void* w, void* b, void* y, void*) { fused.run({x, w, b, y, nullptr}, 0); });
  }
}
void run_all_aligned(const Problem& p, bool has_bias, Random& random, Tally& tally) {
  run_aligned<FusedColumnsCall>("fused_columns", fused_columns_tiles(), fused_columns_fits, p, has_bias, random, tally);
  run_aligned<FusedMapsCall>("fused_maps", fused_maps_tiles(), fused_maps_fits, p, has_bias, random, tally);
  run_aligned<FusedPointCall>("fused_point", fused_point_tiles(), fused_point_fits, p, has_bias, random, tally);
  run_aligned<FusedHeadsCall>("fused_heads", fused_heads_tiles(), fused_heads_fits, p, has_bias, random, tally);
}

void run_fused_units(const Problem& p, bool has_bias, Random& random, Tally& tally) {
  for (int config = 0; config < int(fused_units_tiles().size()); ++config) {
    if (!fused_units_fits(0, p, config)) continue;
    const FusedUnitsCall fused(0, p, config);
    compare(concat("fused_units ", config), p, has_bias, random, 0, tally,
            [&](void* x, void* w, void* b, void* y, void*) { fused.run({x, w, b, y, nullptr}, 0); });
  }
}

void run_fused_weight(const Problem& p, Random& random, bool small, Tally& tally) {
  if (small) return;
  for (int config = 0; config < int(fused_weight_tiles().size()); ++config) {
    const std::int64_t alignment = pick(random, {element_bytes(p.dtype), 16}), cap = pick(random, {64 << 20, 1 << 20});
    const FusedWeightCall fused(0, p, config, alignment, cap);
    if (fused.workspace_bytes() < 0 || pick(random, {0, 1, 2}) != 0) continue;
    compare(concat("fused ", config), p, false, random, fused.workspace_bytes(), tally,
            [&](void* x, void* w, void* b, void* y, void* space) { fused.run({x, w, b, y, space}, 0); });
  }
}

template <typename Call>
void run_fused_weight_capped(const char* name, std::size_t tiles, const Problem& p, Random& random, Tally& tally) {
  for (int config = 0; config < int(tiles); ++config) {
    const std::int64_t alignment = pick(random, {element_bytes(p.dtype), 16}), cap = pick(random, {64 << 20, 2 << 20});
    const Call fused(0, p, config, alignment, cap);
    if (fused.workspace_bytes() < 0 || pick(random, {0, 1, 2}) != 0) continue;
    compare(concat(name, " ", config), p, false, random, fused.workspace_bytes(), tally,
            [&](void* x, void* w, void* b, void* y, void* space) { fused.run({x, w, b, y, space}, 0); });
  }
}

void run_fused_groups(const Problem& p, Random& random, Tally& tally) {
  const std::int64_t alignment = pick(random, {element_bytes(p.dtype), 16}), cap = pick(random, {64 << 20, 1 << 20});
  const FusedGroupsCall fused(0, p, alignment, cap);
  if (fused.workspace_bytes() < 0) return;
  compare("fused_groups", p, false, random, fused.workspace_bytes(), tally,
          [&](void* x, void* w, void*, void* y, void* space) { fused.run({x, w, nullptr, y, space}, 0); });
}

void run_one(Random& random, bool with_gemm, bool small, Tally& tally) {
  const Launch launch{0, 0};
  Problem p = random_problem(random, small);
  run_copy_rows(p.dtype, random, tally);
  run_channel_sums(p.dtype, random, tally);
  run_to_pixels(p.dtype, random, tally);
  run_im2row(p, random, tally);
  for (const Operator op : {Operator::kConvTranspose, Operator::kConv, Operator::kConvTransposeWeight}) {
    p.op = op;
    const bool has_bias = op == Operator::kConvTranspose && pick(random, {0, 1}) != 0;
    for (int config = 0; config <= int(direct_tiles().size()); ++config) {
      if (!direct_fits(p, config)) continue;
      compare(concat("direct ", config), p, has_bias, random, direct_workspace_bytes(p, config), tally,
              [&](void* x, void* w, void* b, void* y, void* space) { direct(launch, p, {x, w, b, y, space}, config); });
    }
    for (int config = 0; config < 2; ++config) {
      if (!depthwise_fits(p, config)) continue;
      compare(concat("depthwise ", config), p, has_bias, random, depthwise_workspace_bytes(p, config), tally,
              [&](void* x, void* w, void* b, void* y, void* space) { depthwise(launch, p, {x, w, b, y, space}, config); });
    }
    const std::vector<FusedTileSize> tiles = fused_tiles();
    for (int config = 0; config < int(tiles.size()); ++config) {
      const std::int64_t alignment = pick(random, {element_bytes(p.dtype), 16});  // of a buffer, and less
      const bool exact = pick(random, {0, 1}) == 1;
      if (!fused_fits(0, p, config, alignment, exact) || pick(random, {0, 1, 2}) != 0) continue;
      if (small && (tiles[std::size_t(config)].products > 0 || tiles[std::size_t(config)].pixels)) continue;
      const FusedCall fused(0, p, config, alignment, std::int64_t(256) << 20, exact);
      compare(concat("fused ", config), p, has_bias, random, fused.workspace_bytes(), tally,
              [&](void* x, void* w, void* b, void* y, void* space) { fused.run({x, w, b, y, space}, launch.stream); });
      const std::int64_t packed = fused.packed_bytes();
      if (packed == 0) continue;
      compare(concat("fused ", config, ", packed apart"), p, has_bias, random, fused.workspace_bytes(), tally,
              [&](void* x, void* w, void* b, void* y, void* space) {
                fused.pack(w, space, launch.stream);
                fused.run({x, w, b, y, static_cast<char*>(space) + packed, space}, launch.stream);
              });
    }
    if (op == Operator::kConv && !small) {
      run_fused_input(p, random, tally);
      run_aligned<FusedLaidCall>("fused_laid", fused_laid_tiles(), fused_laid_fits, p, false, random, tally);
    }
    if (op != Operator::kConvTransposeWeight && !small) run_fused_last(p, has_bias, random, tally);
    if (op == Operator::kConvTranspose && !small) run_all_aligned(p, has_bias, random, tally);
    if (op != Operator::kConvTranspose)
      run_aligned<FusedSmallCall>("fused_small", fused_small_tiles(), fused_small_fits, p, false, random, tally);
    if (op == Operator::kConv)
      run_aligned<FusedPointInputCall>("fused_point_input", fused_point_input_tiles(), fused_point_input_fits, p, false, random,
                                       tally);
    if (op != Operator::kConvTransposeWeight)
      run_aligned<FusedWindowCall>("fused_window", fused_window_tiles(), fused_window_fits, p, has_bias, random, tally);
    if (op == Operator::kConvTranspose && !small) run_fused_units(p, has_bias, random, tally);
    run_fused_weight(p, random, small, tally);
    if (op != Operator::kConvTranspose) run_fused_groups(p, random, tally);
    if (!small) {
      run_fused_weight_capped<FusedWeightLastCall>("fused_weight_last", fused_weight_last_tiles().size(), p, random, tally);
      run_fused_weight_capped<FusedWeightLaidCall>("fused_weight_laid", fused_weight_laid_tiles().size(), p, random, tally);
    }
    if (!with_gemm || (small && element_bytes(p.dtype) == 2)) continue;
    for (const bool atomic : {false, true}) {
      if (atomic && op != Operator::kConvTranspose) continue;
      const GemmForm form = GemmForm(pick(random, {0, 1, 2, 3}));
      const bool allow_tf32 = pick(random, {0, 1}) != 0 && !small;
      const GemmOptions options{pick(random, {64 << 20, 1 << 20, 100000}), 0, allow_tf32, atomic, has_bias, form};
      const GemmCall gemm(0, p, options);
      const std::int64_t bytes = gemm.workspace_bytes();
      if (bytes < 0) continue;
      compare(atomic ? "gemm_atomic" : "gemm", p, has_bias, random, bytes, tally,
              [&](void* x, void* w, void* b, void* y, void* space) { gemm.run({x, w, b, y, space}, launch.stream); });
    }
  }
}

}  // namespace
}  // namespace upfold::cuda

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10.0;
  std::mt19937 random(argc > 2 ? unsigned(std::atoi(argv[2])) : 1u);
  const upfold::cuda::Info found = upfold::cuda::info();
  if (found.devices.empty()) {
    std::printf("no GPU: %s\n", found.no_device_reason.c_str());
    return 2;
  }
  bool with_gemm = true;
  try {
    upfold::cuda::gemm_prepare(0);
  } catch (const std::exception& error) {
    std::printf("gemm is left out: %s\n", error.what());
    with_gemm = false;
  }
  const bool small = argc > 3 && std::strcmp(argv[3], "small") == 0;
  upfold::cuda::Tally tally;
  tally.tells = argc > 4 && std::strcmp(argv[4], "tell") == 0;
  const std::time_t begin = std::time(nullptr);
  do {
    upfold::cuda::run_one(random, with_gemm, small, tally);
  } while (std::difftime(std::time(nullptr), begin) < seconds);
  std::printf("%ld runs, %ld failures\n", tally.runs, tally.failures);
  return tally.failures == 0 ? 0 : 1;
}
