// GEMM + col2im: one matrix product makes the columns, col2im sums them; the adjoints run the same way backwards.
//
//   conv_transpose          columns = w^T x;      y = col2im(columns) + bias
//   conv                    columns = im2col(y);  x = w columns
//   conv_transpose_weight   columns = im2col(y);  w = sum over samples and pixels of x columns^T
//
// Where channels are innermost throughout, all by rows of channels: columns = im2row(y). Products are written for column-major
// cuBLAS: a matrix of channels whose pixels are dense is (pixels x channels) to it, and the weight (in_channels, oc * taps) is
// (oc * taps x in_channels). Nothing here waits for the device or allocates on it.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>

#include "chosen_products.h"
#include "cublas.h"
#include "finish_rows.h"
#include "gemm_moves.h"
#include "gemm_plan.h"
#include "gemm_products.h"
#include "im2row.h"
#include "launch.cuh"
#include "outer.h"
#include "sum_parts.h"

namespace upfold::cuda {
namespace {

// Lets this thread allocate (a handle, a module on first use) while its stream is being captured.
class RelaxedCapture {
 public:
  RelaxedCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// What a product may work in, as NVIDIA's documentation recommends: 32 MiB from Hopper on, less before.
std::int64_t recommended_bytes(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return std::int64_t(major < 9 ? 8 : 32) << 20;
}

// What blocks leave for that: of 16-bit types one MiB, as most of their products take as long with it, and the columns gain.
std::int64_t cublas_bytes(int device, Dtype dtype) {
  const std::int64_t recommended = recommended_bytes(device);
  return element_bytes(dtype) == 2 && recommended == std::int64_t(32) << 20 ? std::int64_t(1) << 20 : recommended;
}

constexpr std::int64_t kLeastCublas = std::int64_t(1) << 16;  // with less than 16 KiB cuBLAS may refuse a product

// Whether cuBLASLt chooses how products run, which then take what they need; measured for TF32 and 16 bits.
bool is_chosen(const GemmPlan& plan, Dtype dtype) {
  const bool measured = dtype == Dtype::kFloat32 || element_bytes(dtype) == 2;
  return plan.possible && measured && plan.cublas_bytes > kLeastCublas && cublas_lt() != nullptr;
}

// What a product may work in beside a plan's other parts. Where columns are given it is as much as where they are not, so that
// the same products run alike.
std::int64_t most_bytes(int device, const Problem& p, const GemmOptions& options, const GemmPlan& plan) {
  const std::int64_t most = aligned(std::min(recommended_bytes(device), options.workspace_cap / 4));
  GemmOptions apart = options;
  apart.given_columns = false;
  const std::int64_t total =
      options.given_columns ? plan_gemm(p, apart, cublas_bytes(device, p.dtype)).total_bytes : plan.total_bytes;
  return total - plan.cublas_bytes + most <= options.workspace_cap ? most : plan.cublas_bytes;
}

// Has a plan's products chosen for operands that are aligned as is said, but for what a product begins behind.
void choose_products(int device, const Problem& p, const GemmOptions& options, std::int64_t most, GemmPlan& plan) {
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  const auto chosen = std::make_shared<ChosenProducts>(*cublas_lt(), most);
  const Products products(cublas_handle(device), p.dtype, options.allow_tf32);
  const std::uintptr_t somewhere = 1 << 8;
  void* const room = reinterpret_cast<void*>(somewhere);
  void* const given = reinterpret_cast<void*>(somewhere + std::uintptr_t(options.alignment));
  const GemmOperands operands{given, given, nullptr, given, room, room};
  GemmProducts(p, options, plan, operands).all([&](const Product& product) { products.choose(product, *chosen); });
  plan.chosen = chosen;
  // What was not chosen goes to cuBLAS, which has what blocks left for it.
  const std::int64_t left = chosen->whole() ? 0 : plan.cublas_bytes;
  take_cublas_bytes(plan, std::max({kLeastCublas, chosen->bytes(), left}));
}

GemmPlan plan_on(int device, const Problem& p, const GemmOptions& options) {
  GemmPlan plan = plan_gemm(p, options, cublas_bytes(device, p.dtype));
  if (!is_chosen(plan, p.dtype)) return plan;
  Problem planes = p;
  if (plan.to_planes) planes.y = plan.y;
  choose_products(device, planes, options, most_bytes(device, p, options, plan), plan);
  return plan;
}

// This thread's handle, on the call's stream and with its workspace.
void* ready_handle(const Launch& launch, void* workspace, std::int64_t bytes) {
  void* const handle = cublas_handle(launch.device);
  check_cublas(cublas().set_stream(handle, reinterpret_cast<void*>(launch.stream)), "cublasSetStream");
  check_cublas(cublas().set_workspace(handle, workspace, std::size_t(bytes)), "cublasSetWorkspace");
  return handle;
}

void* room_of_products(const GemmOperands& operands) {
  return operands.products != nullptr ? operands.products : operands.workspace;
}

// One call: the operands, the parts of the workspace, and the products on the call's stream.
class Call {
 public:
  Call(const Launch& launch, const Problem& p, const GemmOptions& options, const GemmPlan& plan, const GemmOperands& operands)
      : launch_(launch),
        p_(p),
        options_(options),
        operands_(operands),
        plan_(plan),
        moves_(launch, p, plan, operands),
        list_(p, options, plan, operands),
        products_(ready_handle(launch, room_of_products(operands), plan.cublas_bytes), p.dtype, options.allow_tf32,
                  plan.chosen.get(), room_of_products(operands), launch.stream) {}

