// The functions that exist once per instruction set. Every file compiled for one of them puts all it defines into the namespace
// upfold::cpu::UPFOLD_ISA: an inline function shared by name would be merged by the linker, which may keep the copy that the
// processor cannot run.
#pragma once

#include "api.h"

namespace upfold::cpu {
constexpr int kFusedPackingFields = 8;  // entries of fused_packing() beside one for each tap
}

#define UPFOLD_DECLARE_KERNELS(isa)                                                                                           \
  namespace upfold::cpu::isa {                                                                                                \
  void col2im(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns, const void* bias, void* y, \
              int threads);                                                                                                   \
  void im2col(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y, void* columns, int threads);     \
  std::int64_t direct_workspace_bytes(const Problem& p, int threads);                                                         \
  void direct(const Problem& p, const Operands& operands, int threads);                                                       \
  std::int64_t fused_workspace_bytes(const Problem& p, int threads);                                                          \
  void fused(const Problem& p, const Operands& operands, int threads);                                                        \
  void fused_packing(const Problem& p, int threads, std::int64_t* layout);                                                    \
  void fused_pack(const Problem& p, const void* w, void* packed, int threads);                                                \
  void fused_packed(const Problem& p, const Operands& operands, int threads);                                                 \
  }

UPFOLD_DECLARE_KERNELS(portable)
UPFOLD_DECLARE_KERNELS(avx2)
UPFOLD_DECLARE_KERNELS(avx512)

#undef UPFOLD_DECLARE_KERNELS
