// The fused method: conv_transpose and conv as products of packed pixels with packed weights. A tile of the source that fits the
// second-level cache is packed once, output channels are the vectors, and the result is written once.
#include "fused_output.h"
#include "fused_passes.h"
#include "fused_weight.h"
#include "isa.h"
#include "parallel.h"
#include "strict.h"

namespace upfold::cpu::UPFOLD_ISA {
namespace {

// Calls f with a null pointer of the element type, of those that are summed in float32.
template <typename F>
void with_fused_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(static_cast<float*>(nullptr));
    case Dtype::kFloat16:
      return f(static_cast<Half*>(nullptr));
    case Dtype::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    default:
      return;
  }
}

// One task: the outputs of a block of samples, q and output channels of some groups, all phases of them.
struct Task {
  Range groups;
  Range blocks;  // of output channels
  std::int64_t qd;
  FusedBlock at;
};

template <typename T>
class Fused {
 public:
  // `packed`: the weights laid out, or null where each task packs its own.
  Fused(const Problem& p, const FusedPlan& plan, const Operands& operands, const void* packed)
      : p_(p),
        plan_(plan),
        weights_(p, plan, static_cast<const T*>(operands.w)),
        packed_weights_(static_cast<const float*>(packed)),
        bias_(plan.is_conv ? nullptr : static_cast<const T*>(operands.bias)),
        in_(static_cast<const T*>(plan.is_conv ? operands.y : operands.x)),
        out_(static_cast<T*>(plan.is_conv ? operands.x : operands.y)),
        in_strides_(plan.is_conv ? p.y : p.x),
        out_strides_(plan.is_conv ? p.x : p.y),
        epilogue_{0.0f, plan.is_conv ? Activation::kNone : p.activation, p.activation_slope},
        sums_in_place_(std::is_same_v<T, float> && epilogue_.kind == Activation::kNone && out_strides_.c == 1 &&
                       plan.channels.out % kLanes<float> == 0) {}

  // The scratch of one thread, in bytes.
  std::int64_t scratch_bytes() const { return parts_.end; }

  void operator()(std::int64_t begin, std::int64_t end) const {
    const Scratch scratch(scratch_bytes());
    for (std::int64_t task = begin; task < end; ++task) run(task_of(task), scratch.data());
  }

 private:
  Task task_of(std::int64_t index) const {
    Task task{};
    task.at.qw = plan_.w_blocks[index % plan_.w_blocks.count];
    index /= plan_.w_blocks.count;
    task.at.qh = plan_.h_blocks[index % plan_.h_blocks.count];
    index /= plan_.h_blocks.count;
    task.qd = plan_.d.base.q.begin + index % length(plan_.d.base.q);
    index /= length(plan_.d.base.q);
    task.at.samples = plan_.samples[index % plan_.samples.count];
    index /= plan_.samples.count;
    // Neighbouring tasks share the weights of their slab.
    task.blocks = plan_.slabs[index % plan_.slabs.count];
    task.groups = plan_.groups[index / plan_.slabs.count];
    return task;
  }

  // Offsets of the parts of the scratch, which fit the largest task.
  struct Parts {
    std::int64_t sums, staged, weights, bias, pixels, begin, runs, passes, depths, end;
  };
  Parts parts() const {
    const auto bytes = [](std::int64_t count, std::size_t size) { return round_up(count * static_cast<std::int64_t>(size), 64); };
    const auto outputs = [](const FusedAxis& axis, std::int64_t q) {
      return smaller(q * axis.base.out.stride, axis.base.out.size);
    };
    const auto inputs = [this](const FusedAxis& axis, std::int64_t q) {
      const std::int64_t window = axis.window_length(q);
      return plan_.tap_by_tap ? smaller(window, axis.base.source.size) : window;
    };
    const std::int64_t x = plan_.depth_limit() * plan_.samples.size * inputs(plan_.h, plan_.h_blocks.size) *
                           inputs(plan_.w, plan_.w_blocks.size) * plan_.channels.pixel_pitch();
    const std::int64_t plane = outputs(plan_.h, plan_.h_blocks.size) * outputs(plan_.w, plan_.w_blocks.size);
    const std::int64_t sums = sums_in_place_ ? 0 : plan_.samples.size * plane * plan_.channels.most_width();
    Parts at{};
    at.sums = bytes(x, sizeof(float));
    at.staged = at.sums + bytes(sums, sizeof(float));
    at.weights = at.staged + bytes(std::is_same_v<T, float> ? 0 : kLanes<float> * plane, sizeof(float));
    at.bias = at.weights + bytes(plan_.packs_weights_in_tasks ? weights_.most_chunk_size() : 0, sizeof(float));
    at.pixels = at.bias + bytes(plan_.channels.most_width(), sizeof(float));
    at.begin = at.pixels + bytes(listed_pixels(plan_), sizeof(TilePixel));
    at.runs = at.begin + bytes(list_count(plan_) + 1, sizeof(std::int64_t));
    at.passes = at.runs + bytes(kernel_taps(p_), sizeof(TapRun));
    at.depths = at.passes + bytes(kernel_taps(p_) + 1, sizeof(FusedPass));
    at.end = at.depths + bytes(2 * p_.kernel_d, sizeof(std::int64_t));
    return at;
  }

