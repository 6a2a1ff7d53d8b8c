// Weights packed for the tiles of the fused method: weights[group][block of output channels][chunk of input channels][slot][input
// channel of the chunk][output channel of the block], the last padded with zeros to whole vectors. Slots are the taps in such an
// order that those which read neighbouring pixels, first to last, follow each other.
#pragma once

#include "fused_plan.h"
#include "transpose.h"

namespace upfold::cpu::UPFOLD_ISA {

template <typename T>
class FusedWeights {
 public:
  FusedWeights(const Problem& p, const FusedPlan& plan, const T* w)
      : p_(p), plan_(plan), w_(w), taps_(kernel_taps(p)), slots_(taps_), offsets_(taps_) {
    std::int64_t column = 0;
    for (std::int64_t g = 0; g < plan.w.phase_count; ++g) {
      const PhaseGroup& phase = plan.w.phases[g];
      for (std::int64_t j = 0; j < phase.count; ++j, ++column) {
        const std::int64_t kw = phase.first + (plan.is_conv ? j : phase.count - 1 - j) * phase.tap_step;
        for (std::int64_t row = 0; row < taps_ / p.kernel_w; ++row) slots_[row * p.kernel_w + kw] = row * p.kernel_w + column;
      }
    }
    for (std::int64_t t = 0; t < taps_; ++t) {
      const std::int64_t kh = t / p.kernel_w % p.kernel_h, kw = t % p.kernel_w;
      offsets_[t] = t / p.kernel_w / p.kernel_h * p.w.d + kh * p.w.h + kw * p.w.w;
      has_dense_taps_ = has_dense_taps_ && offsets_[t] == t;
      if (plan.tap_by_tap && !(plan.h.reaches(kh) && plan.w.reaches(kw))) slots_[t] = -1;
    }
  }

  // -1 for a tap that runs for itself and reaches no output, which is not packed.
  std::int64_t slot(std::int64_t kd, std::int64_t kh, std::int64_t kw) const {
    return slots_[(kd * p_.kernel_h + kh) * p_.kernel_w + kw];
  }

  // Of every tap in torch's order.
  void list_slots(std::int64_t* slots) const {
    for (std::int64_t t = 0; t < taps_; ++t) slots[t] = slots_[t];
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

  // Lays out one piece; returns false where a weight is Inf or NaN that the padding is multiplied by.
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
      for (std::int64_t i = 0; i < width; i += kLanes<float>) {
        const Target to{out + c * width + i, count * width};
        const std::int64_t lanes = smaller(real - i, kLanes<float>);
        const T* from = w + i * out_stride;
        if (lanes < kLanes<float> || !has_dense_taps_ || out_stride == 1) {
          copy(from, out_stride, lanes, to);
        } else if (taps_ >= kLanes<float>) {
          transpose(from, out_stride, to);
        } else if (out_stride == taps_ && (taps_ & (taps_ - 1)) == 0) {
          rotate(from, to);
        } else {
          copy(from, out_stride, lanes, to);
        }
        for (std::int64_t t = 0; t < (plan_.multiplies_padding ? taps_ : 0); ++t) {
          if (slots_[t] >= 0) defect = multiply_add(load(to.data + slots_[t] * to.pitch), 0.0f, defect);
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
  // One input channel and one vector of output channels; slots are `pitch` apart.
  struct Target {
    float* data;
    std::int64_t pitch;
  };

  void put(std::int64_t tap, const Vector<float>& v, const Target& to) const {
    if (slots_[tap] >= 0) store(v, to.data + slots_[tap] * to.pitch);
  }

  void copy(const T* from, std::int64_t stride, std::int64_t lanes, const Target& to) const {
    for (std::int64_t t = 0; t < taps_; ++t) {
      float lane[kLanes<float>] = {};
      for (std::int64_t i = 0; i < lanes; ++i) lane[i] = widen(from[offsets_[t] + i * stride]);
      put(t, load(lane), to);
    }
  }

  // kLanes taps of kLanes channels at a time; a last block that would reach past the taps starts earlier.
  void transpose(const T* from, std::int64_t stride, const Target& to) const {
    constexpr int L = kLanes<float>;
    for (std::int64_t t = 0; t < taps_; t += L) {
      const std::int64_t first = smaller(t, taps_ - L);
      Vector<float> v[L];
      for (int i = 0; i < L; ++i) v[i] = load_wide(from + i * stride + first);
      interleave_vectors<float, L>(v);
      for (int i = 0; i < L; ++i) put(first + i, v[i], to);
    }
  }

  // Few taps, dense beside the channels: [channel][tap] becomes [tap][channel] by riffles of the whole, each of which moves the
  // first bit of an index behind its last.
  template <int N>
  void rotate_taps(const T* from, const Target& to) const {
    constexpr int L = kLanes<float>;
    Vector<float> v[N];
    for (int i = 0; i < N; ++i) v[i] = load_wide(from + i * L);
    for (int bits = L; bits > 1; bits /= 2) {
      Vector<float> riffled[N];
      for (int i = 0; i < N / 2; ++i) zip<float>(v[i], v[i + N / 2], riffled[2 * i], riffled[2 * i + 1]);
      for (int i = 0; i < N; ++i) v[i] = riffled[i];
    }
    for (int i = 0; i < N; ++i) put(i, v[i], to);
  }
  void rotate(const T* from, const Target& to) const {
    switch (taps_) {
      case 1:
        return put(0, load_wide(from), to);
      case 2:
        return rotate_taps<2>(from, to);
      case 4:
        return rotate_taps<4>(from, to);
      default:
        return rotate_taps<8>(from, to);
    }
  }

  const Problem& p_;
  const FusedPlan& plan_;
  const T* w_;
  const std::int64_t taps_;
  const Table<std::int64_t> slots_, offsets_;  // of each tap: where it is packed, and where it lies in the weight
  bool has_dense_taps_ = true;
};

}  // namespace upfold::cpu::UPFOLD_ISA
