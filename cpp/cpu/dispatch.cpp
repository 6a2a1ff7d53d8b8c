// Checks the arguments and hands them to the variant of the kernels that fits the processor.
#include <cstdlib>
#include <cstring>

#include "../error.h"
#include "isa.h"
#include "pages.h"

#if defined(_MSC_VER) && defined(_M_X64)
#include <immintrin.h>
#include <intrin.h>
#endif

namespace upfold::cpu {
namespace {

enum class Isa { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512"};

#if defined(_MSC_VER) && defined(_M_X64)
Isa processor_isa() {
  int info[4];
  __cpuid(info, 1);
  const bool f16c_fma_osxsave = (info[2] & (1 << 29)) && (info[2] & (1 << 12)) && (info[2] & (1 << 27));
  if (!f16c_fma_osxsave) return Isa::kPortable;
  const unsigned long long enabled = _xgetbv(0);
  __cpuidex(info, 7, 0);
  const int avx512 = (1 << 16) | (1 << 17) | (1 << 30) | (1 << 31);  // F, DQ, BW, VL
  if ((info[1] & (1 << 5)) == 0 || (enabled & 0x6) != 0x6) return Isa::kPortable;
  return (info[1] & avx512) == avx512 && (enabled & 0xe6) == 0xe6 ? Isa::kAvx512 : Isa::kAvx2;
}
#elif defined(__x86_64__)
Isa processor_isa() {
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return Isa::kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
}
#else
Isa processor_isa() { return Isa::kPortable; }
#endif

bool is_built(Isa isa) {
#if defined(UPFOLD_HAVE_avx512)
  if (isa == Isa::kAvx512) return true;
#endif
#if defined(UPFOLD_HAVE_avx2)
  if (isa == Isa::kAvx2) return true;
#endif
  return isa == Isa::kPortable;
}

Isa choose_isa() {
  int isa = static_cast<int>(processor_isa());
  const char* wanted = std::getenv("UPFOLD_CPU_ISA");
  if (wanted != nullptr && *wanted != '\0') {
    int limit = 0;
    while (limit < 3 && std::strcmp(wanted, kIsaNames[limit]) != 0) ++limit;
    require(limit < 3, "UPFOLD_CPU_ISA = ", wanted, "; must be portable, avx2 or avx512");
    if (limit < isa) isa = limit;
  }
  while (!is_built(static_cast<Isa>(isa))) --isa;
  return static_cast<Isa>(isa);
}

Isa chosen_isa() {
  static const Isa isa = choose_isa();
  return isa;
}

void check(const Problem& p) {
  const std::int32_t op = static_cast<std::int32_t>(p.op), dtype = static_cast<std::int32_t>(p.dtype);
  const std::int32_t activation = static_cast<std::int32_t>(p.activation);
  require(op >= 0 && op <= 2, "op = ", op, "; must be 0, 1 or 2");
  require(dtype >= 0 && dtype <= 5, "dtype = ", dtype, "; must be 0 to 5");
  require(activation >= 0 && activation <= 7, "activation = ", activation, "; must be 0 to 7");
  require(activation == 0 || dtype <= 3, "activation = ", activation, "; not defined for complex dtype ", dtype);
  require(p.batch >= 0 && p.groups >= 1 && p.in_channels >= 1 && p.out_channels >= 1, "batch = ", p.batch,
          ", groups = ", p.groups, ", in_channels = ", p.in_channels, ", out_channels = ", p.out_channels, "; must be positive");
  require(p.in_channels % p.groups == 0 && p.out_channels % p.groups == 0, "groups = ", p.groups,
          "; must divide in_channels = ", p.in_channels, " and out_channels = ", p.out_channels);
  for (const Axis& a : {axis_d(p), axis_h(p), axis_w(p)}) {
    require(a.in >= 1 && a.out >= 1 && a.kernel >= 1 && a.stride >= 1 && a.dilation >= 1 && a.pad >= 0, "axis (in ", a.in,
            ", out ", a.out, ", kernel ", a.kernel, ", stride ", a.stride, ", pad ", a.pad, ", dilation ", a.dilation,
            "); sizes must be positive and pad not negative");
  }
}

void check(const Problem& p, const ColumnBlock& block, Dtype column_dtype) {
  check(p);
  const bool widened = column_dtype == Dtype::kFloat32 && (p.dtype == Dtype::kFloat16 || p.dtype == Dtype::kBFloat16);
  require(column_dtype == p.dtype || widened, "column_dtype = ", static_cast<std::int32_t>(column_dtype),
          "; dtype = ", static_cast<std::int32_t>(p.dtype), " needs its own, or float32 for 16-bit types");
  const auto inside = [](const Range& r, std::int64_t size, const char* name) {
    require(r.begin >= 0 && r.begin <= r.end && r.end <= size, name, " = [", r.begin, ", ", r.end, "); must lie within [0, ",
            size, ")");
  };
  inside(block.n, p.batch, "n");
  inside(block.oc, p.out_channels, "oc");
  inside(block.in_d, p.in_d, "in_d");
  inside(block.in_h, p.in_h, "in_h");
  inside(block.in_w, p.in_w, "in_w");
  inside(block.out_d, p.out_d, "out_d");
  inside(block.out_h, p.out_h, "out_h");
  inside(block.out_w, p.out_w, "out_w");
  const std::int64_t pixels = length(block.in_d) * length(block.in_h) * length(block.in_w);
  require(block.row_stride >= pixels, "row_stride = ", block.row_stride, "; must be at least the ", pixels,
          " pixels of the block");
}

void check_fused(const Problem& p) {
  const std::int32_t dtype = static_cast<std::int32_t>(p.dtype);
  require(dtype == 0 || dtype == 2 || dtype == 3, "dtype = ", dtype, "; fused takes float32, float16 and bfloat16");
}

void check_packed(const Problem& p) {
  check(p);
  check_fused(p);
  require(p.op == Operator::kConvTranspose, "op = ", static_cast<std::int32_t>(p.op), "; only weights of op 0 are packed apart");
}

// Whether the copy of a weight, or the sums of its gradient, may be large enough for large pages: they are fresh memory too.
bool has_large_weight(const Problem& p) {
  constexpr std::int64_t kLargeWeight = std::int64_t{4} << 20;  // elements
  return p.in_channels * (p.out_channels / p.groups) * kernel_taps(p) >= kLargeWeight;
}
void advise_large_pages(void* floats, std::int64_t bytes) {
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(float));
  upfold::cpu::advise_large_pages(floats, {1, 1, 1, 1, count}, {0, 0, 0, 0, 1}, Dtype::kFloat32);
}

// For the result of a large problem.
void advise_large_pages(const Problem& p, const Operands& operands) {
  if (p.op == Operator::kConvTranspose) {
    upfold::cpu::advise_large_pages(operands.y, {p.batch, p.out_channels, p.out_d, p.out_h, p.out_w}, p.y, p.dtype);
  } else if (p.op == Operator::kConv) {
    upfold::cpu::advise_large_pages(operands.x, {p.batch, p.in_channels, p.in_d, p.in_h, p.in_w}, p.x, p.dtype);
  } else {
    const Strides sizes{p.in_channels, p.out_channels / p.groups, p.kernel_d, p.kernel_h, p.kernel_w};
    upfold::cpu::advise_large_pages(operands.w, sizes, p.w, p.dtype);
  }
}

}  // namespace

#if defined(UPFOLD_HAVE_avx512) && defined(UPFOLD_HAVE_avx2)
#define UPFOLD_CALL(function, ...)            \
  switch (chosen_isa()) {                     \
    case Isa::kAvx512:                        \
      return avx512::function(__VA_ARGS__);   \
    case Isa::kAvx2:                          \
      return avx2::function(__VA_ARGS__);     \
    default:                                  \
      return portable::function(__VA_ARGS__); \
  }
#else
#define UPFOLD_CALL(function, ...) return portable::function(__VA_ARGS__)
#endif

void col2im(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* columns, const void* bias, void* y,
            int threads) {
  check(p, block, column_dtype);
  if (length(block.out_w) == 0) return;
  advise_large_pages(y, {p.batch, p.out_channels, p.out_d, p.out_h, p.out_w}, p.y, p.dtype);
  UPFOLD_CALL(col2im, p, block, column_dtype, columns, bias, y, threads);
}

void im2col(const Problem& p, const ColumnBlock& block, Dtype column_dtype, const void* y, void* columns, int threads) {
  check(p, block, column_dtype);
  if (length(block.in_w) == 0) return;
  advise_large_pages(columns, {length(block.n), 1, 1, 1, block.sample_stride}, {block.sample_stride, 0, 0, 0, 1}, column_dtype);
  UPFOLD_CALL(im2col, p, block, column_dtype, y, columns, threads);
}

std::int64_t direct_workspace_bytes(const Problem& p, int threads) {
  check(p);
  UPFOLD_CALL(direct_workspace_bytes, p, threads);
}

void direct(const Problem& p, const Operands& operands, int threads) {
  check(p);
  advise_large_pages(p, operands);
  UPFOLD_CALL(direct, p, operands, threads);
}

std::int64_t fused_workspace_bytes(const Problem& p, int threads) {
  check(p);
  check_fused(p);
  UPFOLD_CALL(fused_workspace_bytes, p, threads);
}

void fused(const Problem& p, const Operands& operands, int threads) {
  check(p);
  check_fused(p);
  advise_large_pages(p, operands);
  if (has_large_weight(p)) advise_large_pages(operands.workspace, fused_workspace_bytes(p, threads));
  UPFOLD_CALL(fused, p, operands, threads);
}

std::vector<std::int64_t> fused_packing(const Problem& p, int threads) {
  check_packed(p);
  std::vector<std::int64_t> layout(static_cast<std::size_t>(kFusedPackingFields + kernel_taps(p)));
  const auto fill = [&] { UPFOLD_CALL(fused_packing, p, threads, layout.data()); };
  fill();
  return layout;
}

void fused_pack(const Problem& p, const void* w, void* packed, int threads) {
  check_packed(p);
  if (has_large_weight(p)) advise_large_pages(packed, fused_packing(p, threads)[0]);
  UPFOLD_CALL(fused_pack, p, w, packed, threads);
}

void fused_packed(const Problem& p, const Operands& operands, int threads) {
  check_packed(p);
  advise_large_pages(p, operands);
  UPFOLD_CALL(fused_packed, p, operands, threads);
}

std::string instruction_set() { return kIsaNames[static_cast<int>(chosen_isa())]; }

}  // namespace upfold::cpu
