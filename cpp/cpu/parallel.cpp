#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "api.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(_OPENMP) && (defined(__unix__) || defined(__APPLE__))
#include <pthread.h>
#define UPFOLD_HAVE_FORK 1
#endif

namespace upfold::cpu {
namespace {

#if defined(_OPENMP)
// An OpenMP runtime keeps a pool of threads that a forked child does not have, and libgomp waits for them for ever.
std::atomic<bool> is_forked_child{false};
#endif

#if defined(UPFOLD_HAVE_FORK)
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { is_forked_child.store(true); });
#endif

// Ranges per thread: enough that a thread held up by the system does not hold up the rest.
constexpr std::int64_t kRangesPerThread = 8;

class Job {
 public:
  Job(std::int64_t units, int threads, void* context, RangeBody body)
      : units_(units), ranges_(std::min(units, threads * kRangesPerThread)), context_(context), body_(body) {}

  void work() noexcept {
    try {
      for (std::int64_t range = next_++; range < ranges_; range = next_++) {
        body_(context_, units_ / ranges_ * range + std::min(range, units_ % ranges_),
              units_ / ranges_ * (range + 1) + std::min(range + 1, units_ % ranges_));
      }
    } catch (...) {
      next_.store(ranges_);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::int64_t units_, ranges_;
  void* const context_;
  const RangeBody body_;
  std::atomic<std::int64_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

void run_on_plain_threads(Job& job, int threads) {
  std::vector<std::thread> team;
  team.reserve(static_cast<std::size_t>(threads) - 1);
  try {
    for (int i = 1; i < threads; ++i) team.emplace_back([&job] { job.work(); });
  } catch (const std::system_error&) {
    // The system refused a thread: those that exist do the work.
  }
  job.work();
  for (std::thread& thread : team) thread.join();
}

struct ThreadBuffer {
  void* memory = nullptr;
  std::int64_t bytes = 0;
  bool busy = false;
  ~ThreadBuffer() { std::free(memory); }
};
thread_local ThreadBuffer thread_buffer;

constexpr std::int64_t kAlignment = 64;
constexpr std::int64_t kLargestKept = std::int64_t{16} << 20;

void* allocate(std::int64_t bytes) {
  void* memory = std::malloc(static_cast<std::size_t>(bytes + kAlignment));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void parallel_ranges(std::int64_t units, int threads, void* context, RangeBody body) {
  if (units <= 0) return;
  threads = static_cast<int>(std::min<std::int64_t>(threads, units));
#if defined(_OPENMP)
  if (omp_in_parallel()) threads = 1;
#endif
  if (threads <= 1) {
    body(context, 0, units);
    return;
  }
  Job job(units, threads, context, body);
#if defined(_OPENMP)
  if (!is_forked_child.load(std::memory_order_relaxed)) {
#pragma omp parallel num_threads(threads)
    job.work();
  } else {
    run_on_plain_threads(job, threads);
  }
#else
  run_on_plain_threads(job, threads);
#endif
  job.rethrow();
}

Scratch::Scratch(std::int64_t bytes) : owned_(nullptr), data_(nullptr) {
  ThreadBuffer& buffer = thread_buffer;
  void* memory;
  if (buffer.busy || bytes > kLargestKept) {
    memory = owned_ = allocate(bytes);
  } else {
    if (buffer.bytes < bytes) {
      std::free(buffer.memory);
      buffer.memory = nullptr;
      buffer.bytes = 0;
      buffer.memory = allocate(bytes);
      buffer.bytes = bytes;
    }
    buffer.busy = true;
    memory = buffer.memory;
  }
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(memory);
  data_ = static_cast<unsigned char*>(memory) + (kAlignment - address % kAlignment) % kAlignment;
}

Scratch::~Scratch() {
  if (owned_ != nullptr) {
    std::free(owned_);
  } else {
    thread_buffer.busy = false;
  }
}

std::string threading() {
#if defined(_OPENMP)
  return "openmp";
#else
  return "std::thread";
#endif
}

}  // namespace upfold::cpu