  struct Buffers {
    float *x, *sums, *staged, *weights, *bias;
    FusedLists lists;
    std::int64_t* depths;        // of the planes packed
    std::int64_t* depth_of_tap;  // index into depths for each kd, or -1
  };
  Buffers buffers(unsigned char* scratch) const {
    const auto floats = [scratch](std::int64_t at) { return reinterpret_cast<float*>(scratch + at); };
    const Parts& at = parts_;
    const FusedLists lists{reinterpret_cast<TilePixel*>(scratch + at.pixels), reinterpret_cast<std::int64_t*>(scratch + at.begin),
                           reinterpret_cast<TapRun*>(scratch + at.runs), reinterpret_cast<FusedPass*>(scratch + at.passes), 0};
    std::int64_t* const depths = reinterpret_cast<std::int64_t*>(scratch + at.depths);
    return {floats(0), floats(at.sums), floats(at.staged),   floats(at.weights), floats(at.bias),
            lists,     depths,          depths + p_.kernel_d};
  }

  // What the outputs of one depth of a task have in common.
  struct Plane {
    const Task& task;
    std::int64_t od;
    Range outputs_h, outputs_w;
    bool is_filled;  // with the bias, before the first pass
  };

  void run(const Task& task, unsigned char* scratch) const {
    Buffers b = buffers(scratch);
    const std::int64_t depths = list_depths(plan_.d.base, task.qd, b.depths, b.depth_of_tap);
    const FusedWindow window = fused_window(plan_, task.at.qh, task.at.qw, length(task.at.samples));
    Plane plane{task, 0, plan_.h.base.outputs(task.at.qh), plan_.w.base.outputs(task.at.qw), false};
    const std::int64_t columns = length(plane.outputs_w), rows = length(plane.outputs_h);
    FusedTarget target{rows * columns, columns, 1, plane.outputs_h.begin, plane.outputs_w.begin};
    if (sums_in_place_) target = {out_strides_.n, out_strides_.h, out_strides_.w, target.first_h, target.first_w};
    const FusedLister lister(plan_, task.at, window, target);
    lister.list_pixels(b.lists);
    const Range outputs_d = plan_.d.base.outputs({task.qd, task.qd + 1});
    for (std::int64_t group = task.groups.begin; group < task.groups.end; ++group) {
      pack(task, group, window, depths, b);
      for (plane.od = outputs_d.begin; plane.od < outputs_d.end; ++plane.od) {
        const bool has_taps = list_passes(lister, plane.od, b);
        plane.is_filled = plan_.tap_by_tap || !has_taps || plan_.w.phase_count < plan_.w.base.out.stride;
        for (std::int64_t block = task.blocks.begin; block < task.blocks.end; ++block) sum_block(plane, group, block, b);
      }
    }
  }

  void pack(const Task& task, std::int64_t group, const FusedWindow& window, std::int64_t depths, const Buffers& b) const {
    for (std::int64_t d = 0; d < depths; ++d) {
      for (std::int64_t n = 0; n < length(task.at.samples); ++n) {
        const T* in = in_ + (task.at.samples.begin + n) * in_strides_.n + group * plan_.channels.in * in_strides_.c +
                      b.depths[d] * in_strides_.d;
        pack_plane(plan_, window, in, in_strides_, b.x + d * window.depth + n * window.sample);
      }
    }
  }

