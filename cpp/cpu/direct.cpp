// The direct method.
#include <type_traits>

#include "isa.h"
#include "number.h"
#include "strict.h"

namespace upfold::cpu::UPFOLD_ISA {

std::int64_t direct_workspace_bytes(const Problem&, int) { return 0; }

void direct(const Problem& p, const Operands& operands, int threads) {
  with_element_type(p.dtype, [&](auto* element) { strict_direct<std::remove_pointer_t<decltype(element)>>(p, operands, threads); });
}

}  // namespace upfold::cpu::UPFOLD_ISA
