// What the smoke program (smoke.cpp) calls kernels on: memory between guard bands, and values whose sums are exact.
#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "api.h"
#include "launch.cuh"

namespace upfold::cuda {
namespace {

constexpr std::int64_t kGuard = 256;  // bytes before and behind every tensor, checked after the call
constexpr unsigned char kGuardByte = 0xa5;

// Small integers in the types of a problem, as the bits of a tensor. Those of a 16-bit type are exact up to 256.
template <typename Bits, typename Real>
Bits bits_of(Real value) {
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

std::uint64_t encode(float value, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return bits_of<std::uint64_t>(double(value));
  const std::uint32_t bits = bits_of<std::uint32_t>(value);
  if (dtype == Dtype::kFloat32) return bits;
  if (dtype == Dtype::kBFloat16) return bits >> 16;
  return value == 0.0f ? 0 : (bits >> 16 & 0x8000u) | (((bits >> 23 & 0xffu) - 112u) << 10) | (bits >> 13 & 0x3ffu);
}

float decode(std::uint64_t bits, Dtype dtype) {
  if (dtype == Dtype::kFloat64) return float(bits_of<double>(bits));
  std::uint32_t single = std::uint32_t(bits);
  if (dtype == Dtype::kBFloat16) single <<= 16;
  if (dtype == Dtype::kFloat16) {
    const std::uint32_t low = single & 0x7fffu;
    single = (single & 0x8000u) << 16 | (low == 0 ? 0 : (low << 13) + (112u << 23));
  }
  return bits_of<float>(single) + 0.0f;  // no negative zero
}

// A tensor on the device with guard bands, allocated for itself alone.
class Buffer {
 public:
  Buffer(std::int64_t count, Dtype dtype) : dtype_(dtype), bytes_(count * element_bytes(dtype)) {
    const std::int64_t bytes = bytes_;
    check(cudaMalloc(&base_, std::size_t(bytes + 2 * kGuard)), "cudaMalloc");
    check(cudaMemset(base_, kGuardByte, std::size_t(bytes + 2 * kGuard)), "cudaMemset");
  }
  ~Buffer() { cudaFree(base_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return static_cast<char*>(base_) + kGuard; }
  void upload(const std::vector<float>& values) {
    const std::size_t element = std::size_t(element_bytes(dtype_));
    std::vector<unsigned char> bytes(values.size() * element);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::uint64_t bits = encode(values[i], dtype_);
      std::memcpy(&bytes[i * element], &bits, element);
    }
    check(cudaMemcpy(data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<float> download() const {
    const std::size_t element = std::size_t(element_bytes(dtype_));
    std::vector<unsigned char> bytes(static_cast<std::size_t>(bytes_));
    check(cudaMemcpy(bytes.data(), data(), bytes.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    std::vector<float> values(bytes.size() / element);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, &bytes[i * element], element);
      values[i] = decode(bits, dtype_);
    }
    return values;
  }
  bool guards_hold() const {
    std::vector<unsigned char> bands(std::size_t(2 * kGuard));
    check(cudaMemcpy(bands.data(), base_, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(bands.data() + kGuard, static_cast<char*>(data()) + bytes_, kGuard, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (const unsigned char byte : bands) {
      if (byte != kGuardByte) return false;
    }
    return true;
  }

 private:
  void* base_ = nullptr;
  Dtype dtype_;
  std::int64_t bytes_;
};

using Random = std::mt19937;
std::int64_t pick(Random& random, std::initializer_list<std::int64_t> values) {
  return values.begin()[std::uniform_int_distribution<std::size_t>(0, values.size() - 1)(random)];
}

std::vector<float> integers(Random& random, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = float(int(random() % 3) - 1);
  return values;
}

}  // namespace
}  // namespace upfold::cuda