  // Returns whether some tap reaches the outputs of this depth.
  bool list_passes(const FusedLister& lister, std::int64_t od, Buffers& b) const {
    b.lists.pass_count = 0;
    const std::int64_t phase = plan_.is_conv ? 0 : phase_of(plan_.d.base.axis, od);
    for (std::int64_t g = 0; g < plan_.d.phase_count; ++g) {
      const PhaseGroup& d = plan_.d.phases[g];
      if (d.phase != phase) continue;
      lister.list_passes(weights_, d, b.depth_of_tap, b.lists);
    }
    return b.lists.pass_count > 0;
  }

  // All products of one block of output channels, and their way into the result.
  void sum_block(const Plane& plane, std::int64_t group, std::int64_t block, const Buffers& b) const {
    const std::int64_t vectors = plan_.channels.block_vectors(block), width = vectors * kLanes<float>;
    const std::int64_t m = plan_.channels.first_vector(block) * kLanes<float>, first = group * plan_.channels.out + m;
    const FusedSums sums{b.sums,
                         length(plane.task.at.samples),
                         length(plane.outputs_h),
                         length(plane.outputs_w),
                         width,
                         smaller(width, plan_.channels.out - m),
                         b.bias,
                         plan_.h,
                         plane.outputs_h.begin};
    for (std::int64_t i = 0; i < width; ++i) b.bias[i] = bias_ && i < sums.channels ? widen(bias_[first + i]) : 0.0f;
    T* out = out_ + plane.task.at.samples.begin * out_strides_.n + first * out_strides_.c + plane.od * out_strides_.d +
             plane.outputs_h.begin * out_strides_.h + plane.outputs_w.begin * out_strides_.w;
    PassArgs args{};
    args.sums = b.sums;
    args.sums_step = width;
    if constexpr (std::is_same_v<T, float>) {
      if (sums_in_place_) {
        args.sums = out;
        args.sums_step = 1;
      }
    }
    args.bias = b.bias;
    fill(sums, plane.is_filled, args);
    for (std::int64_t chunk = 0; chunk < plan_.channels.chunks; ++chunk) {
      sum_chunk({group, block, chunk}, plane.is_filled, args, b);
    }
    if (!sums_in_place_) write_sums(sums, epilogue_, out, out_strides_, b.staged);
  }

  void sum_chunk(const typename FusedWeights<T>::Piece& piece, bool is_filled, PassArgs args, const Buffers& b) const {
    if (packed_weights_ == nullptr) weights_.pack(piece, b.weights);
    args.weights = packed_weights_ ? packed_weights_ + weights_.offset(piece.group, piece.block, piece.chunk) : b.weights;
    args.x = b.x + piece.chunk * plan_.channels.chunk;
    args.channels = plan_.channels.chunk_length(piece.chunk);
    for (std::int64_t i = 0; i < b.lists.pass_count; ++i) {
      const FusedPass& pass = b.lists.passes[i];
      args.runs = b.lists.runs + pass.run_begin;
      args.run_count = pass.run_end - pass.run_begin;
      args.pixels = b.lists.pixels + b.lists.begin[pass.list];
      args.pixel_count = b.lists.begin[pass.list + 1] - b.lists.begin[pass.list];
      args.accumulate = is_filled || piece.chunk > 0 || !pass.sets;
      fused_pass(plan_.channels.block_vectors(piece.block), args);
    }
  }

  // Sets the sums to the bias: all of them, or those of empty rows.
  void fill(const FusedSums& s, bool all, const PassArgs& args) const {
    if (!all && (plan_.h.phase_count == plan_.h.base.out.stride || (!sums_in_place_ && writes_rows(out_strides_)))) return;
    const std::size_t bytes = static_cast<std::size_t>(s.width) * sizeof(float);
    for (std::int64_t n = 0; n < s.samples; ++n) {
      for (std::int64_t h = 0; h < s.rows; ++h) {
        if (!all && !s.is_empty(h)) continue;
        for (std::int64_t w = 0; w < s.columns; ++w) {
          const std::int64_t at = sums_in_place_ ? n * out_strides_.n + h * out_strides_.h + w * out_strides_.w
                                                 : ((n * s.rows + h) * s.columns + w) * s.width;
          std::memcpy(args.sums + at, args.bias, bytes);
        }
      }
    }
  }