  void run() {
    if (plan_.to_result) return conv_transpose_whole();
    if (plan_.by_rows) return run_by_rows();
    if (plan_.window.taps > 0) return run_windows();
    moves_.copy_weight();
    for (const GemmBlock& block : plan_.blocks) {
      if (p_.op == Operator::kConvTranspose) {
        conv_transpose(block);
      } else if (p_.op == Operator::kConv) {
        conv(block);
      } else {
        conv_transpose_weight(block);
      }
    }
  }

 private:
  void conv_transpose_whole() {
    products_.multiply(list_.to_result());
    if (!plan_.finishes) return;
    const std::int64_t columns = p_.out_channels * kernel_taps(p_);
    const bool innermost = !weight_is_matrix(p_);
    finish_rows(launch_, p_, {p_.batch, columns, p_.y.n, innermost ? p_.out_channels : kernel_taps(p_), innermost},
                list_.columns(), operands_.bias, operands_.y);
  }

  void run_by_rows() {
    if (!plan_.columns_are_y) im2row(launch_, p_, operands_.y, list_.columns());
    products_.multiply(list_.by_rows());
  }

  void multiply(const GemmBlock& block) const {
    list_.of_block(block, [this](const Product& product) { products_.multiply(product); });
  }

  void conv_transpose(const GemmBlock& block) {
    if (block.pixels > 0) {
      copy_x(block);
      plan_.outer ? make_outer_columns(block) : multiply(block);
    }
    if (plan_.columns_are_y) return;
    void* const columns = list_.columns();
    if (options_.atomic) {
      col2im_atomic(launch_, p_, block.columns, {columns, operands_.bias, operands_.y, list_.stage()});
    } else {
      col2im(launch_, p_, block.columns, column_strides(block), plan_.column_dtype, columns, operands_.bias, operands_.y);
    }
  }

  ColumnStrides column_strides(const GemmBlock& block) const {
    if (!plan_.tap_rows) return dense_strides(p_, block.columns);
    const std::int64_t row = block.columns.row_stride, tap = p_.out_channels * row;
    return {row, p_.kernel_h * p_.kernel_w * tap, p_.kernel_w * tap, tap};
  }

  void run_windows() {
    void* const w = list_.workspace(plan_.weight_at);
    if (p_.op == Operator::kConvTranspose) window_weight(launch_, p_, plan_.window, operands_.w, w);
    if (p_.op == Operator::kConv) window_weight_adjoint(launch_, p_, plan_.window, operands_.w, w);
    for (const GemmBlock& block : plan_.blocks) {
      if (block.pixels > 0 && p_.op != Operator::kConv) {
        window_pixels(launch_, p_, plan_.window, block.columns, operands_.x, list_.workspace(plan_.x_at));
      }
      if (p_.op != Operator::kConvTranspose) {
        im2col(launch_, plan_.window.reduced, block.columns, plan_.column_dtype, operands_.y, list_.columns());
      }
      multiply(block);
      if (p_.op == Operator::kConvTranspose) sum_window_columns(block);
      if (p_.op == Operator::kConv) moves_.sum_windows(block);
    }
    if (p_.op == Operator::kConvTransposeWeight) window_weight_result(launch_, p_, plan_.window, list_.stage(), operands_.w);
  }

