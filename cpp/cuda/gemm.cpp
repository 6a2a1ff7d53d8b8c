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

#include "cublas.h"
#include "finish_rows.h"
#include "gemm_moves.h"
#include "gemm_plan.h"
#include "im2row.h"
#include "launch.cuh"
#include "outer.h"
#include "products.h"
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

// What NVIDIA's documentation recommends: 32 MiB from Hopper on, less before. There products of 16-bit types take as long with
// one (H200), and a step of a small layer holds little beside; of TF32 some took three times as long with half.
std::int64_t cublas_bytes(int device, Dtype dtype) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return std::int64_t(major < 9 ? 8 : element_bytes(dtype) == 2 ? 1 : 32) << 20;
}

// This thread's handle, on the call's stream and with its workspace.
void* ready_handle(const Launch& launch, void* workspace, std::int64_t bytes) {
  void* const handle = cublas_handle(launch.device);
  check_cublas(cublas().set_stream(handle, reinterpret_cast<void*>(launch.stream)), "cublasSetStream");
  check_cublas(cublas().set_workspace(handle, workspace, std::size_t(bytes)), "cublasSetWorkspace");
  return handle;
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
        x_(pixel_matrix(p.x, p.in_channels, p.in_d, p.in_h, p.in_w)),
        products_(ready_handle(launch, operands.products != nullptr ? operands.products : operands.workspace, plan.cublas_bytes),
                  p.dtype, options.allow_tf32) {}

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
  // Samples are the pixels of the one product, which is y as it lies.
  void conv_transpose_whole() {
    const std::int64_t rows = out_channels_per_group(p_) * kernel_taps(p_), depth = in_channels_per_group(p_);
    const std::int64_t w_ld = std::max(p_.w.n, rows), x_ld = std::max(p_.x.n, p_.in_channels),
                       y_ld = std::max(p_.y.n, p_.out_channels * kernel_taps(p_));
    const Matrix w{operands_.w, p_.dtype, false, w_ld, 0, depth * w_ld}, x{operands_.x, p_.dtype, false, x_ld, 0, depth};
    const Sizes sizes{rows, p_.batch, depth, 1, p_.groups};
    if (!plan_.finishes) {
      products_.multiply(sizes, w, x, {operands_.y, p_.dtype, false, y_ld, 0, rows}, operands_.y, false);
      return;
    }
    const std::int64_t columns = p_.out_channels * kernel_taps(p_);
    const bool innermost = !weight_is_matrix(p_);
    products_.multiply(sizes, w, x, {nullptr, sum_dtype(p_.dtype), false, columns, 0, rows}, this->columns(), false);
    finish_rows(launch_, p_, {p_.batch, columns, p_.y.n, innermost ? p_.out_channels : kernel_taps(p_), innermost},
                this->columns(), operands_.bias, operands_.y);
  }

  // A pixel is a row of x, and of columns or y, whose order is the weight's.
  void run_by_rows() {
    const std::int64_t depth = p_.out_channels * kernel_taps(p_), pixels = p_.batch * in_pixels(p_), channels = p_.in_channels;
    const PixelMatrix y = pixel_matrix(p_.y, p_.out_channels, p_.out_d, p_.out_h, p_.out_w);
    if (!plan_.columns_are_y) im2row(launch_, p_, operands_.y, columns());
    const bool adjoint = p_.op == Operator::kConv, of_weight = p_.op == Operator::kConvTransposeWeight;
    const Matrix rows{columns(), p_.dtype, false, plan_.columns_are_y ? std::max(y.step, depth) : depth, 0, 0};
    const Matrix w{operands_.w, p_.dtype, adjoint, std::max(p_.w.n, depth), 0, 0};
    const Matrix x{operands_.x, p_.dtype, of_weight, std::max(x_.step, channels), 0, 0};
    if (adjoint) return products_.multiply({channels, pixels, depth, 1, 1}, w, rows, x, operands_.x, false);
    if (of_weight) return products_.multiply({depth, channels, pixels, 1, 1}, rows, x, w, operands_.w, false);
    products_.multiply({depth, pixels, channels, 1, 1}, w, x, rows, operands_.y, false);
  }

  void conv_transpose(const GemmBlock& block) {
    if (block.pixels > 0 && plan_.outer) {
      make_outer_columns(block);
    } else if (block.pixels > 0) {
      // The padding behind a copied x is multiplied too: what comes of it is not read, and tensor cores want multiples of 8.
      const std::int64_t pixels = plan_.copy_x ? block.columns.row_stride : product_pixels(block);
      const Sizes sizes{pixels, block.rows, in_channels_per_group(p_), product_samples(block), block.groups};
      products_.multiply(sizes, x_matrix(block), weight_matrix(block, true), columns_matrix(block, false), columns(), false);
    }
    if (plan_.columns_are_y) return;
    if (options_.atomic) {
      col2im_atomic(launch_, p_, block.columns, {columns(), operands_.bias, operands_.y, stage()});
    } else {
      col2im(launch_, p_, block.columns, column_strides(block), plan_.column_dtype, columns(), operands_.bias, operands_.y);
    }
  }

  ColumnStrides column_strides(const GemmBlock& block) const {
    if (!plan_.tap_rows) return dense_strides(p_, block.columns);
    const std::int64_t row = block.columns.row_stride, tap = p_.out_channels * row;
    return {row, p_.kernel_h * p_.kernel_w * tap, p_.kernel_w * tap, tap};
  }

  void run_windows() {
    const std::int64_t lines = p_.out_channels * p_.kernel_d * p_.kernel_h;
    void* const w = workspace(plan_.weight_at);
    if (p_.op == Operator::kConvTranspose) window_weight(launch_, p_, plan_.window, operands_.w, w);
    if (p_.op == Operator::kConv) window_weight_adjoint(launch_, p_, plan_.window, operands_.w, w);
    for (const GemmBlock& block : plan_.blocks) {
      if (block.pixels > 0 && p_.op != Operator::kConv) {
        window_pixels(launch_, p_, plan_.window, block.columns, operands_.x, workspace(plan_.x_at));
      }
      if (p_.op == Operator::kConvTranspose) {
        conv_transpose_windows(block, lines);
      } else if (p_.op == Operator::kConv) {
        conv_windows(block);
      } else {
        conv_transpose_weight_windows(block);
      }
    }
    if (p_.op == Operator::kConvTransposeWeight) window_weight_result(launch_, p_, plan_.window, stage(), operands_.w);
  }

  void conv_transpose_windows(const GemmBlock& block, std::int64_t lines) {
    const std::int64_t row = block.columns.row_stride;
    if (block.pixels > 0) multiply_windows(row, lines);
    const ColumnStrides strides{p_.kernel_d * p_.kernel_h * row, p_.kernel_h * row, row, lines * row};
    col2im(launch_, plan_.window.reduced, block.columns, strides, plan_.column_dtype, columns(), operands_.bias, operands_.y);
  }

  // columns = im2col(y); x = the sums over windows of what each gives to its pixels.
  void conv_windows(const GemmBlock& block) {
    const Window& window = plan_.window;
    const std::int64_t rows = block.rows, row = block.columns.row_stride, depth = p_.in_channels * window.taps;
    im2col(launch_, window.reduced, block.columns, plan_.column_dtype, operands_.y, columns());
    const Matrix weight{workspace(plan_.weight_at), p_.dtype, false, rows, 0, 0};
    const Matrix result{nullptr, sum_dtype(p_.dtype), false, row, 0, 0};
    products_.multiply({row, depth, rows, 1, 1}, columns_matrix(block, false), weight, result, stage(), false);
    moves_.sum_windows(block);
  }

  void conv_transpose_weight_windows(const GemmBlock& block) {
    const Window& window = plan_.window;
    const std::int64_t depth = window.taps * window.channels, pixels = block.samples * block.pixels;
    im2col(launch_, window.reduced, block.columns, plan_.column_dtype, operands_.y, columns());
    const Matrix x{workspace(plan_.x_at), p_.dtype, false, depth, 0, 0}, result{nullptr, sum_dtype(p_.dtype), false, depth, 0, 0};
    products_.multiply({depth, block.rows, pixels, 1, 1}, x, columns_matrix(block, false), result, stage(), !block.first_of_sum);
  }

  // One product, or one batch over the residues, for the phases that have all taps, one for the others.
  void multiply_windows(std::int64_t row, std::int64_t lines) {
    const Window& window = plan_.window;
    const std::int64_t size = element_bytes(p_.dtype), column_size = element_bytes(plan_.column_dtype);
    const std::int64_t batch = overlapping_batch(p_) ? window.residues : 1, residue = p_.stride_w * lines * row;
    const std::int64_t phases[2] = {window.full, p_.stride_w - window.full};
    std::int64_t weights = 0, rows = 0;
    for (int fewer = 0; fewer < 2; ++fewer) {
      const std::int64_t depth = (window.taps - fewer) * window.channels, count = phases[fewer] * lines;
      if (count == 0) continue;
      const Matrix weight{workspace(plan_.weight_at) + weights * size, p_.dtype, false, depth, 0, 0};
      for (std::int64_t r = 0; r < window.residues; r += batch) {
        const char* const from = workspace(plan_.x_at) + (fewer + r) * window.channels * size;
        const Matrix x{from, p_.dtype, true, window.taps * window.channels, window.channels, 0};
        const Matrix result{nullptr, plan_.column_dtype, false, row, residue, 0};
        char* const to = workspace(plan_.columns_at) + (rows * row + r * residue) * column_size;
        products_.multiply({row, count, depth, batch, 1}, x, weight, result, to, false);
      }
      weights += count * depth, rows += count;
    }
  }

  void make_outer_columns(const GemmBlock& block) {
    const Matrix x = x_matrix(block), w = weight_matrix(block, true);
    const OuterBlock outer{
        block.samples,           block.groups, block.rows, block.pixels, p_.x.n, p_.x.c, w.ld, block.columns.sample_stride,
        block.columns.row_stride};
    outer_columns(launch_, p_.dtype, outer, x.data, w.data, columns());
  }

  void conv(const GemmBlock& block) {
    make_columns(block);
    const std::int64_t per_group = in_channels_per_group(p_);
    if (plan_.stage) {
      const std::int64_t row = block.columns.row_stride;
      const Sizes sizes{product_pixels(block), per_group, block.rows, 1, block.groups};
      const Matrix result{stage(), plan_.stage_dtype, false, row, 0, per_group * row};
      products_.multiply(sizes, columns_matrix(block, false), weight_matrix(block, false), result, stage(), !block.first_of_sum);
      if (block.last_of_sum) moves_.unstage_x(block);
      return;
    }
    const Matrix x = x_matrix(block);
    void* const to = const_cast<void*>(x.data);
    if (x.transposed) {  // channels-last: the product is turned round
      const Sizes sizes{per_group, product_pixels(block), block.rows, product_samples(block), block.groups};
      Matrix w = weight_matrix(block, false);
      w.transposed = !w.transposed;
      products_.multiply(sizes, w, columns_matrix(block, true), x, to, !block.first_of_sum);
    } else {
      const Sizes sizes{product_pixels(block), per_group, block.rows, product_samples(block), block.groups};
      products_.multiply(sizes, columns_matrix(block, false), weight_matrix(block, false), x, to, !block.first_of_sum);
    }
  }

  void conv_transpose_weight(const GemmBlock& block) {
    make_columns(block);
    const std::int64_t per_group = in_channels_per_group(p_);
    const Sizes sizes{block.rows, per_group, product_pixels(block), 1, block.groups};
    Matrix result = weight_matrix(block, false);
    if (plan_.stage) result = {stage(), plan_.stage_dtype, false, block.rows, 0, per_group * block.rows};
    if (plan_.parts > 0) {
      multiply_parts(block);
      sum_parts(launch_, sum_dtype(p_.dtype), block.groups * per_group * block.rows, block.samples * plan_.parts,
                workspace(plan_.parts_at), const_cast<void*>(result.data), !block.first_of_sum);
    } else {
      products_.multiply(sizes, columns_matrix(block, true), x_matrix(block), result, const_cast<void*>(result.data),
                         !block.first_of_sum);
    }
    if (plan_.stage && block.last_of_sum) moves_.unstage_weight(block);
  }

  // A sum over the pixels of every part of every sample: one batch for all samples, or for the parts of each.
  void multiply_parts(const GemmBlock& block) {
    const Dtype dtype = sum_dtype(p_.dtype);
    const std::int64_t per_group = in_channels_per_group(p_), of_group = per_group * block.rows,
                       of_part = block.groups * of_group;
    Matrix columns = columns_matrix(block, true), x = x_matrix(block);
    const std::int64_t column_sample = columns.sample, x_sample = x.sample, pixels = block.pixels / plan_.parts;
    const bool whole = plan_.parts == 1;
    if (!whole) columns.sample = pixels, x.sample = x.transposed ? pixels * x.ld : pixels;
    const Sizes sizes{block.rows, per_group, pixels, whole ? block.samples : plan_.parts, block.groups};
    char* to = workspace(plan_.parts_at);
    for (std::int64_t n = 0; n < (whole ? 1 : block.samples); ++n, to += plan_.parts * of_part * element_bytes(dtype)) {
      products_.multiply(sizes, columns, x, {nullptr, dtype, false, block.rows, of_part, of_group}, to, false);
      columns.data = static_cast<const char*>(columns.data) + column_sample * element_bytes(columns.dtype);
      x.data = static_cast<const char*>(x.data) + x_sample * element_bytes(x.dtype);
    }
  }

  std::int64_t product_pixels(const GemmBlock& block) const { return plan_.flat ? block.samples * block.pixels : block.pixels; }
  std::int64_t product_samples(const GemmBlock& block) const { return plan_.flat ? 1 : block.samples; }

  char* workspace(std::int64_t at) const { return static_cast<char*>(operands_.workspace) + at; }
  void* columns() const {
    if (options_.given_columns) return operands_.columns;
    return plan_.columns_are_y ? operands_.y : workspace(plan_.columns_at);
  }
  void make_columns(const GemmBlock& block) const {
    if (!plan_.columns_are_y && !options_.given_columns)
      im2col(launch_, p_, block.columns, plan_.column_dtype, operands_.y, columns());
  }
  void* stage() const { return workspace(plan_.stage_at); }

  Matrix columns_matrix(const GemmBlock& block, bool transposed) const {
    const ColumnBlock& c = block.columns;
    if (plan_.columns_are_y) {  // of all channels and samples: without columns nothing is cut into blocks
      const std::int64_t row = std::max(p_.y.c, block.pixels);
      return {columns(), p_.dtype, transposed, row, p_.y.n, block.rows * row};
    }
    return {columns(), plan_.column_dtype, transposed, c.row_stride, plan_.flat ? 0 : c.sample_stride, block.rows * c.row_stride};
  }

  // As (oc * taps x in_channels of a group).
  Matrix weight_matrix(const GemmBlock& block, bool transposed) const {
    const std::int64_t size = element_bytes(p_.dtype), dense = out_channels_per_group(p_) * kernel_taps(p_);
    if (plan_.deep_weight) {
      const std::int64_t depth = in_channels_per_group(p_), first = (block.first_group * dense + block.first_row) * depth;
      return {workspace(plan_.weight_at) + first * size, p_.dtype, !transposed, depth, 0, dense * depth};
    }
    const std::int64_t ld = plan_.repack_weight || p_.in_channels == 1 || p_.w.n == 0 ? dense : p_.w.n;
    const char* data = plan_.repack_weight ? workspace(plan_.weight_at) : static_cast<const char*>(operands_.w);
    data += (block.first_group * in_channels_per_group(p_) * ld + block.first_row) * size;
    return {data, p_.dtype, transposed, ld, 0, in_channels_per_group(p_) * ld};
  }

  // The pixels of a block of x as (pixels x in_channels of a group), copied side by side first where the plan says so.
  Matrix x_matrix(const GemmBlock& block) {
    const std::int64_t size = element_bytes(p_.dtype), first = block.first_group * in_channels_per_group(p_);
    if (plan_.copy_x) {
      copy_x(block);
      if (plan_.deep_x) {
        const std::int64_t depth = in_channels_per_group(p_);
        return {workspace(plan_.x_at) + first * size, p_.dtype, true, p_.in_channels, 0, depth};
      }
      const std::int64_t row = block.columns.row_stride;
      return {workspace(plan_.x_at) + first * row * size, p_.dtype, false, row, 0, in_channels_per_group(p_) * row};
    }
    const ColumnBlock& c = block.columns;
    const std::int64_t at =
        c.n.begin * p_.x.n + c.in_d.begin * p_.x.d + c.in_h.begin * p_.x.h + c.in_w.begin * p_.x.w + first * x_.channel;
    const std::int64_t ld = x_.channels_fastest ? std::max(x_.step, p_.in_channels) : std::max(x_.channel, product_pixels(block));
    return {static_cast<const char*>(operands_.x) + at * size,
            p_.dtype,
            x_.channels_fastest,
            ld,
            plan_.flat ? 0 : x_.sample,
            in_channels_per_group(p_) * x_.channel};
  }

  // Neighbouring blocks often share their pixels.
  void copy_x(const GemmBlock& block) {
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
  const PixelMatrix x_;
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
      plan_(p.batch == 0 ? nullptr : std::make_shared<const GemmPlan>(plan_gemm(p, options, cublas_bytes(device, p.dtype)))) {}

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
