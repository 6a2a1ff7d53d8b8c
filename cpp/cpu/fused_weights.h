// Weights packed for the tiles of the fused method: weights[group][block of output channels][chunk of input channels][slot][input
// channel of the chunk][output channel of the block], the last padded with zeros to whole vectors. Slots are the taps in such an
// order that those which read neighbouring pixels, first to last, follow each other.
#pragma once

#include "fused_plan.h"

namespace upfold::cpu::UPFOLD_ISA {

template <typename T>
class FusedWeights {
 public:
  FusedWeights(const Problem& p, const FusedPlan& plan, const T* w)
      : p_(p), plan_(plan), w_(w), taps_(kernel_taps(p)), column_slots_(p.kernel_w) {
    std::int64_t slot = 0;
    for (std::int64_t g = 0; g < plan.w.phase_count; ++g) {
      const PhaseGroup& phase = plan.w.phases[g];
      for (std::int64_t j = 0; j < phase.count; ++j) {
        column_slots_[phase.first + (plan.is_conv ? j : phase.count - 1 - j) * phase.tap_step] = slot++;
      }
    }
  }

  std::int64_t slot(std::int64_t kd, std::int64_t kh, std::int64_t kw) const {
    return (kd * p_.kernel_h + kh) * p_.kernel_w + column_slots_[kw];
  }

  // Floats of one chunk of a block.
  std::int64_t chunk_size(std::int64_t block, std::int64_t chunk) const {
    return plan_.channels.block_vectors(block) * kLanes<float> * taps_ * plan_.channels.chunk_length(chunk);
  }
  // The widest block's first chunk is the largest.
  std::int64_t most_chunk_size() const { return chunk_size(0, 0); }
  std::int64_t size() const { return p_.groups * plan_.channels.vectors * kLanes<float> * taps_ * plan_.channels.in; }
  std::int64_t offset(std::int64_t group, std::int64_t block, std::int64_t chunk) const {
    const FusedChannels& c = plan_.channels;
    const std::int64_t vectors = group * c.vectors + c.first_vector(block);
    return kLanes<float> * taps_ * (vectors * c.in + c.block_vectors(block) * chunk * c.chunk);
  }
  // Chunks in all, and which one an index names.
  std::int64_t pieces() const { return p_.groups * plan_.channels.blocks * plan_.channels.chunks; }
  struct Piece {
    std::int64_t group, block, chunk;
  };
  Piece piece(std::int64_t index) const {
    const std::int64_t chunks = plan_.channels.chunks, blocks = plan_.channels.blocks;
    return {index / chunks / blocks, index / chunks % blocks, index % chunks};
  }

  // Lays out one piece; returns whether its weights are finite.
  bool pack(const Piece& at, float* out) const {
    const FusedChannels& channels = plan_.channels;
    const std::int64_t width = channels.block_vectors(at.block) * kLanes<float>;
    const std::int64_t m = channels.first_vector(at.block) * kLanes<float>, real = smaller(width, channels.out - m);
    const std::int64_t count = channels.chunk_length(at.chunk), first = at.chunk * channels.chunk;
    const std::int64_t in_stride = plan_.is_conv ? p_.w.c : p_.w.n, out_stride = plan_.is_conv ? p_.w.n : p_.w.c;
    const T* w = w_ + at.group * (plan_.is_conv ? channels.out : channels.in) * p_.w.n + first * in_stride + m * out_stride;
    Vector<float> defect{};  // stays 0 unless a weight is Inf or NaN
    // Taps within channels: in torch's layout a line of the cache holds several taps of one pair of channels.
    for (std::int64_t c = 0; c < count; ++c, w += in_stride) {
      for (std::int64_t kd = 0; kd < p_.kernel_d; ++kd) {
        for (std::int64_t kh = 0; kh < p_.kernel_h; ++kh) {
          for (std::int64_t kw = 0; kw < p_.kernel_w; ++kw) {
            float* to = out + (slot(kd, kh, kw) * count + c) * width;
            copy(w + kd * p_.w.d + kh * p_.w.h + kw * p_.w.w, out_stride, real, width, to);
            for (std::int64_t i = 0; i < width; i += kLanes<float>) {
              defect = multiply_add(load(to + i), 0.0f, defect);
            }
          }
        }
      }
    }
    float lanes[kLanes<float>];
    store(defect, lanes);
    bool finite = true;
    for (const float lane : lanes) finite = finite && lane == 0;
    return finite;
  }

 private:
  static void copy(const T* from, std::int64_t stride, std::int64_t real, std::int64_t width, float* to) {
    if (stride == 1) {
      for (std::int64_t i = 0; i < real; ++i) to[i] = widen(from[i]);
    } else {
      for (std::int64_t i = 0; i < real; ++i) to[i] = widen(from[i * stride]);
    }
    for (std::int64_t i = real; i < width; ++i) to[i] = 0;
  }

  const Problem& p_;
  const FusedPlan& plan_;
  const T* w_;
  const std::int64_t taps_;
  const Table<std::int64_t> column_slots_;
};

}  // namespace upfold::cpu::UPFOLD_ISA