  void sum_window_columns(const GemmBlock& block) const {
    const std::int64_t row = block.columns.row_stride, lines = p_.out_channels * p_.kernel_d * p_.kernel_h;
    const ColumnStrides strides{p_.kernel_d * p_.kernel_h * row, p_.kernel_h * row, row, lines * row};
    col2im(launch_, plan_.window.reduced, block.columns, strides, plan_.column_dtype, list_.columns(), operands_.bias,
           operands_.y);
  }

  void make_outer_columns(const GemmBlock& block) {
    const Matrix x = list_.x_matrix(block), w = list_.weight_matrix(block, true);
    const OuterBlock outer{
        block.samples,           block.groups, block.rows, block.pixels, p_.x.n, p_.x.c, w.ld, block.columns.sample_stride,
        block.columns.row_stride};
    outer_columns(launch_, p_.dtype, outer, x.data, w.data, list_.columns());
  }

  void conv(const GemmBlock& block) {
    make_columns(block);
    multiply(block);
    if (plan_.stage && block.last_of_sum) moves_.unstage_x(block);
  }

  void conv_transpose_weight(const GemmBlock& block) {
    make_columns(block);
    copy_x(block);
    multiply(block);
    if (plan_.parts > 0) {
      sum_parts(launch_, sum_dtype(p_.dtype), block.groups * in_channels_per_group(p_) * block.rows, block.samples * plan_.parts,
                list_.workspace(plan_.parts_at), list_.result_weight(block), !block.first_of_sum);
    }
    if (plan_.stage && block.last_of_sum) moves_.unstage_weight(block);
  }

  void make_columns(const GemmBlock& block) const {
    if (!plan_.columns_are_y && !options_.given_columns)
      im2col(launch_, p_, block.columns, plan_.column_dtype, operands_.y, list_.columns());
  }

  // Where the plan says so. Neighbouring blocks often share their pixels.
  void copy_x(const GemmBlock& block) {
    if (!plan_.copy_x) return;
    const ColumnBlock& c = block.columns;
    const std::array<std::int64_t, 7> key{c.n.begin,  c.in_d.begin, c.in_d.end, c.in_h.begin,
                                          c.in_h.end, c.in_w.begin, c.in_w.end};
    if (key == copied_) return;
    copied_ = key;
    moves_.copy_x(block);
  }

  const Launch& launch_;
  const Problem& p_;
  const GemmOptions& options_;
  const GemmOperands& operands_;
  const GemmPlan& plan_;
  const GemmMoves moves_;
  const GemmProducts list_;
  const Products products_;
  std::array<std::int64_t, 7> copied_{-1};  // the range of samples (its begin) and pixels that lies in the workspace
};

}  // namespace

void gemm_prepare(int device) {
  const DeviceScope scope(device);
  const RelaxedCapture relaxed;
  cublas_handle(device);
}

GemmCall::GemmCall(int device, const Problem& p, const GemmOptions& options)
    : device_(device),
      problem_(p),
      options_(options),
      plan_(p.batch == 0 ? nullptr : std::make_shared<const GemmPlan>(plan_on(device, p, options))) {}

std::int64_t GemmCall::workspace_bytes() const {
  if (plan_ == nullptr) return 0;
  return plan_->possible ? plan_->total_bytes : -1;
}

void GemmCall::run(const GemmOperands& operands, std::uintptr_t stream) const {
  if (plan_ == nullptr) return;
  require(plan_->possible, "workspace_cap = ", options_.workspace_cap, "; the smallest block takes ", plan_->total_bytes,
          " bytes");
  require((operands.bias != nullptr) == options_.has_bias, "bias is ", operands.bias == nullptr ? "absent" : "given",
          "; it was planned otherwise");
  const DeviceScope scope(device_);
  const RelaxedCapture relaxed;
  const Launch launch{device_, stream};
  if (!plan_->to_planes) return Call(launch, problem_, options_, *plan_, operands).run();
  Problem planes = problem_;
  planes.y = plan_->y;
  GemmOperands own = operands;
  own.y = static_cast<char*>(operands.workspace) + plan_->planes_at;
  to_planes(launch, problem_.dtype, plan_->pixels, operands.y, own.y);
  Call(launch, planes, options_, *plan_, own).run();
}

}  // namespace upfold::cuda