  const Problem& p_;
  const FusedPlan& plan_;
  const FusedWeights<T> weights_;
  const float* packed_weights_;
  const T* bias_;
  const T* in_;
  T* out_;
  const Strides in_strides_, out_strides_;
  const Epilogue<float> epilogue_;
  const bool sums_in_place_;
  const Parts parts_ = parts();
};

// The packed pieces, and behind them a byte for each: what packing it returned.
template <typename T>
std::int64_t packed_bytes(const FusedWeights<T>& weights) {
  return round_up(weights.size() * static_cast<std::int64_t>(sizeof(float)) + weights.pieces(), 64);
}

template <typename T>
void pack_weights(const FusedWeights<T>& weights, void* to, int threads) {
  float* const packed = static_cast<float*>(to);
  unsigned char* const finite = reinterpret_cast<unsigned char*>(packed + weights.size());
  parallel_for(weights.pieces(), threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto piece = weights.piece(i);
      finite[i] = weights.pack(piece, packed + weights.offset(piece.group, piece.block, piece.chunk)) ? 1 : 0;
    }
  });
}

template <typename T>
void run_packed(const Problem& p, const FusedPlan& plan, const Operands& operands, int threads) {
  const FusedWeights<T> weights(p, plan, nullptr);
  const unsigned char* const finite =
      static_cast<const unsigned char*>(operands.workspace) + weights.size() * static_cast<std::int64_t>(sizeof(float));
  for (std::int64_t i = 0; i < weights.pieces(); ++i) {
    if (finite[i] == 0) return strict_direct<T>(p, operands, threads);
  }
  parallel_for(plan.tasks(), threads, Fused<T>(p, plan, operands, operands.workspace));
}

}  // namespace

std::int64_t fused_workspace_bytes(const Problem& p, int threads) {
  if (p.op == Operator::kConvTransposeWeight) return fused_weight_workspace_bytes(p);
  const FusedPlan plan(p, threads);
  std::int64_t bytes = 0;
  with_fused_type(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const Fused<T> fused(p, plan, {}, nullptr);
    const std::int64_t packed = packed_bytes(FusedWeights<T>(p, plan, nullptr));
    bytes = fused.scratch_bytes() > kLargestScratch ? -1 : plan.packs_weights_in_tasks ? 0 : packed;
  });
  return bytes;
}

void fused(const Problem& p, const Operands& operands, int threads) {
  if (p.op == Operator::kConvTransposeWeight) {
    return with_fused_type(p.dtype,
                           [&](auto* element) { fused_weight<std::remove_pointer_t<decltype(element)>>(p, operands, threads); });
  }
  if (p.batch == 0) return;
  const FusedPlan plan(p, threads);
  with_fused_type(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    if (plan.packs_weights_in_tasks) return parallel_for(plan.tasks(), threads, Fused<T>(p, plan, operands, nullptr));
    pack_weights(FusedWeights<T>(p, plan, static_cast<const T*>(operands.w)), operands.workspace, threads);
    run_packed<T>(p, plan, operands, threads);
  });
}

void fused_packing(const Problem& p, int threads, std::int64_t* layout) {
  const FusedPlan plan(p, threads);
  const FusedChannels& c = plan.channels;
  with_fused_type(p.dtype, [&](auto* element) {
    const FusedWeights<std::remove_pointer_t<decltype(element)>> weights(p, plan, nullptr);
    const std::int64_t fields[kFusedPackingFields] = {
        packed_bytes(weights), p.groups, c.in, c.out, c.vectors, c.blocks, c.chunk, plan.multiplies_padding ? 1 : 0};
    for (int i = 0; i < kFusedPackingFields; ++i) layout[i] = fields[i];
    weights.list_slots(layout + kFusedPackingFields);
  });
}

void fused_pack(const Problem& p, const void* w, void* packed, int threads) {
  const FusedPlan plan(p, threads);
  with_fused_type(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    pack_weights(FusedWeights<T>(p, plan, static_cast<const T*>(w)), packed, threads);
  });
}

void fused_packed(const Problem& p, const Operands& operands, int threads) {
  if (p.batch == 0) return;
  const FusedPlan plan(p, threads);
  with_fused_type(p.dtype,
                  [&](auto* element) { run_packed<std::remove_pointer_t<decltype(element)>>(p, plan, operands, threads); });
}

}  // namespace upfold::cpu::UPFOLD_ISA
