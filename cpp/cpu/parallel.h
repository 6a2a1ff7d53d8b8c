// Threads and per-thread scratch memory for the kernels. Compiled once, outside the instruction-set variants.
#pragma once

#include <cstddef>
#include <cstdint>

namespace upfold::cpu {

// Calls body(context, begin, end) until the ranges cover [0, units), from at most `threads` threads at once. How the units are
// cut into ranges depends on the thread count, so a body must give the same result for a unit in whatever range it arrives. The
// first exception thrown by a body is thrown again here, after every thread has stopped.
using RangeBody = void (*)(void* context, std::int64_t begin, std::int64_t end);
void parallel_ranges(std::int64_t units, int threads, void* context, RangeBody body);

// 64-byte aligned, uninitialised memory of the calling thread. A buffer of moderate size stays with the thread for its next call,
// because fresh pages cost more than the rows that are computed in them.
class Scratch {
 public:
  explicit Scratch(std::int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  unsigned char* data() const { return data_; }

 private:
  void* owned_;
  unsigned char* data_;
};

// The wrapper has internal linkage: it is instantiated in files compiled for different instruction sets.
template <typename Body>
static void parallel_for(std::int64_t units, int threads, const Body& body) {
  parallel_ranges(units, threads, const_cast<Body*>(&body),
                  [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<const Body*>(context))(begin, end); });
}

}  // namespace upfold::cpu
