// The direct method: which of its kernels runs.
#include <type_traits>

#include "correlate.h"
#include "correlate_weight.h"
#include "depthwise.h"
#include "depthwise_pixels.h"
#include "isa.h"
#include "strict.h"

namespace upfold::cpu::UPFOLD_ISA {

std::int64_t direct_workspace_bytes(const Problem& p, int) {
  std::int64_t bytes = 0;
  with_element_type(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    bytes = p.op == Operator::kConvTransposeWeight ? correlate_weight_workspace_bytes<T>(p) : correlate_workspace_bytes<T>(p);
  });
  return bytes;
}

void direct(const Problem& p, const Operands& operands, int threads) {
  if (p.batch == 0 && p.op != Operator::kConvTransposeWeight) return;
  with_element_type(p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    if (p.op == Operator::kConvTransposeWeight) return correlate_weight<T>(p, operands, threads);
    if (is_depthwise_pixels<T>(p)) return depthwise_pixels_direct<T>(p, operands, threads);
    const auto blocked = is_depthwise<T>(p) ? depthwise_direct<T> : correlate_direct<T>;
    if (!blocked(p, operands, threads)) strict_direct<T>(p, operands, threads);
  });
}

}  // namespace upfold::cpu::UPFOLD_ISA
