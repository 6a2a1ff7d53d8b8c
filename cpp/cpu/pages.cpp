#include "pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace upfold::cpu {

void advise_large_pages(const void* data, const Strides& sizes, const Strides& strides, Dtype dtype) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kLargePage = std::uintptr_t{2} << 20;
  // From about this size on, the C library's allocator maps fresh pages for every tensor; smaller blocks are used again.
  constexpr std::int64_t kWorthwhile = std::int64_t{32} << 20;
  constexpr std::int64_t kElementBytes[] = {4, 8, 2, 2, 8, 16};
  const std::int64_t last = (sizes.n - 1) * strides.n + (sizes.c - 1) * strides.c + (sizes.d - 1) * strides.d +
                            (sizes.h - 1) * strides.h + (sizes.w - 1) * strides.w;
  const std::int64_t bytes = (last + 1) * kElementBytes[static_cast<int>(dtype)];
  if (bytes < kWorthwhile) return;
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage;
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(data), static_cast<void>(sizes), static_cast<void>(strides), static_cast<void>(dtype);
#endif
}

}  // namespace upfold::cpu
